"""The output of a source: actions with users and items as codes, and tables of features of users and items.

There is no Python object per action: a source reads blocks of rows into Arrow arrays (`ActionBlock`), and `gather`
joins them as integers, and columns of text as codes, in the job's spool.
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
from logitmix.trainer.data.spool import HELD, PIECE, File, Kept, Pieces, TextCodes, current
from logitmix.trainer.data.times import Times, note_units

TIME = "a number between -2^62 and 2^62"
OWN = {
    "\0user": "the column of users",
    "\0item": "the column of items",
    "\0timestamp": "the column of times",
    "\0nanoseconds": "the column of times",
}
USER, ITEM, TIMESTAMP, NANOSECONDS = OWN
"""Names of these columns of the actions, which no source has for others."""


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
    """All actions, in file order, in columns with the same pieces; and the raw ids by code."""

    users: Pieces
    """int32 codes."""
    items: Pieces
    """int32 codes."""
    timestamps: Pieces
    """int64."""
    user_ids: pa.StringArray
    item_ids: pa.StringArray
    columns: dict[str, Pieces] = field(default_factory=dict)
    nanoseconds: Pieces | None = None
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
    first_column: str = ""
    """The column of the ids, where that was the first one for want of one of the name."""

    def of(self, ids: pa.StringArray) -> dict[str, pa.Array]:
        """The columns with one value for each of `ids`, null if the table has none."""
        backwards = pc.index_in(ids, value_set=self.ids.take(pa.array(np.arange(len(self.ids))[::-1])))
        rows = pc.subtract(len(self.ids) - 1, backwards)
        return {name: column.take(rows) for name, column in self.columns.items()}

    def remarks(self, name: str) -> list[str]:
        """Lines about the table `name`: which column the ids are, if that was not asked for, and `contradictions`."""
        chosen = f"{name}: the ids are the first column, {self.first_column}" if self.first_column else ""
        return [line for line in (chosen, self.contradictions(name)) if line]

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


class ColumnBuilder:
    """Columns that grow block by block. Text becomes codes, so that a repeated value takes 4 bytes."""

    def __init__(self) -> None:
        self.spool = current()
        self._file = File(self.spool)
        self._kinds: dict[str, dict[pa.DataType, str]] = {}
        """The types of each column so far, but that of missing values, each with the first file that has it."""
        self._rows_of: dict[str, int] = {}
        """By file."""
        self._files_of: dict[str, set[str]] = {}
        """By column."""
        self._codes: dict[str, TextCodes] = {}
        self._parts: dict[str, dict[int, tuple[Kept, bool]]] = {}
        """By the number of the piece, and whether it has codes; there is none where all values are missing."""
        self._lengths: list[int] = []
        """Of the pieces."""
        self._blocks: list[tuple[dict[str, pa.Array], int]] = []
        """Those that are in no piece yet."""
        self._rows = self._bytes = 0
        self._types: dict[str, pa.DataType] = {}
        """Of these."""

    def append(self, columns: Mapping[str, pa.Array], rows: int, file: str = "") -> None:
        """Adds rows of a file; a column that is missing here, or was missing before, has nulls there."""
        block = {}
        if file:
            self._rows_of[file] = self._rows_of.get(file, 0) + rows
        for name, values in columns.items():
            kinds, values = self._kinds.setdefault(name, {}), _compact(values)
            self._files_of.setdefault(name, set()).add(file)
            if not pa.types.is_null(values.type):
                kinds.setdefault(_kind(values), file)
                block[name] = values
        if not rows:
            return
        types = {name: _kind(values) for name, values in block.items()}
        if any(self._types.get(name, kind) != kind for name, kind in types.items()):
            self._flush()
        self._types |= types
        self._blocks.append((block, rows))
        self._rows += rows
        self._bytes += sum(values.nbytes for values in block.values())
        # To code texts takes time for all that are known.
        known = sum(codes.searched for codes in self._codes.values())
        if self._rows >= max(PIECE, known) or HELD * self._bytes > self.spool.budget:
            self._flush()

    def _flush(self) -> None:
        """Makes a piece of the blocks."""
        if not self._blocks:
            return
        lengths = [rows for _, rows in self._blocks]
        for name, kind in self._types.items():
            found = [block.pop(name, None) for block, _ in self._blocks]
            parts = [pa.nulls(rows, kind) if of is None else of for of, rows in zip(found, lengths, strict=True)]
            values, coded = _joined(parts), is_text(kind)
            if coded:
                values = self._codes_of(name).encode(values)
            self._parts.setdefault(name, {})[len(self._lengths)] = self.spool.keep(values, self._file), coded
        self._lengths.append(self._rows)
        self._blocks.clear()
        self._types.clear()
        self._rows = self._bytes = 0

    def _codes_of(self, name: str) -> TextCodes:
        if name not in self._codes:
            self._codes[name] = TextCodes(OWN.get(name, f"column {name}"), self.spool)
        return self._codes[name]

    def remarks(self) -> list[str]:
        """Lines about files without rows, and about columns that some of the others lack."""
        files = [file for file, rows in self._rows_of.items() if rows]
        empty = [file for file, rows in self._rows_of.items() if not rows]
        lines = []
        if empty and files:
            have = "has" if len(empty) == 1 else "have"
            lines = [f"{len(empty):,} of {len(self._rows_of):,} files {have} no rows, such as {empty[0]}"]
        lacking = {name: [file for file in files if file not in of] for name, of in self._files_of.items()}
        said = ", ".join(
            f"{name} (in {len(files) - len(of):,} of {len(files):,} files, and not in {of[0]})"
            for name, of in lacking.items()
            if 0 < len(of) < len(files) and name not in OWN
        )
        return [*lines, f"missing values where files lack a column: {said}"] if said else lines

    def join(self) -> dict[str, Pieces]:
        """All columns, in the same pieces. ValueError if the types of one cannot be one column, or if it is more than
        Arrow holds."""
        self._flush()
        return {name: self._join(name, kinds) for name, kinds in self._kinds.items()}

    def _join(self, name: str, kinds: Mapping[pa.DataType, str]) -> Pieces:
        if len(kinds) > 1:
            return self._in_one_type(name, kinds)
        kind, parts = next(iter(kinds), pa.null()), self._parts.get(name, {})
        texts = self._codes_of(name).texts if is_text(kind) else None
        pieces = Pieces(self._file, texts)
        for number, rows in enumerate(self._lengths):
            if number in parts:
                pieces.add(parts[number][0], rows)
            else:
                pieces.append(pa.nulls(rows, kind if texts is None else pa.int32()))
        return pieces

    def _in_one_type(self, name: str, kinds: Mapping[pa.DataType, str]) -> Pieces:
        """CSV and Parquet, or integers of two widths: numbers are recognized from the text again."""
        lists = all(pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type) for kind in kinds)
        if not lists and any(pa.types.is_nested(kind) for kind in kinds):
            types = " and ".join(f"{kind} in {file or 'some rows'}" for kind, file in kinds.items())
            raise ValueError(f"column {name} is of type {types}; write it in one type")
        numbers = lists and all(is_number(kind.value_type) for kind in kinds)
        common = pa.list_(pa.float64() if numbers else pa.string()) if lists else pa.string()
        before = self._codes.pop(name, None)
        codes, made = self._codes_of(name), Pieces(self._file)
        for number, rows in enumerate(self._lengths):
            kept, coded = self._parts.get(name, {}).get(number, (None, False))
            values = pa.nulls(rows) if kept is None else kept.load()
            if coded and before:
                values = before.texts.take(values)
            made.append(values.cast(common) if lists else codes.encode(values.cast(common)))
        if before:
            before.forget()
        made.texts = None if lists else codes.texts
        return made


def _compact(values: pa.Array) -> pa.Array:
    """Without a dictionary, but that of a text, which may be long and come often."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not is_text(kind):
        return values.cast(kind)
    texts = values.cast(pa.string())
    return texts.dictionary_encode() if pa.types.is_dictionary(values.type) else texts


