"""Sampled losses over positions whose negatives are shared; tensors in, scalar out.

Axes: T positions, N shared negatives of a group, V unique items of the batch.

Each loss works block by block (a block is positions with the same negatives) and runs a block's backward at once, so
that nothing of size positions x negatives x components outlives its block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .noise import Noise

Side = tuple[Tensor, ...]


class Similarity(Protocol):
    """What Dot, MoL and HIndexer have in common."""

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None) -> Side: ...
    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None) -> Side: ...
    def all_pairs(self, query: Side, item: Side, dropout: Any = None) -> Tensor: ...
    def pairs(self, query: Side, item: Side, dropout: Any = None) -> Tensor: ...
    def pair_parameters(self) -> list[nn.Parameter]: ...


@dataclass(frozen=True)
class Block:
    """Positions start..end, which share negatives_N (indices into the batch's unique items)."""

    start: int
    end: int
    negatives_N: Tensor


@dataclass(frozen=True)
class Examples:
    """What each position is to be told from.

    row_T: global number of each position (int64). target_T: index of its next item among the V unique items.
    """

    row_T: Tensor
    target_T: Tensor
    blocks: Sequence[Block]


def sampled_loss(
    kind: Literal["softmax", "bce"],
    similarity: Similarity,
    query: Side,
    item: Side,
    examples: Examples,
    noise: Noise | None,
    gate_dropout: float = 0.0,
) -> Tensor:
    """Sum over the T positions of the loss of telling a position's target from its group's negatives, FP32 scalar.

    `query` and `item` are the two sides that `similarity` made of the T queries and the V unique items. A negative
    equal to the position's target (an accidental hit) does not count. «softmax» is -log softmax of the target among
    itself and the negatives (section 3.2); «bce» is the binary cross entropy of the target and the mean one of the
    negatives (the paper's baseline).
    """
    reduce = {"softmax": _softmax, "bce": _bce}[kind]

    def block_loss(block: Block, query: Side, positive: Side, negative: Side) -> Tensor:
        target_T = examples.target_T[block.start : block.end]
        row_T = examples.row_T[block.start : block.end]
        N = len(block.negatives_N)
        drop_pairs, drop_all = None, None
        if noise is not None and gate_dropout > 0:
            # One row of the mask for each (position, candidate); candidate 0 is the target.
            pair_T = row_T * (N + 1)
            pair_TN = (pair_T[:, None] + torch.arange(1, N + 1, device=row_T.device)).flatten()

            def drop_pairs(gates: Tensor) -> Tensor:
                return noise.dropout(gates, gate_dropout, "gates", pair_T)

            def drop_all(gates: Tensor) -> Tensor:
                return noise.dropout(gates.flatten(0, 1), gate_dropout, "gates", pair_TN).view_as(gates)

        positive_T = similarity.pairs(query, positive, drop_pairs)
        negative_TN = similarity.all_pairs(query, negative, drop_all)
        hit_TN = target_T[:, None] == block.negatives_N[None]
        return reduce(positive_T, negative_TN, hit_TN)

    return _Blockwise.apply(block_loss, examples, len(query), len(item), *query, *item, *similarity.pair_parameters())


def _softmax(positive_T: Tensor, negative_TN: Tensor, hit_TN: Tensor) -> Tensor:
    negative_TN = negative_TN.masked_fill(hit_TN, -torch.inf)
    return (torch.logsumexp(torch.cat([positive_T[:, None], negative_TN], 1), 1) - positive_T).sum()


def _bce(positive_T: Tensor, negative_TN: Tensor, hit_TN: Tensor) -> Tensor:
    valid_TN = (~hit_TN).float()
    negative_T = (F.softplus(negative_TN) * valid_TN).sum(1) / valid_TN.sum(1).clamp(min=1)
    return (F.softplus(-positive_T) + negative_T).sum()


class _Blockwise(torch.autograd.Function):
    """Sum of block_loss over the blocks; the gradients are made in forward, block by block, and kept."""

    @staticmethod
    def forward(
        ctx: Any, block_loss: Callable[..., Tensor], examples: Examples, queries: int, items: int, *tensors: Tensor
    ) -> Tensor:
        query, item, parameters = tensors[:queries], tensors[queries : queries + items], tensors[queries + items :]
        needed = any(ctx.needs_input_grad)
        # FP32, because an item's gradient is the sum of many small ones.
        gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors] if needed else []
        total = query[0].new_zeros((), dtype=torch.float32)
        for block in examples.blocks:
            rows = slice(block.start, block.end)
            indices = torch.cat([examples.target_T[rows], block.negatives_N])
            leaves = [tensor[rows].detach().requires_grad_(needed) for tensor in query]
            leaves += [tensor[indices].detach().requires_grad_(needed) for tensor in item]
            with torch.set_grad_enabled(needed):
                count = block.end - block.start
                positive = tuple(leaf[:count] for leaf in leaves[queries:])
                negative = tuple(leaf[count:] for leaf in leaves[queries:])
                loss = block_loss(block, tuple(leaves[:queries]), positive, negative)
            total += loss.detach()
            if needed:
                # Under the caller's autocast, FP32 products would have BF16 gradients.
                with torch.autocast(loss.device.type, enabled=False):
                    grads = torch.autograd.grad(loss, [*leaves, *parameters])
                for sum_, grad in zip(gradients[:queries], grads, strict=False):
                    sum_[rows] += grad
                for sum_, grad in zip(gradients[queries:], grads[queries : queries + items], strict=False):
                    sum_.index_add_(0, indices, grad.float())
                for sum_, grad in zip(gradients[queries + items :], grads[queries + items :], strict=True):
                    sum_ += grad
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (None, None, None, None, *((gradient * scale).to(dtype) for gradient, dtype in pairs))
