"""The lock: what `pip check` would say, but for the one complaint that is wrong (requirements/common.txt)."""

import os
import re
import subprocess
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


@pytest.mark.parametrize("name", [*LISTS, "dev", "docs"])
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


@pytest.mark.parametrize("torch", ["cpu", "torch-cuda"])
def test_the_image_for_serving_pins_all_packages_and_has_no_arrow(torch: str, tmp_path: Path) -> None:
    (made,) = (line for line in instructions() if "--constraint" in line)
    lists = " && ".join(part for part in made.split(" && ") if "> /tmp/" in part).replace("/tmp/", f"{tmp_path}/")
    subprocess.run(lists, shell=True, check=True, cwd=FOLDER.parent, env=os.environ | {"TORCH": torch})
    pins = dict(line.split("==", 1) for line in (tmp_path / "versions.txt").read_text().splitlines())
    needed = list(map(Requirement, (tmp_path / "needed.txt").read_text().splitlines()))
    packages: set[str] = set()
    while needed:
        wanted = needed.pop()
        name = canonicalize_name(wanted.name)
        if name in packages or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        packages.add(name)
        needed += map(Requirement, distribution(name).requires or [])
    assert packages <= pins.keys()
    assert {"fastapi", "numpy", "safetensors", "torch", "uvicorn"} <= packages
    assert not packages & {"pyarrow", "torchrec", "fbgemm-gpu", "tensorboard"}


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
