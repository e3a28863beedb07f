"""Kind number: a linear map of one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import Kind, SourceColumn, normalized, number_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..features import Values
    from ..schema import Feature


class Number(Kind):
    def read(self, column: SourceColumn) -> Any:
        return column.numbers()

    def in_request(self, feature: Feature) -> str:
        return "number"

    def cell(self, feature: Feature, value: Any, row_of: Callable[[Any], int]) -> float:
        return feature.mean if value is None else number_of(value)

    def embed(self, feature: Feature, of: Values, row_VW: Tensor | None) -> Tensor:
        return normalized(feature, of)
