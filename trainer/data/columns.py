"""Columns of a dataset's Parquet files, checked as they are read."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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


def read_file(
    file: Path,
    columns: Sequence[str],
    append: Callable[[pa.RecordBatch], None],
    features: Sequence[Feature] = (),
    text: str = "",
) -> int:
    """Gives a Parquet file's columns to `append`, some rows at a time; returns how many rows there are. The column
    `text`, which is not read, must be there and have texts.

    Raises:
        ValueError: If a column is missing or there twice, or if the file claims more than VALUES_A_BYTE.
    """
    with pq.ParquetFile(file) as table:
        present, rows, size = table.schema_arrow.names, table.metadata.num_rows, file.stat().st_size
        for name in (*columns, *filter(None, [text])):
            if present.count(name) != 1:
                are = "there are two columns named" if name in present else "no column"
                raise ValueError(f"{are} {name}; there are: {', '.join(present)}")
        if text:
            require_texts(text, table.schema_arrow.field(text).type)
        claims, widths = Counter[str](), {of.name: of.width for of in features}
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            for column in map(group.column, range(group.num_columns)):
                claims[column.path_in_schema] += column.num_values
        for path, values in claims.items():
            if values > VALUES_A_BYTE * size * widths.get(path.partition(".")[0], 1):
                raise ValueError(f"it claims {values:,} values in column {path}, more than {size:,} bytes can hold")
        for batch in table.iter_batches(2**16, columns=list(columns)) if columns else ():
            append(batch)
        return rows


class SequenceReader:
    """Collects the actions of users: of the files of sequences/, and then those that were appended, some users at a
    time."""

    def __init__(self, schema: Schema, num_users: int, num_items: int, actions: int) -> None:
        self.num_users, self.num_items, self.actions = num_users, num_items, actions
        self.user = self.action = 0
        """Those read so far."""
        self.items_flat = np.empty(actions, index_type(num_items))
        self.times = np.empty(actions, np.int32)
        """int64 once one does not fit."""
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
        first, self.user = self.user, self.user + batch.num_rows
        require_order(batch.column("user_index"), first, self.user)
        self._require_room()
        for name, reader in self.users.items():
            reader.append(batch.column(name))

    def append_later(self, batch: pa.RecordBatch) -> None:
        """Later actions of some users, each of them once in a file, in order."""
        users = within("user_index", batch.column("user_index"), 0, self.user)
        if (np.diff(users) <= 0).any():
            raise ValueError("its users are not in order")
        self._append(batch, users.astype(np.int64))
        self._appended = True

    def _require_room(self) -> None:
        if self.user > self.num_users or self.action > self.actions:
            raise ValueError(
                f"there are more users or actions than dataset.json says ({self.num_users}, {self.actions})"
            )

    def _append(self, batch: pa.RecordBatch, users: np.ndarray) -> None:
        lengths, items = lists("item_indices", batch.column("item_indices"))
        place = slice(self.action, self.action + len(items))
        self.action = place.stop
        self._require_room()
        self.items_flat[place] = within("item_indices", items, 0, self.num_items)
        times = within("timestamps", _parallel("timestamps", batch, lengths), 1 - LATEST, LATEST)
        _require_oldest_first(times, lengths)
        if self.times.dtype == np.int32 and not np.array_equal(times.astype(np.int32), times):
            self.times = self.times.astype(np.int64)
        self.times[place] = times
        for name, reader in self.events.items():
            reader.append(_parallel(name, batch, lengths))
        self._runs.append((users, lengths))

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, once everything is read. ValueError if a user has an earlier action appended to later
        ones."""
        offsets = np.zeros(self.num_users + 1, np.int64)
        for users, lengths in self._runs:
            offsets[1 + users] += lengths
        np.cumsum(offsets, out=offsets)
        items, times = self.items_flat, self.times
        columns = {f"user.{name}": reader.column() for name, reader in self.users.items()}
        events = {f"event.{name}": reader.column() for name, reader in self.events.items()}
        if self._appended:
            order = self._order(offsets)
            items, times = items[order], times[order]
            events = {name: column.take(order) for name, column in events.items()}
            for _, bounds in user_blocks(offsets):
                _require_oldest_first(times[bounds[0] : bounds[-1]], np.diff(bounds))
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

    def append(self, array: pa.Array) -> None:
        name, start, stop = self.feature.name, self.filled, self.filled + len(array)
        if self.offsets is not None:
            lengths, elements = lists(name, array)
            if self.parallel:
                elements, *others = _structs(name, elements, (ROW, *self.parallel))
                for (other, parts), numbers in zip(self.parallel.items(), others, strict=True):
                    parts.append(finite(f"{name}.{other}", numbers))
                    if len(wrong := parts[-1][~self.form.allows(other, parts[-1])]):
                        raise ValueError(f"column {name}.{other} has {wrong[0]}; it must be {self.form.needs}")
            self.parts.append(self._values(elements))
            self.offsets[start + 1 : stop + 1] = self.offsets[start] + np.cumsum(lengths)
        elif self.form.wide:
            lengths, numbers = lists(name, array)
            if not (lengths == self.feature.width).all():
                raise ValueError(f"column {name} has vectors that are not {self.feature.width} wide")
            self.values[start:stop] = self._values(numbers).reshape(-1, self.feature.width)
        else:
            self.values[start:stop] = self._values(array)
        self.filled = stop

    def _values(self, array: pa.Array) -> np.ndarray:
        if not self.feature.sparse:
            return finite(self.feature.name, array)
        return within(self.feature.name, array, 0, self.table_rows).astype(self.values.dtype, copy=False)

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
    if not is_list(array.type):
        raise ValueError(f"column {name} is of type {array.type}, not a list")
    _require_values(name, array)
    return as_numpy(pc.list_value_length(array)), array.flatten()


