"""From a table's column of times to conditions, ties and the summary."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import prepared, summary

from logitmix.trainer.data.dataset import load_dataset

YEAR = 1_704_067_200
"""2024-01-01."""


def of_times(tmp_path: Path, tables: dict[str, list[Any]], **options: Any) -> tuple[list[int], list[str], str]:
    """Times, the summary's lines about them, and what was said, of files of one user's times each."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, times in tables.items():
        items = [f"{name[0]}{row}" for row in range(len(times))]
        table = {"user": [name[0]] * len(times), "item": items, "timestamp": times}
        if name.endswith("parquet"):
            pq.write_table(pa.table(table), folder / name)
        else:
            rows = zip(*table.values(), strict=True)
            (folder / name).write_text("".join(f"{';'.join(map(str, row))}\n" for row in [list(table), *rows]))
    dataset, said = prepared(folder, **options)
    lines = summary(dataset).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("times"))
    shown = [line for line in lines[at : at + 2] if line.startswith(("times", " "))]
    return dataset.timestamps_flat.tolist(), shown, said


@pytest.mark.parametrize(("ticks", "unit"), [(1, "s"), (10**3, "ms"), (10**6, "us"), (10**9, "ns")])
def test_conditions_and_the_summary_know_the_unit(ticks: int, unit: str, tmp_path: Path) -> None:
    times = [(YEAR + hours * 3600) * ticks for hours in range(-5, 7)]
    kept, lines, _ = of_times(tmp_path, {"a.csv": times}, where=("timestamp >= 2024-01-01",))
    assert kept == times[5:]
    names = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
    assert lines == [f"times     2024-01-01 00:00 to 2024-01-01 06:00, in {names[unit]}"]
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["times"]["unit"] == unit


def test_units_that_are_mixed_are_refused_over_all_files(tmp_path: Path) -> None:
    tables = {"a.csv": [YEAR, YEAR + 1], "b.parquet": [YEAR * 1000]}
    problem = rf"^some times are in seconds \(a.csv:2: {YEAR}\) and others in milliseconds \(b.parquet:1: {YEAR}000\)"
    with pytest.raises(ValueError, match=problem):
        of_times(tmp_path, tables)
    assert not (tmp_path / "out").exists()


def test_dates_beside_milliseconds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^some times are in seconds \(a.csv:2: .* milliseconds \(b.csv:2: "):
        of_times(tmp_path, {"a.csv": ["2024-01-01"], "b.csv": [YEAR * 1000]})


def test_counters_are_no_dates(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--where 'timestamp > 2024-01-01': its values are no times since 1970"):
        of_times(tmp_path, {"a.csv": [*range(1, 50)]}, where=("timestamp > 2024-01-01",))


def test_fractions_of_seconds_are_an_order_but_no_ties(tmp_path: Path) -> None:
    for name in ("a.csv", "b.parquet"):
        (tmp_path / name).mkdir()
        times = [YEAR + 0.75, YEAR + 0.25, YEAR + 0.5]
        kept, lines, _ = of_times(tmp_path / name, {name: times})
        assert kept == [YEAR] * 3 and len(lines) == 1
        dataset = load_dataset(tmp_path / name / "out")
        assert [dataset.raw_ids()[item][1:] for item in dataset.items_flat] == ["1", "2", "0"]


def test_ties_are_counted(tmp_path: Path) -> None:
    of_times(tmp_path, {"a.csv": [1, 2, 2, 3], "b.csv": [1, 2, 2, 2], "c.csv": [1, 2], "d.csv": [7]})
    times = json.loads((tmp_path / "out" / "dataset.json").read_text())["times"]
    assert (times["tied_actions"], times["users_that_end_tied"]) == (5, 1)


def test_the_form_of_the_times(tmp_path: Path) -> None:
    kept, _, said = of_times(
        tmp_path, {"a.csv": ["31 Jan 24", "1 Feb 24", "soon"]}, time_format="%d %b %y", max_rejects=0.5
    )
    assert kept == [YEAR + 30 * 86_400, YEAR + 31 * 86_400]
    assert said.startswith("a.csv:4: the timestamp 'soon' is not as --time-format '%d %b %y' says\n")


def test_how_days_and_months_are_read_is_said(tmp_path: Path) -> None:
    kept, _, said = of_times(tmp_path, {"a.csv": ["01/02/2024 12:00", "31/01/2024 12:00"]}, min_user_actions=1)
    assert kept == [YEAR + 30.5 * 86_400, YEAR + 31.5 * 86_400]
    assert said == "column timestamp: dates are read as day/month/year (a.csv:3: 31/01/2024 12:00)\n"
