"""HSTU's pointwise attention and its gradients for CUDA: what hstu_attention.py describes, as Triton kernels.

Axes: B sequences, T positions of all of them, packed, F parts of a position, G heads, d their width, L the most
positions of a sequence, K time buckets; N positions of a tile, S copies of the biases' gradients.

A program has one sequence, one head and one tile of its positions, and walks the tiles that these see, or in the
gradients of keys and values those that see them. No array of positions x positions is written: backward computes the
weights again, once for the queries and biases and once for the keys and values. The biases' gradients are sums over
all pairs, added atomically to one of S copies, so that programs seldom wait for each other; they round in any order.

Precision: FP32 has FP32 products, never TF32; BF16 has products of BF16 numbers with FP32 sums, for which the weights
and their gradients are rounded.

Its tests have passed on an H100 (benchmarks/notes/h100.md); for A100 and B200 it has only been compiled.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..batch import Packing
from ..losses.mol_triton import _dot_add
from ..noise_triton import rounded

TILE, SMALL_TILE = 64, 32
"""Positions; the small one where registers are scarce: FP32, wide heads, and the 64-bit gaps between times."""
INTERPRETED_TILE = 16
COPIES = 64
WARPS = 4
BUDGET = {
    "_keys_backward, float32": (2, 1124),
    "_forward": (2, 0),
    "_queries_backward": (2, 0),
    "_keys_backward": (2, 0),
}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def covers(d: int, dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16) and d <= (64 if dtype == torch.float32 else 128)


def attend(packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None, packing: Packing) -> Tensor:
    """hstu_attention.attend for what is covered; FP32."""
    return _Attention.apply(packing, packed_T3Gd, position_L.float(), None if time_K is None else time_K.float())


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packing: Packing, packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None) -> Tensor:
        problem = Problem(packing, packed_T3Gd.contiguous(), position_L.contiguous(), time_K)
        out_TGd = torch.empty(
            packed_T3Gd.shape[0], *packed_T3Gd.shape[2:], dtype=torch.float32, device=packed_T3Gd.device
        )
        problem.run(_forward, out_TGd)
        ctx.problem = problem
        return out_TGd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TGd: Tensor) -> tuple[Tensor | None, ...]:
        problem: Problem = ctx.problem
        packed_T3Gd = problem.packed_TFGd
        d_packed_T3Gd = torch.empty_like(packed_T3Gd)
        biases = problem.backward(d_out_TGd.to(packed_T3Gd.dtype).contiguous(), d_packed_T3Gd)
        return None, d_packed_T3Gd, *biases


@dataclass(frozen=True)
class Problem:
    """All contiguous; `packed_TFGd` has value, query and key, and possibly more."""

    packing: Packing
    packed_TFGd: Tensor
    position_L: Tensor
    time_K: Tensor | None

    def __post_init__(self) -> None:
        longest, L = self.packing.shape[1], len(self.position_L)
        if longest > L:
            raise IndexError(f"the biases are for sequences of up to {L} positions, not {longest}")

    def backward(self, d_out_TGd: Tensor, d_packed_TFGd: Tensor) -> tuple[Tensor, Tensor | None]:
        """Writes the gradients of value, query and key; returns the biases'. Both given are in the products' type."""
        d_position_SL = self.position_L.new_zeros(COPIES, len(self.position_L))
        d_time_SK = None if self.time_K is None else self.time_K.new_zeros(COPIES, len(self.time_K))
        self.run(_queries_backward, d_out_TGd, d_packed_TFGd, d_position_SL, d_time_SK)
        self.run(_keys_backward, d_out_TGd, d_packed_TFGd)
        return d_position_SL.sum(0), None if d_time_SK is None else d_time_SK.sum(0)

    def run(self, kernel: Any, *tensors: Tensor | None) -> None:
        """One program for each tile of each head of each sequence."""
        (B, longest), (_, parts, G, d), packing = self.packing.shape, self.packed_TFGd.shape, self.packing
        on_gpu, times = self.packed_TFGd.is_cuda, self.time_K is not None
        half = self.packed_TFGd.dtype == torch.bfloat16
        N = INTERPRETED_TILE if not on_gpu else TILE if half and d <= 32 and not times else SMALL_TILE
        grid = (triton.cdiv(longest, N), G, B)
        if not all(grid):
            return
        with torch.cuda.device_of(self.packed_TFGd):
            kernel[grid](
                self.packed_TFGd, self.position_L, self.time_K, packing.offset_B,
                packing.asked_T if times else None, packing.time_T if times else None, *tensors,
                PARTS=parts, G=G, L=len(self.position_L), K=0 if self.time_K is None else len(self.time_K), d=d,
                DP=max(triton.next_power_of_2(d), 16), N=N, TIMES=times,
                EMULATED=half and not on_gpu, num_warps=WARPS, num_stages=1,
                # Without being told so, ptxas may use 32 registers, or 168 of 255, and spill the rest.
                maxnreg=None if half and d <= 64 else 255,
            )  # fmt: skip


@triton.jit
def _load(from_, row, inside, column, width, d: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, DP]: d numbers from a column of each row."""
    k = tl.arange(0, DP)
    mask = inside[:, None] & (k[None, :] < d)
    return tl.load(from_ + row[:, None] * width + column + k[None, :], mask=mask, other=0.0)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    to, x, row, inside, column, width, d: tl.constexpr, DP: tl.constexpr, EMULATED: tl.constexpr
):
    k = tl.arange(0, DP)
    mask = inside[:, None] & (k[None, :] < d)
    tl.store(to + row[:, None] * width + column + k[None, :], rounded(x, to.dtype.element_ty, EMULATED), mask=mask)


