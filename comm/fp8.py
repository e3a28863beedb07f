"""The row-wise FP8 codec (section 4.4, «FP8 Quantized Communication»).

A row is cut into groups of columns (the features that travel side by side), and each group crosses the wire as its
D one-byte floats and two bytes of scale: D + 2 bytes where FP32 has 4 D. Values are E4M3 on their way forward,
where precision counts, and E5M2 on their way back, where range does.

Three implementations give the same bytes: the plain torch of this file, which defines them and runs anywhere,
C (fp8.c) for the CPU and Triton (fp8_triton.py) for CUDA.

R rows; W columns of all groups; D columns of one group.
"""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Literal

import torch

from logitmix.comm import fp8_c

SCALE_BYTES = 2
FORWARD_FP8 = torch.float8_e4m3fn
BACKWARD_FP8 = torch.float8_e5m2

INFINITY_BITS = 0x7F800000
LARGEST_BF16_BITS = 0x7F7F
NAN_BYTE = 0x7F  # in both formats
# Below TINY, largest / scale or a product with it would leave FP32's normal numbers: such rows are lifted first.
TINY = 2.0**-60
LIFT = 2.0**100


def quantize_rowwise(
    values_RW: torch.Tensor,
    dtype: torch.dtype,
    widths: Sequence[int] | None = None,
    seed: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of FP32, BF16 or FP16 as bytes: uint8 [R, W + 2 len(widths)], each group's payload and then its scale.

    `dtype` is float8_e4m3fn or float8_e5m2; `widths` (default: one group) cut the columns. Rounds to nearest even or,
    with a `seed` in [0, 2^63), up or down at random such that the mean is exact: a pure function of the seed and of
    the element's place r W + c. `out` is contiguous.

    The scale is the group's largest finite magnitude, rounded up to BF16 (and to no more than the largest BF16). What
    arrives is off by at most max(2^-4 |x|, 2^-10 scale / 448) for E4M3 and max(2^-3 |x|, 2^-17 scale / 57344) for
    E5M2, beside FP32 rounding; beyond the largest BF16, by 2^-8 |x| more. With a seed the bounds are twice as wide.
    NaN and infinity arrive as NaN in their own place and touch nothing else.

    Raises ValueError for widths that do not add up to W, for other dtypes, and for an `out` that does not fit.
    """
    _check_format(dtype)
    if values_RW.ndim != 2 or values_RW.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"rows to quantize are FP32, BF16 or FP16 [R, W], not {_described(values_RW)}")
    R, W = values_RW.shape
    widths = _checked(widths, W)
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed ({seed}) must lie in [0, 2^63)")
    wire = _output(out, (R, W + SCALE_BYTES * len(widths)), torch.uint8, values_RW.device)
    if not wire.is_contiguous():
        raise ValueError("out must be contiguous")
    rows_RW = _rows_apart(values_RW)
    match backend(values_RW.device.type):
        case "c":
            fp8_c.quantize(rows_RW, dtype, widths, seed, wire)
        case "triton":
            _triton().quantize(rows_RW, dtype, widths, seed, wire)
        case _:
            quantize_plain(rows_RW, dtype, widths, seed, wire)
    return wire


def dequantize_rowwise(
    wire: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """What `quantize_rowwise` made, uint8 [R, W + 2 len(widths)], as FP32 [R, W].

    `out` may be columns of a wider matrix. Bytes beyond the format's largest number arrive as NaN.

    Raises ValueError for a wire or an `out` that does not fit the widths.
    """
    _check_format(dtype)
    W = sum(widths)
    widths = _checked(widths, W)
    if wire.ndim != 2 or wire.dtype != torch.uint8 or wire.shape[1] != W + SCALE_BYTES * len(widths):
        raise ValueError(
            f"widths {widths} need a wire of uint8 [R, {W + SCALE_BYTES * len(widths)}], not {_described(wire)}"
        )
    values_RW = _output(out, (len(wire), W), torch.float32, wire.device)
    if W > 1 and values_RW.stride(1) != 1:
        raise ValueError("the columns of out must lie side by side")
    rows_of_bytes = _rows_apart(wire)
    match backend(wire.device.type):
        case "c":
            fp8_c.dequantize(rows_of_bytes, dtype, widths, values_RW)
        case "triton":
            _triton().dequantize(rows_of_bytes, dtype, widths, values_RW)
        case _:
            dequantize_plain(rows_of_bytes, dtype, widths, values_RW)
    return values_RW


def backend(device_type: str) -> Literal["c", "triton", "torch"]:
    """What serves tensors of a device («cpu», «cuda», …): all give the same bytes."""
    if device_type == "cpu" and fp8_c.library():
        return "c"
    if device_type == "cuda" and _has_triton():
        return "triton"
    return "torch"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton() -> ModuleType:
    """Only where it is used: without a GPU there need be no Triton, and it takes its time to load."""
    from logitmix.comm import fp8_triton

    return fp8_triton


def quantize_plain(
    values_RW: torch.Tensor,
    dtype: torch.dtype,
    widths: Sequence[int],
    seed: int | None,
    wire: torch.Tensor,
    first_place: int = 0,
) -> None:
    """The definition of the bytes: fills `wire`. `first_place`: that of the first element, if not the first of all."""
    R, W = values_RW.shape
    place_R1 = first_place + torch.arange(R, device=values_RW.device).unsqueeze(1) * W
    for columns, payload, scale in _groups(widths):
        x_RD = values_RW[:, columns].float()
        magnitude_RD = x_RD.view(torch.int32) & 0x7FFFFFFF
        finite_RD = magnitude_RD < INFINITY_BITS
        scale_R1 = _scale_bits(torch.where(finite_RD, magnitude_RD, 0))
        s_R1, lift_R1, _ = _scale_and_lifts(scale_R1)
        # A tensor of `largest`: torch divides a number by a tensor, and the other way round, through a reciprocal.
        inverse_R1 = torch.where(s_R1 > 0, _largest(dtype, s_R1) / s_R1, 0.0)
        y_RD = ((x_RD * lift_R1) * inverse_R1).abs().clamp(max=torch.finfo(dtype).max)
        if seed is None:
            byte_RD = y_RD.to(dtype).view(torch.uint8)
        else:
            place_RD = place_R1 + torch.arange(columns.start, columns.stop, device=values_RW.device)
            byte_RD = _rounded_at_random(y_RD, dtype, noise(seed, place_RD))
        sign_RD = (x_RD.view(torch.int32) >> 24) & 0x80
        wire[:, payload] = torch.where(finite_RD, byte_RD | sign_RD, NAN_BYTE).to(torch.uint8)
        wire[:, scale] = torch.cat([scale_R1 & 0xFF, scale_R1 >> 8], dim=1).to(torch.uint8)


def dequantize_plain(wire: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], values_RW: torch.Tensor) -> None:
    """The definition of what the bytes mean: fills `values_RW`."""
    largest_byte = torch.tensor(torch.finfo(dtype).max).to(dtype).view(torch.uint8).item()
    for columns, payload, scale in _groups(widths):
        byte_RD = wire[:, payload]
        low_R1, high_R1 = wire[:, scale].int().split(1, dim=1)
        s_R1, _, unlift_R1 = _scale_and_lifts(low_R1 | high_R1 << 8)
        x_RD = byte_RD.view(dtype).float() * (s_R1 / _largest(dtype, s_R1)) * unlift_R1
        values_RW[:, columns] = torch.where((byte_RD & 0x7F) > largest_byte, torch.nan, x_RD)


def noise(seed: int, place: torch.Tensor) -> torch.Tensor:
    """32 random bits for each place (int64): two rounds of a multiply-xorshift hash, each with its own key."""
    low, high = place & 0xFFFFFFFF, place >> 32
    # Two keys: with one, another seed would only deal the same bits to other places.
    key = _mix(_mix(high ^ 0x9E3779B9) ^ (seed & 0xFFFFFFFF))
    other_key = _mix(key ^ (seed >> 32) ^ 0x85EBCA6B)
    return _mix(_mix(low ^ key) ^ other_key)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """A bijection of 32 bits (held in int64) that spreads every bit over all: Wellons' «lowbias32» constants."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ bits >> 16


def _rounded_at_random(y_RD: torch.Tensor, dtype: torch.dtype, noise_RD: torch.Tensor) -> torch.Tensor:
    """Bytes of magnitudes that do not exceed the format's largest.

    The bits of an FP32 number, less the difference of the exponents' biases, are the FP8 byte in fixed point with
    `shift` fractional bits; subnormal numbers of FP8 are in fixed point by nature. Adding less than one and
    cutting the fraction off rounds up exactly as often as the fraction says.
    """
    fp8 = torch.finfo(dtype)
    shift = 23 - fp8_c.MANTISSA_BITS[dtype]
    smallest_normal = torch.tensor(fp8.smallest_normal).view(torch.int32).item()
    normal_RD = y_RD.view(torch.int32) - (smallest_normal - 2**23)
    subnormal_RD = (y_RD * (2.0**23 / fp8.smallest_normal)).clamp(max=2.0**23).int()
    fixed_RD = torch.where(y_RD < fp8.smallest_normal, subnormal_RD, normal_RD)
    return (fixed_RD + (noise_RD & (2**shift - 1))) >> shift


def _scale_bits(magnitude_RD: torch.Tensor) -> torch.Tensor:
    """The largest of the FP32 bit patterns of a row, rounded up to BF16's: int32 [R, 1]."""
    if magnitude_RD.shape[1] == 0:
        return magnitude_RD.new_zeros(len(magnitude_RD), 1)
    return (magnitude_RD.amax(dim=1, keepdim=True) + 0xFFFF >> 16).clamp(max=LARGEST_BF16_BITS)


def _scale_and_lifts(scale_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scale in FP32, lifted where it is tiny, and the factors that lift and that undo it."""
    s_R1 = (scale_R1 << 16).view(torch.float32)
    lift_R1 = torch.where(s_R1 < TINY, LIFT, 1.0)
    return s_R1 * lift_R1, lift_R1, torch.where(s_R1 < TINY, 1 / LIFT, 1.0)


def _largest(dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, torch.finfo(dtype).max)


def _groups(widths: Sequence[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Of each group: its columns, and its payload and its scale in the wire row."""
    for number, (D, end) in enumerate(zip(widths, accumulate(widths), strict=True)):
        at = end + SCALE_BYTES * number
        yield slice(end - D, end), slice(at - D, at), slice(at, at + SCALE_BYTES)


def _rows_apart(matrix: torch.Tensor) -> torch.Tensor:
    """Columns side by side; rows may lie any distance apart."""
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def _check_format(dtype: torch.dtype) -> None:
    if dtype not in (FORWARD_FP8, BACKWARD_FP8):
        raise ValueError(f"dtype ({dtype}) must be {FORWARD_FP8} or {BACKWARD_FP8}")


def _checked(widths: Sequence[int] | None, W: int) -> tuple[int, ...]:
    widths = (W,) if widths is None else tuple(widths)
    if sum(widths) != W or any(D < 0 for D in widths):
        raise ValueError(f"widths {widths} must be the widths of all groups and add up to {W}")
    return widths


def _output(out: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if (out.shape, out.dtype, out.device) != (shape, dtype, device):
        raise ValueError(f"out must be {dtype} {list(shape)} on {device}, not {_described(out)}")
    return out


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
