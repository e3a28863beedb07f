"""Sampled losses over positions whose negatives are shared; tensors in, scalar out.

Axes: T positions, N shared negatives of a group.
"""

from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from .blockwise import Examples, Side, blockwise_loss
from .kernels.dot_loss import dot_sampled_softmax
from .kernels.mol_loss import GateDropout, mol_sampled_softmax
from .noise import Noise
from .similarity.mol import MoL

__all__ = ["Examples", "Similarity", "sampled_loss"]


class Similarity(Protocol):
    """What Dot, MoL and HIndexer have in common."""

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None) -> Side: ...
    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None) -> Side: ...
    def all_pairs(self, query: Side, item: Side, dropout: Any = None) -> Tensor: ...
    def pairs(self, query: Side, item: Side, dropout: Any = None) -> Tensor: ...
    def pair_parameters(self) -> list[nn.Parameter]: ...


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
    if kind == "bce":
        return blockwise_loss(_bce, similarity, query, item, examples, noise, gate_dropout)
    if isinstance(similarity, MoL):
        dropout = GateDropout(noise, gate_dropout, examples.row_T) if noise and gate_dropout else None
        cross_gate = similarity.pair_parameters()
        target_T, negatives_GN = examples.target_T, examples.negatives_GN
        return mol_sampled_softmax(query, item, cross_gate, target_T, negatives_GN, examples.bounds, dropout)
    (query_TH,), (item_VH,) = query, item
    return dot_sampled_softmax(query_TH, item_VH, examples)


def _bce(positive_T: Tensor, negative_TN: Tensor, hit_TN: Tensor) -> Tensor:
    valid_TN = (~hit_TN).float()
    negative_T = (F.softplus(negative_TN) * valid_TN).sum(1) / valid_TN.sum(1).clamp(min=1)
    return (F.softplus(-positive_T) + negative_T).sum()
