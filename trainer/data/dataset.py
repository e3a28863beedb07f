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
    projections/FEATURE.parquet      of every feature of texts that is encoded by n-grams, one row for each bucket
        row            fixed_size_list<float32>   of the feature's width: modules/kinds/text.py
    dataset.json
        format_version     3
        name               NAME of `logitmix prepare`
        users, items, actions                      counts of what is here
        schema             {features: [{name, owner, kind, table, width, mean, deviation, columns, encoder, version}],
                           tables: [{name, rows}]}, without fields at their defaults: modules/schema.py defines them
        repeated_targets   {validation, test}: share of targets (leave-one-out) that are in their user's history before
                           them, over all users with more than 2 actions
        last_actions       {51, 201: {actions, items}}: what is left if each user has so many last actions alone, as the
                           paper's table of datasets counts
        filters            {where: [condition], keep_duplicates, shown: [condition], min_item_actions, min_user_actions,
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
        plugins            {name: version} of the plugins that kinds of features come from, where there are such
        kind               logitmix dataset
        files              {path: {bytes, sha256}} of all other files, by their paths in the directory
        sha256             digest of all other entries (common/checked.py, which says how such a file is laid out)
        appended           [{users, items, actions, …}] of the folders of appended/, in order: how many are new in each,
                           and its own titles, read, filters, times, rejected_lines, source, generator and side_tables.
                           Then users, items, actions, schema and files are those of the whole dataset, other entries
                           those of what was prepared first, and repeated_targets and last_actions are left out
    rejects.tsv           file, line, reason, text; only where there are any
    waiting.parquet       user, item: raw ids of what was shown and no action of the user follows yet (prepare --shown)
    appended/NNNNN/       actions that `prepare --append` added, in order of the names
        sequences.parquet     user_index, item_indices, timestamps and the features of events: one row for each user
                              with such actions, in order. They come after those that the user had
        users.parquet         the new users: user_index, raw_user_id and the features of users
        items.parquet         the new items, as above
        waiting.parquet       as above, in place of that of the folder before
        vocabularies/TABLE.parquet   the new values of a table, if there are any

A feature's column has its name and is stored by its kind:

    id        int64            row of its table; 0 where the value is missing or unknown
    ids       list<int64>      rows of its table; [] where missing
    words     list<int64>      the same of known words
    number    float32          its mean, from the schema, where missing
    date      float32          of items: days since 1970, to 2 minutes; -1e6 where missing, which is also its mean
    vector    list<float32>    of the feature's width, or fixed_size_list; the mean in every place where missing
    text      list<float32>    the same of the text's vector

Where each id of a bag has numbers beside it (`parallel` of its kind), the bag is a list<struct<row: int64, NAME:
float32, …>>.

Rows of table item are item indices, and its last row, `items`, is the unknown item: so it has items + 1 rows. The item
id itself is in the schema and has no column.

Two features of kind id are neither in the schema nor columns. `recency`, of owner event, follows from the timestamps:
its value is the number of bits of the time since the user's previous action, in the unit of the source ("0" for 0, "1"
for 1, "2" for 2 and 3, … "64"); it is unknown for a user's first action. `user`, of owner user, is the raw_user_id, or
user_index where there is none. Where the schema has a feature or table of one of these names, only that one counts.

`load_dataset` needs of dataset.json the entries up to schema, and the columns not called optional; other entries may be
null. `check.py` says what a directory lacks. A list may be a large_list; integers and floats may have any width;
text may be large_string, string_view, a dictionary, or integers, which are read as their digits. Users, items and the
values of vocabularies are in the order of their raw ids and texts: by number where all are digits, else by their UTF-8
bytes; those that were appended stand behind them, in the same order among themselves. repeated_targets is computed
where it is left out or there is no sha256.

The last three entries are optional too: other writers may leave them out. Where there is one of them, all files are
read and compared with their digests before anything else is read of them, and a Parquet file that is not listed is
refused. So whatever changes a file of `prepare` later, by one bit or as a whole, is found and named.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logitmix.common.checked import fields_of
from logitmix.common.files import from_json
from logitmix.common.storage import fetch
from logitmix.modules.kinds.date import NO_DATE
from logitmix.modules.kinds.text import BUCKETS, NGRAMS, TextEncoder
from logitmix.modules.schema import ITEM, RECENCY, RECENCY_VALUES, USER, WANTED, Feature, Owner, Schema
from logitmix.trainer.data.arrays import Arrays, kept, stored
from logitmix.trainer.data.columns import (
    SEQUENCE_COLUMNS,
    Column,
    ColumnReader,
    SequenceReader,
    finite,
    lists,
    read_file,
    require_order,
    texts,
    user_blocks,
)
from logitmix.trainer.data.description import (
    APPENDED,
    PROJECTIONS,
    broken,
    entries_of,
    name_of,
    read_description,
    reading,
    require_plugins_of,
    schema_of,
)
from logitmix.trainer.data.repeats import repeated_targets

