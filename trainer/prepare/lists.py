"""Rows with a list of items -> rows with one item each.

A row has the items of one user or session: in a column of lists, or in a text with a separator. Lists of the same
length beside it (times, kinds of action) have one value for each item; all else is repeated for each.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import as_numpy, is_list, is_text, lengths
from logitmix.trainer.data.columns import ranges
from logitmix.trainer.data.engine import Engine
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import Block

ACTIONS = 1 << 18
"""Of a block of rows with one item each, about."""
_SAMPLE = 10_000
_MANY = 5
SEPARATORS = ("|", ",", ";", " ")
"""Those that a note proposes."""


class Lists:
    """The rows of all files of a source, and what is to be said of them."""

    def __init__(self, item: str, separator: str, rejects: Rejects) -> None:
        """`item`: the column with the lists."""
        self.item, self.separator, self.rejects = item, separator, rejects
        self.rows = self.actions = self.empty = 0
        """Rows with lists of items, their items, and rows without any."""
        self.first_empty = ""
        self.parallel: dict[str, bool] = {}
        """Whether the lists of another column have a value for each item."""
        self.repeated: dict[str, None] = {}
        """Columns with one value for all items of a row."""
        self.looked = False
        self.starts: dict[Any, set[tuple[Any, ...]]] = {}
        """By user: how the lists of the first rows begin."""
        self.again = self.repeats = 0
        """Of these rows: those of a user who has an earlier one, and those of them that begin as an earlier one."""

    def explode(self, block: Block) -> Iterator[Block]:
        """The block with one item a row. Rows of which a parallel list has another length are rejected."""
        user, item = block.keys[:2]
        items = self._lists(block.columns[item])
        if not is_list(items.type):
            self._propose(block.label, items)
            if not self.rows or items.null_count < len(items):
                yield block
                return
            items = pa.nulls(len(items), pa.list_(pa.string()))
        counts = lengths(items)
        self._compare(block.columns[user], items, counts)
        columns, parallel = block.columns | {item: items}, {item}
        whole = np.ones(len(counts), bool)
        for name, values in block.columns.items():
            lists = self._lists(values) if name != user else values
            stated = name in block.keys and lists is values
            if name == item or not self._is_parallel(name, lists, counts, stated):
                continue
            columns[name], size = lists, lengths(lists)
            parallel.add(name)
            wrong = np.flatnonzero(whole & as_numpy(lists.is_valid()) & (size != counts)).tolist()
            reasons = {row: f"{name} has {size[row]} values for {counts[row]} items" for row in wrong}
            whole &= block.reject(reasons, self.rejects)
        self.repeated |= dict.fromkeys(name for name in block.others if name not in parallel)
        self._count(block, whole, counts)
        for part in _parts(np.flatnonzero(whole & (counts > 0)), counts):
            yield _one_item_a_row(replace(block, columns=columns), parallel, counts, part)

    def say(self) -> None:
        """What became of the lists, in a line each."""
        if self.separator and self.actions == self.rows:
            self.rejects.say(
                f"no text of {self.item} has {self.separator!r} in it (--list-separator): each is one item"
            )
            return
        if not self.rows:
            return
        parallel = [self.item, *(name for name, holds in self.parallel.items() if holds)]
        self.rejects.say(
            f"{self.rows:,} rows have lists: read as {self.actions:,} actions, each with its own {', '.join(parallel)}"
        )
        if self.repeats >= _MANY and 2 * self.repeats > self.again:
            self.rejects.say(
                f"{self.repeats:,} of the first {self.again:,} further rows of a user begin with the items of an "
                "earlier row, as histories do that are written anew with each row: keep only the last row of each user"
            )
        if self.empty:
            self.rejects.say(f"{self.empty:,} more rows have empty lists, such as {self.first_empty}")

    def numbers_of_rows(self, engine: Engine, columns: Mapping[str, str]) -> list[str]:
        """Those of the actions' columns that have their own value in most rows of lists, such as the number of a
        session: repeated for each item they look like something that actions have in common."""
        if self.actions == self.rows:
            return []
        texts = "count(distinct case when typeof({0}) in ('VARCHAR', 'BIGINT') then {0} end)"
        there = {name: columns[name] for name in self.repeated if name in columns}
        counts = {name: engine.row(f"select {texts.format(column)} from rows") for name, column in there.items()}
        return [name for name, (count,) in counts.items() if 2 * count > self.rows]

    def _compare(self, users: pa.Array, items: pa.Array, counts: np.ndarray) -> None:
        """Counts rows that repeat an earlier one, among the first."""
        for row in np.flatnonzero(counts > 1)[: max(0, _SAMPLE - self.rows)]:
            start = tuple(items[row].values[:2].to_pylist())
            of_user = self.starts.setdefault(users[row].as_py(), set())
            self.again += bool(of_user)
            self.repeats += start in of_user
            of_user.add(start)

    def _lists(self, values: pa.Array) -> pa.Array:
        """Texts as lists if there is a separator."""
        return split(values, self.separator) if self.separator and is_text(values.type) else values

    def _is_parallel(self, name: str, lists: pa.Array, counts: np.ndarray, stated: bool) -> bool:
        """Decided by most rows of the first block where the column has lists. Times that are lists always are: `stated`
        to be."""
        if not is_list(lists.type):
            return False
        if stated:
            self.parallel[name] = True
        if name not in self.parallel:
            there = as_numpy(lists.is_valid())
            # A single item has one of everything.
            several = there & (counts > 1)
            there = several if several.any() else there & (counts > 0)
            if not there.any():
                return False
            self.parallel[name] = bool(2 * np.sum(lengths(lists)[there] == counts[there]) > there.sum())
        return self.parallel[name]

    def _count(self, block: Block, whole: np.ndarray, counts: np.ndarray) -> None:
        empty = np.flatnonzero(whole & (counts == 0))
        if len(empty) and not self.empty:
            self.first_empty = f"{block.label}:{block.numbers[empty[0]]}"
        self.empty += len(empty)
        read = whole & (counts > 0)
        self.rows += int(read.sum())
        self.actions += int(counts[read].sum())
        # Each action can be rejected.
        self.rejects.lines += int(counts[read].sum() - read.sum())

    def _propose(self, label: str, items: pa.Array) -> None:
        """Says so where the first texts look like lists: each its own, of parts that come again."""
        texts = items[:_SAMPLE].drop_null()
        if self.looked or not len(texts) or not is_text(items.type):
            return
        self.looked = True
        if 2 * len(texts.unique()) <= len(texts):
            return
        for separator in SEPARATORS:
            parts = split(texts, separator)
            flat = parts.flatten()
            if len(flat) >= 3 * len(texts) and 2 * len(flat.unique()) <= len(flat):
                example = texts[0].as_py()
                self.rejects.say(
                    f"{label}: {self.item} looks like lists ({example[:40]!r}); if a row has several items, split "
                    f'them with --list-separator "{separator}"'
                )
                return


def _one_item_a_row(block: Block, parallel: set[str], counts: np.ndarray, rows: np.ndarray) -> Block:
    """Some of the rows, each as often as it has items: with a value of each `parallel` list, and the others' whole."""
    of_row = np.repeat(rows, counts[rows])
    within = ranges(np.zeros_like(rows), counts[rows])
    made = {}
    for name, values in block.columns.items():
        if name in parallel:
            size = lengths(values)
            places = (np.cumsum(size) - size)[of_row] + within
            made[name] = values.flatten().take(pa.array(places, mask=size[of_row] == 0))
        else:
            made[name] = values.take(pa.array(of_row))
    of_one_time = len(block.keys) > 2 and not is_list(block.columns[block.keys[2]].type)
    return replace(
        block,
        numbers=block.numbers[of_row],
        columns=made,
        text=lambda row: block.text(int(of_row[row])),
        places=within,
        one_time=of_one_time,
    )


def split(texts: pa.Array, separator: str) -> pa.ListArray:
    """The parts of each text without blanks and quotes around them, and without brackets around all; null for an empty
    text. At " ", any white space is between parts."""
    whole = pc.replace_substring_regex(texts.cast(pa.string()), r"(?s)^\s*[\[(](.*)[\])]\s*$", r"\1")
    whole = pc.utf8_trim_whitespace(whole)
    whole = pc.if_else(pc.equal(whole, ""), None, whole)
    if not separator.strip():
        parts = pc.utf8_split_whitespace(whole)
    else:
        parts = pc.split_pattern(pc.replace_substring_regex(whole, re.escape(separator) + r"$", ""), separator)
    values = pc.utf8_trim_whitespace(parts.values)
    for quote in "'\"":
        values = pc.replace_substring_regex(values, f"(?s)^{quote}(.*){quote}$", r"\1")
    return pa.ListArray.from_arrays(parts.offsets, values, mask=whole.is_null())


def _parts(rows: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    """The rows in parts with about ACTIONS items each."""
    if len(rows):
        of_part = np.cumsum(counts[rows]) // ACTIONS
        yield from np.split(rows, np.flatnonzero(np.diff(of_part)) + 1)
