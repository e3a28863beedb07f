"""Later actions behind those of a dataset: the same histories as of both prepared together."""

import io
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import files_in
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from logitmix.modules.kinds.date import NO_DATE
from logitmix.trainer.cli import main
from logitmix.trainer.data import arrays
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.description import read_description
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare

Rows = list[tuple[str, str, int, str, float]]
"""User, item, time, brand, price."""


def prepared(folder: Path, name: str, rows: Rows, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    source = folder / f"{name}.csv"
    source.write_text("user,item,timestamp,brand,price\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    schema = folder / "schema.toml"
    schema.write_text('[features.brand]\nkind = "id"\n[features.price]\nkind = "number"\n')
    usual: dict[str, Any] = {"min_user_actions": 0, "keep_duplicates": True, "schema": str(schema)}
    out = options.pop("out", folder / name)
    if options.get("append"):
        del usual["min_user_actions"]
    console = Console(file=io.StringIO(), width=1000)
    prepare(PrepareOptions("table", str(source), str(out), **usual | options), console)
    return out


def told(dataset: Dataset) -> dict[str, list[tuple[str, int, str, float]]]:
    """What a dataset says of each user, in terms of the source."""
    ids, brands = dataset.raw_ids(), dataset.vocabulary("brand")
    found = {}
    for user, raw in enumerate(dataset.raw_user_ids(range(dataset.num_users))):
        actions = range(dataset.offsets[user], dataset.offsets[user + 1])
        found[raw] = [
            (
                ids[dataset.items_flat[at]],
                int(dataset.timestamps_flat[at]),
                brands[dataset.event_features["brand"].values[at]],
                float(dataset.event_features["price"].values[at]),
            )
            for at in actions
        ]
    return found


rows_of = st.lists(
    st.tuples(
        st.sampled_from(["b", "a", "d", "c"]),
        st.sampled_from(["z", "y", "x", "w"]),
        st.integers(1, 9),
        st.sampled_from(["one", "two", "three"]),
        st.sampled_from([0.5, 2.0]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.long
@settings(max_examples=10)
@given(parts=st.lists(rows_of, min_size=2, max_size=4))
def test_histories_are_those_of_all_actions_together(
    parts: list[Rows], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("made")
    parts = [[(u, i, 1_700_000_000 + 10 * at + t, b, p) for u, i, t, b, p in part] for at, part in enumerate(parts)]
    path = prepared(folder, "0", parts[0])
    first = load_dataset(path)
    known, values = first.raw_ids(), first.vocabulary("brand")
    for at, part in enumerate(parts[1:], 1):
        prepared(folder, str(at), part, out=path, append=str(path))
    dataset = load_dataset(path)
    expected = defaultdict(list)
    for part in parts:
        for user, *action in sorted(part, key=lambda row: row[2]):
            expected[user].append(tuple(action))
    assert told(dataset) == expected
    # What was there has its numbers.
    assert dataset.raw_ids()[: len(known)] == known and dataset.vocabulary("brand")[: len(values)] == values
    together = load_dataset(prepared(folder, "together", [row for part in parts for row in part]))
    assert dataset.repeated_targets == together.repeated_targets


DAY = 1_700_000_000
FIRST: Rows = [("b", "y", DAY, "one", 1.0), ("a", "y", DAY + 1, "two", 2.0), ("a", "x", DAY + 5, "one", 3.0)]
SECOND: Rows = [("c", "z", DAY + 9, "two", 5.0), ("a", "w", DAY + 5, "three", 7.0)]


def test_the_command_says_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    path = prepared(tmp_path, "0", FIRST)
    mean = load_dataset(path).schema.features[-1].mean
    (tmp_path / "day.csv").write_text(
        f"user,item,timestamp,brand,colour\nc,z,{DAY + 9},two,red\na,y,{DAY + 6},one,red\n"
    )
    words = ["prepare", "table", "--source", str(tmp_path / "day.csv"), "--append", str(path), "--out", str(path)]
    main(words)
    said = capsys.readouterr()
    assert "appended  2 actions with 1 new user and 1 new item" in said.out
    assert "now       3 users, 3 items, 5 actions" in said.out
    assert "not used, as the dataset has no such features: colour" in said.err
    assert "missing values, as there are no such columns: price" in said.err
    # A value that is missing is the mean of what was prepared first.
    assert told(load_dataset(path))["c"] == [("z", DAY + 9, "two", mean)]
    assert f"day.csv is in {path} already, and its actions would be there twice" in refusal(*words)


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        (
            [("a", "y", DAY + 4, "one", 1.0)],
            {},
            f"first time to append is {DAY + 4}, but .* up to {DAY + 5}",
        ),
        (
            [("a", "y", 1000 * DAY + 9000, "one", 1.0)],
            {},
            "to append are milliseconds, and those of .* seconds",
        ),
        ([("a", "y", DAY + 6, "one", "dear")], {}, r"^1\.csv: feature price has the value 'dear', which is no number$"),
        (SECOND, {"min_user_actions": 2}, "--append takes no --min-user-actions"),
        (SECOND, {"out": ""}, "--append needs --out"),
        (SECOND, {"append": "nowhere", "overwrite": True}, "no dataset at nowhere; make it with"),
    ],
)
def test_what_cannot_be_appended_changes_nothing(
    rows: Rows, options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = prepared(tmp_path, "0", FIRST)
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=problem):
        prepared(tmp_path, "1", rows, **{"out": path, "append": str(path), **options})
    (tmp_path / "1.csv").unlink(missing_ok=True)
    assert files_in(tmp_path) == before


def test_the_dataset_before_stays_as_it_was(tmp_path: Path) -> None:
    path = prepared(tmp_path, "0", FIRST)
    before = files_in(path)
    prepared(tmp_path, "1", SECOND, out=tmp_path / "both", append=str(path))
    assert files_in(path) == before
    assert (len(load_dataset(path).items_flat), len(load_dataset(tmp_path / "both").items_flat)) == (3, 5)
    with pytest.raises(ValueError, match=r"there is a dataset at .*both already; replace it with --overwrite"):
        prepared(tmp_path, "2", SECOND, out=tmp_path / "both", append=str(path))


def test_items_and_users_with_features_and_titles(tmp_path: Path) -> None:
    tables = {name: tmp_path / f"{name}.csv" for name in ("items", "users")}
    tables["items"].write_text("item,title,size,since\nx,Ex,1,2024-02-01\ny,Why,1,\nw,We,2,2024-03-01\nz,Zed,3,\n")
    tables["users"].write_text("user,country\na,DE\nb,DE\nc,FR\n")
    schema = tmp_path / "schema.toml"
    given: dict[str, Any] = {name: str(file) for name, file in tables.items()}
    source = tmp_path / "0.csv"
    source.write_text(f"user,item,timestamp\nb,y,{DAY}\na,y,{DAY + 1}\na,x,{DAY + 5}\n")
    schema.write_text(
        '[features.size]\nkind = "ids"\n[features.country]\nkind = "id"\n[features.since]\nkind = "date"\n'
    )
    out = tmp_path / "0"
    console = Console(quiet=True)
    prepare(PrepareOptions("table", str(source), str(out), min_user_actions=0, schema=str(schema), **given), console)
    source.write_text(f"user,item,timestamp\nc,z,{DAY + 9}\na,w,{DAY + 5}\nb,x,{DAY + 9}\n")
    prepare(PrepareOptions("table", str(source), str(out), append=str(out), **given), console)
    dataset = load_dataset(out)
    assert dataset.raw_ids() == ["x", "y", "w", "z"] and dataset.raw_user_ids(range(3)) == ["a", "b", "c"]
    titles = dataset.title_column()
    assert titles is not None and titles.to_pylist() == ["Ex", "Why", "We", "Zed"]
    sizes, countries = dataset.vocabulary("size"), dataset.vocabulary("country")
    assert (sizes, countries) == (["", "1", "2", "3"], ["", "DE", "FR"])
    assert [countries[row] for row in dataset.user_features["country"].values] == ["DE", "DE", "FR"]
    size = dataset.item_features["size"]
    assert size.offsets is not None and size.offsets.tolist() == [0, 1, 2, 3, 4]
    assert [sizes[row] for row in size.values] == ["1", "1", "2", "3"]
    assert dataset.item_features["since"].values.tolist() == [19_754, NO_DATE, 19_783, NO_DATE]


def test_arrays_and_digests_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "LARGE", 1)
    path = prepared(tmp_path, "0", FIRST)
    assert len(load_dataset(path).items_flat) == len(load_dataset(path).items_flat) == 3
    prepared(tmp_path, "1", SECOND, out=path, append=str(path))
    for _ in range(2):
        assert told(load_dataset(path)) == {
            "a": [("y", DAY + 1, "two", 2.0), ("x", DAY + 5, "one", 3.0), ("w", DAY + 5, "three", 7.0)],
            "b": [("y", DAY, "one", 1.0)],
            "c": [("z", DAY + 9, "two", 5.0)],
        }
    for file in (path / "appended").rglob("*.parquet"):
        content = file.read_bytes()
        file.write_bytes(content[:-9] + b"x" + content[-8:])
        name = file.relative_to(path).as_posix()
        with pytest.raises(ValueError, match=rf"{name} is damaged .* --overwrite$"):
            read_description(path)
        file.write_bytes(content)


def test_columns_are_read_as_those_of_the_dataset(tmp_path: Path) -> None:
    """Without the --schema and the tables that gave them their kinds and names."""
    header, schema = "user,item,timestamp,price,tags,strengths\n", tmp_path / "schema.toml"
    schema.write_text('[features.tags]\nkind = "weighted_ids"\ncolumns = { weights = "strengths" }\n')
    (tmp_path / "items.csv").write_text("item,price\nx,1.5\ny,2.5\nz,9.5\n")
    (tmp_path / "0.csv").write_text(f"{header}a,x,{DAY},0.5,p|q,1|2\na,y,{DAY + 1},7.5,p|q,3|4\n")
    (tmp_path / "1.csv").write_text(f"{header}a,z,{DAY + 2},0.25,q,5\nb,z,{DAY + 3},,q,6\n")
    given: dict[str, Any] = {"items": str(tmp_path / "items.csv"), "schema": str(schema), "min_user_actions": 0}
    console = Console(file=io.StringIO())
    prepare(PrepareOptions("table", str(tmp_path / "0.csv"), str(tmp_path / "0"), **given), console)
    later: dict[str, Any] = {"out": str(tmp_path / "1"), "append": str(tmp_path / "0")}
    prepare(PrepareOptions("table", str(tmp_path / "1.csv"), **later), console)
    dataset = load_dataset(tmp_path / "1")
    # A missing one is the mean of those of the dataset.
    assert dataset.event_features["event_price"].values.tolist() == [0.5, 7.5, 0.25, 4.0]
    tags = dataset.event_features["tags"]
    assert [dataset.vocabulary("tags")[row] for row in tags.values] == ["p", "q", "p", "q", "q", "q"]
    assert tags.parallel["weights"].tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_without_times_follow_those_of_the_dataset(tmp_path: Path) -> None:
    for name, rows in (("0", "a,x\nb,y\n"), ("1", "b,x\na,y\n")):
        (tmp_path / f"{name}.csv").write_text(f"user,item\n{rows}")
    given: dict[str, Any] = {"timestamp_column": ""}
    console = Console(file=io.StringIO())
    first = PrepareOptions("table", str(tmp_path / "0.csv"), str(tmp_path / "0"), min_user_actions=0, **given)
    prepare(first, console)
    given |= {"out": str(tmp_path / "1"), "append": str(tmp_path / "0")}
    prepare(PrepareOptions("table", str(tmp_path / "1.csv"), **given), console)
    dataset = load_dataset(tmp_path / "1")
    assert dataset.timestamps_flat.tolist() == [0, 3, 1, 2]
    timed = prepared(tmp_path, "2", FIRST)
    with pytest.raises(ValueError, match=r"times to append are numbers of no known unit, and those of .* seconds"):
        prepare(PrepareOptions("table", str(tmp_path / "1.csv"), **given | {"append": str(timed), "out": str(timed)}))
