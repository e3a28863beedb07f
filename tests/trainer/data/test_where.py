import numpy as np
import pyarrow as pa
import pytest

from logitmix.trainer.data.where import holds

COLUMNS = {
    "user": pa.array(["7", "x", "7.0", "8"]).dictionary_encode(),
    "rating": pa.array([4.1, 4, None, float("nan")], pa.float32()),
    "count": pa.array([1, 2**53, 2**53 + 1, None]),
    "event type": pa.array(["buy", "view", "", None]).dictionary_encode(),
    "day": pa.array(["2024-01-31", "2024-02-01T00:00+01:00", "soon", None]).dictionary_encode(),
    "at": pa.array([1706659200, 1706742000, 5, -5]),
    "stamp": pa.array([1706659200, 1706742000, 5, None], pa.timestamp("s")),
    "paid": pa.array([True, False, None, True]),
    "tags": pa.array([["a"], [], None, ["b"]]),
    "empty": pa.nulls(4),
}


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("user = 7", "02"),
        ("user==7", "02"),
        ("user != 7", "13"),
        ("user = x", "1"),
        ("user>7", "3"),
        ("rating >= 4.1", "0"),
        ("rating = 4.1", "0"),
        ("rating < 5", "01"),
        ("rating != 4", "023"),
        ("  rating<=4  ", "1"),
        ("count = 9007199254740992", "1"),
        ("count != 9007199254740993", "013"),
        ("count >= 2", "12"),
        ("event type = buy", "0"),
        ("event type != buy", "123"),
        ("event type = 'buy'", "0"),
        ('event type = "buy"', "0"),
        ("event type = ", "2"),
        ("day >= 2024-01-31T12:00", "1"),
        ("day = 2024-01-31T00:00Z", "0"),
        ("at >= 2024-01-31", "01"),
        ("stamp > 2024-01-31", "1"),
        ("stamp >= 1706659200", "01"),
        ("paid = true", "03"),
        ("paid != true", "12"),
        ("paid = 1", "03"),
        ("empty = 4", ""),
        ("empty != 4", "0123"),
        ("empty != x", "0123"),
    ],
)
def test_conditions(condition: str, rows: str) -> None:
    assert np.flatnonzero(holds(condition, COLUMNS)).tolist() == [int(row) for row in rows]


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("ratng >= 4", r"no column 'ratng' \(did you mean rating\?\)"),
        ("rating", "it must be a column, one of = != < <= > >=, and a value"),
        ("= 4", "it must be a column, one of = != < <= > >=, and a value"),
        ("rating > high", "'high' is neither a number nor an ISO 8601 date, as > needs"),
        ("tags = a", "values of type list<.*> cannot be compared"),
    ],
)
def test_mistakes_are_named_beside_the_columns(condition: str, problem: str) -> None:
    columns = "user, rating, count, event type, day, at, stamp, paid, tags, empty"
    with pytest.raises(ValueError, match=rf"^--where '{condition}': {problem}; the columns are: {columns}$"):
        holds(condition, COLUMNS)
