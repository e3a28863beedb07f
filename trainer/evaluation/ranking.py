"""The whole corpus ranked for many users, with the table sharded: no rank has more of the items than a chunk at a time.

Each rank takes a range of the corpus in chunks, computes the items' sides of a chunk and scores all users with it.
Users' ranks follow from counts, which are summed over the ranks. Users are few and small compared with items: every
rank has the queries of some thousands at once, each encoded by one rank.

Chunks and batches of users are cut by the corpus and the configuration, not by the number of ranks, and all products
have one shape. So a pair's score is the same to the last bit on any rank, and the figures do not depend on the number
of ranks.

Axes: U users of a round, B users of a batch, E excluded items of a batch's users, X items in the corpus, N items of a
chunk, S stages, K items at the top, Q numbers in a query's sides.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from logitmix.comm.collectives import all_gather, all_reduce_sum
from logitmix.modules.features import Embedded
from logitmix.modules.similarity.base import Side, Similarity
from logitmix.serving.topk import NOTHING, rank_keys, split_keys
from logitmix.trainer.data.batches import RankingUsers
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.metrics import NOT_SERVED
from logitmix.trainer.parallel.sharded_rows import own_range

TOP = 100
"""Best items by the similarity whose ranks by the h-indexer are found."""
CHUNK_ITEMS = (2**8, 2**13)
"""Fewest and most items whose sides are computed at once."""
CHUNKS = 64
"""Fewest chunks of a corpus, except small ones: the chunks are divided among the ranks."""
PAIRS = {"cpu": 2**14, "cuda": 2**20}
"""Query-item pairs scored at once, by device: MoL keeps a few hundred numbers for each. More do not fit a CPU's caches;
with fewer, a GPU waits for launches."""
ROUND = 2**13
"""Users whose queries are held at once, roughly."""


@dataclass(frozen=True)
class Rankings:
    """The results of ranking U users, on the CPU."""

    similarity_U: Tensor
    """Rank of each user's target, from 1 (int64); NOT_SERVED if the target is excluded."""
    hindexer_U: Tensor | None = None
    """Rank of each user's target by the h-indexer, where there is one, likewise."""
    stage1_UK: Tensor | None = None
    """Rank by the h-indexer of the similarity's best K items (int64); NOT_SERVED if there are fewer items."""
    best_UK: Tensor | None = None
    """The similarity's best K items, if requested (int64); -1 if there are fewer."""

    def among(self, at_N: Ints, missed_U: NDArray[np.bool_]) -> "Rankings":
        """With others, who are missed: these users at the places `at_N` of U, some of whose targets are missed too."""

        def among(of: Tensor | None, none: int) -> Tensor | None:
            return None if of is None else of.new_full((len(missed_U), *of.shape[1:]), none).index_copy_(0, at, of)

        at, missed = torch.from_numpy(at_N), torch.from_numpy(missed_U)
        stage1_UK, best_UK = among(self.stage1_UK, NOT_SERVED), among(self.best_UK, -1)
        similarity_U, hindexer_U = (among(of, NOT_SERVED) for of in (self.similarity_U, self.hindexer_U))
        assert similarity_U is not None
        similarity_U[missed] = NOT_SERVED
        if hindexer_U is not None:
            hindexer_U[missed] = NOT_SERVED
        return Rankings(similarity_U, hindexer_U, stage1_UK, best_UK)


