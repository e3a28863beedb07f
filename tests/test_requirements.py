"""The lock: what `pip check` would say, but for the one complaint that is wrong (requirements/common.txt)."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "requirements"
LINE = re.compile(r"([a-z0-9-]+)(={2,3})(\S+)(?: +--hash=sha256:[0-9a-f]{64})+ *")
BUILDS = ("2.13.0", "2.13.0+cpu", "2.13.0+cu130")
LISTS = ("cpu", "cpu-public", "cuda")
"""What `make install` chooses from."""


def requirements_of(file: str) -> list[Requirement]:
    """The requirements of a list and what it includes."""
    found: list[Requirement] = []
    for line in (FOLDER / file).read_text().replace("\\\n", "").splitlines():
        if line.startswith("-r "):
            found += requirements_of(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            found.append(Requirement("".join(LINE.fullmatch(line).groups())))  # type: ignore[union-attr]
    return found


def locked(file: str) -> dict[str, str]:
    """Name to version, of a list and what it includes."""
    return {each.name: next(iter(each.specifier)).version for each in requirements_of(file)}


def installed(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


@pytest.mark.parametrize("name", [*LISTS, "dev", "docs", "serve"])
def test_every_line_is_one_exact_version_with_hashes(name: str) -> None:
    assert locked(f"{name}.txt")


@pytest.mark.parametrize(("list_", "torch"), [("cpu", "2.13.0+cpu"), ("cpu-public", "2.13.0"), ("cuda", "2.13.0")])
def test_a_list_takes_its_build_of_torch_from_whatever_indexes_pip_sees(list_: str, torch: str) -> None:
    """`torch==2.13.0` is 2.13.0+cpu, too, and pip prefers that: it counts as newer."""
    (requirement,) = (each for each in requirements_of(f"{list_}.txt") if each.name == "torch")
    assert list(requirement.specifier.filter(BUILDS)) == [torch]


def test_the_extra_for_gpus_takes_no_torch_for_the_cpu() -> None:
    extras = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = (each for each in map(Requirement, extras["train"]) if each.name == "torch")
    assert list(requirement.specifier.filter(BUILDS)) == ["2.13.0", "2.13.0+cu130"]


def instructions() -> list[str]:
    """Those of the Dockerfile, each in one line."""
    text = (FOLDER.parent / "Dockerfile").read_text()
    return re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines()


@pytest.mark.parametrize("torch", ["cpu", "cuda"])
def test_the_image_for_serving_installs_what_it_needs_with_hashes_and_no_arrow(torch: str) -> None:
    (made,) = (line for line in instructions() if "/opt/serve install" in line and "requirements/" in line)
    assert " --no-deps --require-hashes " in made
    pins: set[str] = set()
    for file in re.findall(r"--requirement requirements/(\S+)", made):
        pins |= locked(file.replace("$TORCH", torch)).keys()
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    needed = list(map(Requirement, project["dependencies"] + project["optional-dependencies"]["serve"]))
    packages = {"duckdb", "pyarrow"}  # which serving does not import
    while needed:
        wanted = needed.pop()
        name = canonicalize_name(wanted.name)
        if name in packages or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        packages.add(name)
        needed += map(Requirement, distribution(name).requires or [])
    assert packages - {"duckdb", "pyarrow"} <= pins
    unneeded = {name for name in pins - packages if not name.startswith(("cuda-", "nvidia-", "triton"))}
    assert not unneeded
    assert {"fastapi", "numpy", "safetensors", "torch", "uvicorn"} <= pins


def test_actions_of_the_workflows_are_pinned_by_commit() -> None:
    used = [
        line.partition("uses:")[2].strip()
        for file in (FOLDER.parent / ".github/workflows").glob("*.yml")
        for line in file.read_text().splitlines()
        if "uses:" in line
    ]
    assert used and not [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)]


@pytest.mark.long
def test_the_lock_is_installed_and_complete() -> None:
    candidates = [locked(f"{name}.txt") | locked("dev.txt") for name in LISTS]
    pins = min(candidates, key=lambda pins: sum(installed(name) != pins[name] for name in pins))
    assert {name: installed(name) for name in pins} == pins
    unmet = []
    for name in pins:
        for wanted in map(Requirement, distribution(name).requires or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                version = pins.get(canonicalize_name(wanted.name))
                if version is None or not wanted.specifier.contains(version):
                    unmet.append(f"{name} requires {wanted}")
    assert unmet == (["torchrec requires fbgemm-gpu"] if "fbgemm-gpu-cpu" in pins else [])
