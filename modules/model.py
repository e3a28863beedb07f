"""RetrievalModel: the tables and the towers put together; and the losses of the towers.

Axes: T valid positions of a batch, packed, V unique items of a batch, D encoder width.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from .batch import Batch
from .config import ModelConfig
from .embeddings import EmbeddingTable, embedding_collections
from .losses.blockwise import Examples
from .similarity.base import Similarity
from .towers import Tower


class RetrievalModel(nn.Module):
    """The model-parallel tables and the data-parallel tower; the rows of a batch pass from one to the other."""

    def __init__(self, tables: Sequence[EmbeddingTable], config: ModelConfig) -> None:
        super().__init__()
        self.tables = embedding_collections(tables)
        self.tower = Tower(config)


class SampledLosses(nn.Module):
    """A tower's losses: what is replicated and differentiated in training."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, row_VD: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Losses of a batch whose unique items have the rows row_VD, each the mean over the positions of all ranks.

        "loss" is what to minimise: "similarity" plus the weighted "hindexer", where there is one.
        """
        tower = self.tower
        item_VD = tower.item_tower(row_VD)
        query_TD = tower.queries_at_positions(item_VD, batch)
        losses = {"similarity": self._loss(tower.similarity, query_TD, item_VD, batch)}
        losses["loss"] = losses["similarity"]
        if tower.hindexer is not None:
            losses["hindexer"] = self._loss(tower.hindexer, query_TD, item_VD, batch)
            losses["loss"] = losses["loss"] + tower.config.hindexer.weight * losses["hindexer"]
        return losses

    def _loss(self, stage: Similarity, query_TD: Tensor, item_VD: Tensor, batch: Batch) -> Tensor:
        query = stage.query(query_TD, batch.packing.row_T, batch.noise)
        item = stage.item(item_VD, batch.id_V, batch.noise)
        examples = Examples(batch.packing.row_T, batch.target_T, batch.bounds, batch.negatives_GN)
        sampled = stage.sampled_softmax if self.tower.config.loss.kind == "softmax" else stage.sampled_bce
        return sampled(query, item, examples, batch.noise) / batch.total_positions
