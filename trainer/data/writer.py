"""The writer of a dataset directory; dataset.py describes the format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitmix.modules.schema import Feature, Schema
from logitmix.trainer.data.columns import ROW, Column, ranges, user_blocks
from logitmix.trainer.data.description import FORMAT, PROJECTIONS, entries_of
from logitmix.trainer.data.repeats import repeated_targets

USERS_PER_FILE = 100_000


@dataclass(frozen=True, eq=False)
class DatasetContents:
    """The data to write: U users, X items, A actions ordered by user, then time."""

    offsets: np.ndarray
    """int64 [U+1]: user u's actions are offsets[u] : offsets[u+1]."""
    items: np.ndarray
    """Integer [A]."""
    timestamps: np.ndarray
    """int64 [A]."""
    item_ids: pa.Array
    """string [X]: the ids in the source."""
    user_ids: pa.Array | None = None
    """string [U]."""
    titles: pa.Array | None = None
    """string [X], null for items without one."""
    schema: Schema | None = None
    """None: the item ids alone."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Columns of every feature but the item id."""
    vocabularies: Mapping[str, pa.Array] = field(default_factory=dict)
    """string, by table, of every table but item's; row 0 null."""
    projections: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float32 [BUCKETS, width], of every feature of texts that is encoded by n-grams."""


LAST = (51, 201)
"""Last actions of a user that the paper's table of datasets counts: for the 50 of Amazon's and the 200 of MovieLens's
that its models see, and their target."""


def write_dataset(
    directory: Path, contents: DatasetContents, name: str, users_per_file: int = USERS_PER_FILE, **entries: Any
) -> dict[str, Any]:
    """Writes a dataset into a new or empty directory, with further `entries` of dataset.json; returns its content. A
    rejects.tsv may be there already."""
    return finish_dataset(directory, contents, name, write_sequences(directory, contents, users_per_file), **entries)


def write_sequences(directory: Path, contents: DatasetContents, users_per_file: int = USERS_PER_FILE) -> dict[str, Any]:
    """Writes sequences/; returns the entries of dataset.json that are counted of them."""
    (directory / "sequences").mkdir(parents=True)
    users = len(contents.offsets) - 1
    for part, start in enumerate(range(0, users, users_per_file)):
        write_part(directory, part, contents, start, min(start + users_per_file, users))
    return {
        "actions": len(contents.items),
        "repeated_targets": repeated_targets(contents.offsets, contents.items),
        "last_actions": {str(count): last_actions(contents.offsets, contents.items, count) for count in LAST},
    }


def write_part(
    directory: Path, part: int, contents: DatasetContents, start: int, stop: int, first_user: int = 0
) -> None:
    """Writes a file of sequences/. `contents` begin with this user."""
    schema = contents.schema or Schema.of_ids(len(contents.item_ids))
    table = _sequences(contents, schema, start, stop, first_user)
    pq.write_table(table, directory / "sequences" / f"part-{part:05d}.parquet")


def finish_dataset(
    directory: Path, contents: DatasetContents, name: str, counted: Mapping[str, Any], **entries: Any
) -> dict[str, Any]:
    """Writes the rest of a dataset whose sequences/ are there; `counted` as `write_sequences` returns it."""
    schema, users = contents.schema or Schema.of_ids(len(contents.item_ids)), len(contents.offsets) - 1
    pq.write_table(_items(contents, schema), directory / "items.parquet")
    if contents.vocabularies:
        (directory / "vocabularies").mkdir()
    for table_name, values in contents.vocabularies.items():
        pq.write_table(pa.table({"value": values}), directory / "vocabularies" / f"{table_name}.parquet")
    if contents.projections:
        (directory / PROJECTIONS).mkdir()
    for feature_name, projection in contents.projections.items():
        rows = pa.FixedSizeListArray.from_arrays(pa.array(projection.ravel()), projection.shape[1])
        pq.write_table(pa.table({"row": rows}), directory / PROJECTIONS / f"{feature_name}.parquet")
    description = {
        "name": name,
        "users": users,
        "items": len(contents.item_ids),
        "actions": counted["actions"],
        "schema": schema.to_mapping(),
        **counted,
        **entries,
        **({"plugins": needed} if (needed := schema.plugins()) else {}),
        "files": entries_of(directory, sorted(directory.rglob("*"))),
    }
    # Last, because it makes the directory a dataset.
    return FORMAT.write(directory / "dataset.json", description)


def last_actions(offsets: np.ndarray, items: np.ndarray, count: int) -> dict[str, int]:
    """Number of actions if each user has the last `count` alone, and of the items among them."""
    actions, there = find_last(offsets, items, count)
    return {"actions": actions, "items": int(np.count_nonzero(there))}


def find_last(offsets: np.ndarray, items: np.ndarray, count: int) -> tuple[int, np.ndarray]:
    """How many actions there are if each user has the last `count` alone, and which items they are of, as far as the
    largest one: bool."""
    actions, there = 0, np.zeros(0, bool)
    for _, bounds in user_blocks(offsets):
        lengths = np.minimum(np.diff(bounds), count)
        actions += int(lengths.sum())
        found = items[bounds[0] : bounds[-1]]
        if len(found) > lengths.sum():
            found = found[ranges(bounds[1:] - lengths - bounds[0], lengths)]
        if len(found):
            there = np.append(there, np.zeros(max(0, int(found.max()) + 1 - len(there)), bool))
            there[found] = True
    return actions, there


def _sequences(contents: DatasetContents, schema: Schema, start: int, stop: int, first_user: int) -> pa.Table:
    bounds = contents.offsets[start : stop + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    starts = pa.array(bounds - first, pa.int32())

    def lists(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(starts, values)

    columns = {
        "user_index": pa.array(first_user + np.arange(start, stop), pa.int64()),
        "item_indices": lists(pa.array(contents.items[first:last], pa.int64())),
        "timestamps": lists(pa.array(contents.timestamps[first:last], pa.int64())),
    }
    if contents.user_ids is not None:
        columns["raw_user_id"] = contents.user_ids[start:stop]
    for feature in schema.of("user"):
        columns[feature.name] = rows_of(feature, contents.columns[feature.name], start, stop)
    for feature in schema.of("event"):
        columns[feature.name] = lists(rows_of(feature, contents.columns[feature.name], first, last))
    return pa.table(columns)


def _items(contents: DatasetContents, schema: Schema) -> pa.Table:
    count = len(contents.item_ids)
    columns = {"item_index": pa.array(np.arange(count), pa.int64()), "raw_id": contents.item_ids}
    if contents.titles is not None:
        columns["title"] = contents.titles
    for feature in schema.of("item"):
        columns[feature.name] = rows_of(feature, contents.columns[feature.name], 0, count)
    return pa.table(columns)


def rows_of(feature: Feature, column: Column, start: int, stop: int) -> pa.Array:
    """Some rows of a column as the directory stores them."""
    dtype = pa.int64() if feature.sparse else pa.float32()
    if column.offsets is not None:
        bounds = column.offsets[start : stop + 1]
        part = slice(bounds[0], bounds[-1])
        values = pa.array(column.values[part], dtype)
        if column.parallel:
            beside = [pa.array(of[part], pa.float32()) for of in column.parallel.values()]
            values = pa.StructArray.from_arrays([values, *beside], [ROW, *column.parallel])
        return pa.ListArray.from_arrays(pa.array(bounds - bounds[0], pa.int32()), values)
    values = pa.array(column.values[start:stop].ravel(), dtype)
    return pa.FixedSizeListArray.from_arrays(values, feature.width) if feature.form.wide else values
