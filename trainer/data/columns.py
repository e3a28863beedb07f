"""Columns of a dataset's Parquet files, checked as they are read."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitmix.modules.schema import Feature, Schema
from logitmix.trainer.data.arrow import as_numpy, is_list, is_text
from logitmix.trainer.data.description import LATEST

ROW = "row"
"""Of the structs in which bags with parallel numbers are stored: the field with the row of the table."""
SEQUENCE_COLUMNS = ("user_index", "item_indices", "timestamps")
ITEM_COLUMNS = ("item_index", "raw_id")
USERS_AT_ONCE = 2**14
VALUES_A_BYTE = 1000
"""A Parquet file that claims more rows, or values of a column (vectors of one), than so many for each of its bytes, is
refused before they are decoded: 2 kB can stand for gigabytes. Data that says anything stays far below: the action of a
user at its time takes a bit at the least."""


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

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Its arrays by names that begin with this one."""
        offsets = {} if self.offsets is None else {f"{name}.offsets": self.offsets}
        beside = {f"{name}.parallel.{other}": of for other, of in self.parallel.items()}
        return {f"{name}.values": self.values, **offsets, **beside}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], name: str) -> "Column":
        """Of `arrays`, among others."""
        prefix = f"{name}.parallel."
        parallel = {other.removeprefix(prefix): of for other, of in arrays.items() if other.startswith(prefix)}
        return cls(arrays[f"{name}.values"], arrays.get(f"{name}.offsets"), parallel)

    @property
    def nbytes(self) -> int:
        return sum(of.nbytes for of in self.arrays("").values())


def require_plausible(table: pq.ParquetFile, file: Path, features: Sequence[Feature]) -> None:
    """ValueError if a Parquet file claims more than VALUES_A_BYTE, by its metadata."""
    size, widths = file.stat().st_size, {of.name: of.width for of in features}
    if table.metadata.num_rows > VALUES_A_BYTE * size:
        raise ValueError(f"it claims {table.metadata.num_rows:,} rows, more than {size:,} bytes can hold")
    for column, values in values_of(table.metadata).items():
        if values > VALUES_A_BYTE * size * widths.get(column.partition(".")[0], 1):
            raise ValueError(f"it claims {values:,} values in column {column}, more than {size:,} bytes can hold")


def values_of(metadata: pq.FileMetaData) -> Counter[str]:
    """Values of each column that the row groups claim; the path of a column of lists goes on after its name."""
    counts: Counter[str] = Counter()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            counts[column.path_in_schema] += column.num_values
    return counts


