"""Conditions on the columns of actions: `rating >= 4`, `event = purchase`, `timestamp >= 2024-01-31`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import nearest
from logitmix.trainer.data.numbers import read_numbers
from logitmix.trainer.data.raw import as_numbers, as_numpy
from logitmix.trainer.data.times import is_time, seconds_of_texts, seconds_of_times

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip

_CONDITION = re.compile(r"\s*(.+?)\s*(!=|<=|>=|==?|<|>)\s*([\"\']?)(.*?)\3\s*", re.DOTALL)
_EXACT = 2**53
"""Floats represent all whole numbers below it exactly; from it on, they are compared as text."""


def holds(text: str, columns: Mapping[str, pa.Array]) -> np.ndarray:
    """bool [actions]: whether the condition holds for each.

    Numbers are compared as numbers, dates as seconds since 1970, all else as text. For missing values, and for
    non-numbers compared with a number, only != holds. ValueError, which names the columns, if `text` is not a condition
    on one.
    """
    try:
        name, operator, value = _parse(text, list(columns))
        values = columns[name]
        if not pa.types.is_dictionary(values.type):
            return _compare(values, operator, value)
        # The result for each distinct text, and in the last place for missing values.
        distinct = pa.concat_arrays([values.dictionary, pa.nulls(1, values.dictionary.type)])
        return _compare(distinct, operator, value)[values.indices.fill_null(len(distinct) - 1).to_numpy()]
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"--where {text!r}: {error}; the columns are: {', '.join(columns)}") from None


def _parse(text: str, columns: list[str]) -> tuple[str, str, str]:
    """Column, operator, value."""
    found = _CONDITION.fullmatch(text)
    if not found:
        raise ValueError(f"it must be a column, one of {' '.join(OPERATORS)}, and a value")
    name, operator, _, value = found.groups()
    if name not in columns:
        raise ValueError(f"no column {name!r}{nearest(name, columns)}")
    return name, operator.replace("==", "="), value


def _compare(values: pa.Array, operator: str, value: str) -> np.ndarray:
    if pa.types.is_nested(values.type) or pa.types.is_binary(values.type):
        raise ValueError(f"values of type {values.type} cannot be compared")
    given = pa.array([value])
    seconds, number = seconds_of_texts(given)[0], as_numbers(given, pa.float64())[0]
    if seconds.is_valid:
        known, scalar = _seconds(values), seconds
    elif number.is_valid and not (operator in ("=", "!=") and abs(number.as_py()) >= _EXACT):
        # 4.1 as float32 is not 4.1 as float64.
        known = _numbers(values)
        scalar = number.cast(known.type)
    elif operator in ("=", "!="):
        known, scalar = values.cast(pa.string()), given[0]
    else:
        raise ValueError(f"{value!r} is neither a number nor an ISO 8601 date, as {operator} needs")
    return as_numpy(OPERATORS[operator](known, scalar).fill_null(operator == "!="))


def _numbers(values: pa.Array) -> pa.Array:
    """null if there is none."""
    if is_time(values.type):
        return seconds_of_times(values)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return read_numbers(values.cast(pa.string()), pa.float64()).values
    if pa.types.is_floating(values.type):
        return values
    return values.cast(pa.float64(), safe=False)


def _seconds(values: pa.Array) -> pa.Array:
    if is_time(values.type):
        return seconds_of_times(values)
    return seconds_of_texts(values) if pa.types.is_string(values.type) else values
