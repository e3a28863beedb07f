"""A block of rows of a table, whatever file it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

Keys = Callable[[str, list[str]], list[str]]
"""From a file's name and header, the columns that every row must have. ValueError if one is missing."""


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a file."""

    numbers: np.ndarray
    """Line (CSV, JSON) or row (Parquet) of each, from 1."""
    names: list[str]
    """Of the requested columns."""
    keys: list[pa.Array]
    """The requested columns, in that order."""
    columns: dict[str, pa.Array]
    """All other columns that have a name."""
    text: Callable[[int], str]
    """A row as text."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns that the file itself states."""
    places: np.ndarray | None = None
    """The place of each row in the list that it comes from, where all rows of the list have one time."""

    def only(self, kept: np.ndarray) -> "TableBlock":
        """The rows where `kept` is true."""
        rows, mask = np.flatnonzero(kept), pa.array(kept)
        return replace(
            self,
            numbers=self.numbers[rows],
            keys=[key.filter(mask) for key in self.keys],
            columns={name: column.filter(mask) for name, column in self.columns.items()},
            text=lambda row: self.text(int(rows[row])),
            places=None if self.places is None else self.places[rows],
        )
