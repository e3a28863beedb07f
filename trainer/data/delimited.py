"""Delimited text with one action per line, as `ActionBlock`s; and small side files, row by row.

Lines end in LF or CRLF and have at most LONGEST_LINE bytes; blank lines are skipped. Only one block of a file is in
memory at a time. A timestamp is a whole number in the unit of the source (`12.0` is whole). Fields between commas must
have no quotes: ids would silently contain them.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from logitmix.common.mappings import counted
from logitmix.trainer.data.arrow import as_numbers, as_numpy, is_utf8
from logitmix.trainer.data.blocks import TableBlock
from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.raw import ActionBlock, accept
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.times import Clock

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 64 << 20
LARGEST_SIDE_FILE = 32 << 20
"""Bytes, decompressed: its rows are Python objects, 30 times as large. Those of MovieLens have up to 4 MiB."""


@dataclass(frozen=True)
class Layout:
    """A text format with one action per line."""

    delimiter: str
    """Empty: any run of white space."""
    fields: int
    user: int = 0
    item: int = 1
    timestamp: int | None = None
    """Field with the time; None takes the line number."""
    header: str = ""
    """Required first line."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Fields with a number about the action, by the name of its column."""


def read_delimited(file: InputFile, layout: Layout, rejects: Rejects, progress: Progress) -> Iterator[ActionBlock]:
    """The actions of a text file. ValueError if a header is missing or the file is not text."""
    for first, raw in line_blocks(file, progress):
        numbers = np.arange(first, first + len(raw))
        lines, numbers = _decode(file.label, raw, numbers, rejects)
        lines = pc.utf8_rtrim(lines, characters="\r\n")
        if first == 1 and layout.header:
            _check_header(file.label, lines, layout.header)
            lines, numbers = lines[1:], numbers[1:]
        yield _split_lines(file.label, lines, numbers, layout, rejects)


def read_rows(
    file: InputFile,
    delimiter: str,
    fields: int,
    encoding: str,
    rejects: Rejects,
    progress: Progress,
    header: bool = False,
) -> Iterator[list[str]]:
    """The rows of a small side file (titles, users), one a line, with CSV quoting if the delimiter is a comma.
    ValueError if the file has more than LARGEST_SIDE_FILE bytes."""
    read = 0
    for first, lines in line_blocks(file, progress):
        read += lines.nbytes
        if read > LARGEST_SIDE_FILE:
            raise ValueError(f"{file.label}: is larger than {LARGEST_SIDE_FILE >> 20} MiB; is it the right file?")
        for number, raw in enumerate(lines.to_pylist(), start=first):
            line = raw.rstrip(b"\r\n")
            if not line or (header and number == 1):
                continue
            rejects.lines += 1
            try:
                text = line.decode(encoding)
                row = next(csv.reader([text], strict=True)) if delimiter == "," else text.split(delimiter)
            except UnicodeDecodeError as error:
                rejects.add(file.label, number, f"not {encoding} ({error.reason})", line)
            except csv.Error as error:
                carriage = "\r" in text and "new-line" in str(error)
                rejects.add(file.label, number, f"not CSV ({'a carriage return' if carriage else error})", line)
            else:
                if len(row) == fields:
                    yield row
                else:
                    rejects.add(file.label, number, f"has {counted(len(row), 'field')}, not {fields}", text)


def line_blocks(file: InputFile, progress: Progress) -> Iterator[tuple[int, pa.BinaryArray]]:
    """Lines with their line ends, many in one bytes object, and the number of the first (from 1)."""
    first, carry = 1, b""
    with file.open(progress) as stream:
        while block := stream.read(BLOCK_BYTES):
            block = carry + block
            end = block.rfind(b"\n") + 1
            block, carry = block[:end], block[end:]
            if block:
                lines = _slice_lines(file.label, first, block)
                yield first, lines
                first += len(lines)
            require_short(file.label, first, len(carry))
    if carry:
        yield first, _slice_lines(file.label, first, carry + b"\n")


def require_short(label: str, line: int, length: int) -> None:
    """ValueError if a line has more bytes than are allowed."""
    if length > LONGEST_LINE:
        limit = f"{LONGEST_LINE >> 20} MiB" if LONGEST_LINE >= 1 << 20 else f"{LONGEST_LINE} bytes"
        raise ValueError(f"{label}:{line}: a line of more than {limit}; is this a text file?")


def _slice_lines(label: str, first: int, block: bytes) -> pa.BinaryArray:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    lengths = np.diff(offsets)
    longest = int(lengths.argmax())
    # The line end does not count.
    require_short(label, first + longest, int(lengths[longest]) - 1)
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(block)])


def _decode(
    label: str, raw: pa.BinaryArray, numbers: np.ndarray, rejects: Rejects
) -> tuple[pa.StringArray, np.ndarray]:
    try:
        return raw.cast(pa.string()), numbers
    except pa.ArrowInvalid:
        valid = np.array([is_utf8(line) for line in raw.to_pylist()])
    rejects.lines += int(np.sum(~valid))
    for row in np.flatnonzero(~valid):
        rejects.add(label, int(numbers[row]), "not UTF-8", raw[row].as_py())
    return raw.filter(pa.array(valid)).cast(pa.string()), numbers[valid]


def _check_header(label: str, lines: pa.StringArray, header: str) -> None:
    found = lines[0].as_py() if len(lines) else ""
    if found != header:
        raise ValueError(f"{label}: starts with {found[:80]!r}, not with the header {header}")


def _split_lines(
    label: str, lines: pa.StringArray, numbers: np.ndarray, layout: Layout, rejects: Rejects
) -> ActionBlock:
    filled = as_numpy(pc.not_equal(pc.utf8_trim_whitespace(lines), ""))
    lines, numbers = lines.filter(pa.array(filled)), numbers[filled]
    rejects.lines += len(lines)
    if layout.delimiter:
        split = pc.split_pattern(lines, layout.delimiter)
    else:
        split = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(lines))
    widths = as_numpy(pc.list_value_length(split))
    whole = widths == layout.fields
    for row in np.flatnonzero(~whole):
        text = lines[row].as_py()
        inside = " (lines must end in LF or CRLF, and it has a CR inside)" if "\r" in text else ""
        rejects.add(
            label, int(numbers[row]), f"has {counted(int(widths[row]), 'field')}, not {layout.fields}{inside}", text
        )
    if layout.delimiter == ",":
        quoted = whole & as_numpy(pc.match_substring(lines, '"'))
        for row in np.flatnonzero(quoted):
            rejects.add(label, int(numbers[row]), "has quotes; read it as a table", lines[row].as_py())
        whole &= ~quoted
    kept = pa.array(whole)
    lines, numbers, flat = lines.filter(kept), numbers[whole], split.filter(kept).flatten()

    def column(position: int) -> pa.StringArray:
        return flat.take(pa.array(np.arange(position, len(flat), layout.fields)))

    columns = {"user": column(layout.user), "item": column(layout.item)}
    columns |= {name: as_numbers(column(place)) for name, place in layout.numbers.items()}
    times = None
    if layout.timestamp is not None:
        times = Clock(dates=False).read(label, numbers, column(layout.timestamp))
    rows = TableBlock(label, numbers, ["user", "item"], columns, lambda row: lines[row].as_py())
    return accept(rows, times, rejects)
