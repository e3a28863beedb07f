from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitmix.trainer.data.engine import scratch
from logitmix.trainer.data.times import (
    UNITS,
    Clock,
    moments,
    unit_of,
)

NOON = 1714564800  # 2024-05-01T12:00Z


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2024-05-01", NOON - 12 * 3600),
        ("2024-05-01T12:00", NOON),
        ("2024-05-01 12:00:07", NOON + 7),
        ("2024-05-01T12:00:07.999999999Z", NOON + 7),
        ("2024-05-01 14:00:00+02:00", NOON),
        ("2024-05-01T06:30:00.5-0530", NOON),
        ("1969-12-31T23:59:59.5", -1),
        ("0001-01-01", -62135596800),
        ("2024-02-30", None),
        ("2024-05-01T24:00", None),
        ("2024-05-01T12:00:00+25:00", None),
        ("2024-05-01T12", NOON),
        ("2024-05-01T12:00:00 UTC", NOON),
        ("2024-05-01 14:00:00 +0200", NOON),
        ("2024-05-01 12:00:07,125", NOON + 7),
        ("20240501T120007Z", NOON + 7),
        ("20240501 1200", NOON),
        ("20240501", None),
        ("2024-5-1", NOON - 12 * 3600),
        ("05/31/2024 12:00:00 AM", NOON + 29.5 * 86400),
        ("5/31/2024, 12:00:07 pm", NOON + 30 * 86400 + 7),
        ("5/31/2024 13:00 PM", None),
        ("31/5/2024", NOON + 29.5 * 86400),
        ("01.05.2024 12:00", NOON),
        ("2024-05-01 12:00:07.5.5", None),
        (" 2024-05-01", None),
        ("", None),
    ],
)
def test_texts(text: str | None, seconds: int | None) -> None:
    around = pa.array([text, "1970-01-01", text, "1970-01-02T00:00Z"], pa.string())
    assert moments(around)[0].to_pylist() == [seconds, 0, seconds, 86_400]


zones = st.none() | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.lists(st.datetimes(datetime(1000, 1, 1), datetime(9000, 1, 1), timezones=zones)), st.sampled_from("T "))
def test_what_python_writes_is_read(times: list[datetime], separator: str) -> None:
    texts = pa.array([time.isoformat(separator) for time in times], pa.string())
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    expected = [(time if time.tzinfo else time.replace(tzinfo=UTC)) - epoch for time in times]
    as_arrow = pa.array([gap // timedelta(microseconds=1) for gap in expected], pa.timestamp("us"))
    for values in (texts, as_arrow):
        seconds, nanoseconds = moments(values)
        assert seconds.to_pylist() == [gap // timedelta(seconds=1) for gap in expected]
        assert nanoseconds.tolist() == [1000 * gap.microseconds for gap in expected]


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("2024-05-01T12:00:07.000000001Z", 1),
        ("2024-05-01T12:00:07.1234567899+01", 123456789),
        ("1969-12-31T23:59:59.5", 500_000_000),
        ("12.0", 0),
    ],
)
def test_fractions_of_texts(text: str | None, nanoseconds: int) -> None:
    assert moments(pa.array([text, "1970-01-01T00:00:00.5"]))[1].tolist() == [nanoseconds, 500_000_000]


def test_fractions_of_times_are_those_after_the_second_before() -> None:
    for unit, ticks in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        times = pa.array([0, None, -1, ticks + 1, 5 * ticks - 1], pa.timestamp(unit))
        one = 10**9 // ticks % 10**9
        assert moments(times)[1].tolist() == [0, 0, -one % 10**9, one, -one % 10**9]
    assert moments(pa.array([1, None], pa.date32()))[0].to_pylist() == [86_400, None]
    assert moments(pa.array([86_400_000, None], pa.date64()))[0].to_pylist() == [86_400, None]


def read(*columns: pa.Array, form: str = "") -> tuple[list[int | None], list[int], Clock]:
    """Times and fractions of parts of one column, null where there is none."""
    clock, duck, parts = Clock(form), scratch(), []
    for part, column in enumerate(columns):
        duck.put(f"part_{part}", pa.table({"value": column}))
        of_part = ", ".join(f"{of} as {name}" for name, of in clock.columns(duck, f"part_{part}", "value").items())
        parts.append(
            f"select {part} as file, rowid as line, 0 as place, {of_part}, value::varchar as written from part_{part}"
        )
    duck.make("rows", f"select *, null as problem, null::bigint as day_first from ({' union all '.join(parts)})")
    clock.read_written(duck)
    clock.note_examples(duck, "file || '.csv:' || (line + 2)", "100 * file + line")
    found = duck.table(f"select {clock.settled(duck)} as time, fraction from rows as r order by file, line")
    return found["time"].to_pylist(), found["fraction"].to_pylist(), clock


DAY = 86_400
MAY = NOON - NOON % DAY  # 2024-05-01


def test_days_and_months_are_told_apart_by_all_parts() -> None:
    early = pa.array(["01/05/2024", "02/05/2024 12:00"])
    for later, times in (("13/05/2024", [MAY, MAY + 1.5 * DAY, MAY + 12 * DAY]), ("05/13/2024", None)):
        values, _, clock = read(early, pa.array([later]))
        if times is None:
            times = [seconds("2024-01-05"), seconds("2024-02-05") + DAY / 2, MAY + 12 * DAY]
        assert values == times
        (said,) = clock.remarks()
        assert said == f"dates are read as {'day/month' if later[:2] == '13' else 'month/day'}/year (1.csv:2: {later})"
        assert clock.unit == "s"
    for other, problem in (
        (["13/05/2024", "05/13/2024"], r"some dates have the day first \(1.csv:2: 13/05/2024\), others the month \(1"),
        (["01/02/2024"], r"cannot be told which .* is the month \(0.csv:2: 01/05/2024\); say it with --time-format"),
    ):
        with pytest.raises(ValueError, match=problem):
            read(early, pa.array(other))


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def test_a_form_reads_what_is_not_usual() -> None:
    texts = pa.array(["Wed May 01 14:00:07.25 +0200 2024", "2024-05-01", None])
    assert read(texts, form="%a %b %d %H:%M:%S.%f %z %Y")[:2] == ([NOON + 7, None, None], [250_000_000, 0, 0])


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["1.25", "-1.25", "3", "1e2"]),
        pa.array(["1.250000000", "-1.25", "3.", "1.0E+2"]).dictionary_encode(),
        pa.array([1.25, -1.25, 3.0, 100.0]),
        pa.array([1.25, -1.25, 3.0, 100.0], pa.float32()),
        pa.array([Decimal("1.25"), Decimal("-1.25"), Decimal(3), Decimal(100)], pa.decimal128(10, 2)),
    ],
)
def test_fractions_of_numbers_order_them(column: pa.Array) -> None:
    values, fractions, clock = read(column)
    assert (values, fractions) == ([1, -2, 3, 100], [250_000_000, 750_000_000, 0, 0])
    assert clock.unit is None


