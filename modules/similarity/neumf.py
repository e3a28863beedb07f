"""Neural matrix factorization (NeuMF; He et al. 2017), a baseline of the paper (table of hyperparameters, appendix A).

Axes: T queries, N items, D width, G width of the generalized matrix factorization (GMF), H hidden units of the MLP, O
its outputs, F hidden units of the final MLP.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import NeuMFConfig
from ..losses.blockwise import Side
from ..noise import Noise
from .base import PairDropout, Similarity


class NeuMF(Similarity):
    """phi(x, u) = MLP([GMF, MLP([f(u), g(x)])]): the product, element by element, of two projections to width G, beside
    the outputs of an MLP with one hidden layer, through a final MLP with one hidden layer.

    Each side holds its projection and its part of the MLP's hidden layer; the parts are added before ReLU, the
    nonlinearity of NCF. Dropout falls on that layer. Pairs are in FP32.
    """

    def __init__(self, dim: int, config: NeuMFConfig) -> None:
        super().__init__()
        self.dim, self.pair_dropout = dim, config.dropout
        self.query_gmf = nn.Linear(dim, config.gmf_dim, bias=False)
        self.item_gmf = nn.Linear(dim, config.gmf_dim, bias=False)
        self.hidden = nn.Linear(2 * dim, config.hidden)
        self.mlp = nn.Linear(config.hidden, config.mlp_dim)
        self.final = nn.Linear(config.gmf_dim + config.mlp_dim, config.final_hidden)
        # No bias: it would shift all scores equally, which changes neither a ranking nor softmax.
        self.output = nn.Linear(config.final_hidden, 1, bias=False)

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """The query's factor of GMF [T, G] and its part of the hidden layer [T, H]."""
        weight_HD = self.hidden.weight[:, : self.dim]
        return self.query_gmf(query_TD), functional.linear(query_TD, weight_HD, self.hidden.bias)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """The item's factor [N, G] and part [N, H]."""
        return self.item_gmf(item_ND), functional.linear(item_ND, self.hidden.weight[:, self.dim :])

    def pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        # Not in BF16, in which a score of 8 would be off by up to 0.03.
        with torch.autocast(query[0].device.type, enabled=False):
            dtype = self.output.weight.dtype
            gmf = query[0].to(dtype) * item[0].to(dtype)
            hidden = functional.relu(query[1].to(dtype) + item[1].to(dtype))
            mlp = functional.relu(self.mlp(hidden if dropout is None else dropout(hidden)))
            return self.output(functional.relu(self.final(torch.cat([gmf, mlp], -1)))).squeeze(-1)

    def pair_parameters(self) -> list[nn.Parameter]:
        return [parameter for layer in (self.mlp, self.final, self.output) for parameter in layer.parameters()]

    @property
    def pair_numbers(self) -> int:
        """The hidden layers and what the final MLP takes."""
        return self.mlp.in_features + self.final.in_features + self.final.out_features
