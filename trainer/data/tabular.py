"""CSV with a header, JSON lines (jsonl.py) or Parquet, in blocks of rows.

CSV is defined by Python's csv module, strict about quotes and the length of fields. Arrow reads most of it many times
faster; blocks that it might read differently (quotes in the middle of a field, lone carriage returns, bytes that are
not UTF-8) go to the csv module, line by line. A quoted field that swallows rows (quotes.py) ends with its line. Between
tabs, quotes are text.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from rich.progress import Progress

from logitmix.common.mappings import counted, first_line
from logitmix.trainer.data.arrow import as_numbers, as_numpy, is_encodable, is_text, is_utf8
from logitmix.trainer.data.blocks import Keys, TableBlock
from logitmix.trainer.data.delimited import require_short
from logitmix.trainer.data.files import InputFile, is_zip, magic
from logitmix.trainer.data.jsonl import is_json, read_json
from logitmix.trainer.data.lists import paths, unnested
from logitmix.trainer.data.quotes import swallows_rows
from logitmix.trainer.data.rejects import Rejects

BLOCK_ROWS = 1 << 16
"""Of Parquet."""
BLOCK_BYTES = 1 << 20
"""Of CSV."""
DELIMITERS = ",;\t|"
KINDS_OF_TYPES: Mapping[str, str] = {"token": "id", "float": "number", "token_seq": "ids"}
"""Of the types in a header. A list of floats is a vector only where all are of one length."""
_QUOTED = re.compile(r'".*"')
_DELIMITER_LINE = re.compile(rb'"?sep=(.)"?\r?\n', re.IGNORECASE)
"""The first line by which Excel is told the delimiter."""
_ESCAPED_QUOTE = re.compile(rb'(?<!\\)((?:\\\\)*)\\"')
_ATOMIC = re.compile(r"(.+):(token|token_seq|float|float_seq)")


@dataclass(frozen=True)
class CsvOptions:
    """What CSV files do not tell themselves."""

    delimiter: str = ""
    """Empty: whichever of DELIMITERS gives the required columns or else the most."""
    columns: Sequence[str] = ()
    """Names for files without a header, "_" for a column that is not read."""
    quote: bool = False
    """Fields between tabs may be in quotes, as in other CSV."""
    encoding: str = ""
    """Of CSV and JSON; empty: UTF-8."""


CSV = CsvOptions()


def read_blocks(
    file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, csv: CsvOptions = CSV
) -> Iterator[TableBlock]:
    """All columns of a file. CSV columns are text. Where a header states types, as name:token_seq, sequences are lists,
    and the blocks have the kinds. CSV rows with another number of fields, or whose keys are not UTF-8, are rejected. Of
    Parquet, half floats come as float32, small decimals as decimal128, and views as text or bytes.

    ValueError if the file is JSON but not of one object a line, or not readable Parquet."""
    file = replace(file, encoding=csv.encoding)
    parted = _Partition(file, keys)
    for block in _read_file(file, parted.keys_within, rejects, progress, csv):
        yield parted.add_to(block)


def _read_file(
    file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, csv: CsvOptions
) -> Iterator[TableBlock]:
    parquet = magic(file.path) == b"PAR1"
    if csv.columns and (parquet or is_json(file)):
        raise ValueError(f"{file.label}: names its columns itself; --columns is for CSV without a header")
    if parquet:
        yield from _read_parquet(file, keys, rejects, progress)
    elif is_zip(file.path):
        raise ValueError(f"{file.path}: is a zip; unpack it and give the table in it (or write that of Excel as CSV)")
    elif is_json(file):
        yield from read_json(file, keys, rejects, progress)
    else:
        with file.open(progress) as stream:
            yield from _CsvReader(stream, file.label, keys, rejects, csv).blocks()


class _Partition:
    """The columns that a file has by its place in subfolders KEY=VALUE. The file's own column of such a name counts
    before them."""

    def __init__(self, file: InputFile, keys: Keys) -> None:
        self.values, self.keys = file.partition, keys
        self.wanted: list[str] = []
        """The names of all keys."""
        self.own: set[str] = set()
        """Columns within the file."""

    def keys_within(self, label: str, header: list[str]) -> list[str]:
        """The keys that are columns of the file itself."""
        self.own = set(header)
        self.wanted = self.keys(label, [*header, *(name for name in self.values if name not in self.own)])
        return [name for name in self.wanted if name in self.own]

    def add_to(self, block: TableBlock) -> TableBlock:
        added = {
            name: pa.repeat(pa.scalar(value, pa.string()), len(block.numbers))
            for name, value in self.values.items()
            if name not in self.own
        }
        return replace(block, keys=self.wanted, columns=block.columns | added)


class _CsvReader:
    """Reads a CSV text block by block. A block starts where a row starts, and ends where a line ends."""

    def __init__(self, stream: BinaryIO, label: str, keys: Keys, rejects: Rejects, options: CsvOptions) -> None:
        self.stream, self.label, self.rejects = stream, label, rejects
        self.carry = b""
        """Bytes already read that belong to the next block."""
        self.line = 1
        """Number of the next line."""
        self.types: dict[str, str] = {}
        """By the columns' names, those that the header states."""
        self.quoted, self.first_quoted = 0, 0
        """Fields whose quotes are text, and the line of the first."""
        self.escapes = False
        """Whether quotes within fields are escaped by backslashes, which becomes "" where a block is read."""
        self.header: list[str] = []
        block, columns = self.next(), options.columns
        if excel := _DELIMITER_LINE.match(block):
            options = replace(options, delimiter=options.delimiter or excel[1].decode())
            block, self.line = block[excel.end() :], 2
        dialects = [_Dialect(one, options.quote or one != "\t") for one in options.delimiter or DELIMITERS]
        if columns:
            first = {one: _header(_Lines(block), one) for one in dialects}
            self.dialect = max(first, key=lambda one: len(first[one]) == len(columns))
            _check_unnamed(label, first[self.dialect], columns)
            self.header = ["" if name == "_" else name for name in columns]
            self.carry = block + self.carry
        else:
            self.dialect = _sniff(block, label, keys, dialects)
            lines = _Lines(block)
            row = next(_rows(lines, self.dialect), None)
            if row and row.error:
                raise ValueError(f"{label}: its header is {row.error}; is it a table of text?")
            self.header, self.types = _typed(row.fields if row else [])
            if not self.dialect.quotes and any(_QUOTED.fullmatch(name) for name in self.header):
                raise ValueError(
                    f"{label}: its header has names in quotes, which --quote reads; between tabs they are text"
                )
            self.line += lines.taken
            self.carry = lines.rest() + self.carry
        self.key_names = _keys_of(label, self.header, keys)
        _refuse_twins(label, self.header, self.key_names)
        if not columns:
            _say_unnamed(self.header, self.key_names, rejects)
        self.key_places = [self.header.index(name) for name in self.key_names]

    def blocks(self) -> Iterator[TableBlock]:
        block = self.next()
        yield self._table(np.empty(0, np.int64), [pa.array([], pa.string()) for _ in self.header], lambda row: "")
        while block:
            if not self.dialect.quotes:
                self._count_quoted(block)
            lines = _well_formed(block, self.dialect, len(self.header))
            rows = self._parse(lines) if lines else None
            if lines and rows:
                self.carry = block[len(lines.block) :] + self.carry
                self.line += len(lines.ends)
                yield rows
            else:
                yield self._read_line_by_line(block)
            block = self.next()
        if self.quoted:
            self.rejects.say(
                f"{self.label}: {self.quoted:,} fields between tabs keep their quotes, such as on line "
                f"{self.first_quoted}; --quote reads them as CSV"
            )

    def _count_quoted(self, block: bytes) -> None:
        if b'"' not in block:
            return
        found = re.findall(rb'(?m)(?:^|(?<=\t))"[^\t\r\n]*"(?=[\t\r\n]|\Z)', block)
        if found and not self.quoted:
            self.first_quoted = self.line + block[: block.index(found[0])].count(b"\n")
        self.quoted += len(found)

    def next(self) -> bytes:
        """The next block, empty at the end."""
        return self._unescaped(self._read())

    def _read(self) -> bytes:
        block, self.carry = self.carry, b""
        while more := self.stream.read(BLOCK_BYTES):
            end = more.rfind(b"\n") + 1
            block += more[:end] if end else more
            if end:
                self.carry = more[end:]
                break
            require_short(self.label, self.line + block.count(b"\n"), len(block))
        return block

    def _unescaped(self, block: bytes) -> bytes:
        """Returns the block with two quotes for each that a backslash escapes, if more lines are rows then."""
        if not self.header or not self.dialect.quotes or b'\\"' not in block:
            return block
        plain = _ESCAPED_QUOTE.sub(rb'\1""', block)
        if not self.escapes:
            changed = [of for of in zip(block.split(b"\n"), plain.split(b"\n"), strict=True) if of[0] != of[1]]
            before, after = (sum(self._is_row(line) for line in lines) for lines in zip(*changed, strict=True))
            if before >= after:
                return block
            self.escapes = True
            self.rejects.say(f"{self.label}: quotes within fields are taken for escaped by backslashes")
        return plain

    def _is_row(self, line: bytes) -> bool:
        """Whether a line is a row by itself."""
        try:
            (fields,) = self.dialect.reader(_lines(line), strict=True)
        except (csv.Error, ValueError):
            return False
        return len(fields) == len(self.header)

    def _parse(self, lines: "_WellFormed") -> TableBlock | None:
        """Reads the block with Arrow; None if a field is longer than the csv module allows."""
        numbers = self.line + lines.lines_before
        columns, malformed = _parse_with_arrow(lines.block, self.dialect, len(self.header))
        longest = max((pc.max(pc.binary_length(column)).as_py() or 0 for column in columns), default=0)
        if max([longest, *(len(row.text) for row in malformed)]) > csv.field_size_limit():
            return None
        self.rejects.lines += len(numbers)
        places = np.array([row.number - 1 for row in malformed], np.int64)
        for row, place in zip(malformed, places, strict=True):
            fields = next(self.dialect.reader(io.StringIO(row.text, newline="")))
            self._reject(_Row(int(numbers[place]), row.text.splitlines(keepends=True), fields))
        return self._table(
            np.delete(numbers, places),
            columns,
            lambda row: self.dialect.delimiter.join(column[row].as_py() for column in columns),
        )

    def _read_line_by_line(self, block: bytes) -> TableBlock:
        """Reads the block with the csv module, up to the end of the row that the block ends in."""
        rows: list[list[str]] = []
        numbers: list[int] = []
        lines = _Lines(block, self.next)
        for row in _rows(lines, self.dialect, self.line, len(self.header)):
            self.rejects.lines += 1
            if len(row.fields) != len(self.header):
                self._reject(row)
            elif all(is_encodable(row.fields[at]) for at in self.key_places):
                rows.append(row.fields)
                numbers.append(row.number)
            else:
                self.rejects.add(self.label, row.number, "not UTF-8", self.dialect.delimiter.join(row.fields))
        self.line += lines.taken
        columns = [_texts([row[place] for row in rows]) for place in range(len(self.header))]
        for name, column in zip(self.header, columns, strict=True):
            lost = np.flatnonzero(as_numpy(column.is_null())).tolist() if column.null_count else []
            self.rejects.undecodable(self.label, name, [numbers[row] for row in lost])
        return self._table(np.array(numbers, np.int64), columns, lambda row: self.dialect.delimiter.join(rows[row]))

    def _reject(self, row: "_Row") -> None:
        reason = row.error or f"has {counted(len(row.fields), 'field')}, not {len(self.header)}"
        more = len(row.lines) - 1
        if more:
            # They all count as malformed.
            self.rejects.lines += more
            self.rejects.count += more
            reason += f", with {counted(more, 'more line')} in its quotes"
        self.rejects.add(self.label, row.number, reason, "".join(row.lines))

    def _table(self, numbers: np.ndarray, columns: list[pa.Array], text: Callable[[int], str]) -> TableBlock:
        named = {
            name: _as_stated(self.types.get(name), column)
            for name, column in zip(self.header, columns, strict=True)
            if name in self.key_names or _is_named(name)
        }
        kinds = {name: KINDS_OF_TYPES[kind] for name, kind in self.types.items() if kind in KINDS_OF_TYPES}
        return TableBlock(self.label, numbers, self.key_names, named, text, kinds)


