"""Values that are hardly meant as they are written: said, with a count and an example."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

START = 1_690_000_000
"""In July 2023."""
END = 253_402_300_799
"""9999-12-31T23:59:59Z."""


def table(columns: str, rows: list[str]) -> str:
    return "\n".join([columns, *rows]) + "\n"


PRICES = [f"{n % 7}.5" for n in range(60)]


@pytest.mark.parametrize("infinite", ["inf", "-inf", "+Infinity", "INF", "1e60"])
def test_infinite_numbers_are_said(prepared: Callable[..., Any], infinite: str) -> None:
    prices = [*PRICES[:-2], infinite, infinite]
    rows = [f"u{n % 4},i{n % 6},{START + n},{price}" for n, price in enumerate(prices)]
    found = prepared(table("user,item,timestamp,price", rows))
    assert found.features == {"price": "number"}
    said = f"price: 2 values are no finite numbers and count as missing, such as '{infinite}'"
    assert said in found.said
    mean = np.mean([float(price) for price in PRICES[:-2]])
    assert np.isclose(found.dataset.event_features["price"].values, mean).sum() == 2


def test_infinite_numbers_of_json_are_said(prepared: Callable[..., Any]) -> None:
    """Single ones, and those in vectors."""
    rows = [{"user": f"u{n % 4}", "item": f"i{n % 6}", "timestamp": START + n, "price": n % 7 / 7} for n in range(60)]
    rows = [row | {"place": [row["price"], 2.5]} for row in rows]
    rows[-1] |= {"price": 1e60, "place": [1e60, 0.5]}
    found = prepared("".join(json.dumps(row) + "\n" for row in rows), "clicks.jsonl")
    assert found.features == {"price": "number", "place": "vector"}
    for name in found.features:
        assert f"{name}: 1 value is no finite number and counts as missing, such as 1e+60" in found.said


def impressions(mark: str, first: int = 0) -> str:
    """Each with a clicked item and three that were only shown."""
    rows = []
    for n in range(40):
        items = [f"N{(n + 3 * place) % 12}{mark}{first + (place == 0)}" for place in range(4)]
        rows.append(f"u{n % 8}\t{START + n}\t{' '.join(items)}")
    return table("user\ttimestamp\titem", rows)


@pytest.mark.parametrize("mark", ["-", ":"])
def test_labels_of_impressions_are_said(prepared: Callable[..., Any], mark: str) -> None:
    found = prepared(impressions(mark), list_separator=" ")
    assert f"column item: 12 ids end in {mark}1 and in {mark}0, such as N" in found.said
    assert '--shown "label = 0"' in found.said
    for other in (impressions("", 10), impressions("-", 7)):
        assert "labels of clicks" not in prepared(other, list_separator=" ").said


@pytest.mark.xfail(strict=True, reason="no option takes the labels off the ids")
def test_labels_of_impressions_become_a_column(prepared: Callable[..., Any]) -> None:
    """What was clicked is an action, and the rest was shown."""
    found = prepared(impressions("-"), list_separator=" ", label_separator="-", shown=["label = 0"])
    assert found.description["items"] == 12 and found.description["actions"] == 40
    assert found.features == {"shown": "ids"}


def with_sentinel(sentinel: object, written: Callable[[int], object]) -> str:
    times = [sentinel if n % 20 == 19 else written(START + 3600 * n) for n in range(200)]
    return table("user,item,timestamp", [f"u{n % 7},i{n % 5},{time}" for n, time in enumerate(times)])


def as_iso(seconds: int) -> str:
    return str(np.datetime64(seconds, "s"))


@pytest.mark.parametrize(
    ("content", "example"),
    [
        (with_sentinel(END, int), f"{END} (9999-12-31)"),
        (with_sentinel(1000 * END, lambda seconds: 1000 * seconds), f"{1000 * END} (9999-12-31)"),
        (with_sentinel(2**32, int), f"{2**32} (2106-02-07)"),
        (with_sentinel(0, int), "0 (1970-01-01)"),
        (with_sentinel("9999-12-31", as_iso), "253402214400 (9999-12-31)"),
        (with_sentinel("1900-01-01 00:00:00", as_iso), "-2208988800 (1900-01-01)"),
    ],
)
def test_times_that_stand_for_none_are_said(prepared: Callable[..., Any], content: str, example: str) -> None:
    """In all writings alike: the others stay dates."""
    found = prepared(content)
    assert found.description["times"]["unit"] in ("s", "ms")
    said = f"column timestamp: 10 times are before 1980 or in the future, such as {example}; if they stand for no time"
    assert said in found.said
    assert '--where "timestamp >= 1980-01-01" --where "timestamp < ' in found.said
    conditions = ["timestamp >= 1980-01-01", "timestamp < 2100-01-01"]
    kept = prepared(content, where=conditions)
    assert kept.description["actions"] == 190 and "in the future" not in kept.said.partition("read ")[2]


def test_usual_times_and_orders_are_not_said(prepared: Callable[..., Any]) -> None:
    usual = with_sentinel(START, int)
    assert prepared(usual).description["times"]["unit"] == "s"
    for content in (usual, usual.replace(str(START)[:4], "7"), table("user,item,timestamp", ["u,i,1", "u,j,2"])):
        assert "times are before 1980" not in prepared(content).said


@pytest.mark.parametrize(
    ("written", "day"),
    [
        ("{day:02}-Jan-1995", "1995-01-{day:02}"),
        ("{day} January 1995", "1995-01-{day:02}"),
        ("Jan. {day}, 1995", "1995-01-{day:02}"),
        ("Sun, {day:02} MAY 1999 00:00:00 +0000", "1999-05-{day:02}"),
        ("{day}/sep/2020 00:00", "2020-09-{day:02}"),
    ],
)
def test_dates_with_names_of_months_are_dates(
    prepared: Callable[..., Any], tmp_path: Any, written: str, day: str
) -> None:
    """Of items a feature; of actions the times; in another column of the actions none."""
    (tmp_path / "items.csv").write_text(
        table("item,released", [f'i{n},"{written.format(day=1 + n // 2)}"' for n in range(30)])
    )
    rows = [f"u{n % 4},i{n % 30},{START + n}" for n in range(90)]
    found = prepared(table("user,item,timestamp", rows), items=tmp_path / "items.csv")
    assert found.features == {"released": "date"}
    days = [np.datetime64(day.format(day=of)).astype(int) for of in (1, 15)]
    assert [of(found.dataset.item_features["released"].values) for of in (np.min, np.max)] == days
    rows = [f'u{n % 4},i{n % 6},"{written.format(day=1 + n % 28)}",{START + n}' for n in range(90)]
    content = table("user,item,when,timestamp", rows)
    found = prepared(content)
    assert found.features == {} and "when (dates, but not of items" in found.said
    found = prepared(content, timestamp_column="when")
    first = int(np.datetime64(day.format(day=1), "s").astype(int))
    assert found.description["times"]["first"] == first and found.description["times"]["unit"] == "s"


SESSIONS = table(
    "user,item,timeframe,eventdate",
    [f"s{n // 6},i{(n * n) % 11},{(n % 6) * 1000 * (1 + n % 5)},2023-07-{1 + n // 6:02}" for n in range(150)],
)
"""Views of sessions of a day each, and the milliseconds since the session began."""


def test_a_second_date_of_the_actions_is_no_id(prepared: Callable[..., Any]) -> None:
    found = prepared(SESSIONS, timestamp_column="timeframe")
    assert found.features == {} and "eventdate (dates, but not of items" in found.said
    rows = [f"{row},u{n % 3}" for n, row in enumerate(SESSIONS.splitlines()[1:])]
    found = prepared(table("item2,item,timeframe,seen,user", rows), timestamp_column="timeframe")
    assert "seen" not in found.features


@pytest.mark.xfail(strict=True, reason="whole numbers that come again are ids")
def test_a_second_number_of_the_actions_is_no_id(prepared: Callable[..., Any]) -> None:
    assert prepared(SESSIONS, timestamp_column="eventdate").features.get("timeframe") != "id"


@pytest.mark.xfail(strict=True, reason="one column has the times")
def test_a_day_and_what_has_passed_of_it_are_a_time(prepared: Callable[..., Any]) -> None:
    found = prepared(SESSIONS, timestamp_column="eventdate,timeframe")
    assert found.features == {}
    for actions in found.actions.values():
        assert [item for item, _ in actions] == list(dict.fromkeys(item for item, _ in actions))
