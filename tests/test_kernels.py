"""Triton's kernels, compiled for GPUs that are not here: each would start, and keeps to its budget."""

import re
from typing import Any

import pytest

from benchmarks import kernels

SMALL = re.compile(r"mol_(triton: (8 x 8|4 x 16|16 x 4) x 64|scores_triton: 8 x 8 x 64).*(bfloat16|int8)")
"""The limits on a GPU with less shared memory."""
CASES = [(name, gpu) for name in kernels.cases() for gpu in (80, 90, 100, *([89] if SMALL.match(name) else []))]
SAMPLE = {
    ("mol_triton: 4 x 4 x 64 x 32, bfloat16", 90),
    ("mol_triton: 8 x 8 x 32 x 128, bfloat16", 90),
    ("dot_triton: 64, groups of 128, corrected", 90),
    ("mol_scores_triton: 8 x 8 x 32 x 128, int8", 80),
    ("mol_scores_triton: 8 x 8 x 64 x 128, bfloat16", 89),
    ("stage1_triton: 8 x 64", 100),
    ("hstu_triton: 2 x 32, bfloat16", 80),
    ("hstu_unit_triton: 2 x 32, bfloat16", 90),
    ("fp8_triton: 3 x 64, bfloat16, backward", 90),
    ("noise_triton: 64, bfloat16", 100),
    ("normalize_triton: 32, bfloat16", 90),
    ("gated_triton: 512, bfloat16", 80),
}
"""A few seconds for each module; `make soak` compiles all."""
INSTRUCTIONS = {
    # Scores of bytes by tensor cores, which read 16 bytes at a time.
    "_scan": (r"\.s32\.s8\.s8|ld\.global\.v4\.b32", ""),
    # Rounded one by one, and subnormal numbers kept.
    "_quantize_kernel": (r"div\.rn\.f32", r"\bfma\.|\.ftz|\.approx|div\.full"),
    "_dequantize_kernel": (r"div\.rn\.f32", r"\bfma\.|\.ftz|\.approx|div\.full"),
}
"""What a kernel must have, and what it must not."""


@pytest.mark.parametrize(
    ("name", "gpu"), [pytest.param(*case, marks=[] if case in SAMPLE else [pytest.mark.slow]) for case in CASES]
)
def test_each_would_start_and_keeps_to_its_budget(name: str, gpu: int) -> None:
    compiled = kernels.compiled(name, gpu)
    assert compiled
    assert not [f"{kernel}: {kernel.wrong}" for kernel in compiled if kernel.wrong]
    for kernel in compiled:
        present, absent = INSTRUCTIONS.get(kernel.name, ("", ""))
        assert re.search(present, kernel.ptx) and not (absent and re.search(absent, kernel.ptx))
        if "bfloat16" in name and kernel.name in TENSOR_CORES:
            assert re.search(r"\bmma\.sync|wgmma|tcgen05\.mma", kernel.ptx)


TENSOR_CORES = (
    "_negatives_forward", "_negatives_backward", "_scores", "_forward", "_queries_backward", "_keys_backward",
)  # fmt: skip


def test_the_forms_are_those_of_a_gpu() -> None:
    """Backward, too: none makes up for the arithmetic of Triton's interpreter."""
    emulated: dict[str, bool] = {}

    def launch(kernel: Any, *_: Any, **options: Any) -> None:
        emulated[kernel.fn.__name__] = options.get("EMULATED", False)

    with kernels.as_if_on(90, launch):
        for name, _ in SAMPLE:
            kernels.cases()[name]()
    assert "_gated_backward" in emulated and not any(emulated.values()), emulated


def test_the_sample_has_a_case_of_each_module() -> None:
    assert set(CASES) >= SAMPLE
    assert {name.partition(":")[0] for name, _ in SAMPLE} == {name.partition(":")[0] for name, _ in CASES}


def test_what_would_not_start_is_named() -> None:
    """A kernel of which nothing fits."""
    kernel = kernels.Kernel("_k", 90, 16, 255, 9, 228 * 1024, 992, (1, 8), "ret;\n trap;\n", serialized=True)
    assert kernel.wrong == [
        "contains `trap`",
        "tensor instructions wait for each other",
        "992 columns of tensor memory",
        "233472 bytes of shared memory",
        "0 programs for each multiprocessor, not 1",
        "spills 9 bytes, not 8",
    ]
    kernel = kernels.Kernel("_k", 90, 8, 128, 8, 113 * 1024, 256, (2, 8), "ret;\n")
    assert kernel.programs == 2 and not kernel.wrong
