from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitmix.trainer.data.times import nanoseconds_of_texts, nanoseconds_of_times, seconds_of_texts, seconds_of_times

NOON = 1714564800  # 2024-05-01T12:00Z


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2024-05-01", NOON - 12 * 3600),
        ("2024-05-01T12:00", NOON),
        ("2024-05-01 12:00:07", NOON + 7),
        ("2024-05-01T12:00:07.999999999Z", NOON + 7),
        ("2024-05-01T12:00Z", NOON),
        ("2024-05-01 14:00:00+02:00", NOON),
        ("2024-05-01T06:30:00.5-0530", NOON),
        ("2024-05-01T13:00:00+01", NOON),
        ("1969-12-31T23:59:59.5", -1),
        ("0001-01-01", -62135596800),
        ("2024-02-30", None),
        ("2023-02-29T00:00Z", None),
        ("2024-05-01T24:00", None),
        ("2024-05-01T12:00:00+25:00", None),
        ("2024-05-01T12", None),
        ("2024-05-01T12:00:00 UTC", None),
        ("20240501", None),
        ("2024-5-1", None),
        (" 2024-05-01", None),
        ("2024-05-01\n", None),
        ("1714564800", None),
        ("", None),
        (None, None),
    ],
)
def test_texts(text: str | None, seconds: int | None) -> None:
    around = pa.array([text, "1970-01-01", text, "1970-01-02T00:00Z"], pa.string())
    assert seconds_of_texts(around).to_pylist() == [seconds, 0, seconds, 86_400]
    assert seconds_of_texts(pa.array([text], pa.string())).to_pylist() == [seconds]


zones = st.none() | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.datetimes(datetime(1000, 1, 1), datetime(9000, 1, 1), timezones=zones)), st.sampled_from("T "))
def test_what_python_writes_is_read(times: list[datetime], separator: str) -> None:
    texts = pa.array([time.isoformat(separator) for time in times], pa.string())
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    expected = [(time if time.tzinfo else time.replace(tzinfo=UTC)) - epoch for time in times]
    assert seconds_of_texts(texts).to_pylist() == [gap // timedelta(seconds=1) for gap in expected]
    assert nanoseconds_of_texts(texts).tolist() == [1000 * gap.microseconds for gap in expected]
    as_arrow = pa.array([gap // timedelta(microseconds=1) for gap in expected], pa.timestamp("us"))
    assert seconds_of_times(as_arrow).to_pylist() == seconds_of_texts(texts).to_pylist()
    assert nanoseconds_of_times(as_arrow).tolist() == nanoseconds_of_texts(texts).tolist()


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("2024-05-01T12:00:07.000000001Z", 1),
        ("2024-05-01T12:00:07.1234567899+01", 123456789),
        ("1969-12-31T23:59:59.5", 500_000_000),
        ("2024-05-01", 0),
        ("12.0", 0),
        ("12", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_fractions_of_texts(text: str | None, nanoseconds: int) -> None:
    assert nanoseconds_of_texts(pa.array([text, ".5"])).tolist() == [nanoseconds, 500_000_000]


def test_fractions_of_times_are_those_after_the_second_before() -> None:
    for unit, ticks in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        times = pa.array([0, None, -1, ticks + 1, 5 * ticks - 1], pa.timestamp(unit))
        one = 10**9 // ticks % 10**9
        assert nanoseconds_of_times(times).tolist() == [0, 0, -one % 10**9, one, -one % 10**9]
    assert nanoseconds_of_times(pa.array([1, None], pa.date32())).tolist() == [0, 0]
    assert nanoseconds_of_times(pa.array([86_400_000, None], pa.date64())).tolist() == [0, 0]
