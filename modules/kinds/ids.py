"""Kinds of ids: id is one row of a table, ids the mean of any number of rows, weighted_ids their weighted mean. Both
means are zero where there are no rows.

A mean, not a sum: the unit of the weights then does not matter, be they counts, seconds or shares; a bag of equal
weights is one of kind ids; and no row moves further because a weight is large. How much there is in all can be a number
beside it.

Axes: R rows (items, users or events), S ids of all bags, V unique ids of a table, W width of a table's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from logitmix.common.values import as_list

from .base import FeatureNumbers, Kind, Reads, number_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..values import Values

WEIGHTS = "weights"


class Id(Kind):
    """One row of a table."""

    sparse = True
    reads: Reads = "one_id"
    in_request = "text or whole number"

    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], int]) -> Any:
        return row_of(value)

    def embed(self, feature: FeatureNumbers, of: Values, row_VW: Tensor | None) -> Tensor:
        from torch.nn import functional as F

        assert row_VW is not None
        return F.embedding(of.values, row_VW)


class Ids(Kind):
    """The mean of any number of rows of a table."""

    sparse = bag = True
    reads: Reads = "ids"
    in_request = "list of texts or whole numbers"

    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], int]) -> Any:
        there = [] if value is None else [entry for entry in as_list(value) if entry not in (None, "")]
        return [row_of(entry) for entry in there]

    def embed(self, feature: FeatureNumbers, of: Values, row_VW: Tensor | None) -> Tensor:
        from torch.nn import functional as F

        assert row_VW is not None
        if of.offsets is None:
            weight_RS1 = (of.values >= 0).unsqueeze(2).to(row_VW.dtype)
            row_RSW = F.embedding(of.values.clamp(min=0), row_VW)
            return (row_RSW * weight_RS1).sum(1) / weight_RS1.sum(1).clamp(min=1)
        return F.embedding_bag(of.values, row_VW, of.offsets, mode="mean", include_last_offset=True)


class WeightedIds(Ids):
    """The weighted mean of any number of rows of a table."""

    parallel = (WEIGHTS,)
    needs = "a finite number of 0 or more"

    def allows(self, name: str, numbers: Any) -> Any:
        return (numbers >= 0) & (numbers < inf)

    in_request = "mapping of texts or whole numbers to weights of 0 or more, or list of pairs of both"

    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], int]) -> tuple[list[int], list[float]]:
        pairs = list(value.items()) if isinstance(value, Mapping) else [] if value is None else as_list(value)
        rows, weights = [], []
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"has {pair!r:.40}; it must have ids with weights: {{id: weight}} or [[id, weight]]")
            weight = number_of(pair[1])
            if not self.allows(WEIGHTS, weight):
                raise ValueError(f"has weight {weight:g}; it must be {self.needs}")
            if pair[0] not in (None, ""):
                rows.append(row_of(pair[0]))
                weights.append(weight)
        return rows, weights

    def embed(self, feature: FeatureNumbers, of: Values, row_VW: Tensor | None) -> Tensor:
        from torch.nn import functional as F

        assert row_VW is not None
        share = self.shares(of).to(row_VW.dtype)
        if of.offsets is None:
            return (F.embedding(of.values.clamp(min=0), row_VW) * share.unsqueeze(2)).sum(1)
        return F.embedding_bag(
            of.values, row_VW, of.offsets, mode="sum", per_sample_weights=share, include_last_offset=True
        )

    def shares(self, of: Values) -> Tensor:
        """Returns each weight divided by the sum of its bag's, which is FP64: it may be beyond FP32."""
        import torch

        weight = of.parallel[WEIGHTS].double()
        if of.offsets is None:
            total = weight.sum(1, keepdim=True)
        else:
            total_R = torch.segment_reduce(weight, "sum", offsets=of.offsets, initial=0.0)
            total = total_R.repeat_interleave(of.offsets.diff(), output_size=len(weight))
        return torch.where(total > 0, weight / total, 0.0).float()
