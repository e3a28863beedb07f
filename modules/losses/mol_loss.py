"""Sampled softmax over a mixture of logits (MoL), fused: loss and gradients without an array of all pairs.

Axes: T positions, G groups of consecutive positions, N negatives of a group, V unique items, U query components, I item
components, C their width, M = U * I mixture components, H hidden width of the cross gate.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitmix.common.compiled import has_triton, in_threads, lazy_library

from ..noise import Noise, derive_key, threshold
from .blockwise import GATES, Examples, Side, keep_gradients, kept_gradients

GateDropout = tuple[Noise, float] | None
"""Noise and rate of the gates' dropout."""


def mol_sampled_softmax(
    query: Side,
    item: Side,
    cross_gate: Sequence[Tensor],
    examples: Examples,
    noise: Noise | None = None,
    rate: float = 0.0,
) -> Tensor | None:
    """Sum over T positions of -log softmax of phi for the target among itself and N negatives (section 3.2), FP32; None
    if there is no compiled form for these inputs.

    query: components [T, U, C], already divided by tau, and gating weights [T, M]. item: components [V, I, C] and
    gating weights [V, M]. cross_gate: weight [H, M] and bias [H], then weight [M, H] and bias [M], of its two linear
    layers. The examples' targets and negatives are indices into the V items. A negative equal to a position's target
    (an accidental hit) does not count. `noise` drops gates at the `rate`; those that are left are renormalized.

    Computes in autocast's dtype if autocast is on, else in the query's: FP32, or BF16 with FP32 sums (FP32 where the
    processor cannot multiply BF16). On CPU it uses as many threads as torch would; for a given number of threads,
    results are bit for bit equal. IndexError or ValueError for indices or bounds that do not fit; indices on a GPU are
    not checked.

    CPUs run compiled C. CUDA runs Triton, up to 64 components, 128 hidden units and a width of 128 (64 in FP32);
    mol_triton.covers has the exact limits.
    """
    target_T, dropout = examples.target_T, (noise, rate) if noise and rate else None
    _check(len(query[0]), len(item[0]), examples)
    device = target_T.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query[0].dtype
    tensors = (*query, *item, *cross_gate)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and _library() is not None:
        return _Fused.apply(dtype, examples, dropout, *tensors)
    if device.type == "cuda" and has_triton():
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from . import mol_triton

        (_, I, C), U, H = item[0].shape, query[0].shape[1], len(cross_gate[0])
        if mol_triton.covers(U, I, C, H, dtype, device):
            return mol_triton.mol_sampled_softmax(dtype, examples, dropout, *tensors)
    return None


def _check(T: int, V: int, examples: Examples) -> None:
    """Checks the indices: the compiled form reads memory at them."""
    target_T, negatives_GN, bounds = examples.target_T, examples.negatives_GN, examples.bounds
    if bounds[0] != 0 or bounds[-1] != T or any(start > end for start, end in pairwise(bounds)):
        raise ValueError(f"bounds must rise from 0 to {T}, the number of positions")
    if negatives_GN.ndim != 2 or len(negatives_GN) != len(bounds) - 1:
        raise ValueError(f"negatives must be [{len(bounds) - 1}, N], a row for each group, not {negatives_GN.shape}")
    for indices in (target_T, negatives_GN):
        if indices.numel() and indices.device.type == "cpu":
            least, most = torch.aminmax(indices)
            if least < 0 or most >= V:
                raise IndexError(f"items are numbered from 0 to {V - 1}, not from {least} to {most}")


_INPUTS = ("query_TUC", "query_TM", "item_VIC", "item_VM", "up_HM", "up_H", "down_MH", "down_M")
_INDICES = ("target_T", "negative_GN", "bound_G", "row_T")


