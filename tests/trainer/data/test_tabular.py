"""Arrow reads what it can of CSV; the csv module says what is right."""

import csv
import io
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reading import PROGRESS, file_of, listed
from rich.console import Console

from logitmix.common.mappings import counted
from logitmix.trainer.data import tabular
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.tabular import CsvOptions, read_blocks

Row = tuple[int, list[str], str]


def keys(label: str, header: list[str]) -> list[str]:
    return header[:1]


def rejects_in(folder: str) -> Rejects:
    return Rejects(Path(folder, "rejects.tsv"), 1.0, Console(quiet=True))


def rows_of(content: bytes, delimiter: str = "") -> tuple[list[str], list[Row], list[list[str]], int, int]:
    """Header; line, values and text of each row; the rejects by line; how many, and of how many lines."""
    with tempfile.TemporaryDirectory() as folder, closing(rejects_in(folder)) as rejects:
        read: list[Row] = []
        header: list[str] = []
        for block in read_blocks(file_of(Path(folder), content), keys, rejects, PROGRESS, CsvOptions(delimiter)):
            header = list(block.others)
            columns = [column.to_pylist() for column in block.columns.values()]
            for row, number in enumerate(block.numbers):
                read.append((int(number), [column[row] for column in columns], block.text(row)))
        wrong = listed(rejects) if rejects.count else []
        return header, read, sorted(wrong), rejects.count, rejects.lines


def expected(content: bytes, delimiter: str) -> tuple[list[Row], list[list[str]], int, int]:
    """By the csv module over the whole text, as the specification has it."""
    text = content.decode("utf-8-sig", errors="surrogateescape")
    left = list(io.StringIO(text, newline=""))
    header, number = None, 1
    read: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, closing(rejects_in(folder)) as rejects:
        while left:
            reader = csv.reader(left, delimiter=delimiter, strict=True)
            row, reason = [], ""
            try:
                row = next(reader)
            except csv.Error as error:
                reason = f"not CSV ({error})"
            lines, number = left[: reader.line_num], number + reader.line_num
            place, more = number - len(lines), len(lines) - 1
            left = left[len(lines) :]
            if header is None:
                header = row or None
                continue
            if more and tabular.swallows_rows(lines, delimiter, len(header), len(row) != len(header)):
                row, reason = [], f"a quote opens that would swallow {more} more lines, rows among them"
                left, number = [*lines[1:], *left], number - more
                lines, more = lines[:1], 0
            if not row and not reason:
                continue
            rejects.lines += 1
            if len(row) != len(header):
                rejects.lines += more
                rejects.count += more
                reason = reason or f"has {counted(len(row), 'field')}, not {len(header)}"
                reason += f", with {more} more line{'' if more == 1 else 's'} in its quotes" if more else ""
                rejects.add("in.txt", place, reason, "".join(lines))
            elif not encodable(row[0]):
                rejects.add("in.txt", place, "not UTF-8", delimiter.join(row))
            else:
                values: list[Any] = [value if encodable(value) else None for value in row]
                read.append((place, values, delimiter.join(row)))
        return read, sorted(listed(rejects)) if rejects.count else [], rejects.count, rejects.lines


def encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


ROWS = [b'\n1,2,"3\n', b',"q, ""r""\n s",', b"\n1,2,3\n", b'\n1,"2",3\r\n4,5\n6,7,8\n']
ENDS = [b"\n", b"\r\n", b"\r", b"\n\n"]
PARTS = [b'"', b'""', b",", b";", b"a", b"bc", b" ", b"\t", b"\0", b"\xff", b"\xc3", b"x" * 30, "é\ufeff".encode()]
pieces = st.sampled_from([*ROWS, *ENDS, *PARTS, "\ufeff".encode()])
texts = st.lists(pieces, max_size=25).map(b"".join)


