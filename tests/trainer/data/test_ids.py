"""Ids of any type are text where they are exact; other rows are listed."""

import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import PROGRESS, actions, listed
from rich.console import Console

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.prepare import prepare
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.sources.table import ColumnNames, read_actions, read_side

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
        (pa.array([Decimal(10**30)], pa.decimal256(40, 0)), [str(10**30)]),
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
        pq.write_table(pa.table(table | {name: column}), tmp_path / "in.parquet")
        read = actions(read_actions([InputFile(tmp_path / "in.parquet")], ColumnNames(), rejects, PROGRESS))
        assert [action[("user", "item").index(name)] for action in read] == expected
    side = pa.table({"item": column, "size": pa.array(rows)})
    pq.write_table(side, tmp_path / "side.parquet")
    found = read_side(str(tmp_path / "side.parquet"), "--items", "item", rejects, PROGRESS)
    assert found.ids.to_pylist() == expected and len(found.columns["size"]) == len(expected)
    assert rejects.count == 3 * (len(column) - len(expected))


def test_what_is_not_exact_is_named(tmp_path: Path, rejects: Rejects) -> None:
    pq.write_table(
        pa.table({"user": [1.5, None, 2.0], "item": [1, 2, 3], "timestamp": [1, 2, 3]}), tmp_path / "in.parquet"
    )
    assert len(actions(read_actions([InputFile(tmp_path / "in.parquet")], ColumnNames(), rejects, PROGRESS))) == 1
    assert [(line, reason) for _, line, reason, _ in listed(rejects)] == [
        ("1", "the user 1.5 is not a whole number that is exact"),
        ("2", "the user is empty"),
    ]


def test_times_of_a_dictionary(tmp_path: Path, rejects: Rejects) -> None:
    times = pa.array(["1970-01-02", "5"]).dictionary_encode()
    pq.write_table(pa.table({"user": ["u", "v"], "item": ["a", "b"], "timestamp": times}), tmp_path / "in.parquet")
    read = actions(read_actions([InputFile(tmp_path / "in.parquet")], ColumnNames(), rejects, PROGRESS))
    assert [time for _, _, time in read] == [86_400, 5]


def prepared(tmp_path: Path, parts: list[str], **options: Any) -> tuple[list[str], np.ndarray]:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, items in enumerate(parts):
        rows = "".join(f"u,{item},{row}\n" for row, item in enumerate(items.split()))
        (folder / f"{number}.csv").write_text(f"user,item,timestamp\n{rows}")
    given = {"min_user_actions": 1, "keep_duplicates": True} | options
    prepare(PrepareOptions("table", str(folder), str(tmp_path / "out"), **given), Console(quiet=True))
    dataset = load_dataset(tmp_path / "out")
    return dataset.raw_ids(), dataset.items_flat


def test_whole_numbers_with_a_zero_are_those_without(tmp_path: Path) -> None:
    """As pandas writes a column of integers in which one is missing."""
    (tmp_path / "items.csv").write_text("item,size\n3.0,1\n12.0,2\n")
    ids, items = prepared(tmp_path, ["12.0 3.0", "3 12"], items=str(tmp_path / "items.csv"))
    assert ids == ["3", "12"] and items.tolist() == [1, 0, 0, 1]
    sizes = load_dataset(tmp_path / "out").item_features["size"].values
    assert sizes.tolist() == [1, 2]


def test_texts_with_a_zero_stay(tmp_path: Path) -> None:
    assert prepared(tmp_path, ["1.0 1 v1.0"])[0] == ["1", "1.0", "v1.0"]
