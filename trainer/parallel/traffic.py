"""What a step sends between ranks, without starting any: from the ids of its batch and the plan of its tables.

Axes: W ranks, V unique ids of a table that a rank's batch names, S shards of a table that have the same columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
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
from logitmix.trainer.parallel.by_host import DIVIDED_BY_HOST
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
    """The rows of a step that each rank sends and that each rank receives [2, W]; their gradients go back, but for
    those of peers.

    Takes time in proportion to the ids, or to the ranks where there are more of these: no rank is compared with the
    shards of all others.

    Args:
        ids_by_rank: What the batch of each rank names of each table: sorted unique ids [V], or for a pooled table bags,
            whose ids are not counted on their way to the owners.
        plan: The places of the tables within one group of ranks.
        per_host: Ranks of each host.
        group_size: Ranks of each group; 0: all.
    """
    places = _Places(len(ids_by_rank), group_size or len(ids_by_rank), per_host)
    found: dict[Crossing, Counts] = {}

    def count(crossing: Crossing, rows_2W: Counts) -> None:
        if rows_2W.any():
            found[crossing] = found.get(crossing, 0) + rows_2W

    for name, table in plan.items():
        named = [of_rank[name] for of_rank in ids_by_rank]
        ids = [of for of in named if not isinstance(of, Bags)]
        bags = [of for of in named if isinstance(of, Bags)]
        for shards in _by_columns(table):
            columns, first_S = shards[0].columns, np.array([shard.first_row for shard in shards])
            owner_S = np.array([shard.rank for shard in shards])
            if bags:
                bag_W = np.array([len(of.offsets) - 1 for of in bags])
                within_2W, between_2W = _of_bags(places, bag_W, owner_S, table.sharding in DIVIDED_BY_HOST)
            else:
                within_2W, between_2W = _of_ids(places, [of.numpy() for of in ids], first_S, owner_S)
            count(Crossing(name, columns, not bags, False), within_2W)
            count(Crossing(name, columns, not bags, True), between_2W)
            if places.groups > 1:
                held_GS = _held(places, [(of.values if isinstance(of, Bags) else of).numpy() for of in named], first_S)
                within_2W, between_2W = _to_peers(places, places.by_owner(held_GS, owner_S))
                count(Crossing(name, columns, False, False, True), within_2W)
                count(Crossing(name, columns, False, True, True), between_2W)
    return found


def traffic(rows: Mapping[Crossing, Counts], wire: WireConfig) -> Traffic:
    """Of a step's rows in the precisions of a wire. Without the padding that NCCL's messages have."""
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
    """The shards that have rows, those of the same columns together, in the order of their rows."""
    shards = sorted((shard for shard in table.shards if shard.rows), key=lambda of: (of.first_column, of.first_row))
    for _, alike in groupby(shards, key=lambda of: of.first_column):
        found = list(alike)
        assert sum(shard.rows for shard in found) == table.rows
        yield found


class _Places:
    """The group, the host, and the number within the group of each rank [W]."""

    def __init__(self, world_size: int, size: int, per_host: int) -> None:
        self.size, self.groups, self.per_host = size, world_size // size, per_host
        self.rank_W = np.arange(world_size)
        self.host_W, self.group_W, self.number_W = self.rank_W // per_host, self.rank_W // size, self.rank_W % size

    def sum(self, count_W: Counts, *alike: Counts) -> Counts:
        """For each rank, the sum of the counts of all ranks that are like it in these ways [W]."""
        key_W = np.zeros_like(self.rank_W)
        for way_W in alike:
            _, key_W = np.unique(key_W * (len(way_W) + 1) + way_W, return_inverse=True)
        return np.bincount(key_W, count_W).astype(np.int64)[key_W]

    def by_owner(self, rows_GS: Counts, owner_S: Counts) -> Counts:
        """The rows [G, S] of each group's shards by the rank that owns them [W]."""
        found = np.zeros((self.groups, self.size), np.int64)
        np.add.at(found.T, owner_S, rows_GS.T)
        return found.ravel()


