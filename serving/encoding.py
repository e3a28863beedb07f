"""Requests through the trained towers.

Axes: B requests, T positions of their histories, packed, D encoder width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.config import sees_times
from logitmix.modules.features import NO_TIME, Features
from logitmix.modules.schema import ITEM
from logitmix.modules.towers import Sides, Tower
from logitmix.modules.values import Values
from logitmix.serving.features import FeatureReader
from logitmix.serving.items import ItemInputs, Items
from logitmix.serving.request import UNKNOWN, Asked
from logitmix.serving.stored_table import StoredTable, fetch_rows


@dataclass(frozen=True, eq=False)
class Histories:
    """What is encoded of B histories: at most the model's L actions of each, and at least one."""

    length_B: Tensor
    item_T: Tensor
    """Item indices, one history after the other; UNKNOWN is an unknown item."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """The features of users and events by name; ids are rows of whole tables."""
    times: tuple[Tensor, Tensor] | None = None
    """When the actions were, and when the queries after them are asked, int64 [T]."""


class Encoder:
    """The towers, with the tables and vocabularies of their features."""

    def __init__(self, tower: Tower, tables: Mapping[str, StoredTable], reader: FeatureReader, items: Items) -> None:
        """`tables` are on the tower's device; `items` have the vectors of the histories."""
        self._tower, self._tables, self._reader, self._items = tower, tables, reader, items
        unknown = ItemInputs(tables[ITEM].fetch(torch.zeros(1, dtype=torch.int64)), reader.read("item", [{}], [""]))
        self._unknown_1D = unknown.embed(tower, tables).vector_RD

    def queries(self, asked: list[Asked]) -> Sides:
        """The sides of B requests for both stages. ValueError, with the request's number, if a feature has no such
        value or is none of the model's."""
        encoded = self._encoded(asked)
        values = self._values(asked, encoded)
        item_T = torch.tensor([item for items in encoded for item in items])
        return self.sides(Histories(torch.tensor([*map(len, encoded)]), item_T, values, _packed_times(asked, encoded)))

    def sides(self, read: Histories) -> Sides:
        """The sides of B histories for both stages."""
        device = self._items.device
        vector_TD = self._items.rows(read.item_T.clamp(min=0))
        vector_TD[(read.item_T == UNKNOWN).to(device)] = self._unknown_1D
        times = read.times or () if sees_times(self._tower.config.encoder, self._tower.schema) else ()
        packing = Packing(read.length_B, 0, *times).to(device)
        rows, values = fetch_rows(self._tables, self._tower.schema, read.values)
        features = Features(values=values).to(device)
        return self._tower.query_sides(self._tower.queries(vector_TD, packing, rows, features))

    def _encoded(self, asked: list[Asked]) -> list[list[int]]:
        """The last L items of each history; an unknown item replaces an empty one."""
        return [of.items[-self._tower.config.encoder.max_length :] or [UNKNOWN] for of in asked]

    def _values(self, asked: list[Asked], encoded: list[list[int]]) -> dict[str, Values]:
        """Features of the users, and of the events of the encoded items."""
        L = self._tower.config.encoder.max_length
        events = [of.events[-L:] if of.events else [{}] * len(items) for of, items in zip(asked, encoded, strict=True)]
        values = self._reader.read("user", [of.user for of in asked], [f"request {of.place}" for of in asked])
        names = [f"request {of.place}, an event" for of, items in zip(asked, encoded, strict=True) for _ in items]
        return values | self._reader.read("event", [event for of_history in events for event in of_history], names)


def _packed_times(asked: list[Asked], encoded: list[list[int]]) -> tuple[Tensor, Tensor]:
    """When the encoded actions were, and when the queries after them are asked, int64 [T]."""
    count = [len(items) + 1 for items in encoded]
    times = [(of.times or [NO_TIME] * size)[-size:] for of, size in zip(asked, count, strict=True)]
    time_T, asked_T = ([time for of in times for time in of[part]] for part in (slice(-1), slice(1, None)))
    return torch.tensor(time_T, dtype=torch.int64), torch.tensor(asked_T, dtype=torch.int64)


def require_finite(sides: Sides, names: Sequence[str]) -> None:
    """ValueError that names the first query or item that is not finite."""
    parts = [*sides.similarity, *(sides.hindexer or ())]
    finite = torch.stack([part.isfinite().flatten(1).all(1) for part in parts]).all(0).tolist()
    for name, is_finite in zip(names, finite, strict=True):
        if not is_finite:
            raise ValueError(f"{name}: a number among its features is too large")
