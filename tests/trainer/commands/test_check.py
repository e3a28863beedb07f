"""`logitmix check`: all that a dataset directory lacks, and nothing of one that is whole. That it finds what
`load_dataset` refuses is in tests/trainer/data/test_dataset.py."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_data

from logitmix.trainer import cli
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.description import FORMAT
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare

SEQUENCES, ITEMS, BRANDS = "sequences/part-00000.parquet", "items.parquet", "vocabularies/brand.parquet"
NEEDED = {"format_version", "name", "users", "items", "actions", "schema"}
DIGESTS = {"kind", "files", "sha256"}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A dataset of `prepare`, with all entries of dataset.json."""
    rows = [f"u{n % 5},i{n * n % 7},{n},b{n % 3}" for n in range(60)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,timestamp,brand", *rows]) + "\n")
    prepare(PrepareOptions("table", str(tmp_path / "clicks.csv"), str(tmp_path / "whole")))
    return tmp_path / "whole"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A dataset with features of every kind, as another program writes it: without digests."""
    return small_data.forget_digests(small_data.write_dataset(tmp_path / "other", users=8, items=6, features=True))


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[list[str], int]]:
    """Runs the command, and returns the lines that it prints, and its exit status."""

    def check(path: Path, *words: str) -> tuple[list[str], int]:
        capsys.readouterr()
        try:
            cli.main(["check", str(path), *words])
            status = 0
        except SystemExit as stop:
            status = int(str(stop.code))
        return capsys.readouterr().out.splitlines(), status

    return check


Check = Callable[..., tuple[list[str], int]]


def edit_description(path: Path, **changes: object) -> None:
    file = path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit(file: Path, **columns: list[Any] | None) -> None:
    """Replaces columns, or removes those that are None."""
    table = pq.read_table(file)
    for name, values in columns.items():
        place = table.schema.names.index(name)
        table = table.remove_column(place) if values is None else table.set_column(place, name, pa.array(values))
    pq.write_table(table, file)


def without_optional_entries(path: Path) -> Iterator[dict[str, Any]]:
    """What another program may write into dataset.json, with digests of the files: without one of the optional entries,
    with null in its place, and without any of them."""
    description = FORMAT.read(path / "dataset.json")
    optional = description.keys() - NEEDED - DIGESTS | {"appended", "plugins"}
    assert {"repeated_targets", "times", "source", "filters"} < optional
    for name in sorted(optional):
        yield {key: entry for key, entry in description.items() if key != name}
        yield description | {name: None}
    yield {key: entry for key, entry in description.items() if key not in optional}


def test_what_is_optional_may_be_left_out(whole: Path, tmp_path: Path, check: Check) -> None:
    """The dataset is read, nothing is said, and the next day can be appended."""
    expected = load_dataset(whole)
    (tmp_path / "next.csv").write_text("user,item,timestamp,brand\nu1,i1,60,b1\nu1,new,61,b9\n")
    for description in without_optional_entries(whole):
        (whole / "dataset.json").write_text(FORMAT.text(description))
        found = load_dataset(whole)
        assert found.repeated_targets == expected.repeated_targets
        assert found.items_flat.tolist() == expected.items_flat.tolist()
        lines, status = check(whole)
        assert status == 0
        assert lines == [f"{whole} is whole: 5 users, 4 items, 60 actions; all files have their digests"]
        out = str(tmp_path / "appended")
        options = {"append": str(whole), "out": out, "overwrite": True}
        prepare(PrepareOptions("table", str(tmp_path / "next.csv"), **options))
        assert load_dataset(out).num_items == 5
        assert check(Path(out))[1] == 0


def test_a_whole_dataset_without_digests(other: Path, check: Check) -> None:
    actions = json.loads((other / "dataset.json").read_text())["actions"]
    said = f"{other} is whole: 8 users, 6 items, {actions} actions; there are no digests of the files"
    assert check(other) == ([said], 0)
    lines, status = check(other, "--json")
    assert json.loads(lines[0]) == {"problems": [], "users": 8, "items": 6, "actions": actions} and status == 0


def test_all_problems_are_said_at_once(other: Path, check: Check) -> None:
    edit(other / SEQUENCES, country=None)
    edit(other / ITEMS, price=None, brand=["b"] * 6)
    (other / "vocabularies/tags.parquet").unlink()
    edit(other / "vocabularies/type.parquet", value=["unknown", "b", "b"])
    edit_description(other, users=9, name=None, times={"unit": "sec"}, source=["clicks.csv"])
    patterns = [
        "dataset.json has no name that is text",
        r"dataset.json: source is \['clicks.csv'\]; it must be an object",
        "dataset.json: times.unit is 'sec', which is not as docs/dataset.md says",
        rf"{SEQUENCES}: no column country; there are: user_index, .*",
        rf"{ITEMS}: no column price; there are: item_index, .*",
        "vocabularies/tags.parquet is missing",
        r"vocabularies/type.parquet: value has 'unknown' in row 0, which stands for unknown values; it must be null",
        rf"{other} has 7 problems; see docs/dataset.md",
    ]
    lines, status = check(other)
    assert status == 1 and len(lines) == len(patterns)
    for pattern, line in zip(patterns, lines, strict=True):
        assert re.fullmatch(pattern, line)
    (said,), status = check(other, "--json")
    assert json.loads(said)["problems"] == lines[:-1] and status == 1


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda path: shutil.rmtree(path / "sequences"), "0 users and 0 actions, but dataset.json says 8 and .*"),
        (lambda path: (path / "dataset.json").write_text("[]"), r"dataset.json is \[\], not a JSON object"),
        (lambda path: edit_description(path, actions=7), ".*there are more users or actions than .*"),
        (lambda path: edit_description(path, times={"last": "x"}), "dataset.json: times.last is 'x', which is .*"),
        (
            lambda path: edit(path / ITEMS, raw_id=[*"abacde"]),
            f"{ITEMS}: raw_id has 'a' 2 times; .*",
        ),
        (lambda path: edit(path / ITEMS, raw_id=["a", None, *"cdef"]), f"{ITEMS}: empty values in column raw_id"),
        (lambda path: edit(path / ITEMS, item_index=[*"012345"]), f"{ITEMS}: its rows are not numbered 0 to 5 in .*"),
        (lambda path: edit(path / SEQUENCES, age=[None] * 8), rf"{SEQUENCES}: column age has values of type null, .*"),
    ],
)
def test_each_problem_is_one_line(other: Path, check: Check, break_it: Callable[[Path], object], problem: str) -> None:
    break_it(other)
    lines, status = check(other)
    assert status == 1
    assert [line for line in lines[:-1] if re.fullmatch(problem, line)], lines
    with pytest.raises(ValueError) if "raw_id" not in problem else nullcontext():
        load_dataset(other)


def test_digests_that_do_not_match(whole: Path, check: Check) -> None:
    edit(whole / SEQUENCES, raw_user_id=["u0", "u1", "u2", "u3", "u5"])
    (whole / BRANDS).unlink()
    shutil.copy(whole / ITEMS, whole / "notes.parquet")
    lines, status = check(whole)
    assert status == 1
    assert re.match(rf"{SEQUENCES} is damaged \(.*in dataset.json\)", lines[0])
    assert lines[1:3] == [f"{BRANDS} is missing", "notes.parquet is not in the list of files in dataset.json"]


def test_what_is_no_dataset_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert refusal("check", str(tmp_path / "nowhere")).startswith(
        f"logitmix: no dataset at {tmp_path}/nowhere; make it"
    )
    (tmp_path / "config.toml").touch()
    assert refusal("check", str(tmp_path)).startswith(f"logitmix: {tmp_path}: this is a run")
