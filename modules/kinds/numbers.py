"""Kinds of numbers: number is a linear map of one number, vector one of as many numbers in each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from logitmix.common.values import as_list

from .base import FeatureNumbers, Kind, Reads, number_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..values import Values


class Number(Kind):
    """One number, with the feature's mean and deviation taken out."""

    reads: Reads = "numbers"
    in_request = "number"

    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], int]) -> Any:
        return feature.mean if value is None else number_of(value)

    def embed(self, feature: FeatureNumbers, of: Values, row_VW: Tensor | None) -> Tensor:
        return ((of.values - feature.mean) / feature.deviation).view(-1, feature.width)


class Vector(Number):
    """As many numbers as the feature is wide."""

    wide = True
    reads: Reads = "vectors"
    in_request = "list of {width} numbers"

    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], int]) -> Any:
        if value is None:
            return [feature.mean] * feature.width
        numbers = [number_of(entry) for entry in as_list(value)]
        if len(numbers) != feature.width:
            raise ValueError(f"has {len(numbers)} numbers; it must have {feature.width}")
        return numbers

    def embed(self, feature: FeatureNumbers, of: Values, row_VW: Tensor | None) -> Tensor:
        # With norm 1 on average: from many numbers of deviation 1, the map would make a vector far larger than rows.
        return super().embed(feature, of, row_VW) / feature.width**0.5
