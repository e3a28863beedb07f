"""Columns that number or name the rows are no features, and that is said."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from reading import file_of, prepared, summary

from logitmix.trainer.data.engine import scratch
from logitmix.trainer.prepare.row_numbers import name_each_row, numbering, numbers_a_table

RNG = np.random.default_rng(3)
PRICES = RNG.permutation(10_000)[:60]


def texts(values: Any) -> pa.Array:
    return pa.array([str(value) for value in values])


@pytest.mark.parametrize(
    ("name", "values", "numbers"),
    [
        ("Unnamed: 0", range(3), True),
        ("Unnamed: 0.1", [0, 2, 5], True),
        ("level_0", range(40), True),
        ("index", [7, 9, 10], True),
        ("index", [*range(30), *range(30)], True),
        ("index", [3, 1, 2], False),
        ("index", ["a", "b"], False),
        ("n", range(40), True),
        ("n", range(1, 41), True),
        ("n", [*range(40), *range(40)], True),
        ("n", range(3), False),
        ("n", range(5, 45), False),
        ("n", PRICES, False),
        ("n", [0.5 + n for n in range(40)], False),
    ],
)
def test_numbers_of_rows(name: str, values: Any, numbers: bool) -> None:
    columns = [texts(values)] if isinstance(next(iter(values)), str) else [texts(values), pa.array(values)]
    for column in columns:
        assert numbers_a_table(name, column) is numbers
        places = {"file": 0 * np.arange(len(column)), "line": np.arange(len(column)), "place": np.zeros(len(column))}
        scratch().put("rows", pa.table({**places, "c_x": column}))
        assert numbering(scratch(), {name: "c_x"}, ()) == [name] * numbers


@pytest.mark.parametrize(
    ("name", "values", "names"),
    [
        ("transactionid", PRICES, True),
        ("event_id", PRICES, True),
        ("orderNo", PRICES, True),
        ("userId", PRICES, True),
        ("bid", PRICES, False),
        ("paid", PRICES, False),
        ("price", PRICES, False),
        ("price", PRICES + 0.99, False),
        ("seen_id", [1, 2] * 30, False),
    ],
)
def test_names_of_rows(name: str, values: Any, names: bool) -> None:
    assert name_each_row(name, texts(values)) is names
    assert name_each_row(name, pa.array(values)) is names


def test_items_are_named_by_the_names_of_columns_alone() -> None:
    """The price of a catalog that is sorted by it is a number like any other."""
    assert not name_each_row("price", pa.array(sorted(PRICES))) and name_each_row("sku_id", pa.array(sorted(PRICES)))
    assert not name_each_row("flags", pa.array([[1], [2]])) and not name_each_row("flag_id", pa.array([True, False]))


def test_prepare_says_so(tmp_path: Path) -> None:
    rows = [(f"u{user}", f"i{(7 * user + at) % 30}", at, user + at / 8) for user in range(6) for at in range(8)]
    lines = [
        f"{row},{user},{item},{at},{1000 + 7 * row % 997},{price}" for row, (user, item, at, price) in enumerate(rows)
    ]
    # Delivered twice, and then written by pandas.
    lines += [f"{48 + row},{line.partition(',')[2]}" for row, line in enumerate(lines)]
    file = file_of(tmp_path, "\n".join(["Unnamed: 0,user,item,timestamp,event_id,price", *lines]).encode())
    rows_of_items = "".join(f"{n},i{n},b{n % 3}\n" for n in range(30))
    items = file_of(tmp_path, f"Unnamed: 0,item,brand\n{rows_of_items}".encode(), "items.csv").path
    dataset, said = prepared(file, items=items)
    columns = "item_Unnamed_0, event_Unnamed_0, event_id (nearly each row has its own value)"
    assert said == f"not used, unless --schema FILE states a kind: {columns}\n"
    assert "removed   48 actions equal to an earlier one" in summary(dataset)
    assert [feature.name for feature in dataset.schema.features] == ["item", "brand", "price"]
    schema = file_of(tmp_path, b'[features.event_Unnamed_0]\nkind = "number"\n', "schema.toml").path
    assert "event_Unnamed_0" in prepared(file, items=items, schema=schema)[0].event_features


@pytest.mark.parametrize("index", ["", "Unnamed: 0", "__index_level_0__"])
def test_an_index_is_not_the_id_of_a_table(index: str, tmp_path: Path) -> None:
    rows = "".join(f"{user},{at},u{user},{9 - at},{at}\n" for user in range(4) for at in range(8))
    file = file_of(tmp_path, f"{index},again,user,item,timestamp\n{rows}".encode())
    items = "".join(f"{n},{9 - n},b{n % 3}\n" for n in range(8))
    (tmp_path / "items").mkdir()
    for part in ("1.csv", "2.csv"):
        file_of(tmp_path / "items", f"{index},product,brand\n{items}".encode(), part)
    dataset, said = prepared(file, items=tmp_path / "items")
    column = dataset.item_features["brand"]
    assert column.values.tolist() == [1 + (9 - item) % 3 for item in range(2, 10)]
    if index != "Unnamed: 0":
        names = index or "one without a name"
        line = f"columns that are not read, for their names are those of pandas' row numbers: {names}\n"
        assert said.count(line) == 1
