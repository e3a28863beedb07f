"""Mixture of logits (MoL) of queries with candidates of their own, for CUDA: what mol_scores.py describes, as a Triton
kernel.

Axes: B queries, P pairs (query, candidate), X items, U query components, I item components, C their width, M = U * I
mixture components, H hidden width of the cross gate; N candidates of a tile.

A program has one query and some tiles of its candidates; the cross gate's weights stay on chip for all of them. The
candidates' rows are read where the items are stored, in the type that they are stored in (the paper's index select,
section 4.1), and multiplied as [N * I, C] x [C, U] on tensor cores. All else is the forward pass of mol_triton.py.
Nothing is written for a pair but its score.

Precision: FP32 items have FP32 products, never TF32; others have products of 16 bits with FP32 sums, in FP16 if the
components are FP16 and in BF16 if they are BF16 or INT8. There, logits and hidden units are rounded where they enter a
product, and sigmoids are accurate to 2^-11; the weighted sum takes the logits before they are rounded.

Its tests have passed on an H100 (benchmarks/notes/h100.md); for A100 and B200 it has only been compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..losses import mol_triton
from ..losses.blockwise import Side
from ..noise_triton import rounded
from ..transfer import on_device

STORED = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
TILE_BYTES = 64 * 1024
"""Most of a tile's components, in the type that they are multiplied in."""
TILES, PROGRAMS = 8, 4
"""Most tiles of a program, which has fewer where there would be less than so many programs for each multiprocessor."""
INTERPRETED_TILES = 2
BUDGET = {"_scores, float32": (1, 84), "_scores": (1, 212)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def covers(U: int, I: int, C: int, H: int, item: Side) -> bool:
    """Whether tiles of these sizes fit on the items' device.

    Components and gating weights in FP32, BF16, FP16 or INT8. Padded to powers of two, and to 8 query components and 2
    of the item: 16 components on a side, 128 hidden units, and 128 mixture components of a width of 128, or 64 of a
    width of 64 in FP32. Less than an A100's shared memory is enough for 64 of a width of 64 in 16 bits.
    """
    if any(part.dtype not in STORED for part in item):
        return False
    plan = _plan(U, I, C, H, item[0])
    M, half = plan.UP * plan.IP, plan.dtype != torch.float32
    shared = mol_triton._shared_memory(item[0].device)
    if shared < mol_triton.A100:
        fits = shared >= mol_triton.LEAST_SHARED and half and M <= 64 and plan.CP <= 64
    else:
        fits = M <= 128 and plan.CP <= 128 if half else M <= 64 and plan.CP <= 64
    return fits and max(U, I) <= 16 and plan.HP <= 128


def mol_scores(query: Side, item: Side, cross_gate: Sequence[Tensor], item_P: Tensor, bounds: Sequence[int]) -> Tensor:
    """mol_scores.mol_scores for what is covered. Indices are not checked; a negative one has no item, and its score is
    minus infinity."""
    (B, U, C), (I, H), device = query[0].shape, (item[0].shape[1], len(cross_gate[1])), item_P.device
    plan = _plan(U, I, C, H, item[0])
    score_P = torch.empty(len(item_P), dtype=torch.float32, device=device)
    if not len(item_P):
        return score_P
    dtypes = (plan.dtype, torch.float32, plan.dtype, torch.float32, plan.dtype, torch.float32)
    components, weights, *gate = (
        tensor.detach().to(dtype).contiguous() for tensor, dtype in zip((*query, *cross_gate), dtypes, strict=True)
    )
    bound_B = torch.tensor(list(bounds))
    tiles_B = (bound_B.diff() + plan.N - 1) // plan.N
    on_gpu, half = device.type == "cuda", plan.dtype != torch.float32
    span = INTERPRETED_TILES
    if on_gpu:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        span = max(1, min(TILES, int(tiles_B.sum()) // (PROGRAMS * processors)))
    with torch.cuda.device_of(item_P):
        _scores[(triton.cdiv(int(tiles_B.max()), span), B)](
            components, weights, *(part.detach().contiguous() for part in item), *gate,
            item_P.to(torch.int64).contiguous(), on_device(bound_B, device), score_P, span * plan.N,
            U=U, I=I, C=C, H=H, UP=plan.UP, IP=plan.IP, CP=plan.CP, HP=plan.HP, N=plan.N,
            COARSE=half and on_gpu, EMULATED=plan.dtype == torch.bfloat16 and not on_gpu,
            num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
    return score_P


@dataclass(frozen=True)
class _Plan:
    """What products are of; padded sizes; a tile's candidates; warps of a program."""

    dtype: torch.dtype
    UP: int
    IP: int
    CP: int
    HP: int
    N: int
    warps: int


def _plan(U: int, I: int, C: int, H: int, components: Tensor) -> _Plan:
    dtype = torch.bfloat16 if components.dtype == torch.int8 else components.dtype
    # Products are 16 wide at least, and as many columns as the query has components are 8.
    UP, IP = max(triton.next_power_of_2(U), 8), max(triton.next_power_of_2(I), 2)
    CP, HP = max(triton.next_power_of_2(C), 16), max(triton.next_power_of_2(H), 16)
    # Chosen by the compiler's report of registers and shared memory. Programs are small, so that two of them share a
    # multiprocessor and one computes while the other waits for its items.
    half, large = dtype != torch.float32, mol_triton._shared_memory(components.device) >= mol_triton.HOPPER
    N, warps = 64 if half and large and UP * IP <= 64 else 32, 4 if half else 8
    while N * IP * CP * dtype.itemsize > TILE_BYTES:
        N //= 2
    return _Plan(dtype, UP, IP, CP, HP, N, warps)


@triton.jit(do_not_specialize=["span"])
def _scores(  # type: ignore[no-untyped-def]
    query, query_weights, item, item_weights, up, up_bias, down, down_bias, index, bound, score, span,
    U: tl.constexpr, I: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    UP: tl.constexpr, IP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, N: tl.constexpr,
    COARSE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = U * I
    dtype = query.dtype.element_ty
    b = tl.program_id(1).to(tl.int64)
    start = tl.load(bound + b) + tl.program_id(0).to(tl.int64) * span
    end = tl.minimum(tl.load(bound + b + 1), start + span)
    m, exists = mol_triton._components(U, I, UP, IP)
    h, u = tl.arange(0, HP), tl.arange(0, UP)
    up_HM, down_MH = mol_triton._load_gate(up, down, m, exists, M, H, HP)
    up_H = tl.load(up_bias + h, mask=h < H, other=0.0)
    down_M = tl.load(down_bias + m, mask=exists, other=0.0)
    query_UC = mol_triton._load_components(query, b, u, u < U, U, C, CP)
    query_M = tl.load(query_weights + b * M + m, mask=exists, other=0.0)
    for first in range(start, end, N):
        n = first + tl.arange(0, N)
        ni, i = first + tl.arange(0, N * IP) // IP, tl.arange(0, N * IP) % IP
        index_N = tl.load(index + n, mask=n < end, other=-1)
        index_NI = tl.load(index + ni, mask=ni < end, other=-1)
        stored_NIC = mol_triton._load_components(item, index_NI, i, (index_NI >= 0) & (i < I), I, C, CP)
        item_NIC = stored_NIC.to(tl.float32).to(dtype) if item.dtype.element_ty == tl.int8 else stored_NIC
        product = mol_triton._dot(item_NIC, tl.trans(query_UC), EMULATED)
        logit = tl.permute(product.reshape(N, IP, UP), (0, 2, 1)).reshape(N, UP * IP)
        rough = rounded(logit, dtype, EMULATED)
        hidden = rounded(mol_triton._hidden(rough, up_HM, up_H, COARSE, EMULATED)[0], dtype, EMULATED)
        item_NM = mol_triton._load_weights(item_weights, index_N, index_N >= 0, m, exists, M)
        z = mol_triton._dot(hidden, tl.trans(down_MH), EMULATED) + (query_M[None, :] * item_NM + down_M[None, :])
        phi = mol_triton._mixture(z, logit, exists, 0, m, 0, False, UP * IP != M, COARSE)[0]
        tl.store(score + n, tl.where(index_N >= 0, phi, -float("inf")), mask=n < end)
