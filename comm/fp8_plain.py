"""The definition of the FP8 codec's bytes, in plain torch: it runs anywhere, and C and Triton are tested against it.

The format and its bounds are described in fp8.py. R rows; W columns of all groups; D columns of one group.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

SCALE_BYTES = 2
INFINITY_BITS = 0x7F800000
LARGEST_BF16_BITS = 0x7F7F
NAN_BYTE = 0x7F  # in both formats
# Below TINY, largest / scale or a product with it would leave FP32's normal numbers: such rows are scaled up first.
TINY = 2.0**-60
LIFT = 2.0**100
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def quantize(
    values_RW: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], seed: int | None, wire: torch.Tensor
) -> None:
    """Defines the bytes: fills `wire`."""
    R, W = values_RW.shape
    place_R1 = torch.arange(R, device=values_RW.device).unsqueeze(1) * W
    for columns, payload, scale in _groups(widths):
        x_RD = values_RW[:, columns].float()
        magnitude_RD = x_RD.view(torch.int32) & 0x7FFFFFFF
        finite_RD = magnitude_RD < INFINITY_BITS
        scale_R1 = _scale_bits(torch.where(finite_RD, magnitude_RD, 0))
        s_R1, lift_R1, _ = _scale_and_lifts(scale_R1)
        # A tensor of `largest`, because torch divides a tensor and a plain number through a reciprocal.
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


def dequantize(wire: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], values_RW: torch.Tensor) -> None:
    """Defines what the bytes mean: fills `values_RW`."""
    largest_byte = torch.tensor(torch.finfo(dtype).max).to(dtype).view(torch.uint8).item()
    for columns, payload, scale in _groups(widths):
        byte_RD = wire[:, payload]
        low_R1, high_R1 = wire[:, scale].int().split(1, dim=1)
        s_R1, _, unlift_R1 = _scale_and_lifts(low_R1 | high_R1 << 8)
        x_RD = byte_RD.view(dtype).float() * (s_R1 / _largest(dtype, s_R1)) * unlift_R1
        values_RW[:, columns] = torch.where((byte_RD & 0x7F) > largest_byte, torch.nan, x_RD)


def noise(seed: int, place: torch.Tensor) -> torch.Tensor:
    """Returns 32 random bits for each place (int64, modulo 2^32): two rounds of a multiply-xorshift hash, each with its
    own key."""
    # Two keys: with one, another seed would only permute the same bits over the places.
    key = _mix(_mix(place.new_full((), 0x9E3779B9)) ^ (seed & 0xFFFFFFFF))
    other_key = _mix(key ^ (seed >> 32) ^ 0x85EBCA6B)
    return _mix(_mix((place & 0xFFFFFFFF) ^ key) ^ other_key)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Applies a bijection of 32 bits (held in int64) that spreads every bit over all: Wellons' "lowbias32"
    constants."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ bits >> 16


def _rounded_at_random(y_RD: torch.Tensor, dtype: torch.dtype, noise_RD: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of magnitudes up to the format's largest.

    The bits of an FP32 number, less the difference of the exponents' biases, are the FP8 byte in fixed point with
    `shift` fractional bits; subnormal numbers of FP8 are in fixed point by nature. Adding less than one and
    cutting the fraction off rounds up exactly as often as the fraction says.
    """
    fp8 = torch.finfo(dtype)
    shift = 23 - MANTISSA_BITS[dtype]
    smallest_normal = torch.tensor(fp8.smallest_normal).view(torch.int32).item()
    normal_RD = y_RD.view(torch.int32) - (smallest_normal - 2**23)
    subnormal_RD = (y_RD * (2.0**23 / fp8.smallest_normal)).clamp(max=2.0**23).int()
    fixed_RD = torch.where(y_RD < fp8.smallest_normal, subnormal_RD, normal_RD)
    return (fixed_RD + (noise_RD & (2**shift - 1))) >> shift


def _scale_bits(magnitude_RD: torch.Tensor) -> torch.Tensor:
    """Returns the largest FP32 bit pattern of each row, rounded up to BF16: int32 [R, 1]."""
    if magnitude_RD.shape[1] == 0:
        return magnitude_RD.new_zeros(len(magnitude_RD), 1)
    return (magnitude_RD.amax(dim=1, keepdim=True) + 0xFFFF >> 16).clamp(max=LARGEST_BF16_BITS)


def _scale_and_lifts(scale_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the scale in FP32, scaled up if it is tiny, and the factors that scale up and that undo it."""
    s_R1 = (scale_R1 << 16).view(torch.float32)
    lift_R1 = torch.where(s_R1 < TINY, LIFT, 1.0)
    return s_R1 * lift_R1, lift_R1, torch.where(s_R1 < TINY, 1 / LIFT, 1.0)


def _largest(dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, torch.finfo(dtype).max)


def _groups(widths: Sequence[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Yields for each group its columns, and its payload and its scale in the wire row."""
    for number, (D, end) in enumerate(zip(widths, accumulate(widths), strict=True)):
        at = end + SCALE_BYTES * number
        yield slice(end - D, end), slice(at - D, at), slice(at, at + SCALE_BYTES)
