"""Columns that number the rows of a file or name each of them, such as pandas' index and the ids of transactions: they
say nothing that comes again, and so are no features."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import as_numbers, as_numpy
from logitmix.trainer.data.spool import Pieces

LEAST = 20
"""Rows from which on values alone, without a name, tell that they number the rows."""

_INDEX = re.compile(r"Unnamed: [0-9.]+|index|level_[0-9]+|row_?(names?|nr|num|number|index)|\.\.\.1", re.IGNORECASE)
"""Names of the rows' numbers as pandas, Polars and R write them."""
_ID = re.compile(
    r"(?i:(.*[_\W])?(id|uuid|guid|key|hash|token|nr|no|seq|sequence|offset|idx))|.*[a-z](Id|ID|Uuid|UUID|Key)"
    r"|(?i:.*(transaction|order|session|event|request|message|record|visit|invoice|basket|cart|click|log|payment)(id|no|nr))"
)
_SAMPLE = 50_000


def is_pandas_index(name: str) -> bool:
    """Whether only an index has this name."""
    return re.fullmatch(r"Unnamed: [0-9.]+|level_[0-9]+|__index_level_[0-9]+__|\s*", name) is not None


def numbers_the_rows(name: str, values: pa.Array) -> bool:
    """Whether a column, in the order of the file, counts its rows, in each part of it anew or not. With a name that
    such columns have, numbers may be missing in between."""
    named = bool(_INDEX.fullmatch(name))
    # Most columns are told from their start.
    head = values[:LEAST].cast(pa.string()) if pa.types.is_dictionary(values.type) else values[:LEAST]
    return (named or len(head) == LEAST) and _counts(head, named) and _counts(values, named)


def _counts(values: pa.Array, gaps: bool) -> bool:
    numbers = _whole(values)
    if numbers is None or len(numbers) < 2:
        return False
    steps = np.diff(numbers)
    return (gaps or numbers[0] in (0, 1)) and float(np.mean(steps > 0 if gaps else steps == 1)) > 0.95


def name_each_row(name: str, values: pa.Array, times: np.ndarray | Pieces | None = None) -> bool:
    """Whether numbers that hardly come again are names of the rows: by the column's name, because there is hardly a
    whole number between them that none has, or, of actions, because they rise with the `times`."""
    kind = values.type
    if not (pa.types.is_dictionary(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return False
    distinct = _distinct(values)
    if 2 * len(distinct) <= len(values) - values.null_count:
        return False
    places = np.flatnonzero(as_numpy(values.is_valid()))
    places = places[:: 1 + len(places) // _SAMPLE]
    numbers = _floats(values.take(pa.array(places)))
    if numbers is None or len(numbers) < 2:
        return False
    whole = bool(np.all(numbers == np.floor(numbers)))
    if whole and _ID.fullmatch(name):
        return True
    if times is None or len(numbers) < LEAST:
        return False
    return (whole and _are_dense(distinct)) or _rise(numbers, times[places])


def _distinct(values: pa.Array) -> pa.Array:
    if not pa.types.is_dictionary(values.type):
        return values.unique().drop_null()
    return values.dictionary.take(pc.unique(values.indices).drop_null())


def _are_dense(distinct: pa.Array) -> bool:
    numbers = _floats(distinct)
    return numbers is not None and bool(len(numbers) > 0.9 * (1 + numbers.max() - numbers.min()))


def _rise(numbers: np.ndarray, times: np.ndarray) -> bool:
    """Whether they have nearly the order of the times."""
    one, other = (np.argsort(np.argsort(of, kind="stable")).astype(np.float64) for of in (numbers, times))
    return abs(float(np.corrcoef(one, other)[0, 1])) > 0.99


def _whole(values: pa.Array) -> np.ndarray | None:
    """int64, or None if one is missing or not a whole number."""
    if values.null_count:
        return None
    if pa.types.is_dictionary(values.type):
        of_texts = _whole(values.dictionary)
        return None if of_texts is None else of_texts[values.indices.to_numpy()]
    if pa.types.is_string(values.type):
        fine = pc.all(pc.match_substring_regex(values, "^[0-9]{1,18}$")).as_py()
        return values.cast(pa.int64()).to_numpy() if fine else None
    return values.to_numpy().astype(np.int64) if pa.types.is_integer(values.type) else None


def _floats(values: pa.Array) -> np.ndarray | None:
    """float64 of values none of which is missing, or None if they are no numbers."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.cast(pa.string())
    if pa.types.is_string(values.type):
        values = as_numbers(values, pa.float64())
        return None if values.null_count else values.to_numpy()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    numbers = values.cast(pa.float64(), safe=False).to_numpy()
    return numbers if np.isfinite(numbers).all() else None