def _kind(values: pa.Array) -> pa.DataType:
    return pa.string() if pa.types.is_dictionary(values.type) else values.type


def _joined(parts: list[pa.Array]) -> pa.Array:
    if any(pa.types.is_dictionary(of.type) for of in parts):
        parts = [of if pa.types.is_dictionary(of.type) else of.dictionary_encode() for of in parts]
        return pa.chunked_array(parts).combine_chunks()
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def gather(blocks: Iterable[ActionBlock], rejects: Rejects | None = None) -> Actions:
    """Joins the blocks of a source; `rejects` says what files lack."""
    columns = ColumnBuilder()
    kinds: dict[str, str | None] = {}
    examples: dict[str, str] = {}
    columns.append(dict.fromkeys(OWN, pa.nulls(0)) | {name: pa.array([], pa.string()) for name in (USER, ITEM)}, 0)
    for block in blocks:
        own = {USER: block.users, ITEM: block.items, TIMESTAMP: pa.array(block.timestamps, pa.int64())}
        if block.nanoseconds is not None and block.nanoseconds.any():
            own[NANOSECONDS] = pa.array(block.nanoseconds, pa.int32())
        columns.append(own | dict(block.columns), len(block.users), block.label)
        kinds |= block.kinds
        if block.numbers is not None:
            note_units(examples, block.label, block.numbers, block.timestamps)
    found = columns.join()
    if rejects:
        for line in columns.remarks():
            rejects.say(line)
    users, items, timestamps, nanoseconds = map(found.pop, (USER, ITEM, TIMESTAMP, NANOSECONDS))
    user_ids, item_ids = users.texts, items.texts
    is_fine = any(piece.null_count < len(piece) for piece in nanoseconds)
    fine = Pieces.of(piece.fill_null(0) for piece in nanoseconds) if is_fine else None
    return Actions(users, items, timestamps, user_ids, item_ids, found, fine, kinds, examples=examples)


def accept(block: TableBlock, times: Times | None, rejects: Rejects, time: str = TIME) -> ActionBlock:
    """The rows with both ids, the first keys as text, and a time; the others are rejected. `time` says what a time must
    be. Without `times`, they are the rows' places in the file."""
    user, item = block.keys[:2]
    reasons = wrong_ids("item", block.columns[item]) | wrong_ids("user", block.columns[user])
    if times:
        for row in np.flatnonzero(~times.there).tolist():
            written = times.written[row]
            said = f"{str(written)[:40]!r} is not {time}" if written.is_valid else "is missing"
            reasons.setdefault(row, f"the timestamp {said}")
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