class SequenceReader:
    """Collects the actions of users: of the files of sequences/, and then those that were appended, some users at a
    time."""

    def __init__(self, schema: Schema, num_users: int, num_items: int, actions: int) -> None:
        self.num_users, self.num_items, self.actions = num_users, num_items, actions
        self.user = self.action = 0
        """Those read so far."""
        self.items_flat = np.empty(actions, index_type(num_items))
        self.times = _Times(actions)
        self.users = {f.name: ColumnReader(f, schema, num_users) for f in schema.of("user")}
        self.events = {f.name: ColumnReader(f, schema, actions) for f in schema.of("event")}
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        """Users, and how many of the next actions each has."""
        self._appended = False

    def append(self, batch: pa.RecordBatch) -> None:
        """The next users with all that is known of them."""
        self.append_users(batch)
        self._append(batch, np.arange(self.user - batch.num_rows, self.user))

    def append_users(self, batch: pa.RecordBatch) -> None:
        """The next users and their features."""
        require_order(batch.column("user_index"), self.user, self.user + batch.num_rows)
        self._require_room(self.user + batch.num_rows, self.action)
        for name, reader in self.users.items():
            reader.append(batch.column(name), places("user_index", self.user))
        self.user += batch.num_rows

    def _require_room(self, users: int, actions: int) -> None:
        if users > self.num_users or actions > self.actions:
            raise ValueError(
                f"there are more users or actions than dataset.json says ({self.num_users}, {self.actions})"
            )

    def append_later(self, batch: pa.RecordBatch) -> None:
        """Later actions of some users, each of them once in a file, in order."""
        users = later_users(batch.column("user_index"), self.user)
        self._append(batch, users.astype(np.int64))
        self._appended = True

    def _append(self, batch: pa.RecordBatch, users: np.ndarray) -> None:
        lengths, items = lists("item_indices", batch.column("item_indices"))
        self._require_room(self.user, self.action + len(items))
        of_action = places_in_lists(lengths, lambda row: f"user_index {users[row]}")
        indices = within("item_indices", items, 0, self.num_items, of_action)
        self.items_flat[self.action : self.action + len(items)] = indices
        self.times.append(parallel("timestamps", batch.column("timestamps"), lengths), lengths, of_action)
        for name, reader in self.events.items():
            reader.append(parallel(name, batch.column(name), lengths), of_action)
        self._runs.append((users, lengths))
        self.action += len(items)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, once everything is read. ValueError if a user has an earlier action appended to later
        ones."""
        offsets = np.zeros(self.num_users + 1, np.int64)
        for users, lengths in self._runs:
            offsets[1 + users] += lengths
        np.cumsum(offsets, out=offsets)
        items, times = self.items_flat, self.times.values
        columns = {f"user.{name}": reader.column() for name, reader in self.users.items()}
        events = {f"event.{name}": reader.column() for name, reader in self.events.items()}
        if self._appended:
            order = self._order(offsets)
            items, times = items[order], times[order]
            events = {name: column.take(order) for name, column in events.items()}
            for block, bounds in user_blocks(offsets):
                place = places_in_lists(np.diff(bounds), places("user_index", block.start))
                _require_oldest_first("timestamps", times[bounds[0] : bounds[-1]], np.diff(bounds), place)
        found = {"items": items, "offsets": offsets, "timestamps": times}
        for name, column in (columns | events).items():
            found |= column.arrays(name)
        return found

    def _order(self, offsets: np.ndarray) -> np.ndarray:
        """Which of the actions as they were read is where [actions], user after user."""
        order = np.empty(self.actions, index_type(self.actions))
        next_U, read = offsets[:-1].copy(), 0
        for users, lengths in self._runs:
            count = int(lengths.sum())
            order[ranges(next_U[users], lengths)] = np.arange(read, read + count)
            next_U[users] += lengths
            read += count
        return order


class _Times:
    """Whole numbers, kept in 4 bytes as long as all fit."""

    def __init__(self, rows: int) -> None:
        self.values, self.filled = np.empty(rows, np.int32), 0

    def append(self, array: pa.Array, lengths: np.ndarray, place: "Place") -> None:
        """Adds the times of users with so many actions each."""
        values = times_of(array, lengths, place)
        if self.values.dtype == np.int32 and not np.array_equal(values.astype(np.int32), values):
            self.values = self.values.astype(np.int64)
        self.values[self.filled : self.filled + len(values)] = values
        self.filled += len(values)


class ColumnReader:
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
            lengths, elements = lists(name, array)
            place = places_in_lists(lengths, place)
            if self.parallel:
                elements, *others = structs(name, elements, (ROW, *self.parallel))
                for (other, parts), numbers in zip(self.parallel.items(), others, strict=True):
                    parts.append(self._allowed(f"{name}.{other}", other, numbers, place))
            self.parts.append(self._values(name, elements, place))
            self.offsets[start + 1 : stop + 1] = self.offsets[start] + np.cumsum(lengths)
        elif self.form.wide:
            lengths, numbers = lists(name, array)
            if not (lengths == self.feature.width).all():
                raise ValueError(f"column {name} has vectors that are not {self.feature.width} wide")
            self.values[start:stop] = self._values(name, numbers, place).reshape(-1, self.feature.width)
        else:
            self.values[start:stop] = self._values(name, array, place)
        self.filled = stop

    def _values(self, name: str, array: pa.Array, place: "Place") -> np.ndarray:
        if not self.feature.sparse:
            return finite(name, array)
        return within(name, array, 0, self.table_rows, place).astype(self.values.dtype, copy=False)

    def _allowed(self, column: str, name: str, array: pa.Array, place: "Place") -> np.ndarray:
        numbers = finite(column, array)
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


def user_blocks(offsets: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Some users at a time, and the offsets of their actions, one more than users: what is computed of all actions at
    once takes several times their memory."""
    for start in range(0, len(offsets) - 1, USERS_AT_ONCE):
        users = slice(start, min(start + USERS_AT_ONCE, len(offsets) - 1))
        yield users, offsets[users.start : users.stop + 1]


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """The integer type that holds indices below a count."""
    return np.int32 if count <= 2**31 else np.int64


