"""The dataset directory: plain Parquet that anything can write, and its reader. Format version 3.

    sequences/*.parquet   one row a user, over all files in the order of their names
        user_index     int64         0 … users - 1, in order
        item_indices   list<int64>   the user's items, oldest first
        timestamps     list<int64>   of the same length, never decreasing: numbers in the unit of the source, between
                                     -2^62 and 2^62; for dates, whole seconds since 1970, UTC
        raw_user_id    string        optional: the id in the source
        FEATURE        …             of owner user: its value; of owner event: a list with a value for each action
    items.parquet         one row an item that occurs in a sequence
        item_index     int64         0 … items - 1, in order
        raw_id         string        the id in the source
        title          string        optional: text that `retrieve` shows, not a feature
        FEATURE        …             of owner item: its value
    vocabularies/TABLE.parquet       of every table but item, one row for each of its rows, in order
        value          string        null or "" in row 0, which stands for every unknown value
    dataset.json
        format_version     3
        name               NAME of `logitmix prepare`
        users, items, actions                      counts of what is here
        schema             {features: [{name, owner, kind, table, width, mean, deviation, columns}],
                           tables: [{name, rows}]}, without fields at their defaults: modules/schema.py defines them
        repeated_targets   {validation, test}: share of targets (leave-one-out) that are in their user's history before
                           them, over all users with more than 2 actions
        last_actions       {51, 201: {actions, items}}: what is left if each user has so many last actions alone, as the
                           paper's table of datasets counts
        filters            {where: [condition], keep_duplicates, min_item_actions, min_user_actions, min_feature_count,
                           removed: {filter: {users, items, actions}}}, in the order in which they were applied
        read               {users, items, actions} counts before the filters
        times              {unit, first, last, tied_actions, users_that_end_tied}: s, ms, us or ns since 1970, or null
                           for other numbers; the first and the last time; actions that have the time of another one of
                           their user, and users whose last action has
        titles             items with a title
        side_tables        {items, users: {ids, matched, without_actions}} of the tables about these, if there are any:
                           distinct ids, how many of the dataset's are among them, and how many have no actions
        rejected_lines     malformed lines that were left out; they are in rejects.tsv
        source             {name, sha256: {file: digest}}, the base name of what was read; null where it was generated.
                           It also has items, users and schema, if such files were given
        generator          {name, parameters} where it was generated, the seed among the parameters; null otherwise
        kind               logitmix dataset
        files              {path: {bytes, sha256}} of all other files, by their paths in the directory
        sha256             digest of all other entries (common/checked.py, which says how such a file is laid out)
    rejects.tsv           file, line, reason, text; only where there are any

A feature's column has its name and is stored by its kind:

    id        int64            row of its table; 0 where the value is missing or unknown
    ids       list<int64>      rows of its table; [] where missing
    number    float32          its mean, from the schema, where missing
    vector    list<float32>    of the feature's width, or fixed_size_list; the mean in every place where missing

Where each id of a bag has numbers beside it (`parallel` of its kind), the bag is a list<struct<row: int64, NAME:
float32, …>>.

Rows of table item are item indices, and its last row, `items`, is the unknown item: so it has items + 1 rows. The item
id itself is in the schema and has no column.

Two features of kind id are neither in the schema nor columns. `recency`, of owner event, follows from the timestamps:
its value is the number of bits of the time since the user's previous action, in the unit of the source ("0" for 0, "1"
for 1, "2" for 2 and 3, … "64"); it is unknown for a user's first action. `user`, of owner user, is the raw_user_id, or
user_index where there is none. Where the schema has a feature or table of one of these names, only that one counts.

`load_dataset` needs of dataset.json the entries up to repeated_targets, and the columns not called optional. A list may
be a large_list; integers and floats may have any width; text may be large_string, string_view, a dictionary, or
integers, which are read as their digits. Users, items and the values of vocabularies are in the order of their raw ids
and texts: by number where all are digits, else by their UTF-8 bytes.

The last three entries are optional too: other writers may leave them out. Where there is one of them, all files are
read and compared with their digests before anything else is read of them, and a Parquet file that is not listed is
refused. So whatever changes a file of `prepare` later, by one bit or as a whole, is found and named.
"""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logitmix.common.checked import Checked, check_file, entry_of, fields_of, require_entry
from logitmix.common.files import from_json, other_kind, parse_json
from logitmix.common.mappings import first_line, from_mapping
from logitmix.common.storage import fetched
from logitmix.modules.schema import ITEM, RECENCY, RECENCY_VALUES, USER, Feature, Schema
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.registry import source_of
from logitmix.trainer.data.times import LATEST