@given(texts, st.sampled_from([",", ";"]), st.integers(1, 40))
@example(b'1,2,3\n4,"5\n6",7\n', ",", 9)
def test_every_text_is_read_as_the_csv_module_reads_it(body: bytes, delimiter: str, block: int) -> None:
    content = delimiter.join(["user", "b", "c"]).encode() + b"\n" + body
    with mock.patch.object(tabular, "BLOCK_BYTES", block):
        header, *found = rows_of(content, delimiter)
    assert header == ["b", "c"]
    assert tuple(found) == expected(content, delimiter)


@given(
    st.lists(st.lists(st.text('ab,;"\n é', max_size=5), min_size=2, max_size=4), max_size=30),
    st.integers(64, 200),
    st.sampled_from(["\n", "\r\n"]),
)
def test_well_formed_text_needs_no_csv_module(rows: list[list[str]], block: int, end: str) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerows([["user", "b", "c"], *rows])
    content = text.getvalue().encode()
    with (
        mock.patch.object(tabular, "BLOCK_BYTES", block),
        mock.patch.object(tabular._CsvReader, "_read_line_by_line", side_effect=AssertionError),
        mock.patch.object(tabular, "swallows_rows", return_value=False),
    ):
        _, *found = rows_of(content, ",")
        assert tuple(found) == expected(content, ",")


@pytest.mark.parametrize("length", [csv.field_size_limit(), csv.field_size_limit() + 1])
@pytest.mark.parametrize("row", ["a,{},c", "a,{}"])
def test_fields_of_any_length(length: int, row: str) -> None:
    content = f"user,b,c\n1,2,3\n{row.format('x' * length)}\n4,5,6\n".encode()
    _, *found = rows_of(content, ",")
    assert tuple(found) == expected(content, ",")
    assert len(found[0]) == (3 if row.endswith("c") and length == csv.field_size_limit() else 2)


def test_only_the_block_with_a_stray_quote_is_read_line_by_line(tmp_path: Path, rejects: Rejects) -> None:
    lines = ["user,b,c", *["1,2,3"] * 3000, '1,5" nail,3', *["1,2,3"] * 3000]
    file = file_of(tmp_path, "\n".join(lines).encode())
    by_line, reader = "_read_line_by_line", tabular._CsvReader
    with (
        mock.patch.object(tabular, "BLOCK_BYTES", 2000),
        mock.patch.object(reader, by_line, autospec=True, side_effect=reader._read_line_by_line) as slow,
    ):
        read = [row for block in read_blocks(file, keys, rejects, PROGRESS) for row in block.columns["b"].to_pylist()]
    assert read == ["2"] * 3000 + ['5" nail'] + ["2"] * 3000
    assert slow.call_count == 1


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_delimiter_is_told_from_the_header(delimiter: str, mark: bytes, tmp_path: Path, rejects: Rejects) -> None:
    """The one that gives the columns which are needed; a title of its own may hold any other, and more often."""
    title = "a,b;c|d\te,f;g|h\ti,j;k|l\tm,n;o|p\t" if delimiter != "\t" else "a,b;c|d"
    header = delimiter.join(["item", f'"{title}"' if delimiter != "\t" else title, "user"])
    content = mark + f"{header}\r\nx{delimiter}1{delimiter}u\r\n".encode()

    def needed(label: str, header: list[str]) -> list[str]:
        if "user" not in header:
            raise ValueError("no user")
        return ["user", "item"]

    blocks = list(read_blocks(file_of(tmp_path, content), needed, rejects, PROGRESS))
    assert [column.to_pylist() for column in map(blocks[-1].columns.get, blocks[-1].keys)] == [["u"], ["x"]]
    assert rejects.count == 0


def test_columns_of_one_name_are_refused(tmp_path: Path, rejects: Rejects) -> None:
    file = file_of(tmp_path, b"user,,b,,b\n1,2,3,4,5\n")
    with pytest.raises(ValueError, match=r"^in\.txt: has two columns named 'b'; rename one$"):
        list(read_blocks(file, keys, rejects, PROGRESS))
