"""Dropout for CUDA: noise.py's mask and product as one Triton kernel, bit for bit.

Axes: R rows, W numbers of a row. A random number of 32 bits serves two neighbors of a row, the first has its low half.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = tl.constexpr(0x9E3779B9)
FIRST = tl.constexpr(0x21F0AAAD)
SECOND = tl.constexpr(0x735A2D97)

ELEMENTS, MOST_COLUMNS = 2048, 512
"""Numbers of a program, and how many of them stand in a row."""
BUDGET = {"_dropout": (4, 0)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def dropped(
    x: Tensor,
    rows_R: Tensor,
    key: tuple[int, int],
    drop: int,
    scale: float,
    onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
    relu: Tensor | None = None,
) -> Tensor:
    """x [R, ...], FP32 or BF16, as numbers of `dtype` (its own, if none is given) times `scale`, a number of that type,
    or times 0 where noise.py's 16 random bits are below `drop`. `key` is its two halves. Where `relu`, of the same
    shape, is at most 0, there is 0 instead. Then `onto` is added, as torch adds numbers of the two types."""
    dtype = dtype or x.dtype
    has_onto, has_relu = onto is not None, relu is not None
    to = dtype if onto is None else torch.promote_types(dtype, onto.dtype)
    x, rows_R = x.contiguous(), rows_R.contiguous()
    onto, relu = x if onto is None else onto.contiguous(), x if relu is None else relu.contiguous()
    out, R, W = torch.empty(x.shape, dtype=to, device=x.device), len(x), x[0].numel()
    if W == 0:
        return out
    columns = min(MOST_COLUMNS, triton.next_power_of_2(W))
    rows = ELEMENTS // columns
    with torch.cuda.device_of(x):
        _dropout[(triton.cdiv(R, rows), triton.cdiv(W, columns))](
            x, rows_R, onto, relu, out, R, W, *key, drop, scale, ROWS=rows, COLUMNS=columns,
            ONTO=has_onto, RELU=has_relu, HALF=dtype == torch.bfloat16, EMULATED=x.device.type != "cuda",
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def rounded(x, dtype: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """To the nearest of `dtype`."""
    if EMULATED and dtype == tl.bfloat16:  # the interpreter would cut the last bits off
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _mix(bits):  # type: ignore[no-untyped-def]
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 15)) * SECOND
    return bits ^ (bits >> 15)


@triton.jit
def hashed_rows(row, key_low, key_high):  # type: ignore[no-untyped-def]
    bits = _mix(row.to(tl.uint32) ^ key_low.to(tl.uint32))
    return _mix(bits ^ (row >> 32).to(tl.uint32) ^ key_high.to(tl.uint32))


@triton.jit
def keep_mask(row_hash, column, dropped):  # type: ignore[no-untyped-def]
    """The mask [rows, columns] of rows' hashes. Halves of a random number are signed."""
    column_hash = _mix((column >> 1).to(tl.uint32) ^ GOLDEN)
    bits = _mix(row_hash[:, None] ^ column_hash[None, :])
    half = (bits >> ((column & 1) * 16).to(tl.uint32)[None, :]) & 0xFFFF
    return (half ^ 0x8000).to(tl.int32) >= dropped


@triton.jit
def _in_half(x, HALF: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x rounded to BF16, in FP32; or x."""
    return rounded(x, tl.bfloat16, EMULATED).to(tl.float32) if HALF else x


@triton.jit(do_not_specialize=["R", "key_low", "key_high", "dropped"])
def _dropout(  # type: ignore[no-untyped-def]
    x, row, onto, relu, out, R, W, key_low, key_high, dropped, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ONTO: tl.constexpr, RELU: tl.constexpr, HALF: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (w < W)[None, :]
    at = r[:, None] * W + w[None, :]
    keep = keep_mask(hashed_rows(tl.load(row + r, mask=r < R, other=0), key_low, key_high), w, dropped)
    value = _in_half(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), HALF, EMULATED)
    # A product, so that what is not finite stays so.
    value = _in_half(value * tl.where(keep, scale, 0.0), HALF, EMULATED)
    if RELU:
        value = tl.where(tl.load(relu + at, mask=inside, other=0.0) <= 0, 0.0, value)
    if ONTO:
        value = tl.load(onto + at, mask=inside, other=0.0).to(tl.float32) + value
    tl.store(out + at, rounded(value, out.dtype.element_ty, EMULATED), mask=inside)
