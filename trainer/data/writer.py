"""The writer of a dataset directory; dataset.py describes the format."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitmix.modules.schema import Feature, Schema
from logitmix.trainer.data.arrow import is_list
from logitmix.trainer.data.columns import ROW, Column, ranges, user_blocks
from logitmix.trainer.data.description import FORMAT, PROJECTIONS, entries_of
from logitmix.trainer.data.repeats import count_repeats, shares

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


@dataclass
class Counted:
    """What is counted of the sequences of some users."""

    sums: Counter[str] = field(default_factory=Counter)
    """Numbers of actions and of users, by what they are."""
    first: int = 2**63 - 1
    last: int = -(2**63)
    last_items: dict[int, np.ndarray] = field(default_factory=dict)
    """For each of LAST, which items are among so many last actions of the users, bool [items]."""

    @classmethod
    def of(
        cls, offsets: np.ndarray, items: np.ndarray, times: np.ndarray, fractions: np.ndarray, num_items: int
    ) -> "Counted":
        """Counts users: u has items[offsets[u] : offsets[u + 1]], and their times and fractions of these."""
        with_targets, repeats = count_repeats(offsets, items)
        same = (times[1:] == times[:-1]) & (fractions[1:] == fractions[:-1])
        ends = offsets[1:][np.diff(offsets) > 0] - 1
        same[ends[:-1]] = False
        tied = np.append(same, False) | np.append(False, same)
        sums = Counter(actions=len(items), with_targets=with_targets, tied_actions=int(tied.sum()), **repeats)
        sums["users_that_end_tied"] = int(tied[ends].sum())
        last_items = {}
        for count in LAST:
            last_items[count] = np.zeros(num_items, bool)
            for _, bounds in user_blocks(offsets):
                lengths = np.minimum(np.diff(bounds), count)
                last_items[count][items[ranges(bounds[1:] - lengths, lengths)]] = True
                sums[f"last {count}"] += int(lengths.sum())
        return cls(sums, int(times.min(initial=2**63 - 1)), int(times.max(initial=-(2**63))), last_items)

    def add(self, other: "Counted") -> None:
        """Adds what is counted of other users."""
        self.sums.update(other.sums)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.last_items = {
            count: self.last_items.get(count, False) | there for count, there in other.last_items.items()
        }

    def entries(self) -> dict[str, Any]:
        """Returns the entries of dataset.json that are counted of the sequences."""
        return {
            "actions": self.sums["actions"],
            "repeated_targets": shares(self.sums["with_targets"], {of: self.sums[of] for of in ("validation", "test")}),
            "last_actions": {
                str(count): {"actions": self.sums[f"last {count}"], "items": int(np.count_nonzero(there))}
                for count, there in self.last_items.items()
            },
        }

    def times(self) -> dict[str, int]:
        """Returns the entries of `times` in dataset.json that are counted of the sequences."""
        ties = {name: self.sums[name] for name in ("tied_actions", "users_that_end_tied")}
        return {"first": self.first, "last": self.last} | ties


def write_dataset(
    directory: Path, contents: DatasetContents, name: str, users_per_file: int = USERS_PER_FILE, **entries: Any
) -> dict[str, Any]:
    """Writes a dataset into a new or empty directory, with further `entries` of dataset.json; returns its content. A
    rejects.tsv may be there already."""
    (directory / "sequences").mkdir(parents=True)
    offsets, items, times = contents.offsets, contents.items, contents.timestamps
    for part, start in enumerate(range(0, len(offsets) - 1, users_per_file)):
        write_part(directory, part, contents, start, min(start + users_per_file, len(offsets) - 1))
    counted = Counted.of(offsets, items, times, np.zeros_like(times), len(contents.item_ids))
    return finish_dataset(directory, contents, name, counted.entries(), **entries)


def write_part(
    directory: Path, part: int, contents: DatasetContents, start: int, stop: int, first_user: int = 0
) -> None:
    """Writes a file of sequences/. `contents` begin with this user."""
    schema = contents.schema or Schema.of_ids(len(contents.item_ids))
    table = _sequences(contents, schema, start, stop, first_user)
    # Times rise, and hardly one of them comes again.
    others = [path for field in table.schema if field.name != "timestamps" for path in _paths(field.name, field.type)]
    pq.write_table(
        table,
        directory / "sequences" / f"part-{part:05d}.parquet",
        use_dictionary=others,
        column_encoding={"timestamps.list.element": "DELTA_BINARY_PACKED"},
    )


def _paths(name: str, kind: pa.DataType) -> list[str]:
    """Returns the paths in Parquet of a column's values."""
    if is_list(kind):
        return _paths(f"{name}.list.element", kind.value_type)
    return (
        [path for of in kind for path in _paths(f"{name}.{of.name}", of.type)] if pa.types.is_struct(kind) else [name]
    )


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
