"""Readers of the source formats: the actions of a file as `Chunk`s, and what makes no sense to `Rejects`.

- MovieLens-1M `ratings.dat` (`user::item::rating::timestamp`), MovieLens-100k `u.data` (the same, tab-separated),
  ml-20m and ml-latest `ratings.csv`.
- Amazon (2014) ratings, `user,item,rating,timestamp` without a header, and reviews, one JSON object a line with
  reviewerID, asin and unixReviewTime. The 2018 ratings put the item first; they are recognised and refused. The 2023
  files have a header: read them as `table`.
- `user item` lines in the order of time, of several users interleaved or not; the line number is the timestamp.
- A table: CSV with a header, or Parquet, one file or a folder of parts, its columns named.

An action is an action: ratings are not looked at. A timestamp is a whole number in the unit of the source (`12.0` is
whole). Lines end in LF or CRLF; blank lines are skipped. Only one block of a file is in memory at a time.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.progress import Progress

from logitmix.trainer.data.files import InputFile, magic
from logitmix.trainer.data.rejects import Rejects

BLOCK_BYTES = 4 << 20
BLOCK_ROWS = 1 << 16
LONGEST_LINE = 64 << 20

_WHOLE = r"^-?[0-9]{1,18}(\.0*)?$"
_AMAZON_ITEM = re.compile(r"B0[0-9A-Z]{8}|[0-9]{9}[0-9X]")
_AMAZON_USER = re.compile(r"A[0-9A-Z]{9,}")


@dataclass(frozen=True)
class Chunk:
    """Actions in file order: three arrays of one length."""

    users: pa.StringArray
    items: pa.StringArray
    timestamps: np.ndarray
    """int64"""


@dataclass(frozen=True)
class Layout:
    """A text format of one action a line."""

    delimiter: str
    """Empty: any run of white space."""
    fields: int
    user: int = 0
    item: int = 1
    timestamp: int | None = None
    """Field with the time; None takes the line number."""
    header: str = ""
    """First line that has to be there."""


RATINGS_DAT = Layout("::", fields=4, timestamp=3)
U_DATA = Layout("\t", fields=4, timestamp=3)
RATINGS_CSV = Layout(",", fields=4, timestamp=3, header="userId,movieId,rating,timestamp")
AMAZON_RATINGS = Layout(",", fields=4, timestamp=3)
SEQUENCES = Layout("", fields=2)


@dataclass(frozen=True)
class Columns:
    """Column names of a table."""

    user: str = "user"
    item: str = "item"
    timestamp: str = "timestamp"
    """Empty: the order of the rows is the time."""

    @property
    def named(self) -> dict[str, str]:
        """The setting that names it -> the column's name."""
        columns = {"--user-column": self.user, "--item-column": self.item, "--timestamp-column": self.timestamp}
        return {flag: name for flag, name in columns.items() if name}


def read_delimited(file: InputFile, layout: Layout, rejects: Rejects, progress: Progress) -> Iterator[Chunk]:
    """The actions of a text file. ValueError when a header is missing or the file is no text."""
    for first, raw in _line_blocks(file, progress):
        numbers = np.arange(first, first + len(raw))
        lines, numbers = _decode(file.label, raw, numbers, rejects)
        lines = pc.utf8_rtrim(lines, characters="\r\n")
        if first == 1 and layout.header:
            _check_header(file.label, lines, layout.header)
            lines, numbers = lines[1:], numbers[1:]
        yield _split_lines(file.label, lines, numbers, layout, rejects)


def read_amazon(file: InputFile, rejects: Rejects, progress: Progress) -> Iterator[Chunk]:
    """Ratings or reviews, whichever the file starts like. ValueError for the item-first ratings of 2018."""
    with file.open(progress) as stream:
        start = stream.readline(LONGEST_LINE)
    if start.lstrip().startswith(b"{"):
        return _read_reviews(file, rejects, progress)
    fields = start.decode("utf-8", "replace").split(",")
    if len(fields) == 4 and _AMAZON_ITEM.fullmatch(fields[0]) and _AMAZON_USER.fullmatch(fields[1]):
        raise ValueError(
            f"{file.label}: its lines are item,user,rating,timestamp (the 2018 files); "
            "give it a header and prepare it as a table"
        )
    return read_delimited(file, AMAZON_RATINGS, rejects, progress)


def read_table(files: Iterable[InputFile], columns: Columns, rejects: Rejects, progress: Progress) -> Iterator[Chunk]:
    """The actions of CSV or Parquet parts, in the given order. ValueError when a column is missing or unfit."""
    taken = 0
    for file in files:
        read = _read_parquet if magic(file.path) == b"PAR1" else _read_csv
        for chunk in read(file, columns, rejects, progress):
            if not columns.timestamp:
                order = np.arange(taken, taken + len(chunk.users))
                chunk = replace(chunk, timestamps=order)
            taken += len(chunk.users)
            yield chunk


