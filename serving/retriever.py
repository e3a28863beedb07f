"""History -> query -> h-indexer over the corpus -> similarity over what is left -> top-k (overall flow, section 2.2).

Axes: B histories, T their positions, packed, N items of a chunk, X items in the corpus, K items that stage 1 keeps
(the paper's k'), D encoder width.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.similarity.base import Side, Similarity
from logitmix.serving.format import Contents, read
from logitmix.serving.model import TABLE, trained_tower
from logitmix.serving.topk import NOTHING, merge, rank_keys, split_keys

STAGE_1 = 100_000
"""Items that stage 1 keeps unless told otherwise; the paper's k'."""
_QUERIES = 32
"""Histories ranked at once."""
_NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""Numbers that a chunk of query-item pairs may hold at once, roughly: what fits the caches, or fills the device."""


@dataclass(frozen=True, eq=False)
class Retrieved:
    """The best items of each history, on the CPU."""

    items: Tensor
    """int64 [B, k]: item indices, highest score first, equal scores by rising index; -1 where none is left."""
    scores: Tensor
    """FP32 [B, k]: the similarity; -inf where no item is left."""


class Row(TypedDict):
    """One line of a ranking for people to read: the raw id, and the title where the dataset has titles."""

    rank: int
    id: str
    title: str | None
    score: float


