"""Sampled softmax over dot products for CUDA: what dot_loss.py describes, as two Triton kernels.

Axes: T positions, G groups, N negatives of a group, V unique items, H width; a tile is up to TT positions of one group
x NT of its negatives.

`_queries` has a program for each tile of positions. It walks the negatives with a running log-sum-exp, as flash
attention walks the keys, and sums the items, weighted by what softmax gives them, on the way: the gradient of the
queries needs no second pass. `_items` has a program for each piece of a group and tile of its negatives. It walks the
positions, computes the scores again and sums the gradient of the negatives. No array of positions x negatives is
written, and no row is copied. Items' gradients are added atomically, in no fixed order: under
`torch.use_deterministic_algorithms(True)` the plain form runs.

Precision: FP32 products, each as three of TF32 on tensor cores ("tf32x3"), which keep about the bits of FP32. One TF32
product would not do, nor one of BF16: cosines over a temperature of 0.05 would be off.

Its tests have passed on an H100 (benchmarks/notes/h100.md); for A100 and B200 it has only been compiled.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transfer import on_device
from .blockwise import Examples, keep_gradients, kept_gradients, spans
from .mol_triton import LEAST_SHARED, _shared_memory

SPAN_FIELDS = tl.constexpr(3)
PIECE = 256
"""Most positions of a piece: with more of them, the items' gradients are added up in memory less often."""
WIDEST = 512
COLUMNS = 32
"""Most columns of the operands that registers hold at once."""
BUDGET = {"_queries": (1, 36), "_items": (1, 40)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def covers(H: int, device: torch.device) -> bool:
    """Whether tiles of this width fit on the device. `make soak` compiles the limits."""
    return 0 < H <= WIDEST and _shared_memory(device) >= LEAST_SHARED


def dot_sampled_softmax(query_TH: Tensor, item_VH: Tensor, examples: Examples) -> Tensor:
    """dot_loss.dot_sampled_softmax for what is covered. Indices are not checked."""
    return _DotLoss.apply(query_TH, item_VH, examples)


class _DotLoss(torch.autograd.Function):
    """The gradients are computed in forward and kept."""

    @staticmethod
    def forward(ctx: Any, query_TH: Tensor, item_VH: Tensor, examples: Examples) -> Tensor:
        query, item = (side.detach().float().contiguous() for side in (query_TH, item_VH))
        with torch.cuda.device_of(query):
            loss_T, *gradients = _run(query, item, examples, any(ctx.needs_input_grad))
        keep_gradients(ctx, gradients, (query_TH, item_VH))
        return (loss_T if examples.weight_T is None else loss_T * examples.weight_T).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, scale), None


def _run(query_TH: Tensor, item_VH: Tensor, examples: Examples, needed: bool) -> list[Tensor]:
    """The loss of each position, unweighted, and, if needed, both gradients."""
    (T, H), N, bounds = query_TH.shape, examples.negatives_GN.shape[1], examples.bounds
    plan = _plan(H, T, len(bounds) - 1)
    loss_T, whole_T = (torch.empty(T, dtype=torch.float32, device=query_TH.device) for _ in range(2))
    gradients = [torch.empty_like(query_TH), torch.zeros_like(item_VH)] if needed else []
    if not T:
        return [loss_T, *gradients]
    tiles, pieces = (torch.stack(spans(bounds, size), 1) for size in (plan.TT, max(PIECE, plan.TT)))
    both = on_device(torch.cat([tiles, pieces]), query_TH.device)
    target_T, negatives_GN = (of.to(torch.int64).contiguous() for of in (examples.target_T, examples.negatives_GN))
    corrected = examples.log_q_V is not None
    log_q_V = examples.log_q_V.float().contiguous() if examples.log_q_V is not None else loss_T
    weight_T = loss_T if examples.weight_T is None else examples.weight_T.float().contiguous()
    inputs = (query_TH, item_VH, target_T, negatives_GN, log_q_V)
    sizes = {
        "H": H, "HP": plan.HP, "HC": min(plan.HP, COLUMNS), "TT": plan.TT, "NT": plan.NT, "CORRECTED": corrected,
        "num_warps": plan.warps, "num_stages": 1,
    }  # fmt: skip
    d_query_TH, d_item_VH = gradients or (query_TH, item_VH)
    _queries[(len(tiles),)](
        *inputs, weight_T, both, loss_T, whole_T, d_query_TH, d_item_VH, N, GRADIENTS=needed,
        WEIGHTED=examples.weight_T is not None, **sizes,
    )  # fmt: skip
    if needed:
        grid = len(pieces), triton.cdiv(N, plan.NT)
        _items[grid](*inputs, both[len(tiles) :], whole_T, d_item_VH, N, **sizes)
    return [loss_T, *gradients]


@dataclass(frozen=True)
class _Plan:
    """The padded width; a tile's positions and negatives; warps of a program."""

    HP: int
    TT: int
    NT: int
    warps: int


def _plan(H: int, T: int, G: int) -> _Plan:
    HP = max(triton.next_power_of_2(H), 16)
    # Chosen by the compiler's report of registers; on none of the GPUs do such tiles need tensor memory.
    TT, NT, warps = (32, 32, 4) if HP <= 64 else (16, 32, 4) if HP <= 128 else (16, 16, 8)
    # Short sequences and single positions would leave large tiles empty.
    return _Plan(HP, TT if T >= 16 * G else 16, NT, warps)


