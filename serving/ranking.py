"""Queries -> h-indexer over the corpus -> similarity over what it keeps -> top-k (overall flow, section 2.2), by all
processes and devices that share the items.

Axes: B queries, N items of a chunk, K items that stage 1 keeps (the paper's k'), H h-indexer width.
"""

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from logitmix.modules.similarity.base import NUMBERS
from logitmix.modules.stage1 import Int8Corpus, hindexer_topk
from logitmix.modules.towers import Sides, Tower
from logitmix.serving.directory.format import Contents
from logitmix.serving.group import Group, part_of
from logitmix.serving.items import Items, shard_of
from logitmix.serving.mapped import shared_corpus
from logitmix.serving.model import CORPUS, scales_of
from logitmix.serving.request import Options
from logitmix.serving.topk import NOTHING, best_keys, least_key, merge, rank_keys, split_keys

_BIT = (1 << np.arange(8)).astype(np.uint8)


@dataclass(frozen=True)
class Task:
    """What rank 0 of a group asks of all: some requests, encoded."""

    digest: str
    """Of the export that answers."""
    query: Sides
    allowed: list[list[int] | None]
    """Of each request, the only items that may be found; None: all."""
    excluded: list[list[int]]
    """Of each request, items that may not be found."""
    options: Options
    only: np.ndarray | None = None
    """bool [X]: the items that all requests may find; None: all."""