@dataclass(frozen=True)
class _Dialect:
    """Of CSV."""

    delimiter: str
    quotes: bool
    """False: they are text."""

    def reader(self, lines: Iterable[str], strict: bool = False) -> Iterator[list[str]]:
        if not self.quotes:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE, strict=strict)
        return csv.reader(lines, delimiter=self.delimiter, strict=strict)


class _Lines:
    """The lines of a block for csv.reader, and of the blocks after it as long as a row goes on."""

    def __init__(self, block: bytes, more: Callable[[], bytes] = bytes) -> None:
        self.more, self.taken, self.lines = more, 0, _lines(block)
        self.at = 0
        self.row: list[str] = []
        """Those taken since it was emptied."""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        if not self.left:
            self.lines, self.at = _lines(self.more()), 0
            if not self.lines:
                raise StopIteration
        self.at += 1
        self.taken += 1
        self.row.append(self.lines[self.at - 1])
        return self.row[-1]

    def give_back(self) -> None:
        """All lines of the row but the first."""
        self.lines, self.at = [*self.row[1:], *self.lines[self.at :]], 0
        self.taken -= len(self.row) - 1
        del self.row[1:]

    @property
    def left(self) -> int:
        return len(self.lines) - self.at

    def rest(self) -> bytes:
        return "".join(self.lines[self.at :]).encode("utf-8", "surrogateescape")