@triton.jit
def _rows(side, row, inside, h, H: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(side + row[:, None] * H + h[None, :], mask=inside[:, None] & (h < H)[None, :], other=0.0)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    a, row_A, inside_A, b, row_B, inside_B, H: tl.constexpr, HP: tl.constexpr, HC: tl.constexpr
):
    """Dot products of rows of a and of b [A, B], HC columns at a time: of more, the registers could not hold the
    operands."""
    score_AB = tl.zeros((row_A.shape[0], row_B.shape[0]), tl.float32)
    for first in tl.static_range(0, HP, HC):
        h = first + tl.arange(0, HC)
        a_AH, b_BH = _rows(a, row_A, inside_A, h, H), _rows(b, row_B, inside_B, h, H)
        score_AB = tl.dot(a_AH, tl.trans(b_BH), score_AB, input_precision="tf32x3")
    return score_AB


@triton.jit
def _queries(  # type: ignore[no-untyped-def]
    query, item, target, negative, log_q, weight, span, loss, whole, d_query, d_item, N,
    H: tl.constexpr, HP: tl.constexpr, HC: tl.constexpr, TT: tl.constexpr, NT: tl.constexpr,
    CORRECTED: tl.constexpr, GRADIENTS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """whole: log-sum-exp of a position's scores, less the log of its weight, so that what it is subtracted from gives
    weighted shares. Writes d_query and adds the targets' share to d_item."""
    span += tl.program_id(0) * SPAN_FIELDS
    start, end, group = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    t, h = start + tl.arange(0, TT), tl.arange(0, HP)
    target_T = tl.load(target + t, mask=t < end, other=0)
    positive_T = tl.sum(_rows(query, t, t < end, h, H) * _rows(item, target_T, t < end, h, H), 1)
    if CORRECTED:
        positive_T -= tl.load(log_q + target_T, mask=t < end, other=0.0)
    highest_T = positive_T
    others_T = tl.zeros((TT,), tl.float32)
    sum_TH = tl.zeros((TT, HP), tl.float32)
    for first in range(0, N, NT):
        n = first + tl.arange(0, NT)
        negative_N = tl.load(negative + group * N + n, mask=n < N, other=0)
        score_TN = _scores(query, t, t < end, item, negative_N, n < N, H, HP, HC)
        if CORRECTED:
            score_TN -= tl.load(log_q + negative_N, mask=n < N, other=0.0)[None, :]
        counts = (negative_N[None, :] != target_T[:, None]) & (n < N)[None, :]
        score_TN = tl.where(counts, score_TN, -float("inf"))
        higher_T = tl.maximum(highest_T, tl.max(score_TN, 1))
        rescale_T = tl.exp(highest_T - higher_T)
        e_TN = tl.exp(score_TN - higher_T[:, None])
        others_T = others_T * rescale_T + tl.sum(e_TN, 1)
        if GRADIENTS:
            item_NH = _rows(item, negative_N, n < N, h, H)
            sum_TH = tl.dot(e_TN, item_NH, sum_TH * rescale_T[:, None], input_precision="tf32x3")
        highest_T = higher_T
    total_T = others_T + tl.exp(positive_T - highest_T)
    whole_T = highest_T + tl.log(total_T)
    if WEIGHTED:
        weight_T = tl.load(weight + t, mask=t < end, other=0.0)
        whole_T -= tl.log(weight_T)
    tl.store(whole + t, whole_T, mask=t < end)
    tl.store(loss + t, highest_T - positive_T + tl.log(total_T), mask=t < end)
    if GRADIENTS:
        share_T = (weight_T if WEIGHTED else 1.0) / total_T
        # The target's probability minus one, without cancellation.
        d_positive_T = -others_T * share_T
        # Loaded again, because registers are scarce in the loop.
        d_query_TH = sum_TH * share_T[:, None] + d_positive_T[:, None] * _rows(item, target_T, t < end, h, H)
        inside = (t < end)[:, None] & (h < H)[None, :]
        tl.store(d_query + t[:, None] * H + h[None, :], d_query_TH, mask=inside)
        tl.atomic_add(
            d_item + target_T[:, None] * H + h[None, :],
            d_positive_T[:, None] * _rows(query, t, t < end, h, H),
            mask=inside,
            sem="relaxed",
        )


@triton.jit
def _items(  # type: ignore[no-untyped-def]
    query, item, target, negative, log_q, span, whole, d_item, N,
    H: tl.constexpr, HP: tl.constexpr, HC: tl.constexpr, TT: tl.constexpr, NT: tl.constexpr, CORRECTED: tl.constexpr,
):  # fmt: skip
    """Adds the negatives' share to d_item."""
    span += tl.program_id(0) * SPAN_FIELDS
    start, end, group = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    n, h = tl.program_id(1) * NT + tl.arange(0, NT), tl.arange(0, HP)
    negative_N = tl.load(negative + group * N + n, mask=n < N, other=0)
    if CORRECTED:
        log_q_N = tl.load(log_q + negative_N, mask=n < N, other=0.0)
    sum_NH = tl.zeros((NT, HP), tl.float32)
    for first in range(start, end, TT):
        t = first + tl.arange(0, TT)
        target_T = tl.load(target + t, mask=t < end, other=0)
        whole_T = tl.load(whole + t, mask=t < end, other=float("inf"))
        score_NT = _scores(item, negative_N, n < N, query, t, t < end, H, HP, HC)
        if CORRECTED:
            score_NT -= log_q_N[:, None]
        counts = (negative_N[:, None] != target_T[None, :]) & (t < end)[None, :]
        share_NT = tl.where(counts, tl.exp(score_NT - whole_T[None, :]), 0.0)
        query_TH = _rows(query, t, t < end, h, H)
        sum_NH = tl.dot(share_NT, query_TH, sum_NH, input_precision="tf32x3")
    inside = (n < N)[:, None] & (h < H)[None, :]
    tl.atomic_add(d_item + negative_N[:, None] * H + h[None, :], sum_NH, mask=inside, sem="relaxed")
