import json
import re
import shutil
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


def test_reads_what_was_written(made: Path) -> None:
    loaded = load_dataset(made)
    assert (loaded.name, loaded.num_users, loaded.num_items) == ("made", 3, 3)
    assert loaded.items_flat.dtype == np.int32 and loaded.offsets.dtype == np.int64
    assert sequences_of(loaded) == [[0, 1, 2], [2], [1, 1]]
    assert loaded.raw_ids() == ["a", "b", "c"]


def test_users_are_split_over_files_and_joined_again(tmp_path: Path) -> None:
    path = write(tmp_path / "made", [[0], [1, 0], [1], [0, 0], [1]], ["a", "b"], users_per_file=2)
    assert len(list((path / "sequences").iterdir())) == 3
    assert sequences_of(load_dataset(str(path))) == [[0], [1, 0], [1], [0, 0], [1]]


def test_lists_of_other_writers_are_read(made: Path) -> None:
    lists = pa.array([[0, 1], [2], [0, 1, 1]], pa.large_list(pa.int32()))
    replace_sequences(made, columns_of(lists, lists, pa.array([0, 1, 2], pa.int32())))
    assert sequences_of(load_dataset(made)) == [[0, 1], [2], [0, 1, 1]]


def test_no_dataset_says_how_to_make_it(tmp_path: Path) -> None:
    for name, of in (("ml-1m", "ml-1m"), ("mine", "NAME")):
        problem = f"^no dataset at {tmp_path}/{name}; make it with: logitmix prepare {of} --out"
        with pytest.raises(ValueError, match=problem):
            load_dataset(tmp_path / name)


LISTS = [[0, 1, 2], [2], [1, 1]]


def columns_of(items: Any = LISTS, times: Any = LISTS, index: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    return {"user_index": index, "item_indices": items, "timestamps": times}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (columns_of(index=[0, 2, 1]), "its rows are not 0 to 2 in order"),
        ({"user_index": [0, 1, 2], "item_indices": LISTS}, "no column timestamps; there are: user_index, item_indices"),
        (columns_of([[0, None, 1], [2], [1, 1]]), "empty values in column item_indices"),
        (columns_of([0, 1, 2]), "column item_indices is of type int64, not a list"),
        (columns_of(LISTS[:2], LISTS[:2], [0, 1]), "2 users and up to 4 actions, but dataset.json says 3 and 6"),
        (columns_of(times=[[0, 1, 2], [2], [1]]), "column timestamps has lists that are not as long as item_indices"),
        (columns_of([[0.5, 1, 2], [2], [1, 1]]), "column item_indices has values of type double, not int64"),
        (columns_of([*LISTS, [0]], [*LISTS, [0]], [0, 1, 2, 3]), "4 users and up to 7 actions"),
    ],
)
def test_wrong_sequences_are_named(made: Path, columns: dict[str, object], message: str) -> None:
    replace_sequences(made, columns)
    with pytest.raises(ValueError, match=f"^{made}: .*{message}.*; make it again with: logitmix prepare NAME"):
        load_dataset(made)


@pytest.mark.parametrize("wrong", [-1, 3, 2**31, 2**32 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1])
@pytest.mark.parametrize("user", [0, 2, 3])
def test_indices_out_of_range_are_named_with_their_place(tmp_path: Path, wrong: int, user: int) -> None:
    """Also those that would be in range after 32 or 64 bits."""
    lists = [[0, 1, 2], [], [2], [1, 1]]
    path = small_data.forget_digests(write(tmp_path / "made", lists, ["a", "b", "c"], users_per_file=2))
    items = [list(of) for of in lists]
    items[user][-1] = wrong
    kind = pa.list_(pa.uint64() if wrong >= 2**63 else pa.int64())
    for part, users in enumerate(([0, 1], [2, 3])):
        of = {"user_index": users, "item_indices": pa.array([items[user] for user in users], kind)}
        replace_sequences(path, of | {"timestamps": [lists[user] for user in users]}, f"part-{part:05d}.parquet")
    place = (
        rf"sequences/part-0000{user // 2}\.parquet: column item_indices has {wrong} at user_index {user}; it must be "
        "from 0 to 2"
    )
    with pytest.raises(ValueError, match=f"^{path}: {place}; make it again"):
        load_dataset(path)


