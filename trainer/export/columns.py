"""The items' columns that an export keeps for filters, of the dataset or of a table."""

from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Console
from rich.progress import Progress

from logitmix.common.mappings import nearest
from logitmix.serving.columns import ACTIONS, NEW, NONE, Column, Kind
from logitmix.serving.texts import Texts
from logitmix.trainer.data.arrow import as_numpy, is_number, is_text, is_time
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.description import UNITS
from logitmix.trainer.data.numbers import read_numbers
from logitmix.trainer.data.times import moments
from logitmix.trainer.prepare.joined import Joins
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.sources.table import read_side
from logitmix.trainer.prepare.tables import SideTable

FLAG = "--filterable"
WEEK = 7 * 86_400
"""In seconds: for so long an item counts as new."""
_EXACT = 2**53
"""FP64 represents all whole numbers below it exactly; columns with larger ones are text."""
_CODE = "^[+-]?0[0-9]"
"""How a text of digits begins that is no number, such as a postal code."""


def read_items(items: str, id_column: str, joins: Joins, said: Console | None = None) -> SideTable:
    """A table of items; ValueError if a row is malformed."""
    console = said or Console(stderr=True)
    if not Path(items).exists():
        raise ValueError(f"no file or folder at {items}; give a table (CSV, JSON lines or Parquet) with --items")
    with (
        TemporaryDirectory() as folder,
        closing(Rejects(Path(folder, "rejects.tsv"), 0.0, console)) as rejects,
        Progress(console=console, disable=True) as progress,
    ):
        table = read_side(items, "--items", id_column, rejects, progress, joins=joins)
        rejects.finish()
    return table


def dataset_columns(dataset: Dataset) -> dict[str, pa.Array]:
    """The dataset's features of items that have one value for each."""
    features = dataset.schema.of("item")
    return {of.name: dataset.single_values(of) for of in features if not (of.form.bag or of.form.wide)}


def filter_columns(
    names: Collection[str], dataset: Dataset, table: str, tell: Callable[[str], object]
) -> dict[str, Column]:
    """The columns of these names for the dataset's items: features of the dataset, columns of a table, or the number of
    actions, and whether an item is new. ValueError for other names, and for columns that cannot be compared."""
    there = dataset_columns(dataset)
    if table and not {*names} <= there.keys():
        ids, read = dataset.raw_id_column().cast(pa.string()).combine_chunks(), read_items(table, "item", {})
        if len(absent := ids.filter(pc.index_in(ids, value_set=read.ids).is_null())):
            of = f"{len(absent):,} of {len(ids):,} items of {dataset.path}"
            tell(f"{of} are not in {table}, such as {absent[0].as_py()!r}")
        there = read.of(ids) | there
    if ACTIONS in names and ACTIONS not in there:
        there[ACTIONS] = pa.array(np.bincount(dataset.items_flat[:], minlength=dataset.num_items))
    if NEW in names and NEW not in there and (unit := dataset.unit_of_times()):
        # Its first action is in the last week, or it has none.
        since = int(dataset.timestamps_flat.max()) - WEEK * UNITS[unit]
        there[NEW] = pa.array((dataset.first_times() > since).astype(np.int8))
    known = list(dict.fromkeys([*there, ACTIONS, *([NEW] if dataset.unit_of_times() else [])]))
    for name in names:
        if name not in there:
            place, all_known = table or dataset.path, ", ".join(known)
            if not table and name in dataset.item_features:
                raise ValueError(f"{FLAG}: {name} in {place} has several values for an item; there are: {all_known}")
            raise ValueError(f"{FLAG}: no column {name!r} in {place}{nearest(name, known)}; there are: {all_known}")
    return {name: column_of(name, there[name]) for name in names}


class AsNeeded(UserDict[str, Any]):
    """Arrow's columns, of which each becomes a Column when a condition names it."""

    def __getitem__(self, name: str) -> Column:
        return column_of(name, super().__getitem__(name))