def test_floats_that_round_times_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^is of type float, which rounds such times; store it as double or integer$"):
        read(pa.array([1.6e9], pa.float32()))


def unit_of_all(values: np.ndarray) -> str:
    scratch().put("rows", pa.table({"time": values, "row": np.arange(len(values))}))
    return unit_of(scratch(), "time", "rows", "'row ' || row || ': '")


@pytest.mark.parametrize("ticks", [1, 10**3, 10**6, 10**9])
def test_units_are_told_from_the_magnitude(ticks: int) -> None:
    unit = {ticks: unit for unit, ticks in UNITS.items()}[ticks]
    years = np.array([seconds(f"{year}-06-01") for year in range(1981, 2099)]) * ticks
    assert unit_of_all(years) == unit
    assert unit_of_all(np.append(years, [0, -1])) == unit  # as where a time is missing


@pytest.mark.parametrize(
    "values", [np.arange(1, 1000), np.random.default_rng(0).integers(0, 2**32, 1000), np.array([], np.int64)]
)
def test_counters_and_other_integers_have_no_unit(values: np.ndarray) -> None:
    assert unit_of_all(values) == ""


def test_two_units_are_refused_with_a_line_of_each() -> None:
    values = np.full(1000, NOON)
    values[7] *= 1000
    with pytest.raises(
        ValueError,
        match=rf"^some times are in seconds \(row 0: {NOON}\) and others in milliseconds \(row 7: {NOON}000\);",
    ):
        unit_of_all(values)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([20240501, 20240502], [MAY, MAY + DAY]),
        ([2024050112, 2024050113], [NOON, NOON + 3600]),
        ([20240501120007, 20240501120000], [NOON + 7, NOON]),
        ([20240501, 20240532], None),  # no day
        (list(range(20240501, 20240540)), None),
        ([20240501, 5], None),
        ([1714521600, 1714521601], None),
    ],
)
def test_dates_that_are_written_as_numbers(numbers: list[int], expected: list[int] | None) -> None:
    for column in (pa.array(numbers), pa.array([str(number) for number in numbers])):
        values, _, clock = read(column)
        assert values == (expected or numbers)
        assert list(clock.remarks()) == (
            [f"the times are read as dates, not as numbers (0.csv:2: {numbers[0]})"] if expected else []
        )
