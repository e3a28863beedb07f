"""What a step sends between ranks, without starting any: from the ids of its batch and the plan of its tables.

Axes: V unique ids of a table that a rank's batch names, R bags.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from logitmix.comm.codec import Segment
from logitmix.comm.config import CODECS, WireConfig
from logitmix.modules.batch import Bags
from logitmix.modules.config import LossConfig
from logitmix.modules.schema import ITEM, USER, Schema
from logitmix.trainer.parallel.plan import TablePlan

ID_BYTES = 8


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step sends, of all ranks together: ids to the owners of their rows, rows back (forward), and
    gradients to the owners (backward). `between_hosts` is the part of all three that leaves its host."""

    ids: int = 0
    forward: int = 0
    backward: int = 0
    between_hosts: int = 0


class Crossing(NamedTuple):
    """How rows of a table go from a rank to another: their columns, whether their ids were asked for one by one, and
    whether they leave the host."""

    table: str
    columns: int
    asked: bool
    leaves: bool


def rows_sent(
    ids_by_rank: Sequence[Mapping[str, Tensor | Bags]], plan: Mapping[str, TablePlan], per_host: int
) -> Counter[Crossing]:
    """The rows of a step whose batch names these ids of each table, rank by rank: sorted unique ids [V], or for a
    pooled table bags, whose ids are not counted."""
    found = Counter[Crossing]()

    def count(name: str, columns: int, rows: int, asked: bool, owner: int, asker: int) -> None:
        if owner != asker:
            found[Crossing(name, columns, asked, owner // per_host != asker // per_host)] += rows

    for name, table in plan.items():
        for shard in table.shards:
            for rank, of_rank in enumerate(ids_by_rank):
                named = of_rank[name]
                if not isinstance(named, Bags):
                    rows = _rows(named, shard.first_row, shard.rows)
                    count(name, shard.columns, rows, True, shard.rank, rank)
                elif table.sharding in ("table_row_wise", "grid_shard"):
                    # Within the owners' host to the rank of the asker's number there, which sends the sums on.
                    through = shard.rank - shard.rank % per_host + rank % per_host
                    count(name, shard.columns, _bags(named), False, shard.rank, through)
                    if shard.rank == through:
                        count(name, shard.columns, _bags(named), False, through, rank)
                else:
                    count(name, shard.columns, _bags(named), False, shard.rank, rank)
    return found


def traffic(rows: Mapping[Crossing, int], wire: WireConfig) -> Traffic:
    """Of a step's rows in the precisions of a wire. Without the padding that NCCL's messages have."""
    codecs = CODECS["forward"].find(wire.forward), CODECS["backward"].find(wire.backward)
    total = [0, 0, 0, 0]
    for (table, columns, asked, leaves), count in rows.items():
        layout = (Segment(table, columns),)
        sent = ID_BYTES * count * asked, *(count * codec.row_bytes(layout) for codec in codecs)
        total = [of + more for of, more in zip(total, (*sent, sum(sent) * leaves), strict=True)]
    return Traffic(*total)


def _rows(named: Tensor, first: int, rows: int) -> int:
    """How many of the ids are in [first, first + rows)."""
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
    named = positions + sequences + groups[loss.share] * (loss.negatives + loss.in_batch)
    items = _distinct(schema.num_items, named)
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
