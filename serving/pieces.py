"""Rows of a table stored in several files. On the CPU they are mapped from the files: what is not used is not in
memory.

Axes: T rows that are asked for, N of them in one piece, V unique ids, W width of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from logitmix.modules.features import Values
from logitmix.modules.schema import Schema


class Pieces:
    """A table in pieces of consecutive rows."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        """`pieces`, at least one: each [any number of rows, W]."""
        self.pieces = pieces
        self.starts = torch.tensor([0, *map(len, pieces)]).cumsum(0)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def fetch(self, index_T: Tensor) -> Tensor:
        """Rows [T, W], on the pieces' device, by indices (int64) in any order."""
        row_TW = self.pieces[0].new_empty(len(index_T), *self.pieces[0].shape[1:])
        return gather(index_T, self.starts, lambda number, index_N: self.pieces[number][index_N], row_TW)


def gather(index_T: Tensor, starts: Tensor, read: Callable[[int, Tensor], Tensor], row_TW: Tensor) -> Tensor:
    """Fills `row_TW` with the rows of these indices. `starts`: where each piece begins; `read` gives rows [N, W] of a
    piece, by its number and the indices [N] within it."""
    index_T = index_T.cpu()
    piece_T = torch.bucketize(index_T, starts, right=True) - 1
    for number in piece_T.unique().tolist():
        at = (piece_T == number).nonzero().flatten()
        row_TW[at.to(row_TW.device)] = read(number, (index_T[at] - starts[number]).to(row_TW.device))
    return row_TW


def fetch_rows(
    tables: Mapping[str, Pieces], schema: Schema, values: Mapping[str, Values]
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
