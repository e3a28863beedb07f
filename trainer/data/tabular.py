"""CSV with a header, or Parquet, in blocks of rows."""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress

from logitmix.trainer.data.files import InputFile, magic
from logitmix.trainer.data.raw import is_encodable
from logitmix.trainer.data.rejects import Rejects

BLOCK_ROWS = 1 << 16

Keys = Callable[[str, list[str]], list[str]]
"""From a file's name and header, the columns that a row cannot do without."""


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a file."""

    numbers: np.ndarray
    """Line (CSV) or row (Parquet) of each, from 1."""
    keys: list[pa.Array]
    """The columns that were asked for, in that order."""
    columns: dict[str, pa.Array]
    """All others that have a name of their own."""
    text: Callable[[int], str]
    """A row as text."""


def read_blocks(file: InputFile, keys: Keys, rejects: Rejects, progress: Progress) -> Iterator[TableBlock]:
    """All columns of a file. In CSV they are text; rows with another number of fields, and those whose keys are not
    UTF-8, are rejected. ValueError where it is no Parquet that can be read."""
    return (_read_parquet if magic(file.path) == b"PAR1" else _read_csv)(file, keys, rejects, progress)


def as_ids(label: str, name: str, column: pa.Array) -> pa.StringArray:
    """ValueError where a column cannot be ids."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"{label}: column {name} is of type {column.type}; ids must be integers or text")
    return column.cast(kind).cast(pa.string())


def _read_csv(file: InputFile, keys: Keys, rejects: Rejects, progress: Progress) -> Iterator[TableBlock]:
    rows: list[tuple[int, list[str]]] = []
    with file.open(progress) as stream:
        # surrogateescape keeps undecodable bytes apart, so that only their row is rejected.
        text = io.TextIOWrapper(io.BufferedReader(stream), "utf-8-sig", errors="surrogateescape", newline="")  # type: ignore[type-var]
        parsed = _csv_rows(csv.reader(text))
        _, _, header = next(parsed, (1, 1, []))
        key_places = [header.index(name) for name in keys(file.label, header)]
        for number, lines, row in parsed:
            rejects.lines += 1
            if len(row) != len(header):
                # A stray quote swallows lines up to the next one: they are all lost, and so all count.
                rejects.lines += lines - 1
                rejects.count += lines - 1
                rejects.add(file.label, number, f"has {len(row)} fields, not {len(header)}", ",".join(row))
            elif all(is_encodable(row[at]) for at in key_places):
                rows.append((number, row))
            else:
                rejects.add(file.label, number, "not UTF-8", ",".join(row))
            if len(rows) >= BLOCK_ROWS:
                yield _csv_block(rows, header, key_places)
                rows = []
    yield _csv_block(rows, header, key_places)


def _csv_rows(reader: Any) -> Iterator[tuple[int, int, list[str]]]:
    """First line, number of lines and fields of each row that is not blank; no fields where it is no CSV."""
    while True:
        before = reader.line_num
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield before + 1, reader.line_num - before, []
            continue
        if row:
            yield before + 1, reader.line_num - before, row


def _csv_block(rows: list[tuple[int, list[str]]], header: list[str], key_places: list[int]) -> TableBlock:
    def column(place: int) -> pa.StringArray:
        values = [row[place] for _, row in rows]
        try:
            return pa.array(values, pa.string())
        except UnicodeEncodeError:
            return pa.array([value if is_encodable(value) else None for value in values], pa.string())

    return TableBlock(
        np.array([number for number, _ in rows], np.int64),
        [column(place) for place in key_places],
        {name: column(place) for place, name in enumerate(header) if place not in key_places and _is_named(name)},
        lambda row: ",".join(rows[row][1]),
    )


def _read_parquet(file: InputFile, keys: Keys, rejects: Rejects, progress: Progress) -> Iterator[TableBlock]:
    try:
        with pq.ParquetFile(file.path) as table:
            key_names = keys(file.label, table.schema_arrow.names)
            task = progress.add_task(file.label, total=table.metadata.num_rows)
            first = 1
            for batch in table.iter_batches(batch_size=BLOCK_ROWS):
                rejects.lines += batch.num_rows
                yield _parquet_block(batch, first, key_names)
                first += batch.num_rows
                progress.update(task, completed=first - 1)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file.path}: no readable Parquet ({str(error).splitlines()[0]})") from None


def _parquet_block(batch: pa.RecordBatch, first: int, key_names: list[str]) -> TableBlock:
    keys = [batch.column(name) for name in key_names]
    return TableBlock(
        np.arange(first, first + batch.num_rows),
        keys,
        {name: batch.column(name) for name in batch.schema.names if name not in key_names and _is_named(name)},
        lambda row: ",".join(str(key[row]) for key in keys),
    )


def _is_named(column: str) -> bool:
    """False for pandas' row numbers: a blank name in CSV, __index_level_0__ in Parquet."""
    return bool(column.strip()) and not column.startswith("__")
