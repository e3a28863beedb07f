"""The towers: rows of the tables in, what the similarity and the h-indexer make of queries and items out.

No torchrec: serving runs the trained towers as they are.

Axes: B sequences, T positions of a batch, packed, V unique items, D encoder width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batch import Batch, Packing
from .config import ModelConfig
from .encoders.sasrec import SASRec
from .hindexer import HIndexer
from .losses.blockwise import Side
from .noise import Noise
from .similarity.build import build_similarity


class ItemTower(nn.Module):
    """Rows of unique items -> one vector per item, of which histories are encoded and sides are made."""

    def forward(self, row_VD: Tensor) -> Tensor:
        """[V, D] -> [V, D]: with ids alone, the rows of the item table themselves."""
        return row_VD


class QueryTower(nn.Module):
    """Items of histories -> one query per position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = SASRec(config.dim, config.encoder)

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.encoder.reset_parameters(generator)

    def forward(self, item_TD: Tensor, packing: Packing, noise: Noise | None = None) -> Tensor:
        """[T, D] -> [T, D]: the query at position t has seen positions 0..t of its sequence."""
        return self.encoder(item_TD, packing, noise)


class Sides(NamedTuple):
    """What both stages of retrieval make of queries or items; the h-indexer's is None where there is none."""

    similarity: Side
    hindexer: Side | None


class Tower(nn.Module):
    """Everything that follows the lookup but the loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.query_tower = QueryTower(config)
        self.item_tower = ItemTower()
        self.similarity = build_similarity(config.dim, config.similarity)
        self.hindexer: HIndexer | None = None
        if config.hindexer.weight > 0:
            self.hindexer = HIndexer(config.dim, config.hindexer)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initial weights, from the generator alone."""
        self.query_tower.reset_parameters(generator)
        self.similarity.reset_parameters(generator)
        if self.hindexer is not None:
            self.hindexer.reset_parameters(generator)

    def items(self, row_VD: Tensor) -> Sides:
        """Both stages' side of items, which serving caches: rows of the table [V, D] -> tuples of tensors [V, ...]."""
        item_VD, number_V = self.item_tower(row_VD), torch.arange(len(row_VD), device=row_VD.device)
        hindexer = None if self.hindexer is None else self.hindexer.item(item_VD, number_V)
        return Sides(self.similarity.item(item_VD, number_V), hindexer)

    def queries(self, row_TD: Tensor, packing: Packing) -> Tensor:
        """The query after the last position of each history: rows of the table [T, D] -> [B, D]."""
        return self.query_tower(self.item_tower(row_TD), packing)[packing.last_B]

    def queries_at_positions(self, item_VD: Tensor, batch: Batch) -> Tensor:
        """The query at each position of a batch whose unique items have the vectors item_VD, [T, D]."""
        # Sparse, for the inputs are few beside the negatives: their gradient need not be as large as item_VD.
        return self.query_tower(F.embedding(batch.input_T, item_VD, sparse=True), batch.packing, batch.noise)

    @torch.no_grad()
    def diagnostics(self, row_VD: Tensor, batch: Batch, sequences: int = 8) -> dict[str, Tensor]:
        """The similarity's diagnostics of the first sequences' positions with their targets; none without positions."""
        lengths_B = batch.packing.lengths_B[:sequences]
        total = int(lengths_B.sum())
        if total == 0:
            return {}
        item_VD, packing = self.item_tower(row_VD), Packing(lengths_B).to(row_VD.device)
        query_TD = self.query_tower(item_VD[batch.input_T[:total]], packing)
        query = self.similarity.query(query_TD, packing.row_T)
        return self.similarity.diagnostics(query, self.similarity.item(item_VD[batch.target_T[:total]], packing.row_T))