def updated(
    columns: Mapping[str, Column],
    before_X: np.ndarray,
    table: Mapping[str, pa.Array],
    ids: Sequence[str],
    at: np.ndarray,
) -> dict[str, Column]:
    """An export's columns for other items: `before_X` has the place of each before, any other number for none. Those
    `at` these places have these ids and the values of the rows of a table, as far as it has the columns. ValueError
    that names the item for a value of another kind."""
    found = {}
    for name, column in columns.items():
        values = []
        for raw_id, given in zip(ids, _given(column, table[name]) if name in table else (), strict=False):
            try:
                values.append(column.value(given))
            except ValueError as error:
                raise ValueError(f"{name} of item {raw_id!r} {error}") from None
        found[name] = column.taken(before_X).changed(at[: len(values)].tolist(), values)
    return found


def _given(column: Column, values: pa.Array) -> list[Any]:
    """Values as Column.value takes them: texts, but numbers where people write them as such, 4,50 too."""
    texts = values.cast(pa.string())
    if column.kind != "number":
        return texts.to_pylist()
    distinct = texts.drop_null().unique()
    numbers = zip(distinct.to_pylist(), read_numbers(distinct, pa.float64()).values.to_pylist(), strict=True)
    number_of = {text: number for text, number in numbers if number is not None}
    return [number_of.get(text, text) for text in texts.to_pylist()]


def column_of(name: str, values: pa.Array) -> Column:
    """A column as an export holds it; a text that is blank is none. Text is read as numbers or dates where all of it
    is such. ValueError that names it if its values cannot be compared."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if is_text(kind) or pa.types.is_null(kind):
        return _of_texts(name, values.cast(pa.string()))
    if is_time(kind):
        seconds, nanoseconds = moments(values)
        return _numbers("time", pc.add(seconds.cast(pa.float64(), safe=False), pa.array(nanoseconds / 1e9)))
    if pa.types.is_boolean(kind):
        return _numbers("number", values.cast(pa.int8()))
    if pa.types.is_integer(kind) and not _exact(values.cast(pa.float64(), safe=False)):
        return _of_texts(name, values.cast(pa.string()))
    if pa.types.is_floating(kind) and pc.any(pc.is_inf(values)).as_py():
        raise ValueError(f"column {name}: one of its values is infinite")
    if is_number(kind) or pa.types.is_decimal(kind):
        # The FP32 number 4.1 is the FP64 number 4.1, too.
        return _numbers("number", values.cast(pa.string()) if kind == pa.float32() else values)
    raise ValueError(f"column {name}: values of type {kind} cannot be compared; give columns with one value an item")


def _of_texts(name: str, texts: pa.StringArray) -> Column:
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    distinct = texts.drop_null().unique()
    if len(distinct):
        numbers = read_numbers(distinct, pa.float64()).values
        coded = pc.any(pc.match_substring_regex(distinct, _CODE)).as_py()
        if not numbers.null_count and not coded and _exact(numbers):
            return _numbers("number", numbers.take(pc.index_in(texts, value_set=distinct)))
        try:
            seconds, nanoseconds = moments(distinct)
        except ValueError as error:
            raise ValueError(f"column {name}: {error}") from None
        if not seconds.null_count:
            times = pc.add(seconds.cast(pa.float64()), pa.array(nanoseconds / 1e9))
            return _numbers("time", times.take(pc.index_in(texts, value_set=distinct)))
    distinct = distinct.sort()
    places = pc.index_in(texts, value_set=distinct).fill_null(NONE) if len(distinct) else pa.array([NONE] * len(texts))
    found = torch.from_numpy(as_numpy(places).astype(np.int32))
    # Arrow sorts by bytes, as texts are found.
    return Column("text", found, replace(Texts.of(distinct.to_pylist()), order=torch.arange(len(distinct))))


def _exact(numbers: pa.Array) -> bool:
    """Whether FP64 can hold them, if they are whole numbers."""
    return (pc.max(pc.abs(numbers)).as_py() or 0.0) < _EXACT


def _numbers(kind: Kind, values: pa.Array) -> Column:
    numbers = as_numpy(values.cast(pa.float64(), safe=False).fill_null(np.nan))
    return Column(kind, torch.from_numpy(numbers.astype(np.float64)))
