"""HSTU's pointwise attention (Zhai et al., 2024, section 3.3): silu in place of softmax, with a bias for the distance of
two positions and one for the time between them.

Axes: B sequences, T positions of all of them, packed, L the most positions of a sequence, G heads, d their width,
K time buckets.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logitmix.common.compiled import compiled_library, in_threads

from ..batch import Packing

TIME_BUCKETS = 129
"""K: one for gaps below 1, and two for each of the 64 powers of 2 from there."""


def attend(packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None, packing: Packing) -> Tensor:
    """Position i of a sequence: sum over j <= i of silu(<q_i, k_j> + position[i - j] + time[bucket(i, j)]) / L v_j.

    [T, 3, G, d] of value, query and key -> [T, G, d], in FP32, or FP64 if that is what it is given. `time_K` None, or a
    packing without times, leaves the biases for time out. On the CPU, FP32 and BF16 are computed in compiled C.
    """
    if packed_T3Gd.device.type == "cpu" and packed_T3Gd.dtype != torch.float64 and _library() is not None:
        if not torch.compiler.is_exporting():
            time = None if packing.time_T is None else time_K
            return _Fused.apply(packing, packed_T3Gd.float(), position_L.float(), time)
    return attend_plain(packed_T3Gd, position_L, time_K, packing)


def attend_plain(packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None, packing: Packing) -> Tensor:
    """The same in plain torch, on a padded copy."""
    B, L = packing.shape
    dtype = torch.float64 if packed_T3Gd.dtype == torch.float64 else torch.float32
    with torch.autocast(packed_T3Gd.device.type, enabled=False):
        packed_T3Gd = packed_T3Gd.to(dtype)
        padded = packed_T3Gd.new_zeros(B * L, *packed_T3Gd.shape[1:]).index_copy(0, packing.padded_T, packed_T3Gd)
        v_BGLd, q_BGLd, k_BGLd = padded.unflatten(0, (B, L)).permute(2, 0, 3, 1, 4)
        place_L = torch.arange(L, device=padded.device)
        back_LL = (place_L[:, None] - place_L).clamp(min=0)
        bias_BLL = position_L.to(dtype)[back_LL][None]
        if time_K is not None and packing.time_T is not None and packing.asked_T is not None:
            asked_BL, time_BL = (
                of_T.new_zeros(B * L).index_copy(0, packing.padded_T, of_T).view(B, L)
                for of_T in (packing.asked_T, packing.time_T)
            )
            bias_BLL = bias_BLL + time_K.to(dtype)[time_buckets(asked_BL[:, :, None] - time_BL[:, None])]
        score_BGLL = q_BGLd @ k_BGLd.transpose(2, 3) + bias_BLL[:, None]
        weight_BGLL = (F.silu(score_BGLL) / len(position_L)).tril()
        out_BGLd = weight_BGLL @ v_BGLd
    return out_BGLd.transpose(1, 2).flatten(0, 1).index_select(0, packing.padded_T)


def time_buckets(gap: Tensor) -> Tensor:
    """The bucket of each gap between two times, int64: 0 below 1, then two for each power of 2: 1 for 1, 3 for 2, 4 for
    3, 5 for 4 and 5, 6 for 6 and 7, …"""
    return torch.where(gap < 1, 0, (gap.float().view(torch.int32) >> 22) - 253).long()


_INPUTS = ("packed_T3Gd", "position_L", "time_K", "bound_B", "asked_T", "time_T", "out_TGd", "d_out_TGd")


class _Problem(ctypes.Structure):
    """hstu.c's Problem."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in "TGdL"]
        + [("scale", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in (*_INPUTS, "d_packed_T3Gd")]
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel; None where it was not built (setup.py) or does not load."""
    library = compiled_library("logitmix.modules.encoders._hstu")
    if library is None:
        return None
    library.hstu_attend.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.hstu_attend_backward.argtypes = [*library.hstu_attend.argtypes, ctypes.c_void_p, ctypes.c_void_p]
    return library


class _Fused(torch.autograd.Function):
    """The compiled form. Sequences are divided among torch's threads; the results do not depend on their number but for
    the sums that are the biases' gradients."""

    @staticmethod
    def forward(ctx: Any, packing: Packing, packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None) -> Tensor:
        inputs = [packed_T3Gd.contiguous(), position_L.contiguous()]
        if time_K is not None:
            inputs.append(time_K.float().contiguous())
        out_TGd = torch.empty(packed_T3Gd.shape[0], *packed_T3Gd.shape[2:])
        library = _library()
        assert library is not None
        problem = _problem(packing, inputs, out_TGd=out_TGd)
        parts = _parts(packing)
        failed = in_threads(lambda part: library.hstu_attend(ctypes.byref(problem), *parts[part]), len(parts))
        _require_memory(failed)
        ctx.packing = packing
        ctx.save_for_backward(*inputs)
        return out_TGd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TGd: Tensor) -> tuple[Tensor | None, ...]:
        inputs, packing = ctx.saved_tensors, ctx.packing
        d_packed_T3Gd = torch.empty_like(inputs[0])
        library = _library()
        assert library is not None
        problem = _problem(packing, inputs, d_out_TGd=d_out_TGd.contiguous(), d_packed_T3Gd=d_packed_T3Gd)
        parts = _parts(packing)
        d_position_WL, d_time_WK = torch.zeros(len(parts), len(inputs[1])), torch.zeros(len(parts), TIME_BUCKETS)
        _require_memory(
            in_threads(
                lambda part: library.hstu_attend_backward(
                    ctypes.byref(problem), *parts[part], d_position_WL[part].data_ptr(), d_time_WK[part].data_ptr()
                ),
                len(parts),
            )
        )
        return None, d_packed_T3Gd, d_position_WL.sum(0), d_time_WK.sum(0) if len(inputs) == 3 else None


def _problem(packing: Packing, inputs: list[Tensor], **others: Tensor) -> _Problem:
    packed_T3Gd, position_L = inputs[:2]
    T, _, G, d = packed_T3Gd.shape
    bound_B = packing.offset_B
    arrays = {"packed_T3Gd": packed_T3Gd, "position_L": position_L, "bound_B": bound_B, **others}
    if len(inputs) == 3:
        assert packing.asked_T is not None and packing.time_T is not None
        arrays |= {"time_K": inputs[2], "asked_T": packing.asked_T, "time_T": packing.time_T}
    assert all(of.is_contiguous() for of in arrays.values())
    problem = _Problem(T=T, G=G, d=d, L=len(position_L), scale=1 / len(position_L))
    for name, of in arrays.items():
        setattr(problem, name, of.data_ptr())
    # The tensors must live as long as the problem that has their addresses.
    problem.arrays = arrays
    return problem


def _parts(packing: Packing) -> list[tuple[int, int]]:
    """Consecutive sequences for each thread, with about equally many pairs of positions; none is empty."""
    length_B = packing.lengths_B.double()
    workers = max(1, min(torch.get_num_threads(), len(length_B)))
    pairs_B = torch.cat([length_B.new_zeros(1), (length_B * (length_B + 1)).cumsum(0)])
    cuts = torch.searchsorted(pairs_B, pairs_B[-1] * torch.arange(1, workers) / workers).tolist()
    bounds = sorted({0, *cuts, len(length_B)})
    return list(zip(bounds, bounds[1:], strict=False))


def _require_memory(failed: list[int]) -> None:
    if any(failed):
        raise MemoryError("no memory for the attention of the longest sequence")
