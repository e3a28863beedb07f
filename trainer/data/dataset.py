"""The dataset directory: plain Parquet that anything can write, and the side that reads it. Format version 1.

    sequences/*.parquet   one row a user, over all files in the order of their names
        user_index     int64         0 … users - 1, in order
        item_indices   list<int64>   the user's items, oldest first
        timestamps     list<int64>   of the same length, never falling, in the unit of the source
        raw_user_id    string        optional: the id in the source
        …                            optional: user features (MovieLens: gender, age, occupation, zip)
    items.parquet         one row an item that occurs in a sequence
        item_index     int64         0 … items - 1, in order
        raw_id         string        the id in the source
        …                            optional: item features (MovieLens: title string, genres list<string>)
    dataset.json
        format_version     1
        name               NAME of `logitmix prepare`
        users, items, actions                      counts of what is here
        filters            {min_user_actions, min_item_actions}
        read               {users, items, actions} counts before the filters
        rejected_lines     malformed lines that were left out; they are in rejects.tsv
        source             {name, sha256: {file: digest}}, the base name of what was read; null where it was generated
        generator          {name, parameters} where it was generated, the seed among the parameters; null otherwise
    rejects.tsv           file, line, reason, text; only where there are any

`load_dataset` needs of dataset.json the format version, the name and the three counts, and of the tables the columns
not called optional. Lists may be list or large_list, of any integer type. Both indices follow the raw ids: by number
where all are digits, else by their UTF-8 bytes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitmix.trainer.data.registry import source_of

FORMAT_VERSION = 1
USERS_PER_FILE = 100_000
SEQUENCE_COLUMNS = ("user_index", "item_indices", "timestamps")
ENTRIES = frozenset({"dataset.json", "items.parquet", "sequences", "rejects.tsv"})


@dataclass(frozen=True, eq=False)
class DatasetContents:
    """What there is to write: U users, X items, A actions ordered by user, then time."""

    offsets: np.ndarray
    """int64 [U+1]: user u's actions are offsets[u] : offsets[u+1]."""
    items: np.ndarray
    """Integer [A]."""
    timestamps: np.ndarray
    """int64 [A]."""
    user_columns: Mapping[str, pa.Array] = field(default_factory=dict)
    """Each of length U."""
    item_columns: Mapping[str, pa.Array] = field(default_factory=dict)
    """Each of length X; raw_id among them."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """All sequences in memory, 4 bytes an action."""

    path: Path
    name: str
    num_users: int
    num_items: int
    items_flat: np.ndarray
    """int32 [actions] (int64 from 2^31 items on): every user's items, oldest first, user after user."""
    offsets: np.ndarray
    """int64 [num_users + 1]: user u's items are items_flat[offsets[u] : offsets[u + 1]]."""

    def description(self) -> str:
        """The text of dataset.json, which tells this dataset from another: counts, filters, digests of the source."""
        return (self.path / "dataset.json").read_text(encoding="utf-8")

    def raw_ids(self) -> list[str]:
        """The source's ids by item index, read at each call. ValueError when items.parquet is not as documented."""
        file = self.path / "items.parquet"
        try:
            table = pq.read_table(file, columns=["item_index", "raw_id"])
        except (pa.ArrowException, OSError) as error:
            _broken(self.path, f"items.parquet cannot be read ({_first_line(error)})")
        _require_columns(self.path, "items.parquet", table.schema.names, ("item_index", "raw_id"))
        if not np.array_equal(table["item_index"].to_numpy(), np.arange(self.num_items)):
            _broken(self.path, f"items.parquet has no rows 0 to {self.num_items - 1} in order")
        return table["raw_id"].to_pylist()


def write_contents(directory: Path, contents: DatasetContents, users_per_file: int = USERS_PER_FILE) -> None:
    """Writes sequences/ and items.parquet into a directory that exists."""
    (directory / "sequences").mkdir()
    users = len(contents.offsets) - 1
    for part, start in enumerate(range(0, users, users_per_file)):
        stop = min(start + users_per_file, users)
        pq.write_table(_sequence_table(contents, start, stop), directory / "sequences" / f"part-{part:05d}.parquet")
    item_count = len(contents.item_columns["raw_id"])
    columns = {"item_index": pa.array(np.arange(item_count), pa.int64()), **contents.item_columns}
    pq.write_table(pa.table(columns), directory / "items.parquet")


def _sequence_table(contents: DatasetContents, start: int, stop: int) -> pa.Table:
    bounds = contents.offsets[start : stop + 1]
    actions = slice(bounds[0], bounds[-1])
    starts = pa.array(bounds - bounds[0], pa.int32())
    lists = [
        pa.ListArray.from_arrays(starts, pa.array(values[actions], pa.int64()))
        for values in (contents.items, contents.timestamps)
    ]
    own = dict(zip(SEQUENCE_COLUMNS, (pa.array(np.arange(start, stop), pa.int64()), *lists), strict=True))
    return pa.table(own | {name: column[start:stop] for name, column in contents.user_columns.items()})


