"""Delimited text: CSV with or without a header, and the text formats of public datasets.

Python finds where rows begin and end, DuckDB splits them into fields. Most lines are rows. Where fields may be in
quotes, a line that is no row by itself is read by Python's csv module, which may take further lines for it. A quote
that stays open, or that would swallow rows, ends with its line. Between tabs, quotes are text. Lines end in LF, CRLF or
CR.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from logitmix.common.mappings import counted
from logitmix.trainer.data.engine import Duck
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.rejects import ENOUGH_TO_JUDGE, Rejects
from logitmix.trainer.prepare.scan import Keys, Raw, append, check_names, is_named, literal

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 16 << 20
DELIMITERS = ",;\t|"
KINDS_OF_TYPES: Mapping[str, str] = {"token": "id", "float": "number", "token_seq": "ids"}
"""Of the types in a header. A list of floats is a vector only where all are of one length."""
SHOWN = 1000
"""Characters of a malformed row that are listed."""
MANY = 8
"""Rows that a quoted field would have to swallow, if nothing but their number tells."""
NUMBER = r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
LINES = pa.schema({"line": pa.int64(), "problem": pa.string(), "written": pa.string()})

_QUOTED = re.compile(r'".*"')
_DELIMITER_LINE = re.compile(rb'"?sep=(.)"?\n', re.IGNORECASE)
"""The first line by which Excel is told the delimiter."""
_ESCAPED_QUOTE = re.compile(r'(?<!\\)((?:\\\\)*)\\"')
_OPEN, _DIGIT = "(unexpected end of data)", re.compile("[0-9]")
_ATOMIC = re.compile(r"(.+):(token|token_seq|float|float_seq)")


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
    """Yields whole lines, many in one bytes object in which all end in LF, and the number of the first (from 1).
    ValueError for a line of more than LONGEST_LINE bytes."""
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
                block = _with_line_feeds(block)
                yield first, block
                first += block.count(b"\n")
    if carry:
        yield first, _with_line_feeds(carry) + b"\n"


def _with_line_feeds(block: bytes) -> bytes:
    return block.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in block else block


def lines_of(block: bytes) -> tuple[pa.Array, dict[int, str]]:
    """Returns the lines of a block as text, and by their places, which of them are malformed: those not in UTF-8."""
    try:
        return pc.split_pattern(pa.array([block[:-1]], pa.string()), "\n").flatten(), {}
    except pa.ArrowInvalid:
        lines = block[:-1].split(b"\n")
        texts = [line.decode("utf-8", "backslashreplace") for line in lines]
        wrong = [at for at, line in enumerate(lines) if line.decode("utf-8", "replace").encode() != line]
        return pa.array(texts, pa.string()), dict.fromkeys(wrong, "not UTF-8")


def table_of_lines(first: int, lines: pa.Array, problems: Mapping[int, str]) -> pa.Table:
    """Returns the lines that are not blank, as a table like LINES; the first has this number."""
    why = pa.nulls(len(lines), pa.string())
    if problems:
        why = pa.array([problems.get(place) for place in range(len(lines))], pa.string())
    rows = pa.table([pa.array(np.arange(first, first + len(lines))), why, lines], schema=LINES)
    return rows.filter(pc.invert(pc.or_(pc.equal(lines, ""), pc.utf8_is_space(lines))))


def fixed_keys(*names: str) -> Keys:
    """The keys of a format whose columns have these names."""
    return lambda label, header: list(names)


def read_text(
    file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, duck: Duck, layout: Layout = CSV
) -> Raw:
    """Returns all columns of a file, as text. If a header states types, as name:token_seq, sequences are lists, and the
    columns have the kinds. Rows with another number of fields, and those that are not UTF-8, are malformed. ValueError
    if a header is missing."""
    _, start = next(line_blocks(file, Progress(disable=True)), (1, b""))
    start = start[: 1 << 18]
    if not start:
        keys(file.label, list(layout.columns))
        layout = replace(layout, columns=layout.columns or layout.header.split(","), header="", fixed=True)
    skipped = 0
    if excel := _DELIMITER_LINE.match(start):
        layout = replace(layout, delimiter=layout.delimiter or excel[1].decode())
        start, skipped = start[excel.end() :], 1
    text = _Text.begin(file, start.decode("utf-8", "replace").split("\n"), keys, rejects, layout)
    return text.read(duck, progress, text.skipped + skipped)


@dataclass(frozen=True)
class _Dialect:
    """Of delimited text."""

    delimiter: str
    quotes: bool
    """False: they are text."""

    @property
    def field(self) -> str:
        """A regular expression of a field, where they may be in quotes."""
        one = re.escape(self.delimiter)
        return f'(?:"(?:[^"]|"")*"|[^"{one}][^{one}]*|)'

    def fields(self, line: str) -> list[str]:
        """Returns the fields of a line by itself, none if it is blank or its quotes are malformed."""
        if self.delimiter == " ":
            return line.split()
        if not self.quotes or '"' not in line:
            return line.split(self.delimiter) if line.strip() else []
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True))
        except csv.Error:
            return []

    def split(self, text: str) -> str:
        """Returns the expression in SQL of the fields of a column of rows."""
        if self.delimiter == " ":
            return f"string_split_regex(trim({text}, ' \t\v\f'), '[ \t\v\f]+')"
        plain = f"string_split({text}, {literal(self.delimiter)})"
        if not self.quotes:
            return plain
        one = literal(f"({self.field}){re.escape(self.delimiter)}")
        fields = f"regexp_extract_all({text} || {literal(self.delimiter)}, {one}, 1)"
        unquoted = "replace(substring(part, 2, length(part) - 2), '\"\"', '\"')"
        unquoted = f"case when starts_with(part, '\"') then {unquoted} else part end"
        return f"case when contains({text}, '\"') then [{unquoted} for part in {fields}] else {plain} end"


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
    escapes: bool = False
    """Whether quotes within fields are escaped by backslashes in some row."""

    @classmethod
    def begin(cls, file: InputFile, start: list[str], keys: Keys, rejects: Rejects, layout: Layout) -> "_Text":
        """Finds the delimiter and the columns of a file, whose text begins with the lines `start`."""
        label = file.label
        dialects = [
            _Dialect(one, one not in "\t " and len(one) == 1 if layout.quotes is None else layout.quotes)
            for one in ([layout.delimiter] if layout.delimiter else DELIMITERS)
        ]
        if layout.header and start[0] != layout.header:
            raise ValueError(f"{label}: starts with {start[0][:80]!r}, not with the header {layout.header}")
        place, line = next(((at, line) for at, line in enumerate(start, 1) if line.strip()), (0, ""))
        firsts = {one: one.fields(line) for one in dialects}
        if layout.columns:
            dialect = max(dialects, key=lambda one: len(firsts[one]) == len(layout.columns))
            if not layout.fixed:
                _check_unnamed(label, firsts[dialect], layout.columns)
            header, types = ["" if name == "_" else name for name in layout.columns], dict[str, str]()
            skipped = 1 if layout.header else 0
        else:
            dialect = max(dialects, key=lambda one: _fitness(label, keys, firsts[one]))
            header, types = _typed(firsts[dialect])
            skipped = place
            if not dialect.quotes and any(_QUOTED.fullmatch(name) for name in header):
                raise ValueError(
                    f"{label}: its header has names in quotes, which --quote reads; between tabs they are text"
                )
        key_names = _keys_of(label, header, keys)
        check_names(label, [name for name in header if name or not layout.columns], key_names, rejects)
        return cls(file, rejects, dialect, header, key_names, types, skipped)

    def read(self, duck: Duck, progress: Progress, skipped: int) -> Raw:
        """Returns the rows after the lines that are skipped. TooManyRejects if none of the first lines is a row."""
        duck.put("lines", LINES.empty_table())
        width, looked = len(self.header), False
        duck.db.execute(
            f"""create or replace view raw as
            select * replace (case when problem is not null then left(written, {SHOWN}) end as written,
                case when problem is null then fields end as fields) from (
                select * replace (coalesce(problem, case when len(fields) <> {width} then concat('has ', len(fields),
                    ' field', case when len(fields) <> 1 then 's' end, ', not {width}') end) as problem) from (
                    select *, {self.dialect.split("written")} as fields from lines
                ) as split
            ) as checked"""
        )
        for first, lines, problems in self._rows(progress):
            rows = table_of_lines(first, lines, problems)
            append(duck, "lines", rows.filter(pc.greater(rows["line"], skipped)) if first <= skipped else rows)
            if len(rows) and not looked:
                looked = True
                query = f"select line, problem, written from raw order by line limit {ENOUGH_TO_JUDGE}"
                self.rejects.stop_early(self.file.label, duck.db.execute(query).fetchall())
        if self.dialect == _Dialect("\t", False):
            self._say_quotes(duck)
        named = {
            name: _as_stated(self.types.get(name), f"fields[{place}]")
            for place, name in enumerate(self.header, 1)
            if name in self.keys or is_named(name)
        }
        kinds = {name: KINDS_OF_TYPES[kind] for name, kind in self.types.items() if kind in KINDS_OF_TYPES}
        return Raw(self.file.label, duck, "raw", named, self.keys, kinds)

    def _say_quotes(self, duck: Duck) -> None:
        quoted = "regexp_matches(written, '(^|\t)\"[^\t]*\"(\t|$)')"
        count, line = duck.row(f"select count(*), min(line) from lines where {quoted}")
        if count:
            self.rejects.say(
                f"{self.file.label}: fields between tabs keep their quotes in {counted(count, 'line')}, such as line "
                f"{line}; --quote reads them as CSV"
            )

    def _rows(self, progress: Progress) -> Iterator[tuple[int, pa.Array, dict[int, str]]]:
        """Yields the number of the first of many lines, these lines, and by their places, why some are malformed. A row
        of several lines is in the place of its first one, and the others are blank."""
        one = self.dialect.field
        row, number, open_row = f"^{one}(?:{re.escape(self.dialect.delimiter)}{one})*$", 1, b""
        for _, more in chain(line_blocks(self.file, progress), [(0, b"")]):
            block = open_row + more
            if block.count(b"\n") == len(block):  # blank lines
                number, open_row = number + len(block), b""
                continue
            open_row = b""
            lines, problems = lines_of(block)
            if self.dialect.quotes and b'"' in block:
                odd = pc.or_(pc.invert(pc.match_substring_regex(lines, row)), pc.match_substring(lines, '\\"'))
                places = np.flatnonzero(odd.to_numpy(zero_copy_only=False)).tolist()
                if places:
                    texts = lines.to_pylist()
                    end = self._join(texts, places, problems, not more or len(block) > LONGEST_LINE)
                    lines = pa.array(texts[:end], pa.string())
                    open_row = b"".join(line + b"\n" for line in block[:-1].split(b"\n")[end:])
            yield number, lines, {place: why for place, why in problems.items() if place < len(lines)}
            number += len(lines)

    def _join(self, lines: list[str], places: list[int], problems: dict[int, str], complete: bool) -> int:
        """Joins the rows of several lines, which begin at some of the places, and notes why lines are no rows. Returns
        the number of lines that are settled: unless these are the `complete` text, the last row may go on. Where a row
        is whole only then, quotes after backslashes are quotes within fields."""
        free = 0
        for place in places:
            if place < free or place in problems:
                continue
            taken, fits, problem = self._parse(lines, place, escaped=False)
            if not fits and any('\\"' in line for line in taken):
                taken_escaped, fits, _ = self._parse(lines, place, escaped=True)
                taken = taken_escaped if fits else taken
                if fits and not self.escapes:
                    self.escapes = True
                    self.rejects.say(f"{self.file.label}: quotes within fields are taken for escaped by backslashes")
            if fits:
                free = place + len(taken)
                lines[place:free] = ["\n".join(taken), *[""] * (len(taken) - 1)]
            elif _OPEN in problem and not complete:
                return place
            elif len(taken) > 1:
                problems[place] = "a quote opens that would swallow further lines"
            elif problem:
                problems[place] = problem
        return len(lines)

    def _parse(self, lines: list[str], place: int, escaped: bool) -> tuple[list[str], bool, str]:
        """Returns the lines that the csv module takes for the row that begins at a place, whether it is one, and why it
        is not CSV."""
        taken = list[str]()

        def more() -> Iterator[str]:
            for at in range(place, len(lines)):
                taken.append(_ESCAPED_QUOTE.sub(r'\1""', lines[at]) if escaped else lines[at])
                yield taken[-1] + "\n"

        try:
            fields = next(csv.reader(more(), delimiter=self.dialect.delimiter, strict=True))
        except csv.Error as error:
            return taken, False, f"not CSV ({error})"
        return taken, len(fields) == len(self.header) and not swallows_rows(taken, self.dialect, len(fields)), ""


def swallows_rows(lines: Sequence[str], dialect: _Dialect, width: int) -> bool:
    """Returns whether the lines from the second on, which CSV takes for the rest of a row with a quoted field, are rows
    of their own: at least half of them have `width` fields, with digits wherever the first line has some; if it has
    none, MANY of them."""
    first = lines[0].split(dialect.delimiter)[:width]
    places = [place for place, text in enumerate(first) if _DIGIT.search(text) and '"' not in text]
    rest = [dialect.fields(line) or line.split(dialect.delimiter) for line in lines[1:] if line.strip()]
    alike = sum(len(row) == width and all(_DIGIT.search(row[place]) for place in places) for row in rest)
    return alike >= (1 if places else MANY) and 2 * alike >= len(rest)


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