def _held(places: _Places, ids: Sequence[Counts], first_S: Counts) -> Counts:
    """How often the ranks of each group name a row of each shard [G, S]."""
    held_GS = np.zeros((places.groups, len(first_S)), np.int64)
    for group, id_V in zip(places.group_W, ids, strict=True):
        if len(id_V) < len(first_S):
            np.add.at(held_GS[group], np.searchsorted(first_S, id_V, side="right") - 1, 1)
        else:
            held_GS[group] += np.diff(np.searchsorted(np.sort(id_V), first_S), append=len(id_V))
    return held_GS


def _of_ids(places: _Places, ids: Sequence[Counts], first_S: Counts, owner_S: Counts) -> tuple[Counts, Counts]:
    """Rows that ranks ask their owners for, within hosts and between them [2, W]."""
    held_W = places.by_owner(_held(places, ids, first_S), owner_S)
    within_2W, asked_W, own_W = np.zeros((2, len(ids)), np.int64), np.array([*map(len, ids)]), np.zeros_like(held_W)
    end_S, by_owner_S = np.append(first_S[1:], np.iinfo(np.int64).max), np.argsort(owner_S, kind="stable")
    sorted_S = owner_S[by_owner_S]
    for rank, id_V in enumerate(ids):
        begin, first = rank - rank % places.size, rank - rank % places.per_host
        # The shards that the ranks of this host own in this group.
        span = np.searchsorted(sorted_S, (max(first - begin, 0), first - begin + places.per_host))
        near = by_owner_S[slice(*span)]
        count = np.searchsorted(id_V, end_S[near]) - np.searchsorted(id_V, first_S[near])
        owner = begin + owner_S[near]
        np.add.at(within_2W[0], owner, count)
        within_2W[1, rank], own_W[rank] = count.sum(), count[owner == rank].sum()
    between_2W = np.stack([held_W, asked_W]) - within_2W
    return within_2W - own_W, between_2W


def _of_bags(places: _Places, bag_W: Counts, owner_S: Counts, by_host: bool) -> tuple[Counts, Counts]:
    """Rows of bags, which each rank asks every shard's owner for, within hosts and between them [2, W]. `by_host`: they
    go within the owners' host to the rank with the asker's number there, which sends their sums on."""
    shard_W = np.tile(np.bincount(owner_S, minlength=places.size), places.groups)

    def crossing(*alike: Counts) -> Counts:
        """Between ranks that are alike in these ways, and are not the same."""
        sent_W = shard_W * (places.sum(bag_W, *alike) - bag_W)
        return np.stack([sent_W, bag_W * (places.sum(shard_W, *alike) - shard_W)])

    group_W, lanes = places.group_W, gcd(places.size, places.per_host)
    if not by_host:
        within_2W = crossing(group_W, places.host_W)
        return within_2W, crossing(group_W) - within_2W
    lane_W, block_W = places.number_W % lanes, places.rank_W // lanes
    asked_W = places.sum(bag_W, group_W, lane_W)
    to_lanes_2W = np.stack(
        [shard_W * (places.sum(bag_W, group_W) - asked_W), (places.sum(shard_W, block_W) - shard_W) * asked_W]
    )
    within_2W = crossing(group_W, lane_W, places.host_W)
    return to_lanes_2W + within_2W, crossing(group_W, lane_W) - within_2W


def _to_peers(places: _Places, held_W: Counts) -> tuple[Counts, Counts]:
    """Gradients that ranks send to those of the other groups that own the same rows, within hosts and between them
    [2, W]."""
    near = places.number_W, places.host_W
    near_W, all_W = places.sum(held_W, *near), places.sum(held_W, places.number_W)
    peers_W = places.sum(np.ones_like(held_W), *near) - 1
    within_2W = np.stack([held_W * peers_W, near_W - held_W])
    return within_2W, np.stack([held_W * (places.groups - 1 - peers_W), all_W - near_W])


def expected_ids(schema: Schema, loss: LossConfig, sequences: int, length: float) -> dict[str, Tensor]:
    """About the ids that a rank's batch names if users and items are drawn at random: of `sequences` of `length`
    positions. Every feature but the user's is taken for one of items."""
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
    """How many different ones of `rows` are expected among so many drawn with replacement."""
    return min(rows, drawn, round(rows * -torch.expm1(torch.tensor(-drawn / rows, dtype=torch.float64)).item()))


def _spread(count: int, rows: int) -> Tensor:
    """So many ids [V], evenly over a table's rows."""
    return torch.arange(count) * rows // max(1, count)