@pytest.mark.parametrize("wrong", [2**62, -(2**62), 2**63])
def test_times_out_of_range_are_named(made: Path, wrong: int) -> None:
    kind = pa.list_(pa.uint64() if wrong > 0 else pa.int64())
    times = pa.array([[0, 1, 2], [2], [1, wrong]], kind)
    replace_sequences(made, columns_of(times=times))
    with pytest.raises(ValueError, match=f"column timestamps has {wrong} at user_index 2; it must be from -"):
        load_dataset(made)


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint32()])
@pytest.mark.parametrize("user", [0, 4, 5, 6])
def test_times_that_decrease_are_named_with_their_place(tmp_path: Path, user: int, kind: pa.DataType) -> None:
    """Those of one user; the next user may begin earlier, and some have no actions."""
    lists = [[7, 7, 8], [], [5], [], [1, 6], [1, 2, 2], [3, 4], []]
    items = [[0] * len(of) for of in lists]
    path = small_data.forget_digests(write(tmp_path / "made", items, ["a"], users_per_file=3))

    def replace_times(times: list[list[int]]) -> None:
        for part, users in enumerate(([0, 1, 2], [3, 4, 5], [6, 7])):
            of = {"item_indices": items, "timestamps": times}
            columns = {name: pa.array([each[user] for user in users], pa.list_(kind)) for name, each in of.items()}
            replace_sequences(path, {"user_index": users} | columns, f"part-{part:05d}.parquet")

    replace_times(lists)
    assert load_dataset(path).timestamps_flat.tolist() == [time for of in lists for time in of]
    last = lists[user][-2]
    replace_times([[*of[:-1], last - 1] if at == user else of for at, of in enumerate(lists)])
    place = (
        rf"sequences/part-0000{user // 3}\.parquet: column timestamps has {last - 1} after {last} at user_index {user}"
    )
    with pytest.raises(ValueError, match=f"^{path}: {place}; they must be oldest first; make it again"):
        load_dataset(path)


@pytest.mark.parametrize("name", ["user_index", "item_indices", "timestamps"])
def test_columns_of_one_name_are_refused(made: Path, name: str) -> None:
    columns = columns_of()
    twice = pa.table([pa.array(of) for of in (*columns.values(), columns[name])], [*columns, name])
    pq.write_table(twice, made / "sequences" / "part-00000.parquet")
    with pytest.raises(ValueError, match=rf"part-00000\.parquet: there are two columns named {name}; make it again"):
        load_dataset(made)


@pytest.mark.parametrize(("entry", "count"), [("users", 2**47), ("actions", 2**47), ("users", 2**70)])
def test_counts_that_cannot_be_are_one_line(made: Path, entry: str, count: int) -> None:
    edit_description(made, **{entry: count})
    with pytest.raises(ValueError, match=rf"but dataset\.json says .*{count}|has no {entry} that is a count"):
        load_dataset(made)


def test_more_actions_than_are_said(made: Path) -> None:
    """The metadata of a Parquet file does not tell empty lists from those of one action."""
    edit_description(made, actions=5)
    with pytest.raises(ValueError, match=r"there are more users or actions than dataset\.json says \(3, 5\)"):
        load_dataset(made)


@pytest.mark.parametrize("owner", ["item", "user", "event"])
def test_widths_that_cannot_be_are_one_line(featured: Path, owner: str) -> None:
    def widen(schema: dict[str, Any]) -> None:
        for feature in schema["features"]:
            if (feature["owner"], feature["kind"]) == (owner, "vector"):
                feature["width"] = 2**45

    edit_schema(featured, widen)
    with pytest.raises(ValueError, match=rf"^{featured}: dataset\.json: Unable to allocate"):
        load_dataset(featured)


