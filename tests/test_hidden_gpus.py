"""On a host with GPUs, only tests that are marked `gpu` see them."""

import os
import subprocess
import sys
from pathlib import Path

import two_ranks

HERE = Path(__file__).parent
TORCH = """
import os
from functools import cache
from types import SimpleNamespace

# As on a host with one GPU, which is looked for once.
cuda = SimpleNamespace(is_available=cache(lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""))
cuda.device_count = lambda: int(cuda.is_available())
set_num_threads = print
"""
PLANTED = """
import subprocess, sys

import pytest
import torch

pytestmark = pytest.mark.long

LOOKING = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"

def seen(*_):
    found = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, check=True).stdout.split()
    return [found, torch.cuda.is_available()]

@pytest.fixture(scope="module")
def seen_by_a_fixture():
    return seen()

def test_other_tests_see_none(seen_by_a_fixture):
    assert seen() == seen_by_a_fixture == [["False", "0"], False]

@pytest.mark.gpu
def test_a_gpu_test_sees_it():
    assert seen() == [["True", "1"], True]
"""


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_ranks_see_none() -> None:
    assert visible() == "" and two_ranks.run(visible) == ["", ""]


def test_only_tests_for_gpus_see_one(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "torch.py").write_text(TORCH)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    words = [sys.executable, "-m", "pytest", "-p", "torch", "-p", "conftest", "-p", "no:cacheprovider"]
    words += ["-o", "markers=long\ngpu", f"--basetemp={tmp_path / 'base'}", "test_planted.py"]
    session = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert session.returncode == 0 and "2 passed" in session.stdout, session.stdout
