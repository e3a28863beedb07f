"""The precisions that rows can be sent in, as codecs: FP32 rows to bytes and back.

A precision is an instance of a class here and its entry in CODECS of comm/config.py, which loads no torch.

R rows of a wire block; W columns of all its segments.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from logitmix.comm.config import Direction
from logitmix.comm.fp8 import BACKWARD_FP8, FORWARD_FP8, dequantize_rowwise, quantize_rowwise
from logitmix.comm.fp8_plain import SCALE_BYTES

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Segment(NamedTuple):
    """One feature's columns in a wire row; FP8 gives each segment its own scale."""

    table: str
    width: int


RowLayout = tuple[Segment, ...]
"""The segments of a wire row, side by side."""


def width_of(layout: RowLayout) -> int:
    return sum(segment.width for segment in layout)


class Codec(ABC):
    """Rows [R, W] of one layout as bytes [R, row_bytes] and back."""

    stochastic = False
    """Whether it rounds at random, from the seed passed to `encode`; otherwise the seed is None."""

    @abstractmethod
    def row_bytes(self, layout: RowLayout) -> int:
        """Returns the size of a wire row in bytes."""

    @abstractmethod
    def encode(self, values_RW: Tensor, layout: RowLayout, out: Tensor, seed: int | None) -> None:
        """Fills `out`, contiguous uint8 [R, row_bytes], from FP32, BF16 or FP16."""

    @abstractmethod
    def decode(self, encoded: Tensor, layout: RowLayout, out_RW: Tensor) -> None:
        """Fills FP32 `out_RW`, whose rows may be columns of a wider matrix."""


@dataclass(frozen=True)
class Cast(Codec):
    """A cast to FP32, BF16 or FP16. What is beyond the largest number of BF16 or FP16 becomes that number: an infinite
    gradient would leave a row of NaN, and whether gradients are finite is checked where they are computed."""

    dtype: torch.dtype

    def row_bytes(self, layout: RowLayout) -> int:
        return self.dtype.itemsize * width_of(layout)

    def encode(self, values_RW: Tensor, layout: RowLayout, out: Tensor, seed: int | None) -> None:
        cast = out.view(self.dtype).copy_(values_RW)
        if self.dtype != torch.float32:
            torch.nan_to_num(cast, nan=torch.nan, out=cast)

    def decode(self, encoded: Tensor, layout: RowLayout, out_RW: Tensor) -> None:
        out_RW.copy_(encoded.view(self.dtype))


@dataclass(frozen=True)
class RowwiseFp8(Codec):
    """One byte an element, and a scale for each segment of a row."""

    dtype: torch.dtype
    stochastic: bool = False

    def row_bytes(self, layout: RowLayout) -> int:
        return width_of(layout) + SCALE_BYTES * len(layout)

    def encode(self, values_RW: Tensor, layout: RowLayout, out: Tensor, seed: int | None) -> None:
        quantize_rowwise(values_RW, self.dtype, _widths(layout), seed, out=out)

    def decode(self, encoded: Tensor, layout: RowLayout, out_RW: Tensor) -> None:
        dequantize_rowwise(encoded, self.dtype, _widths(layout), out=out_RW)


FP32, BF16, FP16 = Cast(torch.float32), Cast(torch.bfloat16), Cast(torch.float16)
"""The bytes of FP32 are the tensor's."""
ROWS_FP8, GRADIENTS_FP8 = RowwiseFp8(FORWARD_FP8), RowwiseFp8(BACKWARD_FP8)
GRADIENTS_FP8_STOCHASTIC = RowwiseFp8(BACKWARD_FP8, stochastic=True)


def _widths(layout: RowLayout) -> list[int]:
    return [segment.width for segment in layout]
