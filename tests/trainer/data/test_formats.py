import gzip
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from rich.progress import Progress

from logitmix.trainer.data import formats
from logitmix.trainer.data.files import InputFile, find_files
from logitmix.trainer.data.formats import Chunk, Columns, read_amazon, read_delimited, read_rows, read_table
from logitmix.trainer.data.rejects import Rejects, TooManyRejects

Action = tuple[str, str, int]
PROGRESS = Progress(disable=True)


@pytest.fixture
def rejects(tmp_path: Path) -> Iterator[Rejects]:
    made = Rejects(tmp_path / "rejects.tsv", 1.0, Console(quiet=True))
    yield made
    made.close()


def listed(rejects: Rejects) -> list[list[str]]:
    """File, line, reason and text of every reject."""
    rejects.close()
    header, *lines = rejects.path.read_text(encoding="utf-8").split("\n")[:-1]
    assert header == "file\tline\treason\ttext"
    return [line.split("\t") for line in lines]


def actions(chunks: Iterator[Chunk]) -> list[Action]:
    read: list[Action] = []
    for chunk in chunks:
        read += zip(chunk.users.to_pylist(), chunk.items.to_pylist(), chunk.timestamps.tolist(), strict=True)
    return read


def file_of(tmp_path: Path, content: bytes, name: str = "in.txt") -> InputFile:
    (tmp_path / name).write_bytes(content)
    return InputFile(tmp_path / name)


TWO = [("7", "30", 1000000007), ("8", "4", -5)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("layout", "lines", "expected"),
    [
        (formats.RATINGS_DAT, [b"7::30::5::1000000007", b"8::4::1::-5"], TWO),
        (formats.U_DATA, [b"7\t30\t5\t1000000007", b"8\t4\t1\t-5.0"], TWO),
        (formats.RATINGS_CSV, [b"userId,movieId,rating,timestamp", b"7,30,3.5,1000000007", b"8,4,1,-5"], TWO),
        (
            formats.RATINGS_CSV,
            [b"\xef\xbb\xbfuserId,movieId,rating,timestamp", b"7,30,3.5,1000000007", b"8,4,1,-5"],
            TWO,
        ),
        (formats.AMAZON_RATINGS, [b"7,30,5.0,1000000007", b"", b"8,4,1.0,-5"], TWO),
        (formats.SEQUENCES, [b"7 30", b" 8\t 4 ", b"  ", b"7 4"], [("7", "30", 1), ("8", "4", 2), ("7", "4", 4)]),
    ],
)
def test_text_formats(
    layout: formats.Layout,
    lines: list[bytes],
    expected: list[Action],
    end: bytes,
    last: bool,
    tmp_path: Path,
    rejects: Rejects,
) -> None:
    content = end.join(lines) + (end if last else b"")
    assert actions(read_delimited(file_of(tmp_path, content), layout, rejects, PROGRESS)) == expected
    assert (rejects.count, rejects.lines) == (0, len(expected))


def test_lines_over_block_borders_keep_their_numbers(tmp_path: Path, rejects: Rejects) -> None:
    lines = [f"{number} {'x' * (number % 400)}i" for number in range(1, 50_001)]
    lines[25_000] = "one-field"
    content = "\n".join(lines).encode()
    assert len(content) > 2 * formats.BLOCK_BYTES
    read = actions(read_delimited(file_of(tmp_path, content), formats.SEQUENCES, rejects, PROGRESS))
    assert [user for user, _, _ in read] == [str(number) for number in range(1, 50_001) if number != 25_001]
    assert all(int(user) == line for user, _, line in read)
    assert listed(rejects) == [["in.txt", "25001", "has 1 fields, not 2", "one-field"]]


def test_malformed_lines_are_named(tmp_path: Path, rejects: Rejects) -> None:
    lines = [
        (b"1::2::3::4", None),
        (b"1::2::3", "has 3 fields, not 4"),
        (b"::2::3::4", "the user is empty"),
        (b"1::::3::4", "the item is empty"),
        (b"1::2::3::", "the timestamp '' is not a whole number"),
        (b"1::2::3::4.5", "the timestamp '4.5' is not a whole number"),
        (b"1::2::3::0x10", "the timestamp '0x10' is not a whole number"),
        (b"1::2::3::" + b"9" * 19, f"the timestamp '{'9' * 19}' is not a whole number"),
        (b"1::\xff::3::4", "not UTF-8"),
        (b"5::6::7::8", None),
    ]
    file = file_of(tmp_path, b"\r\n".join(line for line, _ in lines))
    assert actions(read_delimited(file, formats.RATINGS_DAT, rejects, PROGRESS)) == [("1", "2", 4), ("5", "6", 8)]
    assert (rejects.count, rejects.lines) == (8, 10)
    found = {int(number): (name, reason, text) for name, number, reason, text in listed(rejects)}
    for number, (line, reason) in enumerate(lines, start=1):
        if reason is not None:
            text = line.decode("utf-8", "backslashreplace").replace("\\", "\\\\")
            assert found[number] == ("in.txt", reason, text)


