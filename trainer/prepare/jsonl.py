"""JSON lines, one object each, as blocks of a table.

Keys are columns, and those of nested objects are columns by their path, `user.id`. A list of objects is read where a
requested column lies in it: its keys are columns with one list a row, `events.aid`. Integers keep all their digits.
Values of a column that are of several types in one block (numbers and text, or integers that only fit in text) are text
there.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from rich.progress import Progress

from logitmix.trainer.data.arrow import as_numpy, is_encodable
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import Block, Keys
from logitmix.trainer.prepare.text import line_blocks

MOST_KEYS = 50
"""Of a nested object: more are not keys but data, such as the details of products."""
MOST_COLUMNS = 1000
MOST_LEVELS = 32

_TOO_DEEP = "JSON nested too deeply"
_START = re.compile(rb"\s*(\{|\[\s*[\[\]{])")
_ARRAY = re.compile(rb"\s*\[")
_OBJECT_OF_LINES = re.compile(rb"\s*\{\s*\n")

_NOTHING = {pa.null(): pa.string(), pa.list_(pa.null()): pa.list_(pa.string())}
"""Types of columns without a value, and those that they get."""

Record = Mapping[str, Any]
Columns = dict[str, list[Any]]


class Unfit(ValueError):
    """An incomplete record, with the reason."""


def is_json(file: InputFile) -> bool:
    """Whether the file starts as JSON does. ValueError for an array and for an object over several lines."""
    with file.open(Progress(disable=True)) as stream:
        start = stream.read(1 << 16)
    if not _START.match(start):
        return False
    if _ARRAY.match(start):
        raise ValueError(
            f"{file.label}: is a JSON array; write its elements one a line: jq -c '.[]' {file.label} > lines.jsonl"
        )
    if _OBJECT_OF_LINES.match(start):
        raise ValueError(
            f"{file.label}: is JSON with objects of several lines; write one a line: jq -c . {file.label} > lines.jsonl"
        )
    return True


def records(
    file: InputFile,
    parse: Callable[[str], Any],
    take: Callable[[Record], Any],
    rejects: Rejects,
    progress: Progress,
) -> Iterator[list[tuple[int, Any, bytes]]]:
    """Numbers, records as `take` returns them, and texts of lines with one record each, a block at a time. Lines that
    are no objects, or that `take` finds Unfit, are rejected."""
    for first, lines in line_blocks(file, progress):
        found = []
        for number, line in enumerate(lines.split(b"\n"), start=first):
            if not line or line.isspace():
                continue
            rejects.lines += 1
            try:
                record = parse(line.decode())
                if not isinstance(record, dict):
                    raise Unfit("not a JSON object")
                found.append((number, take(record), line))
            except RecursionError:
                rejects.add(file.label, number, _TOO_DEEP, line)
            except Unfit as error:
                rejects.add(file.label, number, str(error), line)
            except (ValueError, SyntaxError, TypeError, MemoryError):
                rejects.add(file.label, number, "not JSON in UTF-8", line)
        yield found


def read_json(file: InputFile, keys: Keys, rejects: Rejects, progress: Progress) -> Iterator[Block]:
    """The lines of a file with `keys`, which may be paths. Lines whose keys are not UTF-8 are rejected; what else is
    not read is said at the end. ValueError if no line of the first block is an object, or if a key is not there."""
    reader = _Reader(file.label)
    names: list[str] | None = None
    for block in records(file, json.JSONDecoder().decode, _shallow, rejects, progress):
        numbers, columns, lines = reader.columns(block, rejects)
        if names is None:
            if not numbers:
                raise ValueError(
                    f"{file.label}: none of its first lines is a JSON object; if its objects take several lines, "
                    f"write one a line: jq -c . {file.label} > lines.jsonl"
                )
            names = keys(file.label, list(_paths(columns)))
        yield reader.table(names, numbers, columns, lines, rejects)
    reader.say_unread(rejects)


def _shallow(record: Record) -> Record:
    """The record; Unfit if it is nested more deeply than Arrow can take, which ends the process."""
    level: list[Any] = [record]
    for _ in range(MOST_LEVELS):
        values = chain.from_iterable(each.values() if type(each) is dict else each for each in level)
        level = [value for value in values if type(value) is dict or type(value) is list]
        if not level:
            return record
    raise Unfit(_TOO_DEEP)


class _Reader:
    """Objects -> columns."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.known: dict[str, set[str]] = {}
        """By the path of an object: its keys."""
        self.beyond: dict[str, int] = {}
        """By the first key of an object that was one too many: values of such keys."""
        self.objects: dict[str, None] = {}
        """Columns with objects in lists that are not read."""

    def say_unread(self, rejects: Rejects) -> None:
        if self.objects:
            rejects.say(f"{self.label}: not read, as they are objects in lists: {', '.join(self.objects)}")
        for key, count in self.beyond.items():
            rejects.say(
                f"{self.label}: of an object only the first {MOST_KEYS} keys are read (of a line {MOST_COLUMNS:,}), so "
                f"{count:,} values are not, such as that of {key}"
            )

    def columns(
        self, block: list[tuple[int, Record, bytes]], rejects: Rejects
    ) -> tuple[list[int], Columns, list[bytes]]:
        numbers: list[int] = []
        lines: list[bytes] = []
        columns: Columns = {}
        for number, record, line in block:
            try:
                self.spread(record, "", columns, len(numbers))
            except Unfit as error:
                rejects.add(self.label, number, str(error), line)
                for column in columns.values():
                    del column[len(numbers) :]
                continue
            numbers.append(number)
            lines.append(line)
        rows = len(numbers)
        return numbers, {name: column + [None] * (rows - len(column)) for name, column in columns.items()}, lines

    def spread(self, record: Record, path: str, into: Columns, row: int) -> None:
        """Adds the values of an object at `path` to its columns."""
        for key, value in record.items():
            if value is None:
                continue
            name = path + key
            if type(value) is dict:
                self.spread(value, f"{name}.", into, row)
                continue
            column = into.get(name)
            if column is None:
                if not self.takes(path, key):
                    continue
                column = into[name] = []
            if len(column) < row:
                column.extend([None] * (row - len(column)))
            elif len(column) > row:
                raise Unfit(f"has {name} twice")
            column.append(value)

    def takes(self, path: str, key: str) -> bool:
        """Whether a key is read that this block did not have yet."""
        if not is_encodable(key):
            raise Unfit("not UTF-8")
        known = self.known.setdefault(path, set())
        if key not in known and len(known) >= (MOST_KEYS if path else MOST_COLUMNS):
            first = next((name for name in self.beyond if name.startswith(path)), path + key)
            self.beyond[first] = self.beyond.get(first, 0) + 1
            return False
        known.add(key)
        return True

    def table(
        self, names: list[str], numbers: list[int], columns: Columns, lines: list[bytes], rejects: Rejects
    ) -> Block:
        for name in [name for name, values in columns.items() if _holds_objects(values)]:
            values = columns.pop(name)
            if any(key.startswith(f"{name}.") for key in names):
                columns |= {f"{name}.{key}": parts for key, parts in _spread_lists(values).items()}
            else:
                self.objects[name] = None
        arrays = {name: _array(values) for name, values in columns.items()}
        for name in [name for name, array in arrays.items() if _has_objects(array.type)]:
            del arrays[name]
            self.objects[name] = None
        intact = np.ones(len(numbers), bool)
        for name in [name for name in names if name in arrays and arrays[name].null_count]:
            intact &= as_numpy(arrays[name].is_valid()) | [value is None for value in columns[name]]
        none = pa.nulls(len(numbers), pa.string())
        arrays |= {name: none for name in names if name not in arrays}
        block = Block(self.label, np.array(numbers, np.int64), names, arrays, lines.__getitem__)
        return block.only(block.reject(dict.fromkeys(np.flatnonzero(~intact).tolist(), "not UTF-8"), rejects))


