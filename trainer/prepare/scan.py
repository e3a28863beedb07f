"""Blocks of rows of a table, whatever file they come from: Parquet here, delimited text in text.py, JSON in jsonl.py.

Columns have one of a few types: text, whole numbers, floats, truth values, dates and times, or lists of these. What
Parquet has besides is brought into one of them, or is not read and said.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.progress import Progress

from logitmix.common.mappings import first_line
from logitmix.trainer.data.arrow import is_list, is_text, is_utf8, lengths, lists_of
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.rejects import Rejects

BLOCK_ROWS = 1 << 18
"""Of Parquet."""

Keys = Callable[[str, list[str]], list[str]]
"""From a file's name and header, the columns that every row must have. ValueError if one is missing."""


@dataclass(frozen=True)
class Block:
    """Some rows of a file."""

    label: str
    """The file."""
    numbers: np.ndarray
    """Line (text, JSON) or row (Parquet) of each, from 1."""
    keys: list[str]
    """Names of the requested columns."""
    columns: dict[str, pa.Array]
    """All columns that have a name or were requested."""
    text: Callable[[int], str | bytes]
    """A row as text."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns that the file itself states."""
    places: np.ndarray | None = None
    """The place of each row in the list that it comes from; None: rows are no parts of lists."""
    one_time: bool = False
    """Whether all rows of a list have its time: the places then order them, and tell an item that a list has twice from
    a row that is there twice."""

    @property
    def others(self) -> dict[str, pa.Array]:
        """The columns that were not requested."""
        return {name: column for name, column in self.columns.items() if name not in self.keys}

    def reject(self, reasons: Mapping[int, str], rejects: Rejects) -> np.ndarray:
        """Lists the rows that there are reasons to reject; returns bool [rows], which are the others."""
        kept = np.ones(len(self.numbers), bool)
        for row, reason in reasons.items():
            rejects.add(self.label, int(self.numbers[row]), reason, self.text(row))
            kept[row] = False
        return kept

    def only(self, kept: np.ndarray) -> "Block":
        """The rows where `kept` is true."""
        if kept.all():
            return self
        rows, mask = np.flatnonzero(kept), pa.array(kept)
        return replace(
            self,
            numbers=self.numbers[rows],
            columns={name: column.filter(mask) for name, column in self.columns.items()},
            text=lambda row: self.text(int(rows[row])),
            places=None if self.places is None else self.places[rows],
        )


def is_named(column: str) -> bool:
    """False for pandas' row numbers: a blank name in CSV, __index_level_0__ in Parquet."""
    return bool(column.strip()) and not column.startswith("__")


def check_names(label: str, header: Sequence[str], key_names: Sequence[str], rejects: Rejects) -> None:
    """ValueError if two columns have one name; says which columns are not read for want of one."""
    for place, name in enumerate(header):
        if (name in key_names or is_named(name)) and name in header[:place]:
            raise ValueError(f"{label}: has two columns named {name!r}; rename one")
    unnamed = [name.strip() or "one without a name" for name in header if not (name in key_names or is_named(name))]
    if unnamed:
        columns = ", ".join(dict.fromkeys(unnamed))
        rejects.say_once(f"columns that are not read, for their names are those of pandas' row numbers: {columns}")


def read_parquet(file: InputFile, keys: Keys, rejects: Rejects, progress: Progress) -> Iterator[Block]:
    """ValueError if the file is not readable Parquet."""
    try:
        with pq.ParquetFile(file.path) as table:
            names = [path for column in table.schema_arrow for path in _paths(column.name, column.type)]
            key_names = keys(file.label, names)
            check_names(file.label, names, key_names, rejects)
            task = progress.add_task(file.label, total=table.metadata.num_rows)
            first, uuids = 1, dict[str, bool]()
            for batch in table.iter_batches(batch_size=BLOCK_ROWS):
                rejects.lines += batch.num_rows
                yield _parquet_block(file.label, batch, first, key_names, rejects, uuids)
                first += batch.num_rows
                progress.update(task, completed=first - 1)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.path}: not readable Parquet ({first_line(error)})") from None