def _structs(name: str, array: pa.Array, wanted: Sequence[str]) -> list[pa.Array]:
    """The fields of structs."""
    if not pa.types.is_struct(array.type) or {field.name for field in array.type} != set(wanted):
        raise ValueError(f"column {name} has lists of type {array.type}, not structs of {', '.join(wanted)}")
    _require_values(name, array)
    return [array.field(field) for field in wanted]


def _parallel(name: str, batch: pa.RecordBatch, lengths: np.ndarray) -> pa.Array:
    """The elements of a column of lists that must be as long as the users' sequences."""
    own, elements = lists(name, batch.column(name))
    if not np.array_equal(own, lengths):
        raise ValueError(f"column {name} has lists that are not as long as item_indices")
    return elements


def within(name: str, array: pa.Array, low: int, high: int) -> np.ndarray:
    """Integers from `low` up to below `high`; ValueError with the first other one."""
    if not pa.types.is_integer(array.type):
        raise ValueError(f"column {name} has values of type {array.type}, not int64")
    _require_values(name, array)
    values = array.to_numpy()
    if len(values) and not low <= values.min() <= values.max() < high:
        wrong = values[(values < low) | (values >= high)][0]
        raise ValueError(f"column {name} has {wrong}; it must be from {low} to {high - 1}")
    return values


def _require_values(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise ValueError(f"empty values in column {name}")


def _require_oldest_first(times: np.ndarray, lengths: np.ndarray) -> None:
    """ValueError with the first time that is below the one before it in the same list."""
    falls = times[1:] < times[:-1]
    # A list may begin below the end of the one before it. Empty ones may begin before all values or behind them.
    starts = np.cumsum(lengths)[:-1]
    falls[starts[(starts > 0) & (starts < len(times))] - 1] = False
    if falls.any():
        wrong = 1 + int(np.argmax(falls))
        raise ValueError(f"column timestamps has {times[wrong]} after {times[wrong - 1]}; they must be oldest first")


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
        values = as_numpy(array).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError(f"empty or infinite values in column {name}")
    return values


def require_order(indices: pa.Array, start: int, stop: int) -> None:
    if not (pa.types.is_integer(indices.type) and np.array_equal(as_numpy(indices), np.arange(start, stop))):
        raise ValueError(f"its rows are not numbered {start} to {stop - 1} in order by integers")
