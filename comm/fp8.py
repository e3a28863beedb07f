"""The row-wise FP8 codec (section 4.4, «FP8 Quantized Communication»).

A wire row is D one-byte floats and the row's largest magnitude as FP32. Values are E4M3 on their way
forward, where precision counts, and E5M2 on their way back, where range does. Plain torch, any device.

R rows; D elements of a row.
"""

from typing import Any

import torch

from logitmix.comm.config import Precision

SCALE_BYTES = 4
FORWARD_FP8 = torch.float8_e4m3fn
BACKWARD_FP8 = torch.float8_e5m2
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def quantize_rowwise(rows_RD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of FP32, BF16 or FP16 as bytes: uint8 [R, D + 4].

    `dtype` is float8_e4m3fn or float8_e5m2. With amax the row's largest finite magnitude, what
    arrives is off by at most max(2^-4 |x|, 2^-10 amax / 448) for E4M3 and max(2^-3 |x|, 2^-17 amax / 57344)
    for E5M2, beside FP32 rounding. NaN and infinity arrive as NaN in their own place and touch nothing else.
    """
    R, D = rows_RD.shape
    wire = torch.empty((R, D + SCALE_BYTES), dtype=torch.uint8, device=rows_RD.device)
    if rows_RD.numel() == 0:
        return wire.zero_()
    rows_RD = rows_RD.float()
    finite_RD = rows_RD.isfinite()
    amax_R1 = torch.where(finite_RD, rows_RD.abs(), 0.0).amax(dim=1, keepdim=True)
    # Dividing by amax, not by amax / largest, which would vanish for a subnormal amax.
    unit_RD = rows_RD / torch.where(amax_R1 > 0, amax_R1, 1.0)
    largest = torch.finfo(dtype).max
    scaled_RD = (unit_RD * largest).clamp(-largest, largest)
    wire[:, :D] = torch.where(finite_RD, scaled_RD, torch.nan).to(dtype).view(torch.uint8)
    wire[:, D:] = amax_R1.view(torch.uint8)
    return wire


def dequantize_rowwise(wire: torch.Tensor, D: int, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize_rowwise` made, uint8 [R, D + 4], as FP32 [R, D]."""
    if wire.numel() == 0:
        return torch.empty((len(wire), D), dtype=torch.float32, device=wire.device)
    # A clone rather than .contiguous(), which leaves a single row at an address that FP32 may not start from.
    amax_R1 = wire[:, D:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    unit_RD = wire[:, :D].view(dtype).float() / torch.finfo(dtype).max
    return unit_RD.mul_(amax_R1)


def roundtrip(
    x: torch.Tensor, forward: Precision, backward: Precision | None = None, row_dim: int | None = None
) -> torch.Tensor:
    """`x` [..., D] as the wire would deliver it, and its gradient likewise: emulation where nothing is sent.

    `backward` is `forward` where it is not given. `row_dim` (default D) is the wire's row and must divide D.
    """
    backward = forward if backward is None else backward
    if forward == backward == "fp32":
        return x
    result: torch.Tensor = RoundTrip.apply(x, forward, backward, row_dim)
    return result


class RoundTrip(torch.autograd.Function):
    """Rounds values to the forward precision and gradients to the backward precision."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: Precision, backward: Precision, row_dim: int | None
    ) -> torch.Tensor:
        ctx.wire = (backward, row_dim)
        return _delivered(x, forward, FORWARD_FP8, row_dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        precision, row_dim = ctx.wire
        return _delivered(gradient, precision, BACKWARD_FP8, row_dim), None, None, None


def _delivered(x: torch.Tensor, precision: Precision, fp8: torch.dtype, row_dim: int | None) -> torch.Tensor:
    if precision == "fp32" or x.numel() == 0:
        return x
    if precision != "fp8":
        return x.to(HALVES[precision]).to(x.dtype)
    D = x.shape[-1] if row_dim is None else row_dim
    if x.shape[-1] % D:
        raise ValueError(f"row_dim ({D}) must divide the last dimension ({x.shape[-1]})")
    rows_RD = x.reshape(-1, D)
    return dequantize_rowwise(quantize_rowwise(rows_RD, fp8), D, fp8).view(x.shape).to(x.dtype)
