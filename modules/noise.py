"""Random numbers that are a function of where they are used, not of earlier draws.

Initial weights and dropout masks must not depend on the sharding of tables, the number of ranks, or the chunking of the
work. So each number is a hash of (key, row, column): any rank can compute any part of the global array.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


def derive_key(*parts: int | str) -> int:
    """A 63-bit key of the given parts: equal parts give equal keys, on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_bits(key: int, rows_R: Tensor, columns_C: Tensor) -> Tensor:
    """Uniform int32 [R, C], a hash of key, int64 rows [R] and int64 columns [C]."""
    row_R = _mix((rows_R & _LOW).to(torch.int32) ^ _signed(key))
    row_R = _mix(row_R ^ (rows_R >> 32).to(torch.int32) ^ _signed(key >> 32))
    column_C = _mix(columns_C.to(torch.int32) ^ _GOLDEN)
    return _mix(row_R[:, None] ^ column_C[None, :])


def truncated_normal(key: int, rows_R: Tensor, columns_C: Tensor, std: float) -> Tensor:
    """FP32 [R, C] from a normal of standard deviation `std` truncated at 2 std (by the inverse distribution
    function)."""
    uniform = (random_bits(key, rows_R, columns_C).to(torch.float64) + (2**31 + 0.5)) / 2**32
    cut = torch.erf(torch.tensor(2.0, dtype=torch.float64) / 2**0.5).item()
    return (torch.erfinv((uniform * 2 - 1) * cut) * (2**0.5 * std)).to(torch.float32)


def threshold(rate: float) -> int:
    """A rate in units of 2^-16: an element whose 16 random bits are below it is dropped."""
    return min(round(rate * 65536), 65535)


@dataclass(frozen=True)
class Noise:
    """The dropout of one training step; None instead means evaluation."""

    key: int

    def dropout(self, x: Tensor, rate: float, site: str, rows_R: Tensor) -> Tensor:
        """Zero a share `rate` of x [R, ..., C] and rescale the rest.

        `site` names the place in the model; `rows_R` (int64) names each row globally. The rate is exact to 2^-16.
        """
        if rate == 0 or len(x) == 0:
            return x
        drop = threshold(rate)
        width = x[0].numel()
        columns = torch.arange((width + 1) // 2, device=x.device)
        lanes = random_bits(derive_key(self.key, site), rows_R, columns).view(torch.int16)
        keep = lanes[:, :width].reshape(x.shape) >= drop - 32768
        return x * (keep.to(x.dtype) * (65536 / (65536 - drop)))

    def without_rows(self, x: Tensor, rate: float, site: str, rows_R: Tensor) -> Tensor:
        """Zero a share `rate` of the rows of x [R, C], whole, and leave the others as they are; otherwise as
        `dropout`."""
        if rate == 0:
            return x
        return x * (self.dropout(x.new_ones(len(x), 1), rate, site, rows_R) > 0)


_LOW = 0xFFFFFFFF


def _signed(bits: int) -> int:
    bits &= _LOW
    return bits - (1 << 32) if bits >> 31 else bits


_GOLDEN = _signed(0x9E3779B9)
_FIRST, _SECOND = _signed(0x21F0AAAD), _signed(0x735A2D97)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finalizer (xor-shift-multiply, the "lowbias32" family) in place; the masks make the shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _FIRST
    x ^= (x >> 15) & 0x1FFFF
    x *= _SECOND
    x ^= (x >> 15) & 0x1FFFF
    return x
