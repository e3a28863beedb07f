"""The output of a source: actions with users and items as codes, and tables of features of users and items.

There is no Python object per action: a source reads blocks of rows into Arrow arrays (`ActionBlock`), and `gather`
joins them as integers, and columns of text as dictionaries.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import as_numpy, codes_of, is_number, is_text
from logitmix.trainer.data.blocks import TableBlock
from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.times import Times, note_units

TIME = "a number between -2^62 and 2^62"


@dataclass(frozen=True)
class ActionBlock:
    """Actions in file order: arrays of one length."""

    users: pa.StringArray
    items: pa.StringArray
    timestamps: np.ndarray
    """int64"""
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    """Other columns of the actions."""
    nanoseconds: np.ndarray | None = None
    """int32: billionths of the timestamps' unit, which these leave out but which order the actions; None: all 0."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns by name; the others are inferred from the values."""
    label: str = ""
    """The file."""
    numbers: np.ndarray | None = None
    """The places of the actions in the file; None: unknown."""


@dataclass
class Actions:
    """All actions, in file order, and the raw ids by code."""

    users: np.ndarray
    """int32 codes."""
    items: np.ndarray
    """int32 codes."""
    timestamps: np.ndarray
    """int64."""
    user_ids: pa.StringArray
    item_ids: pa.StringArray
    columns: dict[str, pa.Array] = field(default_factory=dict)
    nanoseconds: np.ndarray | None = None
    """As in the blocks."""
    kinds: dict[str, str | None] = field(default_factory=dict)
    """As in the blocks; and None for columns that are not used unless --schema states a kind."""
    unit: str | None = None
    """Of the timestamps, one of UNITS; "" for numbers that are no times since 1970. None: told from them."""
    examples: dict[str, str] = field(default_factory=dict)
    """A timestamp and its place for each of UNITS in which some may be."""

    def counts(self) -> dict[str, int]:
        return {"users": len(self.user_ids), "items": len(self.item_ids), "actions": len(self.users)}


@dataclass(frozen=True)
class SideTable:
    """A source's table of users or of items, including those without actions."""

    ids: pa.StringArray = field(default_factory=lambda: pa.array([], pa.string()))
    """If an id occurs in several rows, the last one counts."""
    columns: dict[str, pa.Array] = field(default_factory=dict)
    kinds: dict[str, str | None] = field(default_factory=dict)
    """As of the actions."""

    def of(self, ids: pa.StringArray) -> dict[str, pa.Array]:
        """The columns with one value for each of `ids`, null if the table has none."""
        backwards = pc.index_in(ids, value_set=self.ids.take(pa.array(np.arange(len(self.ids))[::-1])))
        rows = pc.subtract(len(self.ids) - 1, backwards)
        return {name: column.take(rows) for name, column in self.columns.items()}

    def contradictions(self, name: str) -> str:
        """A line about the ids that occur in the table `name` with different values, "" if there are none."""
        codes = codes_of(self.ids)
        rows = np.flatnonzero(np.bincount(codes)[codes] > 1) if len(codes) else codes
        last = np.empty(len(codes), np.int64)
        # Of several assignments to one place, the last one counts.
        last[codes[rows]] = rows
        pairs = pa.array(np.concatenate([rows, last[codes[rows]]]))
        differ = {}
        for column, values in self.columns.items():
            one, other = np.split(codes_of(values.take(pairs)), 2)
            differ[column] = one != other
        wrong = rows[np.logical_or.reduce(list(differ.values()))] if differ else rows[:0]
        if not len(wrong):
            return ""
        column = next(column for column, differs in differ.items() if differs[np.searchsorted(rows, wrong[0])])
        count = len(np.unique(codes[wrong]))
        ids = "id occurs" if count == 1 else "ids occur"
        return (
            f"{count:,} {ids} in several rows of {name} with different values, such as {self.ids[wrong[0]]} with those "
            f"of {column}: the last row counts"
        )


@dataclass
class RawDataset:
    actions: Actions
    source: Path | None = None
    """What was read; None if it was generated."""
    files: list[InputFile] = field(default_factory=list)
    """The files in `source` that were read."""
    generator: dict[str, Any] | None = None
    """The entry of dataset.json if it was generated."""
    items: SideTable = field(default_factory=SideTable)
    """A column named title is text to show, not a feature."""
    users: SideTable = field(default_factory=SideTable)
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns of any owner."""


class IdCodes:
    """Numbers raw ids in the order of their first appearance."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def encode(self, ids: pa.StringArray) -> np.ndarray:
        encoded = ids.dictionary_encode()
        codes = self._codes
        table = [codes.setdefault(raw, len(codes)) for raw in encoded.dictionary.to_pylist()]
        return np.array(table, np.int32)[encoded.indices.to_numpy()]

    def ids(self) -> pa.StringArray:
        return pa.array(self._codes, pa.string())


