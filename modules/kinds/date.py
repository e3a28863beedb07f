"""Kind date: of items, and what the model knows of their age when a request is made.

Items are embedded once for all requests, so no embedding can hold an age. But the product of two vectors can: with
phase 2 pi t / P for a period P, cos(t) cos(d) + sin(t) sin(d) = cos(t - d). So a date d and the time t of each request
are given as `waves` of many periods, which the towers map; sums of such products approximate any function of the age
(Bochner's theorem; Xu et al., "Self-attention with Functional Time Representation Learning", NeurIPS 2019). Products
with other vectors would tell dates themselves; so in training, both are later by a number of days that each step
chooses (trainer/data/batches.py).

Axes: R rows (items or requests), K periods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import FeatureNumbers, Kind, Reads, number_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..values import Values

TICKS = {unit: 86_400 * per_second for unit, per_second in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9))}
"""A day in each unit of times."""
PERIODS = tuple(1.618033988749895**k for k in range(22))
"""In days, up to 67 years. No ratio of two is near a small fraction, so they do not recur together."""
NO_DATE = -1e6
"""Instead of the days of a missing date: long before the year 1."""


class Date(Kind):
    missing = NO_DATE
    dated = True
    reads: Reads = "days"
    in_request = f"date, as days since 1970; {NO_DATE:.0f} for none"

    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], int]) -> float:
        return NO_DATE if value is None else number_of(value)

    def embed(self, feature: FeatureNumbers, of: Values, row_VW: Tensor | None) -> Tensor:
        return waves(of.values.double(), of.values != NO_DATE)

    def inputs(self, feature: FeatureNumbers) -> int:
        return 2 * len(PERIODS)


def waves(day_R: Tensor, there_R: Tensor) -> Tensor:
    """Cosines and sines [R, 2 K] of FP64 days since 1970, FP32, of length 1; zero where none is there."""
    import torch

    from ..transfer import on_device

    turn_RK = day_R[:, None] / on_device(torch.tensor(PERIODS, dtype=torch.float64), day_R.device)
    # Of a turn, so that FP32 is enough.
    angle_RK = 2 * torch.pi * (turn_RK - turn_RK.floor()).float()
    scale_R1 = there_R[:, None] / len(PERIODS) ** 0.5
    return torch.cat([angle_RK.cos(), angle_RK.sin()], 1) * scale_R1