def read_rows(
    file: InputFile,
    delimiter: str,
    fields: int,
    encoding: str,
    rejects: Rejects,
    progress: Progress,
    header: bool = False,
) -> Iterator[list[str]]:
    """The rows of a small side file (titles, users), which may quote as CSV does where the delimiter is a comma."""
    with file.open(progress) as stream:
        for number, raw in enumerate(stream, start=1):
            line = raw.rstrip(b"\r\n")
            if not line or (header and number == 1):
                continue
            rejects.lines += 1
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError as error:
                rejects.add(file.label, number, f"not {encoding} ({error.reason})", line)
                continue
            row = next(csv.reader([text])) if delimiter == "," else text.split(delimiter)
            if len(row) == fields:
                yield row
            else:
                rejects.add(file.label, number, f"has {len(row)} fields, not {fields}", text)


def _line_blocks(file: InputFile, progress: Progress) -> Iterator[tuple[int, pa.BinaryArray]]:
    """Lines with their ends, many at a time without a Python object each, and the number of the first (from 1)."""
    first, carry = 1, b""
    with file.open(progress) as stream:
        while block := stream.read(BLOCK_BYTES):
            block = carry + block
            end = block.rfind(b"\n") + 1
            block, carry = block[:end], block[end:]
            if len(carry) > LONGEST_LINE:
                raise ValueError(f"{file.label}: a line is longer than {LONGEST_LINE >> 20} MiB; is this a text file?")
            if block:
                lines = _slice_lines(block)
                yield first, lines
                first += len(lines)
    if carry:
        yield first, _slice_lines(carry + b"\n")


def _slice_lines(block: bytes) -> pa.BinaryArray:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(block)])


def _decode(
    label: str, raw: pa.BinaryArray, numbers: np.ndarray, rejects: Rejects
) -> tuple[pa.StringArray, np.ndarray]:
    try:
        return raw.cast(pa.string()), numbers
    except pa.ArrowInvalid:
        valid = np.array([_is_utf8(line) for line in raw.to_pylist()])
    rejects.lines += int(np.sum(~valid))
    for row in np.flatnonzero(~valid):
        rejects.add(label, int(numbers[row]), "not UTF-8", raw[row].as_py())
    return raw.filter(pa.array(valid)).cast(pa.string()), numbers[valid]


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_header(label: str, lines: pa.StringArray, header: str) -> None:
    found = lines[0].as_py().lstrip("\ufeff") if len(lines) else ""
    if found != header:
        raise ValueError(f"{label}: starts with {found[:80]!r}, not with the header {header}")


def _split_lines(label: str, lines: pa.StringArray, numbers: np.ndarray, layout: Layout, rejects: Rejects) -> Chunk:
    filled = _as_numpy(pc.not_equal(pc.utf8_trim_whitespace(lines), ""))
    lines, numbers = lines.filter(pa.array(filled)), numbers[filled]
    rejects.lines += len(lines)
    if layout.delimiter:
        split = pc.split_pattern(lines, layout.delimiter)
    else:
        split = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(lines))
    widths = _as_numpy(pc.list_value_length(split))
    whole = widths == layout.fields
    for row in np.flatnonzero(~whole):
        reason = f"has {widths[row]} fields, not {layout.fields}"
        rejects.add(label, int(numbers[row]), reason, lines[row].as_py())
    kept = pa.array(whole)
    lines, numbers, flat = lines.filter(kept), numbers[whole], split.filter(kept).flatten()

    def column(position: int) -> pa.StringArray:
        return flat.take(pa.array(np.arange(position, len(flat), layout.fields)))

    stamps = None if layout.timestamp is None else column(layout.timestamp)
    return _accept(
        label, numbers, column(layout.user), column(layout.item), stamps, lambda row: lines[row].as_py(), rejects
    )


def _accept(
    label: str,
    numbers: np.ndarray,
    users: pa.StringArray,
    items: pa.StringArray,
    stamps: pa.Array | None,
    text: Callable[[int], str | bytes],
    rejects: Rejects,
) -> Chunk:
    """The rows with both ids and a whole number as time; `numbers` are the times where `stamps` is None."""
    user_ok, item_ok = _filled(users), _filled(items)
    times, time_ok = (numbers, np.ones(len(numbers), bool)) if stamps is None else _whole_numbers(stamps)
    accepted = user_ok & item_ok & time_ok
    for row in np.flatnonzero(~accepted):
        if not user_ok[row]:
            reason = "the user is empty"
        elif not item_ok[row]:
            reason = "the item is empty"
        else:
            assert stamps is not None
            reason = f"the timestamp {str(stamps[row].as_py())[:40]!r} is not a whole number"
        rejects.add(label, int(numbers[row]), reason, text(int(row)))
    rejects.check_format(label)
    mask = pa.array(accepted)
    return Chunk(users.filter(mask), items.filter(mask), times[accepted].astype(np.int64))


def _filled(ids: pa.StringArray) -> np.ndarray:
    return _as_numpy(pc.fill_null(pc.not_equal(ids, ""), False))


