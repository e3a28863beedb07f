import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_data

from logitmix.modules.schema import Owner, Schema, Table
from logitmix.trainer.data.check import check_dataset
from logitmix.trainer.data.dataset import Dataset, load_dataset, stored_values
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare

ROOT = Path(__file__).parents[3]


def write(path: Path, sequences: list[list[int]], raw_ids: list[str], users_per_file: int = 100) -> Path:
    lengths = [len(sequence) for sequence in sequences]
    items = np.array([item for sequence in sequences for item in sequence], np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    contents = DatasetContents(offsets, items, np.arange(len(items)), pa.array(raw_ids, pa.string()))
    write_dataset(path, contents, "made", users_per_file)
    return path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Of another writer, so that its files may be replaced."""
    return small_data.forget_digests(write(tmp_path / "made", [[0, 1, 2], [2], [1, 1]], ["a", "b", "c"]))


def sequences_of(loaded: Dataset) -> list[list[int]]:
    return [part.tolist() for part in np.split(loaded.items_flat, loaded.offsets[1:-1])]


def edit_description(path: Path, **changes: object) -> None:
    file = path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_schema(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    schema = json.loads((path / "dataset.json").read_text())["schema"]
    change(schema)
    edit_description(path, schema=schema)


def replace_sequences(path: Path, columns: dict[str, object], name: str = "part-00000.parquet") -> None:
    pq.write_table(pa.table(columns), path / "sequences" / name)


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "made", [[0], [1, 0], [1], [0, 0], [1]], ["a", "b"], users_per_file=2)
    assert len(list((path / "sequences").iterdir())) == 3
    loaded = load_dataset(str(path))
    assert (loaded.name, loaded.num_users, loaded.num_items, loaded.raw_ids()) == ("made", 5, 2, ["a", "b"])
    assert loaded.items_flat.dtype == np.int32 and loaded.offsets.dtype == np.int64
    assert sequences_of(loaded) == [[0], [1, 0], [1], [0, 0], [1]]


def test_no_dataset_says_how_to_make_it(tmp_path: Path) -> None:
    for name, of in (("ml-1m", "ml-1m"), ("mine", "NAME")):
        problem = f"^no dataset at {tmp_path}/{name}; make it with: logitmix prepare {of} --out"
        with pytest.raises(ValueError, match=problem):
            load_dataset(tmp_path / name)


LISTS = [[0, 1, 2], [2], [1, 1]]


def columns_of(items: Any = LISTS, times: Any = LISTS, index: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    return {"user_index": index, "item_indices": items, "timestamps": times}


def actions(*given: Any, name: str = "part-00000.parquet", **named: Any) -> Callable[[Path], None]:
    return lambda path: replace_sequences(path, columns_of(*given, **named), name)


def index(item: int) -> Callable[[Path], None]:
    """Of an action, also one that would be in range after 32 or 64 bits."""
    return actions(pa.array([[0, 1, 2], [2], [1, item]], pa.list_(pa.uint64() if item >= 2**63 else pa.int64())))


def latest(time: int) -> Callable[[Path], None]:
    kind = pa.list_(pa.uint64() if time > 0 else pa.int64())
    return actions(times=pa.array([[0, 1, 2], [2], [1, time]], kind))


def described(**changes: object) -> Callable[[Path], None]:
    return lambda path: edit_description(path, **changes)


def twice(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        table = pa.table(columns_of())
        pq.write_table(table.append_column(name, table[name]), path / PART)

    return change


def content(file: str, text: str) -> Callable[[Path], int]:
    return lambda path: (path / file).write_text(text)


PART = "sequences/part-00000.parquet"
TIME = "it must be from -4611686018427387903 to 4611686018427387903"
OUT_OF_RANGE = (-1, 3, 2**31, 2**32 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
FOUR = {"items": 4, "schema": Schema.of_ids(4).to_mapping()}
WRONG: list[tuple[Callable[[Path], object], str]] = [
    (actions(index=[0, 2, 1]), f"{PART}: its rows are not numbered 0 to 2 in order"),
    (lambda path: replace_sequences(path, {"user_index": [0, 1, 2], "item_indices": LISTS}),
     f"{PART}: no column timestamps; there are: user_index, item_indices"),
    (actions([[0, None, 1], [2], [1, 1]]), f"{PART}: empty values in column item_indices"),
    (actions([0, 1, 2]), f"{PART}: column item_indices is of type int64, not a list"),
    (actions(times=[[0, 1, 2], [2], [1]]), f"{PART}: column timestamps has lists that are not as long as item_indices"),
    (actions([[0.5, 1, 2], [2], [1, 1]]), f"{PART}: column item_indices has values of type double, not int64"),
    *((latest(of), f"{PART}: column timestamps has {of}; {TIME}") for of in (2**62, -(2**62), 2**63)),
    *((index(of), f"{PART}: column item_indices has {of}; it must be from 0 to 2") for of in OUT_OF_RANGE),
    *((twice(name), f"{PART}: there are two columns named {name}") for name in columns_of()),
    (described(format_version=2), "it is of format version 2, and this logitmix reads 3"),
    (described(schema=None), "dataset.json: no schema"),
    (described(schema={"features": []}), "dataset.json: schema: tables is missing"),
    (described(schema=FOUR["schema"]), "dataset.json: table item has 5 rows, not one more than the 3 items"),
    (described(users="3"), "dataset.json has no users that is a count"),
    (described(users=2**70), "dataset.json has no users that is a count"),
    (described(actions=-1), "dataset.json has no actions that is a count"),
    (described(name=7), "dataset.json has no name that is text"),
    (content("dataset.json", "{"), "dataset.json is damaged ("),
    (content("dataset.json", "[" * 100_000), "dataset.json is damaged (nested too deep)"),
    (content(PART, "PAR1 nothing PAR1"), f"{PART} cannot be read ("),
    (content("items.parquet", "PAR1 nothing PAR1"), "items.parquet cannot be read ("),
]  # fmt: skip
WRONG += [
    (actions(LISTS[:2], LISTS[:2], [0, 1]), "2 users and 4 actions, but dataset.json says 3 and 6"),
    (actions([*LISTS, [0]], [*LISTS, [0]], [0, 1, 2, 3]), "there are more users or actions than dataset.json says"),
    (described(users=2**47), f"3 users and 6 actions, but dataset.json says {2**47} and 6"),
    (described(actions=2**47), "dataset.json: Unable to allocate"),
    (described(actions=5), "there are more users or actions than dataset.json says (3, 5)"),
    (described(**FOUR), "items.parquet: 3 rows, but dataset.json says 4 items"),
]


def require_named(path: Path, change: Callable[[Path], object], problem: str) -> None:
    """`load_dataset` and `check_dataset` refuse what is changed, with this problem."""
    change(path)
    with pytest.raises(ValueError, match=f"^{path}: .*{re.escape(problem)}.*make it again with: logitmix prepare NAME"):
        load_dataset(path)
    found, _ = check_dataset(path)
    assert [of for of in found if problem in of and "\n" not in of], found


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_is_named_alike_by_the_check(made: Path, number: int) -> None:
    require_named(made, *WRONG[number])


@pytest.mark.parametrize("user", [0, 4, 5, 6])
def test_times_that_decrease_are_named(made: Path, user: int) -> None:
    """Those of one user; the next user may begin earlier, and some have no actions."""
    times = [[7, 7, 8], [], [5], [], [1, 6], [1, 2, 2], [3, 4], []]
    edit_description(made, users=8, actions=11)
    replace_sequences(made, columns_of([[0] * len(of) for of in times], times, range(8)))
    assert load_dataset(made).timestamps_flat.tolist() == [time for of in times for time in of]
    last = times[user][-2]
    times[user][-1] = last - 1
    replace_sequences(made, columns_of([[0] * len(of) for of in times], times, range(8)))
    problem = rf"column timestamps has {last - 1} after {last}; they must be oldest first; make it again"
    with pytest.raises(ValueError, match=f"^{made}: sequences/part-00000.parquet: {problem}"):
        load_dataset(made)


@pytest.mark.parametrize(
    ("name", "column", "table"), [("items.parquet", "raw_id", "item"), ("vocabularies/brand.parquet", "value", "brand")]
)
def test_texts_that_are_not_utf_8_are_found_when_they_are_read(
    featured: Path, name: str, column: str, table: str
) -> None:
    """By their rows."""
    loaded, texts = load_dataset(featured), pq.read_table(featured / name)[column].to_pylist()
    damaged = [b"\xff" if row == 3 else (text or "").encode() for row, text in enumerate(texts)]
    edit_column(featured / name, column, pa.array(damaged).view(pa.string()))
    with pytest.raises(ValueError, match=rf"{name} cannot be read \(.*[Ii]nvalid UTF8 .* 3\)"):
        loaded.vocabulary(table)


def test_repeated_targets_of_another_writer_are_computed(tmp_path: Path) -> None:
    path = write(tmp_path / "made", [[0, 1, 0], [1, 1, 2]], ["a", "b", "c"])
    assert load_dataset(path).repeated_targets == {"validation": 0.5, "test": 0.5}
    small_data.forget_digests(path)
    edit_description(path, repeated_targets={"test": 2})
    assert load_dataset(path).repeated_targets == {"validation": 0.5, "test": 0.5}


def test_times_take_4_bytes_where_all_fit(tmp_path: Path) -> None:
    for name, last, kind in (("near", 2**31 - 1, np.int32), ("far", 2**31, np.int64), ("old", -(2**31) - 1, np.int64)):
        times = np.array([min(last, 5), 7, last, 8])
        contents = DatasetContents(np.arange(5), np.zeros(4, int), times, pa.array(["a"]))
        write_dataset(tmp_path / name, contents, "made", users_per_file=2)
        loaded = load_dataset(tmp_path / name)
        assert loaded.timestamps_flat.dtype == kind and loaded.timestamps_flat.tolist() == times.tolist()


def test_a_plugin_that_is_needed_is_named(made: Path) -> None:
    edit_description(made, plugins={"hour.py": "1f"})
    with pytest.raises(ValueError, match=rf"^{made} needs the plugin hour\.py \(1f\): --import PLACE/hour\.py;"):
        load_dataset(made)


@pytest.fixture
def featured(tmp_path: Path) -> Path:
    return small_data.forget_digests(small_data.write_dataset(tmp_path / "featured", features=True))


def test_features_of_every_owner_and_kind_come_back(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    offsets = np.array([0, 3, 3, 8, 9])
    rows = {"item": 5, "user": 4, "event": 9}
    schema = replace(small_data.FEATURES, tables=(Table("item", 6), *small_data.FEATURES.tables[1:]))
    columns = {
        feature.name: small_data.random_column(feature, schema, rows[feature.owner], random)
        for feature in schema.features[1:]
    }
    vocabularies = {
        table.name: pa.array([None, *(f"{table.name} {row}" for row in range(1, table.rows))], pa.string())
        for table in schema.tables[1:]
    }
    of = {"schema": schema, "columns": columns, "vocabularies": vocabularies}
    contents = DatasetContents(offsets, random.integers(0, 5, 9), np.arange(9), pa.array(list("abcde")), **of)
    write_dataset(tmp_path / "made", contents, "made", users_per_file=2)
    loaded = load_dataset(tmp_path / "made")
    assert loaded.schema == schema
    for owner in get_args(Owner):
        assert list(loaded.features_of(owner)) == [f.name for f in schema.of(owner)]
    for feature in schema.features[1:]:
        column, written = loaded.features_of(feature.owner)[feature.name], columns[feature.name]
        assert np.array_equal(column.values, written.values)
        assert column.values.dtype == (np.int32 if feature.sparse else np.float32)
        assert (column.offsets is None) == (feature.kind != "ids")
        if column.offsets is not None:
            assert column.offsets.dtype == np.int64 and np.array_equal(column.offsets, written.offsets)
    assert loaded.vocabulary("country") == ["", "country 1", "country 2", "country 3"]
    assert loaded.vocabulary("item") == ["a", "b", "c", "d", "e", ""]


def test_features_of_other_writers_are_read(featured: Path) -> None:
    """Spark has no lists of a fixed size, numbers may be doubles, and lists large."""
    before = load_dataset(featured)
    file = featured / "items.parquet"
    table, sequences = pq.read_table(file), pq.read_table(featured / PART)
    edit_column(file, "image", pa.array(table["image"].to_pylist(), pa.large_list(pa.float64())))
    edit_column(file, "brand", table["brand"].cast(pa.int16()))
    items = pa.array(sequences["item_indices"].to_pylist(), pa.large_list(pa.int32()))
    edit_column(featured / PART, "item_indices", items)
    found = load_dataset(featured)
    assert sequences_of(found) == sequences_of(before)
    for name, column in found.item_features.items():
        assert np.array_equal(column.values, before.item_features[name].values)


KINDS_OF_TEXT = (pa.large_string(), pa.string_view(), pa.dictionary(pa.int16(), pa.string()), pa.int64())


@pytest.mark.parametrize("kind", KINDS_OF_TEXT, ids=str)
def test_texts_of_other_writers_are_read(featured: Path, kind: pa.DataType) -> None:
    """pandas and Polars have their own types of text, and ids may be integers."""
    items, brands = (pq.read_table(featured / file) for file in ("items.parquet", "vocabularies/brand.parquet"))
    raw_ids = [str(7 * row) for row in range(len(items))]
    values = [None, *(str(1990 + row) for row in range(1, len(brands)))]

    def texts(of: list[str | None]) -> pa.Array:
        # Arrow reads text as integers, but not as a dictionary.
        return pa.array(of, pa.string()).cast(kind) if pa.types.is_integer(kind) else pa.array(of, kind)

    pq.write_table(items.append_column("title", texts([None, *raw_ids[1:]])), featured / "items.parquet")
    edit_column(featured / "items.parquet", "raw_id", texts(raw_ids))
    pq.write_table(pa.table({"value": texts(values)}), featured / "vocabularies" / "brand.parquet")
    loaded = load_dataset(featured)
    titles = loaded.title_column()
    assert titles is not None and titles.to_pylist() == [None, *raw_ids[1:]]
    assert loaded.raw_ids() == raw_ids and loaded.vocabulary("brand") == ["", *values[1:]]
    for table in ("item", "brand"):
        stored = [text for part in stored_values(featured, loaded.schema, table) for text in part.to_pylist()]
        assert stored == loaded.vocabulary(table)


def edit_column(file: Path, name: str, values: pa.Array) -> None:
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), file)


def cell(file: str, name: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        column = pq.read_table(path / file)[name]
        values = column.to_pylist()
        values[2] = [*values[2][:-1], value[0]] if isinstance(value, tuple) else value
        edit_column(path / file, name, pa.array(values, column.type))

    return change


def all_of(file: str, name: str, value: object, kind: pa.DataType) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        edit_column(path / file, name, pa.array([value] * len(pq.read_table(path / file)), kind))

    return change


def wide(owner: str) -> Callable[[Path], None]:
    def widen(schema: dict[str, Any]) -> None:
        for feature in schema["features"]:
            if (feature["owner"], feature["kind"]) == (owner, "vector"):
                feature["width"] = 2**45

    return lambda path: edit_schema(path, widen)


def sized(path: Path) -> None:
    edit_schema(path, lambda schema: schema["features"].append({"name": "size", "owner": "item", "kind": "number"}))


ITEMS, BRANDS = "items.parquet", "vocabularies/brand.parquet"
WRONG_FEATURES: list[tuple[Callable[[Path], object], str]] = [
    (cell(ITEMS, "brand", 7), f"{ITEMS}: column brand has 7; it must be from 0 to 6"),
    (cell(ITEMS, "brand", -1), f"{ITEMS}: column brand has -1; it must be from 0 to 6"),
    (cell(ITEMS, "brand", None), f"{ITEMS}: empty values in column brand"),
    (cell(ITEMS, "tags", [3, 11]), f"{ITEMS}: column tags has 11; it must be from 0 to 10"),
    (cell(ITEMS, "tags", None), f"{ITEMS}: empty values in column tags"),
    (cell(ITEMS, "tags", [3, None]), f"{ITEMS}: empty values in column tags"),
    (cell(ITEMS, "price", None), f"{ITEMS}: empty or infinite values in column price"),
    (cell(ITEMS, "price", float("inf")), f"{ITEMS}: empty or infinite values in column price"),
    (cell(ITEMS, "image", None), f"{ITEMS}: empty values in column image"),
    (cell(ITEMS, "image", [1.0, None, 0.0]), f"{ITEMS}: empty or infinite values in column image"),
    (cell(ITEMS, "item_index", 7), f"{ITEMS}: its rows are not numbered 0 to 49 in order"),
    (cell(PART, "country", 4), f"{PART}: column country has 4; it must be from 0 to 3"),
    (cell(PART, "action", [1]), f"{PART}: column action has lists that are not as long as item_indices"),
    (cell(PART, "rating", [1.0]), f"{PART}: column rating has lists that are not as long as item_indices"),
    (cell(PART, "query", [[1]]), f"{PART}: column query has lists that are not as long as item_indices"),
    # The last of the user's actions.
    (cell(PART, "action", (3,)), f"{PART}: column action has 3; it must be from 0 to"),
    (cell(PART, "query", ([0, 11],)), f"{PART}: column query has 11; it must be from 0 to"),
    (all_of(ITEMS, "brand", 0, pa.float32()), f"{ITEMS}: column brand has values of type float, not int64"),
    (all_of(ITEMS, "price", 0, pa.int64()), f"{ITEMS}: column price has values of type int64, not float"),
    (all_of(ITEMS, "tags", 0, pa.int64()), f"{ITEMS}: column tags is of type int64, not a list"),
    (all_of(ITEMS, "image", [0, 0], pa.list_(pa.float32(), 2)), f"{ITEMS}: column image has vectors that are not 3 wi"),
    (all_of(ITEMS, "raw_id", None, pa.float64()), f"{ITEMS}: column raw_id has values of type double, not string"),
    (all_of(ITEMS, "raw_id", None, pa.binary()), f"{ITEMS}: column raw_id has values of type binary, not string"),
    (all_of(BRANDS, "value", None, pa.float64()), f"{BRANDS}: column value has values of type double, not string"),
    (all_of(BRANDS, "value", None, pa.binary()), f"{BRANDS}: column value has values of type binary, not string"),
    (sized, f"{ITEMS}: no column size; there are: item_index, raw_id, brand"),
    (lambda path: pq.write_table(pa.table({"value": ["", "a"]}), path / BRANDS), f"{BRANDS}: 2 values, but the schema"),
    (lambda path: (path / BRANDS).unlink(), f"{BRANDS} is missing"),
    (lambda path: (path / ITEMS).unlink(), f"{ITEMS} is missing"),
    *((wide(owner), "dataset.json: Unable to allocate") for owner in get_args(Owner)),
]


@pytest.mark.parametrize("number", range(len(WRONG_FEATURES)))
def test_wrong_features_are_named_alike_by_the_check(featured: Path, number: int) -> None:
    require_named(featured, *WRONG_FEATURES[number])


def test_what_the_documentation_writes_with_duckdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb", reason="needs duckdb: pip install duckdb")
    (code,) = re.findall(r"```python\n(import json.*?)```", (ROOT / "docs" / "dataset.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    rows = [f"{user},{item},{time}" for time, (user, item) in enumerate(product("abc", [10, 9, 11, 9]))]
    Path("clicks.csv").write_text("\n".join(["user,item,time", *rows[::-1], rows[0].replace("10", "9")]) + "\n")
    exec(code, {})
    prepare(PrepareOptions("table", "clicks.csv", out="prepared", timestamp_column="time", min_user_actions=1))
    one, other = load_dataset("data/own"), load_dataset("prepared")
    assert sequences_of(one) == sequences_of(other) and one.timestamps_flat.tolist() == other.timestamps_flat.tolist()
    assert list(one.raw_ids()) == list(other.raw_ids())
    assert one.repeated_targets == other.repeated_targets == {"validation": 0.0, "test": 1.0}
