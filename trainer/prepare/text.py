"""Delimited text in blocks of rows: CSV with or without a header, and the text formats of public datasets.

What a row is, is defined by Python's csv module, strict about quotes and the length of fields. Arrow reads lines that
every reader splits in the same way, many at once. Lines with quotes in the middle of fields, rows of several lines and
long lines go to the csv module one by one. A quote that would swallow rows ends with its line. Between tabs, quotes are
text. Lines end in LF, CRLF or CR.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from rich.progress import Progress

from logitmix.common.mappings import counted
from logitmix.trainer.data.arrow import as_numbers, is_utf8
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import Block, Keys, check_names, is_named

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 64 << 20
DELIMITERS = ",;\t|"
SEPARATOR = b"\x1f"
"""Takes the place of a delimiter of several characters, or of any white space."""
KINDS_OF_TYPES: Mapping[str, str] = {"token": "id", "float": "number", "token_seq": "ids"}
"""Of the types in a header. A list of floats is a vector only where all are of one length."""
MANY = 8
"""Lines that look like rows are no coincidence, even where nothing in them is like an id, a number or a time."""

_QUOTED = re.compile(r'".*"')
_DELIMITER_LINE = re.compile(rb'"?sep=(.)"?\r?\n', re.IGNORECASE)
"""The first line by which Excel is told the delimiter."""
_ESCAPED_QUOTE = re.compile(rb'(?<!\\)((?:\\\\)*)\\"')
_ATOMIC = re.compile(r"(.+):(token|token_seq|float|float_seq)")
_NUMBER = re.compile(r"-?[0-9][0-9.:/TZ+ -]*")
"""Or a time."""
_MARK = 0x10FE00
"""Plus a byte that is not UTF-8: the character of private use that stands for it while a line is split."""
_MARKS = f"[{chr(_MARK + 0x80)}-{chr(_MARK + 0xFF)}]"


@dataclass(frozen=True)
class Layout:
    """What a text does not tell itself."""

    delimiter: str = ""
    """One or several characters; a blank: any white space. Empty: whichever of DELIMITERS gives the required columns or
    else the most."""
    columns: Sequence[str] = ()
    """Names for files without a header, "_" for a column that is not read."""
    quotes: bool | None = None
    """Whether fields may be in quotes. None: not between tabs."""
    header: str = ""
    """The required first line, instead of one with any names."""
    fixed: bool = False
    """Whether it is that of a public format, where a first line that does not fit is malformed like any other."""
    encoding: str = ""
    """Empty: UTF-8."""


CSV = Layout()


def line_blocks(file: InputFile, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """Whole lines, many in one bytes object, and the number of the first (from 1). ValueError for a line of more than
    LONGEST_LINE bytes."""
    first, carry = 1, b""
    with file.open(progress) as stream:
        while more := stream.read(BLOCK_BYTES):
            block = carry + more
            end = block.rfind(b"\n") + 1
            block, carry = block[:end], block[end:]
            if len(block) > LONGEST_LINE:
                lengths = np.diff(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")), prepend=-1)
                _require_short(file.label, first + int(lengths.argmax()), int(lengths.max()) - 1)
            if block:
                yield first, block
                first += block.count(b"\n")
            _require_short(file.label, first, len(carry))
    if carry:
        yield first, carry + b"\n"


def _require_short(label: str, line: int, length: int) -> None:
    """ValueError if a line has more bytes than are allowed."""
    if length > LONGEST_LINE:
        limit = f"{LONGEST_LINE >> 20} MiB" if LONGEST_LINE >= 1 << 20 else f"{LONGEST_LINE} bytes"
        raise ValueError(f"{label}:{line}: a line of more than {limit}; is this a text file?")


def read_text(
    file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, layout: Layout = CSV
) -> Iterator[Block]:
    """All columns, as text. Where a header states types, as name:token_seq, sequences are lists, and the blocks have
    the kinds. Rows with another number of fields, or whose keys are not UTF-8, are rejected. ValueError if a header is
    missing."""
    reader: _Reader | None = None
    for first, block in line_blocks(file, progress):
        if reader is None:
            if excel := _DELIMITER_LINE.match(block):
                layout = replace(layout, delimiter=layout.delimiter or excel[1].decode())
                first, block = first + 1, block[excel.end() :]
            reader, skipped, block = _Reader.begin(file.label, first, block, keys, rejects, layout)
            reader.next_line = first + skipped
            yield reader.table(np.empty(0, np.int64), [pa.array([], pa.string()) for _ in reader.header])
        yield reader.read(block)
    if reader is None:
        keys(file.label, list(layout.columns))
    else:
        yield from reader.rest()


def fixed_keys(*names: str) -> Keys:
    """The keys of a format whose columns have these names."""
    return lambda label, header: list(names)


@dataclass(frozen=True)
class _Dialect:
    """Of delimited text."""

    delimiter: str
    quotes: bool
    """False: they are text."""

    @property
    def separator(self) -> str:
        """What stands between the fields that are split."""
        return self.delimiter if len(self.delimiter) == 1 and self.delimiter != " " else SEPARATOR.decode()

    def reader(self, lines: Iterable[str], strict: bool = True) -> Any:
        if self.quotes:
            return csv.reader(lines, delimiter=self.separator, strict=strict)
        return csv.reader(lines, delimiter=self.separator, quoting=csv.QUOTE_NONE, strict=strict)

    def separated(self, block: bytes) -> bytes:
        """With SEPARATOR for a delimiter that is not one character."""
        if self.delimiter == " ":
            return re.sub(rb"[ \t\v\f]+", SEPARATOR, re.sub(rb"(?m)^[ \t\v\f\r]+|[ \t\v\f\r]+$", b"", block))
        return block.replace(self.delimiter.encode(), SEPARATOR) if len(self.delimiter) > 1 else block


def _lines(block: bytes) -> list[str]:
    return io.StringIO(block.decode("utf-8", "surrogateescape"), newline="").readlines()


def _starts(data: np.ndarray) -> np.ndarray:
    """Where lines start, which end in LF, CRLF or CR; and the end of the last one."""
    ends = data == ord("\n")
    carriage = data == ord("\r")
    if carriage.any():
        carriage[:-1] &= data[1:] != ord("\n")
        ends |= carriage
    return np.concatenate([[0], np.flatnonzero(ends) + 1])


def _first_row(lines: Sequence[str], dialect: _Dialect) -> tuple[list[str], int, str]:
    """The first row that is not blank, the number of lines up to its end, and why it is no CSV."""
    rows = dialect.reader(lines)
    try:
        fields: list[str] = next((row for row in rows if row), [])
    except csv.Error as error:
        return [], rows.line_num, f"not CSV ({error})"
    return fields, rows.line_num, ""


@dataclass
class _Reader:
    """Reads a text block by block."""

    label: str
    rejects: Rejects
    dialect: _Dialect
    header: list[str]
    key_names: list[str]
    types: dict[str, str]
    """By the columns' names, those that the header states."""
    carry: bytes = b""
    """The start of a row that goes on in the next block."""
    quoted: int = 0
    """Fields whose quotes are text."""
    first_quoted: int = 0
    """The line of the first of them."""
    next_line: int = 1
    block: bytes = b""
    """Lines as they are in the file, from the number `first` on; empty if they can be told from what is read."""
    first: int = 1
    escapes: bool = False
    """Whether quotes within fields are escaped by backslashes, which becomes "" where a block is read."""

    @classmethod
    def begin(
        cls, label: str, first: int, block: bytes, keys: Keys, rejects: Rejects, layout: Layout
    ) -> tuple["_Reader", int, bytes]:
        """For a text that begins with this block; also the number of lines that are no data, and the block without
        them."""
        skipped = 0
        dialects = [
            _Dialect(one, one != "\t" if layout.quotes is None else layout.quotes)
            for one in ([layout.delimiter] if layout.delimiter else DELIMITERS)
        ]
        starts = {one: _lines(one.separated(block[: block.find(b"\n", 1 << 16) + 1 or None])) for one in dialects}
        if layout.header:
            found = starts[dialects[0]][0].rstrip("\r\n")
            if found != layout.header:
                raise ValueError(f"{label}: starts with {found[:80]!r}, not with the header {layout.header}")
        if layout.columns:
            rows = {one: _first_row(starts[one], one)[0] for one in dialects}
            dialect = max(dialects, key=lambda one: len(rows[one]) == len(layout.columns))
            if not layout.fixed:
                _check_unnamed(label, rows[dialect], layout.columns)
            header, types = ["" if name == "_" else name for name in layout.columns], dict[str, str]()
            skipped = 1 if layout.header else 0
        else:
            dialect = max(dialects, key=lambda one: _fitness(label, keys, _first_row(starts[one], one)[0]))
            row, skipped, error = _first_row(starts[dialect], dialect)
            if error:
                raise ValueError(f"{label}: its header is {error}; is it a table of text?")
            header, types = _typed(row)
            if not dialect.quotes and any(_QUOTED.fullmatch(name) for name in header):
                raise ValueError(
                    f"{label}: its header has names in quotes, which --quote reads; between tabs they are text"
                )
        key_names = _keys_of(label, header, keys)
        check_names(label, [name for name in header if name or not layout.columns], key_names, rejects)
        starts_of_lines = _starts(np.frombuffer(block, np.uint8))
        data = block[starts_of_lines[min(skipped, len(starts_of_lines) - 1)] :]
        return cls(label, rejects, dialect, header, key_names, types), skipped, data

    def read(self, block: bytes, last: bool = False) -> Block:
        """The rows of the next lines."""
        first, self.carry, block = self.next_line, b"", self.carry + block
        # White space of lines that are rejected is shown as it is.
        self.block, self.first = block if self.dialect.delimiter == " " else b"", first
        block = self._unescaped(self.dialect.separated(block))
        damaged = not is_utf8(block)
        if damaged:
            text = block.decode("utf-8", "surrogateescape")
            block = re.sub("[\udc80-\udcff]", lambda of: chr(_MARK - 0xDC00 + ord(of[0])), text).encode()
        if not self.dialect.quotes:
            self._count_quoted(first, block)
        data = np.frombuffer(block, np.uint8)
        starts = _starts(data)
        alone = self._apart(data, starts)
        rows, numbers = list[list[str]](), list[int]()
        done, stop = -1, len(starts) - 1
        for line in np.flatnonzero(alone).tolist():
            if line < done or line >= stop:
                continue
            taken, fields, error = self._row(block, starts, line, last)
            if taken == 0:
                # It may go on in the next block.
                self.carry, stop = block[starts[line] :], line
                break
            alone[line : line + taken] = True
            done = line + taken
            if error or len(fields) != len(self.header):
                lines = _lines(block[starts[line] : starts[line + taken]])
                self._reject(first + line, lines, error or self._width(len(fields)))
            elif fields:
                rows.append(fields)
                numbers.append(first + line)
        alone, starts, self.next_line = alone[:stop], starts[: stop + 1], first + stop
        bulk = block[: starts[-1]]
        if alone.any():
            bulk = b"".join(block[starts[at] : starts[at + 1]] for at in np.flatnonzero(~alone).tolist())
        found, columns = self._parse(bulk, first + np.flatnonzero(~alone))
        self.rejects.lines += len(found) + len(rows)
        if rows:
            order = pa.array(np.argsort(np.concatenate([found, numbers]), kind="stable"))
            more = [pa.array([row[place] for row in rows], pa.string()) for place in range(len(self.header))]
            columns = [pa.concat_arrays([one, two]).take(order) for one, two in zip(columns, more, strict=True)]
            found = np.concatenate([found, numbers])[order.to_numpy()]
        return self.table(found, columns, damaged)

    def _unescaped(self, block: bytes) -> bytes:
        """Returns the block with two quotes for each that a backslash escapes, if more lines are rows then."""
        if not self.dialect.quotes or b'\\"' not in block:
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
            (fields,) = self.dialect.reader(_lines(line))
        except (csv.Error, ValueError):
            return False
        return len(fields) == len(self.header)

    def rest(self) -> Iterator[Block]:
        """The rows of a text that ends within one; says what its quotes are."""
        if self.carry:
            yield self.read(b"", last=True)
        if self.quoted:
            self.rejects.say(
                f"{self.label}: {self.quoted:,} fields between tabs keep their quotes, such as on line "
                f"{self.first_quoted}; --quote reads them as CSV"
            )

    def _apart(self, data: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Which lines readers might split in different ways, bool [lines]."""
        lengths = np.diff(starts)
        alone = lengths > csv.field_size_limit()
        quotes = np.flatnonzero(data == ord('"')) if self.dialect.quotes else np.empty(0, np.int64)
        if not len(quotes):
            return alone
        line = np.searchsorted(starts, quotes, "right") - 1
        # Places of quotes in their line, from 0.
        rank = np.arange(len(quotes)) - np.searchsorted(line, line)
        before = np.where(quotes > 0, data[quotes - 1], ord("\n"))
        after = np.append(data, ord("\n"))[quotes + 1]
        # Two quotes in a row are a quote inside a field.
        separator = ord(self.dialect.separator)
        opens = np.isin(before, [separator, ord("\r"), ord("\n"), ord('"')])
        closes = np.isin(after, [separator, ord("\r"), ord("\n"), ord('"')])
        alone[line[np.where(rank % 2 == 0, ~opens, ~closes)]] = True
        return alone | (np.bincount(line, minlength=len(lengths)) % 2 == 1)

    def _row(self, block: bytes, starts: np.ndarray, line: int, last: bool) -> tuple[int, list[str], str]:
        """How many lines the row that begins with a line has, its fields, and why it is malformed. No lines if it may
        go on behind the block."""
        texts = (block[starts[at] : starts[at + 1]].decode() for at in range(line, len(starts) - 1))
        rows, fields, error = self.dialect.reader(texts), list[str](), ""
        try:
            fields = next(rows)
        except csv.Error as problem:
            error = f"not CSV ({problem})"
        taken = rows.line_num
        goes_on = error and "end of data" in error
        if goes_on and not last and len(block) - starts[line] <= (1 << 20) + len(self.header) * csv.field_size_limit():
            return 0, [], ""
        lines = _lines(block[starts[line] : starts[line + taken]])
        broken = len(fields) != len(self.header)
        if taken > 1 and swallows_rows(lines, self.dialect.separator, len(self.header), broken):
            return 1, [], f"a quote opens that would swallow {taken - 1:,} more lines, rows among them"
        return taken, fields, error

    def _parse(self, lines: bytes, numbers: np.ndarray) -> tuple[np.ndarray, list[pa.Array]]:
        """Lines that are whole rows, read by Arrow: the numbers of those of the right width, and the columns."""
        malformed: list[Any] = []

        def skip(row: Any) -> str:
            malformed.append(row)
            return "skip"

        names = [str(place) for place in range(len(self.header))]
        if not lines:
            return np.empty(0, np.int64), [pa.array([], pa.string()) for _ in names]
        data = np.frombuffer(lines, np.uint8)
        starts = _starts(data)
        lengths = np.diff(starts)
        blank = (lengths == 1) | ((lengths == 2) & (data[starts[:-1]] == ord("\r")))
        numbers = numbers[~blank]
        if not len(numbers):
            return numbers, [pa.array([], pa.string()) for _ in names]
        table = pyarrow.csv.read_csv(
            pa.BufferReader(lines),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=names),
            pyarrow.csv.ParseOptions(
                delimiter=self.dialect.separator,
                quote_char='"' if self.dialect.quotes else False,
                invalid_row_handler=skip,
            ),
            pyarrow.csv.ConvertOptions(check_utf8=False, column_types=dict.fromkeys(names, pa.string())),
        )
        places = np.array([row.number - 1 for row in malformed], np.int64)
        for row, place in zip(malformed, places, strict=True):
            width = len(next(self.dialect.reader([row.text]), []))
            self._reject(int(numbers[place]), [row.text], self._width(width))
        return np.delete(numbers, places), [column.combine_chunks() for column in table.columns]

    def _width(self, fields: int) -> str:
        return f"has {counted(fields, 'field')}, not {len(self.header)}"

    def _reject(self, number: int, lines: Sequence[str], reason: str) -> None:
        more = len(lines) - 1
        # They all count as malformed.
        self.rejects.lines += len(lines)
        self.rejects.count += more
        if more:
            reason += f", with {counted(more, 'more line')} in its quotes"
        text = self.block.split(b"\n")[number - self.first] if self.block else self._shown("".join(lines))
        self.rejects.add(self.label, number, reason, text)

    def _shown(self, text: str) -> bytes:
        """As it is in the file."""
        text = text.replace(self.dialect.separator, self.dialect.delimiter)
        marked = re.sub(_MARKS, lambda of: chr(ord(of[0]) - _MARK + 0xDC00), text)
        return marked.encode("utf-8", "surrogateescape")

    def table(self, numbers: np.ndarray, columns: list[pa.Array], damaged: bool = False) -> Block:
        """The rows whose keys are UTF-8; another text that is not is missing."""
        named = {
            name: column
            for name, column in zip(self.header, columns, strict=True)
            if name in self.key_names or is_named(name)
        }
        kinds = {name: KINDS_OF_TYPES[kind] for name, kind in self.types.items() if kind in KINDS_OF_TYPES}

        def text(row: int) -> bytes:
            return self._shown(self.dialect.separator.join(column[row].as_py() for column in columns))

        block = Block(self.label, numbers, self.key_names, named, text, kinds)
        if damaged:
            marked = {name: np.asarray(pc.match_substring_regex(of, _MARKS)) for name, of in named.items()}
            wrong = np.logical_or.reduce([marked[name] for name in self.key_names])
            for name in block.others:
                self.rejects.undecodable(self.label, name, numbers[marked[name] & ~wrong].tolist())
                named[name] = pc.if_else(pa.array(marked[name]), None, named[name])
            reasons = dict.fromkeys(np.flatnonzero(wrong).tolist(), "not UTF-8")
            block = block.only(block.reject(reasons, self.rejects))
        stated = {name: _as_stated(self.types.get(name), column) for name, column in block.columns.items()}
        return replace(block, columns=stated)

    def _count_quoted(self, first: int, block: bytes) -> None:
        if b'"' not in block or self.dialect.delimiter != "\t":
            return
        found = re.findall(rb'(?m)(?:^|(?<=\t))"[^\t\r\n]*"(?=[\t\r\n]|\Z)', block)
        if found and not self.quoted:
            self.first_quoted = first + block[: block.index(found[0])].count(b"\n")
        self.quoted += len(found)


def _fitness(label: str, keys: Keys, row: list[str]) -> tuple[bool, int]:
    """Whether a header has the required columns, and how many it has."""
    header, _ = _typed(row)
    try:
        keys(label, header)
    except ValueError:
        return False, len(header)
    return True, len(header)


def _typed(header: list[str]) -> tuple[list[str], dict[str, str]]:
    """The names of a header, and the types where all fields state them, as those of RecBole's atomic files do."""
    found = [_ATOMIC.fullmatch(name) for name in header]
    if not header or not all(found):
        return header, {}
    return [each[1] for each in found if each], {each[1]: each[2] for each in found if each}


def _as_stated(kind: str | None, column: pa.Array) -> pa.Array:
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
    if any(name == given != "_" for name, given in zip(first, columns, strict=False)):
        raise ValueError(f"{label}:1: names the columns itself ({','.join(first)}); leave out --columns")


def swallows_rows(lines: Sequence[str], delimiter: str, width: int, broken: bool) -> bool:
    """Whether the lines from the second on, which CSV takes for the rest of a row with a quoted field, are rows of
    their own: at least half of them have `width` fields, and where the first line has numbers or times they have some,
    too; without these, ids like its ids. If it has nothing of all that, it takes MANY of them, unless the row is
    `broken`, which is not CSV anyway."""
    first = _fields(lines[0], delimiter)
    if len(first) < width:
        first = lines[0].rstrip("\r\n").split(delimiter)
    shapes = {place: shape for place, text in enumerate(first[:width]) if (shape := _shape(text))}
    if "9" in shapes.values():
        shapes = {place: shape for place, shape in shapes.items() if shape == "9"}
    rest = [line for line in lines[1:] if line.strip()]
    alike = 0
    for line in rest:
        row = _fields(line, delimiter)
        alike += len(row) == width and all(_shape(row[place]) == shape for place, shape in shapes.items())
    return alike >= (1 if broken or shapes else MANY) and 2 * alike >= len(rest)


def _shape(text: str) -> str:
    """9 for numbers and times, a9 for i8 or user12; empty for other texts."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return "9"
    shape = re.sub(r"[^\W\d_]+", "a", re.sub(r"[0-9]+", "9", text))
    return shape if "9" in shape and '"' not in shape and not re.search(r"\s", shape) else ""


def _fields(line: str, delimiter: str) -> list[str]:
    """Of a line by itself; a quote that it leaves open is a part of the text."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return line.split(delimiter)