FORMAT = Checked("logitmix dataset", 3)
COMMON_REPEATS, RARE_REPEATS = 0.1, 0.01
"""From the first share of repeated targets on, evaluation does not leave the history out of its ranking unless told to;
from the second one on, it says what is impossible where it does."""
ROW = "row"
"""Of the structs in which bags with parallel numbers are stored: the field with the row of the table."""
SEQUENCE_COLUMNS = ("user_index", "item_indices", "timestamps")
ITEM_COLUMNS = ("item_index", "raw_id")
VALUES_AT_ONCE = 2**20
VALUES_A_BYTE = 1000
"""A Parquet file that claims more rows, or values of a column (vectors of one), than so many for each of its bytes, is
refused before they are decoded: 2 kB can stand for gigabytes. Data that says anything stays far below: the action of a
user at its time takes a bit at the least."""
_USERS = 2**14
"""Users whose recency is computed at once."""
ENTRIES = frozenset({"dataset.json", "items.parquet", "sequences", "vocabularies", "rejects.tsv"})
DIGESTS = ("kind", "files", "sha256")
"""The entries of dataset.json that other writers may leave out."""


@dataclass(frozen=True, eq=False)
class Column:
    """Values of a feature for R rows: items, users, or the actions of all users, one after the other."""

    values: np.ndarray
    """By the form of the feature's kind: [R], [R, width], or those of all bags one after the other [S]. Integers for
    sparse kinds, rows of the feature's table, int32 where that fits; float32 for others."""
    offsets: np.ndarray | None = None
    """Bags only: int64 [R + 1]; row r has values[offsets[r] : offsets[r + 1]]."""
    parallel: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What each value of a bag has beside it: float32 [S], by the kind's names."""

    def take(self, rows: np.ndarray) -> "Column":
        """Some rows, by place."""
        if self.offsets is None:
            return Column(self.values[rows])
        starts = self.offsets[rows].astype(np.int64)
        lengths = self.offsets[rows + 1] - starts
        places, offsets = ranges(starts, lengths), np.concatenate([[0], np.cumsum(lengths)])
        return Column(self.values[places], offsets, {name: of[places] for name, of in self.parallel.items()})

    @property
    def nbytes(self) -> int:
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.values.nbytes + offsets + sum(of.nbytes for of in self.parallel.values())


