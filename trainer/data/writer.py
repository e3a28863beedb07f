"""The writer of a dataset directory; dataset.py describes the format."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logitmix.modules.schema import ITEM, Feature, Schema
from logitmix.trainer.data.arrow import is_list
from logitmix.trainer.data.columns import ROW, SEQUENCE_COLUMNS, Column, ranges, user_blocks
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
    return finish_dataset(directory, contents, name, len(offsets) - 1, counted.entries(), **entries)


@dataclass(frozen=True)
class PartWriter:
    """Writes parts of sequences/ of numbered actions."""

    directory: Path
    schema: Schema
    user_ids: pa.Array
    users: Mapping[str, Column]
    """Features of users."""
    events: Mapping[str, tuple[str, pa.Array, Column]]
    """Features of actions: the column of the keys of their values, all of these, and the feature of each."""
    users_per_file: int = USERS_PER_FILE

    @property
    def parts(self) -> int:
        """Returns how many files sequences/ has."""
        return -(-len(self.user_ids) // self.users_per_file)

    def __call__(self, part: int, rows: pa.Table) -> Counted:
        """Writes a part and counts it, given its actions in order, as those of `Numbered.kept`."""
        first = part * self.users_per_file
        stop = min(first + self.users_per_file, len(self.user_ids))
        of_user, items, times, fractions = (
            rows[name].to_numpy() for name in ("user_index", "item_index", "time", "fraction")
        )
        offsets = np.searchsorted(of_user, np.arange(first, stop + 1))
        columns = {name: column.take(np.arange(first, stop)) for name, column in self.users.items()}
        for name, (column, keys, feature) in self.events.items():
            columns[name] = feature.take(pc.index_in(rows[column].combine_chunks(), value_set=keys).to_numpy())
        ids = self.user_ids[first:stop]
        contents = DatasetContents(offsets, items, times, pa.nulls(0), ids, None, self.schema, columns)
        write_part(self.directory, part, contents, 0, stop - first, first)
        return Counted.of(offsets, items, times, fractions, self.schema.table(ITEM).rows - 1)


def write_sequences(writer: PartWriter, batches: Iterable[pa.RecordBatch]) -> Counted:
    """Writes sequences/ of actions in the order of the dataset, the users of each of its files at a time."""
    (writer.directory / "sequences").mkdir(parents=True)
    counted, held, part = Counted(), list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        while len(batch) and batch["user_index"][-1].as_py() >= (stop := (part + 1) * writer.users_per_file):
            rows = pa.Table.from_batches(held)
            cut = int(np.searchsorted(rows["user_index"].to_numpy(), stop))
            counted.add(writer(part, rows[:cut].combine_chunks()))
            held, part = rows[cut:].to_batches(), part + 1
    counted.add(writer(part, pa.Table.from_batches(held).combine_chunks()))
    return counted


def write_part(
    directory: Path, part: int, contents: DatasetContents, start: int, stop: int, first_user: int = 0
) -> None:
    """Writes a file of sequences/. `contents` begin with this user."""
    schema, users = contents.schema or Schema.of_ids(len(contents.item_ids)), np.arange(start, stop) + first_user
    bounds = contents.offsets[start : stop + 1]
    made = sequences_of(users, bounds, contents.items, contents.timestamps, schema, contents.columns)
    columns = {name: made[name] for name in SEQUENCE_COLUMNS}
    if contents.user_ids is not None:
        columns["raw_user_id"] = contents.user_ids[start:stop]
    columns |= {of.name: rows_of(of, contents.columns[of.name], start, stop) for of in schema.of("user")}
    table = pa.table(columns | made)
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
    directory: Path, contents: DatasetContents, name: str, users: int, counted: Mapping[str, Any], **entries: Any
) -> dict[str, Any]:
    """Writes the rest of a dataset whose sequences/ are there; `counted` as `Counted.entries` returns it."""
    schema = contents.schema or Schema.of_ids(len(contents.item_ids))
    texts = {"raw_id": contents.item_ids, **({} if contents.titles is None else {"title": contents.titles})}
    pq.write_table(rows_table("item_index", 0, texts, schema.of("item"), contents.columns), directory / "items.parquet")
    others = {f"vocabularies/{table}": pa.table({"value": values}) for table, values in contents.vocabularies.items()}
    for feature, projection in contents.projections.items():
        rows = pa.FixedSizeListArray.from_arrays(pa.array(projection.ravel()), projection.shape[1])
        others[f"{PROJECTIONS}/{feature}"] = pa.table({"row": rows})
    for path, table in others.items():
        (directory / path).parent.mkdir(exist_ok=True)
        pq.write_table(table, directory / f"{path}.parquet")
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


def sequences_of(
    users: np.ndarray,
    bounds: np.ndarray,
    items: np.ndarray,
    times: np.ndarray,
    schema: Schema,
    columns: Mapping[str, Column],
) -> dict[str, pa.Array]:
    """Columns of lists of the actions of some users, which are between `bounds`: items, times and features."""
    first, last = int(bounds[0]), int(bounds[-1])
    values = {"item_indices": pa.array(items[first:last], pa.int64())}
    values["timestamps"] = pa.array(times[first:last], pa.int64())
    values |= {of.name: rows_of(of, columns[of.name], first, last) for of in schema.of("event")}
    starts = pa.array(bounds - first, pa.int32())
    lists = {name: pa.ListArray.from_arrays(starts, of) for name, of in values.items()}
    return {"user_index": pa.array(users, pa.int64())} | lists


def rows_table(
    index: str, first: int, texts: Mapping[str, pa.Array], features: Sequence[Feature], columns: Mapping[str, Column]
) -> pa.Table:
    """The table of items or users, of which the first has this index."""
    count = len(next(iter(texts.values())))
    of_features = {of.name: rows_of(of, columns[of.name], 0, count) for of in features}
    return pa.table({index: pa.array(np.arange(first, first + count), pa.int64())} | {**texts} | of_features)


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
