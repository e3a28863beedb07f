"""Delimited text: CSV with or without a header, and the text formats of public datasets.

What a row is, is defined by Python's csv module, strict about quotes and the length of fields. DuckDB reads a file that
it splits in the same way: one without quotes next to other characters, and of which each line is a row of the right
width. Any other file is read line by line. A quote that would swallow rows ends with its line. Between tabs, quotes are
text. Lines end in LF, CRLF or CR.
"""

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from rich.progress import Progress

from logitmix.common.mappings import counted
from logitmix.trainer.data.arrow import is_encodable
from logitmix.trainer.data.engine import Duck
from logitmix.trainer.prepare.files import InputFile, magic, plain
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import NO_PROBLEM, Keys, Raw, append, check_names, is_named, literal, place_of

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 64 << 20
DELIMITERS = ",;\t|"
KINDS_OF_TYPES: Mapping[str, str] = {"token": "id", "float": "number", "token_seq": "ids"}
"""Of the types in a header. A list of floats is a vector only where all are of one length."""
MANY = 8
"""Lines that look like rows are no coincidence, even where nothing in them is like an id, a number or a time."""
NUMBER = r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"

_QUOTED = re.compile(r'".*"')
_DELIMITER_LINE = re.compile(rb'"?sep=(.)"?\r?\n', re.IGNORECASE)
"""The first line by which Excel is told the delimiter."""
_ESCAPED_QUOTE = re.compile(r'(?<!\\)((?:\\\\)*)\\"')
_ATOMIC = re.compile(r"(.+):(token|token_seq|float|float_seq)")
_SHAPE_OF_NUMBERS = re.compile(r"-?[0-9][0-9.:/TZ+ -]*")
"""Or of times."""
_BLANKS = re.compile(r"[ \t\v\f]+")
_SEPARATOR = "\x1f"
"""Stands for a delimiter of several bytes."""
_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_BETWEEN_TABS = re.compile(rb'(?m)(?:^|(?<=\t))"[^\t\r\n]*"(?=[\t\r\n]|\Z)')


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
            if max(len(carry), len(block)) > LONGEST_LINE and (
                long := [at for at, of in enumerate([*block.split(b"\n")[:-1], carry]) if len(of) > LONGEST_LINE]
            ):
                limit = f"{LONGEST_LINE >> 20} MiB" if LONGEST_LINE >= 1 << 20 else f"{LONGEST_LINE} bytes"
                raise ValueError(f"{file.label}:{first + long[0]}: a line of more than {limit}; is this a text file?")
            if block:
                yield first, block
                first += block.count(b"\n")
    if carry:
        yield first, carry + b"\n"


