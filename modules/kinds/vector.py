"""Kind vector: a linear map of as many numbers in each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from logitmix.common.values import as_list

from .base import Kind, SourceColumn, normalized, number_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..features import Values
    from ..schema import Feature


class Vector(Kind):
    wide = True

    def read(self, column: SourceColumn) -> Any:
        return column.vectors()

    def in_request(self, feature: Feature) -> str:
        return f"list of {feature.width} numbers"

    def cell(self, feature: Feature, value: Any, row_of: Callable[[Any], int]) -> list[float]:
        if value is None:
            return [feature.mean] * feature.width
        numbers = [number_of(entry) for entry in as_list(value)]
        if len(numbers) != feature.width:
            raise ValueError(f"has {len(numbers)} numbers; it must have {feature.width}")
        return numbers

    def embed(self, feature: Feature, of: Values, row_VW: Tensor | None) -> Tensor:
        # With norm 1 on average: from many numbers of deviation 1, the map would make a vector far larger than rows.
        return normalized(feature, of) / feature.width**0.5
