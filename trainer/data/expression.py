"""Conditions on the columns of a table, joined: `in_stock = 1 and (price < 50 or category in ('shoes', 'bags'))`."""

import re
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import nearest
from logitmix.trainer.data.arrow import as_numpy, is_text
from logitmix.trainer.data.where import holds

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")|(?P<mark>!=|<=|>=|==?|<|>|[(),])|(?P<word>[^\s'"(),<>=!]+))"""
)
_KEYWORDS = ("and", "or", "not", "in", "is", "null")
_DEPTH = 50


def matches(text: str, columns: Mapping[str, pa.Array], rows: int) -> np.ndarray:
    """bool [rows]: where the expression holds. `or` binds less than `and`, and that less than `not`; a comparison is
    one of `holds`, `NAME in (VALUE, …)` or `NAME is [not] null`. Text with blanks goes into quotes, which are doubled
    within. ValueError, with the place, for all else."""
    return _Parser(text, columns, rows).whole()


class _Parser:
    def __init__(self, text: str, columns: Mapping[str, pa.Array], rows: int) -> None:
        self.text, self.columns, self.rows, self.depth = text, columns, rows, 0
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

    def whole(self) -> np.ndarray:
        found = self._any()
        if self.at < len(self.tokens):
            raise self._error("and, or, or the end is expected")
        return found

    def _any(self) -> np.ndarray:
        return self._joined("or", np.logical_or, lambda: self._joined("and", np.logical_and, self._one))

    def _joined(self, word: str, join: Callable[..., np.ndarray], part: Callable[[], np.ndarray]) -> np.ndarray:
        found = part()
        while self._take(word):
            found = join(found, part())
        return found

    def _one(self) -> np.ndarray:
        self.depth += 1
        if self.depth > _DEPTH:
            raise self._error(f"there are more than {_DEPTH} conditions within each other")
        try:
            if self._take("not"):
                return ~self._one()
            if self._take("("):
                found = self._any()
                self._require(")")
                return found
            return self._condition()
        finally:
            self.depth -= 1

    def _condition(self) -> np.ndarray:
        place, name = self._token[2], self._value("a column")
        if name not in self.columns:
            there = ", ".join(self.columns)
            raise self._error(f"no column {name!r}{nearest(name, list(self.columns))}; there are: {there}", place)
        if self._take("is"):
            is_not = self._take("not")
            self._require("null")
            missing = _missing(self.columns[name])
            return ~missing if is_not else missing
        is_not = self._take("not")
        if is_not or self._peek() == "in":
            self._require("in")
            self._require("(")
            found = self._compared(name, "=", self._value("a value"))
            while self._take(","):
                found = found | self._compared(name, "=", self._value("a value"))
            self._require(")")
            return ~found if is_not else found
        kind, operator, _ = self._token
        if kind != "mark" or operator in "(),":
            raise self._error("one of = != < <= > >=, in, or is null is expected")
        self.at += 1
        return self._compared(name, operator, self._value("a value"))

    def _compared(self, name: str, operator: str, value: str) -> np.ndarray:
        try:
            return holds(f"{name} {operator} '{value}'", {name: self.columns[name]})
        except ValueError as error:
            raise self._error(str(error).removeprefix("--where "), self.tokens[self.at - 1][2]) from None

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
        return ValueError(f"--where {self.text!r}, at character {place + 1}: {why}")


def _missing(values: pa.Array) -> np.ndarray:
    """A field of CSV without a text is missing, too."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    blank = pc.equal(values, "") if is_text(values.type) else pc.is_null(values)
    return as_numpy(blank.fill_null(True))
