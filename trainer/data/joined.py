"""Columns of a table that are read as one: a bag's ids, and the lists of numbers that are parallel to them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from logitmix.modules.kinds.base import Kind
from logitmix.modules.kinds.registry import kind_named
from logitmix.modules.schema import Feature, Owner
from logitmix.trainer.data.blocks import TableBlock
from logitmix.trainer.data.features import VALUE, FeaturesOptions, as_floats, as_lists, ids_as_texts, valid_name
from logitmix.trainer.data.lists import lengths
from logitmix.trainer.data.raw import as_numpy
from logitmix.trainer.data.rejects import Rejects


class Join(NamedTuple):
    """A feature's further columns, by the kind's names."""

    kind: Kind
    columns: Mapping[str, str]


Joins = Mapping[str, Join]
"""By the feature's name."""
NOTHING_JOINED: Joins = MappingProxyType({})


def joins_of(said: FeaturesOptions | Iterable[Feature]) -> Joins:
    """Those that --schema states, or those of a dataset's features."""
    found = said.features.items() if isinstance(said, FeaturesOptions) else [(of.name, of) for of in said]
    return {name: Join(kind_named(of.kind), of.columns) for name, of in found if of.columns}


def join(label: str, block: TableBlock, owner: Owner, joins: Joins, rejects: Rejects) -> TableBlock:
    """The block with one column of lists of structs in place of the columns of each feature: `value`, the id's text,
    and a number by the name of each further column. Rows whose lists differ in length, or with numbers that the kind
    does not allow, are rejected. ValueError for a further column that is not there."""
    for name, of in joins.items():
        own = next((each for each in block.columns if name in _names(each, owner)), None)
        if own is None:
            continue
        for role, column in of.columns.items():
            if column not in block.columns:
                there = ", ".join(block.columns)
                raise ValueError(f"{label}: no column {column!r} with the {role} of {own}; there are: {there}")
        block = _of_one_length(label, block, own, of, rejects)
        block = _allowed(label, block, own, of, rejects)
        used = {own, *of.columns.values()}
        others = {name: column for name, column in block.columns.items() if name not in used}
        block = replace(block, columns={**others, own: _structs(block, own, of)})
    return block


def _names(column: str, owner: Owner) -> tuple[str, str, str]:
    """Those that a feature of a column can have."""
    plain = valid_name(column)
    return column, plain, f"{owner}_{plain}"


def _of_one_length(label: str, block: TableBlock, own: str, of: Join, rejects: Rejects) -> TableBlock:
    """The rows whose lists are of one length; all columns are lists."""
    lists = {column: as_lists(block.columns[column]) for column in (own, *of.columns.values())}
    count_R, reasons = lengths(lists[own]), dict[int, str]()
    for column in of.columns.values():
        others_R = lengths(lists[column])
        for row in np.flatnonzero(others_R != count_R):
            reasons[int(row)] = f"{column} has {others_R[row]} values for {count_R[row]} of {own}"
    return _without(label, replace(block, columns={**block.columns, **lists}), reasons, rejects)


def _allowed(label: str, block: TableBlock, own: str, of: Join, rejects: Rejects) -> TableBlock:
    """The rows with numbers that the kind allows; the columns of these are numbers."""
    row_S, reasons, columns = (
        np.repeat(np.arange(len(block.numbers)), lengths(block.columns[own])),
        dict[int, str](),
        {},
    )
    for name, column in of.columns.items():
        lists = block.columns[column]
        flat = lists.flatten()
        numbers = as_floats(flat)
        for place in np.flatnonzero(~of.kind.allows(name, numbers)):
            reasons[int(row_S[place])] = f"{column} has {flat[int(place)].as_py()!r:.40}; it must be {of.kind.needs}"
        offsets = np.concatenate([[0], np.cumsum(lengths(lists))])
        columns[column] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(numbers))
    return _without(label, replace(block, columns={**block.columns, **columns}), reasons, rejects)


def _without(label: str, block: TableBlock, reasons: Mapping[int, str], rejects: Rejects) -> TableBlock:
    """The block without the rows that are rejected for these reasons."""
    for row, reason in sorted(reasons.items()):
        rejects.add(label, int(block.numbers[row]), reason, block.text(row))
    return block.only(~np.isin(np.arange(len(block.numbers)), list(reasons))) if reasons else block


def _structs(block: TableBlock, own: str, of: Join) -> pa.ListArray:
    """Lists without missing ids."""
    ids, numbers = block.columns[own], {name: block.columns[column].flatten() for name, column in of.columns.items()}
    texts = ids_as_texts(ids.flatten())
    there = texts.is_valid()
    rows = np.repeat(np.arange(len(ids)), lengths(ids))[as_numpy(there)]
    ends = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(ids)))])
    fields = [texts.filter(there), *(each.filter(there) for each in numbers.values())]
    return pa.ListArray.from_arrays(
        pa.array(ends, pa.int32()), pa.StructArray.from_arrays(fields, [VALUE, *of.columns])
    )
