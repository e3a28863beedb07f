"""Kernels in Triton's interpreter and on GPUs: each of the tests' `*triton_checks.py`. And where Triton is loaded."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = sorted(HERE.rglob("*triton_checks.py"))
each = pytest.mark.parametrize("checks", CHECKS, ids=lambda checks: checks.relative_to(HERE).as_posix())
IN_THE_INTERPRETER = """
import importlib, pathlib, sys, warnings
# NumPy says that e^x overflows and that infinity times 0 is not a number, as is meant.
warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
for file in map(pathlib.Path, sys.argv[2:]):
    sys.path.insert(0, str(file.parent))
    importlib.import_module(file.stem).check_all("cpu", few=sys.argv[1] == "few")
"""
ON_THE_CPU = """
import sys
sys.path.insert(0, "tests/modules")
import torch
from logitmix.comm import fp8
from test_mol_loss import fused, make
fp8.quantize_rowwise(torch.ones(2, 2), fp8.FORWARD_FP8)
fused(make([3], 2))
kernels = [name for name in sys.modules if name.startswith("logitmix") and name.endswith("_triton")]
assert not kernels, kernels
"""


def test_the_kernels_do_what_their_plain_forms_do() -> None:
    """A few sizes of each, in one process."""
    run("-c", IN_THE_INTERPRETER, "few", *map(str, CHECKS))


@pytest.mark.slow
@each
def test_the_kernels_do_so_for_all_sizes(checks: Path) -> None:
    run("-c", IN_THE_INTERPRETER, "all", str(checks))


@pytest.mark.gpu
@each
def test_the_kernels_do_so_on_the_device(checks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(checks.parent)
    importlib.import_module(checks.stem).check_all("cuda")


def run(*words: str) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET while it is imported, and keeps to what it read."""
    command, environment = [sys.executable, "-W", "error", *words], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_cuda_loads_them() -> None:
    run("-W", "default", "-c", ON_THE_CPU)
