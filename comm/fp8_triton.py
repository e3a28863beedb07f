"""The FP8 codec for CUDA: what fp8_plain.py defines, one Triton kernel each.

Every byte is read once and written once. FP8 is computed by integer operations, because Triton's own conversions do not
compile for every GPU that supports BF16 (A100). The launches forbid fused multiply-adds, so that the bytes are those of
the plain path. A program encodes or decodes a block of rows of one group; rows are counted in 64 bits.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from logitmix.comm import fp8_plain
from logitmix.comm.fp8_plain import MANTISSA_BITS

ELEMENTS = 2048  # to a program, where a row of a group has no more
BUDGET = {"_quantize_kernel": (2, 0), "_dequantize_kernel": (2, 0)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""

INFINITY_BITS = tl.constexpr(fp8_plain.INFINITY_BITS)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
LARGEST_BF16_BITS = tl.constexpr(fp8_plain.LARGEST_BF16_BITS)
NAN_BYTE = tl.constexpr(fp8_plain.NAN_BYTE)
TINY = tl.constexpr(fp8_plain.TINY)
LIFT = tl.constexpr(fp8_plain.LIFT)
UNLIFT = tl.constexpr(1 / fp8_plain.LIFT)
SCALE_BYTES = tl.constexpr(fp8_plain.SCALE_BYTES)
FIRST_KEY = tl.constexpr(0x1FCE552)  # of fp8_plain.noise: 0x9E3779B9, mixed


def quantize(
    values_RW: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], seed: int | None, wire: torch.Tensor
) -> None:
    R, W = values_RW.shape
    if wire.numel() == 0:
        return
    ends, rows, block, grid = _plan(R, tuple(widths), wire.device)
    low, high = (seed or 0) & 0xFFFFFFFF, (seed or 0) >> 32
    with torch.cuda.device_of(wire):
        _quantize_kernel[grid](
            values_RW, values_RW.stride(0), wire, wire.shape[1], ends, R, W, low, high,
            RANDOM=seed is not None, MANTISSA=MANTISSA_BITS[dtype], LARGEST=torch.finfo(dtype).max,
            ROWS=rows, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip


def dequantize(wire: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], values_RW: torch.Tensor) -> None:
    if values_RW.numel() == 0:
        return
    ends, rows, block, grid = _plan(len(wire), tuple(widths), wire.device)
    with torch.cuda.device_of(wire):
        _dequantize_kernel[grid](
            wire, wire.stride(0), values_RW, values_RW.stride(0), ends, len(wire),
            MANTISSA=MANTISSA_BITS[dtype], LARGEST=torch.finfo(dtype).max,
            ROWS=rows, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip


def _plan(R: int, widths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int, int, tuple[int, int]]:
    """The groups' ends, rows and columns of a program, and the grid."""
    block = triton.next_power_of_2(max(*widths, 1))
    rows = max(1, ELEMENTS // block)
    return _ends(widths, device), rows, block, (triton.cdiv(R, rows), len(widths))


@functools.lru_cache(maxsize=64)
def _ends(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zero and the first column after each group; cached, because every copy to a GPU waits for it."""
    return torch.tensor([0, *accumulate(widths)], dtype=torch.int64, device=device)


@triton.jit
def _mix(bits):  # type: ignore[no-untyped-def]
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _noise(place, seed_low, seed_high):  # type: ignore[no-untyped-def]
    key = _mix(seed_low.to(tl.uint32) ^ FIRST_KEY)
    other_key = _mix(key ^ seed_high.to(tl.uint32) ^ 0x85EBCA6B)
    return _mix(_mix(place.to(tl.uint32) ^ key) ^ other_key)


@triton.jit
def _fp32_bits(x):  # type: ignore[no-untyped-def]
    if x.dtype == tl.bfloat16:  # by hand: the interpreter's conversion gets subnormal numbers wrong
        return x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _nearest(bits, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    # Adding a power of two whose last place is the FP8 step rounds to nearest even.
    LEAST: tl.constexpr = (121 if MANTISSA == 3 else 113) << 23
    SHIFT: tl.constexpr = 23 - MANTISSA
    exponent = tl.maximum(bits & INFINITY_BITS, LEAST)
    step = exponent + (SHIFT << 23)
    rounded = bits.to(tl.float32, bitcast=True) + step.to(tl.float32, bitcast=True)
    return rounded.to(tl.int32, bitcast=True) - step + ((exponent - LEAST) >> SHIFT)


@triton.jit
def _at_random(bits, noise, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    # Fixed point with SHIFT fractional bits: see `_rounded_at_random` in fp8.py.
    LEAST: tl.constexpr = (121 if MANTISSA == 3 else 113) << 23
    SHIFT: tl.constexpr = 23 - MANTISSA
    ONE: tl.constexpr = 2.0**29 if MANTISSA == 3 else 2.0**37
    subnormal = (tl.minimum(bits, LEAST).to(tl.float32, bitcast=True) * ONE).to(tl.int32)
    fixed = tl.where(bits < LEAST, subnormal, bits - (LEAST - (1 << 23)))
    return (fixed + (noise & ((1 << SHIFT) - 1)).to(tl.int32)) >> SHIFT


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _quantize_kernel(  # type: ignore[no-untyped-def]
    values, stride, wire, wire_stride, ends, R, W, seed_low, seed_high,
    RANDOM: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    start, end = tl.load(ends + group), tl.load(ends + group + 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = start + tl.arange(0, BLOCK)
    inside = (row < R)[:, None] & (column < end)[None, :]

    x = tl.load(values + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    bits = _fp32_bits(x)
    magnitude = bits & MAGNITUDE_BITS
    finite = magnitude < INFINITY_BITS
    magnitude = tl.where(finite, magnitude, 0)
    scale = tl.minimum((tl.max(magnitude, axis=1) + 0xFFFF) >> 16, LARGEST_BF16_BITS)
    s = (scale << 16).to(tl.float32, bitcast=True)
    lift = tl.where(s < TINY, LIFT, 1.0)
    inverse = tl.div_rn(tl.full((ROWS,), LARGEST, tl.float32), tl.where(scale > 0, s * lift, 1.0))
    inverse = tl.where(scale > 0, inverse, 0.0)

    y = (magnitude.to(tl.float32, bitcast=True) * lift[:, None]) * inverse[:, None]
    y_bits = tl.minimum(y, LARGEST).to(tl.int32, bitcast=True)
    if RANDOM:
        place = row[:, None] * W + column[None, :]
        byte = _at_random(y_bits, _noise(place, seed_low, seed_high), MANTISSA)
    else:
        byte = _nearest(y_bits, MANTISSA)
    byte = tl.where(finite, byte | ((bits >> 24) & 0x80), NAN_BYTE)

    at = wire + row * wire_stride + group * SCALE_BYTES
    tl.store(at[:, None] + column[None, :], byte.to(tl.uint8), mask=inside)
    tl.store(at + end, (scale & 0xFF).to(tl.uint8), mask=row < R)
    tl.store(at + end + 1, (scale >> 8).to(tl.uint8), mask=row < R)


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    wire, wire_stride, values, stride, ends, R,
    MANTISSA: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    BELOW_LEAST: tl.constexpr = (120 if MANTISSA == 3 else 112) << 23
    STEP: tl.constexpr = 2.0**-9 if MANTISSA == 3 else 2.0**-16
    LARGEST_BYTE: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B
    group = tl.program_id(1)
    start, end = tl.load(ends + group), tl.load(ends + group + 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = start + tl.arange(0, BLOCK)
    inside = (row < R)[:, None] & (column < end)[None, :]

    at = wire + row * wire_stride + group * SCALE_BYTES
    scale = tl.load(at + end, mask=row < R, other=0).to(tl.int32)
    scale |= tl.load(at + end + 1, mask=row < R, other=0).to(tl.int32) << 8
    s = (scale << 16).to(tl.float32, bitcast=True)
    tiny = s < TINY
    factor = tl.div_rn(s * tl.where(tiny, LIFT, 1.0), tl.full((ROWS,), LARGEST, tl.float32))
    unlift = tl.where(tiny, UNLIFT, 1.0)

    byte = tl.load(at[:, None] + column[None, :], mask=inside, other=0).to(tl.int32)
    magnitude = byte & 0x7F
    subnormal = (magnitude.to(tl.float32) * STEP).to(tl.int32, bitcast=True)
    q = tl.where(magnitude < (1 << MANTISSA), subnormal, (magnitude << (23 - MANTISSA)) + BELOW_LEAST)
    q = tl.where(magnitude > LARGEST_BYTE, 0, q)
    x = (q | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True) * factor[:, None] * unlift[:, None]
    # NaN by its pattern: a GPU's own differs from a CPU's.
    x_bits = tl.where(magnitude > LARGEST_BYTE, 0x7FC00000, x.to(tl.int32, bitcast=True))
    tl.store(values + row[:, None] * stride + column[None, :], x_bits.to(tl.float32, bitcast=True), mask=inside)
