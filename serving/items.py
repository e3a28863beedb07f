"""The items of an export, shard by shard: the item tower's outputs, or its inputs, which then pass through the tower
when they are ranked. On the CPU the tensors are mapped from the files: what is not used is not in memory.

Axes: R items of a shard, T items of histories, K candidates, N items of a chunk, S ids of all bags, D width of the
model, W of the item table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from logitmix.modules.features import Embedded, Features, stored_tensors, values_of_tensors
from logitmix.modules.schema import ITEM, Feature, Schema
from logitmix.modules.similarity.base import Side
from logitmix.modules.towers import Tower
from logitmix.modules.values import Values
from logitmix.serving.model import OWN_ROW, TABLE, Precision, Scales, side_of, stored_items
from logitmix.serving.stored_table import StoredTable, fetch_rows, gather

Stage = Literal["similarity", "hindexer"]
Chunk = tuple[Tensor, Side]
"""Indices [N] and sides of some items."""

COMPUTED_CHUNK = 2**13
"""Most items whose sides are computed at once."""
CHUNK_ITEMS = 2**13
"""Items whose cache is computed at once, a multiple of LANES."""


class ItemShard(Protocol):
    """Consecutive items, indexed by their place in the shard; on one device, with a tower there."""

    tower: Tower
    most: int | None
    """Most items whose sides are requested at once."""

    def __len__(self) -> int: ...

    def vectors(self, index_N: Tensor) -> Tensor:
        """Vectors [N, D], from which histories are encoded."""

    def side(self, stage: Stage, start: int, stop: int) -> Side:
        """Sides of a range of items, FP32."""

    def all_scores(self, query: Side, start: int, stop: int) -> Tensor:
        """The similarity FP32 [B, N] of B queries with a range of items."""

    def scores(self, query: Side, item_P: Tensor, bounds: Sequence[int]) -> Tensor:
        """The similarity of queries with candidates of their own, as in Similarity.candidates."""


class CachedShard:
    """Items whose vectors and sides for the similarity are stored."""

    most: int | None = None

    def __init__(self, tensors: Mapping[str, Tensor], tower: Tower) -> None:
        """By the names of `stored_items`."""
        self.vector_RD, self.tower = tensors[TABLE], tower
        self.stored, self.scale = side_of(tensors)

    def __len__(self) -> int:
        return len(self.vector_RD)

    def vectors(self, index_N: Tensor) -> Tensor:
        return self.vector_RD.index_select(0, index_N)

    def side(self, stage: Stage, start: int, stop: int) -> Side:
        if stage == "hindexer":
            vector_ND = self.vector_RD[start:stop]
            assert self.tower.hindexer is not None
            return self.tower.hindexer.item(vector_ND, torch.arange(len(vector_ND), device=vector_ND.device))
        first, *others = (part[start:stop].float() for part in self.stored)
        return (first * self.scale if self.scale != 1 else first, *others)

    def all_scores(self, query: Side, start: int, stop: int) -> Tensor:
        similarity = self.tower.similarity
        if similarity.reads_stored:
            return similarity.all_pairs(self._scaled(query), tuple(part[start:stop] for part in self.stored))
        return similarity.all_pairs(query, self.side("similarity", start, stop))

    def scores(self, query: Side, item_P: Tensor, bounds: Sequence[int]) -> Tensor:
        return self.tower.similarity.candidates(self._scaled(query), self.stored, item_P, bounds)

    def _scaled(self, query: Side) -> Side:
        """The scale of the items' first part is that of its products."""
        return (query[0] * self.scale, *query[1:]) if self.scale != 1 else query