@pytest.mark.parametrize(("name", "rows"), [("action", 3), ("query", 11)])
def test_features_of_actions_out_of_range_are_named_with_their_place(featured: Path, name: str, rows: int) -> None:
    path = featured / "sequences" / "part-00000.parquet"
    values = pq.read_table(path)[name][5].as_py()
    values[-1] = rows if name == "action" else [0, rows]
    edit_cell(path, name, 5, values)
    message = rf"{path.name}: column {name} has {rows} at user_index 5; it must be from 0 to"
    with pytest.raises(ValueError, match=message):
        load_dataset(featured)


def test_texts_that_are_not_utf_8_are_found_when_they_are_read(featured: Path) -> None:
    """By their rows."""

    def damage(file: Path, column: str) -> None:
        texts = [text.encode() if text else b"" for text in pq.read_table(file)[column].to_pylist()]
        texts[3] = b"\xff"
        edit_column(file, column, pa.array(texts).view(pa.string()))

    items, brands = featured / "items.parquet", featured / "vocabularies" / "brand.parquet"
    pq.write_table(pq.read_table(items).append_column("title", pa.array(["x"] * small_data.ITEMS)), items)
    loaded = load_dataset(featured)
    for file, column, read in (
        (items, "title", loaded.title_column),
        (items, "raw_id", loaded.raw_ids),
        (items, "raw_id", lambda: list(stored_values(featured, loaded.schema, "item"))),
        (brands, "value", lambda: loaded.vocabulary("brand")),
        (brands, "value", lambda: list(stored_values(featured, loaded.schema, "brand"))),
    ):
        before = file.read_bytes()
        damage(file, column)
        with pytest.raises(ValueError, match=rf"{file.name} cannot be read \(.*[Ii]nvalid UTF8 .* 3\)"):
            read()
        file.write_bytes(before)


def test_users_are_contiguous_over_files(made: Path) -> None:
    replace_sequences(made, columns_of([[0]], [[0]], [4]), "part-00001.parquet")
    edit_description(made, users=4, actions=7)
    with pytest.raises(ValueError, match=r"part-00001\.parquet: its rows are not 3 to 3 in order"):
        load_dataset(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "it is of format version 2, and this logitmix reads 3"),
        ({"schema": None}, "dataset.json: no schema"),
        ({"schema": {"features": []}}, "dataset.json: schema: tables is missing"),
        ({"schema": Schema.of_ids(4).to_mapping()}, "table item has 5 rows, not one more than the 3 items"),
        ({"users": "3"}, "no users that is a count"),
        ({"actions": -1}, "no actions that is a count"),
        ({"name": 7}, "no name that is text"),
        ({"items": 4, "schema": Schema.of_ids(4).to_mapping()}, "items.parquet: 3 rows, but dataset.json says 4 items"),
    ],
)
def test_wrong_descriptions_are_named(made: Path, changes: dict[str, object], message: str) -> None:
    edit_description(made, **changes)
    with pytest.raises(ValueError, match=f"^{made}: .*{message}"):
        load_dataset(made)


def test_repeated_targets_of_another_writer_are_computed(tmp_path: Path) -> None:
    path = write(tmp_path / "made", [[0, 1, 0], [1, 1, 2]], ["a", "b", "c"])
    assert load_dataset(path).repeated_targets == {"validation": 0.5, "test": 0.5}
    small_data.forget_digests(path)
    edit_description(path, repeated_targets={"test": 2})
    assert load_dataset(path).repeated_targets == {"validation": 0.5, "test": 0.5}


