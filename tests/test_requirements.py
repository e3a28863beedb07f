"""The lock: what `pip check` would say, but for the one complaint that is wrong (requirements/common.txt)."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "requirements"
LINE = re.compile(r"([a-z0-9-]+)==(\S+)(?: +--hash=sha256:[0-9a-f]{64})+ *")
LISTS = ("cpu", "cpu-public", "cuda")
"""What `make install` chooses from."""


def locked(file: str) -> dict[str, str]:
    """Name to version, of a list and what it includes."""
    pins: dict[str, str] = {}
    for line in (FOLDER / file).read_text().replace("\\\n", "").splitlines():
        if line.startswith("-r "):
            pins |= locked(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            name, version = LINE.fullmatch(line).groups()  # type: ignore[union-attr]
            pins[name] = version
    return pins


def installed(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


@pytest.mark.parametrize("name", [*LISTS, "dev", "docs"])
def test_every_line_is_one_exact_version_with_hashes(name: str) -> None:
    assert locked(f"{name}.txt")


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