@dataclass(frozen=True)
class ItemInputs:
    """The item tower's inputs for R items."""

    own_RW: Tensor
    """Their rows of the item table."""
    values: Mapping[str, Values]
    """Their features by name; ids are rows of whole tables."""

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], schema: Schema) -> "ItemInputs":
        """From the output of `tensors`."""
        return cls(tensors[OWN_ROW], {of.name: values_of_tensors(of, tensors) for of in schema.of("item")})

    def tensors(self, schema: Schema) -> dict[str, Tensor]:
        """As an export stores them."""
        tensors = {OWN_ROW: self.own_RW}
        for feature in schema.of("item"):
            of = self.values[feature.name]
            tensors |= stored_tensors(feature, replace(of, values=of.values.to(stored_type(feature, schema))))
        return tensors

    def take(self, index_N: Tensor) -> "ItemInputs":
        """The inputs of some items, by place."""
        return ItemInputs(self.own_RW[index_N], {name: of.take(index_N) for name, of in self.values.items()})

    def embed(self, tower: Tower, tables: Mapping[str, StoredTable]) -> Embedded:
        rows, values = fetch_rows(tables, tower.schema, self.values)
        features = Features(values=values).to(self.own_RW.device)
        embedded: Embedded = tower.item_tower(rows | {ITEM: self.own_RW}, features)
        return embedded

    def problem(self, schema: Schema) -> str | None:
        """What is wrong with the tensors' values, given that types and shapes are right."""
        for feature in schema.of("item"):
            of = self.values[feature.name]
            if of.offsets is not None and (
                int(of.offsets[0]) != 0 or int(of.offsets[-1]) != len(of.values) or bool((of.offsets.diff() < 0).any())
            ):
                return f"{feature.name}.offsets do not divide their values"
            if feature.sparse and len(of.values):
                rows = schema.table(feature.table).rows
                if not 0 <= int(of.values.min()) <= int(of.values.max()) < rows:
                    return f"{feature.name}.values name rows that table {feature.table} does not have"
            for name, numbers in of.parallel.items():
                if not bool(feature.form.allows(name, numbers).all()):
                    return f"{feature.name}.{name} are not all as kind {feature.kind} allows"
        return None


def stored_type(feature: Feature, schema: Schema) -> torch.dtype:
    """The dtype of a feature's values in an export."""
    if not feature.sparse:
        return torch.float32
    return torch.int32 if schema.table(feature.table).rows <= 2**31 else torch.int64


class ComputedShard:
    """Items that pass through the tower on each access."""

    def __init__(self, inputs: ItemInputs, tower: Tower, tables: Mapping[str, StoredTable]) -> None:
        self.inputs, self.tower, self.tables = inputs, tower, tables
        self.most: int | None = COMPUTED_CHUNK

    def __len__(self) -> int:
        return len(self.inputs.own_RW)

    def vectors(self, index_N: Tensor) -> Tensor:
        return self._embedded(index_N).vector_RD

    def side(self, stage: Stage, start: int, stop: int) -> Side:
        similarity = self.tower.similarity if stage == "similarity" else self.tower.hindexer
        assert similarity is not None
        index_N = torch.arange(start, stop, device=self.inputs.own_RW.device)
        return similarity.item_side(self._embedded(index_N), index_N)

    def all_scores(self, query: Side, start: int, stop: int) -> Tensor:
        return self.tower.similarity.all_pairs(query, self.side("similarity", start, stop))

    def scores(self, query: Side, item_P: Tensor, bounds: Sequence[int]) -> Tensor:
        similarity, parts = self.tower.similarity, []
        for b, (first, last) in enumerate(pairwise(bounds)):
            one = tuple(part[b : b + 1] for part in query)
            for index_N in item_P[first:last].split(COMPUTED_CHUNK):
                side = similarity.item_side(self._embedded(index_N), index_N)
                every_N = torch.arange(len(index_N), device=index_N.device)
                parts.append(similarity.candidates(one, side, every_N, [0, len(index_N)]))
        return torch.cat([query[0].new_empty(0), *parts])

    def _embedded(self, index_N: Tensor) -> Embedded:
        return self.inputs.take(index_N).embed(self.tower, self.tables)


def shard_of(tensors: Mapping[str, Tensor], cached: bool, tower: Tower, tables: Mapping[str, StoredTable]) -> ItemShard:
    """From the tensors of a shard of an export."""
    if cached:
        return CachedShard(tensors, tower)
    return ComputedShard(ItemInputs.of_tensors(tensors, tower.schema), tower, tables)