def _lines(block: bytes) -> list[str]:
    # surrogateescape keeps undecodable bytes apart, so that only their row is rejected.
    return list(io.StringIO(block.decode("utf-8", "surrogateescape"), newline=""))


@dataclass(frozen=True)
class _Row:
    """A row of CSV that is not blank."""

    number: int
    """Of its first line."""
    lines: list[str]
    fields: list[str]
    error: str = ""
    """Why it is malformed, if for more than the number of its fields."""


def _rows(lines: _Lines, dialect: _Dialect, first: int = 1, width: int = 0) -> Iterator[_Row]:
    """The rows of lines of which the next has the number `first`. Where they have `width` fields, a quoted field that
    swallows rows ends with its line."""
    reader, first = dialect.reader(lines, strict=True), first - lines.taken
    while lines.left:
        before, error = lines.taken, ""
        lines.row.clear()
        fields: list[str] = []
        try:
            fields = next(reader)
        except csv.Error as problem:
            error = f"not CSV ({problem})"
        broken = len(fields) != width
        if width and len(lines.row) > 1 and swallows_rows(lines.row, dialect.delimiter, width, broken):
            error, fields = f"a quote opens that would swallow {len(lines.row) - 1:,} more lines, rows among them", []
            lines.give_back()
        if fields or error:
            yield _Row(first + before, list(lines.row), fields, error)


