import numpy as np
import pyarrow as pa
import pytest

from logitmix.trainer.data.arrow import as_numpy
from logitmix.trainer.data.engine import scratch
from logitmix.trainer.data.where import Condition, of_time

COLUMNS = {
    "user": pa.array(["7", "x", "7.0", "8"]).dictionary_encode(),
    "rating": pa.array([4.1, 4, None, float("nan")], pa.float32()),
    "count": pa.array([1, 2**53, 2**53 + 1, None]),
    "event type": pa.array(["buy", "view", "", None]).dictionary_encode(),
    "day": pa.array(["2024-01-31", "2024-02-01T00:00+01:00", "soon", None]).dictionary_encode(),
    "at": pa.array([1706659200, 1706742000, 1606742000, -5]),
    "ms": pa.array([1706659200000, 1706742000123, None, 1606742000000]),
    "text ms": pa.array(["1706659200000", "1706742000123.5", "x", "1606742000000"]).dictionary_encode(),
    "float": pa.array([1706659200.5, 1706742000.0, float("nan"), 1606742000.0]),
    "paid at": pa.array(["31/01/2024 00:00", "01/02/2024", "2023-12-31", "?"]).dictionary_encode(),
    "stamp": pa.array([1706659200, 1706742000, 5, None], pa.timestamp("s")),
    "paid": pa.array([True, False, None, True]),
    "tags": pa.array([["a"], [], None, ["b"]]),
    "empty": pa.nulls(4),
}


def holds(text: str, columns: dict[str, pa.Array], units: dict[str, str] | None = None) -> np.ndarray:
    """Whether a condition holds for each row; `units`: of a column of times."""
    condition, names = Condition.parse(text, "--where"), list(columns)
    condition.require_column(names)
    if units:
        scratch().put("rows", pa.table(columns))
        expression = of_time(condition, condition.column, units[condition.column], names)
        return as_numpy(scratch().table(f"select {expression} as found from rows")["found"].combine_chunks())
    return condition.fulfilled(columns[condition.column], names)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("user = 7", "02"),
        ("user != 7", "13"),
        ("user = x", "1"),
        ("rating >= 4.1", "0"),
        ("rating = 4.1", "0"),
        ("rating != 4", "023"),
        ("count = 9007199254740992", "1"),
        ("count != 9007199254740993", "013"),
        ("event type = buy", "0"),
        ("event type != buy", "123"),
        ("event type = 'buy'", "0"),
        ('event type = "buy"', "0"),
        ("event type = ", "2"),
        ("day >= 2024-01-31T12:00", "1"),
        ("day = 2024-01-31T00:00Z", "0"),
        ("at >= 2024-01-31", "01"),
        ("ms >= 2024-01-31", "01"),
        ("ms > 2024-01-31T23:00:00.122Z", "1"),
        ("ms > 2024-01-31T23:00:00.123Z", ""),
        ("text ms >= 2024-01-31", "01"),
        ("text ms != 2024-01-31", "123"),
        ("paid at >= 2024-01-31", "01"),
        ("paid at < 2024-01-31 00:00 UTC", "2"),
        ("stamp > 2024-01-31", "1"),
        ("paid = true", "03"),
        ("paid = 1", "03"),
        ("empty = 4", ""),
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
        ("rating > 4,5", "'4,5' is neither a number such as 40.5 nor a date such as 2024-01-31, as > needs"),
        ("count >= 2024-01-31", "its values are no times since 1970, so that it cannot be compared with a date"),
        ("at >= 09/08/2024", r"it cannot be told which .* is the month \(value:1: 09/08/2024\).*"),
        ("tags = a", "values of type list<.*> cannot be compared"),
    ],
)
def test_mistakes_are_named_beside_the_columns(condition: str, problem: str) -> None:
    columns = "user, rating, count, event type, day, at, ms, text ms, float, paid at, stamp, paid, tags, empty"
    with pytest.raises(ValueError, match=rf"^--where '{condition}': {problem}; the columns are: {columns}$"):
        holds(condition, COLUMNS)


def test_dates_need_times_in_a_unit() -> None:
    column, time = {"ms": pa.array([1706659200000, 1706742000123, 1606742000000])}, "ms > 2024-01-31T23:00:00.122Z"
    assert holds(time, column, {"ms": "ms"}).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=f"^--where '{time}': its values are no times since 1970"):
        holds(time, column, {"ms": ""})


def test_columns_of_two_units_are_refused() -> None:
    both = {"at": pa.array([1706659200] * 200 + [1706659200000])}
    problem = r"some times are in seconds \(1706659200\) and others in milliseconds \(1706659200000\)"
    with pytest.raises(ValueError, match=problem):
        holds("at > 2024-01-31", both)
