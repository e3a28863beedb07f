"""Rows for the codec's tests: every magnitude that FP32 has, with what else may turn up in them."""

import math

import hypothesis.strategies as st
import torch

LARGEST_FP32 = torch.finfo(torch.float32).max
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@st.composite
def grouped_rows(draw: st.DrawFn, finite: bool = False) -> tuple[torch.Tensor, list[int]]:
    """FP32 rows and the widths of their groups; each group on a level of its own, from subnormal to the largest."""
    widths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    rows = draw(st.integers(1, 4))
    groups = [_group(draw, rows, D) for D in widths]
    values_RW = torch.cat(groups, dim=1)
    for bad in draw(st.lists(st.sampled_from([0.0, -0.0, LARGEST_FP32, 2.0**-149, *BAD]), max_size=3)):
        if math.isfinite(bad) or not finite:
            place = draw(st.integers(0, values_RW.numel() - 1))
            values_RW.view(-1)[place] = bad
    return values_RW, widths


BAD = [math.nan, math.inf, -math.inf]


def _group(draw: st.DrawFn, rows: int, D: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    levels = torch.tensor([draw(st.integers(-152, 127)) for _ in range(rows)]).unsqueeze(1)
    exponents = levels - torch.randint(0, draw(st.sampled_from([1, 4, 13, 41, 300])), (rows, D), generator=generator)
    mantissas = 1 + torch.rand(rows, D, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):  # ties: one bit more than FP8 keeps, times a power of two
        mantissas = torch.round(mantissas * 16) / 16
    signs = torch.randint(0, 2, (rows, D), generator=generator) * 2 - 1
    return (signs * mantissas * 2.0 ** exponents.double()).clamp(-LARGEST_FP32, LARGEST_FP32).float()


def every_kind_of_number(dtype: torch.dtype) -> torch.Tensor:
    """In the format's own units: each byte's value, ties between neighbors, and the numbers next to all of these."""
    largest = torch.tensor(torch.finfo(dtype).max)
    levels = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    levels = levels[levels <= largest]
    points = torch.cat([levels, (levels[1:] + levels[:-1]) / 2])
    points = torch.cat([points, points.nextafter(-largest), points.nextafter(largest), largest.unsqueeze(0)])
    return torch.cat([points, -points]).unsqueeze(0)


def dressed(values_RW: torch.Tensor, layout: str) -> torch.Tensor:
    """These values, laid out otherwise."""
    R, W = values_RW.shape
    if layout == "columns of a wider matrix":
        wide = values_RW.new_full((R, W + 5), math.nan)
        wide[:, 3 : 3 + W] = values_RW
        return wide[:, 3 : 3 + W]
    if layout == "transposed":
        return values_RW.t().contiguous().t()
    return values_RW


LAYOUTS = ["contiguous", "columns of a wider matrix", "transposed"]
