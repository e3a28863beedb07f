"""Conditions on the items' columns, joined: `in_stock = 1 and (price < 50 or category in ('shoes', 'bags'))`.

Their logic is SQL's, of three values: a comparison with what an item does not have is neither true nor false, nor is
what follows from it, and only items for which the whole is true are found.

Axes: X items.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from logitmix.common.mappings import cut, nearest
from logitmix.common.messages import prefixed
from logitmix.common.values import from_one
from logitmix.serving.columns import OPERATORS, Column

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")|(?P<mark>!=|<>|<=|>=|==?|<|>|[(),])|(?P<word>[^\s'"(),<>=!]+))"""
)
_KEYWORDS = ("and", "or", "not", "in", "is", "null")
_SAME = {"==": "=", "<>": "!="}
_DEPTH, _CONDITIONS = 50, 200
_CHUNK = 2**20
"""Items that are looked at together, a multiple of 8."""
_CACHED, _CACHED_BYTES = 64, 2**28
"""Most conditions whose bits are kept, and most bytes of these."""

Truth = tuple[np.ndarray, np.ndarray]
"""For which items a condition is true, and for which it is false."""
Condition = Callable[[slice], Truth]
"""What it says of a part of the items."""


class Allowed:
    """The items that may be found."""

    def __init__(self, bits: np.ndarray, num_items: int) -> None:
        """`bits`: uint8 [X / 8], the lowest bit first; 0 beyond the last item."""
        self.bits, self.num_items = bits, num_items
        self.count = int(np.bitwise_count(bits).sum(dtype=np.int64))

    @classmethod
    def of(cls, mask: np.ndarray) -> "Allowed":
        """From bool [X]."""
        return cls(np.packbits(mask, bitorder="little"), len(mask))

    def __and__(self, other: "Allowed") -> "Allowed":
        return Allowed(self.bits & other.bits, self.num_items)

    def has(self, items: np.ndarray) -> np.ndarray:
        """Which of some items, by index, are among them."""
        return (self.bits[items >> 3] >> (items & 7) & 1).astype(bool)

    @property
    def mask(self) -> np.ndarray:
        """bool [X]."""
        return np.unpackbits(self.bits, count=self.num_items, bitorder="little").view(bool)

    def __reduce__(self) -> "tuple[type[Allowed], tuple[np.ndarray, int]]":
        # For another process, without what can be computed again.
        return Allowed, (self.bits, self.num_items)

    @cached_property
    def others(self) -> "Allowed":
        """All other items."""
        return Allowed.of(~self.mask)

    @cached_property
    def index(self) -> np.ndarray:
        """int64 [count]: their indices, ascending."""
        return np.flatnonzero(self.mask)

    def part(self, start: int, count: int) -> np.ndarray:
        """The bits of `count` items from `start` on."""
        if start % 8 or ((start + count) % 8 and start + count < self.num_items):
            return np.packbits(self.mask[start : start + count], bitorder="little")
        return self.bits[start // 8 : -(-(start + count) // 8)]


class Filters:
    """The items of an export that conditions on its columns allow; what was computed is kept for the next request."""

    def __init__(self, columns: Mapping[str, Column], num_items: int) -> None:
        self._num_items = num_items
        self.change(columns)

    def change(self, columns: Mapping[str, Column]) -> None:
        """From now on, conditions are on these columns."""
        most = max(1, min(_CACHED, _CACHED_BYTES // max(1, self._num_items // 8)))
        # Requests in other threads see the former columns or these, and no mixture.
        self._now = columns, lru_cache(most)(partial(self._allowed, columns))

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._now[0]

    def allowed(self, *texts: str) -> Allowed:
        """The items for which all expressions are true. ValueError as `parsed` raises it."""
        return self._now[1](*texts)

    def require_limit(self, limit: Any) -> dict[str, int]:
        """Most items of a value, by column. ValueError for what is none."""
        if not isinstance(limit, Mapping):
            raise ValueError(f"limit is {limit!r:.40}; it must be numbers by column, such as {{'category': 3}}")
        for name, most in limit.items():
            if name not in self.columns:
                raise ValueError(f"limit: {_no_column(name, self.columns)}")
            with prefixed(f"limit: {name} "):
                from_one(most)
        return dict(limit)

    def within(self, items: np.ndarray, limit: Mapping[str, int]) -> list[int]:
        """The places of those items, best first, that are left when each column's value may occur so often. Items that
        have none are not counted."""
        if not limit:
            return list(range(len(items)))
        labels = zip(*(self.columns[name].labels(items) for name in limit), strict=True)
        most, seen = list(limit.values()), [Counter[float]() for _ in limit]
        kept = []
        for place, of_item in enumerate(labels):
            counted = [(counts, of, n) for counts, of, n in zip(seen, of_item, most, strict=True) if of is not None]
            if all(counts[of] < n for counts, of, n in counted):
                kept.append(place)
                for counts, of, _ in counted:
                    counts[of] += 1
        return kept

    def _allowed(self, columns: Mapping[str, Column], *texts: str) -> Allowed:
        conditions, parts = [parsed(text, columns) for text in texts], []
        for start in range(0, self._num_items, _CHUNK):
            part = slice(start, min(start + _CHUNK, self._num_items))
            true = np.logical_and.reduce([condition(part)[0] for condition in conditions])
            parts.append(np.packbits(true, bitorder="little"))
        return Allowed(np.concatenate([np.zeros(0, np.uint8), *parts]), self._num_items)


def parsed(text: str, columns: Mapping[str, Column]) -> Condition:
    """`or` binds less than `and`, and that less than `not`; a condition is `NAME = VALUE`, another comparison, `NAME in
    (VALUE, …)` or `NAME is [not] null`. What has blanks or signs goes into quotes, which are doubled within.
    ValueError, with the place, for all else."""
    return _Parser(text, columns).whole()


class _Parser:
    def __init__(self, text: str, columns: Mapping[str, Column]) -> None:
        self.text, self.columns, self.depth, self.conditions = text, columns, 0, 0
        self.tokens: list[tuple[str, str, int]] = []
        """Kind, content and place of each."""
        self.at, place = 0, 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None:
                raise self._error("a quote is not closed, or there is a stray sign", place)
            kind = str(found.lastgroup)
            self.tokens.append((kind, found[kind], found.start(kind)))
            place = found.end()

    def whole(self) -> Condition:
        found = self._any()
        if self.at < len(self.tokens):
            raise self._error("and, or, or the end is expected")
        return found

    def _any(self) -> Condition:
        return self._joined("or", _either, lambda: self._joined("and", _both, self._one))

    def _joined(
        self, word: str, join: Callable[[list[Condition]], Condition], part: Callable[[], Condition]
    ) -> Condition:
        found = [part()]
        while self._take(word):
            found.append(part())
        return join(found) if len(found) > 1 else found[0]

    def _one(self) -> Condition:
        self.depth += 1
        if self.depth > _DEPTH:
            raise self._error(f"there are more than {_DEPTH} conditions within each other")
        try:
            if self._take("not"):
                return _opposite(self._one())
            if self._take("("):
                found = self._any()
                self._require(")")
                return found
            return self._condition()
        finally:
            self.depth -= 1

    def _condition(self) -> Condition:
        place, name = self._token[2], self._value("a column")
        self.conditions += 1
        if self.conditions > _CONDITIONS:
            raise self._error(f"there are more than {_CONDITIONS} conditions; write NAME in (VALUE, …)", place)
        if name not in self.columns:
            raise self._error(_no_column(name, self.columns), place)
        column = self.columns[name]
        if self._take("is"):
            is_not = self._take("not")
            self._require("null")
            condition: Condition = lambda part: ((missing := column.missing(part)), ~missing)  # noqa: E731
            return _opposite(condition) if is_not else condition
        is_not = self._take("not")
        if is_not or self._peek() == "in":
            self._require("in")
            self._require("(")
            values = [self._compared(name, column, "=")]
            while self._take(","):
                values.append(self._compared(name, column, "="))
            self._require(")")
            condition = lambda part: column.compared("=", values, part)  # noqa: E731
            return _opposite(condition) if is_not else condition
        kind, sign, _ = self._token
        sign = _SAME.get(sign, sign)
        if kind != "mark" or sign not in OPERATORS:
            raise self._error(f"one of {' '.join(OPERATORS)}, in, or is null is expected")
        self.at += 1
        value = self._compared(name, column, sign)
        if self._peek() == ",":
            raise self._error("only values after in have commas between them; decimals have a point, as in 40.5")
        return lambda part: column.compared(sign, [value], part)

    def _compared(self, name: str, column: Column, sign: str) -> str:
        """A value with which the column can be compared."""
        place, value = self._token[2], self._value("a value")
        try:
            column.compared(sign, [value], slice(0))
        except ValueError as error:
            raise self._error(f"{name} {error}", place) from None
        return value

    def _value(self, what: str) -> str:
        kind, content, _ = self._token
        if kind not in ("text", "word") or (kind == "word" and content.lower() in _KEYWORDS):
            raise self._error(f"{what} is expected")
        self.at += 1
        return content[1:-1].replace(content[0] * 2, content[0]) if kind == "text" else content

    @property
    def _token(self) -> tuple[str, str, int]:
        """The next one; at the end, one without a kind."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ("", "", len(self.text))

    def _peek(self) -> str:
        kind, content, _ = self._token
        return content.lower() if kind != "text" else ""

    def _take(self, word: str) -> bool:
        there = self._peek() == word
        self.at += there
        return there

    def _require(self, word: str) -> None:
        if not self._take(word):
            raise self._error(f"{word!r} is expected")

    def _error(self, why: str, place: int | None = None) -> ValueError:
        place = self._token[2] if place is None else place
        return ValueError(f"where {cut(self.text, 200)!r}, at character {place + 1}: {why}")


def _no_column(name: Any, columns: Mapping[str, Column]) -> str:
    there = f"there are: {', '.join(columns)}" if columns else "there are none (export --filterable keeps some)"
    return f"no column {name!r:.80}{nearest(str(name), list(columns))}; {there}"


def _opposite(of: Condition) -> Condition:
    return lambda part: of(part)[::-1]


def _both(conditions: list[Condition]) -> Condition:
    def found(part: slice) -> Truth:
        true, false = zip(*(of(part) for of in conditions), strict=True)
        return np.logical_and.reduce(true), np.logical_or.reduce(false)

    return found


def _either(conditions: list[Condition]) -> Condition:
    return _opposite(_both([_opposite(of) for of in conditions]))
