"""Gated linear units for CUDA: value * silu(gate) as one Triton kernel each way, which in torch are six.

Axes: R rows, H hidden units.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..noise_triton import rounded

ELEMENTS = 1024
"""Hidden units of a program."""
BUDGET = {"_gated": (4, 0), "_gated_backward": (4, 0)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def gated(both_RH: Tensor) -> Tensor:
    """[R, 2 H] of values and gates, FP32 or BF16 -> [R, H], value * silu(gate)."""
    return _Gated.apply(both_RH)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        out = both.new_empty(len(both), both.shape[1] // 2)
        _run(_gated, both, out, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        d_both = torch.empty_like(both)
        _run(_gated_backward, both, gradient.contiguous(), d_both)
        return d_both


def _run(kernel: Any, both: Tensor, of_half: Tensor, to: Tensor) -> None:
    H = both.shape[1] // 2
    number = len(both) * H
    if number:
        with torch.cuda.device_of(both):
            kernel[(triton.cdiv(number, ELEMENTS),)](
                both, of_half, to, number, H, ELEMENTS=ELEMENTS,
                EMULATED=both.device.type != "cuda",
            )  # fmt: skip


@triton.jit
def _places(number, H, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of hidden units, of their values, and which of them exist."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    return at, at + at // H * H, at < number


@triton.jit(do_not_specialize=["number"])
def _gated(both, _, out, number, H, ELEMENTS: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    at, value_at, inside = _places(number, H, ELEMENTS)
    dtype: tl.constexpr = both.dtype.element_ty
    value = tl.load(both + value_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(both + value_at + H, mask=inside, other=0.0).to(tl.float32)
    # Rounded where torch rounds.
    silu = rounded(gate / (1 + tl.exp(-gate)), dtype, EMULATED).to(tl.float32)
    tl.store(out + at, rounded(value * silu, dtype, EMULATED), mask=inside)


@triton.jit(do_not_specialize=["number"])
def _gated_backward(  # type: ignore[no-untyped-def]
    both, gradient, d_both, number, H, ELEMENTS: tl.constexpr, EMULATED: tl.constexpr
):
    at, value_at, inside = _places(number, H, ELEMENTS)
    dtype: tl.constexpr = both.dtype.element_ty
    value = tl.load(both + value_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(both + value_at + H, mask=inside, other=0.0).to(tl.float32)
    d_out = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = rounded(gate * sigmoid, dtype, EMULATED).to(tl.float32)
    d_silu = rounded(d_out * value, dtype, EMULATED).to(tl.float32)
    tl.store(d_both + value_at, rounded(d_out * silu, dtype, EMULATED), mask=inside)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_both + value_at + H, rounded(d_silu * slope, dtype, EMULATED), mask=inside)