def test_a_missing_header_is_shown(tmp_path: Path, rejects: Rejects) -> None:
    with pytest.raises(ValueError, match=r"^in\.txt: starts with '1,2,3,4', not with the header userId,"):
        actions(read_delimited(file_of(tmp_path, b"1,2,3,4\n"), formats.RATINGS_CSV, rejects, PROGRESS))


def test_another_format_is_noticed_before_the_end(tmp_path: Path) -> None:
    rejects = Rejects(tmp_path / "rejects.tsv", 0.5, Console(quiet=True))
    file = file_of(tmp_path, (b"1,2,3," + b"4" * 200 + b"\n") * 50_000)
    with pytest.raises(TooManyRejects, match=r"all of the first [\d,]+ lines are malformed; is it of another format"):
        actions(read_delimited(file, formats.U_DATA, rejects, PROGRESS))
    rejects.close()
    assert 1_000 <= rejects.lines < 50_000


REVIEW = {"reviewerID": "A7", "asin": "B1", "unixReviewTime": 12, "reviewText": "line\nend", "overall": 5.0}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_amazon_reviews(pack: Callable[[bytes], bytes], tmp_path: Path, rejects: Rejects) -> None:
    lines = [
        json.dumps(REVIEW),
        json.dumps(REVIEW | {"reviewerID": "Ä", "unixReviewTime": 10}, ensure_ascii=False),
        json.dumps({"asin": "B1", "unixReviewTime": 12}),
        json.dumps(REVIEW | {"unixReviewTime": "12"}),
        json.dumps(REVIEW | {"asin": ""}),
        "{'asin': 'B1'}",
        "[1]",
        "[" * 100_000,
        '{"reviewerID": "\\ud800", "asin": "B1", "unixReviewTime": 1}',
    ]
    content = "\n".join(lines).encode() + b'\n{"asin": "\xff"}\n'
    read = actions(read_amazon(file_of(tmp_path, pack(content)), rejects, PROGRESS))
    assert read == [("A7", "B1", 12), ("Ä", "B1", 10)]
    reasons = {int(number): reason for _, number, reason, _ in listed(rejects)}
    assert reasons == {
        3: "no reviewerID that is text",
        4: "no unixReviewTime that is a whole number",
        5: "the item is empty",
        6: "not JSON in UTF-8",
        7: "not a JSON object",
        8: "JSON nested too deeply",
        9: "not UTF-8",
        10: "not JSON in UTF-8",
    }
    assert rejects.lines == 10


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_amazon_ratings(pack: Callable[[bytes], bytes], tmp_path: Path, rejects: Rejects) -> None:
    content = pack(b"A0000000000MARY,0000000017,1.0,1300000005\nA0000000000JOHN,0000000017,3.0,1300000003\n")
    read = actions(read_amazon(file_of(tmp_path, content), rejects, PROGRESS))
    assert read == [("A0000000000MARY", "0000000017", 1300000005), ("A0000000000JOHN", "0000000017", 1300000003)]


@pytest.mark.parametrize("item", [b"0000000017", b"B0MADEUP17", b"000000017X"])
def test_amazon_ratings_with_the_item_first_are_refused(item: bytes, tmp_path: Path, rejects: Rejects) -> None:
    with pytest.raises(ValueError, match=r"^in\.txt: its lines are item,user,rating,timestamp \(the 2018 files\)"):
        read_amazon(file_of(tmp_path, item + b",A0000000000MARY,1.0,1300000005\n"), rejects, PROGRESS)


