"""History -> query -> h-indexer over the corpus -> similarity over what is left -> top-k (overall flow, section 2.2).

Axes: B histories, T their positions, packed, N items of a chunk, X items in the corpus, K items that stage 1 keeps
(the paper's k'), D encoder width.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.similarity.base import Side, Similarity
from logitmix.serving.format import Contents, read
from logitmix.serving.items import Chunk
from logitmix.serving.model import trained_tower
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
        about = contents.about
        self.config, self.source, self.exclude_history = about.model, about.source, about.exclude_history
        self.raw_ids, self.titles = contents.raw_ids, contents.titles
        self._tower = trained_tower(about.model, contents.weights)
        self._items = contents.items

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "Retriever":
        """Reads a serving directory; the model and the items go to `device`, cpu or cuda. On the CPU the items stay in
        their files until they are used.

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
        found = {str(raw_id): self.raw_ids.find(str(raw_id)) for raw_id in raw_ids}
        unknown = [raw_id for raw_id, index in found.items() if index is None]
        if unknown:
            shown = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise ValueError(
                f"no item of {self.source.dataset} has the id {shown}; give raw ids of its {self.num_items} items, "
                f"such as {self.raw_ids[0]!r}"
            )
        return [index for raw_id in raw_ids if (index := found[str(raw_id)]) is not None]

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
        excluded = _Excluded(histories if exclude_history else [], self._items.device)
        if tower.hindexer is None or kept >= self.num_items:
            items = self._items.all("similarity", self._chunk(len(histories), tower.similarity))
            return _best(tower.similarity, query, items, k, excluded)
        items = self._items.all("hindexer", self._chunk(len(histories), tower.hindexer))
        candidates_BK = _best(tower.hindexer, tower.hindexer.query(query_BD, packing.last_B), items, kept, excluded)
        return torch.cat([self._rerank(query, row, keys_K, k) for row, keys_K in enumerate(candidates_BK)])

    def _rerank(self, query: Side, row: int, candidates_K: Tensor, k: int) -> Tensor:
        """Keys [1, k] of the best of one query's candidates from stage 1, given as keys."""
        index_K = split_keys(candidates_K)[0]
        # In the order of the items, so that gathering reads memory forwards.
        index_K = index_K[index_K >= 0].sort().values
        similarity = self._tower.similarity
        items = self._items.some("similarity", index_K, self._chunk(1, similarity))
        one = tuple(part[row : row + 1] for part in query)
        best_1K = _best(similarity, one, items, k, None)
        missing = best_1K.new_full((1, k - best_1K.shape[1]), NOTHING)
        return torch.cat([best_1K, missing], dim=1)

    def _queries(self, histories: list[list[int]]) -> tuple[Tensor, Packing]:
        device, L = self._items.device, self.config.encoder.max_length
        encoded = [history[-L:] for history in histories]
        packing = Packing(torch.tensor([len(history) for history in encoded])).to(device)
        history_T = torch.tensor([item for history in encoded for item in history])
        return self._tower.queries(self._items.rows(history_T), packing).vector_RD, packing

    def _chunk(self, queries: int, stage: Similarity) -> int:
        """Items to score at once with that many queries."""
        return max(1, _NUMBERS[self._items.device.type] // (queries * stage.pair_numbers))


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


def _best(similarity: Similarity, query: Side, items: Iterator[Chunk], k: int, excluded: _Excluded | None) -> Tensor:
    """Keys [B, <= k] of the best items, given in chunks of indices and sides; the similarity of B queries to each."""
    best_BK = torch.empty(len(query[0]), 0, dtype=torch.int64, device=query[0].device)
    for index_N, side in items:
        keys_BN = rank_keys(similarity.all_pairs(query, side), index_N)
        if excluded is not None:
            excluded.erase(keys_BN, int(index_N[0]))
        best_BK = merge(best_BK, keys_BN, k)
    return best_BK
