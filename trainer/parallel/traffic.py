"""What a step sends between ranks, without starting any: from the ids of its batch and the plan of its tables.

Axes: W ranks, O ranks of a group, which own the rows, V unique ids of a table that a rank's batch names, S shards of a
table that have the same columns.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitmix.comm.codec import Segment
from logitmix.comm.config import CODECS, WireConfig
from logitmix.modules.batch import Bags
from logitmix.modules.config import LossConfig
from logitmix.modules.schema import ITEM, USER, Schema
from logitmix.trainer.parallel.plan import TablePlan
from logitmix.trainer.parallel.sharded_rows import ShardPlace

ID_BYTES = 8
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step sends, of all ranks together: ids to the owners of their rows, rows back (forward), and
    gradients to the owners (backward); and with groups of ranks, ids and gradients to the owners in other groups
    (peers). `between_hosts` is the part of all that leaves its host."""

    ids: int = 0
    forward: int = 0
    backward: int = 0
    peers: int = 0
    between_hosts: int = 0
    most_within: int = 0
    """Bytes within a host that a step waits for: in each of the four, those of the rank that sends or receives most."""
    most_between: int = 0
    """Bytes between hosts that a step waits for: in each of the four, those of the rank that sends or receives most."""

    @property
    def total(self) -> int:
        return self.ids + self.forward + self.backward + self.peers


class Crossing(NamedTuple):
    """How rows of a table go from a rank to another: their columns, whether their ids were asked for one by one,
    whether they leave the host, and whether they are gradients alone, for peers, with their ids."""

    table: str
    columns: int
    asked: bool
    leaves: bool
    to_peers: bool = False