def _whole_numbers(stamps: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """int64 values, and which of them are what the source says."""
    kind = stamps.type
    if pa.types.is_floating(kind):
        values = stamps.to_numpy(zero_copy_only=False)
        with np.errstate(invalid="ignore"):
            ok = (values == np.floor(values)) & (np.abs(values) < 2.0**63)
        return np.where(ok, values, 0).astype(np.int64), ok
    if pa.types.is_string(kind):
        ok = _as_numpy(pc.fill_null(pc.match_substring_regex(stamps, _WHOLE), False))
        digits = pc.replace_substring_regex(stamps, r"\..*$", "")
    else:
        ok, digits = _as_numpy(stamps.is_valid()), stamps
    return pc.if_else(pa.array(ok), digits, None).cast(pa.int64()).fill_null(0).to_numpy(), ok


def _as_numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


class _Rows:
    """Gathers rows that Python parsed one by one, and hands them on in chunks."""

    def __init__(self, label: str, rejects: Rejects, timed: bool) -> None:
        self.label, self.rejects, self.timed = label, rejects, timed
        self._clear()

    def _clear(self) -> None:
        self.rows: list[tuple[int, str, str, str, str | bytes]] = []

    def add(self, number: int, user: str, item: str, stamp: str, text: str | bytes) -> None:
        if _encodable(user) and _encodable(item):
            self.rows.append((number, user, item, stamp, text))
        else:
            self.rejects.add(self.label, number, "not UTF-8", text)

    def full(self) -> bool:
        return len(self.rows) >= BLOCK_ROWS

    def take(self) -> Chunk:
        rows = self.rows
        self._clear()
        users, items = (pa.array([row[at] for row in rows], pa.string()) for at in (1, 2))
        stamps = None
        if self.timed:
            stamps = pa.array([row[3] if row[3].isascii() else "" for row in rows], pa.string())
        numbers = np.array([row[0] for row in rows], np.int64)
        return _accept(self.label, numbers, users, items, stamps, lambda row: rows[row][4], self.rejects)


def _encodable(text: str) -> bool:
    """False for the stand-ins of undecodable bytes, and for lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_reviews(file: InputFile, rejects: Rejects, progress: Progress) -> Iterator[Chunk]:
    rows = _Rows(file.label, rejects, timed=True)
    for first, lines in _line_blocks(file, progress):
        for number, line in enumerate(lines.to_pylist(), start=first):
            if line.isspace():
                continue
            rejects.lines += 1
            try:
                rows.add(number, *_review(json.loads(line.decode())), line)
            except RecursionError:
                rejects.add(file.label, number, "JSON nested too deeply", line)
            except ValueError as error:
                reason = str(error) if type(error) is ValueError else "not JSON in UTF-8"
                rejects.add(file.label, number, reason, line)
        yield rows.take()


def _review(record: Any) -> tuple[str, str, str]:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    values = []
    for key, kind in (("reviewerID", str), ("asin", str), ("unixReviewTime", int)):
        if type(record.get(key)) is not kind:
            raise ValueError(f"no {key} that is {'text' if kind is str else 'a whole number'}")
        values.append(str(record[key]))
    return values[0], values[1], values[2]


def _read_csv(file: InputFile, columns: Columns, rejects: Rejects, progress: Progress) -> Iterator[Chunk]:
    rows = _Rows(file.label, rejects, timed=bool(columns.timestamp))
    with file.open(progress) as stream:
        # surrogateescape keeps undecodable bytes apart, so that only their row is rejected.
        text = io.TextIOWrapper(io.BufferedReader(stream), "utf-8-sig", errors="surrogateescape", newline="")  # type: ignore[type-var]
        parsed = _csv_rows(csv.reader(text))
        _, _, header = next(parsed, (1, 1, []))
        positions = _positions(file.label, header, columns)
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
            if rows.full():
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


def _read_parquet(file: InputFile, columns: Columns, rejects: Rejects, progress: Progress) -> Iterator[Chunk]:
    try:
        with pq.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            wanted = [names[at] for at in _positions(file.label, names, columns)]
            task = progress.add_task(file.label, total=table.metadata.num_rows)
            first = 1
            for batch in table.iter_batches(batch_size=BLOCK_ROWS, columns=wanted):
                yield _parquet_chunk(file.label, batch, wanted, first, rejects)
                first += batch.num_rows
                progress.update(task, completed=first - 1)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file.path}: no readable Parquet ({str(error).splitlines()[0]})") from None


def _parquet_chunk(label: str, batch: pa.RecordBatch, wanted: list[str], first: int, rejects: Rejects) -> Chunk:
    rejects.lines += batch.num_rows
    users, items = (_as_ids(label, name, batch.column(name)) for name in wanted[:2])
    stamps = _as_stamps(label, wanted[2], batch.column(wanted[2])) if len(wanted) == 3 else None
    numbers = np.arange(first, first + batch.num_rows)
    columns = [batch.column(name) for name in wanted]
    return _accept(
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


def _positions(label: str, header: list[str], columns: Columns) -> list[int]:
    for flag, name in columns.named.items():
        if name not in header:
            order = '; for the order of the rows write --timestamp-column ""' if flag == "--timestamp-column" else ""
            raise ValueError(
                f"{label}: no column {name!r}; there are: {', '.join(header)}. Name the right one with {flag}{order}"
            )
    return [header.index(name) for name in columns.named.values()]