@dataclass(frozen=True, eq=False)
class Dataset:
    """All sequences in memory: 4 bytes an action, 4 or 8 for its time, and the features."""

    path: Path
    name: str
    num_users: int
    num_items: int
    items_flat: np.ndarray
    """int32 [actions] (int64 from 2^31 items on): every user's items, oldest first, user after user."""
    offsets: np.ndarray
    """int64 [num_users + 1]: user u's items are items_flat[offsets[u] : offsets[u + 1]]."""
    timestamps_flat: np.ndarray
    """[actions], parallel to items_flat: int32 if all times fit, else int64."""
    schema: Schema
    """The schema in dataset.json, without recency and user."""
    repeated_targets: Mapping[str, float]
    """"validation" and "test": share of the targets that are in their user's history before them."""
    item_features: Mapping[str, Column] = field(default_factory=dict)
    """By name, without the item id, which is the index."""
    user_features: Mapping[str, Column] = field(default_factory=dict)
    event_features: Mapping[str, Column] = field(default_factory=dict)
    """Parallel to items_flat: one row per action."""

    def description(self) -> str:
        """The text of dataset.json, which identifies this dataset: counts, schema, digests of the source."""
        return (self.path / "dataset.json").read_text(encoding="utf-8")

    def identity(self) -> dict[str, Any]:
        """What is equal for the same dataset elsewhere: the content of dataset.json, with the digests of all other
        files. Where its writer has left them out, they are computed."""
        description = from_json(self.description())
        if "files" not in description:
            files = sorted(self.path.rglob("*.parquet"))
            description["files"] = {file.relative_to(self.path).as_posix(): entry_of(file) for file in files}
        return fields_of(description)

    def raw_ids(self) -> list[str]:
        """The source's ids by item index, read at each call. ValueError if items.parquet is not as documented."""
        return self.raw_id_column().to_pylist()

    def raw_id_column(self) -> pa.ChunkedArray:
        """`raw_ids` as an Arrow column, in a third of the memory."""
        with _reading(self.path, "items.parquet"):
            table = pq.read_table(self.path / "items.parquet", columns=list(ITEM_COLUMNS))
            _require_columns(table.schema.names, ITEM_COLUMNS)
            _require_order(table["item_index"].combine_chunks(), 0, self.num_items)
            if table["raw_id"].null_count:
                raise ValueError("empty values in column raw_id")
            return _texts("raw_id", table["raw_id"])

    def raw_user_ids(self, user_U: np.ndarray) -> list[str]:
        """The source's ids of users by index, read at each call; the index where the dataset has none."""
        return pa.chunked_array(_raw_user_ids(self.path), pa.large_string()).take(pa.array(user_U)).to_pylist()

    def title_column(self) -> pa.ChunkedArray | None:
        """Titles by item index, null for an item without one; None if the dataset has no titles. Read at each call."""
        file = self.path / "items.parquet"
        with _reading(self.path, file.name):
            if "title" not in pq.read_schema(file).names:
                return None
            return _texts("title", pq.read_table(file, columns=["title"])["title"])

    @cached_property
    def recency(self) -> Column:
        """For every action, int8: the row of table recency, from its time and that of the user's previous action.
        Computed at first use."""
        # `prepare` needs no torch.
        import torch

        from logitmix.modules.features import recency_rows

        rows = np.empty(len(self.timestamps_flat), np.int8)
        # Some users at a time: intermediate results take several times the memory of the rows.
        for start in range(0, self.num_users, _USERS):
            bounds = self.offsets[start : start + _USERS + 1]
            actions = slice(bounds[0], bounds[-1])
            first_B = (bounds[:-1] - bounds[0])[np.diff(bounds) > 0]
            time_T = torch.from_numpy(self.timestamps_flat[actions])
            rows[actions] = recency_rows(time_T, torch.from_numpy(first_B)).numpy()
        return Column(rows)

    def vocabulary(self, table: str) -> list[str]:
        """The values of a table by row, "" for unknown; raw ids for table item. Read at each call."""
        if table == ITEM:
            return [*self.raw_ids(), ""]
        return [value or "" for value in self.vocabulary_column(table).to_pylist()]

    def vocabulary_column(self, table: str) -> pa.ChunkedArray:
        """The values of a table of features by row as an Arrow column, null for unknown. Read at each call."""
        if table in (RECENCY, USER) and table not in [of.name for of in self.schema.tables]:
            values = pa.chunked_array(stored_values(self.path, self.schema, table), pa.large_string())
            return pc.if_else(pc.equal(values, ""), None, values)
        file = self.path / "vocabularies" / f"{table}.parquet"
        with _reading(self.path, file.name):
            return _texts("value", pq.read_table(file, columns=["value"])["value"])


def stored_values(path: Path, schema: Schema, table: str) -> Iterator[pa.Array]:
    """What each row of a table stands for in the dataset at `path`: raw ids of items, values of features, "" for
    unknown. Arrow's large_string, VALUES_AT_ONCE at a time."""
    if table == RECENCY and table not in [of.name for of in schema.tables]:
        yield pa.array(RECENCY_VALUES, pa.large_string())
        return
    if table == USER and table not in [of.name for of in schema.tables]:
        yield pa.array([""], pa.large_string())
        yield from _raw_user_ids(path)
        return
    file, column = ("items.parquet", "raw_id") if table == ITEM else (f"vocabularies/{table}.parquet", "value")
    with _reading(path, file):
        for batch in _batches(path / file, [column], VALUES_AT_ONCE):
            yield _texts(column, batch.column(column)).fill_null("")
    if table == ITEM:
        yield pa.array([""], pa.large_string())


def _raw_user_ids(path: Path) -> Iterator[pa.Array]:
    for part in sorted((path / "sequences").glob("*.parquet")):
        with _reading(path, part.name):
            column = "raw_user_id" if "raw_user_id" in pq.read_schema(part).names else "user_index"
            for batch in _batches(part, [column], VALUES_AT_ONCE):
                yield _texts(column, batch.column(column)).fill_null("")


