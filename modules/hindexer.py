"""Stage 1 of retrieval, the h-indexer (section 4.1): a low-dimensional dot product, co-trained with the similarity.

Axes: T queries, N items, D width, H h-indexer width, K items that stage 1 keeps (the paper's k').
"""

from collections.abc import Sequence

from torch import Tensor

from .config import DotConfig, HIndexerConfig
from .linear import Linear
from .losses.blockwise import Side
from .noise import Noise
from .similarity.dot import Dot


class HIndexer(Dot):
    """Linear projections of query and item to H, L2-normalized; stage 1 ranks by their cosine over a temperature."""

    def __init__(self, dim: int, config: HIndexerConfig, user_apart: bool = False) -> None:
        """`user_apart`: the queries' vectors lack the user's id, whose embedding is their last group."""
        super().__init__(config.dim, DotConfig(temperature=config.temperature))
        self.user_apart = user_apart
        self.query_projection = Linear(dim, config.dim, bias=False)
        self.item_projection = Linear(dim, config.dim, bias=False)

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        vector_TD = query_TD + groups[-1] if self.user_apart else query_TD
        return super().query(self.query_projection(vector_TD), row_T, noise)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        return super().item(self.item_projection(item_ND), row_N, noise)
