"""Ids of any type are text where they are exact; other rows are listed."""

import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading import PROGRESS, actions_of, file_of, listed, parquet_of, prepared

from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.sources.table import read_side

UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([12.0, -0.0, 2.0**53 - 1]), ["12", "0", "9007199254740991"]),
        (pa.array([2.0**53, 1.5, float("nan"), float("inf"), None, 1e16, 3.0]), ["3"]),
        (pa.array([2**24 - 1, 2**24, 1.5], pa.float32()), ["16777215"]),
        (pa.array([7, 1.5], pa.float16()), ["7"]),
        (pa.array([Decimal(12), Decimal(-3), None], pa.decimal128(18, 0)), ["12", "-3"]),
        (pa.array([Decimal("12.00"), Decimal("12.50")], pa.decimal128(18, 2)), ["12"]),
        (pa.array([Decimal(10**30)], pa.decimal128(38, 0)), [str(10**30)]),
        (pa.array([b"u1", "ü".encode(), b"\xff", None, b""], pa.binary()), ["u1", "ü"]),
        (pa.array([b"u1"], pa.large_binary()), ["u1"]),
        (pa.array([b"u1", b"u2"], pa.binary(2)), ["u1", "u2"]),
        (pa.array([b"u1", b"u2"], pa.binary()).dictionary_encode(), ["u1", "u2"]),
        (pa.array([UUID.bytes], pa.uuid()), [str(UUID)]),
        (pa.array([True, False, None]), ["true", "false"]),
        (pa.array([3, 5, 3]).dictionary_encode(), ["3", "5", "3"]),
        (pa.array([1, 2**64 - 1], pa.uint64()), ["1", str(2**64 - 1)]),
    ],
)
def test_types_of_ids(column: pa.Array, expected: list[str], tmp_path: Path, rejects: Rejects) -> None:
    rows = range(len(column))
    for name in ("user", "item"):
        table = {"user": pa.array([f"u{row}" for row in rows]), "item": pa.array(rows), "timestamp": pa.array(rows)}
        read = actions_of(parquet_of(tmp_path, table | {name: column}), rejects)
        assert [action[("user", "item").index(name)] for action in read] == expected
    side = parquet_of(tmp_path, {"item": column, "size": pa.array(rows)}, "side.parquet")
    found = read_side(str(side.path), "--items", "item", rejects, PROGRESS)
    assert found.ids.to_pylist() == expected and len(found.columns["size"]) == len(expected)
    assert rejects.count == 3 * (len(column) - len(expected))


def test_what_is_not_exact_is_named(tmp_path: Path, rejects: Rejects) -> None:
    file = parquet_of(tmp_path, {"user": [1.5, None, 2.0], "item": [1, 2, 3], "timestamp": [1, 2, 3]})
    assert len(actions_of(file, rejects)) == 1
    assert [(line, reason) for _, line, reason, _ in listed(rejects)] == [
        ("1", "the user 1.5 is not a whole number that is exact"),
        ("2", "the user is empty"),
    ]


def test_ids_that_stand_for_none_are_said(tmp_path: Path) -> None:
    rows = "".join(
        f"{'null' if n % 4 == 0 else 0 if n % 4 == 1 else n},{'nan' if n < 1 else n},{n}\n" for n in range(100)
    )
    file = file_of(tmp_path, f"user,item,timestamp\n{rows}".encode())
    found = [line for line in prepared(file)[1].splitlines() if " leaves them out" in line]
    assert found == [
        'column user: null is the id of 25 actions, as if they had none; --where "user != null" leaves them out',
        'column item: nan is the id of 1 action, as if they had none; --where "item != nan" leaves them out',
    ]
    where = ("user != null", "item != nan")
    assert len(prepared(file, where=where)[0].items_flat) == 75


def test_times_of_a_dictionary(tmp_path: Path, rejects: Rejects) -> None:
    times = pa.array(["1970-01-02", "5"]).dictionary_encode()
    read = actions_of(parquet_of(tmp_path, {"user": ["u", "v"], "item": ["a", "b"], "timestamp": times}), rejects)
    assert [time for _, _, time in read] == [86_400, 5]


def of_parts(tmp_path: Path, parts: list[str], **options: Any) -> Dataset:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, items in enumerate(parts):
        rows = "".join(f"u,{item},{row}\n" for row, item in enumerate(items.split()))
        (folder / f"{number}.csv").write_text(f"user,item,timestamp\n{rows}")
    return prepared(folder, keep_duplicates=True, **options)[0]


def test_whole_numbers_with_a_zero_are_those_without(tmp_path: Path) -> None:
    """As pandas writes a column of integers in which one is missing."""
    (tmp_path / "items.csv").write_text("item,size\n3.0,1\n12.0,2\n")
    dataset = of_parts(tmp_path, ["12.0 3.0", "3 12"], items=tmp_path / "items.csv")
    assert dataset.raw_ids() == ["3", "12"] and dataset.items_flat.tolist() == [1, 0, 0, 1]
    assert dataset.item_features["size"].values.tolist() == [1, 2]


def test_texts_with_a_zero_stay(tmp_path: Path) -> None:
    assert of_parts(tmp_path, ["1.0 1 v1.0"]).raw_ids() == ["1", "1.0", "v1.0"]
