from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import PROGRESS, actions, file_of, listed

from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.sources import table
from logitmix.trainer.data.sources.table import ColumnNames, read_actions


def test_csv_tables(tmp_path: Path, rejects: Rejects) -> None:
    content = (
        '\ufeffwhen,"who, really",note,what\r\n5,"a ""b""","two\nlines",x\r\n\r\n'
        "6.0,Ä,,y\r\n7,a\r\nseven,a,,x\r\n8,,,x\r\n9,"
    ).encode() + b"\xff,,x\r\n10,c,,z"
    columns = ColumnNames(user="who, really", item="what", timestamp="when")
    assert actions(read_actions([file_of(tmp_path, content)], columns, rejects, PROGRESS)) == [
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
    read = actions(read_actions([file_of(tmp_path, "\n".join(lines).encode())], ColumnNames(), rejects, PROGRESS))
    assert len(read) >= 50
    assert (rejects.lines, rejects.count) == (40_051, 40_051 - len(read))


def test_rows_over_chunk_borders(tmp_path: Path, rejects: Rejects) -> None:
    count = 2 * table.BLOCK_ROWS + 5
    content = "user,item,timestamp\n" + "".join(f"{row},i,{-row}\n" for row in range(count))
    read = actions(read_actions([file_of(tmp_path, content.encode())], ColumnNames(), rejects, PROGRESS))
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
    made = pa.table({"unused": [[1], [2], [3]], "timestamp": times, "user": users, "item": ["x", "y", "z"]})
    pq.write_table(made, tmp_path / "in.parquet")
    read = actions(read_actions([InputFile(tmp_path / "in.parquet")], ColumnNames(), rejects, PROGRESS))
    assert [(user, time) for user, _, time in read] == expected
    assert (rejects.count, rejects.lines) == (3 - len(expected), 3)
    if rejects.count:
        assert all(name == "in.parquet" and number in "123" for name, number, _, _ in listed(rejects))


def test_parquet_rows_keep_their_numbers_over_batches(tmp_path: Path, rejects: Rejects) -> None:
    users = pa.array(["a"] * table.BLOCK_ROWS + ["", "b"])
    numbers = range(len(users))
    pq.write_table(pa.table({"user": users, "item": numbers, "timestamp": numbers}), tmp_path / "in.parquet")
    read = actions(read_actions([InputFile(tmp_path / "in.parquet")], ColumnNames(), rejects, PROGRESS))
    assert read[-1] == ("b", str(table.BLOCK_ROWS + 1), table.BLOCK_ROWS + 1)
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
    made = pa.table({"user": ["a"], "item": ["x"], "timestamp": [1]} | {column: values})
    pq.write_table(made, tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=rf"^in\.parquet: {message}"):
        actions(read_actions([InputFile(tmp_path / "in.parquet")], ColumnNames(), rejects, PROGRESS))


def test_without_a_time_column_the_order_counts_over_all_parts(tmp_path: Path, rejects: Rejects) -> None:
    pq.write_table(pa.table({"user": [1, 1], "item": [5, 6]}), tmp_path / "a.parquet")
    parts = [InputFile(tmp_path / "a.parquet"), file_of(tmp_path, b"item,user\n7,1\n8,1\n", "b.csv")]
    assert actions(read_actions(parts, ColumnNames(timestamp=""), rejects, PROGRESS)) == [
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
        actions(read_actions([file], ColumnNames(), rejects, PROGRESS))
    with pytest.raises(ValueError, match=r"no column 'timestamp'; .* --timestamp-column; for the order .*column \"\""):
        actions(read_actions([file], ColumnNames(item="movie"), rejects, PROGRESS))


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path, rejects: Rejects) -> None:
    pq.write_table(pa.table({"user": range(9), "item": range(9), "timestamp": range(9)}), tmp_path / "in.parquet")
    file = file_of(tmp_path, (tmp_path / "in.parquet").read_bytes()[:-20], "in.parquet")
    with pytest.raises(ValueError, match=r"in\.parquet: no readable Parquet"):
        actions(read_actions([file], ColumnNames(), rejects, PROGRESS))
