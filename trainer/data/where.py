"""Conditions on the columns of actions: `rating >= 4`, `event = purchase`, `timestamp >= 2024-01-31`."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import nearest
from logitmix.trainer.data.arrow import as_numbers, as_numpy, is_text, is_time
from logitmix.trainer.data.numbers import read_numbers
from logitmix.trainer.data.times import (
    UNIT_NAMES,
    UNITS,
    nanoseconds_of_texts,
    seconds_of_digits,
    seconds_of_texts,
    seconds_of_times,
    unit_of,
    within,
)

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip

WHERE = "--where"
_CONDITION = re.compile(r"\s*(.+?)\s*(!=|<=|>=|==?|<|>)\s*([\"\']?)(.*?)\3\s*", re.DOTALL)
_EXACT = 2**53
"""Floats represent all whole numbers below it exactly; from it on, they are compared as text."""


def holds(
    text: str, columns: Mapping[str, pa.Array], units: Mapping[str, str] = MappingProxyType({}), flag: str = WHERE
) -> np.ndarray:
    """bool [actions]: whether the condition, given by this flag, holds for each.

    Numbers are compared as numbers, dates as times, all else as text. A column of numbers that is compared with a date
    has the unit that `units` say, or that its values tell. For missing values, and for non-numbers compared with a
    number, only != holds. ValueError, which names the columns, if `text` is not a condition on one, or if a column has
    no times or some in another unit than the value.
    """
    try:
        name, operator, value = _parse(text, list(columns))
        values, unit = columns[name], units.get(name)
        if not pa.types.is_dictionary(values.type):
            return _compare(values, operator, value, unit)
        # The result for each distinct text, and in the last place for missing values.
        distinct = pa.concat_arrays([values.dictionary, pa.nulls(1, values.dictionary.type)])
        return _compare(distinct, operator, value, unit)[values.indices.fill_null(len(distinct) - 1).to_numpy()]
    except (ValueError, pa.ArrowException) as error:
        raise _of_condition(flag, text, error, columns) from None


def column_of(text: str, columns: Collection[str], flag: str = WHERE) -> str:
    """The column that a condition is on. ValueError as `holds` raises it."""
    try:
        return _parse(text, list(columns))[0]
    except ValueError as error:
        raise _of_condition(flag, text, error, columns) from None


def _of_condition(flag: str, text: str, error: Exception, columns: Iterable[str]) -> ValueError:
    return ValueError(f"{flag} {text!r}: {error}; the columns are: {', '.join(columns) or 'none'}")


def _parse(text: str, columns: list[str]) -> tuple[str, str, str]:
    """Column, operator, value."""
    found = _CONDITION.fullmatch(text)
    if not found:
        raise ValueError(f"it must be a column, one of {' '.join(OPERATORS)}, and a value")
    name, operator, _, value = found.groups()
    if name not in columns:
        raise ValueError(f"no column {name!r}{nearest(name, columns)}")
    return name, operator.replace("==", "="), value


def _compare(values: pa.Array, operator: str, value: str, unit: str | None) -> np.ndarray:
    if pa.types.is_nested(values.type) or pa.types.is_binary(values.type):
        raise ValueError(f"values of type {values.type} cannot be compared")
    given = pa.array([value])
    seconds, number = seconds_of_texts(given)[0], as_numbers(given, pa.float64())[0]
    if seconds.is_valid:
        known, scalar = _times(values, seconds.as_py(), int(nanoseconds_of_texts(given)[0]), unit)
    elif number.is_valid and not (operator in ("=", "!=") and abs(number.as_py()) >= _EXACT):
        # 4.1 as float32 is not 4.1 as float64.
        known = _numbers(values)
        scalar = number.cast(known.type)
        if unit:
            _require_unit(int(number.as_py()), unit)
    elif operator in ("=", "!="):
        known, scalar = values.cast(pa.string()), given[0]
    else:
        raise ValueError(
            f"{value!r} is neither a number such as 40.5 nor a date such as 2024-01-31, as {operator} needs"
        )
    return as_numpy(OPERATORS[operator](known, scalar).fill_null(operator == "!="))


def _numbers(values: pa.Array) -> pa.Array:
    """null if there is none."""
    if is_time(values.type):
        return seconds_of_times(values)
    if is_text(values.type):
        return read_numbers(values.cast(pa.string()), pa.float64()).values
    if pa.types.is_floating(values.type):
        return values
    return values.cast(pa.float64(), safe=False)


def _times(values: pa.Array, seconds: int, nanoseconds: int, unit: str | None) -> tuple[pa.Array, pa.Scalar]:
    """The values as times, and the given time in their unit."""
    if pa.types.is_null(values.type):
        return values.cast(pa.int64()), pa.scalar(0)
    if is_time(values.type):
        return seconds_of_times(values), pa.scalar(seconds)
    if is_text(values.type):
        texts = values.cast(pa.string())
        known = seconds_of_texts(texts)
        if known.null_count < len(known):
            return known, pa.scalar(seconds)
    numbers = values if pa.types.is_integer(values.type) else pc.floor(_numbers(values)).cast(pa.int64(), safe=False)
    if unit is None:
        unit = unit_of(as_numpy(numbers.drop_null()))
    if not unit:
        raise ValueError("its values are no times since 1970, so that it cannot be compared with a date")
    ticks = UNITS[unit]
    return numbers, pa.scalar(seconds * ticks + nanoseconds * ticks // 10**9)


def _require_unit(number: int, unit: str) -> None:
    """ValueError for a number that is a time in another unit, or a date without hyphens."""
    other = next((f"in {name}" for other, name in UNIT_NAMES.items() if within(np.array([number]), other)), "")
    if seconds_of_digits(np.array([number])) is not None and not within(np.array([number]), unit):
        other = "a date in digits"
    if other not in ("", f"in {UNIT_NAMES[unit]}"):
        raise ValueError(f"{number} would be {other}, and its values are {UNIT_NAMES[unit]} since 1970; write a date")