class ColumnBuilder:
    """Columns that grow block by block. Text becomes dictionaries, so that a repeated value takes 4 bytes."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: dict[str, list[pa.Array]] = {}

    def append(self, columns: Mapping[str, pa.Array], rows: int) -> None:
        """Adds rows; a column that is missing here, or was missing before, has nulls there."""
        for name in columns:
            if name not in self._parts:
                self._parts[name] = [pa.nulls(self.rows)]
        for name, parts in self._parts.items():
            parts.append(_compact(columns[name]) if name in columns else pa.nulls(rows))
        self.rows += rows

    def join(self) -> dict[str, pa.Array]:
        """Joins the blocks. ValueError if their types cannot be one column, or if a column is more than Arrow holds."""
        joined = {}
        while self._parts:
            # Otherwise the parts would stay in memory with the whole until the last column is joined.
            name, parts = self._parts.popitem()
            try:
                joined[name] = _concatenate(name, parts)
            except pa.ArrowCapacityError:
                raise ValueError(f"column {name} has more than 2 GiB of different texts; leave it out") from None
        return dict(reversed(joined.items()))


def _compact(values: pa.Array) -> pa.Array:
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if is_text(kind):
        return values.cast(pa.string()).dictionary_encode()
    return values.cast(kind)


def _concatenate(name: str, parts: list[pa.Array]) -> pa.Array:
    types = {part.type for part in parts if not pa.types.is_null(part.type)}
    if len(types) > 1:
        # CSV and Parquet, or integers of two widths: numbers are recognized from the text again.
        if all(pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type) for kind in types):
            numbers = all(is_number(kind.value_type) for kind in types)
            return _concatenate(name, [part.cast(pa.list_(pa.float64() if numbers else pa.string())) for part in parts])
        if any(pa.types.is_nested(kind) for kind in types):
            raise ValueError(f"column {name} is of type {' here and '.join(sorted(map(str, types)))} there")
        parts = [part.cast(pa.string()).dictionary_encode() for part in parts]
        types = {parts[0].type}
    kind = types.pop() if types else pa.null()
    parts = [part if part.type == kind else pa.nulls(len(part), kind) for part in parts]
    return pa.chunked_array(parts, kind).combine_chunks()


def gather(blocks: Iterable[ActionBlock]) -> Actions:
    """Joins the blocks of a source."""
    user_codes, item_codes, columns = IdCodes(), IdCodes(), ColumnBuilder()
    kinds: dict[str, str | None] = {}
    users, items, timestamps, nanoseconds = (list[np.ndarray]() for _ in range(4))
    examples: dict[str, str] = {}
    for block in blocks:
        users.append(user_codes.encode(block.users))
        items.append(item_codes.encode(block.items))
        timestamps.append(block.timestamps)
        nanoseconds.append(np.zeros(len(block.users), np.int32) if block.nanoseconds is None else block.nanoseconds)
        columns.append(block.columns, len(block.users))
        kinds |= block.kinds
        if block.numbers is not None:
            note_units(examples, block.label, block.numbers, block.timestamps)
    return Actions(
        _join(users, "i4"),
        _join(items, "i4"),
        _join(timestamps, "i8"),
        user_codes.ids(),
        item_codes.ids(),
        columns.join(),
        _join(nanoseconds, "i4") if any(part.any() for part in nanoseconds) else None,
        kinds,
        examples=examples,
    )


def _join(parts: list[np.ndarray], kind: str) -> np.ndarray:
    joined = np.concatenate([np.empty(0, kind), *parts], dtype=kind)
    parts.clear()
    return joined


def accept(block: TableBlock, times: Times | None, rejects: Rejects, time: str = TIME) -> ActionBlock:
    """The rows with both ids, the first keys as text, and a time; the others are rejected. `time` says what a time must
    be. Without `times`, they are the rows' places in the file."""
    user, item = block.keys[:2]
    reasons = wrong_ids("item", block.columns[item]) | wrong_ids("user", block.columns[user])
    if times:
        for row in np.flatnonzero(~times.there).tolist():
            reasons.setdefault(row, f"the timestamp {str(times.written[row])[:40]!r} is not {time}")
    kept = block.reject(dict(sorted(reasons.items())), rejects)
    rejects.check_format(block.label)
    block = block.only(kept)
    return ActionBlock(
        block.columns[user],
        block.columns[item],
        (times.values[kept] if times else block.numbers).astype(np.int64),
        block.others,
        times.nanoseconds[kept] if times and times.nanoseconds is not None else None,
        block.kinds,
        block.label,
        block.numbers if times else None,
    )


def wrong_ids(owner: str, ids: pa.StringArray) -> dict[int, str]:
    """Why some are no ids, by row: they are missing, or have a NUL byte, which ends a text for other programs."""
    wrong = pc.fill_null(pc.or_(pc.equal(ids, ""), pc.match_substring(ids, "\0")), True)
    return {
        row: f"the {owner} {'has a NUL byte' if ids[row].as_py() else 'is empty'}"
        for row in np.flatnonzero(as_numpy(wrong)).tolist()
    }