def rows_sent(
    ids_by_rank: Sequence[Mapping[str, Tensor | Bags]],
    plan: Mapping[str, TablePlan],
    per_host: int,
    group_size: int = 0,
) -> dict[Crossing, Counts]:
    """Returns the rows of a step that each rank sends and that each rank receives [2, W]; their gradients go back, but
    for those of peers.

    Args:
        ids_by_rank: What the batch of each rank names of each table: sorted unique ids [V], or for a pooled table bags,
            whose ids are not counted on their way to the owners.
        plan: The places of the tables within one group of ranks.
        per_host: Ranks of each host.
        group_size: Ranks of each group; 0: all.
    """
    W = len(ids_by_rank)
    size = group_size or W
    found = _Crossings(W, per_host)
    for name, table in plan.items():
        named = [of_rank[name] for of_rank in ids_by_rank]
        bags = isinstance(named[0], Bags)
        for shards in _by_columns(table):
            owner_S, first_S = (np.array([getattr(of, key) for of in shards]) for key in ("rank", "first_row"))
            way, shards_O = (name, shards[0].columns), np.bincount(owner_S, minlength=size)
            held_W = np.zeros(W, np.int64)
            for rank, of in enumerate(named):
                # The ranks of the group that this one belongs to: each `size` consecutive ones are a group.
                group = slice(rank - rank % size, rank - rank % size + size)
                ids = of.values.sort().values if isinstance(of, Bags) else of
                rows_S = np.diff(np.searchsorted(ids.numpy(), first_S), append=len(ids))
                rows_O = np.bincount(owner_S, rows_S, size).astype(np.int64)
                held_W[group] += rows_O
                if isinstance(of, Bags):
                    rows_O = shards_O * (len(of.offsets) - 1)
                found.add((*way, not bags), group, rank, rows_O)
            for rank in range(W if size < W else 0):
                peers = slice(rank % size, W, size)
                found.add((*way, False), rank, peers, np.full(W // size, held_W[rank]), to_peers=True)
    return {crossing: rows_2W for crossing, rows_2W in found.rows.items() if rows_2W.any()}


class _Crossings:
    """Rows that cross between ranks, added up by the way they go."""

    def __init__(self, world_size: int, per_host: int) -> None:
        self.rank_W = np.arange(world_size)
        self.host_W = self.rank_W // per_host
        self.rows = defaultdict[Crossing, Counts](lambda: np.zeros((2, world_size), np.int64))

    def add(
        self,
        way: tuple[str, int, bool],
        senders: slice | int,
        receivers: slice | int,
        rows: Counts,
        to_peers: bool = False,
    ) -> None:
        """Adds rows that go from some ranks to one, or from one to some; what a rank has itself does not cross."""
        many, one = (senders, receivers) if isinstance(senders, slice) else (receivers, senders)
        near = self.host_W[many] == self.host_W[one]
        within = rows * (near & (self.rank_W[many] != one))
        for leaves, crossing in ((False, within), (True, rows * ~near)):
            for of, ranks in zip(self.rows[Crossing(*way, leaves, to_peers)], (senders, receivers), strict=True):
                of[ranks] += crossing if isinstance(ranks, slice) else crossing.sum()


def traffic(rows: Mapping[Crossing, Counts], wire: WireConfig) -> Traffic:
    """Returns the bytes of a step's rows in the precisions of a wire, without the padding that NCCL's messages have."""
    codecs = CODECS["forward"].find(wire.forward), CODECS["backward"].find(wire.backward)
    world_size = next((of.shape[1] for of in rows.values()), 0)
    # Of ids, rows, gradients and what goes to peers; within hosts and between them; sent and received.
    bytes_42W = np.zeros((4, 2, 2, world_size), np.int64)
    for (table, columns, asked, leaves, to_peers), rows_2W in rows.items():
        forward, backward = (codec.row_bytes((Segment(table, columns),)) for codec in codecs)
        of_way = bytes_42W[:, int(leaves)]
        if to_peers:
            of_way[3] += (ID_BYTES + backward) * rows_2W
        else:
            of_way[0] += ID_BYTES * asked * rows_2W[::-1]
            of_way[1] += forward * rows_2W
            of_way[2] += backward * rows_2W[::-1]
    sent, between_hosts = bytes_42W[:, :, 0].sum((1, 2)), bytes_42W[:, 1, 0].sum()
    most = bytes_42W.max((2, 3), initial=0).sum(0)
    return Traffic(*map(int, (*sent, between_hosts, *most)))


def _by_columns(table: TablePlan) -> Iterator[list[ShardPlace]]:
    """Returns the shards that have rows, those of the same columns together, in the order of their rows."""
    shards = sorted((shard for shard in table.shards if shard.rows), key=lambda of: (of.first_column, of.first_row))
    for _, alike in groupby(shards, key=lambda of: of.first_column):
        found = list(alike)
        assert sum(shard.rows for shard in found) == table.rows
        yield found


def expected_ids(schema: Schema, loss: LossConfig, sequences: int, length: float) -> dict[str, Tensor]:
    """Returns about the ids that a rank's batch names if users and items are drawn at random: of `sequences` of
    `length` positions. Every feature but the user's is taken for one of items."""
    positions = round(sequences * length)
    groups = {
        "position": positions,
        "sequence": sequences,
        "group": -(-positions // loss.group_positions),
        "batch": 1,
    }
    named = positions + sequences + groups[loss.share] * loss.candidates(schema.num_items)
    items = _distinct(schema.num_items, named) if loss.negatives else schema.num_items
    return {
        table.name: _spread(items if table.name == ITEM else _distinct(table.rows, of), table.rows)
        for table in schema.tables
        for of in [sequences if table.name == USER else items]
    }


def _distinct(rows: int, drawn: int) -> int:
    """Returns how many different ones of `rows` are expected among so many drawn with replacement."""
    return min(rows, drawn, round(rows * -torch.expm1(torch.tensor(-drawn / rows, dtype=torch.float64)).item()))


def _spread(count: int, rows: int) -> Tensor:
    """Returns `count` ids [V], evenly over a table's rows."""
    return torch.arange(count) * rows // max(1, count)