def write_description(directory: Path, description: Mapping[str, Any]) -> None:
    """Writes dataset.json: last, for it is what makes a directory a dataset."""
    text = json.dumps(description, indent=2, ensure_ascii=False)
    (directory / "dataset.json").write_text(text + "\n", encoding="utf-8")


def is_dataset(path: Path) -> bool:
    """Whether a directory is ours to replace: it has a dataset.json and nothing beside what the format knows."""
    return (path / "dataset.json").is_file() and {entry.name for entry in path.iterdir()} <= ENTRIES


def load_dataset(path: str | Path) -> Dataset:
    """Reads a dataset directory.

    ValueError, naming the path and the command to run, when there is none, when it is of another format version, or
    when it is not as the module's docstring says: missing columns, users out of order, item indices out of range.
    """
    path = Path(path)
    description = _read_description(path)
    num_users, num_items, actions = (description[key] for key in ("users", "items", "actions"))
    items_flat = np.empty(actions, np.int32 if num_items <= 2**31 else np.int64)
    offsets = np.zeros(num_users + 1, np.int64)
    user = action = 0
    for part in _sequence_files(path):
        for indices, lengths, items in _sequence_batches(path, part):
            if not np.array_equal(indices, np.arange(user, user + len(indices))):
                _broken(path, f"{part.name}: its users do not continue at {user}, one after the other")
            if user + len(indices) > num_users or action + len(items) > actions:
                _broken(path, f"there are more users or actions than dataset.json says ({num_users}, {actions})")
            if len(items) and not 0 <= items.min() <= items.max() < num_items:
                _broken(path, f"{part.name}: item indices {items.min()} to {items.max()}, of {num_items} items")
            items_flat[action : action + len(items)] = items
            offsets[user + 1 : user + len(indices) + 1] = action + np.cumsum(lengths)
            user, action = user + len(indices), action + len(items)
    if (user, action) != (num_users, actions):
        _broken(path, f"{user} users and {action} actions, but dataset.json says {num_users} and {actions}")
    _check_items(path, num_items)
    return Dataset(path, description["name"], num_users, num_items, items_flat, offsets)


def _read_description(path: Path) -> dict[str, Any]:
    file = path / "dataset.json"
    if not file.is_file():
        raise ValueError(f"no dataset at {path}; make it with: {_command(path)}")
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        _broken(path, "dataset.json is no JSON")
    version = description.get("format_version") if isinstance(description, dict) else None
    if version != FORMAT_VERSION:
        _broken(path, f"it is of format version {version}, and this logitmix reads {FORMAT_VERSION}")
    for key, kind in (("name", str), ("users", int), ("items", int), ("actions", int)):
        if type(description.get(key)) is not kind or (kind is int and description[key] < 0):
            _broken(path, f"dataset.json has no {key} that is {'text' if kind is str else 'a count'}")
    return description


def _sequence_files(path: Path) -> list[Path]:
    return sorted((path / "sequences").glob("*.parquet"))


def _sequence_batches(path: Path, part: Path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """User indices, list lengths and concatenated items of some rows at a time."""
    try:
        with pq.ParquetFile(part) as table:
            _require_columns(path, part.name, table.schema_arrow.names, SEQUENCE_COLUMNS)
            _require_lists(path, part.name, table.schema_arrow.field("item_indices").type)
            for batch in table.iter_batches(columns=["user_index", "item_indices"]):
                lists = batch.column("item_indices")
                if batch.column("user_index").null_count or lists.null_count or lists.flatten().null_count:
                    _broken(path, f"{part.name}: empty values among users or items")
                items = lists.flatten().to_numpy()
                yield batch.column("user_index").to_numpy(), lists.value_lengths().to_numpy(), items
    except (pa.ArrowException, OSError) as error:
        _broken(path, f"{part.name} cannot be read ({_first_line(error)})")


def _require_lists(path: Path, file: str, kind: pa.DataType) -> None:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (lists and pa.types.is_integer(kind.value_type)):
        _broken(path, f"{file}: column item_indices is of type {kind}, not list<int64>")


def _check_items(path: Path, num_items: int) -> None:
    try:
        with pq.ParquetFile(path / "items.parquet") as table:
            names, rows = table.schema_arrow.names, table.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        _broken(path, f"items.parquet cannot be read ({_first_line(error)})")
    _require_columns(path, "items.parquet", names, ("item_index", "raw_id"))
    if rows != num_items:
        _broken(path, f"items.parquet has {rows} rows, but dataset.json says {num_items} items")


def _require_columns(path: Path, file: str, present: list[str], wanted: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        _broken(path, f"{file} has no column {missing[0]}; there are: {', '.join(present)}")


def _broken(path: Path, problem: str) -> NoReturn:
    raise ValueError(f"{path}: {problem}; make it again with: {_command(path)} --overwrite")


def _command(path: Path) -> str:
    name = path.name if source_of(path.name) else "NAME"
    return f"logitmix prepare {name} --out {path}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
