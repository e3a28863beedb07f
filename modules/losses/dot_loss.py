"""Sampled softmax over dot products with gradients written by hand: a few large matrix products and no graph; on CUDA
two kernels (dot_triton.py).

Axes: T positions, G groups of consecutive positions, N negatives of a group, V unique items, H width; P pieces of
groups at once, padded to L positions.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitmix.common.compiled import has_triton

from ..transfer import on_device
from .blockwise import Examples, keep_gradients, kept_gradients


def dot_sampled_softmax(query_TH: Tensor, item_VH: Tensor, examples: Examples) -> Tensor:
    """Sum over T positions, by their weights, of -log softmax of the target's dot product among those of the target and
    its N negatives (section 3.2), FP32 scalar. A negative equal to a position's target (an accidental hit) does not
    count.

    Computes in FP32 under autocast too: in BF16, cosines over a temperature of 0.05 would be off by up to 0.06. CUDA
    runs Triton, up to the width that dot_triton.covers; not under torch.use_deterministic_algorithms.
    """
    if query_TH.is_cuda and has_triton() and not torch.are_deterministic_algorithms_enabled():
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from . import dot_triton

        if dot_triton.covers(query_TH.shape[1], query_TH.device):
            return dot_triton.dot_sampled_softmax(query_TH, item_VH, examples)
    if examples.log_q_V is not None:
        # The correction becomes one more column of each product.
        query_TH = torch.cat([query_TH.float(), query_TH.new_ones(len(query_TH), 1, dtype=torch.float32)], 1)
        item_VH = torch.cat([item_VH.float(), -examples.log_q_V[:, None]], 1)
    return _DotSoftmax.apply(query_TH, item_VH, examples)


_PAIRS = {"cpu": 2**18, "cuda": 2**26}
"""Most scores of pieces at once, to fit a core's cache, or to give a GPU few launches; a single position may have
more."""
_SINGLE = {"cpu": 2**13, "cuda": 2**20}
"""Most scores at once of single positions, whose scores each have a copied row of an item."""
_POSITIONS = 256
"""Most positions of a piece."""
_ALL_PAIRS = {"cpu": 2**18, "cuda": 2**26}
"""Most scores at once when all items are scored, to fit a core's cache, but for _LEAST."""
_LEAST = 64
"""Positions at once even so, because products with fewer read the items too often, while their scores fit _MOST."""
_MOST = 2**23


class _DotSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_TH: Tensor, item_VH: Tensor, examples: Examples) -> Tensor:
        groups, N = examples.negatives_GN.shape
        # If all positions share negatives that are most of the items, no item's row needs to be copied.
        whole = groups == 1 and len(item_VH) <= 2 * N and len(query_TH) > 0
        query, item = query_TH.detach().float(), item_VH.detach().float()
        loss = torch.zeros((), device=query.device)
        made = torch.empty_like if whole else torch.zeros_like
        gradients = [made(query), made(item)] if any(ctx.needs_input_grad) else []
        with torch.autocast(query.device.type, enabled=False):
            (_write_all if whole else _add_pieces)(query, item, examples, loss, gradients)
        keep_gradients(ctx, gradients, (query_TH, item_VH))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return *kept_gradients(ctx, scale), None


