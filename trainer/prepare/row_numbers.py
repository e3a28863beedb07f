"""Columns that number the rows of a file or name each of them, such as pandas' index and the ids of transactions: they
say nothing that comes again, and so are no features."""

import re
from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import as_numbers, is_list
from logitmix.trainer.data.engine import Duck

LEAST = 20
"""Rows from which on values alone, without a name, tell that they number the rows."""

_INDEX = re.compile(r"Unnamed: [0-9.]+|index|level_[0-9]+|row_?(names?|nr|num|number|index)|\.\.\.1", re.IGNORECASE)
"""Names of the rows' numbers as pandas, Polars and R write them."""
_ID = re.compile(
    r"(?i:(.*[_\W])?(id|uuid|guid|key|hash|token|nr|no|seq|sequence|offset|idx))|.*[a-z](Id|ID|Uuid|UUID|Key)"
    r"|(?i:.*(transaction|order|session|event|request|message|record|visit|invoice|basket|cart|click|log|payment)(id|no|nr))"
)


def is_pandas_index(name: str) -> bool:
    """Whether only an index has this name."""
    return re.fullmatch(r"Unnamed: [0-9.]+|level_[0-9]+|__index_level_[0-9]+__|\s*", name) is not None


def numbering(engine: Duck, columns: Mapping[str, str], stated: Collection[str]) -> list[str]:
    """Those of the columns of the table `rows`, but not of those `stated`, that count its rows in the order of the
    files, in each part of them anew or not. With a name that such columns have, numbers may be missing in between."""
    found = []
    order = "order by file, line, place"
    for name, column in columns.items():
        named = bool(_INDEX.fullmatch(name))
        # Most columns are told from their start.
        head = engine.table(f"select {column} as value from rows {order} limit {LEAST}")["value"].combine_chunks()
        if name in stated or not (named or len(head) == LEAST) or not numbers_the_rows(head, named):
            continue
        digits = f"regexp_matches(cast({column} as varchar), '^[0-9]{{1,18}}$')"
        number = f"try_cast({column} as bigint)"
        step = "step > 0" if named else "step = 1"
        least, share = engine.row(f"""
            select coalesce(bool_and(coalesce(whole, false)), false), avg(case when {step} then 1.0 else 0.0 end) from (
                select {digits} as whole, {number} - lag({number}) over ({order}) as step from rows
            ) as steps where step is not null or not coalesce(whole, false)
        """)
        if least and (share or 0) > 0.95:
            found.append(name)
    return found


def numbers_a_table(name: str, values: pa.Array) -> bool:
    """Whether a column counts the rows of a table that is in memory."""
    named = bool(_INDEX.fullmatch(name))
    return (
        (named or len(values) >= LEAST) and numbers_the_rows(values[:LEAST], named) and numbers_the_rows(values, named)
    )


def numbers_the_rows(values: pa.Array, named: bool) -> bool:
    """Whether a column, in the order of the file, counts its rows; with gaps if it is `named` so."""
    numbers = _whole(values)
    if numbers is None or len(numbers) < 2:
        return False
    steps = np.diff(numbers)
    return (named or numbers[0] in (0, 1)) and float(np.mean(steps > 0 if named else steps == 1)) > 0.95


def name_each_row(name: str, values: pa.Array, count: int | None = None) -> bool:
    """Whether whole numbers that hardly come again name the rows, as the name of their column says. With a `count` of
    rows, the values are the different ones in these."""
    if is_list(values.type) or pa.types.is_boolean(values.type) or not _ID.fullmatch(name):
        return False
    there = values.drop_null()
    distinct, count = (there.unique(), len(there)) if count is None else (there, count)
    numbers = _floats(distinct)
    if 2 * len(distinct) <= count or numbers is None or len(numbers) < 2:
        return False
    return bool(np.all(numbers == np.floor(numbers)))


def _whole(values: pa.Array) -> np.ndarray | None:
    """int64, or None if one is missing or not a whole number."""
    if values.null_count:
        return None
    if pa.types.is_string(values.type):
        fine = pc.all(pc.match_substring_regex(values, "^[0-9]{1,18}$")).as_py()
        return values.cast(pa.int64()).to_numpy() if fine else None
    return values.to_numpy() if pa.types.is_integer(values.type) else None


def _floats(values: pa.Array) -> np.ndarray | None:
    """float64 of values none of which is missing, or None if they are no numbers."""
    kind = values.type
    if pa.types.is_string(kind):
        values = as_numbers(values, pa.float64())
        return None if values.null_count else values.to_numpy()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    numbers = values.cast(pa.float64(), safe=False).to_numpy()
    return numbers if np.isfinite(numbers).all() else None
