"""DeepFM (Guo et al. 2017), a baseline of the paper (rows "DeepFM" and, in appendix A, "FM").

Axes: T queries, N items, D width, U groups of the query (the paper's k_u), I groups of the item (k_x), C their width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import DeepFMConfig
from ..losses.blockwise import Side
from ..noise import Noise
from .base import PairDropout, Similarity
from .components import Compressed, Projection, begin_as_dot_product


class DeepFM(Similarity):
    """phi(x, u) = the sum of the products <f_u(u), g_i(x)> of all pairs of groups (the factorization machine) plus an
    MLP of these products (the deep part).

    The groups are MoL's components, without their L2 norms. An MLP of the groups themselves, as DeepFM has in ranking,
    would not fit in the appendix's "Inference FLOPs per (x, u)", which leave 17,000 multiply-adds for the output layer:
    those of an MLP that takes the U I products. Pairs of groups of one side are left out: those of the query shift all
    scores equally. Dropout falls on the MLP's hidden layer ("prediction layer"). Pairs are in FP32.
    """

    def __init__(self, dim: int, config: DeepFMConfig) -> None:
        super().__init__()
        self.dim, self.config, self.pair_dropout = dim, config, config.dropout
        hidden, C = config.projection_hidden, config.component_dim
        self.query_projection = Projection(dim, hidden, config.query_components, C)
        self.item_projection = Projection(dim, hidden, config.item_components, C)
        self.hidden = nn.Linear(config.query_components * config.item_components, config.hidden)
        # No bias: it would shift all scores equally, which changes neither a ranking nor softmax.
        self.output = nn.Linear(config.hidden, 1, bias=False)
        self.query_features: Compressed | None = None
        self.item_features: Compressed | None = None

    def use_features(self, of_query: int, of_item: int) -> None:
        """Gives each feature its own group, which is compressed together with the others."""
        C, hidden = self.config.component_dim, self.config.hidden
        if of_query:
            self.query_features = Compressed(self.dim, of_query, self.config.query_components, C, hidden)
        if of_item:
            self.item_features = Compressed(self.dim, of_item, self.config.item_components, C, hidden)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws random layers, changed so that products of like groups begin as shares of the dot product."""
        super().reset_parameters(generator)
        begin_as_dot_product(self.query_projection, self.item_projection, generator)
        for features in (self.query_features, self.item_features):
            if features is not None:
                features.compression.reset_parameters()

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """Returns groups [T, U, C]."""
        groups_TUC = self.query_projection(query_TD)
        return (groups_TUC if self.query_features is None else self.query_features(groups_TUC, groups),)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """Returns groups [N, I, C]."""
        if noise:
            item_ND = noise.dropout(item_ND, self.config.projection_dropout, "deepfm.item", row_N)
        groups_NIC = self.item_projection(item_ND)
        return (groups_NIC if self.item_features is None else self.item_features(groups_NIC, groups),)

    def all_pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        with torch.autocast(query[0].device.type, enabled=False):
            query_TUC, item_NIC = self._full(query), self._full(item)
            products = torch.mm(query_TUC.flatten(0, 1), item_NIC.flatten(0, 1).t())
            products = products.unflatten(0, query_TUC.shape[:2]).unflatten(2, item_NIC.shape[:2])
            return self._score(products.transpose(1, 2).flatten(2), dropout)

    def pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        with torch.autocast(query[0].device.type, enabled=False):
            products = torch.bmm(self._full(query), self._full(item).transpose(1, 2))
            return self._score(products.flatten(1), dropout)

    def pair_parameters(self) -> list[nn.Parameter]:
        return [*self.hidden.parameters(), *self.output.parameters()]

    @property
    def pair_numbers(self) -> int:
        """The products and the hidden layer."""
        return self.hidden.in_features + self.hidden.out_features

    def _full(self, side: Side) -> Tensor:
        """Returns the groups in FP32, not in BF16, in which a score of 8 would be off by up to 0.03."""
        return side[0].to(self.output.weight.dtype)

    def _score(self, products: Tensor, dropout: PairDropout | None) -> Tensor:
        """Returns phi from the products [..., U I]."""
        hidden = F.relu(self.hidden(products))
        return products.sum(-1) + self.output(hidden if dropout is None else dropout(hidden)).squeeze(-1)
