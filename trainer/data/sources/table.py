"""A table: CSV with a header, or Parquet, one file or a folder of parts, its columns named."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.download import find_source
from logitmix.trainer.data.files import InputFile, magic
from logitmix.trainer.data.raw import ActionBlock, RawDataset, RowBuffer, accept, gather
from logitmix.trainer.data.rejects import Rejects

BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class ColumnNames:
    """What the columns of the actions are called."""

    user: str = "user"
    item: str = "item"
    timestamp: str = "timestamp"
    """Empty: the order of the rows is the time."""

    @property
    def named(self) -> dict[str, str]:
        """The setting that names it -> the column's name."""
        columns = {"--user-column": self.user, "--item-column": self.item, "--timestamp-column": self.timestamp}
        return {flag: name for flag, name in columns.items() if name}


def read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = find_source(options, progress, reason="is a format, not one data set")
    files = _table_files(source)
    names = ColumnNames(options.user_column, options.item_column, options.timestamp_column)
    return RawDataset(gather(read_actions(files, names, rejects, progress)), source, files)


def read_actions(
    files: Iterable[InputFile], names: ColumnNames, rejects: Rejects, progress: Progress
) -> Iterator[ActionBlock]:
    """The actions of CSV or Parquet parts, in the given order. ValueError when a column is missing or unfit."""
    taken = 0
    for file in files:
        read = _read_parquet if magic(file.path) == b"PAR1" else _read_csv
        for block in read(file, names, rejects, progress):
            if not names.timestamp:
                order = np.arange(taken, taken + len(block.users))
                block = replace(block, timestamps=order)
            taken += len(block.users)
            yield block


def _table_files(source: Path) -> list[InputFile]:
    if not source.is_dir():
        return [InputFile(source)]
    names = sorted(path for path in source.iterdir() if path.name.endswith((".parquet", ".csv", ".csv.gz")))
    parts = [InputFile(path) for path in names if not path.name.startswith((".", "_"))]
    if not parts:
        raise ValueError(f"{source}: no .parquet, .csv or .csv.gz file in this folder; give a table with --source")
    return parts


def _read_csv(file: InputFile, names: ColumnNames, rejects: Rejects, progress: Progress) -> Iterator[ActionBlock]:
    rows = RowBuffer(file.label, rejects, timed=bool(names.timestamp))
    with file.open(progress) as stream:
        # surrogateescape keeps undecodable bytes apart, so that only their row is rejected.
        text = io.TextIOWrapper(io.BufferedReader(stream), "utf-8-sig", errors="surrogateescape", newline="")  # type: ignore[type-var]
        parsed = _csv_rows(csv.reader(text))
        _, _, header = next(parsed, (1, 1, []))
        positions = _positions(file.label, header, names)
        for number, spans, row in parsed:
            rejects.lines += 1
            if len(row) != len(header):
                # A stray quote swallows lines up to the next one: they are all lost, and so all count.
                rejects.lines += spans - 1
                rejects.count += spans - 1
                rejects.add(file.label, number, f"has {len(row)} fields, not {len(header)}", ",".join(row))
                continue
            user, item, *stamp = (row[at] for at in positions)
            rows.add(number, user, item, stamp[0] if stamp else "", ",".join(row))
            if len(rows) >= BLOCK_ROWS:
                yield rows.take()
    yield rows.take()


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


def _read_parquet(file: InputFile, names: ColumnNames, rejects: Rejects, progress: Progress) -> Iterator[ActionBlock]:
    try:
        with pq.ParquetFile(file.path) as table:
            present = table.schema_arrow.names
            wanted = [present[at] for at in _positions(file.label, present, names)]
            task = progress.add_task(file.label, total=table.metadata.num_rows)
            first = 1
            for batch in table.iter_batches(batch_size=BLOCK_ROWS, columns=wanted):
                yield _parquet_block(file.label, batch, wanted, first, rejects)
                first += batch.num_rows
                progress.update(task, completed=first - 1)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file.path}: no readable Parquet ({str(error).splitlines()[0]})") from None


def _parquet_block(label: str, batch: pa.RecordBatch, wanted: list[str], first: int, rejects: Rejects) -> ActionBlock:
    rejects.lines += batch.num_rows
    users, items = (_as_ids(label, name, batch.column(name)) for name in wanted[:2])
    stamps = _as_stamps(label, wanted[2], batch.column(wanted[2])) if len(wanted) == 3 else None
    numbers = np.arange(first, first + batch.num_rows)
    columns = [batch.column(name) for name in wanted]
    return accept(
        label, numbers, users, items, stamps, lambda row: ",".join(str(column[row]) for column in columns), rejects
    )


def _as_ids(label: str, name: str, column: pa.Array) -> pa.StringArray:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"{label}: column {name} is of type {column.type}; ids must be integers or text")
    return column.cast(kind).cast(pa.string())


def _as_stamps(label: str, name: str, column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32())
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return column.cast(pa.int64())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_string(kind)):
        raise ValueError(f"{label}: column {name} is of type {kind}; times must be numbers, dates or timestamps")
    return column


def _positions(label: str, header: list[str], names: ColumnNames) -> list[int]:
    for flag, name in names.named.items():
        if name not in header:
            order = '; for the order of the rows write --timestamp-column ""' if flag == "--timestamp-column" else ""
            raise ValueError(
                f"{label}: no column {name!r}; there are: {', '.join(header)}. Name the right one with {flag}{order}"
            )
    return [header.index(name) for name in names.named.values()]