def test_damaged_files_are_named(made: Path) -> None:
    for file in ("dataset.json", "sequences/part-00000.parquet", "items.parquet"):
        damaged = made.parent / "damaged"
        shutil.copytree(made, damaged)
        (damaged / file).write_bytes(b"PAR1 nothing PAR1")
        with pytest.raises(ValueError, match=f"^{damaged}: {file} .*make it again"):
            load_dataset(damaged)
        shutil.rmtree(damaged)


def test_items_out_of_order_are_found_when_their_ids_are_read(made: Path) -> None:
    pq.write_table(pa.table({"item_index": [0, 2, 1], "raw_id": ["a", "c", "b"]}), made / "items.parquet")
    with pytest.raises(ValueError, match=r"items\.parquet: its rows are not 0 to 2 in order"):
        load_dataset(made).raw_ids()


def test_times_take_4_bytes_where_all_fit(tmp_path: Path) -> None:
    for name, last, kind in (("near", 2**31 - 1, np.int32), ("far", 2**31, np.int64), ("old", -(2**31) - 1, np.int64)):
        times = np.array([min(last, 5), 7, last, 8])
        contents = DatasetContents(np.arange(5), np.zeros(4, int), times, pa.array(["a"]))
        write_dataset(tmp_path / name, contents, "made", users_per_file=2)
        loaded = load_dataset(tmp_path / name)
        assert loaded.timestamps_flat.dtype == kind and loaded.timestamps_flat.tolist() == times.tolist()


def test_the_command_that_makes_it_again_is_that_of_the_dataset(made: Path) -> None:
    filters = {"min_user_actions": 3, "min_item_actions": 0}
    entries = {"name": "table", "source": {"name": "clicks.csv", "sha256": {}}, "filters": filters}
    edit_description(made, format_version=1, **entries)
    command = f"logitmix prepare table --source clicks.csv --min-user-actions 3 --out {made} --overwrite"
    problem = f"of format version 1, and this logitmix reads 3; make it again with: {command}$"
    with pytest.raises(ValueError, match=problem):
        load_dataset(made)
    (made.parent / "clicks.csv").touch()
    with pytest.raises(ValueError, match=f"--source {made.parent}/clicks.csv --min"):
        load_dataset(made)


@pytest.mark.parametrize(
    ("plugins", "problem"),
    [
        ({"hour.py": "1f"}, r"needs the plugin hour\.py \(1f\): --import PLACE/hour\.py; in Python, import it before$"),
        (["hour.py"], "plugins are not versions by name; make it again with"),
    ],
)
def test_a_plugin_that_is_needed_is_named(made: Path, plugins: object, problem: str) -> None:
    edit_description(made, plugins=plugins)
    with pytest.raises(ValueError, match=f"^{made}.* {problem}"):
        load_dataset(made)


@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["cut off", "nested"])
def test_a_description_that_is_not_json_is_named(made: Path, text: str) -> None:
    (made / "dataset.json").write_text(text)
    with pytest.raises(ValueError, match=r"dataset\.json is damaged \(.*\); make it again with: logitmix prepare "):
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
    """Spark has no lists of a fixed size, and numbers may be doubles."""
    before = load_dataset(featured)
    file = featured / "items.parquet"
    table = pq.read_table(file)
    edit_column(file, "image", pa.array(table["image"].to_pylist(), pa.large_list(pa.float64())))
    edit_column(file, "brand", table["brand"].cast(pa.int16()))
    for name, column in load_dataset(featured).item_features.items():
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


@pytest.mark.parametrize("kind", [pa.float64(), pa.binary()], ids=str)
def test_ids_and_values_of_another_type_are_named(featured: Path, kind: pa.DataType) -> None:
    for name, file in (("value", "vocabularies/brand.parquet"), ("raw_id", "items.parquet")):
        path = featured / file
        before = path.read_bytes()
        edit_column(path, name, pa.nulls(len(pq.read_table(path)), kind))
        with pytest.raises(ValueError, match=f"{path.name}: column {name} has values of type {kind}, not string; make"):
            load_dataset(featured)
        path.write_bytes(before)