def test_csv_tables(tmp_path: Path, rejects: Rejects) -> None:
    content = (
        '\ufeffwhen,"who, really",note,what\r\n5,"a ""b""","two\nlines",x\r\n\r\n'
        "6.0,Ä,,y\r\n7,a\r\nseven,a,,x\r\n8,,,x\r\n9,"
    ).encode() + b"\xff,,x\r\n10,c,,z"
    columns = Columns(user="who, really", item="what", timestamp="when")
    assert actions(read_table([file_of(tmp_path, content)], columns, rejects, PROGRESS)) == [
        ('a "b"', "x", 5),
        ("Ä", "y", 6),
        ("c", "z", 10),
    ]
    assert sorted((int(number), reason) for _, number, reason, _ in listed(rejects)) == [
        (6, "has 2 fields, not 4"),
        (7, "the timestamp 'seven' is not a whole number"),
        (8, "the user is empty"),
        (9, "not UTF-8"),
    ]
    assert rejects.lines == 7


def test_lines_that_a_stray_quote_swallows_all_count(tmp_path: Path, rejects: Rejects) -> None:
    lines = ["user,item,timestamp", *["1,2,3"] * 50, '1,"2,3', *["1,2,3"] * 40_000]
    read = actions(read_table([file_of(tmp_path, "\n".join(lines).encode())], Columns(), rejects, PROGRESS))
    assert len(read) >= 50
    assert (rejects.lines, rejects.count) == (40_051, 40_051 - len(read))


def test_rows_over_chunk_borders(tmp_path: Path, rejects: Rejects) -> None:
    count = 2 * formats.BLOCK_ROWS + 5
    content = "user,item,timestamp\n" + "".join(f"{row},i,{-row}\n" for row in range(count))
    read = actions(read_table([file_of(tmp_path, content.encode())], Columns(), rejects, PROGRESS))
    assert read == [(str(row), "i", -row) for row in range(count)]


@pytest.mark.parametrize(
    ("users", "times", "expected"),
    [
        (pa.array([3, 1, 2]), pa.array([30, 10, 20], pa.int32()), [("3", 30), ("1", 10), ("2", 20)]),
        (pa.array(["c", None, "b"]), pa.array([3.0, 1.0, 2.0]), [("c", 3), ("b", 2)]),
        (pa.array(["c", "", "b"], pa.large_string()), pa.array([3, 1, None]), [("c", 3)]),
        (pa.array(["c", "a", "b"]).dictionary_encode(), pa.array([3.5, float("nan"), 2]), [("b", 2)]),
        (pa.array(["c", "a", "b"]), pa.array(["3", "x", "2"], pa.large_string()), [("c", 3), ("b", 2)]),
        (pa.array(["c", "a", "b"]), pa.array([3, 1, 2], pa.timestamp("ms")), [("c", 3), ("a", 1), ("b", 2)]),
        (pa.array(["c", "a", "b"]), pa.array([3, 1, 2], pa.date32()), [("c", 3), ("a", 1), ("b", 2)]),
    ],
)
def test_parquet_tables(
    users: pa.Array, times: pa.Array, expected: list[tuple[str, int]], tmp_path: Path, rejects: Rejects
) -> None:
    table = pa.table({"unused": [[1], [2], [3]], "timestamp": times, "user": users, "item": ["x", "y", "z"]})
    pq.write_table(table, tmp_path / "in.parquet")
    read = actions(read_table([InputFile(tmp_path / "in.parquet")], Columns(), rejects, PROGRESS))
    assert [(user, time) for user, _, time in read] == expected
    assert (rejects.count, rejects.lines) == (3 - len(expected), 3)
    if rejects.count:
        assert all(name == "in.parquet" and number in "123" for name, number, _, _ in listed(rejects))


def test_parquet_rows_keep_their_numbers_over_batches(tmp_path: Path, rejects: Rejects) -> None:
    users = pa.array(["a"] * formats.BLOCK_ROWS + ["", "b"])
    numbers = range(len(users))
    pq.write_table(pa.table({"user": users, "item": numbers, "timestamp": numbers}), tmp_path / "in.parquet")
    read = actions(read_table([InputFile(tmp_path / "in.parquet")], Columns(), rejects, PROGRESS))
    assert read[-1] == ("b", str(formats.BLOCK_ROWS + 1), formats.BLOCK_ROWS + 1)
    assert listed(rejects) == [["in.parquet", "65537", "the user is empty", ",65536,65536"]]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("user", pa.array([1.0]), "column user is of type double; ids must be integers or text"),
        ("timestamp", pa.array([[1]]), "column timestamp is of type list<.*>; times must be numbers"),
    ],
)
def test_parquet_columns_of_a_wrong_type_are_named(
    column: str, values: pa.Array, message: str, tmp_path: Path, rejects: Rejects
) -> None:
    table = pa.table({"user": ["a"], "item": ["x"], "timestamp": [1]} | {column: values})
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=rf"^in\.parquet: {message}"):
        actions(read_table([InputFile(tmp_path / "in.parquet")], Columns(), rejects, PROGRESS))


