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


def dropped(x: Tensor, rows_R: Tensor, key: int, drop: int, scale: float) -> Tensor:
    """x [R, ...], FP32 or BF16, times `scale` (a number of x's type), or times 0 where noise.py's 16 random bits are
    below `drop`."""
    x, rows_R = x.contiguous(), rows_R.contiguous()
    out, R, W = torch.empty_like(x), len(x), x[0].numel()
    if W == 0:
        return out
    columns = min(MOST_COLUMNS, triton.next_power_of_2(W))
    rows = ELEMENTS // columns
    with torch.cuda.device_of(x):
        _dropout[(triton.cdiv(R, rows), triton.cdiv(W, columns))](
            x, rows_R, out, R, W, signed(key), signed(key >> 32), drop, scale, ROWS=rows, COLUMNS=columns,
            EMULATED=x.dtype == torch.bfloat16 and x.device.type != "cuda",
        )  # fmt: skip
    return out


def signed(bits: int) -> int:
    """The low 32 bits as a signed number, so that Triton gives every value the same type."""
    bits &= 0xFFFFFFFF
    return bits - (bits >> 31 << 32)


@triton.jit
def rounded(x, dtype: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """To the nearest of `dtype`."""
    if EMULATED:  # the interpreter would cut the last bits off
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


@triton.jit(do_not_specialize=["R", "key_low", "key_high", "dropped"])
def _dropout(  # type: ignore[no-untyped-def]
    x, row, out, R, W, key_low, key_high, dropped, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (w < W)[None, :]
    at = r[:, None] * W + w[None, :]
    keep = keep_mask(hashed_rows(tl.load(row + r, mask=r < R, other=0), key_low, key_high), w, dropped)
    # A product, so that what is not finite stays so.
    product = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.where(keep, scale, 0.0)
    tl.store(out + at, rounded(product, x.dtype.element_ty, EMULATED), mask=inside)
