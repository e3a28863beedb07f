"""A multilayer perceptron of query and item, the paper's "MLP" (table of hyperparameters, appendix A).

Axes: T queries, N items, D width, H hidden units.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import MLPConfig
from ..losses.blockwise import Side
from ..noise import Noise
from .base import PairDropout, Similarity


class MLP(Similarity):
    """phi(x, u) = MLP([f(u), g(x)]), with one hidden layer: 2 D H + H multiply-adds per pair, as the table counts them.

    The two sides are the query's and the item's parts of the hidden layer, which are added before ReLU. The paper does
    not name the nonlinearity; it is ReLU in NCF, the source of its baselines. Pairs are in FP32.
    """

    def __init__(self, dim: int, config: MLPConfig) -> None:
        super().__init__()
        self.dim, self.pair_dropout = dim, config.dropout
        self.hidden = nn.Linear(2 * dim, config.hidden)
        # No bias: it would shift all scores equally, which changes neither a ranking nor softmax.
        self.output = nn.Linear(config.hidden, 1, bias=False)

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """The query's part of the hidden layer [T, H]."""
        return (F.linear(query_TD, self.hidden.weight[:, : self.dim], self.hidden.bias),)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """The item's part [N, H]."""
        return (F.linear(item_ND, self.hidden.weight[:, self.dim :]),)

    def pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        # Not in BF16, in which a score of 8 would be off by up to 0.03.
        with torch.autocast(query[0].device.type, enabled=False):
            dtype = self.output.weight.dtype
            hidden = F.relu(query[0].to(dtype) + item[0].to(dtype))
            return self.output(hidden if dropout is None else dropout(hidden)).squeeze(-1)

    def pair_parameters(self) -> list[nn.Parameter]:
        return list(self.output.parameters())

    @property
    def pair_numbers(self) -> int:
        """The hidden layer."""
        return self.output.in_features
