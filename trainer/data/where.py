"""Conditions on the columns of actions: `rating >= 4`, `event = purchase`, `timestamp >= 2024-01-31`."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import nearest
from logitmix.trainer.data.arrow import as_numbers, as_numpy, is_text, is_time
from logitmix.trainer.data.description import UNIT_NAMES, UNITS
from logitmix.trainer.data.engine import scratch
from logitmix.trainer.data.numbers import read_numbers
from logitmix.trainer.data.times import moments, unit_of, window

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip
_CONDITION = re.compile(r"\s*(.+?)\s*(!=|<=|>=|==?|<|>)\s*([\"\']?)(.*?)\3\s*", re.DOTALL)
_EXACT = 2**53
"""Floats represent all whole numbers below it exactly; from it on, they are compared as text."""


@dataclass(frozen=True)
class Condition:
    """A condition on a column."""

    text: str
    flag: str
    """That gave it."""
    column: str = ""
    """Empty: the text is no condition."""
    operator: str = ""
    value: str = ""

    @classmethod
    def parse(cls, text: str, flag: str) -> "Condition":
        found = _CONDITION.fullmatch(text)
        if not found:
            return cls(text, flag)
        name, operator, _, value = found.groups()
        return cls(text, flag, name, operator.replace("==", "="), value)

    def error(self, problem: object, columns: Collection[str]) -> ValueError:
        return ValueError(f"{self.flag} {self.text!r}: {problem}; the columns are: {', '.join(columns) or 'none'}")

    def require_column(self, columns: Collection[str]) -> None:
        """ValueError if it is no condition, or one on a column that is not there."""
        if not self.column:
            raise self.error(f"it must be a column, one of {' '.join(OPERATORS)}, and a value", columns)
        if self.column not in columns:
            raise self.error(f"no column {self.column!r}{nearest(self.column, list(columns))}", columns)

    def holds(self, values: pa.Array, columns: Collection[str]) -> tuple[pa.Array, bool]:
        """Whether it holds for the different values of its column, and for a missing one.

        Numbers are compared as numbers, dates as times, all else as text. For missing values, and for non-numbers
        compared with a number, only != holds. ValueError, which names the `columns`, if the column has no times.
        """
        of_none = self.operator == "!="
        try:
            return self._compare(values).fill_null(of_none), of_none
        except (ValueError, pa.ArrowException) as error:
            raise self.error(error, columns) from None

    def fulfilled(self, values: pa.Array, columns: Collection[str]) -> np.ndarray:
        """bool: whether it holds for each of the values of its column, which may be a dictionary."""
        if not pa.types.is_dictionary(values.type):
            return as_numpy(self.holds(values, columns)[0])
        # The result for each different text, and in the last place for missing values.
        held, of_none = self.holds(values.dictionary.cast(pa.string()), columns)
        return np.append(as_numpy(held), of_none)[values.indices.fill_null(len(held)).to_numpy()]

    def _compare(self, values: pa.Array) -> pa.Array:
        if pa.types.is_nested(values.type):
            raise ValueError(f"values of type {values.type} cannot be compared")
        compare, (seconds, nanoseconds, number) = OPERATORS[self.operator], self.given()
        if seconds.is_valid:
            return compare(*_times(values, seconds.as_py(), nanoseconds))
        if number.is_valid and not (self.operator in ("=", "!=") and abs(number.as_py()) >= _EXACT):
            known = _numbers(values)
            # 4.1 as float32 is not 4.1 as float64.
            return compare(known, number.cast(known.type))
        if self.operator in ("=", "!="):
            return compare(values.cast(pa.string()), self.value)
        raise self.not_ordered()

    def given(self) -> tuple[pa.Scalar, int, pa.Scalar]:
        """Returns the value as a time, in seconds and billionths of one, and as a number; null if it is none."""
        value = pa.array([self.value])
        seconds, nanoseconds = moments(value)
        return seconds[0], int(nanoseconds[0]), as_numbers(value, pa.float64())[0]

    def not_ordered(self) -> ValueError:
        """Returns what is wrong if the value is a text, and the operator is one of order."""
        such = "neither a number such as 40.5 nor a date such as 2024-01-31"
        return ValueError(f"{self.value!r} is {such}, as {self.operator} needs")


def of_time(condition: Condition, time: str, unit: str, columns: Collection[str]) -> str:
    """The expression of a condition on the time of a row, of which `time` is the expression, in this unit. ValueError
    for a value that cannot be compared with it."""
    try:
        seconds, nanoseconds, number = condition.given()
        if not (seconds.is_valid or number.is_valid):
            raise condition.not_ordered()
        if number.is_valid and unit:
            _require_unit(number.as_py(), unit)
        value = _ticks(seconds.as_py(), nanoseconds, unit) if seconds.is_valid else condition.value
        return f"{time} {condition.operator.replace('!=', '<>')} {value}"
    except ValueError as error:
        raise condition.error(error, columns) from None


def _require_unit(number: float, unit: str) -> None:
    """Raises ValueError for a number that is a time in another unit, or a date in digits such as 20240120."""
    within = [of for of in UNITS if window(of)[0] <= number < window(of)[1]]
    if unit not in within and (within or re.fullmatch("(19|20)[0-9]{6}([0-9]{6})?", f"{number:.0f}")):
        raise ValueError(f"{number:.0f} is no time in {UNIT_NAMES[unit]} since 1970, as its values are; write a date")


def _ticks(seconds: int, nanoseconds: int, unit: str) -> int:
    """A time in a unit; ValueError for "", which other numbers have."""
    if not unit:
        raise ValueError("its values are no times since 1970, so that it cannot be compared with a date")
    return seconds * UNITS[unit] + nanoseconds * UNITS[unit] // 10**9


def _numbers(values: pa.Array) -> pa.Array:
    """null if there is none."""
    if is_time(values.type):
        return moments(values)[0]
    if is_text(values.type):
        return read_numbers(values, pa.float64()).values
    return values if pa.types.is_floating(values.type) else values.cast(pa.float64(), safe=False)


def _times(values: pa.Array, seconds: int, nanoseconds: int) -> tuple[pa.Array, pa.Scalar]:
    """The values as times, and the given time in their unit."""
    if is_time(values.type) or is_text(values.type):
        known = moments(values)[0]
        if is_time(values.type) or known.null_count < len(known) or not len(known):
            return known, pa.scalar(seconds)
    numbers = values if pa.types.is_integer(values.type) else pc.floor(_numbers(values)).cast(pa.int64(), safe=False)
    engine = scratch()
    engine.put("numbers", pa.table({"number": numbers}))
    return numbers, pa.scalar(_ticks(seconds, nanoseconds, unit_of(engine, "number", "numbers")))
