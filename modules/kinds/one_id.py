"""Kind id: one row of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import Kind, SourceColumn

if TYPE_CHECKING:
    from torch import Tensor

    from ..features import Values
    from ..schema import Feature


class Id(Kind):
    sparse = True

    def read(self, column: SourceColumn) -> Any:
        return column.one_id()

    def in_request(self, feature: Feature) -> str:
        return "text or whole number"

    def cell(self, feature: Feature, value: Any, row_of: Callable[[Any], int]) -> int:
        return row_of(value)

    def embed(self, feature: Feature, of: Values, row_VW: Tensor | None) -> Tensor:
        from torch.nn import functional as F

        assert row_VW is not None
        return F.embedding(of.values, row_VW)