@triton.jit
def _pairs(  # type: ignore[no-untyped-def]
    query, key, position, time_bias, asked, time, start, i, j, n, L: tl.constexpr, TIMES: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """Of positions i with positions j: weights and their derivatives, without pairs that do not see each other; which
    pairs do; their time buckets."""
    seen = (j[None, :] <= i[:, None]) & (i < n)[:, None]
    back = i[:, None] - j[None, :]
    score = _dot_add(query, tl.trans(key), tl.load(position + back, mask=seen, other=0.0), EMULATED)
    bucket = back
    if TIMES:
        asked_N = tl.load(asked + start + i, mask=i < n, other=0)
        time_N = tl.load(time + start + j, mask=j < n, other=0)
        gap = asked_N[:, None] - time_N[None, :]
        bits = gap.to(tl.float32).to(tl.int32, bitcast=True)
        bucket = tl.where(gap < 1, 0, (bits >> 22) - 253)
        score += tl.load(time_bias + bucket, mask=seen, other=0.0)
    # e^x overflows to infinity, whose inverse is 0; a NaN of 0 x infinity cannot be.
    sigmoid = 1 / (1 + tl.exp(-score))
    weight = tl.where(seen, score * sigmoid / L, 0.0)
    slope = tl.where(seen, (sigmoid + score * sigmoid * (1 - sigmoid)) / L, 0.0)
    return weight, slope, seen, bucket


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    packed, position, time_bias, bound, asked, time, out,
    PARTS: tl.constexpr, G: tl.constexpr, L: tl.constexpr, K: tl.constexpr, d: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, TIMES: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """packed: value, query and key of each position, first among its PARTS."""
    g, b = tl.program_id(1), tl.program_id(2)
    start = tl.load(bound + b)
    n = tl.load(bound + b + 1) - start
    first = tl.program_id(0) * N
    if first < n:
        dtype = packed.dtype.element_ty
        i = first + tl.arange(0, N)
        query = _load(packed, start + i, i < n, (G + g) * d, PARTS * G * d, d, DP)
        sum_ = tl.zeros((N, DP), tl.float32)
        for other in range(0, first + N, N):
            j = other + tl.arange(0, N)
            key = _load(packed, start + j, j < n, (2 * G + g) * d, PARTS * G * d, d, DP)
            value = _load(packed, start + j, j < n, g * d, PARTS * G * d, d, DP)
            weight, _, _, _ = _pairs(query, key, position, time_bias, asked, time, start, i, j, n, L, TIMES, EMULATED)
            sum_ = _dot_add(rounded(weight, dtype, EMULATED), value, sum_, EMULATED)
        _store(out, sum_, start + i, i < n, g * d, G * d, d, DP, EMULATED)


@triton.jit
def _queries_backward(  # type: ignore[no-untyped-def]
    packed, position, time_bias, bound, asked, time, d_out, d_packed, d_position, d_time,
    PARTS: tl.constexpr, G: tl.constexpr, L: tl.constexpr, K: tl.constexpr, d: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, TIMES: tl.constexpr, EMULATED: tl.constexpr, COPIES: tl.constexpr = COPIES,
):  # fmt: skip
    """Gradients of the queries of a tile, and what its pairs add to those of the biases."""
    g, b = tl.program_id(1), tl.program_id(2)
    start = tl.load(bound + b)
    n = tl.load(bound + b + 1) - start
    first = tl.program_id(0) * N
    if first < n:
        dtype = packed.dtype.element_ty
        copy = (b * G + g) * tl.num_programs(0) % COPIES
        i = first + tl.arange(0, N)
        query = _load(packed, start + i, i < n, (G + g) * d, PARTS * G * d, d, DP)
        d_out_ND = _load(d_out, start + i, i < n, g * d, G * d, d, DP)
        sum_ = tl.zeros((N, DP), tl.float32)
        for other in range(0, first + N, N):
            j = other + tl.arange(0, N)
            key = _load(packed, start + j, j < n, (2 * G + g) * d, PARTS * G * d, d, DP)
            value = _load(packed, start + j, j < n, g * d, PARTS * G * d, d, DP)
            _, slope, seen, bucket = _pairs(
                query, key, position, time_bias, asked, time, start, i, j, n, L, TIMES, EMULATED
            )
            d_score = slope * _dot_add(d_out_ND, tl.trans(value), tl.zeros((N, N), tl.float32), EMULATED)
            tl.atomic_add(d_position + copy * L + (i[:, None] - j[None, :]), d_score, mask=seen, sem="relaxed")
            if TIMES:
                tl.atomic_add(d_time + copy * K + bucket, d_score, mask=seen, sem="relaxed")
            sum_ = _dot_add(rounded(d_score, dtype, EMULATED), key, sum_, EMULATED)
        _store(d_packed, sum_, start + i, i < n, (G + g) * d, PARTS * G * d, d, DP, EMULATED)


@triton.jit
def _keys_backward(  # type: ignore[no-untyped-def]
    packed, position, time_bias, bound, asked, time, d_out, d_packed,
    PARTS: tl.constexpr, G: tl.constexpr, L: tl.constexpr, K: tl.constexpr, d: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, TIMES: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of a tile."""
    g, b = tl.program_id(1), tl.program_id(2)
    start = tl.load(bound + b)
    n = tl.load(bound + b + 1) - start
    first = tl.program_id(0) * N
    if first < n:
        dtype = packed.dtype.element_ty
        j = first + tl.arange(0, N)
        key = _load(packed, start + j, j < n, (2 * G + g) * d, PARTS * G * d, d, DP)
        value = _load(packed, start + j, j < n, g * d, PARTS * G * d, d, DP)
        d_key, d_value = tl.zeros((N, DP), tl.float32), tl.zeros((N, DP), tl.float32)
        for other in range(first, n, N):
            i = other + tl.arange(0, N)
            query = _load(packed, start + i, i < n, (G + g) * d, PARTS * G * d, d, DP)
            d_out_ND = _load(d_out, start + i, i < n, g * d, G * d, d, DP)
            weight, slope, _, _ = _pairs(
                query, key, position, time_bias, asked, time, start, i, j, n, L, TIMES, EMULATED
            )
            d_score = slope * _dot_add(d_out_ND, tl.trans(value), tl.zeros((N, N), tl.float32), EMULATED)
            d_value = _dot_add(tl.trans(rounded(weight, dtype, EMULATED)), d_out_ND, d_value, EMULATED)
            d_key = _dot_add(tl.trans(rounded(d_score, dtype, EMULATED)), query, d_key, EMULATED)
        _store(d_packed, d_value, start + j, j < n, g * d, PARTS * G * d, d, DP, EMULATED)
        _store(d_packed, d_key, start + j, j < n, (2 * G + g) * d, PARTS * G * d, d, DP, EMULATED)