def _write_all(query_TH: Tensor, item_VH: Tensor, examples: Examples, loss: Tensor, gradients: list[Tensor]) -> None:
    """One group, scored with every item: an item counts as often as the negatives name it, and the target once. Writes
    the gradients."""
    (negative_N,) = examples.negatives_GN
    count_V = item_VH.new_zeros(len(item_VH)).index_add_(0, negative_N, item_VH.new_ones(len(negative_N)))
    log_count_V = count_V.log()
    rows = max(1, _ALL_PAIRS[item_VH.device.type] // len(item_VH), min(_LEAST, _MOST // len(item_VH)))
    for start in range(0, len(query_TH), rows):
        these = slice(start, start + rows)
        query_RH, target_R = query_TH[these], examples.target_T[these]
        weight_R1 = query_RH.new_ones(()) if examples.weight_T is None else examples.weight_T[these, None]
        positive_R1 = (query_RH * _rows(item_VH, target_R)).sum(1, keepdim=True)
        score_RV = torch.addmm(log_count_V, query_RH, item_VH.t()).scatter_(1, target_R[:, None], positive_R1)
        share_RV = score_RV.softmax(1)
        # The log of the sum of exponentials, without computing them again.
        total_R1 = score_RV.amax(1, keepdim=True) - share_RV.amax(1, keepdim=True).log()
        loss += ((total_R1 - positive_R1) * weight_R1).sum()
        if gradients:
            d_score_RV = share_RV.scatter_add_(1, target_R[:, None], torch.full_like(positive_R1, -1.0))
            torch.mm(d_score_RV, item_VH, out=gradients[0][these]).mul_(weight_R1)
            gradients[1].addmm_(d_score_RV.t(), query_RH * weight_R1, beta=1 if start else 0)


def _add_pieces(query_TH: Tensor, item_VH: Tensor, examples: Examples, loss: Tensor, gradients: list[Tensor]) -> None:
    """Groups side by side, each position scored with its group's negatives. Adds to the gradients."""
    for at_PL, real_PL, group_P in _pieces(examples):
        # What a position counts: nothing where it is padding.
        weight_PL = real_PL if examples.weight_T is None else real_PL * examples.weight_T[at_PL]
        target_PL, negative_PN = examples.target_T[at_PL], examples.negatives_GN[group_P]
        query_PLH, target_PLH, negative_PNH = (
            _rows(query_TH, at_PL),
            _rows(item_VH, target_PL),
            _rows(item_VH, negative_PN),
        )
        score_PLN = torch.bmm(query_PLH, negative_PNH.mT)
        score_PLN.masked_fill_(target_PL[:, :, None] == negative_PN[:, None], -torch.inf)
        positive_PL = (query_PLH * target_PLH).sum(2)
        total_PL = torch.logaddexp(positive_PL, score_PLN.logsumexp(2))
        loss += ((total_PL - positive_PL) * weight_PL).sum()
        if gradients:
            d_score_PLN = score_PLN.sub_(total_PL[:, :, None]).exp_().mul_(weight_PL[:, :, None])
            d_positive_PL1 = (((positive_PL - total_PL).exp() - 1) * weight_PL)[:, :, None]
            d_query_PLH = torch.bmm(d_score_PLN, negative_PNH) + d_positive_PL1 * target_PLH
            gradients[0].index_add_(0, at_PL.flatten(), d_query_PLH.flatten(0, 1))
            gradients[1].index_add_(0, negative_PN.flatten(), torch.bmm(d_score_PLN.mT, query_PLH).flatten(0, 1))
            gradients[1].index_add_(0, target_PL.flatten(), (d_positive_PL1 * query_PLH).flatten(0, 1))


def _rows(of: Tensor, index: Tensor) -> Tensor:
    """of[index], in a fifth of the time."""
    return of.index_select(0, index.flatten()).view(*index.shape, -1)


def _pieces(examples: Examples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pieces of groups, as many at once as fit: positions [P, L], 1 or 0 where one is real or padding [P, L], and each
    piece's group [P]."""
    N, device = examples.negatives_GN.shape[1], examples.target_T.device
    at_once, single = _PAIRS[device.type], _SINGLE[device.type]
    most = max(1, min(_POSITIONS, at_once // max(1, N)))
    pieces = [
        (start, min(start + most, last), group)
        for group, (first, last) in enumerate(pairwise(examples.bounds))
        for start in range(first, last, most)
    ]
    # Pieces of like lengths go together.
    pieces.sort(key=lambda piece: piece[1] - piece[0])
    while pieces:
        longest = pieces[-1][1] - pieces[-1][0]
        pairs = at_once if longest > 1 else min(at_once, single)
        count = max(1, pairs // (longest * max(1, N)))
        starts_P, ends_P, group_P = on_device(torch.tensor(pieces[-count:]), device).t()
        at_PL = starts_P[:, None] + torch.arange(longest, device=device)
        real_PL = at_PL < ends_P[:, None]
        yield at_PL.where(real_PL, starts_P[:, None]), real_PL.float(), group_P
        del pieces[-count:]