VALUES_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class Dataset:
    """All sequences: 4 bytes an action, 4 or 8 for its time, and the features. From LARGE bytes on they are in files
    that all processes of a host map (arrays.py)."""

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
    whole: "Dataset | None" = None
    """Of a limited dataset (limited.py): the one on disk, whose items are more."""
    kept: np.ndarray | None = None
    """Of a limited one, int64 [num_items]: which items of the whole these are, in order."""

    def features_of(self, owner: Owner) -> Mapping[str, Column]:
        return {"item": self.item_features, "user": self.user_features, "event": self.event_features}[owner]

    def is_kept(self) -> np.ndarray:
        """Of a limited one: which items of the whole it has, bool."""
        assert self.whole is not None and self.kept is not None
        return np.isin(np.arange(self.whole.num_items), self.kept)

    def description(self) -> str:
        """The text of dataset.json, which identifies this dataset: counts, schema, digests of the source."""
        return (self.path / "dataset.json").read_text(encoding="utf-8")

    def unit_of_times(self) -> str | None:
        """s, ms, us or ns since 1970; None: the times are other numbers."""
        return (from_json(self.description()).get("times") or {}).get("unit")

    def first_times(self) -> np.ndarray:
        """When each item was first acted on, int64 [items]; the largest number for one without actions."""
        first_X = np.full(self.num_items, np.iinfo(np.int64).max)
        np.minimum.at(first_X, self.items_flat[:], self.timestamps_flat[:])
        return first_X

    def identity(self) -> dict[str, Any]:
        """What is equal for the same dataset elsewhere: the content of dataset.json, with the digests of all other
        files. Where its writer has left them out, they are computed."""
        description = from_json(self.description())
        if "files" not in description:
            description["files"] = entries_of(self.path, sorted(self.path.rglob("*.parquet")))
        return fields_of(description)

    def raw_ids(self) -> list[str]:
        """The source's ids by item index, read at each call. ValueError if items.parquet is not as documented."""
        return self.raw_id_column().to_pylist()

    def raw_id_column(self) -> pa.ChunkedArray:
        """`raw_ids` as an Arrow column, in a third of the memory."""
        return pa.chunked_array(stored_values(self.path, self.schema, ITEM, self.kept), pa.large_string())[:-1]

    def raw_user_ids(self, user_U: np.ndarray) -> list[str]:
        """The source's ids of users by index, read at each call; the index where the dataset has none."""
        return self.raw_user_id_column().take(pa.array(user_U)).to_pylist()

    def raw_user_id_column(self) -> pa.ChunkedArray:
        """Those of all users as an Arrow column."""
        return pa.chunked_array(raw_user_ids_of(self.path), pa.large_string())

    def title_column(self) -> pa.ChunkedArray | None:
        """Titles by item index, null for an item without one; None if the dataset has no titles. Read at each call."""
        found, titles = list[pa.Array](), False
        for file in files_of(self.path, "items.parquet"):
            with reading(self.path, name_of(self.path, file)):
                if "title" in pq.read_schema(file).names:
                    titles = True
                    found += texts("title", pq.read_table(file, columns=["title"])["title"]).chunks
                else:
                    found.append(pa.nulls(pq.read_metadata(file).num_rows, pa.large_string()))
        title_X = pa.chunked_array(found, pa.large_string())
        return (title_X if self.kept is None else title_X.take(pa.array(self.kept))) if titles else None

    @cached_property
    def recency(self) -> Column:
        """For every action, int8: the row of table recency, from its time and that of the user's previous action, in
        the whole dataset. Computed at first use."""
        if self.whole is not None:
            return self.whole.recency.take(self.is_kept()[self.whole.items_flat])
        # `prepare` needs no torch.
        import torch

        from logitmix.modules.features import recency_rows

        rows = np.empty(len(self.timestamps_flat), np.int8)
        for _, bounds in user_blocks(self.offsets):
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
        values = pa.chunked_array(stored_values(self.path, self.schema, table, self.kept), pa.large_string())
        return pc.if_else(pc.equal(values, ""), None, values)

    def single_values(self, feature: Feature) -> pa.Array:
        """The values of a feature of items or actions that has one for each, as they were read: text, dates, or
        numbers, of which a missing one is the mean."""
        values = self.features_of(feature.owner)[feature.name].values
        if feature.form.dated:
            seconds = np.round(values.astype(np.float64) * 86_400).astype(np.int64)
            return pa.array(seconds, pa.int64(), mask=values == NO_DATE).cast(pa.timestamp("s"))
        if not feature.sparse:
            return pa.array(values)
        vocabulary = self.vocabulary_column(feature.table).combine_chunks()
        return pa.DictionaryArray.from_arrays(pa.array(values), vocabulary)