def _paths(columns: Columns) -> Iterator[str]:
    """The names of columns, and of what lies in lists of objects."""
    for name, values in columns.items():
        yield name
        if _holds_objects(values):
            yield from (f"{name}.{key}" for key in _spread_lists(values))


def _holds_objects(values: list[Any]) -> bool:
    return list in set(map(type, values)) and any(
        type(value) is list and dict in set(map(type, value)) for value in values
    )


def _spread_lists(values: list[Any]) -> Columns:
    """Rows of lists of objects -> the objects' keys, each with rows of lists."""
    lists = [value if type(value) is list else [] for value in values]
    objects = [_flat(part) if type(part) is dict else {} for part in chain.from_iterable(lists)]
    names = dict.fromkeys(chain.from_iterable(objects))
    ends = np.cumsum([len(each) for each in lists]).tolist()
    starts = [0, *ends[:-1]]
    found: Columns = {}
    for name in names:
        flat = [each.get(name) for each in objects]
        found[name] = [flat[start:end] for start, end in zip(starts, ends, strict=True)]
    return found


def _flat(record: Record) -> Record:
    if not any(type(value) is dict for value in record.values()):
        return record
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= {f"{key}.{name}": part for name, part in _flat(value).items()} if type(value) is dict else {key: value}
    return flat


def _has_objects(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return pa.types.is_struct(kind)


def _array(values: list[Any]) -> pa.Array:
    """Arrow's type for the values; text where they have none in common that keeps them exactly."""
    try:
        made = pa.array(values)
        return made.cast(_NOTHING[made.type]) if made.type in _NOTHING else made
    except (ValueError, TypeError, OverflowError):
        if all(value is None or type(value) is list for value in values):
            lists = [value and [_text(part) for part in value] for value in values]
            return pa.array(lists, pa.list_(pa.string()))
        return pa.array([_text(value) for value in values], pa.string())


def _text(value: Any) -> str | None:
    """None for text that is not UTF-8."""
    if value is None or type(value) is str:
        return value if value is None or is_encodable(value) else None
    text = json.dumps(value, ensure_ascii=False)
    return text if is_encodable(text) else None
