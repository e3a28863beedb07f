"""Random numbers that are a function of where they are used, not of earlier draws.

Initial weights and dropout masks must not depend on the sharding of tables, the number of ranks, or the chunking of the
work. So each number is a hash of (key, row, column): any rank can compute any part of the global array.
"""

import ctypes
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logitmix.common.compiled import has_triton, in_threads, lazy_library


def derive_key(*parts: int | str) -> int:
    """Returns a 63-bit key of the given parts: equal parts give equal keys, on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_bits(key: int, rows_R: Tensor, columns_C: Tensor) -> Tensor:
    """Uniform int32 [R, C], a hash of key, int64 rows [R] and int64 columns [C]."""
    low, high = halves(key)
    row_R = _mix((rows_R & _LOW).to(torch.int32) ^ low)
    row_R = _mix(row_R ^ (rows_R >> 32).to(torch.int32) ^ high)
    column_C = _mix(columns_C.to(torch.int32) ^ _GOLDEN)
    return _mix(row_R[:, None] ^ column_C[None, :])


def truncated_normal(key: int, rows_R: Tensor, columns_C: Tensor, std: float) -> Tensor:
    """FP32 [R, C] from a normal of standard deviation `std` truncated at 2 std (by the inverse distribution
    function)."""
    uniform = (random_bits(key, rows_R, columns_C).to(torch.float64) + (2**31 + 0.5)) / 2**32
    cut = torch.erf(torch.tensor(2.0, dtype=torch.float64) / 2**0.5).item()
    return (torch.erfinv((uniform * 2 - 1) * cut) * (2**0.5 * std)).to(torch.float32)


def threshold(rate: float) -> int:
    """Returns a rate in units of 2^-16: an element whose 16 random bits are below it is dropped."""
    return min(round(rate * 65536), 65535)


@dataclass(frozen=True)
class Noise:
    """The dropout of one training step; None instead means evaluation."""

    key: int

    def relu_dropout(self, x: Tensor, rate: float, site: str, rows_R: Tensor) -> Tensor:
        """`dropout` of relu(x)."""
        if rate and len(x) and x.is_cuda and x.dtype in _COMPILED and _is_compiled_for("cuda"):
            # In one kernel; the results are the same.
            return _Dropped.apply(x, rows_R, derive_key(self.key, site), threshold(rate), None, True)
        return self.dropout(F.relu(x), rate, site, rows_R)

    def dropout(self, x: Tensor, rate: float, site: str, rows_R: Tensor, onto: Tensor | None = None) -> Tensor:
        """Zero a share `rate` of x [R, ..., C] and rescale the rest; the result is added to `onto`, of the same shape,
        if it is given.

        `site` names the place in the model; `rows_R` (int64) names each row globally. The rate is exact to 2^-16.
        """
        if rate == 0 or len(x) == 0:
            return x if onto is None else onto + x
        key, drop = derive_key(self.key, site), threshold(rate)
        if x.dtype in _COMPILED and _is_compiled_for(x.device.type):
            # Only Triton adds in the same kernel; the results are the same.
            if onto is not None and x.is_cuda and onto.dtype in _COMPILED:
                return _Dropped.apply(x, rows_R, key, drop, onto)
            dropped = _Dropped.apply(x, rows_R, key, drop)
            return dropped if onto is None else onto + dropped
        width = x[0].numel()
        columns = torch.arange((width + 1) // 2, device=x.device)
        lanes = random_bits(key, rows_R, columns).view(torch.int16)
        keep = lanes[:, :width].reshape(x.shape) >= drop - 32768
        dropped = x * (keep.to(x.dtype) * _scale(drop))
        return dropped if onto is None else onto + dropped

    def without_rows(self, x: Tensor, rate: float, site: str, rows_R: Tensor) -> Tensor:
        """Zero a share `rate` of the rows of x [R, C], whole, and leave the others as they are; otherwise as
        `dropout`."""
        if rate == 0:
            return x
        return x * (self.dropout(x.new_ones(len(x), 1), rate, site, rows_R) > 0)


def _scale(drop: int) -> float:
    return 65536 / (65536 - drop)


def _is_compiled_for(device_type: str) -> bool:
    return _library() is not None if device_type == "cpu" else device_type == "cuda" and has_triton()


class _Dropped(torch.autograd.Function):
    """The compiled forms of `Noise.dropout`, bit for bit: one pass forward, one backward that makes the mask again.

    Only Triton has the sum with `onto`, and `dropout` of relu(x), in the same pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows_R: Tensor, key: int, drop: int, onto: Tensor | None = None, relu: bool = False
    ) -> Tensor:
        ctx.save_for_backward(rows_R, x if relu else None)
        ctx.mask, ctx.dtypes = (key, drop), (x.dtype, None if onto is None else onto.dtype)
        return _dropped(x, rows_R, key, drop, onto, relu=x if relu else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows_R, x), (key, drop), (d_x, d_onto) = ctx.saved_tensors, ctx.mask, ctx.dtypes
        of_onto = None if d_onto is None else gradient.to(d_onto)
        return _dropped(gradient, rows_R, key, drop, dtype=d_x, relu=x), None, None, None, of_onto, None


def _dropped(
    x: Tensor,
    rows_R: Tensor,
    key: int,
    drop: int,
    onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
    relu: Tensor | None = None,
) -> Tensor:
    """x after dropout. On CUDA only: in `dtype`, or in its own; added to `onto`; without the numbers where `relu`, of
    the same shape, is negative or 0."""
    assert rows_R.shape == x.shape[:1] and rows_R.dtype == torch.int64
    # In the type of x, as torch multiplies by it.
    dtype = dtype or x.dtype
    scale = float(torch.tensor(_scale(drop), dtype=dtype))
    if x.is_cuda:
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from . import noise_triton

        return noise_triton.dropped(x, rows_R, halves(key), drop, scale, onto, dtype, relu)
    library, x, rows_R = _library(), x.contiguous(), rows_R.contiguous()
    out, R, W = torch.empty_like(x), len(x), x[0].numel()
    workers = max(1, min(torch.get_num_threads(), x.numel() // _NUMBERS_A_THREAD))

    def work(part: int) -> None:
        first, end = (R * at // workers for at in (part, part + 1))
        x_part, out_part, row_part = (tensor[first:].data_ptr() for tensor in (x, out, rows_R))
        sizes = end - first, W, x.dtype == torch.bfloat16
        library.noise_dropout(x_part, out_part, row_part, *sizes, key, drop - 32768, scale)

    in_threads(work, workers)
    return out


_COMPILED = (torch.float32, torch.bfloat16)
_NUMBERS_A_THREAD = 2**16
"""Fewer than these are not worth another thread."""


_library = lazy_library(
    "logitmix.modules._noise",
    noise_dropout=(
        None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2,
        ctypes.c_int, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float,
    ),
)  # fmt: skip


_LOW = 0xFFFFFFFF


def halves(key: int) -> tuple[int, int]:
    """Returns the low and the high 32 bits of a key, each as a signed number."""
    return _signed(key), _signed(key >> 32)


def _signed(bits: int) -> int:
    bits &= _LOW
    return bits - (bits >> 31 << 32)


_GOLDEN = _signed(0x9E3779B9)
_FIRST, _SECOND = _signed(0x21F0AAAD), _signed(0x735A2D97)


def _mix(x: Tensor) -> Tensor:
    """Applies a 32-bit finalizer (xor-shift-multiply, the "lowbias32" family) in place; the masks make the shifts
    logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _FIRST
    x ^= (x >> 15) & 0x1FFFF
    x *= _SECOND
    x ^= (x >> 15) & 0x1FFFF
    return x
