"""A sampled loss in plain torch, block by block: the reference for the fused forms, and the fallback without them.

Axes: T positions, G groups of consecutive positions, N shared negatives of a group, V unique items of the batch.

A block is positions that share negatives, or single positions that each have their own. Its backward runs right after
its forward, so that nothing of size positions x negatives x components outlives the block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import LossConfig
from ..noise import Noise

Side = tuple[Tensor, ...]
Reduce = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Loss of each position [T] from positive_T, negative_TN and hit_TN, true where a negative is the target."""


@dataclass(frozen=True)
class Examples:
    """The target and negatives of each position.

    row_T: global number of each position (int64). target_T: index of its next item among the V unique items. Positions
    bounds[g] to bounds[g + 1] have the negatives negatives_GN[g], also indices of unique items. log_q_V: for each
    unique item, the log of the probability that a negative is that item; it is subtracted from the scores of targets
    and negatives, so that the softmax has the same optimum however negatives are drawn. Uniform negatives need no
    correction: None. weight_T: what the loss of each position is multiplied by, FP32; None: 1.
    """

    row_T: Tensor
    target_T: Tensor
    bounds: Sequence[int]
    negatives_GN: Tensor
    log_q_V: Tensor | None = None
    weight_T: Tensor | None = None


def blockwise_loss(
    reduce: Reduce,
    similarity: Any,
    query: Side,
    item: Side,
    examples: Examples,
    noise: Noise | None,
    pair_dropout: float,
) -> Tensor:
    """Returns the sum of `reduce` over the T positions, each by its weight, FP32 scalar. `noise` applies dropout at the
    rate `pair_dropout` to what the `similarity` (similarity/base.py) computes for each pair."""
    N = examples.negatives_GN.shape[1]

    def dropout_of(row_T: Tensor, first: int, end: int) -> Callable[[Tensor], Tensor] | None:
        """Returns the dropout of what the similarity computes for pairs of positions and candidates first..end, of
        which 0 is the target. Each pair has a row of the mask."""
        if noise is None or pair_dropout == 0:
            return None
        row_P = (row_T[:, None] * (N + 1) + torch.arange(first, end, device=row_T.device)).flatten()
        return lambda pairs: noise.dropout(pairs.flatten(0, -2), pair_dropout, GATES, row_P).view_as(pairs)

    def block_loss(block: _Block, query: Side, positive: Side, negative: Side) -> Tensor:
        target_T = examples.target_T[block.start : block.end]
        row_T = examples.row_T[block.start : block.end]
        positive_T, dropout = similarity.pairs(query, positive, dropout_of(row_T, 0, 1)), dropout_of(row_T, 1, N + 1)
        if block.shared:
            negative_TN = similarity.all_pairs(query, negative, dropout)
        else:
            repeated = tuple(side.repeat_interleave(N, 0) for side in query)
            negative_TN = similarity.pairs(repeated, negative, dropout).view(-1, N)
        if examples.log_q_V is not None:
            positive_T = positive_T - examples.log_q_V[target_T]
            negative_TN = negative_TN - examples.log_q_V[block.negatives]
        loss_T = reduce(positive_T, negative_TN, target_T[:, None] == block.negatives)
        if examples.weight_T is not None:
            loss_T = loss_T * examples.weight_T[block.start : block.end]
        return loss_T.sum()

    most = _NUMBERS[examples.row_T.device.type] // max(1, N * similarity.pair_numbers)
    blocks = _blocks(examples, max(1, min(_POSITIONS, most)))
    tensors = (*query, *item, *similarity.pair_parameters())
    return _Blockwise.apply(block_loss, blocks, examples, len(query), len(item), *tensors)


def softmax(positive_T: Tensor, negative_TN: Tensor, hit_TN: Tensor, config: LossConfig | None = None) -> Tensor:
    """Returns -log softmax of the target among itself and the negatives (section 3.2)."""
    negative_TN = negative_TN.masked_fill(hit_TN, -torch.inf)
    return torch.logsumexp(torch.cat([positive_T[:, None], negative_TN], 1), 1) - positive_T


def bce(positive_T: Tensor, negative_TN: Tensor, hit_TN: Tensor, config: LossConfig | None = None) -> Tensor:
    """Returns the binary cross entropy of the target plus the mean over the negatives (the paper's baseline, section
    5.1.2)."""
    valid_TN = (~hit_TN).float()
    negative_T = (F.softplus(negative_TN) * valid_TN).sum(1) / valid_TN.sum(1).clamp(min=1)
    return F.softplus(-positive_T) + negative_T


GATES = "gates"
"""The place in the model that names the gates' dropout."""