def test_without_a_time_column_the_order_counts_over_all_parts(tmp_path: Path, rejects: Rejects) -> None:
    pq.write_table(pa.table({"user": [1, 1], "item": [5, 6]}), tmp_path / "a.parquet")
    parts = [InputFile(tmp_path / "a.parquet"), file_of(tmp_path, b"item,user\n7,1\n8,1\n", "b.csv")]
    assert actions(read_table(parts, Columns(timestamp=""), rejects, PROGRESS)) == [
        ("1", "5", 0),
        ("1", "6", 1),
        ("1", "7", 2),
        ("1", "8", 3),
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_are_not_there_are_named_beside_those_that_are(
    kind: str, tmp_path: Path, rejects: Rejects
) -> None:
    (tmp_path / "in.csv").write_text("user,movie,when\na,x,1\n")
    pq.write_table(pa.table({"user": ["a"], "movie": ["x"], "when": [1]}), tmp_path / "in.parquet")
    file = InputFile(tmp_path / f"in.{kind}")
    with pytest.raises(
        ValueError, match=f"^in.{kind}: no column 'item'; there are: user, movie, when.* --item-column$"
    ):
        actions(read_table([file], Columns(), rejects, PROGRESS))
    with pytest.raises(ValueError, match=r"no column 'timestamp'; .* --timestamp-column; for the order .*column \"\""):
        actions(read_table([file], Columns(item="movie"), rejects, PROGRESS))


def test_side_files_are_read_in_their_encoding(tmp_path: Path, rejects: Rejects) -> None:
    file = file_of(tmp_path, "1::Café, Le (1801)::Drama|Musical\r\n2::short\r\n".encode("latin-1"))
    assert list(read_rows(file, "::", 3, "latin-1", rejects, PROGRESS)) == [["1", "Café, Le (1801)", "Drama|Musical"]]
    assert list(read_rows(file, "::", 3, "utf-8", rejects, PROGRESS)) == []
    assert rejects.lines == 4
    assert [reason for _, _, reason, _ in listed(rejects)][:2] == [
        "has 2 fields, not 3",
        "not utf-8 (invalid continuation byte)",
    ]


def test_truncated_archives_are_one_line(tmp_path: Path, rejects: Rejects) -> None:
    generator = np.random.default_rng(0)
    content = b"".join(b"%d %d\n" % tuple(pair) for pair in generator.integers(0, 10**9, (20_000, 2)))
    file = file_of(tmp_path, gzip.compress(content)[:-2_000], "in.gz")
    with pytest.raises(ValueError, match=r"in\.gz: truncated or damaged \(.*\); fetch it again"):
        actions(read_delimited(file, formats.SEQUENCES, rejects, PROGRESS))
    pq.write_table(pa.table({"user": range(9), "item": range(9), "timestamp": range(9)}), tmp_path / "in.parquet")
    file = file_of(tmp_path, (tmp_path / "in.parquet").read_bytes()[:-20], "in.parquet")
    with pytest.raises(ValueError, match=r"in\.parquet: no readable Parquet"):
        actions(read_table([file], Columns(), rejects, PROGRESS))


def test_names_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ratings.csv").touch()
    with pytest.raises(ValueError, match=r"two files named ratings\.csv; give the folder of one of them"):
        find_files(tmp_path, ("ratings.csv",))


def test_the_bar_is_full_at_the_end_of_each_file(tmp_path: Path, rejects: Rejects) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("first.txt", b"1 2\n")
        archive.writestr("second.txt", b"1 2\n" * 1_000)
    progress = Progress(disable=True)
    for file in (InputFile(tmp_path / "in.zip", "first.txt"), file_of(tmp_path, gzip.compress(b"1 2\n" * 1_000))):
        assert actions(read_delimited(file, formats.SEQUENCES, rejects, progress))
    assert [task.completed for task in progress.tasks] == [
        (tmp_path / name).stat().st_size for name in ("in.zip", "in.txt")
    ]