def are_common(repeated: Mapping[str, float]) -> bool:
    """Whether the shares of repeated targets are such that a ranking without the history would mean little. That of
    test counts, too: what is decided on it is the rule, and for all methods alike."""
    return max(repeated.values()) >= COMMON_REPEATS


def said_of_repeats(repeated: Mapping[str, float]) -> str:
    """How large these shares are."""
    return " and ".join(f"{share:.0%} of the {split} targets" for split, share in repeated.items())


def highest_hit_rates(repeated: Mapping[str, float]) -> str:
    """The limits of hit rates without the history; empty where it hardly matters."""
    if max(repeated.values()) < RARE_REPEATS:
        return ""
    most = " and ".join(f"{1 - share:.2f} in {split}" for split, share in repeated.items())
    return f"no hit rate can be above {most}"


def is_dataset(path: Path) -> bool:
    """Whether a directory may be replaced: it has a dataset.json and nothing that the format does not know."""
    return (path / "dataset.json").is_file() and {entry.name for entry in path.iterdir()} <= ENTRIES


def load_dataset(path: str | Path) -> Dataset:
    """Reads a dataset directory; of a URL, its copy, which is brought up to date.

    ValueError, naming the path and the command to run, if there is none, if a file differs from its digest in
    dataset.json, if it has another format version, if a file claims to hold more than VALUES_A_BYTE, or if it is not as
    the module's docstring says: missing columns, users out of order, indices out of range, times that decrease, lists
    that are not parallel; also if it does not fit into memory. A dataset.json without digests is accepted; then a
    damage that leaves the format intact is not noticed.
    """
    path = fetched(path)
    description = read_description(path)
    num_users, num_items, actions = (description[key] for key in ("users", "items", "actions"))
    with _reading(path, "dataset.json"):
        schema = _schema(description, num_items)
        repeated = _shares(description.get("repeated_targets"))
    parts = sorted((path / "sequences").glob("*.parquet"))
    _require_counts(path, parts, schema, num_users, actions)
    with _reading(path, "dataset.json"):
        sequences = _SequenceReader(schema, num_users, num_items, actions)
    for table in schema.tables:
        if table.name != ITEM:
            _check_vocabulary(path, table.name, table.rows)
    for part in parts:
        with _reading(path, part.name):
            for batch in _batches(part, (*SEQUENCE_COLUMNS, *sequences.users, *sequences.events)):
                sequences.append(batch)
    if (sequences.user, sequences.action) != (num_users, actions):
        _broken(
            path,
            f"{sequences.user} users and {sequences.action} actions, but dataset.json says {num_users} and {actions}",
        )
    return Dataset(
        path,
        description["name"],
        num_users,
        num_items,
        sequences.items_flat,
        sequences.offsets,
        sequences.times.values,
        schema,
        repeated,
        item_features=_read_items(path, schema, num_items),
        user_features={name: reader.column() for name, reader in sequences.users.items()},
        event_features={name: reader.column() for name, reader in sequences.events.items()},
    )


def _require_counts(path: Path, parts: Sequence[Path], schema: Schema, num_users: int, actions: int) -> None:
    """ValueError if the files of sequences/ cannot have so many users and actions, by what their metadata claims."""
    features = [*schema.of("user"), *schema.of("event")]
    rows, values = 0, 0
    for part in parts:
        with _reading(path, part.name), pq.ParquetFile(part) as table:
            _require_columns(table.schema_arrow.names, (*SEQUENCE_COLUMNS, *(of.name for of in features)))
            _require_list("item_indices", table.schema_arrow.field("item_indices").type)
            _require_plausible(table, part, features)
            rows += table.metadata.num_rows
            claims = _values_of(table.metadata)
            values += sum(of for column, of in claims.items() if column.startswith("item_indices."))
    # An empty list counts as a value.
    if rows != num_users or not actions <= values <= actions + rows:
        _broken(path, f"{rows} users and up to {values} actions, but dataset.json says {num_users} and {actions}")


