"""RetrievalModel: item table, encoder, similarity and h-indexer put together.

Axes: B sequences, T valid positions of a batch, packed, V unique items of a batch, N shared negatives, X items in the
corpus, D encoder width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .embeddings import item_table
from .encoders.sasrec import Packing, SASRec
from .hindexer import HIndexer
from .losses import Examples, sampled_loss
from .noise import Noise
from .similarity.build import build_similarity
from .similarity.dot import Dot
from .similarity.mol import MoL


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    id_V: ids of the unique items that the batch names (int64, sorted). input_T, target_T: the history's items and
    the items that follow them, as indices into id_V. negatives_GN: the negatives of each group, likewise; a group is
    a sequence, or the whole batch where it has one row. total_positions: T summed over all ranks.
    """

    id_V: Tensor
    packing: Packing
    input_T: Tensor
    target_T: Tensor
    negatives_GN: Tensor
    noise: Noise
    total_positions: int

    def to(self, device: torch.device) -> "Batch":
        moved = {name: getattr(self, name).to(device) for name in _MOVED}
        return replace(self, **moved)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Says that `stream` uses the memory too: once freed, it is kept until what the stream was given is done."""
        for name in _MOVED:
            getattr(self, name).record_stream(stream)


_MOVED = ("id_V", "packing", "input_T", "target_T", "negatives_GN")


class RetrievalModel(nn.Module):
    """The model-parallel table and the data-parallel tower; the rows of a batch pass from one to the other."""

    def __init__(self, num_items: int, config: ModelConfig) -> None:
        super().__init__()
        self.table = item_table(num_items, config.dim)
        self.tower = Tower(config)


class Tower(nn.Module):
    """Everything that follows the lookup: rows of the item table in, losses or scores out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = SASRec(config.dim, config.encoder)
        self.similarity = build_similarity(config.dim, config.similarity)
        if config.hindexer.weight > 0:
            self.hindexer = HIndexer(config.dim, config.hindexer, config.similarity.temperature)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initial weights from the generator alone: Xavier for matrices, zero biases, unit norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, SASRec):
                module.reset_parameters(generator)
        if isinstance(self.similarity, MoL):
            self.similarity.reset_parameters()

    def forward(self, item_VD: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Losses of a batch whose unique items have the rows item_VD, each the mean over the positions of all ranks.

        "loss" is what to minimise: "similarity" plus the weighted "hindexer", where there is one.
        """
        # Sparse, for the inputs are few beside the negatives: their gradient need not be as large as item_VD.
        input_TD = F.embedding(batch.input_T, item_VD, sparse=True)
        query_TD = self.encoder(input_TD, batch.packing, batch.noise)
        examples = Examples(batch.packing.row_T, batch.target_T, _bounds(batch), batch.negatives_GN)
        losses = {"similarity": self._loss(self.similarity, query_TD, item_VD, batch, examples)}
        losses["loss"] = losses["similarity"]
        if self.config.hindexer.weight > 0:
            losses["hindexer"] = self._loss(self.hindexer, query_TD, item_VD, batch, examples)
            losses["loss"] = losses["loss"] + self.config.hindexer.weight * losses["hindexer"]
        return losses

    def queries(self, item_TD: Tensor, packing: Packing) -> Tensor:
        """The query after the last position of each history: rows of the table [T, D] -> [B, D]."""
        return self.encoder(item_TD, packing, None)[packing.last_B]

    @torch.no_grad()
    def gate_sample(self, item_VD: Tensor, batch: Batch, sequences: int = 8) -> Tensor | None:
        """pi(x, u) [T', M] of the first sequences' positions with their targets, FP32; None where nothing is gated."""
        lengths_B = batch.packing.lengths_B[:sequences]
        total = int(lengths_B.sum())
        if not isinstance(self.similarity, MoL) or total == 0:
            return None
        packing = Packing(lengths_B).to(item_VD.device)
        query_TD = self.encoder(item_VD[batch.input_T[:total]], packing, None)
        query = self.similarity.query(query_TD, packing.row_T)
        item = self.similarity.item(item_VD[batch.target_T[:total]], packing.row_T)
        return self.similarity.sample_gates(query, item)

    def _loss(
        self, similarity: Dot | MoL | HIndexer, query_TD: Tensor, item_VD: Tensor, batch: Batch, examples: Examples
    ) -> Tensor:
        gate_dropout = self.config.similarity.gate_dropout if isinstance(similarity, MoL) else 0.0
        query = similarity.query(query_TD, batch.packing.row_T, batch.noise)
        item = similarity.item(item_VD, batch.id_V, batch.noise)
        total = sampled_loss(self.config.loss.kind, similarity, query, item, examples, batch.noise, gate_dropout)
        return total / batch.total_positions


def _bounds(batch: Batch) -> list[int]:
    """Where the groups that share negatives begin and end."""
    bounds, groups = batch.packing.bounds, len(batch.negatives_GN)
    if groups == len(bounds) - 1:
        return bounds
    assert groups == 1
    return [0, bounds[-1]]
