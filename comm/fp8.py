"""The row-wise FP8 codec (section 4.4, "FP8 Quantized Communication").

A row is cut into groups of columns (the features that are sent side by side). Each group is sent as its D one-byte
floats and two bytes of scale: D + 2 bytes where FP32 has 4 D. Values are E4M3 forward, where precision counts, and
their gradients E5M2 backward, where range does.

Three implementations give the same bytes: plain torch (fp8_plain.py), which defines them and runs anywhere, C (fp8.c)
for the CPU and Triton (fp8_triton.py) for CUDA.

R rows; W columns of all groups; D columns of one group.
"""

from collections.abc import Sequence
from types import ModuleType

import torch

from logitmix.comm import fp8_c, fp8_plain
from logitmix.comm.fp8_plain import MANTISSA_BITS, SCALE_BYTES
from logitmix.common.compiled import has_triton

FORWARD_FP8 = torch.float8_e4m3fn
BACKWARD_FP8 = torch.float8_e5m2


def quantize_rowwise(
    values_RW: torch.Tensor,
    dtype: torch.dtype,
    widths: Sequence[int] | None = None,
    seed: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns rows of FP32, BF16 or FP16 as bytes: uint8 [R, W + 2 len(widths)], each group's payload and then its
    scale.

    `dtype` is float8_e4m3fn or float8_e5m2; `widths` (default: one group) cut the columns. Rounds to nearest even or,
    with a `seed` in [0, 2^63), up or down at random such that the mean is exact: a pure function of the seed and of
    the element's place r W + c, modulo 2^32. `out` is contiguous.

    The scale is the group's largest finite magnitude, rounded up to BF16 (and to no more than the largest BF16). What
    arrives has an error of at most max(2^-4 |x|, 2^-10 scale / 448) for E4M3 and max(2^-3 |x|, 2^-17 scale / 57344) for
    E5M2, plus FP32 rounding; beyond the largest BF16, plus 2^-8 |x|. With a seed the bounds are twice as wide. NaN and
    infinity arrive as NaN in their own place and touch nothing else.

    `widths` add up to W, and `out` fits.
    """
    R, W = values_RW.shape
    widths = (W,) if widths is None else tuple(widths)
    assert dtype in MANTISSA_BITS and sum(widths) == W and min(widths, default=0) >= 0
    assert seed is None or 0 <= seed < 2**63
    shape = R, W + SCALE_BYTES * len(widths)
    wire = torch.empty(shape, dtype=torch.uint8, device=values_RW.device) if out is None else out
    assert wire.shape == shape and wire.dtype == torch.uint8 and wire.is_contiguous()
    backend(wire.device.type).quantize(_rows_apart(values_RW), dtype, widths, seed, wire)
    return wire


def dequantize_rowwise(
    wire: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the output of `quantize_rowwise`, uint8 [R, W + 2 len(widths)], as FP32 [R, W].

    `out` may be columns of a wider matrix. Bytes beyond the format's largest number arrive as NaN.
    """
    R, W = len(wire), sum(widths)
    assert dtype in MANTISSA_BITS and wire.dtype == torch.uint8 and wire.shape == (R, W + SCALE_BYTES * len(widths))
    values_RW = torch.empty(R, W, device=wire.device) if out is None else out
    assert values_RW.shape == (R, W) and values_RW.dtype == torch.float32 and (W <= 1 or values_RW.stride(1) == 1)
    backend(wire.device.type).dequantize(_rows_apart(wire), dtype, tuple(widths), values_RW)
    return values_RW


def backend(device_type: str) -> ModuleType:
    """Returns the implementation for tensors of a device ("cpu", "cuda", …): all give the same bytes."""
    if device_type == "cpu" and fp8_c.library():
        return fp8_c
    if device_type == "cuda" and has_triton():
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from logitmix.comm import fp8_triton

        return fp8_triton
    return fp8_plain


def _rows_apart(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a matrix of the same numbers whose rows are each contiguous in memory: a copy unless they are already.
    Gaps between rows may stay."""
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()