def _header(lines: _Lines, dialect: _Dialect) -> list[str]:
    """The first row that is not blank; empty if there is none."""
    row = next(_rows(lines, dialect), None)
    return row.fields if row else []


def _sniff(block: bytes, label: str, keys: Keys, dialects: Sequence[_Dialect]) -> _Dialect:
    def fitness(dialect: _Dialect) -> tuple[bool, int]:
        header, _ = _typed(_header(_Lines(block), dialect))
        try:
            keys(label, header)
        except ValueError:
            return False, len(header)
        return True, len(header)

    return max(dialects, key=fitness) if len(dialects) > 1 else dialects[0]


def _typed(header: list[str]) -> tuple[list[str], dict[str, str]]:
    """The names of a header, and the types where all fields state them, as those of RecBole's atomic files do."""
    found = [_ATOMIC.fullmatch(field) for field in header]
    if not header or not all(found):
        return header, {}
    types = {each[1]: each[2] for each in found if each}
    return [each[1] for each in found if each], types


def _as_stated(kind: str | None, column: pa.StringArray) -> pa.Array:
    """Sequences as lists: their parts are between blanks."""
    if kind not in ("token_seq", "float_seq"):
        return column
    parts = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(pc.if_else(pc.equal(column, ""), None, column)))
    if kind == "token_seq":
        return parts
    return pa.ListArray.from_arrays(parts.offsets, as_numbers(parts.values), mask=parts.is_null())


def _keys_of(label: str, header: list[str], keys: Keys) -> list[str]:
    try:
        return keys(label, header)
    except ValueError as error:
        if any(character.isdigit() for name in header for character in name):
            raise ValueError(
                f"{error}. If the first line is data, name the columns with --columns, such as user,item,_,timestamp"
            ) from None
        raise


def _check_unnamed(label: str, first: list[str], columns: Sequence[str]) -> None:
    """ValueError if the first row of a file cannot be data in these columns."""
    if first and len(first) != len(columns):
        raise ValueError(
            f"{label}:1: has {counted(len(first), 'field')}, but --columns names {len(columns)}: {','.join(columns)}"
        )
    if any(field == name != "_" for field, name in zip(first, columns, strict=False)):
        raise ValueError(f"{label}:1: names the columns itself ({','.join(first)}); leave out --columns")


