"""The trained model as serving needs it: what a query passes through, and what is cached of the items.

Axes: T history positions, packed, B histories, X items in the corpus, D encoder width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from logitmix.modules.config import ModelConfig
from logitmix.modules.encoders.sasrec import Packing, SASRec
from logitmix.modules.hindexer import HIndexer
from logitmix.modules.similarity.build import build_similarity
from logitmix.modules.similarity.dot import Dot
from logitmix.modules.similarity.mol import MoL

TABLE = "table"
"""Name of the item table [X, D] beside the cache: histories are encoded with its rows."""


class QuerySide(nn.Module):
    """Encoder, similarity and h-indexer under the names that they have in the trained tower.

    Built on the meta device; `load` gives it the weights. Those that work on items alone stay behind: their results
    are cached.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.encoder = SASRec(config.dim, config.encoder)
            self.similarity = build_similarity(config.dim, config.similarity)
            self.hindexer = (
                HIndexer(config.dim, config.hindexer, config.similarity.temperature)
                if config.hindexer.weight > 0
                else None
            )

    def load(self, weights: Mapping[str, Tensor]) -> "QuerySide":
        """Takes the weights as they are, on the device that they are on."""
        self.load_state_dict(weights, strict=False, assign=True)
        return self.requires_grad_(False).eval()

    def queries(self, item_TD: Tensor, packing: Packing) -> Tensor:
        """The query after the last position of each history: rows of the table [T, D] -> [B, D]."""
        return self.encoder(item_TD, packing, None)[packing.last_B]


def query_weights(tower: nn.Module) -> dict[str, Tensor]:
    """The parameters of a tower that queries pass through: all but those of the submodules named item_*."""
    return {name: value for name, value in tower.state_dict().items() if not name.split(".")[1].startswith("item_")}


def item_cache(similarity: Dot | MoL, hindexer: HIndexer | None, item_XD: Tensor) -> dict[str, Tensor]:
    """The items' side of both stages, by name: similarity.0, … and hindexer.0, each [X, ...]."""
    row_X = torch.arange(len(item_XD), device=item_XD.device)
    sides = {"similarity": similarity.item(item_XD, row_X)}
    if hindexer is not None:
        sides["hindexer"] = hindexer.item(item_XD, row_X)
    return {f"{stage}.{i}": part for stage, side in sides.items() for i, part in enumerate(side)}


def weight_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """What `query_weights` gives for a model of this configuration."""
    return {name: list(value.shape) for name, value in query_weights(QuerySide(config)).items()}


def item_shapes(config: ModelConfig, num_items: int) -> dict[str, list[int]]:
    """What `item_cache` gives for a model of this configuration, and the table."""
    model = QuerySide(config)
    item_XD = torch.empty(num_items, config.dim, device="meta")
    cache = item_cache(model.similarity, model.hindexer, item_XD)
    return {name: list(value.shape) for name, value in {TABLE: item_XD, **cache}.items()}
