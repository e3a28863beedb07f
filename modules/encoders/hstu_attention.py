"""HSTU's pointwise attention (Zhai et al., 2024): silu in place of softmax, with a bias for the distance of two
positions and one for the time between them.

Axes: B sequences, T positions of all of them, packed, L the most positions of a sequence, G heads, d their width,
K time buckets.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logitmix.common.compiled import has_triton, in_threads, lazy_library

from ..batch import Packing

TIME_BUCKETS = 129
"""K: one for gaps below 1, and two for each of the 64 powers of 2 from there."""


def attend(packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None, packing: Packing) -> Tensor:
    """Position i of a sequence: sum over j <= i of silu(<q_i, k_j> + position[i - j] + time[bucket(i, j)]) / L v_j.

    [T, 3, G, d] of value, query and key -> [T, G, d], in FP32, or FP64 if that is what it is given. bucket(i, j) is
    that of the time from action j to the query after position i; without `time_K` there is no such bias. IndexError for
    a sequence longer than L.

    On the CPU, FP32 and BF16 are computed in FP32 by compiled C, on as many threads as torch would use. Their number
    changes how the biases' gradients are rounded, and nothing else. On CUDA a Triton kernel computes in what it is
    given, FP32 or BF16, for heads of a width up to 64 or 128.
    """
    assert time_K is None or packing.time_T is not None
    if packed_T3Gd.device.type == "cuda" and has_triton():
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from . import hstu_triton

        if hstu_triton.covers(packed_T3Gd.shape[3], packed_T3Gd.dtype):
            return hstu_triton.attend(packed_T3Gd, position_L, time_K, packing)
    compiled = packed_T3Gd.device.type == "cpu" and packed_T3Gd.dtype != torch.float64 and _library() is not None
    if compiled and not torch.compiler.is_exporting():
        time_K = None if time_K is None else time_K.float()
        return _Fused.apply(packing, packed_T3Gd.float(), position_L.float(), time_K)
    return attend_plain(packed_T3Gd, position_L, time_K, packing)


def attend_plain(packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None, packing: Packing) -> Tensor:
    """`attend` in plain torch, on a padded copy: the reference of the compiled forms."""
    B, L = packing.shape
    dtype = torch.float64 if packed_T3Gd.dtype == torch.float64 else torch.float32
    with torch.autocast(packed_T3Gd.device.type, enabled=False):
        packed_T3Gd = packed_T3Gd.to(dtype)
        padded = packed_T3Gd.new_zeros(B * L, *packed_T3Gd.shape[1:]).index_copy(0, packing.padded_T, packed_T3Gd)
        v_BGLd, q_BGLd, k_BGLd = padded.unflatten(0, (B, L)).permute(2, 0, 3, 1, 4)
        place_L = torch.arange(L, device=padded.device)
        back_LL = (place_L[:, None] - place_L).clamp(min=0)
        bias_BLL = position_L.to(dtype)[back_LL][None]
        if time_K is not None:
            assert packing.asked_T is not None and packing.time_T is not None
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


class _Problem(ctypes.Structure):
    """hstu.c's Problem."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in "TGdL"]
        + [("scale", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("packed_T3Gd", "position_L", "time_K", "bound_B", "asked_T", "time_T")]
        + [(name, ctypes.c_void_p) for name in ("out_TGd", "d_out_TGd", "d_packed_T3Gd")]
    )


_library = lazy_library(
    "logitmix.modules.encoders._hstu",
    hstu_attend=(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int),
)


_LEVEL = 2
"""The best of hstu.c's levels to use, if the machine has it."""


class _Fused(torch.autograd.Function):
    """The compiled form. Nothing is kept between forward and backward but the inputs."""

    @staticmethod
    def forward(ctx: Any, packing: Packing, packed_T3Gd: Tensor, position_L: Tensor, time_K: Tensor | None) -> Tensor:
        inputs = [packed_T3Gd.contiguous(), position_L.contiguous()]
        if time_K is not None:
            inputs.append(time_K.contiguous())
        out_TGd = torch.empty(packed_T3Gd.shape[0], *packed_T3Gd.shape[2:])
        _run(packing, inputs, {"out_TGd": out_TGd})
        ctx.packing = packing
        ctx.save_for_backward(*inputs)
        return out_TGd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TGd: Tensor) -> tuple[Tensor | None, ...]:
        packed_T3Gd, *biases = ctx.saved_tensors
        d_packed_T3Gd, workers = torch.empty_like(packed_T3Gd), len(_parts(ctx.packing))
        d_biases = [torch.zeros(workers, len(bias)) for bias in biases]
        tensors = {"d_out_TGd": d_out_TGd.contiguous(), "d_packed_T3Gd": d_packed_T3Gd}
        _run(ctx.packing, [packed_T3Gd, *biases], tensors, d_biases)
        d_position_L, *d_time_K = (of_workers.sum(0) for of_workers in d_biases)
        return None, d_packed_T3Gd, d_position_L, d_time_K[0] if d_time_K else None


def _run(packing: Packing, inputs: list[Tensor], outputs: dict[str, Tensor], d_biases: Sequence[Tensor] = ()) -> None:
    """Forward, or with `d_biases`, [workers, …] for each bias, backward."""
    packed_T3Gd, position_L, *time_K = inputs
    T, _, G, d = packed_T3Gd.shape
    L, longest = len(position_L), packing.shape[1]
    if longest > L:
        raise IndexError(f"the biases are for sequences of up to {L} positions, not {longest}")
    tensors = {"packed_T3Gd": packed_T3Gd, "position_L": position_L, "bound_B": packing.offset_B, **outputs}
    if time_K:
        assert packing.asked_T is not None and packing.time_T is not None
        tensors |= {"time_K": time_K[0], "asked_T": packing.asked_T, "time_T": packing.time_T}
        assert len(time_K[0]) == TIME_BUCKETS and len(packing.asked_T) == len(packing.time_T) == T
        assert packing.asked_T.dtype == packing.time_T.dtype == torch.int64
    assert int(packing.offset_B[-1]) == T and all(tensor.is_contiguous() for tensor in tensors.values())
    problem = _Problem(T, G, d, L, 1 / L, **{name: tensor.data_ptr() for name, tensor in tensors.items()})
    parts, library = _parts(packing), _library()
    level = min(library.hstu_level(), _LEVEL)

    def work(part: int) -> int:
        gradients = [of_workers[part].data_ptr() for of_workers in d_biases]
        d_position, d_time = (*gradients, None, None)[:2]
        return library.hstu_attend(ctypes.byref(problem), *parts[part], d_position, d_time, level)

    if any(in_threads(work, len(parts))):
        raise MemoryError("no memory for the attention of the longest sequence")


def _parts(packing: Packing) -> list[tuple[int, int]]:
    """Consecutive sequences for each thread, with about equally many pairs of positions."""
    length_B = packing.lengths_B.numpy().astype(np.float64)
    workers = max(1, min(torch.get_num_threads(), len(length_B)))
    pairs_B = np.concatenate([[0.0], (length_B * (length_B + 1)).cumsum()])
    cuts = pairs_B.searchsorted(pairs_B[-1] * np.arange(1, workers) / workers).tolist()
    return list(pairwise([0, *cuts, len(length_B)]))