def _refuse_twins(label: str, header: list[str], key_names: list[str]) -> None:
    for place, name in enumerate(header):
        if (name in key_names or _is_named(name)) and name in header[:place]:
            raise ValueError(f"{label}: has two columns named {name!r}; rename one")


@dataclass(frozen=True)
class _WellFormed:
    """Whole rows that every CSV reader splits in the same way."""

    block: bytes
    ends: np.ndarray
    """Places of the line ends."""
    lines_before: np.ndarray
    """For each row that is not blank: lines before it in the block."""


def _well_formed(block: bytes, dialect: _Dialect, width: int) -> _WellFormed | None:
    """The whole rows at the start of a block; None if readers might differ, if there is none, or if a quoted field
    swallows rows."""
    if block.count(b"\r") != block.count(b"\r\n") or block.startswith("\ufeff".encode()) or not is_utf8(block):
        return None
    if not block.endswith(b"\n"):
        block += b"\n"
    data = np.frombuffer(block, np.uint8)
    ends = row_ends = np.flatnonzero(data == ord("\n"))
    if dialect.quotes and b'"' in block:
        quotes = np.flatnonzero(data == ord('"'))
        row_ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
        if not len(row_ends):
            return None
        quotes = quotes[quotes < row_ends[-1]]
        opening, closing = quotes[::2], quotes[1::2]
        # The start counts as the end of a line; two quotes in a row are a quote inside a field.
        before, after = np.where(opening > 0, data[opening - 1], ord("\n")), data[closing + 1]
        if not (
            np.isin(before, _codes(dialect.delimiter + '\n"')).all()
            and np.isin(after, _codes(dialect.delimiter + '\r\n"')).all()
        ):
            return None
        if ends[len(row_ends) - 1] != row_ends[-1] and _swallows(data, ends, row_ends, dialect, width):
            return None
    starts = np.concatenate([[0], row_ends[:-1] + 1])
    lengths = row_ends - starts
    blank = (lengths == 0) | ((lengths == 1) & (data[starts] == ord("\r")))
    stop = row_ends[-1] + 1
    return _WellFormed(block[:stop], ends[ends < stop], np.searchsorted(ends, starts[~blank]))


def _swallows(data: np.ndarray, ends: np.ndarray, row_ends: np.ndarray, dialect: _Dialect, width: int) -> bool:
    """Whether a row of several lines swallows rows. Most do not: of their lines after the first, less than half have as
    many delimiters as a row."""
    ends = ends[ends <= row_ends[-1]]
    starts = np.concatenate([[0], ends[:-1] + 1])
    row = np.searchsorted(row_ends, ends)
    later = np.concatenate([[False], row[1:] == row[:-1]]) & (ends > starts)
    places = np.flatnonzero(data == ord(dialect.delimiter))
    wide = later & (np.searchsorted(places, ends) - np.searchsorted(places, starts) >= width - 1)
    count = len(row_ends)
    candidates = np.flatnonzero(np.bincount(row, later, count) <= 2 * np.bincount(row, wide, count))
    several = np.bincount(row[later], minlength=count)[candidates] > 0
    for which in candidates[several]:
        first = int(row_ends[which - 1]) + 1 if which else 0
        lines = _lines(data[first : int(row_ends[which]) + 1].tobytes())
        broken = len(next(dialect.reader(lines), [])) != width
        if swallows_rows(lines, dialect.delimiter, width, broken):
            return True
    return False


def _codes(characters: str) -> list[int]:
    return list(characters.encode())


def _parse_with_arrow(block: bytes, dialect: _Dialect, fields: int) -> tuple[list[pa.StringArray], list[Any]]:
    """The columns, without rows that have another number of fields; and these rows."""
    malformed: list[Any] = []

    def skip(row: Any) -> str:
        malformed.append(row)
        return "skip"

    names = [str(place) for place in range(fields)]
    table = pyarrow.csv.read_csv(
        pa.BufferReader(block),
        pyarrow.csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
        pyarrow.csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char='"' if dialect.quotes else False,
            newlines_in_values=dialect.quotes,
            invalid_row_handler=skip,
        ),
        pyarrow.csv.ConvertOptions(check_utf8=False, column_types=dict.fromkeys(names, pa.string())),
    )
    return [column.combine_chunks() for column in table.columns], malformed


def _texts(values: list[str]) -> pa.StringArray:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([value if is_encodable(value) else None for value in values], pa.string())


