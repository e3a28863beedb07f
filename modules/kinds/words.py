"""Kind words: the mean of rows of a table, one for each word of a text, and so zero for a text of unknown words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import SourceColumn
from .ids import Ids

if TYPE_CHECKING:
    from ..schema import Feature

_ALONE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Kana and Han, which are written without spaces: each character counts as a word."""
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, whatever their case."""
    return _WORD.findall(text.casefold())


class Words(Ids):
    fewest = 2
    skips_unknown = True

    def read(self, column: SourceColumn) -> Any:
        return column.words()

    def in_request(self, feature: Feature) -> str:
        return "text, whose words are looked up"

    def cell(self, feature: Feature, value: Any, row_of: Callable[[Any], int]) -> list[int]:
        words = words_of(value) if isinstance(value, str) else value
        try:
            return [row for row in super().cell(feature, words, row_of) if row]
        except (TypeError, ValueError):
            raise ValueError(f"is {value!r:.40}; it must be text, or a list of words") from None