def _require_plausible(table: pq.ParquetFile, file: Path, features: Sequence[Feature]) -> None:
    """ValueError if a Parquet file claims more than VALUES_A_BYTE, by its metadata."""
    size, widths = file.stat().st_size, {of.name: of.width for of in features}
    if table.metadata.num_rows > VALUES_A_BYTE * size:
        raise ValueError(f"it claims {table.metadata.num_rows:,} rows, more than {size:,} bytes can hold")
    for column, values in _values_of(table.metadata).items():
        if values > VALUES_A_BYTE * size * widths.get(column.partition(".")[0], 1):
            raise ValueError(f"it claims {values:,} values in column {column}, more than {size:,} bytes can hold")


def _values_of(metadata: pq.FileMetaData) -> Counter[str]:
    """Values of each column that the row groups claim; the path of a column of lists goes on after its name."""
    counts: Counter[str] = Counter()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            counts[column.path_in_schema] += column.num_values
    return counts


class _SequenceReader:
    """Collects the content of the files of sequences/, some users at a time."""

    def __init__(self, schema: Schema, num_users: int, num_items: int, actions: int) -> None:
        self.num_users, self.num_items, self.actions = num_users, num_items, actions
        self.user = self.action = 0
        """Those read so far."""
        self.items_flat = np.empty(actions, index_type(num_items))
        self.offsets = np.zeros(num_users + 1, np.int64)
        self.times = _Times(actions)
        self.users = {f.name: _ColumnReader(f, schema, num_users) for f in schema.of("user")}
        self.events = {f.name: _ColumnReader(f, schema, actions) for f in schema.of("event")}

    def append(self, batch: pa.RecordBatch) -> None:
        _require_order(batch.column("user_index"), self.user, self.user + batch.num_rows)
        lengths, items = _list("item_indices", batch.column("item_indices"))
        if self.user + batch.num_rows > self.num_users or self.action + len(items) > self.actions:
            raise ValueError(
                f"there are more users or actions than dataset.json says ({self.num_users}, {self.actions})"
            )
        of_row = _places("user_index", self.user)
        of_action = _in_lists(lengths, of_row)
        indices = _within("item_indices", items, 0, self.num_items, of_action)
        self.items_flat[self.action : self.action + len(items)] = indices
        self.times.append(_parallel("timestamps", batch.column("timestamps"), lengths), lengths, of_action)
        for name, reader in self.users.items():
            reader.append(batch.column(name), of_row)
        for name, reader in self.events.items():
            reader.append(_parallel(name, batch.column(name), lengths), of_action)
        self.offsets[self.user + 1 : self.user + batch.num_rows + 1] = self.action + np.cumsum(lengths)
        self.user, self.action = self.user + batch.num_rows, self.action + len(items)


class _Times:
    """Whole numbers, kept in 4 bytes as long as all fit."""

    def __init__(self, rows: int) -> None:
        self.values, self.filled = np.empty(rows, np.int32), 0

    def append(self, array: pa.Array, lengths: np.ndarray, place: "Place") -> None:
        """Adds the times of users with so many actions each."""
        values = _within("timestamps", array, 1 - LATEST, LATEST, place)
        _require_oldest_first("timestamps", values, lengths, place)
        if self.values.dtype == np.int32 and len(values) and not _fits(values, np.iinfo(np.int32)):
            self.values = self.values.astype(np.int64)
        self.values[self.filled : self.filled + len(values)] = values
        self.filled += len(values)


def _fits(values: np.ndarray, limits: np.iinfo) -> bool:
    return bool(limits.min <= values.min() and values.max() <= limits.max)


