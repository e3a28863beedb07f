"""A block of rows of a table, whatever file it comes from."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

Keys = Callable[[str, list[str]], list[str]]
"""From a file's name and header, the columns that every row must have. ValueError if one is missing."""


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a file."""

    numbers: np.ndarray
    """Line (CSV, JSON) or row (Parquet) of each, from 1."""
    keys: list[pa.Array]
    """The requested columns, in that order."""
    columns: dict[str, pa.Array]
    """All other columns that have a name."""
    text: Callable[[int], str]
    """A row as text."""
