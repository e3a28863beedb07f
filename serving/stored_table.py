"""Rows of a table stored in several files. On the CPU they are mapped from the files: what is not used is not in
memory.

Axes: T rows that are asked for, N of them in one part, V unique ids, W width of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from logitmix.modules.schema import Schema
from logitmix.modules.values import Values


class StoredTable:
    """A table in parts of consecutive rows, one for each file that has some."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """`parts`, at least one: each [any number of rows, W]."""
        self.parts = parts
        self.starts = torch.tensor([0, *map(len, parts)]).cumsum(0)

    def to(self, device: torch.device) -> "StoredTable":
        return StoredTable([part.to(device) for part in self.parts])

    def fetch(self, index_T: Tensor) -> Tensor:
        """Rows [T, W], on the parts' device, by indices (int64) in any order."""
        row_TW = self.parts[0].new_empty(len(index_T), *self.parts[0].shape[1:])
        return gather(index_T, self.starts, lambda number, index_N: self.parts[number].index_select(0, index_N), row_TW)


def gather(index_T: Tensor, starts: Tensor, read: Callable[[int, Tensor], Tensor], row_TW: Tensor) -> Tensor:
    """Fills `row_TW` with the rows of these indices. `starts`: where each part begins; `read` gives rows [N, W] of a
    part, by its number and the indices [N] within it."""
    if len(starts) == 2:
        return row_TW.copy_(read(0, index_T.to(row_TW.device)))
    index_T = index_T.cpu()
    part_T = torch.bucketize(index_T, starts, right=True) - 1
    for number in part_T.unique().tolist():
        at = (part_T == number).nonzero().flatten()
        row_TW[at.to(row_TW.device)] = read(number, (index_T[at] - starts[number]).to(row_TW.device))
    return row_TW


def fetch_rows(
    tables: Mapping[str, StoredTable], schema: Schema, values: Mapping[str, Values]
) -> tuple[dict[str, Tensor], dict[str, Values]]:
    """The towers' inputs for features that index whole tables: for each such table the rows [V, W] of the unique ids,
    and the features as indices into these rows."""
    rows, local = {}, dict(values)
    named: dict[str, list[str]] = {}
    for feature in schema.features:
        if feature.sparse and feature.name in values:
            named.setdefault(feature.table, []).append(feature.name)
    for table, names in named.items():
        ids = [values[name].values for name in names]
        id_V, place = torch.cat(ids).long().unique(return_inverse=True)
        rows[table] = tables[table].fetch(id_V)
        for name, index in zip(names, place.split([len(of) for of in ids]), strict=True):
            local[name] = replace(values[name], values=index)
    return rows, local
