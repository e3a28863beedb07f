"""Mixture of logits (MoL) of queries with candidates of their own, fused: nothing is in memory for each pair but its
score, and the candidates' rows are read where the items are stored, without a copy (the paper's index select, section
4.1).

Axes: B queries, P pairs (query, candidate), X items, U query components, I item components, C their width, M = U * I
mixture components, H hidden width of the cross gate.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitmix.common.compiled import has_triton, in_threads, lazy_library

from ..losses.blockwise import Side


def mol_scores(
    query: Side, item: Side, cross_gate: Sequence[Tensor], item_P: Tensor, bounds: Sequence[int]
) -> Tensor | None:
    """phi of each query with its candidates (section 3.2), FP32 [P]; None if there is no compiled form for these
    inputs. No gradients.

    query: components [B, U, C], already divided by tau, and gating weights [B, M], FP32. item: components [X, I, C] and
    gating weights [X, M], each FP32, BF16, FP16 or INT8. cross_gate: weight [H, M] and bias [H], then weight [M, H] and
    bias [M], of its two linear layers. The candidates of query b are item_P[bounds[b] : bounds[b + 1]], indices into
    the X items. For INT8 components, those of the query include their scale. All numbers are finite; NaN in FP32 or
    BF16 gives NaN.

    Products are of BF16 numbers with FP32 sums if the components are BF16 or INT8 and the processor has such products,
    and of FP32 numbers otherwise. For INT8 components beside gating weights in BF16 they are of INT8 numbers where the
    processor has those and more than 16 components M, or no products of BF16 numbers. That also rounds the query's
    components and the cross gate; mol_scores_int8.h says how, and up to which sizes. It uses as many threads as torch
    would; the result does not depend on their number. CUDA runs Triton, with products of FP16 numbers for FP16
    components; mol_scores_triton.covers has the limits.
    IndexError or ValueError for indices or bounds that do not fit; indices on a GPU are not checked.
    """
    on_cuda = item_P.device.type == "cuda" and has_triton()
    library: Any = _library() if item_P.device.type == "cpu" else None
    stored = [_STORED.get(part.dtype) for part in item]
    if None in stored or not (on_cuda or library):
        return None
    (B, U, C), (X, I, _), H = query[0].shape, item[0].shape, len(cross_gate[1])
    P, bound_B = len(item_P), torch.tensor(list(bounds))
    if bounds[0] != 0 or bounds[-1] != P or len(bounds) != B + 1 or bool((bound_B.diff() < 0).any()):
        raise ValueError(f"bounds must rise from 0 to {P}, the number of pairs, with one more than the {B} queries")
    if on_cuda:
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from . import mol_scores_triton

        covered = mol_scores_triton.covers(U, I, C, H, item)
        return mol_scores_triton.mol_scores(query, item, cross_gate, item_P, bounds) if covered else None
    if P:
        least, most = torch.aminmax(item_P)
        if least < 0 or most >= X:
            raise IndexError(f"items are numbered from 0 to {X - 1}, not from {least} to {most}")
    inputs = [tensor.detach().float().contiguous() for tensor in (*query, *cross_gate)]
    items = [part.detach().contiguous() for part in item]
    index_P, score_P = item_P.long().contiguous(), torch.empty(P)
    pointers = [tensor.data_ptr() for tensor in (*inputs[:2], *items)]
    others = [tensor.data_ptr() for tensor in (*inputs[2:], index_P, bound_B, score_P)]
    problem = _Scores(U, I, C, H, *pointers, *stored, *others)
    # For threads that go on when this call is interrupted.
    problem.tensors = (inputs, items, index_P, bound_B, score_P)
    level = _level(library, U, I, C, stored)
    workers = max(1, min(torch.get_num_threads(), P // _PAIRS))

    def work(worker: int) -> None:
        first, last = P * worker // workers, P * (worker + 1) // workers
        if library.mol_scores(ctypes.byref(problem), first, last, level):
            raise MemoryError("no memory for the buffers of the MoL scores")

    in_threads(work, workers)
    return score_P


class _Scores(ctypes.Structure):
    """mol_scores.c's."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in "UICH"),
        *((name, ctypes.c_void_p) for name in ("query_BUC", "query_BM", "item_XIC", "item_XM")),
        *((name, ctypes.c_int64) for name in ("components", "weights")),
        *((name, ctypes.c_void_p) for name in ("up_HM", "up_H", "down_MH", "down_M", "item_P", "bound_B", "score_P")),
    )
    tensors: object
    """What the pointers point to."""


_STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""mol_scores.c's numbers of types."""
_BF16, _AMX, _INT8 = 3, 4, 5
"""mol_scores.c's levels at which products are of BF16 numbers, by AVX-512 and by AMX, and of INT8 numbers."""
_LEVEL = _INT8
"""The best level to use, if the machine has it."""
_FEW = 16
"""Mixture components for which products of BF16 numbers are faster: those of INT8 numbers always compute 64."""
_PAIRS = 2048
"""Fewer pairs than this are not worth another thread."""


def _level(library: Any, U: int, I: int, C: int, stored: Sequence[int | None]) -> int:
    """The best level that the machine has for items that are stored so."""
    best = _AMX if stored[0] in (_STORED[torch.bfloat16], _STORED[torch.int8]) else _BF16 - 1
    fits = stored == [_STORED[torch.int8], _STORED[torch.bfloat16]] and max(U, I) <= 8 and C % 4 == 0
    if fits and (U * I > _FEW or not library.mol_scores_has(_BF16)):
        best = _INT8
    return max(level for level in range(min(best, _LEVEL) + 1) if library.mol_scores_has(level))


_library = lazy_library(
    "logitmix.modules.similarity._mol_scores",
    mol_scores=(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
)
