"""L2 normalization for CUDA: dot.py's l2_normalize as one Triton kernel each way, which in torch are some twenty.

Axes: R rows, C numbers of a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..noise_triton import rounded

ELEMENTS, MOST_COLUMNS = 2048, 8192
"""Numbers of a program, unless a row has more."""
BUDGET = {"_normalize": (4, 0), "_normalize_backward": (4, 0)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def covers(x: Tensor, dtype: torch.dtype) -> bool:
    known = (torch.float32, torch.bfloat16, torch.float16)
    return x.dtype in known and dtype in known and 0 < x.shape[-1] <= MOST_COLUMNS


def l2_normalize(x: Tensor, scale: float, dtype: torch.dtype, least: float) -> Tensor:
    """x [..., C] at length `scale` along the last axis, in `dtype`, computed in FP32; rows shorter than `least` are
    multiplied by scale / least."""
    return _Normalize.apply(x, scale, dtype, least)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, dtype: torch.dtype, least: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.settings = scale, least
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        _run(_normalize, x, out, scale, least)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        d_x = torch.empty_like(x)
        _run(_normalize_backward, x, gradient.contiguous(), d_x, *ctx.settings)
        return d_x, None, None, None


def _run(kernel: Any, x: Tensor, *arguments: Any) -> None:
    C = x.shape[-1]
    R = x.numel() // C
    if R == 0:
        return
    columns = triton.next_power_of_2(C)
    rows = max(1, ELEMENTS // columns)
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(R, rows),)](
            x, *arguments, R, C=C, ROWS=rows, COLUMNS=columns, EMULATED=x.device.type != "cuda"
        )


@triton.jit
def _rows(x, at, inside):  # type: ignore[no-untyped-def]
    """Rows and their lengths, FP32."""
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return values, tl.sqrt(tl.sum(values * values, 1))


@triton.jit
def _store(to, at, inside, values, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(to + at, rounded(values, to.dtype.element_ty, EMULATED), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _normalize(  # type: ignore[no-untyped-def]
    x, out, scale, least, R, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EMULATED: tl.constexpr
):
    r, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at, inside = r[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]
    values, length = _rows(x, at, inside)
    _store(out, at, inside, values * (scale / tl.maximum(length, least))[:, None], EMULATED)


@triton.jit(do_not_specialize=["R"])
def _normalize_backward(  # type: ignore[no-untyped-def]
    x, gradient, d_x, scale, least, R, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at, inside = r[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]
    values, length = _rows(x, at, inside)
    d_out = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    # Shorter rows are only scaled.
    longer = length > least
    along = tl.where(longer, tl.sum(d_out * values, 1), 0.0) / tl.where(longer, length * length, 1.0)
    across = d_out - values * along[:, None]
    _store(d_x, at, inside, across * (scale / tl.maximum(length, least))[:, None], EMULATED)