class Ranker:
    """The items of an export, divided among the processes of a group, and each part among devices."""

    def __init__(
        self,
        contents: Contents,
        tower: Tower,
        devices: Sequence[torch.device],
        group: Group,
        shared: Path | None = None,
    ) -> None:
        """`tower` is on the first device. `shared` as of the Retriever."""
        self._shared = shared / f"{contents.digest}.npy" if shared else None
        self.group, self._tower, shards = group, tower, contents.shards
        self._num_items = contents.about.num_items
        numbers = range(len(shards))
        own = part_of(numbers, group.rank, group.size)
        self.parts = [part_of(own, number, len(devices)) for number in range(len(devices))]
        """The numbers of the shards on each device."""
        # Other processes' shards stay in their files, from which rows of histories are read.
        device_of = {number: torch.device("cpu") for number in numbers}
        for part, device in zip(self.parts, devices, strict=True):
            device_of |= dict.fromkeys(part, device)
        used = set(device_of.values())
        towers = {of: tower if of == devices[0] else deepcopy(tower).to(of) for of in used}
        tables = {of: {name: table.to(of) for name, table in contents.tables.items()} for of in used}
        self._shards = [{name: of.to(device_of[n]) for name, of in shard.items()} for n, shard in enumerate(shards)]
        cached = contents.about.item_cache
        items = [
            shard_of(shard, cached, towers[device], tables[device])
            for shard, device in zip(self._shards, device_of.values(), strict=True)
        ]
        self.items = Items(items, devices[0], own)
        self.scales = scales_of(self._shards[0])
        self._largest_part = max(
            len(self.items.of_shards(part_of(numbers, rank, group.size))) for rank in range(group.size)
        )

    def alone(self) -> "Ranker":
        """This process's part as if there were no other."""
        alone = copy(self)
        alone.group = Group()
        return alone

    def rank(self, make: Callable[[], Task]) -> Tensor:
        """Keys [B, k] of the best items of all processes for the requests of the task that rank 0 makes. ValueError on
        all of them if `make` raises one."""
        with self.group.turn:
            task = self.group.first(make)
            with self.group.in_step():
                return self.best(task)

    def best(self, task: Task) -> Tensor:
        """Keys [B, k] of the best items of all processes for a task that all of them have."""
        device, own = self.items.device, self.items.own
        k, kept = min(task.options.k, self._num_items), task.options.kept
        query = each(task.query, lambda part: part.to(device))
        two_stages = query.hindexer is not None and kept < self._num_items
        few = [of is not None and (not two_stages or len(of) <= kept) for of in task.allowed]
        best_BK = torch.full((len(few), k), NOTHING, device=device)
        if rows := [row for row, are in enumerate(few) if are]:
            candidates = [sorted(set(task.allowed[row] or ()) - set(task.excluded[row])) for row in rows]
            here = [torch.tensor([item for item in of if item in own], dtype=torch.int64) for of in candidates]
            best_BK[rows] = self._best_of(_of_rows(query, rows), pad_sequence(here, True, -1).to(device), k)
        if rows := [row for row, are in enumerate(few) if not are]:
            of_rows, without = _of_rows(query, rows), [task.excluded[row] for row in rows]
            if two_stages:
                assert of_rows.hindexer is not None
                allowed = [task.allowed[row] for row in rows]
                best_BK[rows] = self._best_of(
                    of_rows, self._stage_1(of_rows.hindexer[0], kept, allowed, without, task.only), k
                )
            else:
                best_BK[rows] = self._best_of_all(of_rows, without, k, task.only)
        if self.group.size == 1:
            return best_BK
        return self.group.gather(best_BK, k).topk(k).values

    @cached_property
    def corpora(self) -> list[tuple[int, Int8Corpus]]:
        """For each device, its first item and the h-indexer's vectors of its items; made when they are first needed."""
        corpora, scale = [], self.scales.corpus
        assert scale is not None
        for part in self.parts:
            if part:
                blocks = [(self._shards[number][CORPUS], len(self.items.shards[number])) for number in part]
                join = partial(shared_corpus, self._shared) if self._shared and len(blocks) > 1 else Int8Corpus.joined
                corpora.append((self.items.of_shards(part).start, join(blocks, scale)))
        return corpora

    def _best_of(self, query: Sides, index_BK: Tensor, k: int) -> Tensor:
        """Keys [B, k] of the best of each query's candidates, which are as in Items.scores."""
        score_BK = self.items.scores(query.similarity, index_BK)
        keys_BK = best_keys(score_BK.masked_fill(index_BK < 0, -torch.inf), index_BK, k)
        return merge(torch.full((len(keys_BK), k), NOTHING, device=keys_BK.device), keys_BK, k)

    def _stage_1(
        self,
        query_BH: Tensor,
        kept: int,
        allowed: list[list[int] | None],
        without: list[list[int]],
        only: np.ndarray | None,
    ) -> Tensor:
        """Indices [B, <= kept] of those of the h-indexer's best items that are this process's, as Items.scores takes
        them. `allowed` and `without` have the only items that each query may find, and those that it may not."""
        device, keys = self.items.device, []
        for (start, corpus), bits in zip(self.corpora, self._may_find(allowed, without, only), strict=True):
            found = hindexer_topk(query_BH.to(corpus.blocks.device), corpus, kept, bits)
            if len(self.corpora) == self.group.size == 1:
                return found.items_BK
            of_part = rank_keys(found.scores_BK, found.items_BK + start)
            keys.append(of_part.masked_fill(found.items_BK < 0, NOTHING).to(device))
        # In the order of the items, as they are on each device.
        own_BN = torch.cat([torch.empty(len(query_BH), 0, dtype=torch.int64, device=device), *keys], dim=1)
        if len(keys) > 1:
            own_BN = _at_least(least_key(own_BN, kept), own_BN)
        every_BN = self.group.gather(own_BN, min(kept, self._largest_part))
        return split_keys(_at_least(least_key(every_BN, kept), own_BN))[0]

    def _best_of_all(self, query: Sides, without: list[list[int]], k: int, only: np.ndarray | None) -> Tensor:
        """Keys [B, k] of the best items; `without` has the items to leave out for each query."""
        device, similarity = self.items.device, self._tower.similarity
        row_T = torch.tensor([row for row, items in enumerate(without) for _ in items], dtype=torch.int64).to(device)
        # UNKNOWN is no item's index, so it excludes nothing.
        item_T = torch.tensor([item for items in without for item in items], dtype=torch.int64).to(device)
        best_BK = torch.full((len(without), k), NOTHING, device=device)
        only_X = None if only is None else torch.from_numpy(only).to(device)
        chunk = max(1, NUMBERS[device.type] // (len(without) * similarity.pair_numbers))
        for index_N, score_BN in self.items.all_scores(query.similarity, chunk):
            place_T = item_T - int(index_N[0])
            inside_T = (place_T >= 0) & (place_T < len(index_N))
            score_BN[row_T[inside_T], place_T[inside_T]] = -torch.inf
            if only_X is not None:
                score_BN.masked_fill_(~only_X[index_N], -torch.inf)
            best_BK = merge(best_BK, best_keys(score_BN, index_N[None], k), k)
        return best_BK

    def _may_find(
        self, allowed: list[list[int] | None], without: list[list[int]], only: np.ndarray | None
    ) -> list[Tensor | None]:
        """For each device, bits of the items that each query may find, as `hindexer_topk` takes them; None if all may
        find all."""
        if only is None and not any(without) and all(of is None for of in allowed):
            return [None] * len(self.corpora)
        rows: list[list[np.ndarray]] = [[] for _ in self.corpora]
        for some, out in zip(allowed, without, strict=True):
            for of_part, (start, corpus) in zip(rows, self.corpora, strict=True):
                bits = _bits(some, out, start, corpus.num_items)
                if only is not None:
                    bits &= np.packbits(only[start : start + corpus.num_items], bitorder="little")
                of_part.append(bits)
        return [
            torch.from_numpy(np.stack(of_part)).to(corpus.blocks.device)
            for of_part, (_, corpus) in zip(rows, self.corpora, strict=True)
        ]


def each(query: Sides, change: Callable[[Tensor], Tensor]) -> Sides:
    hindexer = None if query.hindexer is None else tuple(map(change, query.hindexer))
    return Sides(tuple(map(change, query.similarity)), hindexer)


def _of_rows(query: Sides, rows: list[int]) -> Sides:
    return each(query, lambda part: part[rows])


def _bits(only: list[int] | None, without: list[int], start: int, count: int) -> np.ndarray:
    """uint8 [count / 8], the lowest bit first: which of the items from `start` on are among `only` (None: all) and not
    among `without`. Takes time for these and not for every item, of which there are many."""

    def places(items: list[int]) -> np.ndarray:
        place = np.array(items, np.int64) - start
        return place[(place >= 0) & (place < count)]

    bits = np.full(-(-count // 8), 255 if only is None else 0, np.uint8)
    place = places(only or [])
    np.bitwise_or.at(bits, place >> 3, _BIT[place & 7])
    place = places(without)
    np.bitwise_and.at(bits, place >> 3, ~_BIT[place & 7])
    if count % 8:
        bits[-1] &= (1 << count % 8) - 1
    return bits


def _at_least(least_B: Tensor, keys_BN: Tensor) -> Tensor:
    """The keys [B, K] that are not below these, in their order, and NOTHING after the last of each row."""
    return pad_sequence(
        [keys_N[keys_N >= least] for keys_N, least in zip(keys_BN, least_B, strict=True)], True, NOTHING
    )