def _parquet_block(
    label: str, batch: pa.RecordBatch, first: int, key_names: list[str], rejects: Rejects, uuids: dict[str, bool]
) -> Block:
    """The rows whose keys are UTF-8, which no reader of Parquet checks; other text that is not UTF-8 is missing.
    `uuids`: which columns of 16 bytes were found to be UUIDs in the blocks before."""
    columns, whole = {}, np.ones(batch.num_rows, bool)
    for place, column in enumerate(batch.schema.names):
        for name, values in unnested(column, _common(batch.column(place)), key_names):
            if name not in key_names and not is_named(name):
                continue
            texts = _bytes_as_text(_uuids_as_text(name, values, uuids))
            columns[name], valid = _as_utf8(label, name, texts)
            if texts is not values and not valid.all() and name not in key_names:
                # These are no texts.
                columns[name] = values
                continue
            if name in key_names:
                whole &= valid
            else:
                rejects.undecodable(label, name, (first + np.flatnonzero(~valid)).tolist())
    numbers = np.arange(first, first + batch.num_rows)
    keys = [columns[name] for name in key_names]
    block = Block(label, numbers, key_names, columns, lambda row: ",".join(str(key[row]) for key in keys))
    return block.only(block.reject(dict.fromkeys(np.flatnonzero(~whole).tolist(), "not UTF-8"), rejects))


def _common(column: pa.Array) -> pa.Array:
    """Without half floats, decimals, views, dictionaries and lists of fixed size."""
    kind = _common_type(column.type)
    return column if kind == column.type else column.cast(kind)


def _common_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([of.with_type(_common_type(of.type)) for of in kind])
    if pa.types.is_map(kind):
        return pa.map_(_common_type(kind.key_type), _common_type(kind.item_type))
    if pa.types.is_dictionary(kind):
        return _common_type(kind.value_type)
    if is_list(kind):
        return pa.list_(_common_type(kind.value_type))
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if _is_binary(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _bytes_as_text(column: pa.Array) -> pa.Array:
    """Bytes as text that may not be UTF-8, as programs without a type for text store it."""
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column.view(pa.string()) if pa.types.is_binary(column.type) else column


def _uuids_as_text(name: str, column: pa.Array, uuids: dict[str, bool]) -> pa.Array:
    """Returns UUIDs as they are written; 16 bytes are one if not all of a column's first ones are UTF-8. Other columns
    are unchanged."""
    if column.type == pa.uuid():
        column, uuids[name] = column.storage, True
    if column.type != pa.binary(16):
        return column
    if name not in uuids and column.null_count < len(column):
        uuids[name] = not all(is_utf8(value) for value in column.drop_null().to_pylist())
    if not uuids.get(name):
        return column
    digits = pa.array([value and value.hex() for value in column.to_pylist()], pa.string())
    return pc.replace_substring_regex(digits, "^(.{8})(.{4})(.{4})(.{4})(.{12})$", r"\1-\2-\3-\4-\5")


def _as_utf8(label: str, name: str, column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The column with null where its text is not UTF-8, and where it is. ValueError for such text within lists."""
    try:
        column.validate(full=True)
        return column, np.ones(len(column), bool)
    except pa.ArrowInvalid as error:
        if not is_text(column.type):
            raise ValueError(f"{label}: column {name} is damaged ({first_line(error)})") from None
    valid = np.array([text is None or is_utf8(text) for text in column.cast(pa.binary()).to_pylist()])
    return pc.if_else(pa.array(valid), column, None), valid


def unnested(name: str, values: pa.Array, wanted: list[str]) -> Iterator[tuple[str, pa.Array]]:
    """A column under its name; instead of structs, their fields by path, and instead of lists of structs with a wanted
    path, one column of lists for each field."""
    kind = values.type
    if pa.types.is_struct(kind):
        for of, column in zip(kind, values.flatten(), strict=True):
            yield from unnested(f"{name}.{of.name}", column, wanted)
    elif _is_list_of_structs(kind) and any(path.startswith(f"{name}.") for path in wanted):
        for path, column in unnested(name, values.flatten(), wanted):
            yield path, lists_of(lengths(values), column, values.is_null())
    else:
        yield name, values


def _paths(name: str, kind: pa.DataType) -> Iterator[str]:
    """The names that `unnested` may give."""
    if pa.types.is_struct(kind):
        for of in kind:
            yield from _paths(f"{name}.{of.name}", of.type)
        return
    yield name
    if _is_list_of_structs(kind):
        yield from _paths(name, kind.value_type)


def _is_list_of_structs(kind: pa.DataType) -> bool:
    return is_list(kind) and pa.types.is_struct(kind.value_type)
