"""The towers: from rows of the tables to the sides of queries and items for the similarity and the h-indexer.

No torchrec: serving runs the trained towers as they are.

Axes: B sequences, T positions of a batch, packed, V unique items (of a table: unique ids), D width of the model, W of
a table.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batch import Batch, Packing
from .config import ModelConfig, has_user_component
from .encoders.stack import build_encoder
from .features import Embedded, FeatureEmbeddings, Features, waves_of_times
from .hindexer import HIndexer
from .initialize import reset_layers
from .kinds.date import PERIODS
from .linear import Linear
from .losses.blockwise import Side
from .noise import Noise
from .schema import ITEM, ITEM_FEATURE, USER_FEATURE, Schema
from .similarity.base import build_similarity

NO_ROWS: Mapping[str, Tensor] = MappingProxyType({})
NO_FEATURES = Features()
"""For items, users and events without features other than the item id."""


class ItemTower(nn.Module):
    """Rows of the tables -> one vector per item: the item's own row plus the embeddings of its features. Histories and
    the items' sides are computed from these vectors."""

    def __init__(self, dim: int, schema: Schema) -> None:
        super().__init__()
        dims = schema.dims(dim)
        self.own_row = FeatureEmbeddings([ITEM_FEATURE], dims, dim)
        self.features = FeatureEmbeddings(schema.of("item"), dims, dim)

    def forward(self, rows: Mapping[str, Tensor], features: Features = NO_FEATURES) -> Embedded:
        """Returns the vectors [V, D] from the rows [V, W] of each table: with ids alone, the rows of the item table
        themselves."""
        own_VD = self.own_row.maps[0](rows[ITEM])
        if features.item_row_V is not None:
            own_VD = F.embedding(features.item_row_V, own_VD)
        groups = self.features(rows, features.values)
        return Embedded(_sum(own_VD, groups), groups)


class QueryTower(nn.Module):
    """Items of histories, with the features of users and events -> one query per position."""

    def __init__(self, config: ModelConfig, schema: Schema) -> None:
        super().__init__()
        dims = schema.dims(config.dim)
        self.encoder = build_encoder(config.dim, config.encoder)
        self.users = FeatureEmbeddings(schema.of("user"), dims, config.dim)
        self.events = FeatureEmbeddings(schema.of("event"), dims, config.dim)
        # What a request's time adds, where items have dates.
        self.unit = schema.unit
        self.time = Linear(2 * len(PERIODS), config.dim) if self.unit else None
        self.user_place = _place_of_user(schema) if has_user_component(config) else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.encoder.reset_parameters(generator)
        reset_layers(self.users, generator)
        reset_layers(self.events, generator)
        if self.time is not None:
            reset_layers(self.time, generator)

    def forward(
        self,
        item_TD: Tensor,
        packing: Packing,
        rows: Mapping[str, Tensor] = NO_ROWS,
        features: Features = NO_FEATURES,
        noise: Noise | None = None,
        last: bool = False,
    ) -> Embedded:
        """Returns a query for each position of packed histories, which has seen its sequence up to that position.

        The features of an event are added to its item before the encoder. Those of the user are added to the encoder's
        output. If items have dates, so is the time at which the query is asked. If the user's id is a component of its
        own, it is not added, but is the last group.

        Args:
            item_TD: Vectors of the histories' items.
            packing: Says which positions are a sequence.
            rows: Rows of each table's unique ids, by table.
            features: Values of the users' and events' features.
            noise: Dropout; None outside training.
            last: Whether only the query at the last position of each sequence is computed, without noise.

        Returns:
            Queries [T, D], or [B, D] with `last`.
        """
        events = self.events(rows, features.values)
        users, history_TD = self.users(rows, features.values), _sum(item_TD, events)
        if last:
            last_B, alone = packing.last_B, getattr(self.encoder, "last", None)
            encoded_RD = alone(history_TD, packing) if alone else self.encoder(history_TD, packing, None)[last_B]
            events = [event_TD[last_B] for event_TD in events]
        else:
            encoded_RD = self.encoder(history_TD, packing, noise)
            users = [F.embedding(packing.sequence_T, user_BD) for user_BD in users]
        component = [] if self.user_place is None else [users.pop(self.user_place)]
        if self.time is not None:
            assert packing.asked_T is not None
            asked_R = packing.asked_T[packing.last_B] if last else packing.asked_T
            users.append(self.time(waves_of_times(asked_R, self.unit)))
        return Embedded(_sum(encoded_RD, users), [*users, *events, *component])


def _place_of_user(schema: Schema) -> int:
    """Returns the place of the user's id among the users' features."""
    if USER_FEATURE not in schema.of("user"):
        raise ValueError(
            "model.similarity.user_component takes the user's id: add user to model.features, and rename what the "
            "dataset names user"
        )
    return schema.of("user").index(USER_FEATURE)