def lists(name: str, array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Lengths, and the elements of all lists."""
    require_list(name, array.type)
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size)
    else:
        lengths = as_numpy(array.value_lengths())
    if array.null_count:
        raise ValueError(f"empty values in column {name}")
    return lengths, array.flatten()


def structs(name: str, array: pa.Array, wanted: Sequence[str]) -> list[pa.Array]:
    """Those of structs."""
    if not pa.types.is_struct(array.type) or {field.name for field in array.type} != set(wanted):
        raise ValueError(f"column {name} has lists of type {array.type}, not structs of {', '.join(wanted)}")
    if array.null_count:
        raise ValueError(f"empty values in column {name}")
    return [array.field(field) for field in wanted]


def require_list(name: str, kind: pa.DataType) -> None:
    if not is_list(kind):
        raise ValueError(f"column {name} is of type {kind}, not a list")


def parallel(name: str, array: pa.Array, lengths: np.ndarray) -> pa.Array:
    """The elements of lists that must be as long as the users' sequences."""
    own, elements = lists(name, array)
    if not np.array_equal(own, lengths):
        raise ValueError(f"column {name} has lists that are not as long as item_indices")
    return elements


Place = Callable[[int], str]
"""Where a value of an array is, in words."""


def places(index: str, first: int) -> Place:
    """Those of rows, of which the first has this index."""
    return lambda row: f"{index} {first + row}"


def places_in_lists(lengths: np.ndarray, place: Place) -> Place:
    """Those of the elements of lists with these lengths."""
    return lambda element: place(int(np.searchsorted(np.cumsum(lengths), element, "right")))


def within(name: str, array: pa.Array, low: int, high: int, place: Place) -> np.ndarray:
    """Integers from `low` up to below `high`; ValueError with the place of the first other one."""
    if not pa.types.is_integer(array.type):
        raise ValueError(f"column {name} has values of type {array.type}, not int64")
    if array.null_count:
        raise ValueError(f"empty values in column {name}")
    values = array.to_numpy()
    if len(values) and not low <= values.min() <= values.max() < high:
        wrong = int(np.argmax((values < low) | (values >= high)))
        raise ValueError(f"column {name} has {values[wrong]} at {place(wrong)}; it must be from {low} to {high - 1}")
    return values


def later_users(array: pa.Array, count: int) -> np.ndarray:
    """Returns which of the `count` users each row of what was appended is of. ValueError if they are not in order."""
    users = within("user_index", array, 0, count, lambda row: f"row {row}")
    if (np.diff(users) <= 0).any():
        raise ValueError("its users are not in order")
    return users


def times_of(array: pa.Array, lengths: np.ndarray, place: Place) -> np.ndarray:
    """Returns the times of users with these numbers of actions. ValueError for other values, and for times that
    decrease."""
    values = within("timestamps", array, 1 - LATEST, LATEST, place)
    _require_oldest_first("timestamps", values, lengths, place)
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


def texts(name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Arrow's large_string. ArrowInvalid, with the row, if they are not UTF-8, which no reader of Parquet checks."""
    kind = require_texts(name, column.type)
    column.validate(full=True)
    return column.cast(kind).cast(pa.large_string())


def require_texts(name: str, kind: pa.DataType) -> pa.DataType:
    """The type without a dictionary. ValueError if it is neither text nor integers."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (is_text(plain) or pa.types.is_string_view(plain) or pa.types.is_integer(plain)):
        raise ValueError(f"column {name} has values of type {kind}, not string")
    return plain


def finite(name: str, array: pa.Array) -> np.ndarray:
    """Numbers as float32. ValueError if some are missing or not finite."""
    if not pa.types.is_floating(array.type):
        raise ValueError(f"column {name} has values of type {array.type}, not float")
    with np.errstate(over="ignore"):
        values = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError(f"empty or infinite values in column {name}")
    return values


def require_order(indices: pa.Array, start: int, stop: int) -> None:
    if not np.array_equal(indices.to_numpy(zero_copy_only=False), np.arange(start, stop)):
        if not pa.types.is_integer(indices.type):
            raise ValueError(f"its rows are numbered by values of type {indices.type}, not int64")
        raise ValueError(f"its rows are not {start} to {stop - 1} in order")


def require_columns(present: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in present:
            raise ValueError(f"no column {name}; there are: {', '.join(present)}")
        if present.count(name) > 1:
            raise ValueError(f"there are two columns named {name}")


def batches(file: Path, columns: Sequence[str], rows: int = 2**16) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as table:
        require_columns(table.schema_arrow.names, columns)
        yield from table.iter_batches(rows, columns=list(columns))