def edit_column(file: Path, name: str, values: pa.Array) -> None:
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), file)


def edit_cell(file: Path, name: str, row: int, value: object) -> None:
    column = pq.read_table(file)[name]
    values = column.to_pylist()
    values[row] = value
    edit_column(file, name, pa.array(values, column.type))


@pytest.mark.parametrize(
    ("file", "name", "value", "message"),
    [
        ("items", "brand", 7, "column brand has 7 at item_index 2; it must be from 0 to 6"),
        ("items", "brand", -1, "column brand has -1 at item_index 2; it must be from 0 to 6"),
        ("items", "brand", None, "empty values in column brand"),
        ("items", "tags", [3, 11], "column tags has 11 at item_index 2; it must be from 0 to 10"),
        ("items", "tags", None, "empty values in column tags"),
        ("items", "tags", [3, None], "empty values in column tags"),
        ("items", "price", None, "empty or infinite values in column price"),
        ("items", "price", float("inf"), "empty or infinite values in column price"),
        ("items", "image", None, "empty values in column image"),
        ("items", "image", [1.0, None, 0.0], "empty or infinite values in column image"),
        ("items", "item_index", 7, "its rows are not 0 to 49 in order"),
        ("sequences", "country", 4, "column country has 4 at user_index 2; it must be from 0 to 3"),
        ("sequences", "action", [1], "column action has lists that are not as long as item_indices"),
        ("sequences", "rating", [1.0], "column rating has lists that are not as long as item_indices"),
        ("sequences", "query", [[1]], "column query has lists that are not as long as item_indices"),
    ],
)
def test_wrong_features_are_named(featured: Path, file: str, name: str, value: object, message: str) -> None:
    path = featured / "items.parquet" if file == "items" else featured / "sequences" / "part-00000.parquet"
    edit_cell(path, name, 2, value)
    with pytest.raises(ValueError, match=rf"^{featured}: {path.relative_to(featured)}: {message}; make it again with"):
        load_dataset(featured)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("brand", pa.float32(), "column brand has values of type float, not int64"),
        ("price", pa.int64(), "column price has values of type int64, not float"),
        ("tags", pa.int64(), "column tags is of type int64, not a list"),
        ("image", pa.list_(pa.float32(), 2), "column image has vectors that are not 3 wide"),
    ],
)
def test_features_of_another_type_are_named(featured: Path, name: str, kind: pa.DataType, message: str) -> None:
    zero: object = [0.0, 0.0] if name == "image" else 0
    edit_column(featured / "items.parquet", name, pa.array([zero] * small_data.ITEMS, kind))
    with pytest.raises(ValueError, match=rf"items\.parquet: {message}; make it again"):
        load_dataset(featured)


def test_a_column_that_the_schema_names_must_be_there(featured: Path) -> None:
    edit_schema(featured, lambda schema: schema["features"].append({"name": "size", "owner": "item", "kind": "number"}))
    with pytest.raises(ValueError, match=r"items\.parquet: no column size; there are: item_index, raw_id, brand"):
        load_dataset(featured)


def test_vocabularies_are_as_long_as_their_tables(featured: Path) -> None:
    vocabulary = featured / "vocabularies" / "brand.parquet"
    pq.write_table(pa.table({"value": ["", "a"]}), vocabulary)
    with pytest.raises(ValueError, match=r"brand\.parquet: 2 values, but the schema says 7 rows; make it again"):
        load_dataset(featured)
    vocabulary.unlink()
    with pytest.raises(ValueError, match=r"brand\.parquet is missing; make it again"):
        load_dataset(featured)


def test_columns_beyond_the_schema_are_left_alone(made: Path) -> None:
    table = pq.read_table(made / "items.parquet")
    pq.write_table(table.append_column("notes", pa.array(["x"] * len(table))), made / "items.parquet")
    assert load_dataset(made).item_features == {}


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