def query_groups(schema: Schema) -> int:
    """Returns how many groups a query has."""
    return len(schema.of("user")) + len(schema.of("event")) + bool(schema.unit)


def _sum(first: Tensor, others: Sequence[Tensor]) -> Tensor:
    if len(others) > 1:
        return torch.stack([first, *others]).sum(0)
    return first + others[0] if others else first


class Sides(NamedTuple):
    """Both stages' sides of queries or items; the h-indexer's is None if there is no h-indexer."""

    similarity: Side
    hindexer: Side | None


class Tower(nn.Module):
    """Everything between the lookup and the loss."""

    def __init__(self, config: ModelConfig, schema: Schema) -> None:
        super().__init__()
        self.config, self.schema = config, schema
        self.query_tower = QueryTower(config, schema)
        self.item_tower = ItemTower(config.dim, schema)
        self.similarity = build_similarity(config.dim, config.similarity)
        self.similarity.use_features(query_groups(schema), len(schema.of("item")))
        self.hindexer: HIndexer | None = None
        if config.hindexer.weight > 0:
            self.hindexer = HIndexer(config.dim, config.hindexer, has_user_component(config))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws initial weights, from the generator only."""
        self.query_tower.reset_parameters(generator)
        self.similarity.reset_parameters(generator)
        if self.hindexer is not None:
            self.hindexer.reset_parameters(generator)
        reset_layers(self.item_tower, generator)

    def queries(
        self, item_TD: Tensor, packing: Packing, rows: Mapping[str, Tensor] = NO_ROWS, features: Features = NO_FEATURES
    ) -> Embedded:
        """Returns the query after the last position of each history, from its items' vectors item_TD: [T, D] -> [B,
        D]."""
        return self.query_tower(item_TD, packing, rows, features, last=True)

    def query_sides(self, query: Embedded) -> Sides:
        """Returns both stages' side of queries, for inference: tuples of tensors [B, ...]."""
        # len() would make the number a constant of an exported program, here and below.
        number_B = torch.arange(query.vector_RD.shape[0], device=query.vector_RD.device)
        hindexer = None if self.hindexer is None else self.hindexer.query_side(query, number_B)
        return Sides(self.similarity.query_side(query, number_B), hindexer)

    def item_sides(self, item: Embedded) -> Sides:
        """Returns both stages' side of items, which serving caches: tuples of tensors [V, ...]."""
        number_V = torch.arange(item.vector_RD.shape[0], device=item.vector_RD.device)
        hindexer = None if self.hindexer is None else self.hindexer.item_side(item, number_V)
        return Sides(self.similarity.item_side(item, number_V), hindexer)

    def at_positions(self, rows: Mapping[str, Tensor], batch: Batch) -> tuple[Embedded, Embedded]:
        """Returns the query at each position of a batch that has a target, and its unique items."""
        items = self.item_tower(rows, batch.features)
        input_TD = _inputs(items, batch.input_T)
        query = self.query_tower(input_TD, batch.packing, rows, batch.features, batch.noise)
        return query if batch.position_Q is None else query.take(batch.position_Q), items

    @torch.no_grad()
    def diagnostics(self, rows: Mapping[str, Tensor], batch: Batch, sequences: int = 8) -> dict[str, Tensor]:
        """Returns the similarity's diagnostics of the first sequences' positions with their targets; none without
        positions."""
        lengths_B = batch.packing.lengths_B[:sequences]
        total = int(lengths_B.sum())
        if total == 0:
            return {}
        items = self.item_tower(rows, batch.features)
        packing, position_Q = batch.packing.first(sequences).to(items.vector_RD.device), batch.position_Q
        asked = slice(total) if position_Q is None else position_Q[position_Q < total]
        features = self._first(batch.features, len(lengths_B), total)
        query = self.query_tower(items.vector_RD[batch.input_T[:total]], packing, rows, features).take(asked)
        item, row_T = items.take(batch.target_T[: len(query.vector_RD)]), packing.row_T[asked]
        return self.similarity.diagnostics(
            self.similarity.query_side(query, row_T), self.similarity.item_side(item, row_T)
        )

    def _first(self, features: Features, sequences: int, positions: int) -> Features:
        """Returns the features of the first sequences and of their positions."""
        count = {"user": sequences, "event": positions}
        own = [feature for feature in self.schema.features if feature.owner in count]
        return Features(values={f.name: features.values[f.name].first(count[f.owner]) for f in own})


def _inputs(items: Embedded, index_T: Tensor) -> Tensor:
    """Returns the vectors of some items, by place."""
    if items.vector_RD.is_cuda:
        # A GPU adds a gradient by places in one kernel, and sorts a sparse one.
        return items.vector_RD.index_select(0, index_T)
    # Sparse: inputs are few compared with negatives, so their gradient need not be as large as the items'.
    return F.embedding(index_T, items.vector_RD, sparse=not items.groups)