def of_next(column: Column, offsets: np.ndarray) -> Column:
    """For each action, the id that the user's next one has; 0, unknown, for the last."""
    rows = np.append(column.values[1:], np.zeros(1, column.values.dtype))
    rows[offsets[1:][np.diff(offsets) > 0] - 1] = 0
    return Column(rows)


def stored_values(path: Path, schema: Schema, table: str, kept: np.ndarray | None = None) -> Iterator[pa.Array]:
    """What each row of a table stands for in the dataset at `path`: raw ids of items, or of those that are `kept`,
    values of features, "" for unknown. Arrow's large_string, VALUES_AT_ONCE at a time."""
    if table not in [of.name for of in schema.tables]:
        if table == RECENCY:
            yield pa.array(RECENCY_VALUES, pa.large_string())
            return
        if table == USER:
            yield pa.array([""], pa.large_string())
            yield from raw_user_ids_of(path)
            return
        # That of the feature that the next action's is of.
        table = next(of.table for of in schema.of("event") if WANTED + of.name == table)
    if table != ITEM:
        yield from _texts_of(path, files_of(path, f"vocabularies/{table}.parquet"), "value")
        return
    first = 0
    for values in _texts_of(path, files_of(path, "items.parquet"), "raw_id"):
        start, first = first, first + len(values)
        if kept is not None:
            within = slice(*np.searchsorted(kept, [start, first]))
            values = values.take(pa.array(kept[within] - start))
        yield values
    yield pa.array([""], pa.large_string())


def _texts_of(path: Path, files: Sequence[Path], name: str) -> Iterator[pa.Array]:
    """The texts of a column of some files, or of user_index where a file does not have it; "" for a missing one, which
    is a ValueError if they are raw ids of items."""
    for file in files:
        with reading(path, name_of(path, file)), pq.ParquetFile(file) as table:
            column = name if name in table.schema_arrow.names or name != "raw_user_id" else "user_index"
            for batch in table.iter_batches(VALUES_AT_ONCE, columns=[column]):
                if name == "raw_id" and batch.column(0).null_count:
                    raise ValueError("empty values in column raw_id")
                yield texts(name, batch.column(0)).fill_null("")


def encoders_of(path: Path, schema: Schema) -> dict[str, TextEncoder]:
    """Those of the features of texts of the dataset at `path`, by name. ValueError for a projection that is missing or
    is not of its feature."""
    return {of.name: encoder_of(path, of) for of in schema.features if of.form.of_texts}


def encoder_of(path: Path, feature: Feature) -> TextEncoder:
    """As `encoders_of`, for one feature of texts."""
    if feature.encoder != NGRAMS:
        return TextEncoder(feature.encoder, feature.version, feature.width)
    name, parts = f"{PROJECTIONS}/{feature.name}.parquet", list[np.ndarray]()

    def append(batch: pa.RecordBatch) -> None:
        lengths, numbers = lists("row", batch.column("row"))
        if (lengths != feature.width).any():
            raise ValueError(f"its rows are not of {feature.width} numbers")
        parts.append(finite("row", numbers).reshape(-1, feature.width))

    with reading(path, name):
        if read_file(path / name, ["row"], append, [replace(feature, name="row")]) != BUCKETS:
            raise ValueError(f"its rows are not {BUCKETS}")
    return TextEncoder(feature.encoder, feature.version, feature.width, np.concatenate(parts))


def raw_user_ids_of(path: Path) -> Iterator[pa.Array]:
    yield from _texts_of(
        path, [*sorted((path / "sequences").glob("*.parquet")), *files_of(path, "users.parquet")[1:]], "raw_user_id"
    )


def files_of(path: Path, name: str) -> list[Path]:
    """The file of this name of the dataset at `path`, and then those of what was appended that have it."""
    return [path / name, *sorted((path / APPENDED).glob(f"*/{name}"))]


