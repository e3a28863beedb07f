"""The interface of every similarity phi(x, u): two sides, scores of pairs, losses and diagnostics.

Axes: T queries, N items, D width, P pairs of a query and one of its candidates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from logitmix.common.plugins import module_of

from ..config import SimilarityConfig
from ..features import Embedded
from ..initialize import reset_layers
from ..losses.blockwise import Examples, Reduce, blockwise_loss, softmax
from ..losses.blockwise import Side as Side
from ..noise import Noise

NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""Numbers that a chunk of query-item pairs may hold at once, roughly: enough to fit the caches, or fill the device."""
PairDropout = Callable[[Tensor], Tensor]
"""Dropout of what a similarity computes for each pair [..., C]; None outside training."""


class Similarity(nn.Module, ABC):
    """phi(x, u) of queries and items that are vectors of width D.

    Each side goes through `query` or `item` once; serving caches the items' side. `all_pairs` and `pairs` score sides,
    in FP32. A similarity that has a faster sampled softmax overrides `sampled_softmax`.
    """

    pair_dropout = 0.0
    """Rate of the dropout that `all_pairs` and `pairs` are given in training."""

    reads_stored = False
    """Whether `all_pairs`, too, takes the items' side in any type, as `candidates` does."""

    @abstractmethod
    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """Returns the query's side, computed once per query.

        Args:
            query_TD: The queries' vectors.
            row_T: The dropout's rows.
            noise: The dropout of a training step.
            groups: The embeddings [T, D] of the queries' features. They are part of the vectors, but for a user's id
                that is a component.

        Returns:
            A tuple of tensors [T, ...].
        """

    @abstractmethod
    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """Returns the items' side, which depends on the items alone: a tuple of tensors [N, ...], from what `query`
        takes of queries."""

    def use_features(self, of_query: int, of_item: int) -> None:
        """Tells how many features queries and items have: `groups`. Once, before the weights exist."""

    def query_side(self, query: Embedded, row_T: Tensor, noise: Noise | None = None) -> Side:
        """Returns the queries' side as `query` computes it, from their vectors and their features' embeddings."""
        return self.query(query.vector_RD, row_T, noise, query.groups)

    def item_side(self, item: Embedded, row_N: Tensor, noise: Noise | None = None) -> Side:
        """Returns the items' side as `item` computes it, from their vectors and their features' embeddings."""
        return self.item(item.vector_RD, row_N, noise, item.groups)

    def all_pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        """Returns phi(x, u) of each query with each item, FP32 [T, N]: by itself what `pairs` makes of sides that are
        spread over both axes."""
        return self.pairs(tuple(part[:, None] for part in query), tuple(part[None] for part in item), dropout)

    @abstractmethod
    def pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        """Returns phi(x, u) of query t with item t, FP32 [T]."""

    def candidates(self, query: Side, item: Side, item_P: Tensor, bounds: Sequence[int]) -> Tensor:
        """Returns phi of each query with candidates of its own, FP32 [P], for serving: without gradients.

        The candidates of query t are item_P[bounds[t] : bounds[t + 1]], indices into the items. The items' side may be
        stored in any type: it is converted to the query's.
        """
        score_P = torch.empty(len(item_P), device=item_P.device)
        size = max(1, NUMBERS[item_P.device.type] // self.pair_numbers)
        for t, (first, last) in enumerate(pairwise(bounds)):
            one = tuple(part[t : t + 1] for part in query)
            for start in range(first, last, size):
                index_N = item_P[start : min(start + size, last)]
                side = tuple(part[index_N].to(of.dtype) for part, of in zip(item, query, strict=True))
                score_P[start : start + len(index_N)] = self.all_pairs(one, side)[0]
        return score_P

    def parts(self, query: Side, item: Side) -> Tensor | None:
        """Returns the terms of phi(x, u) of query t with item t, where it is a sum over pairs of U components of the
        query and I of the item, [T, U, I]; None where it is none."""
        return None

    def pair_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that `all_pairs` and `pairs` use."""
        return []

    @property
    def pair_numbers(self) -> int:
        """Numbers per query-item pair that `all_pairs` has in memory at once, roughly."""
        return 1

    def sampled_softmax(self, query: Side, item: Side, examples: Examples, noise: Noise | None = None) -> Tensor:
        """Returns the sum over T positions, by their weights, of -log softmax of the target among itself and its
        group's negatives, FP32 scalar.

        `query` and `item` are the sides of the T queries and of the V unique items. A negative equal to the position's
        target (an accidental hit) does not count. No dropout without noise.
        """
        return blockwise_loss(softmax, self, query, item, examples, noise, self.pair_dropout)

    def sampled_loss(
        self, reduce: Reduce, query: Side, item: Side, examples: Examples, noise: Noise | None = None
    ) -> Tensor:
        """Returns the sum over T positions, by their weights, of another loss, which is `reduce` of the scores."""
        return blockwise_loss(reduce, self, query, item, examples, noise, self.pair_dropout)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws initial weights, from the generator only."""
        reset_layers(self, generator)

    def diagnostics(self, query: Side, item: Side) -> dict[str, Tensor]:
        """Diagnostics of query t with item t, by name: single numbers, and vectors to make histograms of."""
        return {}


def build_similarity(dim: int, config: SimilarityConfig) -> Similarity:
    """Returns phi(x, u) for queries and items of width `dim`. ValueError for a plugin's that is none."""
    similarity = module_of(config)(dim, config)
    if not isinstance(similarity, Similarity):
        raise ValueError(f"{type(similarity).__name__} of kind {config.kind} is no subclass of Similarity")
    return similarity