@dataclass(frozen=True)
class _Block:
    """Positions start..end, which share negatives [1, N] or have one row of negatives each."""

    start: int
    end: int
    negatives: Tensor
    shared: bool


def _blocks(examples: Examples, most: int) -> list[_Block]:
    """Blocks of at most `most` positions. If all groups are single positions, blocks span groups; otherwise each group
    is one block or several."""
    bounds, negatives_GN = examples.bounds, examples.negatives_GN
    if len(bounds) - 1 == bounds[-1] > 1 and all(end - start == 1 for start, end in pairwise(bounds)):
        most = min(most, _SINGLE)
        spans = [(start, min(start + most, bounds[-1])) for start in range(0, bounds[-1], most)]
        return [_Block(start, end, negatives_GN[start:end], shared=False) for start, end in spans]
    blocks = []
    for group, (first, last) in enumerate(pairwise(bounds)):
        for start in range(first, last, most):
            end = min(start + most, last)
            blocks.append(_Block(start, end, negatives_GN[group : group + 1], shared=True))
    return blocks


_POSITIONS = 256
"""Most positions of a block. Most sequences are shorter; a batch that shares its negatives is longer."""
_NUMBERS = {"cpu": 2**20, "cuda": 2**26}
"""Most numbers in one array of a block, all pairs of its positions: with more of them, a CPU is slower."""
_SINGLE = 64
"""Most positions of a block of single positions: each of their pairs has a copied row of an item."""


class _Blockwise(torch.autograd.Function):
    """Sum of block_loss over the blocks; the gradients are computed in forward, block by block, and kept."""

    @staticmethod
    def forward(
        ctx: Any,
        block_loss: Callable[..., Tensor],
        blocks: Sequence[_Block],
        examples: Examples,
        queries: int,
        items: int,
        *tensors: Tensor,
    ) -> Tensor:
        query, item = tensors[:queries], tensors[queries : queries + items]
        learned = [at for at in range(queries + items, len(tensors)) if tensors[at].requires_grad]
        needed = any(ctx.needs_input_grad)
        # FP32, because an item's gradient is the sum of many small ones.
        gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors] if needed else []
        total = query[0].new_zeros((), dtype=torch.float32)
        for block in blocks:
            rows = slice(block.start, block.end)
            indices = torch.cat([examples.target_T[rows], block.negatives.flatten()])
            leaves = [tensor[rows].detach().requires_grad_(needed) for tensor in query]
            leaves += [tensor.detach().index_select(0, indices).requires_grad_(needed) for tensor in item]
            with torch.set_grad_enabled(needed):
                count = block.end - block.start
                positive = tuple(leaf[:count] for leaf in leaves[queries:])
                negative = tuple(leaf[count:] for leaf in leaves[queries:])
                loss = block_loss(block, tuple(leaves[:queries]), positive, negative)
            total += loss.detach()
            if needed:
                # Under the caller's autocast, FP32 products would have BF16 gradients.
                with torch.autocast(loss.device.type, enabled=False):
                    grads = torch.autograd.grad(loss, [*leaves, *(tensors[at] for at in learned)])
                for sum_, grad in zip(gradients[:queries], grads, strict=False):
                    sum_[rows] += grad
                for sum_, grad in zip(gradients[queries:], grads[queries : queries + items], strict=False):
                    sum_.index_add_(0, indices, grad.float())
                for at, grad in zip(learned, grads[queries + items :], strict=True):
                    gradients[at] += grad
        keep_gradients(ctx, gradients, tensors)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, None, *kept_gradients(ctx, scale)


def spans(bounds: Sequence[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the groups of `bounds`, cut into spans of `size` positions and what is left: the start, the end and the
    group of each (int64, on the CPU)."""
    bound_G = torch.tensor(bounds, dtype=torch.int64)
    count_G = (bound_G.diff() + size - 1) // size
    group = torch.repeat_interleave(torch.arange(len(count_G)), count_G)
    start = bound_G[group] + (torch.arange(len(group)) - (count_G.cumsum(0) - count_G)[group]) * size
    return start, torch.minimum(start + size, bound_G[group + 1]), group


def keep_gradients(ctx: Any, gradients: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Keeps gradients for a loss whose forward computes the gradients of its tensors, in FP32; none without
    backward."""
    ctx.save_for_backward(*gradients)
    ctx.dtypes = [tensor.dtype for tensor in tensors]


def kept_gradients(ctx: Any, scale: Tensor) -> list[Tensor]:
    """Returns the gradients times the loss's own gradient. Only once, because they are scaled in place."""
    return [gradient.mul_(scale).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
