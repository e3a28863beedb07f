"""On a host with GPUs, only tests that are marked `gpu` see them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GPU = """
import os
import torch

# As on a host with one GPU.
torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
torch.cuda.device_count = lambda: int(torch.cuda.is_available())
"""
PLANTED = """
import os, subprocess, sys

import pytest
import torch
import two_ranks

pytestmark = pytest.mark.long

LOOKING = "import sitecustomize, torch; print(torch.cuda.is_available(), torch.cuda.device_count())"

def seen(*_):
    found = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, check=True).stdout.split()
    return [found, torch.cuda.is_available()]

@pytest.fixture(scope="module")
def seen_by_a_fixture():
    return seen()

def test_other_tests_see_none(seen_by_a_fixture):
    assert seen() == seen_by_a_fixture == [["False", "0"], False]

def test_ranks_see_none():
    assert two_ranks.run(visible) == ["", ""]

def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES")

@pytest.mark.gpu
def test_a_gpu_test_sees_it():
    assert seen() == [["True", "1"], True]
"""


def test_only_tests_for_gpus_see_one(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "sitecustomize.py").write_text(GPU)
    path = os.pathsep.join([str(tmp_path), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    # A short name, because the ranks' fork server listens at a path within it, of 108 bytes at most.
    base = tmp_path_factory.mktemp("g") / "b"
    words = [sys.executable, "-m", "pytest", "-p", "sitecustomize", "-p", "conftest", "-p", "no:cacheprovider"]
    words += ["-o", "markers=long\ngpu", f"--basetemp={base}", "test_planted.py"]
    session = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert session.returncode == 0 and "3 passed" in session.stdout, session.stdout
