"""Tables whose rows pass from value to value (tables.NAME.capacity): which rows a batch's values have.

Each rank decides for a part of the buckets of `row_map.py`, whoever holds the rows: the ranks ask it for the rows of
their batch's ids, and all hear which values have got a row, so that those who hold the row start it anew. This is done
when a batch is fetched, while the one before is trained on. So tables and maps are always as far as the next batch, and
a checkpoint has both.

Axes: U unique ids, N values that have got a row, B buckets of a rank, K rows of a bucket.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from logitmix.comm.collectives import all_to_all
from logitmix.comm.process_group import Ranks
from logitmix.modules.batch import Bags, Batch
from logitmix.modules.schema import Schema, Table
from logitmix.trainer.config import TableSettings
from logitmix.trainer.parallel.row_map import Ints, Layout, Placed, RowMap
from logitmix.trainer.parallel.sharded_rows import own_range


class GrowingTable:
    """The rows of a table's values; this rank knows those of its part of the buckets. All calls are collective."""

    def __init__(self, table: Table, settings: TableSettings, ranks: Ranks) -> None:
        self.name, self.ranks, capacity = table.name, ranks, table.rows - 1
        buckets = Layout(capacity).buckets
        self.part = own_range(buckets, ranks.rank, ranks.world_size)
        self.map = RowMap(capacity, settings.admit_after, settings.evict, self.part)
        self.ends = [own_range(buckets, rank, ranks.world_size)[1] for rank in range(ranks.world_size)]
        self.steps = torch.zeros((), dtype=torch.int64)
        """Those whose batches have been placed."""

    def find(self, id_U: Tensor) -> Tensor:
        """Returns the rows [U] of ids, the unknown one for values without a row: int64, on the CPU."""
        none = np.empty(0, np.int64)
        return torch.from_numpy(self._ask(id_U, lambda id_U: Placed(self.map.find(id_U), none, none)).row)

    def advance(self, id_U: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows [U] of the ids of this rank's part of the batch of a step, counted from 1; and of all ranks
        the values that have got a row, their rows and ids [N]. A step that has been placed changes nothing, such as the
        first one after a restart."""
        if step <= self.steps:
            none = torch.empty(0, dtype=torch.int64)
            return self.find(id_U), none, none
        self.steps.fill_(step)
        placed = self._ask(id_U, lambda id_U: self.map.advance(id_U, step))
        row_U, new_row, new_id = map(torch.from_numpy, placed)
        return row_U, new_row, new_id

    def _ask(self, id_U: Tensor, place: Callable[[Ints], Placed]) -> Placed:
        """Returns what all owners of buckets answer: the rows of these ids, and all values that have got a row."""
        ids = id_U.numpy()
        known = np.flatnonzero(ids)
        owner = np.searchsorted(self.ends, self.map.layout.bucket(ids[known]), side="right")
        wanted = [known[owner == rank] for rank in range(self.ranks.world_size)]
        asked = all_to_all([torch.from_numpy(ids[at]) for at in wanted], self.ranks)
        named, place_S = np.unique(torch.cat(asked).numpy(), return_inverse=True)
        placed = place(named)
        rows = torch.from_numpy(placed.row[place_S]).split([len(of_rank) for of_rank in asked])
        new = torch.from_numpy(np.concatenate([placed.new_row, placed.new_id]))
        answers = all_to_all([torch.cat([of_rank, new]) for of_rank in rows], self.ranks)
        row_U, news = np.zeros_like(ids), []
        for at, answer in zip(wanted, answers, strict=True):
            row_U[at] = answer[: len(at)]
            news.append(answer[len(at) :].view(2, -1).numpy())
        return Placed(row_U, *np.concatenate(news, axis=1))

    def adopt(self, whole: RowMap) -> None:
        """Takes this rank's part of a map of all buckets."""
        for mine, all_of in ((self.map.rows, whole.rows), (self.map.candidates, whole.candidates)):
            for name in ("id", "last", "count") if mine else ():
                getattr(mine, name)[:] = getattr(all_of, name)[slice(*self.part)]

    def state(self) -> dict[str, Ints]:
        """Returns what training alone needs, by name, int64 [B, K] each, by reference."""
        rows, waiting = self.map.rows, self.map.candidates
        state = {"last": rows.last, "count": rows.count}
        if waiting:
            state |= {f"candidates/{name}": getattr(waiting, name) for name in ("id", "last", "count")}
        return state


def with_rows(batch: Batch, schema: Schema, rows: Mapping[str, Tensor]) -> Batch:
    """Returns the batch with rows in place of the ids of some tables: `rows` are those of its ids, by table: [U], or of
    bags [S]."""
    ids, values = dict(batch.ids), dict(batch.features.values)
    for table, row_U in rows.items():
        of_table = ids[table]
        if isinstance(of_table, Bags):
            ids[table] = of_table._replace(values=row_U)
            continue
        # Values without a row have one in common.
        ids[table], place_U = row_U.unique(return_inverse=True)
        for feature in schema.features:
            if feature.table == table:
                of = values[feature.name]
                values[feature.name] = replace(of, values=place_U[of.values])
    return replace(batch, ids=ids, features=replace(batch.features, values=values))


def unique_ids(of_table: Tensor | Bags) -> tuple[Tensor, Tensor | None]:
    """Returns the sorted unique ids [U] of a table that a batch names; and of bags, the place of each id [S] among
    them."""
    return of_table.values.unique(return_inverse=True) if isinstance(of_table, Bags) else (of_table, None)
