"""A block of rows of a table, whatever file it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from logitmix.trainer.data.rejects import Rejects

Keys = Callable[[str, list[str]], list[str]]
"""From a file's name and header, the columns that every row must have. ValueError if one is missing."""


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a file."""

    label: str
    """The file."""
    numbers: np.ndarray
    """Line (CSV, JSON) or row (Parquet) of each, from 1."""
    keys: list[str]
    """Names of the requested columns."""
    columns: dict[str, pa.Array]
    """All columns that have a name or were requested."""
    text: Callable[[int], str | bytes]
    """A row as text."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns that the file itself states."""
    places: np.ndarray | None = None
    """The place of each row in the list that it comes from, where all rows of the list have one time."""

    @property
    def others(self) -> dict[str, pa.Array]:
        """The columns that were not requested."""
        return {name: column for name, column in self.columns.items() if name not in self.keys}

    def reject(self, reasons: Mapping[int, str], rejects: Rejects) -> np.ndarray:
        """Lists the rows that there are reasons to reject; returns bool [rows], which are the others."""
        kept = np.ones(len(self.numbers), bool)
        for row, reason in reasons.items():
            rejects.add(self.label, int(self.numbers[row]), reason, self.text(row))
            kept[row] = False
        return kept

    def only(self, kept: np.ndarray) -> "TableBlock":
        """The rows where `kept` is true."""
        if kept.all():
            return self
        rows, mask = np.flatnonzero(kept), pa.array(kept)
        return replace(
            self,
            numbers=self.numbers[rows],
            columns={name: column.filter(mask) for name, column in self.columns.items()},
            text=lambda row: self.text(int(rows[row])),
            places=None if self.places is None else self.places[rows],
        )