class _ColumnReader:
    """Collects the column of a feature, some rows at a time. ValueError for values that the feature does not allow."""

    def __init__(self, feature: Feature, schema: Schema, rows: int) -> None:
        self.feature, self.form, self.filled = feature, feature.form, 0
        self.table_rows = schema.table(feature.table).rows if feature.sparse else 0
        dtype = index_type(self.table_rows) if feature.sparse else np.float32
        self.values = np.empty((rows, feature.width) if self.form.wide else 0 if self.form.bag else rows, dtype)
        self.offsets = np.zeros(rows + 1, np.int64) if self.form.bag else None
        self.parts: list[np.ndarray] = []
        """Of bags: the values of each block."""
        self.parallel: dict[str, list[np.ndarray]] = {name: [] for name in self.form.parallel}

    def append(self, array: pa.Array, place: "Place") -> None:
        name, start, stop = self.feature.name, self.filled, self.filled + len(array)
        if self.offsets is not None:
            lengths, elements = _list(name, array)
            place = _in_lists(lengths, place)
            if self.parallel:
                elements, *others = _fields(name, elements, (ROW, *self.parallel))
                for (other, parts), numbers in zip(self.parallel.items(), others, strict=True):
                    parts.append(self._allowed(f"{name}.{other}", other, numbers, place))
            self.parts.append(self._values(name, elements, place))
            self.offsets[start + 1 : stop + 1] = self.offsets[start] + np.cumsum(lengths)
        elif self.form.wide:
            lengths, numbers = _list(name, array)
            if not (lengths == self.feature.width).all():
                raise ValueError(f"column {name} has vectors that are not {self.feature.width} wide")
            self.values[start:stop] = self._values(name, numbers, place).reshape(-1, self.feature.width)
        else:
            self.values[start:stop] = self._values(name, array, place)
        self.filled = stop

    def _values(self, name: str, array: pa.Array, place: "Place") -> np.ndarray:
        if not self.feature.sparse:
            return _numbers(name, array)
        return _within(name, array, 0, self.table_rows, place).astype(self.values.dtype, copy=False)

    def _allowed(self, column: str, name: str, array: pa.Array, place: "Place") -> np.ndarray:
        numbers = _numbers(column, array)
        wrong = np.flatnonzero(~self.form.allows(name, numbers))
        if len(wrong):
            raise ValueError(
                f"column {column} has {numbers[wrong[0]]} at {place(wrong[0])}; it must be {self.form.needs}"
            )
        return numbers

    def column(self) -> Column:
        if self.offsets is None:
            return Column(self.values)
        none = np.empty(0, np.float32)
        parallel = {name: np.concatenate([none, *parts]) for name, parts in self.parallel.items()}
        return Column(np.concatenate([self.values, *self.parts]), self.offsets, parallel)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenated arange(start, start + length) of each pair."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """The integer type that holds indices below a count."""
    return np.int32 if count <= 2**31 else np.int64


def _list(name: str, array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Lengths, and the elements of all lists."""
    _require_list(name, array.type)
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size)
    else:
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    if array.null_count:
        raise ValueError(f"empty values in column {name}")
    return lengths, array.flatten()


def _fields(name: str, array: pa.Array, wanted: Sequence[str]) -> list[pa.Array]:
    """Those of structs."""
    if not pa.types.is_struct(array.type) or {field.name for field in array.type} != set(wanted):
        raise ValueError(f"column {name} has lists of type {array.type}, not structs of {', '.join(wanted)}")
    if array.null_count:
        raise ValueError(f"empty values in column {name}")
    return [array.field(field) for field in wanted]


def _require_list(name: str, kind: pa.DataType) -> None:
    if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise ValueError(f"column {name} is of type {kind}, not a list")


def _parallel(name: str, array: pa.Array, lengths: np.ndarray) -> pa.Array:
    """The elements of lists that must be as long as the users' sequences."""
    own, elements = _list(name, array)
    if not np.array_equal(own, lengths):
        raise ValueError(f"column {name} has lists that are not as long as item_indices")
    return elements


def _integers(name: str, array: pa.Array) -> np.ndarray:
    if not pa.types.is_integer(array.type):
        raise ValueError(f"column {name} has values of type {array.type}, not int64")
    if array.null_count:
        raise ValueError(f"empty values in column {name}")
    return array.to_numpy()


Place = Callable[[int], str]
"""Where a value of an array is, in words."""


def _places(index: str, first: int) -> Place:
    """Those of rows, of which the first has this index."""
    return lambda row: f"{index} {first + row}"


def _in_lists(lengths: np.ndarray, place: Place) -> Place:
    """Those of the elements of lists with these lengths."""
    return lambda element: place(int(np.searchsorted(np.cumsum(lengths), element, "right")))


def _within(name: str, array: pa.Array, low: int, high: int, place: Place) -> np.ndarray:
    """Integers from `low` up to below `high`; ValueError with the place of the first other one."""
    values = _integers(name, array)
    if len(values) and not low <= values.min() <= values.max() < high:
        wrong = int(np.argmax((values < low) | (values >= high)))
        raise ValueError(f"column {name} has {values[wrong]} at {place(wrong)}; it must be from {low} to {high - 1}")
    return values