def _read_parquet(file: InputFile, keys: Keys, rejects: Rejects, progress: Progress) -> Iterator[TableBlock]:
    try:
        with pq.ParquetFile(file.path) as table:
            names = [path for field in table.schema_arrow for path in paths(field.name, field.type)]
            key_names = keys(file.label, names)
            _refuse_twins(file.label, names, key_names)
            _say_unnamed(names, key_names, rejects)
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
) -> TableBlock:
    """The rows whose keys are UTF-8, which no reader of Parquet checks; other text that is not UTF-8 is missing.
    `uuids`: which columns of 16 bytes were found to be UUIDs in the blocks before."""
    columns, whole = {}, np.ones(batch.num_rows, bool)
    for place, column in enumerate(batch.schema.names):
        for name, values in unnested(column, _with_kernels(batch.column(place)), key_names):
            if name in key_names or _is_named(name):
                values = _uuids_as_text(name, values, uuids)
                columns[name], valid = _as_utf8(label, name, _bytes_as_text(values) if name in key_names else values)
                whole &= valid | (name not in key_names)
                if name not in key_names:
                    rejects.undecodable(label, name, (first + np.flatnonzero(~valid)).tolist())
    numbers = np.arange(first, first + batch.num_rows)
    keys = [columns[name] for name in key_names]
    block = TableBlock(label, numbers, key_names, columns, lambda row: ",".join(str(key[row]) for key in keys))
    return block.only(block.reject(dict.fromkeys(np.flatnonzero(~whole).tolist(), "not UTF-8"), rejects))


def _with_kernels(column: pa.Array) -> pa.Array:
    """The column without half floats, small decimals and views, which Arrow reads but cannot filter or compare."""
    kind = _kind_with_kernels(column.type)
    return column if kind == column.type else column.cast(kind)


def _kind_with_kernels(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_kind_with_kernels(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_kind_with_kernels(kind.key_type), _kind_with_kernels(kind.item_type))
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_kind_with_kernels(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_kind_with_kernels(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_kind_with_kernels(kind.value_type))
    return kind


def _bytes_as_text(column: pa.Array) -> pa.Array:
    """Bytes as text that may not be UTF-8, as programs without a type for text store it."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _bytes_as_text(column.cast(kind.value_type)) if pa.types.is_binary(kind.value_type) else column
    if pa.types.is_fixed_size_binary(kind):
        column = column.cast(pa.binary())
    if pa.types.is_binary(column.type):
        return column.view(pa.string())
    return column.view(pa.large_string()) if pa.types.is_large_binary(kind) else column


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
    # Missing ones may have no bytes.
    codes = np.frombuffer(b"".join(column.fill_null(bytes(16)).to_pylist()), np.uint8).reshape(-1, 16)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    written = np.full((len(codes), 36), ord("-"), np.uint8)
    places = np.array([at + (at > 7) + (at > 11) + (at > 15) + (at > 19) for at in range(0, 32, 2)])
    written[:, places], written[:, places + 1] = digits[codes >> 4], digits[codes & 15]
    texts = pa.FixedSizeBinaryArray.from_buffers(pa.binary(36), len(codes), [None, pa.py_buffer(written)])
    return pc.if_else(column.is_valid(), texts.cast(pa.binary()).cast(pa.string()), None)


def _as_utf8(label: str, name: str, column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The column with null where its text is not UTF-8, and where it is. ValueError for such text within lists."""
    try:
        column.validate(full=True)
        return column, np.ones(len(column), bool)
    except pa.ArrowInvalid as error:
        plain = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        if not is_text(plain.type):
            raise ValueError(f"{label}: column {name} is damaged ({first_line(error)})") from None
    valid = np.array([text is None or is_utf8(text) for text in plain.cast(pa.large_binary()).to_pylist()])
    return pc.if_else(pa.array(valid), plain, None), valid


def _say_unnamed(header: list[str], key_names: list[str], rejects: Rejects) -> None:
    unnamed = [name.strip() or "one without a name" for name in header if not (name in key_names or _is_named(name))]
    if unnamed:
        columns = ", ".join(dict.fromkeys(unnamed))
        rejects.say_once(f"columns that are not read, for their names are those of pandas' row numbers: {columns}")


def _is_named(column: str) -> bool:
    """False for pandas' row numbers: a blank name in CSV, __index_level_0__ in Parquet."""
    return bool(column.strip()) and not column.startswith("__")
