"""RetrievalModel: the tables and the towers; SampledLosses: the losses of the towers.

Axes: T valid positions of a batch, packed, V unique items of a batch, D encoder width.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from .batch import Batch
from .config import ModelConfig
from .embeddings import EmbeddingTable, embedding_collections
from .features import Embedded
from .losses.blockwise import Examples
from .schema import Schema
from .similarity.base import Similarity
from .towers import Tower


class RetrievalModel(nn.Module):
    """The model-parallel tables and the data-parallel tower, which takes the tables' rows of a batch."""

    def __init__(self, tables: Sequence[EmbeddingTable], schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        self.tables = embedding_collections(tables)
        self.tower = Tower(config, schema)


class SampledLosses(nn.Module):
    """A tower's losses: the module that is replicated and differentiated in training."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, rows: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Losses of a batch, given the rows of each table's unique ids; each is a mean over the positions of all ranks.

        "loss" is the one to minimize: "similarity" plus the weighted "hindexer", if there is one.
        """
        tower = self.tower
        query, item = tower.at_positions(rows, batch)
        losses = {"similarity": self._loss(tower.similarity, query, item, batch)}
        losses["loss"] = losses["similarity"]
        if tower.hindexer is not None:
            if tower.config.hindexer.detach:
                query, item = query.detach(), item.detach()
            losses["hindexer"] = self._loss(tower.hindexer, query, item, batch)
            losses["loss"] = losses["loss"] + tower.config.hindexer.weight * losses["hindexer"]
        return losses

    def _loss(self, stage: Similarity, query: Embedded, item: Embedded, batch: Batch) -> Tensor:
        query_side = stage.query_side(query, batch.packing.row_T, batch.noise)
        item_side = stage.item_side(item, batch.id_V, batch.noise)
        examples = Examples(batch.packing.row_T, batch.target_T, batch.bounds, batch.negatives_GN, batch.log_q_V)
        sampled = stage.sampled_softmax if self.tower.config.loss.kind == "softmax" else stage.sampled_bce
        return sampled(query_side, item_side, examples, batch.noise) / batch.total_positions
