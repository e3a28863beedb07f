"""Conditions on the columns of a table of items."""

import operator
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from logitmix.trainer.data.expression import matches

ROWS = 200
OPERATORS = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def table(draw: random.Random) -> dict[str, list[Any]]:
    return {
        "price": [draw.choice([None, 0.5, 3, 17, 40]) for _ in range(ROWS)],
        "in_stock": [draw.choice([0, 1]) for _ in range(ROWS)],
        "kind": [draw.choice([None, "a", "b b", "c's"]) for _ in range(ROWS)],
    }


def made(draw: random.Random, depth: int = 0) -> tuple[str, Any]:
    """An expression, and what it says of a row."""
    form = draw.choice(["and", "or", "not", "(", "number", "text", "in", "null"] if depth < 4 else ["number", "text"])
    name = draw.choice(["price", "in_stock", "kind"])
    if form in ("and", "or"):
        (one, f), (other, g) = made(draw, depth + 1), made(draw, depth + 1)
        joined = (lambda row: f(row) and g(row)) if form == "and" else (lambda row: f(row) or g(row))
        return f"({one}) {form.upper()} ({other})", joined
    if form in ("not", "("):
        text, f = made(draw, depth + 1)
        return (f"not ({text})", lambda row: not f(row)) if form == "not" else (f"({text})", f)
    if form == "null":
        return f"{name} is null", lambda row: row[name] is None
    if form == "in":
        values = draw.sample(["a", "b b", "c's"], 2)
        quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        no = draw.random() < 0.5
        return f"kind {'not ' * no}in ({quoted})", lambda row: (row["kind"] in values) != no
    sign = draw.choice(list(OPERATORS) if form == "number" else ["=", "!="])
    value: Any = draw.choice([0, 1, 17]) if form == "number" else draw.choice(["a", "b b", "c's"])
    name = draw.choice(["price", "in_stock"]) if form == "number" else "kind"
    text = f'{name} {sign} "{value}"' if form == "text" else f"{name}{sign}{value}"
    # Of what is missing, nothing but != holds.
    return text, lambda row: sign == "!=" if row[name] is None else OPERATORS[sign](row[name], value)


def test_expressions_hold_where_brute_force_says_so() -> None:
    draw = random.Random(3)
    columns = table(draw)
    arrow = {name: pa.array(values) for name, values in columns.items()}
    arrow["kind"] = arrow["kind"].dictionary_encode()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for _ in range(150):
        text, holds = made(draw)
        np.testing.assert_array_equal(matches(text, arrow, ROWS), [holds(row) for row in rows], err_msg=text)


def test_or_binds_less_than_and_and_that_less_than_not() -> None:
    columns = {"a": pa.array([0, 0, 1, 1]), "day": pa.array(["2024-01-02", "2024-03-01", None, "2025-01-01"])}
    assert matches("a = 1 or a = 0 and day < 2024-02-01", columns, 4).tolist() == [True, False, True, True]
    assert matches("not a = 1 and a = 0", columns, 4).tolist() == [True, True, False, False]
    assert matches("day is not null and not day >= 2024-02-01", columns, 4).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at character 1: a column is expected"),
        ("prise < 5", r"at character 1: no column 'prise' \(did you mean price\?\); there are: price"),
        ("price < 5 price", "at character 11: and, or, or the end is expected"),
        ("price < 5 and", "at character 14: a column is expected"),
        ("price in (5", "at character 12: '\\)' is expected"),
        ("price = 'x", "at character 8: a quote is not closed"),
        ("price is 5", "at character 10: 'null' is expected"),
        ("price 5", "at character 7: one of = != < <= > >=, in, or is null is expected"),
        ("price < cheap", "at character 9: .*'cheap' is neither a number nor a date"),
        ("not " * 60 + "price = 5", "there are more than 50 conditions within each other"),
        ("__import__('os')", "no column '__import__'"),
    ],
)
def test_mistakes_are_named_with_their_place(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        matches(text, {"price": pa.array([1.0])}, 1)