@torch.no_grad()
def rank_corpus(
    embedder: Embedder,
    num_items: int,
    users: RankingUsers,
    batch_size: int,
    exclude_history: bool,
    advance: Callable[[int], None] = lambda users: None,
    best: int = 0,
) -> Rankings:
    """Ranks the corpus for all users, and finds the `best` items of each, at most TOP. Collective; equal on all ranks.

    Ties count against the model, and so does NaN: whatever is not below the target counts as above it. Excluded items
    are below everything.
    """
    if not len(users):
        return Rankings(torch.empty(0, dtype=torch.int64))
    ranking = _Ranking(embedder, num_items, batch_size, exclude_history, best)
    rounds = [ranking.round(part, advance) for part in users.batches(max(1, ROUND // batch_size) * batch_size)]
    similarity, hindexer, stage1, best_items = zip(*rounds, strict=True)
    return Rankings(torch.cat(similarity), _joined(hindexer), _joined(stage1), _joined(best_items))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


class _Ranking:
    """How the corpus is ranked: the stages, the chunks, the exclusions."""

    def __init__(self, embedder: Embedder, num_items: int, batch_size: int, exclude_history: bool, best: int) -> None:
        self.embedder, self.ranks, self.num_items = embedder, embedder.ranks, num_items
        self.batch_size, self.exclude_history, self.best = batch_size, exclude_history, best
        stages: list[Similarity | None] = [embedder.tower.similarity, embedder.tower.hindexer]
        self.stages = [stage for stage in stages if stage is not None]
        self.kept = TOP if len(self.stages) > 1 else best
        """Items at the top that are found for each user."""
        self.chunk = _power_of_two(num_items // CHUNKS, *CHUNK_ITEMS)
        self.block = _power_of_two(PAIRS[self.ranks.device.type] // batch_size, 1, self.chunk)

    def round(
        self, users: RankingUsers, advance: Callable[[int], None]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The fields of Rankings for these users."""
        batches, ranked = self._encode(users), 0
        for number, chunk in enumerate(self._chunks(self.stages), start=1):
            for batch in batches if chunk.count else ():
                self._rank(batch, chunk)
            advance(len(users) * number // self.steps - ranked)
            ranked = len(users) * number // self.steps
        above_SU = all_reduce_sum(torch.cat([batch.above_SB for batch in batches], dim=1), self.ranks)
        rank_SU = (above_SU + 1).cpu()
        if self.exclude_history:
            rank_SU[:, torch.from_numpy(users.repeats())] = NOT_SERVED
        if not self.kept:
            return rank_SU[0], None, None, None
        found_SUK = torch.cat([batch.top_SBK for batch in batches], dim=1)
        key_SUK = _best(torch.cat(all_gather(found_SUK, self.ranks), dim=2), self.kept)
        best_UK = split_keys(key_SUK[0, :, : self.best])[0].cpu() if self.best else None
        if len(self.stages) == 1:
            return rank_SU[0], None, None, best_UK
        return rank_SU[0], rank_SU[1], self._rank_in_stage1(batches, key_SUK[1]), best_UK

    @property
    def steps(self) -> int:
        """Number of chunks of the rank that has the most."""
        return -(-self.chunks // self.ranks.world_size)

    @property
    def chunks(self) -> int:
        return -(-self.num_items // self.chunk)

    def _encode(self, users: RankingUsers) -> list["_Batch"]:
        """Every rank encodes some of the batches and scores their targets; a sum then gives all of them to every
        rank."""
        parts, none = list(users.batches(self.batch_size)), users.of(slice(0, 0))
        sides_0 = self._queries(self.embedder.queries(none))
        known_UQ = torch.zeros(len(users), _flat(sides_0).shape[1] + len(self.stages), device=self.ranks.device)
        for first in range(0, len(parts), self.ranks.world_size):
            place = first + self.ranks.rank
            part = parts[place] if place < len(parts) else none
            queries = self._queries(self.embedder.queries(part))
            item_V, target_B = np.unique(part.target, return_inverse=True)
            items = self.embedder.items(item_V)
            if len(part):
                targets = items.take(torch.from_numpy(target_B).to(self.ranks.device))
                scores_BS = self._score_targets(queries, targets)
                known_UQ[place * self.batch_size :][: len(part)] = torch.cat([_flat(queries), scores_BS], dim=1)
        known, S = all_reduce_sum(known_UQ, self.ranks).split(self.batch_size), len(self.stages)
        return [
            _Batch(part, _unflat(known_BQ[:, :-S], sides_0), known_BQ[:, -S:].t(), self.exclude_history, self.kept)
            for part, known_BQ in zip(parts, known, strict=True)
        ]

    def _queries(self, query: Embedded) -> list[Side]:
        row_B = torch.arange(len(query.vector_RD), device=query.vector_RD.device)
        return [stage.query_side(query, row_B) for stage in self.stages]

    def _items(self, items: Embedded, stages: list[Similarity]) -> list[Side]:
        """The items' sides, padded with zeros to the size of a chunk."""
        padded = Embedded(self._padded(items.vector_RD), [self._padded(group_ND) for group_ND in items.groups])
        row_N = torch.arange(self.chunk, device=padded.vector_RD.device)
        return [stage.item_side(padded, row_N) for stage in stages]

    def _padded(self, of_ND: Tensor) -> Tensor:
        return F.pad(of_ND, (0, 0, 0, self.chunk - len(of_ND)))

    def _score_targets(self, queries: list[Side], targets: Embedded) -> Tensor:
        """Scores [B, S] of each query with its target, by products of the same shape as all others."""
        scores, count = [], len(targets.vector_RD)
        for start in range(0, count, self.chunk):
            part = targets.take(slice(start, start + self.chunk))
            sides, N = self._items(part, self.stages), len(part.vector_RD)
            score_SBN = [self._score(*of_stage, N) for of_stage in zip(self.stages, queries, sides, strict=True)]
            scores.append(torch.stack([score_BN[start : start + N].diag() for score_BN in score_SBN], dim=1))
        return torch.cat(scores)

    def _score(self, stage: Similarity, query: Side, item: Side, count: int) -> Tensor:
        """phi(x, u) of B queries with the first `count` items of a chunk, FP32 [B, count]."""
        blocks = [
            stage.all_pairs(query, tuple(part[start : start + self.block] for part in item))
            for start in range(0, count, self.block)
        ]
        return torch.cat(blocks, dim=1)[:, :count]

    def _chunks(self, stages: list[Similarity]) -> Iterator["_Chunk"]:
        """This rank's range of the corpus, chunk by chunk; then empty chunks while other ranks have more.
        Collective."""
        first, last = own_range(self.chunks, self.ranks.rank, self.ranks.world_size)
        for number in range(first, first + self.steps):
            start = min(number * self.chunk, self.num_items)
            stop = min(start + self.chunk, self.num_items) if number < last else start
            items = self.embedder.items(np.arange(start, stop))
            yield _Chunk(start, stop - start, self._items(items, stages) if stop > start else [])

    def _rank(self, batch: "_Batch", chunk: "_Chunk") -> None:
        """Counts the items above the targets, and keeps the best items."""
        sides = zip(self.stages, batch.query, chunk.items, strict=True)
        score_SBN = torch.stack([self._score(*of_stage, chunk.count) for of_stage in sides])
        out = batch.excluded.of(chunk)
        above_SBN = ~(score_SBN < batch.score_SB[:, :, None])
        above_SBN[:, *out] = False
        above_SBN[:, *batch.targets.of(chunk)] = False
        batch.above_SB += above_SBN.sum(2)
        if self.kept:
            key_SBN = rank_keys(score_SBN, chunk.index_N(score_SBN.device))
            key_SBN[:, *out] = NOTHING
            batch.top_SBK = _best(torch.cat([batch.top_SBK, key_SBN], dim=2), self.kept)

    def _rank_in_stage1(self, batches: list["_Batch"], key_UK: Tensor) -> Tensor:
        """Ranks by the h-indexer [U, K] of the similarity's best items, given their keys by the h-indexer."""
        ordered_UK, order_UK = key_UK.sort(dim=1)
        above_UK = torch.zeros_like(ordered_UK)
        for chunk in self._chunks(self.stages[1:]):
            start = 0
            for batch in batches if chunk.count else ():
                users = slice(start, start := start + batch.score_SB.shape[1])
                score_BN = self._score(self.stages[1], batch.query[1], chunk.items[0], chunk.count)
                key_BN = rank_keys(score_BN, chunk.index_N(score_BN.device))
                key_BN[batch.excluded.of(chunk)] = NOTHING
                above_UK[users] += _count_above(key_BN, ordered_UK[users])
        rank_UK = torch.empty_like(above_UK).scatter_(1, order_UK, all_reduce_sum(above_UK, self.ranks) + 1)
        return rank_UK.masked_fill(key_UK == NOTHING, NOT_SERVED).cpu()


@dataclass(frozen=True)
class _Chunk:
    """Consecutive items, and their sides for each stage."""

    start: int
    count: int
    items: list[Side]

    def index_N(self, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.start + self.count, device=device)


class _Batch:
    """Users who are ranked together, and their results."""

    def __init__(
        self, users: RankingUsers, query: list[Side], score_SB: Tensor, exclude_history: bool, kept: int
    ) -> None:
        """`query` are the users' sides for each stage, `score_SB` the scores of their targets; `kept` items are
        found."""
        device = score_SB.device
        self.query, self.score_SB = query, score_SB
        self.targets = _Cells(np.arange(len(users)), users.target, device)
        row_E, item_E = np.repeat(np.arange(len(users)), users.seen_lengths), users.seen
        self.excluded = _Cells(*((row_E, item_E) if exclude_history else (row_E[:0], item_E[:0])), device)
        self.above_SB = torch.zeros_like(score_SB, dtype=torch.int64)
        """Items above the target so far."""
        self.top_SBK = torch.full((*score_SB.shape, kept), NOTHING, device=device)
        """Keys of the similarity's best items so far, for each stage."""


class _Cells:
    """Pairs of a user and an item, in the order of the items: a chunk's are a slice, which no device is asked for."""

    def __init__(self, row_E: np.ndarray, item_E: np.ndarray, device: torch.device) -> None:
        order_E = np.argsort(item_E)
        self.item_E = item_E[order_E]
        self.on_device = torch.from_numpy(row_E[order_E]).to(device), torch.from_numpy(self.item_E).to(device)

    def of(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Users and places of the items in the chunk."""
        first, last = np.searchsorted(self.item_E, [chunk.start, chunk.start + chunk.count])
        row_E, item_E = (of[first:last] for of in self.on_device)
        return row_E, item_E - chunk.start


def _flat(sides: list[Side]) -> Tensor:
    """All numbers of each query's sides, in a row [B, Q]."""
    return torch.cat([part.flatten(1) for side in sides for part in side], dim=1)


def _unflat(flat_BQ: Tensor, like: list[Side]) -> list[Side]:
    sizes = [part.shape[1:].numel() for side in like for part in side]
    pieces = iter(flat_BQ.split(sizes, dim=1))
    # Contiguous again, because products may round differently with another stride.
    return [tuple(next(pieces).unflatten(1, part.shape[1:]).contiguous() for part in side) for side in like]


def _best(key_SUN: Tensor, kept: int) -> Tensor:
    """Keys of the best items by the first stage, the best one first [S, U, K]."""
    index_UK = key_SUN[0].topk(kept, dim=1).indices
    return key_SUN.gather(2, index_UK.expand(len(key_SUN), -1, -1))


def _count_above(key_BN: Tensor, ordered_BK: Tensor) -> Tensor:
    """How many of the keys are above each of some others, given in ascending order [B, K]."""
    B, K = ordered_BK.shape
    # A key is above the first `place` of them.
    place_BN = torch.searchsorted(ordered_BK, key_BN)
    count_BP = ordered_BK.new_zeros(B, K + 1).scatter_add_(1, place_BN, torch.ones_like(place_BN))
    return count_BP.flip(1).cumsum(1).flip(1)[:, 1:]


def _power_of_two(number: int, least: int, most: int) -> int:
    """The largest power of two up to the number, within bounds that are powers of two."""
    return max(least, min(most, 2 ** max(0, number.bit_length() - 1)))
