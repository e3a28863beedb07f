"""Actions that were delivered more than once."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading import decoded, file_of, parquet_of, prepared, summary

from logitmix.trainer.data.dataset import Dataset

HEADER = "user,item,timestamp"


def of_rows(folder: Path, rows: list[str], name: str = "table", **options: Any) -> tuple[Dataset, str]:
    """The dataset of these lines, what prepare says, and the summary."""
    source = file_of(folder, "".join(f"{row}\n" for row in rows).encode(), "in.csv")
    dataset, said = prepared(source, name, **{"min_user_actions": 5} | options)
    return dataset, said + summary(dataset)


def actions(dataset: Dataset) -> list[list[tuple[str, int]]]:
    raw = dataset.raw_ids()
    pairs = [(raw[item], int(time)) for item, time in zip(dataset.items_flat, dataset.timestamps_flat, strict=True)]
    return [pairs[first:last] for first, last in zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True)]


ONCE = [f"u{user},i{(7 * user + at) % 30},{at // 3}" for user in (3, 1, 2) for at in range(7)]
"""Three items at one time, so that equal rows are not neighbors."""


@pytest.mark.parametrize("times", [2, 3])
def test_exact_duplicates_are_left_out_and_counted(times: int, tmp_path: Path) -> None:
    once, _ = of_rows(tmp_path, [HEADER, *ONCE])
    for rows in ([row for row in ONCE for _ in range(times)], ONCE * times):
        dataset, said = of_rows(tmp_path, [HEADER, *rows])
        assert actions(dataset) == actions(once)
        assert f"removed   {21 * (times - 1)} actions equal to an earlier one in everything (--keep-dup" in said
        assert dataset.repeated_targets == once.repeated_targets == {"validation": 0.0, "test": 0.0}
    filters = json.loads(dataset.description())["filters"]
    assert filters["keep_duplicates"] is False
    assert filters["removed"]["duplicates"] == {"users": 0, "items": 0, "actions": 21 * (times - 1)}


def test_they_can_be_kept(tmp_path: Path) -> None:
    dataset, said = of_rows(tmp_path, [HEADER, *(row for row in ONCE for _ in "ab")], keep_duplicates=True)
    assert len(dataset.items_flat) == 42 and "removed" not in said
    assert json.loads(dataset.description())["filters"]["keep_duplicates"] is True
    # Evaluation does not leave the history out then, although validation alone would have it so.
    assert dataset.repeated_targets == {"validation": 0.0, "test": 1.0}


def test_users_are_counted_without_them(tmp_path: Path) -> None:
    few = [f"few,i{at},{at}" for at in range(4)]
    dataset, _ = of_rows(tmp_path, [HEADER, *ONCE, *few, *few])
    assert dataset.num_users == 3
    problem = r"\(there were 1 users with 4 actions, without 4 exact duplicates\); lower"
    with pytest.raises(ValueError, match=problem):
        of_rows(tmp_path, [HEADER, *few, *few])


def test_items_are_counted_without_them(tmp_path: Path) -> None:
    often = [f"u{user},often,9" for user in (1, 2, 3)]
    rows = [HEADER, *ONCE, *often, *["u1,few,9"] * 3]
    for keep, items in ((False, ["often"]), (True, ["few", "often"])):
        options = {"min_user_actions": 1, "min_item_actions": 2, "keep_duplicates": keep}
        dataset, _ = of_rows(tmp_path, rows, **options)
        assert dataset.raw_ids() == items


def test_actions_that_differ_in_a_column_are_kept_and_counted(tmp_path: Path) -> None:
    rows = [f"u,i{at},{at}" for at in range(5)]
    lines = [f"{HEADER},event,price", *(f"{row},view,1.5" for row in rows), f"{rows[2]},cart,", f"{rows[2]},view,1.5"]
    dataset, said = of_rows(tmp_path, [*lines, f"{rows[2]},cart,"])
    assert decoded(dataset, "event")["event"] == ["view", "view", "view", "cart", "view", "view"]
    assert "removed   2 actions equal to an earlier one in everything" in said


def test_fractions_of_seconds_tell_actions_apart(tmp_path: Path) -> None:
    at = "2024-01-01T00:00:00"
    rows = [f"u,i,{at}.25", f"u,i,{at}.5", f"u,i,{at}.25", f"u,i,{at}.50", f"u,i,{at}"]
    dataset, said = of_rows(tmp_path, [HEADER, *rows], min_user_actions=1)
    assert len(dataset.items_flat) == 3 and "removed   2 actions equal" in said


@pytest.mark.parametrize(("name", "options"), [("table", {"timestamp_column": ""}), ("sequences", {})])
def test_where_the_order_of_rows_is_the_time_there_are_none(name: str, options: dict[str, str], tmp_path: Path) -> None:
    rows = ["user,item", *["u,a"] * 3, *["u,b"] * 3] if name == "table" else [*["u a"] * 3, *["u b"] * 3]
    dataset, said = of_rows(tmp_path, rows, name, **options)
    assert [[item for item, _ in user] for user in actions(dataset)] == [list("aaabbb")] and "removed" not in said


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("ml-1m", [f"1::{item}::4::{item}" for item in range(6)]),
        ("amazon-books", [f"A1,B{item},4.0,{item}" for item in range(6)]),
    ],
)
def test_every_source_is_rid_of_them(name: str, lines: list[str], tmp_path: Path) -> None:
    dataset, said = of_rows(tmp_path, lines * 2, name)
    assert len(dataset.items_flat) == 6 and "removed   6 actions equal" in said


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.list_(pa.string()), [["a"], ["a"], ["b"], None]),
    (pa.float64(), [float("nan"), float("nan"), 1.0, None]),
    (pa.bool_(), [True, True, False, None]),
    (pa.binary(), [b"\xff", b"\xff", b"x", None]),
    (pa.timestamp("us"), [1, 1, 2, None]),
    (pa.struct({"a": pa.int64()}), [{"a": 1}, {"a": 1}, {"a": 2}, None]),
    (pa.null(), [None, None, None, None]),
]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=lambda of: str(of)[:20])
def test_columns_of_any_type_are_compared(kind: pa.DataType, values: list[Any], tmp_path: Path) -> None:
    columns = {"user": ["u"] * 4, "item": ["i"] * 4, "timestamp": [1] * 4, "of": pa.array(values, kind)}
    dataset, _ = prepared(parquet_of(tmp_path, columns))
    assert len(dataset.items_flat) == (1 if pa.types.is_null(kind) else 3)
