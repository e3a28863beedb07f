"""What is around the attention of an HSTU block, for CUDA: norms, gates and dropout, as one Triton kernel each way,
where torch's operations and casts are some twenty launches.

Axes: T positions, D width, G heads, d their width, L the most positions of a sequence, K time buckets; F the four parts
of a unit: value, query, key and gate. R rows of a program, C columns, D padded to a power of two.

A norm has no weights and computes in FP32. What is multiplied and dropped is rounded where torch would round it. To the
gradient of a norm's input is added what comes past the block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..batch import Packing
from ..noise import halves
from ..noise_triton import hashed_rows, keep_mask, rounded
from . import hstu_triton

ELEMENTS, MOST_COLUMNS = 1024, 2048
"""Numbers of a program, unless a row has more."""
GATE = tl.constexpr(3)
"""The gate's place among the parts."""
PARTS = tl.constexpr(4)
BUDGET = {"_normed": (4, 0), "_normed_backward": (4, 0), "_gated": (4, 0), "_gated_backward": (4, 0)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def covers(D: int, d: int, dtype: torch.dtype) -> bool:
    return D <= MOST_COLUMNS and hstu_triton.covers(d, dtype)


def normed(x_TD: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x_TD, FP32, with mean 0 and variance 1 along D, in `dtype`; and x_TD for what comes past the block."""
    return _Normed.apply(x_TD, epsilon, dtype)


def unit(
    raw_TFGd: Tensor,
    position_L: Tensor,
    time_K: Tensor | None,
    packing: Packing,
    epsilon: float,
    noise: tuple[int, int] | None,
) -> Tensor:
    """With V, Q, K, U = silu(raw): norm(attention(V, Q, K)) * U, after dropout [T, D]. `noise` has dropout's key, and
    how many of 2^16 random numbers drop a number."""
    time_K = None if time_K is None else time_K.float()
    return _Unit.apply(packing, raw_TFGd, position_L.float(), time_K, epsilon, noise or (0, 0))


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        ctx.epsilon = epsilon
        ctx.save_for_backward(x)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        _run(_normed, x, out, epsilon=epsilon)
        return out, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_past: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        d_x = torch.empty_like(x)
        _run(_normed_backward, x, d_out.contiguous(), d_past.contiguous(), d_x, epsilon=ctx.epsilon)
        return d_x, None, None


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packing: Packing,
        raw: Tensor,
        position_L: Tensor,
        time_K: Tensor | None,
        epsilon: float,
        noise: tuple[int, int],
    ) -> Tensor:
        raw, position_L = raw.contiguous(), position_L.contiguous()
        packed = F.silu(raw)
        T, _, G, d = raw.shape
        attended = torch.empty(T, G * d, dtype=torch.float32, device=raw.device)
        hstu_triton.Problem(packing, packed, position_L, time_K).run(hstu_triton._forward, attended)
        out = torch.empty(T, G * d, dtype=raw.dtype, device=raw.device)
        ctx.settings = packing, epsilon, noise
        ctx.save_for_backward(raw, packed, attended, position_L, time_K)
        _run(_gated, attended, packed, out, row=packing.row_T, epsilon=epsilon, noise=noise)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (packing, epsilon, noise), (raw, packed, attended, position_L, time_K) = ctx.settings, ctx.saved_tensors
        d_packed = torch.empty_like(packed)
        d_attended = torch.empty(attended.shape, dtype=packed.dtype, device=packed.device)
        tensors = attended, packed, d_out.contiguous(), d_attended, d_packed
        _run(_gated_backward, *tensors, row=packing.row_T, epsilon=epsilon, noise=noise)
        problem = hstu_triton.Problem(packing, packed, position_L, time_K)
        d_position_L, d_time_K = problem.backward(d_attended, d_packed)
        return None, torch.ops.aten.silu_backward(d_packed, raw), d_position_L, d_time_K, None, None


def _run(
    kernel: Any, x: Tensor, *tensors: Tensor, epsilon: float, row: Tensor | None = None, noise: tuple[int, int] = (0, 0)
) -> None:
    T, D = x.shape
    columns = triton.next_power_of_2(D)
    rows = max(1, ELEMENTS // columns)
    if T == 0:
        return
    sizes: dict[str, Any] = {"D": D, "ROWS": rows, "COLUMNS": columns}
    arguments: tuple[Any, ...] = tensors
    if row is not None:
        key, drop = noise
        arguments += (row.contiguous(), *halves(key), drop, 65536 / (65536 - drop))
        sizes["DROP"] = drop > 0
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(T, rows),)](x, *arguments, epsilon, T, **sizes, EMULATED=x.device.type != "cuda")


@triton.jit
def _places(T, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of rows, of columns, and which numbers there are."""
    r, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return r, c, (r < T)[:, None] & (c < D)[None, :]


@triton.jit
def _norm(x, inside, epsilon, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [R, C] with mean 0 and variance 1 in each row, and what it was multiplied by."""
    centered = tl.where(inside, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centered * centered, 1) / D + epsilon)
    return centered * scale[:, None], scale


@triton.jit
def _norm_backward(y, scale, d_y, inside, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of a norm's input, from its output and the gradient of that; 0 outside."""
    mean, along = tl.sum(d_y, 1) / D, tl.sum(d_y * y, 1) / D
    return tl.where(inside, (d_y - mean[:, None] - y * along[:, None]) * scale[:, None], 0.0)


@triton.jit(do_not_specialize=["T"])
def _normed(  # type: ignore[no-untyped-def]
    x, out, epsilon, T, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EMULATED: tl.constexpr
):
    r, c, inside = _places(T, D, ROWS, COLUMNS)
    at = r[:, None] * D + c[None, :]
    y, _ = _norm(tl.load(x + at, mask=inside, other=0.0), inside, epsilon, D)
    tl.store(out + at, rounded(y, out.dtype.element_ty, EMULATED), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _normed_backward(  # type: ignore[no-untyped-def]
    x, d_out, d_past, d_x, epsilon, T, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    r, c, inside = _places(T, D, ROWS, COLUMNS)
    at = r[:, None] * D + c[None, :]
    y, scale = _norm(tl.load(x + at, mask=inside, other=0.0), inside, epsilon, D)
    d_y = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    past = tl.load(d_past + at, mask=inside, other=0.0)
    tl.store(d_x + at, past + _norm_backward(y, scale, d_y, inside, D), mask=inside)


@triton.jit
def _kept(row, r, c, T, key_low, key_high, dropped, scale):  # type: ignore[no-untyped-def]
    """What dropout multiplies by, [R, C]."""
    keep = keep_mask(hashed_rows(tl.load(row + r, mask=r < T, other=0), key_low, key_high), c, dropped)
    return tl.where(keep, scale, 0.0)


@triton.jit(do_not_specialize=["key_low", "key_high", "dropped", "T"])
def _gated(  # type: ignore[no-untyped-def]
    attended, packed, out, row, key_low, key_high, dropped, kept_scale, epsilon, T,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    r, c, inside = _places(T, D, ROWS, COLUMNS)
    at, gate_at = r[:, None] * D + c[None, :], (r * PARTS + GATE)[:, None] * D + c[None, :]
    y, _ = _norm(tl.load(attended + at, mask=inside, other=0.0), inside, epsilon, D)
    value = y * tl.load(packed + gate_at, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        value *= _kept(row, r, c, T, key_low, key_high, dropped, kept_scale)
    tl.store(out + at, rounded(value, out.dtype.element_ty, EMULATED), mask=inside)


@triton.jit(do_not_specialize=["key_low", "key_high", "dropped", "T"])
def _gated_backward(  # type: ignore[no-untyped-def]
    attended, packed, d_out, d_attended, d_packed, row, key_low, key_high, dropped, kept_scale, epsilon, T,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    r, c, inside = _places(T, D, ROWS, COLUMNS)
    at, gate_at = r[:, None] * D + c[None, :], (r * PARTS + GATE)[:, None] * D + c[None, :]
    dtype: tl.constexpr = packed.dtype.element_ty
    y, scale = _norm(tl.load(attended + at, mask=inside, other=0.0), inside, epsilon, D)
    d_value = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        d_value *= _kept(row, r, c, T, key_low, key_high, dropped, kept_scale)
    tl.store(d_packed + gate_at, rounded(d_value * y, dtype, EMULATED), mask=inside)
    d_y = d_value * tl.load(packed + gate_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_attended + at, rounded(_norm_backward(y, scale, d_y, inside, D), dtype, EMULATED), mask=inside)