class Retriever:
    """Answers with the trained model's top-k, from a serving directory."""

    def __init__(self, contents: Contents) -> None:
        self.config, self.source = contents.model, contents.source
        self.raw_ids, self.titles = contents.raw_ids, contents.titles
        self.exclude_history = contents.exclude_history
        self._tower = trained_tower(contents.model, contents.weights)
        self._item_XD = contents.items[TABLE]
        self._similarity_items = _side(contents, "similarity")
        self._hindexer_items = _side(contents, "hindexer")

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "Retriever":
        """Reads a serving directory; the model and the items go to `device`, cpu or cuda.

        Raises ValueError, naming the path and what to do, for what is no intact serving directory of this format
        version, and for a device that is not there.
        """
        kind = str(device).partition(":")[0]
        if kind not in _NUMBERS or (kind == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"there is no device {device} to retrieve on; cpu is always there")
        return cls(read(Path(path), device))

    @property
    def num_items(self) -> int:
        """X."""
        return len(self.raw_ids)

    @torch.inference_mode()
    def retrieve(
        self,
        histories: Sequence[Sequence[int]],
        k: int,
        exclude_history: bool | None = None,
        stage1: int | None = None,
    ) -> Retrieved:
        """The k best items [B, k] after each of B histories (item indices, oldest first).

        Of a history longer than the model's L the last L items are encoded; `exclude_history` leaves all of its items
        out of the ranking (when not given, as the model was evaluated). The h-indexer keeps `stage1` items (100,000,
        or k if that is more), which the similarity ranks; where there are no more items than that, or where the model
        has no h-indexer, the similarity ranks the whole corpus.

        Raises ValueError for an empty history, for what is not an item index, and for a k below 1 or above `stage1`.
        """
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        if stage1 is not None and stage1 < k:
            raise ValueError(f"stage1 is {stage1}; it must be at least k ({k})")
        kept = max(STAGE_1, k) if stage1 is None else stage1
        exclude_history = self.exclude_history if exclude_history is None else exclude_history
        checked = [self._checked(history, place) for place, history in enumerate(histories)]
        best_BK = torch.full((len(checked), k), NOTHING)
        for start in range(0, len(checked), _QUERIES):
            keys_BK = self._rank(checked[start : start + _QUERIES], min(k, self.num_items), kept, exclude_history)
            best_BK[start : start + _QUERIES, : keys_BK.shape[1]] = keys_BK.cpu()
        return Retrieved(*split_keys(best_BK))

    def indices_of(self, raw_ids: Sequence[str | int]) -> list[int]:
        """Item indices of the source's ids. Raises ValueError that names the ids that are not in the corpus."""
        unknown = [str(raw_id) for raw_id in raw_ids if str(raw_id) not in self._index_of]
        if unknown:
            shown = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise ValueError(
                f"no item of {self.source.dataset} has the id {shown}; give raw ids of its {self.num_items} items, "
                f"such as {self.raw_ids[0]!r}"
            )
        return [self._index_of[str(raw_id)] for raw_id in raw_ids]

    def rows(
        self,
        raw_history: Sequence[str | int],
        k: int,
        exclude_history: bool | None = None,
        stage1: int | None = None,
    ) -> list[Row]:
        """`retrieve` for one history of raw ids, for people to read: k rows, or fewer where fewer items are left."""
        found = self.retrieve([self.indices_of(raw_history)], min(k, self.num_items), exclude_history, stage1)
        items, scores = found.items[0].tolist(), found.scores[0].tolist()
        return [
            Row(rank=rank, id=self.raw_ids[item], title=self.titles[item] if self.titles else None, score=score)
            for rank, (item, score) in enumerate(zip(items, scores, strict=True), start=1)
            if item >= 0
        ]

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {raw_id: index for index, raw_id in enumerate(self.raw_ids)}

    def _checked(self, history: Sequence[int], place: int) -> list[int]:
        try:
            items = [operator.index(item) for item in history]
        except TypeError as error:
            raise ValueError(f"history {place} is no list of item indices: {error}") from None
        if not items:
            raise ValueError(f"history {place} is empty; give at least one item")
        for item in items:
            if not 0 <= item < self.num_items:
                raise ValueError(f"history {place} holds {item}; item indices go from 0 to {self.num_items - 1}")
        return items

    def _rank(self, histories: list[list[int]], k: int, kept: int, exclude_history: bool) -> Tensor:
        """Keys [B, <= k] of the best items of each history."""
        tower = self._tower
        query_BD, packing = self._queries(histories)
        query = tower.similarity.query(query_BD, packing.last_B)
        excluded = _Excluded(histories if exclude_history else [], self._item_XD.device)
        if tower.hindexer is None or kept >= self.num_items:
            items = _slices(self._similarity_items, self._chunk(len(histories), tower.similarity))
            return _best(tower.similarity, query, items, k, excluded)
        items = _slices(self._hindexer_items, self._chunk(len(histories), tower.hindexer))
        candidates_BK = _best(tower.hindexer, tower.hindexer.query(query_BD, packing.last_B), items, kept, excluded)
        return torch.cat([self._rerank(query, row, keys_K, k) for row, keys_K in enumerate(candidates_BK)])

    def _rerank(self, query: Side, row: int, candidates_K: Tensor, k: int) -> Tensor:
        """Keys [1, k] of the best of one query's candidates from stage 1, given as keys."""
        index_K = split_keys(candidates_K)[0]
        # In the order of the items, so that gathering reads memory forwards.
        index_K = index_K[index_K >= 0].sort().values
        similarity = self._tower.similarity
        items = _gathered(self._similarity_items, index_K, self._chunk(1, similarity))
        one = tuple(part[row : row + 1] for part in query)
        best_1K = _best(similarity, one, items, k, None)
        missing = best_1K.new_full((1, k - best_1K.shape[1]), NOTHING)
        return torch.cat([best_1K, missing], dim=1)

    def _queries(self, histories: list[list[int]]) -> tuple[Tensor, Packing]:
        device, L = self._item_XD.device, self.config.encoder.max_length
        encoded = [history[-L:] for history in histories]
        packing = Packing(torch.tensor([len(history) for history in encoded])).to(device)
        history_T = torch.tensor([item for history in encoded for item in history], device=device)
        return self._tower.queries(self._item_XD[history_T], packing), packing

    def _chunk(self, queries: int, stage: Similarity) -> int:
        """Items to score at once with that many queries."""
        return max(1, _NUMBERS[self._item_XD.device.type] // (queries * stage.pair_numbers))


class _Excluded:
    """Items to leave out: those of each history."""

    def __init__(self, histories: list[list[int]], device: torch.device) -> None:
        lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
        items = torch.tensor([item for history in histories for item in history], dtype=torch.int64)
        self.row_T = torch.repeat_interleave(lengths).to(device)
        self.item_T = items.to(device)

    def erase(self, keys_BN: Tensor, start: int) -> None:
        """Sets the keys of excluded items to NOTHING, where column 0 is item `start`."""
        inside_T = (self.item_T >= start) & (self.item_T < start + keys_BN.shape[1])
        keys_BN[self.row_T[inside_T], self.item_T[inside_T] - start] = NOTHING


def _best(
    similarity: Similarity, query: Side, items: Iterator[tuple[Tensor, Side]], k: int, excluded: _Excluded | None
) -> Tensor:
    """Keys [B, <= k] of the best items, given in chunks of indices and sides; the similarity of B queries to each."""
    best_BK = torch.empty(len(query[0]), 0, dtype=torch.int64, device=query[0].device)
    for index_N, side in items:
        keys_BN = rank_keys(similarity.all_pairs(query, side), index_N)
        if excluded is not None:
            excluded.erase(keys_BN, int(index_N[0]))
        best_BK = merge(best_BK, keys_BN, k)
    return best_BK


def _slices(side: Side, chunk: int) -> Iterator[tuple[Tensor, Side]]:
    """All items, `chunk` at a time."""
    X = len(side[0])
    for start in range(0, X, chunk):
        index_N = torch.arange(start, min(start + chunk, X), device=side[0].device)
        yield index_N, tuple(part[start : start + chunk] for part in side)


def _gathered(side: Side, index_K: Tensor, chunk: int) -> Iterator[tuple[Tensor, Side]]:
    """The items of those indices, `chunk` at a time."""
    for index_N in index_K.split(chunk):
        yield index_N, tuple(part[index_N] for part in side)


def _side(contents: Contents, stage: str) -> Side:
    """similarity.0, similarity.1, … as the tuple that the stage's `item` gave."""
    count = sum(name.startswith(f"{stage}.") for name in contents.items)
    return tuple(contents.items[f"{stage}.{i}"] for i in range(count))