def lines_of(first: int, block: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the bytes of each line of a block that is not blank; its first line has this number."""
    for number, line in enumerate(block.split(b"\n"), start=first):
        if line and not line.isspace():
            yield number, line


def fixed_keys(*names: str) -> Keys:
    """The keys of a format whose columns have these names."""
    return lambda label, header: list(names)


def read_text(
    file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, duck: Duck, layout: Layout = CSV
) -> Raw:
    """Returns all columns of a file, as text. If a header states types, as name:token_seq, sequences are lists, and the
    columns have the kinds. Rows with another number of fields, or whose keys are not UTF-8, are malformed. ValueError
    if a header is missing."""
    _, start = next(line_blocks(file, Progress(disable=True)), (1, b""))
    start = start[: start.find(b"\n", 1 << 16) + 1 or None]
    if not start:
        keys(file.label, list(layout.columns))
        layout = replace(layout, columns=layout.columns or layout.header.split(","), header="", fixed=True)
    skipped = 0
    if excel := _DELIMITER_LINE.match(start):
        layout = replace(layout, delimiter=layout.delimiter or excel[1].decode())
        start, skipped = start[excel.end() :], 1
    text = _Text.begin(file, start, keys, rejects, layout)
    text.skipped += skipped
    del start  # which may be a very long line
    return text.by_duckdb(duck, progress) or text.raw(duck, text.by_lines(duck, progress))


@dataclass(frozen=True)
class _Dialect:
    """Of delimited text."""

    delimiter: str
    quotes: bool
    """False: they are text."""

    def fields(self, line: str) -> list[str]:
        """Returns the fields of a line that has no quotes, or whose quotes are text."""
        line = line.rstrip("\r\n")
        if self.delimiter == " ":
            line = line.strip(" \t\v\f\r")
            return _BLANKS.split(line) if line else []
        return line.split(self.delimiter) if line else []

    def alike(self, text: str, names: Sequence[str], skipped: int) -> pa.Table | None:
        """Returns the columns of a text without quotes and without its first lines, if each further line has a field
        for each of two or more names."""
        if len(names) < 2 or text.count("\r") != text.count("\r\n") or not is_encodable(text):
            return None
        if self.delimiter == " ":
            lines = text.split("\n")[skipped:-1]
            if not text.isascii() or {len(line.split()) for line in lines} != {len(names)}:
                return None
            flat = "\n".join(lines).split()
            return pa.table({name: flat[place :: len(names)] for place, name in enumerate(names)})
        separator = self.delimiter
        if len(separator.encode()) > 1:
            separator = _SEPARATOR
            if separator in text:
                return None
            text = text.replace(self.delimiter, separator)
        data = text.encode()
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(data),
                pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=len(data) + 1, skip_rows=skipped, column_names=names
                ),
                pyarrow.csv.ParseOptions(delimiter=separator, quote_char=False),
                pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
            )
        except pa.ArrowInvalid:
            return None
        return table if len(table) == text.count("\n") - skipped else None  # blank lines are left out

    def rows(
        self, lines: Iterable[str], width: int = 0, number: int = 1
    ) -> Iterator[tuple[int, list[str], str, list[str]]]:
        """The number of the first line of each row, its fields, why it is malformed, and its lines, of which the first
        one has this `number`. A quote that would swallow rows of a `width` ends with its line."""
        source, waiting = iter(lines), deque[str]()
        while line := (waiting.popleft() if waiting else next(source, "")):
            taken, fields, error = [line], list[str](), ""
            if not self.quotes or '"' not in line:
                fields = self.fields(line)
            else:
                more = _taking(taken, waiting, source)
                try:
                    fields = next(csv.reader(more, delimiter=self.delimiter, strict=True))
                except csv.Error as problem:
                    error = f"not CSV ({problem})"
                if width and len(taken) > 1 and swallows_rows(taken, self, width, len(fields) != width):
                    error = f"a quote opens that would swallow {len(taken) - 1:,} more lines, rows among them"
                    waiting.extendleft(reversed(taken[1:]))
                    taken = taken[:1]
            yield number, fields, error, taken
            number += len(taken)

    def first(self, start: str) -> tuple[list[str], int, str]:
        """Returns the first row that is not blank, the number of lines up to its end, and why it is no CSV."""
        rows = self.rows(_LINE.findall(start))
        found = ((fields, at + len(taken) - 1, error) for at, fields, error, taken in rows if fields or error)
        return next(found, ([], 0, ""))


def _taking(taken: list[str], waiting: deque[str], source: Iterator[str]) -> Iterator[str]:
    """Yields the lines of a row as the csv module asks for them, and notes them in `taken`."""
    yield taken[0]
    while line := (waiting.popleft() if waiting else next(source, "")):
        taken.append(line)
        yield line


@dataclass
class _Text:
    """A file of delimited text."""

    file: InputFile
    rejects: Rejects
    dialect: _Dialect
    header: list[str]
    keys: list[str]
    types: dict[str, str]
    """By the columns' names, those that the header states."""
    skipped: int
    """Lines before the data."""
    quoted: list[int] = field(default_factory=list)
    """Lines with fields whose quotes are text."""
    escapes: bool = False
    """Whether quotes within fields are escaped by backslashes."""

    @classmethod
    def begin(cls, file: InputFile, start: bytes, keys: Keys, rejects: Rejects, layout: Layout) -> "_Text":
        """Finds the delimiter and the columns of a file, whose decompressed text begins with `start`."""
        label, text = file.label, start.decode("utf-8", "surrogateescape")
        dialects = [
            _Dialect(one, one not in "\t " and len(one) == 1 if layout.quotes is None else layout.quotes)
            for one in ([layout.delimiter] if layout.delimiter else DELIMITERS)
        ]
        line = re.split("[\r\n]", text, maxsplit=1)[0]
        if layout.header and line != layout.header:
            raise ValueError(f"{label}: starts with {line[:80]!r}, not with the header {layout.header}")
        firsts = {one: one.first(text) for one in dialects}
        if layout.columns:
            dialect = max(dialects, key=lambda one: len(firsts[one][0]) == len(layout.columns))
            if not layout.fixed:
                _check_unnamed(label, firsts[dialect][0], layout.columns)
            header, types = ["" if name == "_" else name for name in layout.columns], dict[str, str]()
            skipped = 1 if layout.header else 0
        else:
            dialect = max(dialects, key=lambda one: _fitness(label, keys, firsts[one][0]))
            row, skipped, error = firsts[dialect]
            if error:
                raise ValueError(f"{label}: its header is {error}; is it a table of text?")
            header, types = _typed(row)
            if not dialect.quotes and any(_QUOTED.fullmatch(name) for name in header):
                raise ValueError(
                    f"{label}: its header has names in quotes, which --quote reads; between tabs they are text"
                )
        key_names = _keys_of(label, header, keys)
        check_names(label, [name for name in header if name or not layout.columns], key_names, rejects)
        return cls(file, rejects, dialect, header, key_names, types, skipped)

    def raw(self, duck: Duck, relation: str) -> Raw:
        """Returns the columns of a relation whose columns are x0, x1 and so on."""
        named = {
            name: _as_stated(self.types.get(name), f"x{place}")
            for place, name in enumerate(self.header)
            if name in self.keys or is_named(name)
        }
        kinds = {name: KINDS_OF_TYPES[kind] for name, kind in self.types.items() if kind in KINDS_OF_TYPES}
        if self.quoted:
            self.rejects.say(
                f"{self.file.label}: {len(self.quoted):,} fields between tabs keep their quotes, such as on line "
                f"{self.quoted[0]}; --quote reads them as CSV"
            )
        return Raw(self.file.label, duck, relation, named, self.keys, kinds)

    def by_duckdb(self, duck: Duck, progress: Progress) -> Raw | None:
        """Returns the rows as DuckDB reads them; None if they may differ from those that the csv module reads."""
        compressed = magic(self.file.path, 2) == b"\x1f\x8b"
        path = self.file.path
        plain_file = (
            path.is_file() and not self.file.member and not self.file.encoding and plain(str(path)) == str(path)
        )
        if not plain_file or self.dialect.delimiter == " " or len(self.header) < 2 or self.skipped > 1:
            return None
        found = self._lines_of_plain(progress)
        if found is None:
            return None
        count, ends = found
        names = [f"x{place}" for place in range(len(self.header))]
        quote = '"' if self.dialect.quotes else ""
        duck.db.execute(
            f"""create or replace view raw as select row_number() over () + {self.skipped} as line, {NO_PROBLEM}, *
            from read_csv({place_of(path)}, auto_detect = false, header = false, skip = {self.skipped},
                columns = {dict.fromkeys(names, "varchar")}, force_not_null = {names}, hive_partitioning = false,
                delim = {literal(self.dialect.delimiter)}, quote = '{quote}', escape = '{quote}', new_line = '{ends}',
                compression = '{"gzip" if compressed else "none"}')"""
        )
        raw = self.raw(duck, "raw")
        return replace(raw, lines=count - self.skipped, careful=lambda: self.by_lines(duck, Progress(disable=True)))

    def _lines_of_plain(self, progress: Progress) -> tuple[int, str] | None:
        """Returns the number of lines, and how they end; None if some may be split in several ways."""
        delimiter, lines, carriages = re.escape(self.dialect.delimiter.encode()), 0, 0
        usual = b'[^\r\n"' + delimiter + b"]"
        stray, ends_empty = (
            re.compile(b'"(?<=' + usual + b'")(?=' + usual + b')|\\\\"'), re.compile(b"(?m)^.*" + delimiter + b"\r?$")
        )  # fmt: skip
        for first, block in line_blocks(self.file, progress):
            if b'"' in block and self.dialect.quotes and stray.search(block):
                return None
            # DuckDB takes one more field for none if it is empty.
            may_end_empty = any(self.dialect.delimiter.encode() + end in block for end in (b"\n", b"\r"))
            found = ends_empty.findall(block) if may_end_empty else []
            ends = (line.decode("utf-8", "replace").rstrip("\r") for line in found)
            if any(len(_fields(line, self.dialect)) != len(self.header) for line in ends):
                return None
            self._note_quotes(first, block)
            lines, carriages = lines + block.count(b"\n"), carriages + block.count(b"\r")
            if carriages not in (0, lines) or block.count(b"\r\n") != block.count(b"\r"):
                return None
        return lines, "\\r\\n" if carriages else "\\n"

    def _note_quotes(self, first: int, block: bytes) -> None:
        if self.dialect == _Dialect("\t", False) and b'"' in block:
            starts = [found.start() for found in _BETWEEN_TABS.finditer(block)]
            self.quoted += [first + block.count(b"\n", 0, at) for at in starts[:1]] + [0] * (len(starts) - 1)

    def by_lines(self, duck: Duck, progress: Progress) -> str:
        """Reads what csv reads into a table, and returns its name."""
        self.quoted, names = [], [f"x{place}" for place in range(len(self.header))]
        columns = ", ".join(f"{name} varchar" for name in ("problem", "written", *names))
        duck.db.execute(f"drop view if exists raw; create or replace table raw_lines (line bigint, {columns})")
        number, texts = 1, self._texts(progress)
        for text in texts:
            if number > 1 and text.count("\n") == len(text):  # blank lines alone
                number += len(text)
                continue
            skipped = self.skipped if number == 1 else 0
            quoted = self.dialect.quotes and '"' in text
            table = None if quoted else self.dialect.alike(text, names, skipped)
            number += skipped
            if table is not None:
                count = len(table)
                append(duck, "raw_lines", table.append_column("line", [np.arange(number, number + count)]))
            else:
                lines = _LINE.findall(text)[skipped:]
                # A row may go on in the next block.
                more = (line for rest in texts for line in _LINE.findall(rest)) if quoted else ()
                for rows in self._tables(number, chain(lines, more), names):
                    append(duck, "raw_lines", rows)
                count = len(lines)
            number += count
        return "raw_lines"

    def _texts(self, progress: Progress) -> Iterator[str]:
        for first, block in line_blocks(self.file, progress):
            self._note_quotes(first, block)
            yield self._unescaped(block.decode("utf-8", "surrogateescape"))

    def _tables(self, first: int, lines: Iterable[str], names: Sequence[str]) -> Iterator[pa.Table]:
        rows, wrong, size = dict[int, list[Any]](), list[tuple[int, str, str]](), 0
        key_places = [self.header.index(name) for name in self.keys]
        for number, fields, error, taken in self.dialect.rows(lines, len(self.header), first):
            if not (fields or error):
                continue
            if not error and len(fields) != len(self.header):
                error = f"has {counted(len(fields), 'field')}, not {len(self.header)}"
            if not error and not all(map(is_encodable, taken)):
                error = "" if all(is_encodable(fields[place]) for place in key_places) else "not UTF-8"
                for place in [] if error else [at for at, of in enumerate(fields) if not is_encodable(of)]:
                    self.rejects.undecodable(self.file.label, self.header[place], number)
                    fields[place] = None  # type: ignore[call-overload]
            if error:
                more = f", with {counted(len(taken) - 1, 'more line')} in its quotes" if len(taken) > 1 else ""
                shown = "".join(taken).rstrip("\r\n").encode("utf-8", "surrogateescape")
                wrong.append((number, error + more, shown.decode("utf-8", "backslashreplace")))
                self.rejects.count_more(len(taken) - 1)
            else:
                rows[number] = fields
            size += sum(map(len, taken))
            if first == 1 + self.skipped and not rows:
                self.rejects.stop_early(self.file.label, wrong)
            if size > BLOCK_BYTES:
                yield from _as_tables(rows, wrong, names)
                rows, wrong, size = {}, [], 0
        yield from _as_tables(rows, wrong, names)

    def _unescaped(self, text: str) -> str:
        """Returns the text with two quotes for each that a backslash escapes, if more lines are rows then."""
        if not self.dialect.quotes or '\\"' not in text:
            return text
        if not self.escapes:
            changed = [line for line in text.split("\n") if _ESCAPED_QUOTE.search(line)]
            before, after = (
                sum(len(_fields(line, self.dialect, strict=True)) == len(self.header) for line in lines)
                for lines in (changed, [_ESCAPED_QUOTE.sub(r'\1""', line) for line in changed])
            )
            if before >= after:
                return text
            self.escapes = True
            self.rejects.say(f"{self.file.label}: quotes within fields are taken for escaped by backslashes")
        return _ESCAPED_QUOTE.sub(r'\1""', text)


def _as_table(numbers: Iterable[int], columns: Iterable[Sequence[Any]], names: Sequence[str]) -> pa.Table:
    fields = {name: pa.array(of, pa.string()) for name, of in zip(names, columns, strict=True)}
    return pa.table({"line": pa.array(numbers, pa.int64()), **fields})


def _as_tables(
    rows: Mapping[int, list[Any]], wrong: list[tuple[int, str, str]], names: Sequence[str]
) -> Iterator[pa.Table]:
    """Yields a table of the rows, and one of the malformed rows, if there are any."""
    if rows:
        yield _as_table(rows, zip(*rows.values(), strict=True), names)
    if wrong:
        yield pa.table(dict(zip(("line", "problem", "written"), map(pa.array, zip(*wrong, strict=True)), strict=True)))


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


def _as_stated(kind: str | None, column: str) -> str:
    """Sequences as lists: their parts are between blanks."""
    if kind not in ("token_seq", "float_seq"):
        return column
    parts = f"string_split_regex(nullif(trim({column}, ' \t'), ''), '\\s+')"
    return parts if kind == "token_seq" else f"[{as_number('part')} for part in {parts}]"


def as_number(column: str) -> str:
    """Returns the expression of a text column as FP32, null for text that is not a number."""
    return f"case when regexp_full_match({column}, '{NUMBER}') then {column}::float end"


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


def swallows_rows(lines: Sequence[str], dialect: _Dialect, width: int, broken: bool) -> bool:
    """Whether the lines from the second on, which CSV takes for the rest of a row with a quoted field, are rows of
    their own: at least half of them have `width` fields, and where the first line has numbers or times they have some,
    too; without these, ids like its ids. If it has nothing of all that, it takes MANY of them, unless the row is
    `broken`, which is not CSV anyway."""
    first = _fields(lines[0], dialect)
    if len(first) < width:
        first = lines[0].rstrip("\r\n").split(dialect.delimiter)
    shapes = {place: shape for place, text in enumerate(first[:width]) if (shape := _shape(text))}
    if "9" in shapes.values():
        shapes = {place: shape for place, shape in shapes.items() if shape == "9"}
    rest = [line for line in lines[1:] if line.strip()]
    alike = 0
    for line in rest:
        row = _fields(line, dialect)
        alike += len(row) == width and all(_shape(row[place]) == shape for place, shape in shapes.items())
    return alike >= (1 if broken or shapes else MANY) and 2 * alike >= len(rest)


def _shape(text: str) -> str:
    """9 for numbers and times, a9 for i8 or user12; empty for other texts."""
    text = text.strip()
    if _SHAPE_OF_NUMBERS.fullmatch(text):
        return "9"
    shape = re.sub(r"[^\W\d_]+", "a", re.sub(r"[0-9]+", "9", text))
    return shape if "9" in shape and '"' not in shape and not re.search(r"\s", shape) else ""


def _fields(line: str, dialect: _Dialect, strict: bool = False) -> list[str]:
    """Of a line by itself; a quote that it leaves open is a part of the text."""
    if not dialect.quotes:
        return dialect.fields(line)
    try:
        return next(csv.reader([line], delimiter=dialect.delimiter, strict=strict), [])
    except csv.Error:
        return [] if strict else line.split(dialect.delimiter)
