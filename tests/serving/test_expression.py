"""Conditions on the columns of items."""

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from small_models import small_columns

from logitmix.serving import expression
from logitmix.serving.columns import Column
from logitmix.serving.expression import Filters
from logitmix.trainer.export.columns import column_of

ROWS = 203
OPERATORS = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
Row = dict[str, Any]


def columns_of(table: dict[str, list[Any]]) -> dict[str, Column]:
    return {name: column_of(name, pa.array(values)) for name, values in table.items()}


def holding(text: str, table: dict[str, list[Any]]) -> list[bool]:
    rows = len(next(iter(table.values())))
    return Filters(columns_of(table), rows).allowed(text).mask.tolist()


def made(draw: random.Random, depth: int = 0) -> tuple[str, Callable[[Row], bool | None]]:
    """An expression, and what it says of a row in SQL: true, false, or None for unknown."""
    form = draw.choice(["and", "or", "not", "(", "number", "text", "in", "null"] if depth < 4 else ["number", "text"])
    if form in ("and", "or"):
        (one, f), (other, g) = made(draw, depth + 1), made(draw, depth + 1)
        decided = form == "or"

        def joined(row: Row) -> bool | None:
            both = f(row), g(row)
            return decided if decided in both else None if None in both else not decided

        return f"({one}) {form.upper()} ({other})", joined
    if form in ("not", "("):
        text, f = made(draw, depth + 1)
        opposite = {True: False, False: True, None: None}
        return (f"not ({text})", lambda row: opposite[f(row)]) if form == "not" else (f"({text})", f)
    name = draw.choice(["price", "in_stock"]) if form == "number" else "category"
    if form == "null":
        no = draw.random() < 0.5
        return f"{name} is {'not ' * no}null", lambda row: (row[name] is None) != no
    if form == "in":
        values = draw.sample(["a", "b b", "c's", "none such"], 2)
        quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        no = draw.random() < 0.5
        text = f"category {'not ' * no}in ({quoted})"
        return text, lambda row: None if row["category"] is None else (row["category"] in values) != no
    sign = draw.choice(list(OPERATORS) if form == "number" else ["=", "!="])
    value: Any = draw.choice([0, 1, 17]) if form == "number" else draw.choice(["a", "b b", "c's"])
    text = f'{name} {sign} "{value}"' if form == "text" else f"{name}{sign}{value}"
    return text, lambda row: None if row[name] is None else OPERATORS[sign](row[name], value)


def test_expressions_hold_where_brute_force_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expression, "_CHUNK", 64)
    draw, table = random.Random(3), small_columns(ROWS)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    filters = Filters(columns_of(table), ROWS)
    for _ in range(200):
        text, holds = made(draw)
        found = filters.allowed(text)
        np.testing.assert_array_equal(found.mask, [holds(row) is True for row in rows], err_msg=text)
        assert found.count == found.mask.sum()
        for start, count in ((0, ROWS), (8, 56), (8, ROWS - 8), (3, 50), (0, 7)):
            np.testing.assert_array_equal(
                found.part(start, count), np.packbits(found.mask[start : start + count], bitorder="little")
            )


def test_or_binds_less_than_and_and_that_less_than_not() -> None:
    table = {"a": [0, 0, 1, 1], "day": ["2024-01-02", "2024-03-01", None, "2025-01-01"]}
    assert holding("a = 1 or a = 0 and day < 2024-02-01", table) == [True, False, True, True]
    assert holding("not a = 1 and a = 0", table) == [True, True, False, False]
    assert holding("not day >= 2024-02-01", table) == [True, False, False, False]
    assert holding("day <> '2024-03-01 00:00' and a==0 or a in (TRUE)", table) == [True, False, True, True]


@pytest.mark.parametrize(
    ("values", "kind", "equal", "many"),
    [
        (pa.array([4.1, None, float("nan")], pa.float32()), "number", "4.1", 1),
        (pa.array(["$ 1,200", "", None, "1200.00"]), "number", "1200", 2),
        (pa.array(["01067", "8001", "1067"]), "text", "01067", 1),
        (pa.array([2**53 + 1, 2**53]), "text", str(2**53 + 1), 1),
        (pa.array(["2024-01-31T12:00:00.5Z", None]), "time", "'2024-01-31 13:00:00.5+01:00'", 1),
        (pa.array([1_706_702_400_500_000, None], pa.timestamp("us")), "time", "1706702400.5", 1),
        (pa.array(["«é»\n", None, "\\"]).dictionary_encode(), "text", "'«é»\n'", 1),
        (pa.array([None, None]), "text", "x", 0),
    ],
)  # fmt: skip
def test_columns_are_numbers_times_or_texts(values: pa.Array, kind: str, equal: str, many: int) -> None:
    column = column_of("it", values)
    assert column.kind == kind and column.problem() is None
    filters = Filters({"it": column}, len(values))
    assert filters.allowed(f"it = {equal}").count == many
    missing = filters.allowed("it is null").count
    assert filters.allowed(f"it != {equal}").count == len(values) - missing - many


def test_values_change() -> None:
    columns = columns_of({"price": [1.5, None], "kind": ["b", None], "since": ["2024-01-31", None]})
    given = {"price": [" 7 ", ""], "kind": ["a", "b"], "since": [None, "2024-02-01T00:00"]}
    now = {
        name: column.taken(np.arange(4)).changed([3, 0], [column.value(of) for of in given[name]])
        for name, column in columns.items()
    }
    filters = Filters(now, 4)
    assert filters.allowed("price = 7 and kind = a").mask.tolist() == [False, False, False, True]
    assert filters.allowed("kind = b and since > 2024-01-31").mask.tolist() == [True, False, False, False]
    assert filters.allowed("price is null").mask.tolist() == [True, True, True, False]
    assert Filters(columns, 2).allowed("kind = b").mask.tolist() == [True, False]
    for name, value in (("price", "much"), ("price", float("inf")), ("price", [1]), ("since", "x"), ("kind", 1.5)):
        with pytest.raises(ValueError, match=r"^is .*; it must be"):
            columns[name].value(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at character 1: a column is expected"),
        ("prise < 5", r"at character 1: no column 'prise' \(did you mean price\?\); there are: price, kind, day$"),
        ("(price < 40,5) or price > 50", "at character 12: only values after in have commas .*; decimals have a point"),
        ("price in (5", "at character 12: '\\)' is expected"),
        ("price = 'x", "at character 8: a quote is not closed"),
        ("price 5", "at character 7: one of = != < <= > >=, in, or is null is expected"),
        ("price < cheap", "at character 9: price is 'cheap'; it must be a number"),
        ("day > soon", "at character 7: day is 'soon'; it must be a date such as 2024-01-31"),
        ("kind < 5", "at character 8: kind is compared by <, but the column is text"),
        ("not " * 60 + "price = 5", "there are more than 50 conditions within each other"),
        (" or ".join(["price = 5"] * 201), r"at character 2601: there are more than 200 conditions"),
    ],
)
def test_mistakes_are_named_with_their_place(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        holding(text, {"price": [1.0], "kind": ["x"], "day": ["2024-01-31"]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", [pa.array([[1, 2]]), pa.array([b"x"]), pa.array([float("inf")])])
def test_columns_that_cannot_be_compared_are_refused(values: pa.Array) -> None:
    with pytest.raises(ValueError, match=r"^column it: "):
        column_of("it", values)
