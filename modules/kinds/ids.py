"""Kind ids: the mean of any number of rows of a table, zero for none.

Axes: R rows (items, users or events), S ids of all bags, V unique ids of a table, W width of a table's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from logitmix.common.values import as_list

from .base import Kind, SourceColumn

if TYPE_CHECKING:
    from torch import Tensor

    from ..features import Values
    from ..schema import Feature


class Ids(Kind):
    sparse = bag = True

    def read(self, column: SourceColumn) -> Any:
        return column.ids()

    def in_request(self, feature: Feature) -> str:
        return "list of texts or whole numbers"

    def cell(self, feature: Feature, value: Any, row_of: Callable[[Any], int]) -> Any:
        there = [] if value is None else [entry for entry in as_list(value) if entry not in (None, "")]
        return [row_of(entry) for entry in there]

    def embed(self, feature: Feature, of: Values, row_VW: Tensor | None) -> Tensor:
        from torch.nn import functional as F

        assert row_VW is not None
        if of.offsets is None:
            weight_RS1 = (of.values >= 0).unsqueeze(2).to(row_VW.dtype)
            row_RSW = F.embedding(of.values.clamp(min=0), row_VW)
            return (row_RSW * weight_RS1).sum(1) / weight_RS1.sum(1).clamp(min=1)
        return F.embedding_bag(of.values, row_VW, of.offsets, mode="mean", include_last_offset=True)
