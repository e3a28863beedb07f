"""The lock: what `pip check` would say, but for the one complaint that is wrong (requirements/common.txt)."""

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "requirements"
ACCELERATOR = "cuda" if torch.version.cuda else "cpu"


def locked(file: str) -> dict[str, str]:
    """Name to version, of a list and what it includes."""
    pins: dict[str, str] = {}
    for line in (FOLDER / file).read_text().splitlines():
        if line.startswith("-r "):
            pins |= locked(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            name, version = re.fullmatch(r"([a-z0-9-]+)==(\S+)", line).groups()  # type: ignore[union-attr]
            pins[name] = version
    return pins


@pytest.mark.parametrize("file", ["common.txt", "cpu.txt", "cuda.txt", "dev.txt"])
def test_every_line_is_one_exact_version(file: str) -> None:
    assert locked(file)


def test_the_lock_is_installed_and_complete() -> None:
    pins = locked(f"{ACCELERATOR}.txt") | locked("dev.txt")
    assert {name: distribution(name).version for name in pins} == pins
    unmet = []
    for name in pins:
        for wanted in map(Requirement, distribution(name).requires or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                version = pins.get(canonicalize_name(wanted.name))
                if version is None or not wanted.specifier.contains(version):
                    unmet.append(f"{name} requires {wanted}")
    assert unmet == (["torchrec requires fbgemm-gpu"] if ACCELERATOR == "cpu" else [])