class _Problem(ctypes.Structure):
    """mol.c's Problem."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in "TNGUICH"]
        + [(name, ctypes.c_void_p) for name in (*_INPUTS, *_INDICES, "log_q_V", "weight_T")]
        + [("key", ctypes.c_uint64), ("threshold", ctypes.c_int64), ("tile", ctypes.c_int64)]
        + [("d_" + name, ctypes.c_void_p) for name in _INPUTS]
        + [("loss", ctypes.c_double)]
    )


_library = lazy_library(
    "logitmix.modules.losses._mol",
    mol_sampled_softmax=(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
)


_BF16, _AMX = 3, 4
"""mol.c's levels at which it computes in BF16."""
_LEVEL = _AMX
"""The best level to use, if the machine has it."""


class _Fused(torch.autograd.Function):
    """The compiled form; the gradients are computed in forward and kept."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, examples: Examples, dropout: GateDropout, *tensors: Tensor) -> Tensor:
        level = _level(dtype)
        sides = torch.bfloat16 if level >= _BF16 else torch.float32
        dtypes = [sides] * 4 + [torch.float32] * 4
        inputs = [tensor.detach().to(to).contiguous() for tensor, to in zip(tensors, dtypes, strict=True)]
        loss, gradients = _run(level, inputs, examples, dropout, any(ctx.needs_input_grad))
        keep_gradients(ctx, gradients, tensors)
        return torch.tensor(loss, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *kept_gradients(ctx, scale)


def _level(dtype: torch.dtype) -> int:
    """A machine without BF16 products is faster in FP32."""
    level = min(_library().mol_level(), _LEVEL)
    return level if dtype == torch.bfloat16 else min(level, _BF16 - 1)


def _run(
    level: int, inputs: list[Tensor], examples: Examples, dropout: GateDropout, needed: bool
) -> tuple[float, list[Tensor]]:
    """Loss and, if needed, the gradients of all inputs in FP32.

    Each worker takes its own part of the positions and has its own sums of the gradients of items and cross gate, so
    that the result does not depend on which worker is faster.
    """
    numbers = examples.log_q_V, examples.weight_T
    log_q_V, weight_T = (None if of is None else of.float().contiguous() for of in numbers)
    T, (G, N) = len(examples.target_T), examples.negatives_GN.shape
    (_, U, C), I, H = inputs[0].shape, inputs[2].shape[1], len(inputs[5])
    indices = [examples.target_T, examples.negatives_GN, torch.tensor(examples.bounds), examples.row_T]
    indices = [tensor.to(torch.int64).contiguous() for tensor in indices]
    key, dropped = (derive_key(dropout[0].key, GATES), threshold(dropout[1])) if dropout else (0, 0)
    workers = max(1, min(torch.get_num_threads(), T * (N + 1) // _PAIRS))
    queries = [torch.empty(tensor.shape) for tensor in inputs[:2]] if needed else []
    sums = [[torch.zeros(tensor.shape) for tensor in inputs[2:]] if needed else [] for _ in range(workers)]

    def work(worker: int) -> float:
        pointers = [tensor.data_ptr() for tensor in inputs + indices]
        gradients = [tensor.data_ptr() for tensor in queries + sums[worker]] or [0] * len(inputs)
        pointers += [0 if of is None else of.data_ptr() for of in (log_q_V, weight_T)]
        problem = _Problem(T, N, G, U, I, C, H, *pointers, key, dropped, _TILE, *gradients)
        first, last = T * worker // workers, T * (worker + 1) // workers
        if _library().mol_sampled_softmax(ctypes.byref(problem), first, last, level):
            raise MemoryError("no memory for the buffers of the MoL loss")
        return problem.loss

    first, *others = in_threads(work, workers)
    loss = first + sum(others)
    for other in sums[1:]:
        for total, part in zip(sums[0], other, strict=True):
            total += part
    return loss, [*queries, *sums[0]]


_PAIRS = 4096
"""Fewer pairs than this are not worth another thread."""
_TILE = 1024
"""Most negatives at once, if there are more than two tiles: scores are then computed twice, and memory stays
bounded."""