def _require_oldest_first(name: str, values: np.ndarray, lengths: np.ndarray, place: Place) -> None:
    """ValueError with the place of the first value that is below the one before it in the same list."""
    falls = values[1:] < values[:-1]
    # A list may begin below the end of the one before it. Empty ones may begin before all values or behind them.
    starts = np.cumsum(lengths)[:-1]
    falls[starts[(starts > 0) & (starts < len(values))] - 1] = False
    if falls.any():
        wrong = 1 + int(np.argmax(falls))
        raise ValueError(
            f"column {name} has {values[wrong]} after {values[wrong - 1]} at {place(wrong)}; they must be oldest first"
        )


def _texts(name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Arrow's large_string. ArrowInvalid, with the row, if they are not UTF-8, which no reader of Parquet checks."""
    kind = _require_texts(name, column.type)
    column.validate(full=True)
    return column.cast(kind).cast(pa.large_string())


def _require_texts(name: str, kind: pa.DataType) -> pa.DataType:
    """The type without a dictionary. ValueError if it is neither text nor integers."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)
    if not (text or pa.types.is_integer(plain)):
        raise ValueError(f"column {name} has values of type {kind}, not string")
    return plain


def _numbers(name: str, array: pa.Array) -> np.ndarray:
    if not pa.types.is_floating(array.type):
        raise ValueError(f"column {name} has values of type {array.type}, not float")
    with np.errstate(over="ignore"):
        values = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError(f"empty or infinite values in column {name}")
    return values


def _require_order(indices: pa.Array, start: int, stop: int) -> None:
    if not np.array_equal(indices.to_numpy(zero_copy_only=False), np.arange(start, stop)):
        raise ValueError(f"its rows are not {start} to {stop - 1} in order")


def _require_columns(present: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in present:
            raise ValueError(f"no column {name}; there are: {', '.join(present)}")
        if present.count(name) > 1:
            raise ValueError(f"there are two columns named {name}")


def _batches(file: Path, columns: Sequence[str], rows: int = 2**16) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as table:
        _require_columns(table.schema_arrow.names, columns)
        yield from table.iter_batches(rows, columns=list(columns))


def _read_items(path: Path, schema: Schema, num_items: int) -> dict[str, Column]:
    """The features of items; the ids themselves only when asked for, with Dataset.raw_ids."""
    file = path / "items.parquet"
    features = schema.of("item")
    with _reading(path, file.name), pq.ParquetFile(file) as table:
        _require_columns(table.schema_arrow.names, (*ITEM_COLUMNS, *(of.name for of in features)))
        _require_texts("raw_id", table.schema_arrow.field("raw_id").type)
        if table.metadata.num_rows != num_items:
            raise ValueError(f"{table.metadata.num_rows} rows, but dataset.json says {num_items} items")
        _require_plausible(table, file, features)
    with _reading(path, "dataset.json"):
        readers = {f.name: _ColumnReader(f, schema, num_items) for f in features}
    with _reading(path, file.name):
        row = 0
        for batch in _batches(file, ("item_index", *readers)) if readers else ():
            _require_order(batch.column("item_index"), row, row + batch.num_rows)
            for name, reader in readers.items():
                reader.append(batch.column(name), _places("item_index", row))
            row += batch.num_rows
    return {name: reader.column() for name, reader in readers.items()}


def _check_vocabulary(path: Path, name: str, rows: int) -> None:
    file = path / "vocabularies" / f"{name}.parquet"
    with _reading(path, file.name), pq.ParquetFile(file) as table:
        _require_columns(table.schema_arrow.names, ("value",))
        _require_texts("value", table.schema_arrow.field("value").type)
        if table.metadata.num_rows != rows:
            raise ValueError(f"{table.metadata.num_rows} values, but the schema says {rows} rows")
        _require_plausible(table, file, ())


def read_description(path: Path) -> dict[str, Any]:
    """The content of dataset.json, once all files have been compared with its digests, if it has any. ValueError as
    `load_dataset` raises it."""
    file = path / "dataset.json"
    if not file.is_file():
        raise ValueError(f"no dataset at {path}; make it with: {_command(path)}")
    _require_files(path)
    content = file.read_bytes()
    try:
        description = parse_json(content, "dataset.json")
    except ValueError as error:
        _broken(path, str(error))
    if isinstance(description, dict) and description.keys() & DIGESTS:
        _check_digests(path, content)
    version = description.get("format_version") if isinstance(description, dict) else None
    if version != FORMAT.version:
        _broken(path, f"it is of format version {version}, and this logitmix reads {FORMAT.version}")
    for key, kind in (("name", str), ("users", int), ("items", int), ("actions", int)):
        if type(description.get(key)) is not kind or (kind is int and not 0 <= description[key] < 2**48):
            _broken(path, f"dataset.json has no {key} that is {'text' if kind is str else 'a count'}")
    return description


def _require_files(path: Path) -> None:
    """ValueError for what has the name of a Parquet file and is none: a pipe would be waited for."""
    for file in sorted(path.rglob("*.parquet")):
        name = file.relative_to(path).as_posix()
        with _reading(path, name):
            kind = other_kind(file)
        if kind:
            _broken(path, f"{name} is a {kind}, not a file")


def _check_digests(path: Path, content: bytes) -> None:
    """ValueError for the first file that differs from the digests of dataset.json, which itself comes first."""
    try:
        files = FORMAT.parse(content, "dataset.json").get("files")
        if not isinstance(files, dict):
            raise ValueError("dataset.json has no list of files")
        for name, entry in files.items():
            require_entry(entry, f"dataset.json: files.{name:.80}")
            try:
                check_file(path / name, entry, "dataset.json", name)
            except OSError as error:
                raise ValueError(f"{name} cannot be read ({first_line(error)})") from None
        for file in sorted(path.rglob("*.parquet")):
            if (name := file.relative_to(path).as_posix()) not in files:
                raise ValueError(f"{name} is not in the list of files in dataset.json")
    except ValueError as error:
        _broken(path, str(error))


def _schema(description: Mapping[str, Any], num_items: int) -> Schema:
    if not isinstance(description.get("schema"), Mapping):
        raise ValueError("no schema")
    schema = from_mapping(Schema, description["schema"], "schema")
    if schema.table(ITEM).rows != num_items + 1:
        raise ValueError(f"table {ITEM} has {schema.table(ITEM).rows} rows, not one more than the {num_items} items")
    return dataclasses.replace(schema, users=description["users"])


def _shares(shares: Any) -> dict[str, float]:
    if not isinstance(shares, Mapping) or set(shares) != {"validation", "test"}:
        raise ValueError("no repeated_targets with the shares validation and test")
    if not all(type(share) in (int, float) and 0 <= share <= 1 for share in shares.values()):
        raise ValueError("repeated_targets must be shares from 0 to 1")
    return {split: float(share) for split, share in shares.items()}


@contextmanager
def _reading(path: Path, file: str) -> Iterator[None]:
    """Adds the names of the dataset and the file to errors."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        _broken(path, f"{file} cannot be read ({first_line(error)})")
    except (ValueError, MemoryError) as error:
        _broken(path, f"{file}: {error}")


def _broken(path: Path, problem: str) -> NoReturn:
    raise ValueError(f"{path}: {problem}; make it again with: {_command(path)} --overwrite") from None


def _command(path: Path) -> str:
    """The command that makes a dataset here: the same one, as far as the files tell."""
    try:
        before = from_json((path / "dataset.json").read_text(encoding="utf-8"))
        name, source, filters = before["name"], before["source"], before["filters"]
        words = [name if source_of(name) else "NAME"]
        words += ["--source", str(_nearby(path, source["name"]))] if source else []
        usual = {entry.name: entry.default for entry in dataclasses.fields(PrepareOptions)}
        words += [f"--where {shlex.quote(condition)}" for condition in filters.pop("where", [])]
        filters.pop("removed", None)
        given = {f"--{key.replace('_', '-')}": value for key, value in filters.items() if usual.get(key) != value}
        words += [flag if value is True else f"{flag} {value}" for flag, value in given.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        words = [path.name if source_of(path.name) else "NAME"]
    return f"logitmix prepare {' '.join(words)} --out {path}"


def _nearby(path: Path, name: str) -> Path:
    """Where prepare puts a download, if it exists; else the name alone."""
    return path.parent / name if (path.parent / name).exists() else Path(name)
