"""The values of one feature, as a batch and an export have them.

Axes: R rows (items, sequences or positions), S values of all bags, W width of a vector, N chosen rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .transfer import on_device


@dataclass(frozen=True)
class Values:
    """One feature of R rows.

    `values` of a sparse kind are int64 [R] and index the unique ids of the feature's table; those of others are FP32,
    as in the dataset: [R], or [R, W] where they are wide. Bags are [S] with `offsets` [R + 1], or [R, any] with -1
    behind each row's ids, for programs whose shapes may not depend on values. `parallel`: what each value of a bag has
    beside it, FP32 of the same shape, by the kind's names.
    """

    values: Tensor
    offsets: Tensor | None = None
    parallel: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Values":
        """Returns the values on a device."""
        offsets = None if self.offsets is None else on_device(self.offsets, device)
        return self._each(lambda of: on_device(of, device), offsets)

    def first(self, rows: int) -> "Values":
        """Returns the values of the first rows."""
        if self.offsets is None:
            return Values(self.values[:rows])
        end = int(self.offsets[rows])
        return self._each(lambda of: of[:end], self.offsets[: rows + 1])

    def take(self, index_N: Tensor) -> "Values":
        """Returns the values of some rows, by place."""
        if self.offsets is None:
            return Values(self.values[index_N])
        start_N = self.offsets[index_N]
        lengths_N = self.offsets[index_N + 1] - start_N
        offsets = F.pad(lengths_N.cumsum(0), (1, 0))
        place_S = torch.repeat_interleave(start_N - offsets[:-1], lengths_N)
        place_S += torch.arange(len(place_S), device=place_S.device)
        return self._each(lambda of: of[place_S], offsets)

    def _each(self, function: Callable[[Tensor], Tensor], offsets: Tensor | None) -> "Values":
        return Values(function(self.values), offsets, {name: function(of) for name, of in self.parallel.items()})
