"""Kernels in Triton's interpreter: each of the tests' `*triton_checks.py`, as a program. And where Triton is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted(HERE.rglob("*triton_checks.py"))
TOGETHER = """
import os, runpy, sys
for program in sys.argv[2:]:
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")
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
    run("-c", TOGETHER, "few", *map(str, PROGRAMS))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.relative_to(HERE).as_posix())
def test_the_kernels_do_so_for_all_sizes(program: Path) -> None:
    run(str(program), "all")


def run(*words: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", *words], cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_cuda_loads_them() -> None:
    run("-W", "default", "-c", ON_THE_CPU)
