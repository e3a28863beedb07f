"""What a step sends between ranks, without starting any: from the ids of its batch and the plan of its tables.

Axes: V unique ids of a table that a rank's batch names, R bags.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from logitmix.comm.codec import Segment
from logitmix.comm.config import CODECS, WireConfig
from logitmix.modules.batch import Bags
from logitmix.modules.config import LossConfig
from logitmix.modules.schema import ITEM, USER, Schema
from logitmix.trainer.parallel.by_host import DIVIDED_BY_HOST
from logitmix.trainer.parallel.plan import TablePlan

ID_BYTES = 8


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
) -> Counter[Crossing]:
    """The rows of a step whose batch names these ids of each table, rank by rank: sorted unique ids [V], or for a
    pooled table bags, whose ids are not counted on their way to the owners. `plan` is that of one group of so many
    ranks; 0: of all."""
    found = Counter[Crossing]()
    W = len(ids_by_rank)
    size = group_size or W
    of_host = gcd(size, per_host)

    def count(name: str, columns: int, rows: int, asked: bool, owner: int, asker: int) -> None:
        if owner != asker:
            found[Crossing(name, columns, asked, owner // per_host != asker // per_host)] += rows

    for name, table in plan.items():
        for shard in table.shards:
            for rank, of_rank in enumerate(ids_by_rank):
                named, owner = of_rank[name], rank - rank % size + shard.rank
                peers = [peer for peer in range(shard.rank, W, size) if peer != owner]
                held = _rows(named, shard.first_row, shard.rows) if peers else 0
                for peer in peers:
                    found[Crossing(name, shard.columns, False, owner // per_host != peer // per_host, True)] += held
                if not isinstance(named, Bags):
                    rows = _rows(named, shard.first_row, shard.rows)
                    count(name, shard.columns, rows, True, owner, rank)
                elif table.sharding in DIVIDED_BY_HOST:
                    # Within the owners' host to the rank of the asker's number there, which sends the sums on.
                    through = owner - owner % of_host + rank % of_host
                    count(name, shard.columns, _bags(named), False, owner, through)
                    if owner == through:
                        count(name, shard.columns, _bags(named), False, through, rank)
                else:
                    count(name, shard.columns, _bags(named), False, owner, rank)
    return found


def traffic(rows: Mapping[Crossing, int], wire: WireConfig) -> Traffic:
    """Of a step's rows in the precisions of a wire. Without the padding that NCCL's messages have."""
    codecs = CODECS["forward"].find(wire.forward), CODECS["backward"].find(wire.backward)
    total = [0] * 5
    for (table, columns, asked, leaves, to_peers), count in rows.items():
        layout = (Segment(table, columns),)
        forward, backward = (count * codec.row_bytes(layout) for codec in codecs)
        sent = (0, 0, 0, ID_BYTES * count + backward) if to_peers else (ID_BYTES * count * asked, forward, backward, 0)
        total = [of + more for of, more in zip(total, (*sent, sum(sent) * leaves), strict=True)]
    return Traffic(*total)


def _rows(named: Tensor | Bags, first: int, rows: int) -> int:
    """How many of the ids, sorted or in bags, are in [first, first + rows)."""
    if isinstance(named, Bags):
        return int(((named.values >= first) & (named.values < first + rows)).sum())
    start, end = torch.searchsorted(named, torch.tensor([first, first + rows])).tolist()
    return int(end - start)


def _bags(named: Bags) -> int:
    return len(named.offsets) - 1


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