def load_dataset(path: str | Path) -> Dataset:
    """Reads a dataset directory; of a URL, its copy, which is brought up to date.

    ValueError, naming the path and the command to run, if there is none, if a file differs from its digest in
    dataset.json, if it has another format version, if a file claims to hold more than VALUES_A_BYTE, or if it is not as
    the module's docstring says: missing columns, users out of order, indices out of range, times that decrease, lists
    that are not parallel; also if it does not fit into memory, or needs a plugin that this process lacks. A
    dataset.json without digests is accepted; then a damage that leaves the format intact is not noticed.
    """
    path = fetch(path)
    arrays = stored(path)
    description = read_description(path, sequences=arrays is None)
    require_plugins_of(path, description)
    num_users, num_items, actions = (description[key] for key in ("users", "items", "actions"))
    with reading(path, "dataset.json"):
        schema = schema_of(description, num_items)
    for table in schema.tables:
        if table.name != ITEM:
            check_vocabulary(path, table.name, table.rows)
    if arrays is None:
        rows = {"item": num_items, "user": num_users, "event": actions}
        # Bytes, about: bags have several values for each row.
        size = 8 * (num_users + actions) + sum(4 * rows[of.owner] * max(1, of.width) for of in schema.features)
        arrays = kept(path, size, lambda: read_arrays(path, schema, description))
    columns: dict[str, dict[str, Column]] = {"item": {}, "user": {}, "event": {}}
    for feature in schema.features:
        if feature.name != ITEM:
            columns[feature.owner][feature.name] = Column.from_arrays(arrays, f"{feature.owner}.{feature.name}")
    stated = description.get("repeated_targets") or {}
    # Without a digest nothing says that they are as they were written.
    are_known = "sha256" in description and not description.get(APPENDED) and {"validation", "test"} <= stated.keys()
    return Dataset(
        path,
        description["name"],
        num_users,
        num_items,
        arrays["items"],
        arrays["offsets"],
        arrays["timestamps"],
        schema,
        stated if are_known else repeated_targets(arrays["offsets"], arrays["items"]),
        item_features=columns["item"],
        user_features=columns["user"],
        event_features=columns["event"],
    )


def read_arrays(path: Path, schema: Schema, description: Mapping[str, Any]) -> Arrays:
    """Returns all arrays of a dataset. ValueError for a file of sequences or items that is not as documented."""
    return read_sequences(path, schema, description) | read_items(path, schema, description["items"])


def read_sequences(path: Path, schema: Schema, description: Mapping[str, Any]) -> Arrays:
    """Returns the arrays of users and actions."""
    num_users, num_items, actions = (description[key] for key in ("users", "items", "actions"))
    with reading(path, "dataset.json"):
        reader = SequenceReader(schema, num_users, num_items, actions)
    whole, appended = (*SEQUENCE_COLUMNS, *reader.users, *reader.events), sorted((path / APPENDED).glob("*"))
    files = [(part, whole, reader.append) for part in sorted((path / "sequences").glob("*.parquet"))]
    for folder in appended:
        files.append((folder / "users.parquet", ("user_index", *reader.users), reader.append_users))
        files.append((folder / "sequences.parquet", (*SEQUENCE_COLUMNS, *reader.events), reader.append_later))
    for file, columns, append in files:
        with reading(path, name_of(path, file)):
            read_file(file, columns, append, schema.features)
    if (reader.user, reader.action) != (num_users, actions):
        broken(
            path, f"{reader.user} users and {reader.action} actions, but dataset.json says {num_users} and {actions}"
        )
    with reading(path, APPENDED):
        return reader.arrays()


def read_items(path: Path, schema: Schema, num_items: int) -> Arrays:
    """Returns the arrays of the features of items; the ids themselves are read only when asked for, with
    Dataset.raw_ids."""
    with reading(path, "dataset.json"):
        readers = {of.name: ColumnReader(of, schema, num_items) for of in schema.of("item")}
    row = 0

    def append(batch: pa.RecordBatch) -> None:
        nonlocal row
        start, row = row, row + batch.num_rows
        require_order(batch.column("item_index"), start, row)
        for name, reader in readers.items() if row <= num_items else ():
            reader.append(batch.column(name))

    for file in files_of(path, "items.parquet"):
        with reading(path, name_of(path, file)):
            read_file(file, ("item_index", *readers), append, schema.features, "raw_id")
    if row != num_items:
        broken(path, f"items.parquet: {row} rows, but dataset.json says {num_items} items")
    return {name: of for key, reader in readers.items() for name, of in reader.column().arrays(f"item.{key}").items()}


def check_vocabulary(path: Path, name: str, rows: int) -> None:
    """ValueError if the files of a table's values cannot be read, or do not have this number of rows."""
    found = 0
    for file in files_of(path, f"vocabularies/{name}.parquet"):
        with reading(path, name_of(path, file)):
            found += read_file(file, (), lambda batch: None, text="value")
    if found != rows:
        broken(path, f"vocabularies/{name}.parquet: {found} values, but the schema says {rows} rows")