@torch.inference_mode()
def items_of(
    tower: Tower,
    inputs: ItemInputs,
    tables: Mapping[str, StoredTable],
    precision: Precision,
    cached: bool,
    scales: Scales,
) -> dict[str, Tensor]:
    """What an export stores of items."""
    parts = []
    for start in range(0, len(inputs.own_RW), CHUNK_ITEMS):
        part = inputs.take(torch.arange(start, min(start + CHUNK_ITEMS, len(inputs.own_RW))))
        parts.append(stored_items(tower, part.embed(tower, tables), precision, cached, scales))
    # A scale is the same in each part.
    items = {
        name: of if name.endswith(".scale") else torch.cat([part[name] for part in parts])
        for name, of in parts[0].items()
    }
    return items if cached and not tower.schema.of("item") else items | inputs.tensors(tower.schema)


class Items:
    """The items' vectors and their sides of both stages."""

    def __init__(self, shards: Sequence[ItemShard], device: torch.device, own: range | None = None) -> None:
        """`shards` of consecutive items, on `device`. Of those that are not `own` (by number), only single rows are
        read: another process ranks them."""
        self.shards, self.device = shards, device
        self.starts = torch.tensor([0, *map(len, shards)]).cumsum(0)
        self._own = range(len(shards)) if own is None else own

    def rows(self, index_T: Tensor) -> Tensor:
        """Vectors [T, D] of items in any order."""
        row_TD = torch.empty(len(index_T), self.shards[0].tower.config.dim, device=self.device)
        return gather(index_T, self.starts, lambda number, index_N: self.shards[number].vectors(index_N), row_TD)

    def sides(self, index_N: Sequence[int]) -> Side:
        """The similarity's sides of a few items, in any order."""
        found = []
        for index in index_N:
            number = int(torch.searchsorted(self.starts, index, right=True)) - 1
            place = index - int(self.starts[number])
            found.append(self.shards[number].side("similarity", place, place + 1))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    @property
    def own(self) -> range:
        """The items that this process ranks."""
        return range(int(self.starts[self._own.start]), int(self.starts[self._own.stop]))

    def all(self, stage: Stage, chunk: int) -> Iterator[Chunk]:
        """All own items, at most `chunk` at a time."""
        for shard, first, stop, index_N in self._ranges(chunk):
            yield index_N, shard.side(stage, first, stop)

    def all_scores(self, query: Side, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices [N] of at most `chunk` items, and the similarity FP32 [B, N] of B queries with them; in turn for all
        own items."""
        for shard, first, stop, index_N in self._ranges(chunk):
            yield index_N, shard.all_scores(query, first, stop)

    def _ranges(self, chunk: int) -> Iterator[tuple[ItemShard, int, int, Tensor]]:
        """Parts of shards, at most `chunk` items each: first and last place in the shard, and the items' indices."""
        for number in self._own:
            shard, start = self.shards[number], int(self.starts[number])
            size = min(chunk, shard.most or chunk)
            for first in range(0, len(shard), size):
                stop = min(first + size, len(shard))
                yield shard, first, stop, torch.arange(start + first, start + stop, device=self.device)

    def scores(self, query: Side, index_BK: Tensor) -> Tensor:
        """The similarity FP32 [B, K] of B queries with candidates of their own: ascending indices, and after them -1
        for none, whose score is -inf."""
        B, K = index_BK.shape
        score_BK = torch.full((B, K), -torch.inf, device=index_BK.device)
        found_BK = index_BK.masked_fill(index_BK < 0, int(self.starts[-1]))
        bound_BS = torch.searchsorted(found_BK, self.starts.to(index_BK.device).expand(B, -1).contiguous()).tolist()
        for number, (shard, start) in enumerate(zip(self.shards, self.starts.tolist(), strict=False)):
            ranges = [(bound_S[number], bound_S[number + 1]) for bound_S in bound_BS]
            bounds = [0, *accumulate(stop - first for first, stop in ranges)]
            if bounds[-1]:
                item_P = torch.cat([index_BK[b, first:stop] for b, (first, stop) in enumerate(ranges)]) - start
                score_P = shard.scores(query, item_P, bounds)
                for b, (first, stop) in enumerate(ranges):
                    score_BK[b, first:stop] = score_P[bounds[b] : bounds[b + 1]]
        return score_BK
