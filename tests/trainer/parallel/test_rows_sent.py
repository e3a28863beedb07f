"""The rows that cross between ranks, in one pass over the ids, are those that a plain count of all pairs gives."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np
import pytest
import torch
from torch import Tensor

from logitmix.comm.config import WireConfig
from logitmix.modules.batch import Bags
from logitmix.trainer.parallel.by_host import DIVIDED_BY_HOST
from logitmix.trainer.parallel.plan import TablePlan
from logitmix.trainer.parallel.sharded_rows import ShardPlace
from logitmix.trainer.parallel.traffic import ID_BYTES, Counts, Crossing, rows_sent, traffic

ROWS, DIM = 97, 16
LAYOUTS = ((8, 8, 4), (8, 4, 4), (8, 2, 4), (12, 6, 4), (12, 12, 3), (6, 6, 6), (4, 1, 2), (1, 1, 1))
"""Ranks, ranks of a group, and of a host."""


def reference(
    ids_by_rank: Sequence[Mapping[str, Tensor | Bags]], plan: Mapping[str, TablePlan], per_host: int, size: int
) -> dict[Crossing, Counts]:
    """Each shard with each rank."""
    W = len(ids_by_rank)
    found: dict[Crossing, Counts] = defaultdict(lambda: np.zeros((2, W), np.int64))
    lanes = gcd(size, per_host)

    def count(name: str, columns: int, asked: bool, sender: int, receiver: int, rows: int, peers: bool = False) -> None:
        if sender != receiver:
            leaves = sender // per_host != receiver // per_host
            found[Crossing(name, columns, asked, leaves, peers)][[0, 1], [sender, receiver]] += rows

    for name, table in plan.items():
        for shard in table.shards:
            for rank, of_rank in enumerate(ids_by_rank):
                named, owner = of_rank[name], rank - rank % size + shard.rank
                values = named.values if isinstance(named, Bags) else named
                held = int(((values >= shard.first_row) & (values < shard.first_row + shard.rows)).sum())
                for peer in range(shard.rank, W, size):
                    count(name, shard.columns, False, owner, peer, held, peers=True)
                if not isinstance(named, Bags):
                    count(name, shard.columns, True, owner, rank, held)
                    continue
                bags = len(named.offsets) - 1 if shard.rows else 0
                if table.sharding not in DIVIDED_BY_HOST:
                    count(name, shard.columns, False, owner, rank, bags)
                    continue
                through = owner - owner % lanes + rank % lanes
                count(name, shard.columns, False, owner, through, bags)
                if owner == through:
                    count(name, shard.columns, False, owner, rank, bags)
    return {crossing: rows for crossing, rows in found.items() if rows.any()}


def of_rows(ranks: Sequence[int], first_column: int = 0, columns: int = DIM) -> list[ShardPlace]:
    """A table's rows in equal parts, the last ones of which may be smaller or empty."""
    each = -(-ROWS // len(ranks))
    firsts = [min(number * each, ROWS) for number in range(len(ranks) + 1)]
    pairs = zip(ranks, firsts[:-1], firsts[1:], strict=True)
    return [ShardPlace(rank, first, end - first, first_column, columns) for rank, first, end in pairs]


def shards_of(sharding: str, size: int, per_host: int) -> list[ShardPlace]:
    lanes = gcd(size, per_host)
    hosts = [range(first, first + lanes) for first in range(0, size, lanes)]
    match sharding:
        case "row_wise":
            return of_rows(range(size))
        case "table_wise":
            return of_rows([size - 1])
        case "column_wise":
            return [of_rows([number % size], 4 * number, 4)[0] for number in range(4)]
        case "table_row_wise":
            return of_rows(hosts[-1])
        case _:
            width = DIM // len(hosts)
            return [shard for number, host in enumerate(hosts) for shard in of_rows(host, number * width, width)]


def a_plan(sharding: str, size: int, per_host: int) -> dict[str, TablePlan]:
    shards = tuple(shards_of(sharding, size, per_host))
    return {
        "of": TablePlan(ROWS, DIM, "grid_shard" if sharding == "grid" else sharding, "sgd", "fp32", False, 0, shards)
    }


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize(("W", "size", "per_host"), LAYOUTS)
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise", "table_row_wise", "grid"])
def test_rows_are_those_of_every_shard_and_rank(sharding: str, W: int, size: int, per_host: int, bags: bool) -> None:
    random = np.random.default_rng(0)
    plan, ids = a_plan(sharding, size, per_host), list[Mapping[str, Tensor | Bags]]()
    for _ in range(W):
        count = int(random.integers(0, 40)) * int(random.integers(0, 2))
        values = torch.from_numpy(random.integers(0, ROWS, count))
        if bags:
            cuts = np.sort(random.integers(0, count + 1, int(random.integers(0, 9))))
            ids.append({"of": Bags(values, torch.tensor([0, *cuts, count]))})
        else:
            ids.append({"of": values.unique()})
    found, expected = rows_sent(ids, plan, per_host, size), reference(ids, plan, per_host, size)
    assert found.keys() == expected.keys()
    for crossing, rows_2W in expected.items():
        assert np.array_equal(found[crossing], rows_2W), crossing


def test_what_is_waited_for_is_the_rank_with_the_most() -> None:
    """Rank 3 has a whole table, so each of its bytes goes out there, one rank after the other."""
    W, per_host = 8, 4
    ids = [{"of": torch.arange(rank + 1)} for rank in range(W)]
    of = traffic(rows_sent(ids, a_plan("table_wise", 4, 4), per_host, W), WireConfig(forward="fp32", backward="fp16"))
    within, between = 1 + 2 + 3, 5 + 6 + 7 + 8
    assert of.most_within == within * (ID_BYTES + 4 * DIM + 2 * DIM)
    assert of.most_between == between * (ID_BYTES + 4 * DIM + 2 * DIM) == of.between_hosts
    assert of.total == of.most_within + of.most_between
