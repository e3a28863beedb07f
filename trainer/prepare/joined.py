"""Columns of a table that are read as one: a bag's ids, and the lists of numbers that are parallel to them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from logitmix.modules.kinds.base import Kind
from logitmix.modules.kinds.registry import kind_named
from logitmix.modules.schema import Feature, Owner
from logitmix.trainer.data.arrow import as_numpy, lengths, lists_of
from logitmix.trainer.prepare.features import VALUE, FeaturesOptions, as_floats, as_lists, ids_as_texts, valid_name
from logitmix.trainer.prepare.scan import Raw


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


def join(raw: Raw, owner: Owner, joins: Joins) -> Raw:
    """Returns the rows with one column of lists of structs in place of the columns of each joined feature. A struct has
    `value`, the id's text, and a number by the name of each further column. Rows whose lists differ in length, or with
    numbers that the kind does not allow, are malformed. ValueError for a further column that is not there."""
    for name, of in joins.items():
        own = next((each for each in raw.others if name in _names(each, owner)), None)
        if own is None:
            continue
        for role, column in of.columns.items():
            if column not in raw.others:
                there = ", ".join(raw.others)
                raise ValueError(f"{raw.label}: no column {column!r} with the {role} of {own}; there are: {there}")
        raw = raw.stored("apart")
        names = [own, *of.columns.values()]
        made = ", ".join(f"{raw.columns[each]} as c{place}" for place, each in enumerate(names))
        table = raw.duck.table(f"select rowid as row, {made} from apart where problem is null order by rowid")
        lists, reasons = _as_lists({each: table[f"c{place}"] for place, each in enumerate(names)}, own, of)
        right = np.setdiff1d(np.arange(len(table)), list(reasons))
        kept = {each: values.take(pa.array(right)) for each, values in lists.items()}
        raw.duck.put("structs", pa.table({"row": table["row"].take(pa.array(right)), "made": _structs(kept, own, of)}))
        wrong = {"row": table["row"].take(pa.array(list(reasons), pa.int64())), "why": [*reasons.values()]}
        raw.duck.put("wrong", pa.table(wrong, pa.schema({"row": pa.int64(), "why": pa.string()})))
        raw.duck.make(
            "joined",
            """select a.* replace (coalesce(problem, why) as problem), s.made from apart as a
            left join structs as s on a.rowid = s.row left join wrong as w on a.rowid = w.row""",
        )
        others = {each: column for each, column in raw.columns.items() if each not in names}
        raw = replace(raw, relation="joined", columns={**others, own: "made"})
    return raw


def _names(column: str, owner: Owner) -> tuple[str, str, str]:
    """Those that a feature of a column can have."""
    plain = valid_name(column)
    return column, plain, f"{owner}_{plain}"


def _as_lists(values: Mapping[str, Any], own: str, of: Join) -> tuple[dict[str, pa.Array], dict[int, str]]:
    """The columns of a feature as lists, of ids and of numbers; and why rows are malformed: lists that differ in
    length, or numbers that the kind does not allow."""
    columns = {own: as_lists(values[own].combine_chunks())}
    count_R, of_lengths, of_numbers = lengths(columns[own]), dict[int, str](), dict[int, str]()
    for name, column in of.columns.items():
        lists = as_lists(values[column].combine_chunks())
        size_R, flat = lengths(lists), lists.flatten()
        for row in np.flatnonzero(size_R != count_R).tolist():
            of_lengths[row] = f"{column} has {size_R[row]} values for {count_R[row]} of {own}"
        numbers = as_floats(flat)
        row_S = np.repeat(np.arange(len(size_R)), size_R)
        for place in np.flatnonzero(~of.kind.allows(name, numbers)).tolist():
            wrong = f"{column} has {flat[place].as_py()!r:.40}; it must be {of.kind.needs}"
            of_numbers[int(row_S[place])] = wrong
        columns[column] = lists_of(size_R, pa.array(numbers))
    reasons = dict(sorted(of_lengths.items()))
    for row, reason in sorted(of_numbers.items()):
        reasons.setdefault(row, reason)
    return columns, reasons


def _structs(lists: Mapping[str, pa.Array], own: str, of: Join) -> pa.ListArray:
    """Lists without missing ids."""
    ids, numbers = lists[own], {name: lists[column].flatten() for name, column in of.columns.items()}
    texts = ids_as_texts(ids.flatten())
    there = texts.is_valid()
    rows = np.repeat(np.arange(len(ids)), lengths(ids))[as_numpy(there)]
    fields = [texts.filter(there), *(each.filter(there) for each in numbers.values())]
    structs = pa.StructArray.from_arrays(fields, [VALUE, *of.columns])
    return lists_of(np.bincount(rows, minlength=len(ids)), structs)
