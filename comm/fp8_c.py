"""The FP8 codec in C (fp8.c), through ctypes: what fp8_plain.py defines, on the CPU."""

import ctypes
from collections.abc import Sequence

import torch

from logitmix.comm.fp8_plain import MANTISSA_BITS
from logitmix.common.compiled import lazy_library

_pointer, _int, _int64, _uint64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
library = lazy_library(
    "logitmix.comm._fp8",
    fp8_quantize=(None, _pointer, _int64, _int64, _pointer, _int, _int, _int, _uint64, _pointer),
    fp8_dequantize=(None, _pointer, _int64, _int64, _pointer, _int, _int, _pointer, _int64),
)  # fmt: skip


def quantize(
    values_RW: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], seed: int | None, wire: torch.Tensor
) -> None:
    values_RW = values_RW.float()
    library().fp8_quantize(
        values_RW.data_ptr(), values_RW.stride(0), len(values_RW), _int64s(widths), len(widths), MANTISSA_BITS[dtype],
        seed is not None, seed or 0, wire.data_ptr(),
    )  # fmt: skip


def dequantize(wire: torch.Tensor, dtype: torch.dtype, widths: Sequence[int], values_RW: torch.Tensor) -> None:
    library().fp8_dequantize(
        wire.data_ptr(), wire.stride(0), len(wire),
        _int64s(widths), len(widths), MANTISSA_BITS[dtype], values_RW.data_ptr(), values_RW.stride(0),
    )  # fmt: skip


def _int64s(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
