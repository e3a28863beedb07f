"""Columns to filter by: of which kind they are, and which items are new."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from small_data import forget_digests

from logitmix.modules.schema import Schema
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.export.columns import WEEK, column_of, filter_columns


@pytest.mark.parametrize(
    ("values", "kind", "shown"),
    [
        (["10115", "80331", None], "number", [10115, 80331, None]),
        (["01067", "10115"], "text", ["01067", "10115"]),
        (["-01.5", "2"], "text", ["-01.5", "2"]),
        (["0", "0.5", "-0.25"], "number", [0, 0.5, -0.25]),
        (["2024-01-31", ""], "time", ["2024-01-31", None]),
        (["2024-01-31", "soon"], "text", ["2024-01-31", "soon"]),
        ([2**53, 1], "text", [str(2**53), "1"]),
        ([2**53 - 1, 1], "number", [2**53 - 1, 1]),
    ],
)
def test_texts_are_numbers_or_times_where_all_of_them_are_and_none_is_a_code(
    values: list[Any], kind: str, shown: list[Any]
) -> None:
    column = column_of("it", pa.array(values))
    assert (column.kind, [column.shown(item) for item in range(len(values))]) == (kind, shown)


def test_an_item_is_new_for_a_week_and_no_longer(tmp_path: Path) -> None:
    """To the second, by its first action; an item without actions is new."""
    last = 2_000_000
    first = [last - WEEK - 1, last - WEEK, last - WEEK + 1, last]
    items = np.array([0, 1, 2, 3, 0])
    times = np.array([*first, last])
    offsets = np.arange(len(items) + 1)
    names = pa.array([f"item-{item}" for item in range(5)])
    contents = DatasetContents(offsets, items, times, names, schema=Schema.of_ids(5))
    write_dataset(tmp_path / "data", contents, "demo")
    description = json.loads((forget_digests(tmp_path / "data") / "dataset.json").read_text())
    (tmp_path / "data/dataset.json").write_text(json.dumps(description | {"times": {"unit": "s"}}))
    columns = filter_columns(["new", "actions"], load_dataset(tmp_path / "data"), "", print)
    assert columns["new"].values.tolist() == [0, 0, 1, 1, 1]
    assert columns["actions"].values.tolist() == [2, 1, 1, 1, 0]
