"""What a source hands to `prepare`: actions with users and items as codes, and tables of what it says about them.

There is no Python object per action: a source reads blocks of rows into Arrow arrays (`ActionBlock`), and `gather`
joins them as integers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.rejects import Rejects

_WHOLE = r"^-?[0-9]{1,18}(\.0*)?$"


@dataclass(frozen=True)
class ActionBlock:
    """Actions in file order: three arrays of one length."""

    users: pa.StringArray
    items: pa.StringArray
    timestamps: np.ndarray
    """int64"""


@dataclass
class Actions:
    """All actions, in file order, and the raw ids by code."""

    users: np.ndarray
    """int32 codes."""
    items: np.ndarray
    """int32 codes."""
    timestamps: np.ndarray
    """int64."""
    user_ids: pa.StringArray
    item_ids: pa.StringArray


@dataclass(frozen=True)
class SideTable:
    """What a source says about users or about items, whether they act or not."""

    ids: pa.StringArray = field(default_factory=lambda: pa.array([], pa.string()))
    """Of the last rows count, where an id is there several times."""
    columns: Mapping[str, pa.Array] = field(default_factory=dict)

    def of(self, ids: pa.StringArray) -> dict[str, pa.Array]:
        """The columns with one value for each of `ids`, null where the table has none."""
        backwards = pc.index_in(ids, value_set=self.ids.take(pa.array(np.arange(len(self.ids))[::-1])))
        rows = pc.subtract(len(self.ids) - 1, backwards)
        return {name: column.take(rows) for name, column in self.columns.items()}


@dataclass
class RawDataset:
    actions: Actions
    source: Path | None = None
    """What was read; None where it was generated."""
    files: list[InputFile] = field(default_factory=list)
    """Those in `source` that were read."""
    generator: dict[str, Any] | None = None
    """The entry of dataset.json where it was generated."""
    users: SideTable = field(default_factory=SideTable)
    items: SideTable = field(default_factory=SideTable)


class IdCodes:
    """Numbers raw ids in the order of their first appearance."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def encode(self, ids: pa.StringArray) -> np.ndarray:
        encoded = ids.dictionary_encode()
        codes = self._codes
        table = [codes.setdefault(raw, len(codes)) for raw in encoded.dictionary.to_pylist()]
        return np.array(table, np.int32)[encoded.indices.to_numpy()]

    def ids(self) -> pa.StringArray:
        return pa.array(self._codes, pa.string())


def gather(blocks: Iterable[ActionBlock]) -> Actions:
    """Joins the blocks of a source."""
    user_codes, item_codes = IdCodes(), IdCodes()
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for block in blocks:
        for part, values in zip(
            parts, (user_codes.encode(block.users), item_codes.encode(block.items), block.timestamps), strict=True
        ):
            part.append(values)
    users, items, timestamps = (_join(part, kind) for part, kind in zip(parts, ("i4", "i4", "i8"), strict=True))
    return Actions(users, items, timestamps, user_codes.ids(), item_codes.ids())


def _join(parts: list[np.ndarray], kind: str) -> np.ndarray:
    joined = np.concatenate([np.empty(0, kind), *parts], dtype=kind)
    # The pieces would otherwise live on beside the whole until the last column is joined.
    parts.clear()
    return joined


def accept(
    label: str,
    numbers: np.ndarray,
    users: pa.StringArray,
    items: pa.StringArray,
    stamps: pa.Array | None,
    text: Callable[[int], str | bytes],
    rejects: Rejects,
) -> ActionBlock:
    """The rows with both ids and a whole number as time; the others are rejected, with `text(row)`.

    `numbers` are the rows' places in the file `label`, and the times where `stamps` is None.
    """
    user_ok, item_ok = _filled(users), _filled(items)
    times, time_ok = (numbers, np.ones(len(numbers), bool)) if stamps is None else _whole_numbers(stamps)
    accepted = user_ok & item_ok & time_ok
    for row in np.flatnonzero(~accepted):
        if not user_ok[row]:
            reason = "the user is empty"
        elif not item_ok[row]:
            reason = "the item is empty"
        else:
            assert stamps is not None
            reason = f"the timestamp {str(stamps[row].as_py())[:40]!r} is not a whole number"
        rejects.add(label, int(numbers[row]), reason, text(int(row)))
    rejects.check_format(label)
    mask = pa.array(accepted)
    return ActionBlock(users.filter(mask), items.filter(mask), times[accepted].astype(np.int64))


def _filled(ids: pa.StringArray) -> np.ndarray:
    return as_numpy(pc.fill_null(pc.not_equal(ids, ""), False))


def _whole_numbers(stamps: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """int64 values, and which of them are what the source says."""
    kind = stamps.type
    if pa.types.is_floating(kind):
        values = stamps.to_numpy(zero_copy_only=False)
        with np.errstate(invalid="ignore"):
            ok = (values == np.floor(values)) & (np.abs(values) < 2.0**63)
        return np.where(ok, values, 0).astype(np.int64), ok
    if pa.types.is_string(kind):
        ok = as_numpy(pc.fill_null(pc.match_substring_regex(stamps, _WHOLE), False))
        digits = pc.replace_substring_regex(stamps, r"\..*$", "")
    else:
        ok, digits = as_numpy(stamps.is_valid()), stamps
    return pc.if_else(pa.array(ok), digits, None).cast(pa.int64()).fill_null(0).to_numpy(), ok


def as_numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


class RowBuffer:
    """Gathers rows that Python parsed one by one, and hands them on in blocks."""

    def __init__(self, label: str, rejects: Rejects, timed: bool) -> None:
        self.label, self.rejects, self.timed = label, rejects, timed
        self._rows: list[tuple[int, str, str, str, str | bytes]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, number: int, user: str, item: str, stamp: str, text: str | bytes) -> None:
        if is_encodable(user) and is_encodable(item):
            self._rows.append((number, user, item, stamp, text))
        else:
            self.rejects.add(self.label, number, "not UTF-8", text)

    def take(self) -> ActionBlock:
        rows, self._rows = self._rows, []
        users, items = (pa.array([row[at] for row in rows], pa.string()) for at in (1, 2))
        stamps = None
        if self.timed:
            stamps = pa.array([row[3] if row[3].isascii() else "" for row in rows], pa.string())
        numbers = np.array([row[0] for row in rows], np.int64)
        return accept(self.label, numbers, users, items, stamps, lambda row: rows[row][4], self.rejects)


def is_encodable(text: str) -> bool:
    """False for the stand-ins of undecodable bytes, and for lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
