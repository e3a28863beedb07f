"""Columns of the items that requests filter by: numbers, times, or texts of which each item has one or none.

Axes: X items.
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from logitmix.common.values import id_text, plain
from logitmix.serving.texts import Texts

Kind = Literal["number", "time", "text"]
ACTIONS = "actions"
"""The column with the number of an item's actions in the dataset."""
NEW = "new"
"""The column that is 0 for items that are not new."""
NONE = -1
"""The place of no text."""
_ABSENT = -2
"""The place of a text that no item has."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_COMPARED = {
    "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
OPERATORS = ("=", *_COMPARED)
_EPOCH, _LATEST = datetime(1970, 1, 1, tzinfo=UTC), 62e9
"""Times beyond it, in seconds, have years that `datetime` does not know."""


@dataclass(frozen=True, eq=False)
class Column:
    """A value of each item, or none."""

    kind: Kind
    values: Tensor
    """F64 [X], times in seconds since 1970, NaN for none; of texts I32 [X], places among the texts, NONE for none."""
    texts: Texts | None = None
    """Distinct texts, with their order, where the kind is text."""

    @classmethod
    def of_tensors(cls, kind: Kind, name: str, tensors: Mapping[str, Tensor]) -> "Column":
        texts = Texts(*(tensors[f"{name}.texts.{of}"] for of in _OF_TEXTS)) if kind == "text" else None
        return cls(kind, tensors[f"{name}.values"], texts)

    def tensors(self, name: str) -> dict[str, Tensor]:
        of_texts = {f"{name}.texts.{of}": getattr(self.texts, of) for of in _OF_TEXTS if self.texts}
        return {f"{name}.values": self.values, **of_texts}

    def problem(self) -> str | None:
        """What is wrong with the tensors' values, given that types and shapes are right."""
        if self.texts is None:
            return "values are infinite" if bool(self.values.isinf().any()) else None
        if len(self.values) and not int(self.values.min()) >= NONE <= int(self.values.max()) < len(self.texts):
            return "values are no places of its texts"
        return problem if (problem := self.texts.problem()) is None else f"texts.{problem}"

    def compared(self, sign: str, wanted: Sequence[str], part: slice) -> tuple[np.ndarray, np.ndarray]:
        """Which of a part of the items have a value for which the comparison is true, and for which it is false; it is
        neither for those that have none. `=` takes several values, of which one must be equal. ValueError that begins
        with "is" for a value that cannot be compared."""
        values, numbers = self.values[part].numpy(), [self._literal(value, sign) for value in wanted]
        known = ~self._lacks(values)
        found = np.isin(values, numbers) if sign == "=" else _COMPARED[sign](values, numbers[0])
        return found & known, ~found & known

    def missing(self, part: slice) -> np.ndarray:
        """Which have none."""
        return self._lacks(self.values[part].numpy())

    def shown(self, item: int) -> float | str | None:
        """An item's value, for JSON: a time in ISO 8601, in UTC."""
        value = float(self.values[item])
        if self.texts is not None:
            return None if value == NONE else self.texts[int(value)]
        if math.isnan(value):
            return None
        if self.kind == "time" and abs(value) < _LATEST:
            found = (_EPOCH + timedelta(seconds=value)).isoformat(timespec="seconds").removesuffix("+00:00")
            return found.removesuffix("T00:00:00")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value

    def labels(self, items: np.ndarray) -> list[float | None]:
        """Of some items, what is equal for those with equal values; None for those that have none."""
        found = self.values.numpy()[items]
        return [None if lacks else value for value, lacks in zip(found.tolist(), self._lacks(found), strict=True)]

    def _lacks(self, values: np.ndarray) -> np.ndarray:
        return values == NONE if self.texts is not None else np.isnan(values)

    def _literal(self, text: str, sign: str) -> float:
        if self.texts is not None:
            if sign not in ("=", "!="):
                raise ValueError(f"is compared by {sign}, but the column is text: give =, !=, in, or is null")
            place = self.texts.find(text) if len(self.texts) else None
            return _ABSENT if place is None else place
        if (number := self._number(text)) is None:
            needs = "a date such as 2024-01-31" if self.kind == "time" else "a number such as 40.5"
            raise ValueError(f"is {text!r:.40}; it must be {needs}, as the column's values are")
        return number

    def _number(self, text: str) -> float | None:
        """Of a number or, in a column of times, a date."""
        number = _number(text)
        return _seconds(text) if number is None and self.kind == "time" else number

    def value(self, given: Any) -> float | str | None:
        """A value as JSON and tables of text have it. ValueError that begins with "is" for one of another kind."""
        given = plain(given)
        if given is None or given == "":
            return None
        if self.texts is not None:
            return id_text(given)
        found = None
        if isinstance(given, str):
            found = self._number(given.strip())
        elif isinstance(given, int | float):
            found = float(given)
        if found is None or not math.isfinite(found):
            needs = "a number" if self.kind == "number" else "a date such as 2024-01-31"
            raise ValueError(f"is {given!r:.40}; it must be {needs}, or none")
        return found

    def taken(self, before_X: np.ndarray) -> "Column":
        """For other items, by the place of each in this column; one beyond it has none."""
        none, count = NONE if self.texts is not None else math.nan, len(self.values)
        place_X = torch.from_numpy(np.where((before_X >= 0) & (before_X < count), before_X, count))
        return replace(self, values=F.pad(self.values, (0, 1), value=none)[place_X])

    def changed(self, places: Sequence[int], values: Sequence[float | str | None]) -> "Column":
        """With other values, which are results of `value`, at some places."""
        if not len(places):
            return self
        texts, numbers = self.texts, list(values)
        if texts is not None:
            known = dict(zip(texts, range(len(texts)), strict=True))
            before = len(known)
            numbers = [NONE if text is None else known.setdefault(str(text), len(known)) for text in values]
            if len(known) > before:
                texts = ordered(Texts.of(list(known)))
        now = self.values.clone()
        now[torch.tensor(list(places))] = torch.tensor(
            [math.nan if of is None else of for of in numbers], dtype=now.dtype
        )
        return replace(self, values=now, texts=texts)


def read_columns(kinds: Mapping[str, Kind], tensors: Mapping[str, Tensor]) -> dict[str, Column]:
    """From the output of `stored_columns`. ValueError if a tensor's values are not as they must be."""
    columns = {name: Column.of_tensors(kind, name, tensors) for name, kind in kinds.items()}
    for name, column in columns.items():
        if problem := column.problem():
            raise ValueError(f"{name}.{problem}")
    return columns


def stored_columns(columns: Mapping[str, Column]) -> dict[str, Tensor]:
    """As an export stores them."""
    return {of: tensor for name, column in columns.items() for of, tensor in column.tensors(name).items()}


_OF_TEXTS = ("data", "bounds", "order")


def ordered(texts: Texts) -> Texts:
    """Texts with the order in which they are found."""
    order = sorted(range(len(texts)), key=texts.encoded)
    return replace(texts, order=torch.tensor(order, dtype=torch.int64))


def _number(text: str) -> float | None:
    if text.lower() in ("true", "false"):
        return float(text.lower() == "true")
    return float(text) if _NUMBER.fullmatch(text) else None


def _seconds(text: str) -> float | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
