"""The rows that cross between ranks, in one pass over the ids, are those that a plain count of all pairs gives."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from logitmix.comm.config import WireConfig
from logitmix.modules.batch import Bags
from logitmix.trainer.parallel.plan import TablePlan
from logitmix.trainer.parallel.sharded_rows import ShardPlace
from logitmix.trainer.parallel.traffic import ID_BYTES, Counts, Crossing, rows_sent, traffic

ROWS, DIM = 97, 16
LAYOUTS = ((8, 8, 4), (8, 4, 4), (12, 6, 4), (4, 1, 2), (1, 1, 1))
"""Ranks, ranks of a group, and of a host."""


def reference(
    ids_by_rank: list[Tensor | Bags], shards: list[ShardPlace], per_host: int, size: int
) -> dict[Crossing, Counts]:
    """Each shard with each rank."""
    W = len(ids_by_rank)
    found: dict[Crossing, Counts] = defaultdict(lambda: np.zeros((2, W), np.int64))

    def count(columns: int, asked: bool, sender: int, receiver: int, rows: int, peers: bool = False) -> None:
        if sender != receiver:
            leaves = sender // per_host != receiver // per_host
            found[Crossing("of", columns, asked, leaves, peers)][[0, 1], [sender, receiver]] += rows

    for shard in shards:
        for rank, named in enumerate(ids_by_rank):
            owner, bags = rank - rank % size + shard.rank, isinstance(named, Bags)
            values = named.values if isinstance(named, Bags) else named
            held = int(((values >= shard.first_row) & (values < shard.first_row + shard.rows)).sum())
            for peer in range(shard.rank, W, size):
                count(shard.columns, False, owner, peer, held, peers=True)
            sent = len(named.offsets) - 1 if isinstance(named, Bags) else held
            count(shard.columns, not bags, owner, rank, sent if shard.rows else 0)
    return {crossing: rows for crossing, rows in found.items() if rows.any()}


def shards_of(sharding: str, size: int) -> list[ShardPlace]:
    if sharding == "column_wise":
        return [ShardPlace(number % size, 0, ROWS, 4 * number, 4) for number in range(4)]
    if sharding == "table_wise":
        return [ShardPlace(size - 1, 0, ROWS, 0, DIM)]
    firsts = [min(number * -(-ROWS // size), ROWS) for number in range(size + 1)]
    return [ShardPlace(rank, firsts[rank], firsts[rank + 1] - firsts[rank], 0, DIM) for rank in range(size)]


def a_plan(sharding: str, size: int) -> dict[str, TablePlan]:
    return {"of": TablePlan(ROWS, DIM, sharding, "sgd", "fp32", False, 0, tuple(shards_of(sharding, size)))}


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize(("W", "size", "per_host"), LAYOUTS)
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_rows_are_those_of_every_shard_and_rank(sharding: str, W: int, size: int, per_host: int, bags: bool) -> None:
    random, ids = np.random.default_rng(0), list[Tensor | Bags]()
    for _ in range(W):
        count = int(random.integers(0, 40)) * int(random.integers(0, 2))
        values = torch.from_numpy(random.integers(0, ROWS, count))
        cuts = np.sort(random.integers(0, count + 1, int(random.integers(0, 9))))
        ids.append(Bags(values, torch.tensor([0, *cuts, count])) if bags else values.unique())
    by_rank: list[Mapping[str, Tensor | Bags]] = [{"of": of} for of in ids]
    found = rows_sent(by_rank, a_plan(sharding, size), per_host, size)
    expected = reference(ids, shards_of(sharding, size), per_host, size)
    assert found.keys() == expected.keys()
    for crossing, rows_2W in expected.items():
        assert np.array_equal(found[crossing], rows_2W), crossing


def test_what_is_waited_for_is_the_rank_with_the_most() -> None:
    """Rank 3 has a whole table, so each of its bytes goes out there, one rank after the other."""
    W, per_host = 8, 4
    ids = [{"of": torch.arange(rank + 1)} for rank in range(W)]
    of = traffic(rows_sent(ids, a_plan("table_wise", 4), per_host, W), WireConfig(forward="fp32", backward="fp16"))
    within, between = 1 + 2 + 3, 5 + 6 + 7 + 8
    assert of.most_within == within * (ID_BYTES + 4 * DIM + 2 * DIM)
    assert of.most_between == between * (ID_BYTES + 4 * DIM + 2 * DIM) == of.between_hosts
    assert of.total == of.most_within + of.most_between
