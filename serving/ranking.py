"""Queries -> h-indexer over the corpus -> similarity over what it keeps -> top-k (overall flow, section 2.2).

Axes: B queries, N items of a chunk, K items that stage 1 keeps (the paper's k'), H h-indexer width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from logitmix.modules.similarity.base import NUMBERS
from logitmix.modules.stage1 import Int8Corpus, hindexer_topk
from logitmix.modules.towers import Sides, Tower
from logitmix.serving.directory.format import Contents
from logitmix.serving.expression import Allowed
from logitmix.serving.group import Group, part_of
from logitmix.serving.items import Items, shard_of
from logitmix.serving.mapped import shared_corpus
from logitmix.serving.model import CACHE, CORPUS, CORPUS_SCALE, is_side
from logitmix.serving.request import Options
from logitmix.serving.topk import NOTHING, best_keys, merge, rank_keys, split_keys

_BIT = (1 << np.arange(8)).astype(np.uint8)


@dataclass(frozen=True)
class Task:
    """Some requests, encoded, as a Ranker answers them."""

    digest: str
    """Of the export that answers."""
    query: Sides
    allowed: list[list[int] | None]
    """Of each request, the only items that may be found; None: all."""
    excluded: list[list[int]]
    """Of each request, items that may not be found."""
    options: Options
    k: int
    """Items that are wanted of each, however many the options say."""
    may: list[Allowed | None]
    """Of each request, the items that its conditions allow; None: all."""
    few: list[bool] = field(default_factory=list)
    """For which requests no more items may be found than stage 1 would keep, so that it is left out."""


class Ranker:
    """The items of an export, of which this process ranks all or a part."""

    def __init__(self, contents: Contents, tower: Tower, group: Group, shared: Path | None = None) -> None:
        """The items go to the tower's device. `group` says which part of them is ranked here, or who ranks them;
        `shared` is as in the Retriever."""
        self._shared = shared / f"{contents.digest}.npy" if shared else None
        self.group, self._tower, self._num_items = group, tower, contents.about.num_items
        device, cached = next(tower.parameters()).device, contents.about.item_cache
        tables = {name: table.to(device) for name, table in contents.tables.items()}
        self._shards = [
            {name: of.to(device) for name, of in shard.items() if not cached or name in CACHE or is_side(name)}
            for shard in contents.shards
        ]
        shards = [shard_of(shard, cached, tower, tables) for shard in self._shards]
        # Other processes' items, and removed ones, are those of histories.
        self._numbers = range(len(shards) - bool(contents.about.removed))
        self._own = group.part(self._numbers)
        self.items = Items(shards, device, self._own)

    def items_of(self, part: int) -> int:
        """Returns the number of items that a part of the group's has."""
        numbers = part_of(self._numbers, part, self.group.size)
        return int(self.items.starts[numbers.stop] - self.items.starts[numbers.start])

    def rank(self, task: Task) -> Tensor:
        """Returns keys [B, k] of the best items for the requests of a task."""
        if self.group.asks_shards:
            kept = task.options.kept(self._num_items) if self._of_two_stages(task) else None
            best: Tensor = self.group.best(task, kept, min(task.k, self._num_items))  # type: ignore[attr-defined]
            return best
        return self.stage_2(task, self.stage_1(task))

    def stage_1(self, task: Task) -> Tensor | None:
        """Returns keys [B', N] of the best of this process's items by the h-indexer, in the order of the items and with
        NOTHING after the last, for the B' requests that two stages answer; None if there is no such request."""
        rows = self._of_two_stages(task)
        if not rows:
            return None
        assert task.query.hindexer is not None
        query_BH = task.query.hindexer[0].to(self.items.device)[rows]
        if self.corpus is None:
            return torch.empty(len(rows), 0, dtype=torch.int64, device=query_BH.device)
        best = hindexer_topk(query_BH, self.corpus, task.options.kept(self._num_items), self._may_find(task, rows))
        keys_BN = rank_keys(best.scores_BK, best.items_BK + self.items.own.start)
        return keys_BN.masked_fill(best.items_BK < 0, NOTHING)

    def stage_2(self, task: Task, keys_BN: Tensor | None) -> Tensor:
        """Returns keys [B, k] of the best of this process's items by the similarity. Requests that two stages answer
        find only items of `keys_BN`, which stage 1 has returned."""
        device, k = self.items.device, min(task.k, self._num_items)
        query, two = each(task.query, lambda part: part.to(device)), self._of_two_stages(task)
        best_BK = torch.full((len(task.few), k), NOTHING, device=device)
        if few := [row for row, are in enumerate(task.few) if are]:
            here = [self._candidates(task.allowed[row], task.excluded[row], task.may[row]) for row in few]
            best_BK[few] = self._best_of(_of_rows(query, few), pad_sequence(here, True, -1).to(device), k)
        if two:
            assert keys_BN is not None
            best_BK[two] = self._best_of(_of_rows(query, two), split_keys(keys_BN.to(device))[0], k)
        if rest := sorted({*range(len(task.few))}.difference(few, two)):
            without = [task.excluded[row] for row in rest]
            best_BK[rest] = self._best_of_all(_of_rows(query, rest), without, k, [task.may[row] for row in rest])
        return best_BK

    def _of_two_stages(self, task: Task) -> list[int]:
        """Returns the rows of a task's requests that two stages answer."""
        return [row for row, few in enumerate(task.few) if not few] if self._has_two_stages(task) else []

    def _has_two_stages(self, task: Task) -> bool:
        """Returns whether stage 1 finds the items of the task's requests that may find many."""
        return task.query.hindexer is not None and task.options.kept(self._num_items) < self._num_items

    def few(self, task: Task) -> list[bool]:
        """Task.few. Of one stage, a list is few, and what a tenth of the items fulfill."""
        two_stages = self._has_two_stages(task)
        most = task.options.kept(self._num_items) if two_stages else self._num_items // 10
        found = []
        for some, may in zip(task.allowed, task.may, strict=True):
            is_short = some is not None and (not two_stages or len(some) <= most)
            found.append(is_short or (may is not None and may.count <= most))
        return found

    def _candidates(self, allowed: list[int] | None, excluded: list[int], may: Allowed | None) -> Tensor:
        """Those of this process's items that a request may find, ascending."""
        own = self.items.own
        if allowed is None:
            assert may is not None
            found = may.index[slice(*may.index.searchsorted((own.start, own.stop)))]
        else:
            found = np.array([item for item in sorted(set(allowed)) if item in own], np.int64)
            found = found if may is None else found[may.has(found)]
        return torch.from_numpy(found[~np.isin(found, excluded)] if excluded else found)

    @cached_property
    def corpus(self) -> Int8Corpus | None:
        """The h-indexer's vectors of this process's items, made when they are first needed; None if it has none."""
        blocks = [(self._shards[number][CORPUS], len(self.items.shards[number])) for number in self._own]
        if not blocks:
            return None
        join = partial(shared_corpus, self._shared) if self._shared and len(blocks) > 1 else Int8Corpus.joined
        return join(blocks, float(self._shards[0][CORPUS_SCALE]))

    def _best_of(self, query: Sides, index_BK: Tensor, k: int) -> Tensor:
        """Keys [B, k] of the best of each query's candidates, which are as in Items.scores."""
        score_BK = self.items.scores(query.similarity, index_BK)
        keys_BK = best_keys(score_BK.masked_fill(index_BK < 0, -torch.inf), index_BK, k)
        return merge(torch.full((len(keys_BK), k), NOTHING, device=keys_BK.device), keys_BK, k)

    def _best_of_all(self, query: Sides, without: list[list[int]], k: int, may: list[Allowed | None]) -> Tensor:
        """Keys [B, k] of the best items; `without` has the items to leave out for each query, and `may` those that are
        not."""
        device, similarity = self.items.device, self._tower.similarity
        # UNKNOWN is no item's index, so it excludes nothing.
        row_T, item_T = (torch.from_numpy(of).to(device) for of in _flat(without))
        best_BK = torch.full((len(without), k), NOTHING, device=device)
        rows_of: dict[Allowed, list[int]] = {}
        for row, of in enumerate(may):
            if of is not None:
                rows_of.setdefault(of, []).append(row)
        row_B1 = torch.arange(len(without))[:, None]
        out = [
            (torch.isin(row_B1, torch.tensor(rows)).to(device), torch.from_numpy(~of.mask).to(device))
            for of, rows in rows_of.items()
        ]
        chunk = max(1, NUMBERS[device.type] // (len(without) * similarity.pair_numbers))
        chunks = self.items.all_scores(query.similarity, chunk)
        for index_N, score_BN in _joined(chunks, NUMBERS[device.type] // len(without)):
            place_T = item_T - int(index_N[0])
            inside_T = (place_T >= 0) & (place_T < len(index_N))
            score_BN[row_T[inside_T], place_T[inside_T]] = -torch.inf
            for is_asked_B1, out_X in out:
                out_N = out_X[int(index_N[0]) : int(index_N[0]) + len(index_N)]
                score_BN.masked_fill_(is_asked_B1 & out_N, -torch.inf)
            best_BK = merge(best_BK, best_keys(score_BN, index_N[None], k), k)
        return best_BK

    def _may_find(self, task: Task, rows: list[int]) -> Tensor | None:
        """Bits of this process's items that some requests may find, as `hindexer_topk` takes them; None if all may find
        all."""
        allowed, without = [task.allowed[row] for row in rows], [task.excluded[row] for row in rows]
        may = [task.may[row] for row in rows]
        if not any(without) and all(of is None for of in (*allowed, *may)):
            return None
        own = self.items.own
        bits_BN = _bits(allowed, without, own.start, len(own))
        for bits_N, also in zip(bits_BN, may, strict=True):
            if also is not None:
                bits_N &= also.part(own.start, len(own))
        return torch.from_numpy(bits_BN).to(self.items.device)


def _joined(chunks: Iterable[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices [N] and scores [B, N] of consecutive items, those of at least `size` items together but for the last:
    few scores at a time take longer to rank."""
    held: list[tuple[Tensor, Tensor]] = []
    count = 0
    for chunk in chain(chunks, (None,)):
        if held and (chunk is None or count >= size):
            index_N, score_BN = zip(*held, strict=True)
            yield held[0] if len(held) == 1 else (torch.cat(index_N), torch.cat(score_BN, dim=1))
            held, count = [], 0
        if chunk is not None:
            held.append(chunk)
            count += len(chunk[0])


def each(query: Sides, change: Callable[[Tensor], Tensor]) -> Sides:
    hindexer = None if query.hindexer is None else tuple(map(change, query.hindexer))
    return Sides(tuple(map(change, query.similarity)), hindexer)


def _of_rows(query: Sides, rows: list[int]) -> Sides:
    return each(query, lambda part: part[rows])


def _flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The row and the item of each entry of some lists of items, int64 [T]."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    items_T = np.fromiter(chain.from_iterable(lists), np.int64, int(lengths.sum()))
    return np.repeat(np.arange(len(lists)), lengths), items_T


def _bits(only: list[list[int] | None], without: list[list[int]], start: int, count: int) -> np.ndarray:
    """uint8 [B, count / 8], the lowest bit first: which of the items from `start` on are, for each query, among `only`
    (None: all) and not among `without`. Takes time for these and not for every item, of which there are many."""
    bits_BN = np.empty((len(only), -(-count // 8)), np.uint8)
    bits_BN[:] = np.array([[255 if items is None else 0] for items in only], np.uint8)

    def change(do: np.ufunc, lists: Sequence[Sequence[int]], bit: np.ndarray) -> None:
        row_T, place_T = _flat(lists)
        place_T -= start
        inside_T = (place_T >= 0) & (place_T < count)
        row_T, place_T = row_T[inside_T], place_T[inside_T]
        do.at(bits_BN, (row_T, place_T >> 3), bit[place_T & 7])

    change(np.bitwise_or, [items or [] for items in only], _BIT)
    change(np.bitwise_and, without, ~_BIT)
    if count % 8:
        bits_BN[:, -1] &= (1 << count % 8) - 1
    return bits_BN


def at_least(least_B: Tensor, keys_BN: Tensor) -> Tensor:
    """The keys [B, K] that are not below these, in their order, and NOTHING after the last of each row."""
    return pad_sequence(
        [keys_N[keys_N >= least] for keys_N, least in zip(keys_BN, least_B, strict=True)], True, NOTHING
    )
