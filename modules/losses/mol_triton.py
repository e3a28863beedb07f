"""Sampled softmax over a mixture of logits (MoL) for CUDA: what mol_loss.py describes, as Triton kernels.

Axes: T positions, G groups, N negatives of a group, V unique items, U query components, I item components, C their
width, M = U * I mixture components, H hidden width of the cross gate; P pairs of a tile, its targets or TT * NT.

A tile is TT positions of one group x NT of its negatives, 2 x 8 with 8 x 8 components, on Hopper 16 x 8. Arrays [P, M]
and [P, H] stay on chip, and nothing is written per pair. Components are multiplied as [TT * U, C] x [C, NT * I] on
tensor cores, then permuted to pair-major [P, M], which the cross gate's products read.

Forward: a program has one tile of positions, loops over the negatives and keeps a running log-sum-exp: 8 bytes remain
for each position. Backward: as many programs as the multiprocessors hold share the tiles of positions evenly. For each
tile of pairs a program computes the forward again and, from the log-sum-exp, the gradients. It sums the cross gate's
gradient in registers over all of its tiles. All others it adds up in memory to which no other program adds: the biases'
and the queries', and the items' in sums that belong to the program and a group (a slot). So the order of additions is
fixed; they are atomic only so that nothing waits for them. At the end torch sums over programs and slots, slots by
`index_add_`, which has one order under `torch.use_deterministic_algorithms(True)`. Another kind of device may group the
sums differently, by its number of programs. Targets, one pair for each position, have their own kernels. Backward
allocates 4 N (I C + M) bytes for each slot; there are fewer slots than groups and programs together.

Registers are scarce: the gate's gradients, 2 M H numbers in FP32, are a quarter of all of a multiprocessor's. In BF16
and up to a width of 32, two backward programs of 4 warps share it all the same, because what each thread needs then
exists half as often, and with few pairs at once. On Hopper, one program of 8 warps has 128 pairs at once there: the
gradients are half as many for each thread, and the compiler lets products overlap (see `Kernel.serialized` in
benchmarks/kernels.py). Otherwise one program has the multiprocessor for itself.
Products of pairs have fewer rows than columns: then Triton divides the columns among the warps, and a warp needs little
of the weights. With as many rows as columns it would give each warp 16 rows, for which there are too few pairs; warps
would hold copies of all, and spill thousands of bytes. This is why some products are written as their transposes, but
not on Hopper, whose groups of four warps take 64 rows at once (`_product`). Sums
over pairs (biases, gating weights) are products with constants, because sums across lanes take several times the
instructions. BUDGET has what a program may take; tests/test_kernels.py compiles for each GPU.

Precision: FP32 inputs have FP32 products, never TF32. In BF16 all sums are FP32; logits, hidden units and gradients are
rounded where they enter a product, and sigmoids are accurate to 2^-11. Sizes are padded to powers of two: `covers`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from triton.compiler.compiler import max_shared_mem

from ..noise import Noise, derive_key, halves, threshold
from ..noise_triton import hashed_rows, keep_mask, rounded
from ..transfer import copy_all, on_device
from .blockwise import GATES, Examples, spans

LEAST = tl.constexpr(1e-6)
ONES = tl.constexpr(16)
"""Columns of the smallest product. A sum over pairs is such a product, with 16 equal columns: those of the sums of the
transposed pairs, so that the constant is the operand of which a thread holds less."""
_AS_USUAL = tl.constexpr("")
"""How a load is cached. Triton 3.6 does not take a plain string as a default."""
TILE_FIELDS = tl.constexpr(4)


def covers(U: int, I: int, C: int, H: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tiles of these sizes fit on the device, in shared memory and, on a B200, tensor memory.

    FP32 and BF16; padded to powers of two, up to 64 components (16 on a side), 128 hidden units and a width of 128 in
    BF16 and 64 in FP32. Less than an A100's shared memory is enough for BF16 and a width of 64. `make soak` compiles
    these limits.
    """
    plan = _plan(U, I, C, H, dtype, device)
    if dtype not in (torch.float32, torch.bfloat16) or plan.UP * plan.IP > 64 or max(U, I) > 16 or plan.HP > 128:
        return False
    half, shared = dtype == torch.bfloat16, _shared_memory(device)
    if shared < A100:
        return shared >= LEAST_SHARED and half and plan.CP <= 64
    return plan.CP <= 64 or (half and plan.CP <= 128)


def mol_sampled_softmax(
    dtype: torch.dtype, examples: Examples, dropout: tuple[Noise, float] | None, *tensors: Tensor
) -> Tensor:
    """mol_loss.mol_sampled_softmax for sizes that are covered, in `dtype`. tensors: both sides and the cross gate."""
    return _MolLoss.apply(dtype, examples, dropout, *tensors)


LEAST_SHARED, A100, HOPPER = 99 * 1024, 160 * 1024, 220 * 1024
"""Shared memory of a block, bytes: of all GPUs since compute capability 8.0 at least, and of these two, rounded down.
Older GPUs multiply neither BF16 nor TF32."""
INTERPRETED_PROGRAMS = 3
BUDGET = {
    "_target_forward, float32": (1, 1632),
    "_negatives_forward, float32": (1, 76),
    "_target_backward, float32": (1, 2760),
    "_negatives_backward, float32": (1, 1700),
    "_negatives_backward, limit": (1, 2312),
    "_target_backward, limit": (1, 0),
    "_negatives_forward, 8 x 8 x 32 x 128, bfloat16, sm_90": (1, 40),
    "_negatives_backward, 8 x 8 x 32 x 128, bfloat16, sm_90": (1, 636),
    "_negatives_forward, bfloat16, sm_90": (2, 0),
    "_negatives_backward, bfloat16, sm_90": (2, 20),
    "_target_forward": (2, 0),
    "_negatives_forward": (1, 0),
    "_target_backward": (2, 0),
    "_negatives_backward": (2, 0),
}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


@dataclass(frozen=True)
class _Plan:
    """Padded sizes; a tile's positions, negatives and, for targets, pairs; warps of a program, for targets and for
    negatives."""

    UP: int
    IP: int
    CP: int
    HP: int
    TT: int
    NT: int
    targets: int
    target_warps: int
    warps: int


def _plan(U: int, I: int, C: int, H: int, dtype: torch.dtype, device: torch.device) -> _Plan:
    # Products are 16 x 16 at least.
    UP = triton.next_power_of_2(U)
    IP = max(triton.next_power_of_2(I), 16 // UP)
    CP, HP = max(triton.next_power_of_2(C), 16), max(triton.next_power_of_2(H), 16)
    # Chosen by the compiler's report of registers and shared memory. NT * IP is 64, so that the last product of a tile,
    # [C, NT * I], has more columns than rows up to a width of 32: the others are divided as it is.
    NT = min(16, 64 // IP)
    half = dtype == torch.bfloat16
    shared = half and CP <= 32
    """Whether two backward programs share a multiprocessor."""
    TT = max((16 if shared else 32) // NT, 16 // UP)
    # Few components cannot be divided among more warps: each would have copies.
    of_targets = 16 if not half else 4 if shared or UP * IP <= 16 else 8
    warps = 4 if shared else of_targets
    if shared and _is_hopper(device):
        # Its tensor cores take 64 rows at once. On an H100, 64 pairs of 8 x 8 spill 1 kB in the backward, which is 1.2
        # times as fast as with 16 pairs, which spill nothing; the forward is 2.2 times as fast.
        TT = max(TT, min(8, 4096 // (NT * UP * IP)))
        if NT * UP * IP * HP >= 65536:
            # A thread cannot hold the sums of several products of 64 pairs beside the gate's gradients, so each would
            # wait for the one before. Of 128 pairs among 8 warps it can. Not timed on a GPU yet.
            TT, warps = 16, 8
    return _Plan(UP, IP, CP, HP, TT, NT, 16, of_targets, warps)


def _registers(warps: int) -> dict[str, int]:
    """As many for a thread as there are. Without being told so, ptxas may stop at 32 or 128 of 255 and spill thousands
    of bytes."""
    return {"maxnreg": min(255, 65536 // 32 // warps)}


def _shared_memory(device: torch.device) -> int:
    """Most bytes that a block can have; the interpreter counts as Hopper."""
    return max_shared_mem(device.index or 0) if device.type == "cuda" else HOPPER


def _is_hopper(device: torch.device) -> bool:
    """The interpreter is one, too."""
    return device.type != "cuda" or bool(torch.cuda.get_device_properties(device).major == 9)


@dataclass(frozen=True)
class _Problem:
    """A loss, laid out for the kernels. inputs: both sides and the cross gate's weights in the products' dtype."""

    inputs: list[Tensor]
    target_T: Tensor
    negatives_GN: Tensor
    bounds: Sequence[int]
    row_T: Tensor
    log_q_V: Tensor | None
    noise: tuple[int, int, int]
    """The key's two halves, and how many of 2^16 random numbers drop a gate."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """U, I, C, H."""
        query_TUC, _, item_VIC, _, up_HM = self.inputs[:5]
        return query_TUC.shape[1], item_VIC.shape[1], item_VIC.shape[2], len(up_HM)

    @property
    def plan(self) -> _Plan:
        return _plan(*self.counts, self.inputs[0].dtype, self.target_T.device)

    @property
    def compiled_for(self) -> dict[str, Any]:
        half, on_gpu = self.inputs[0].dtype == torch.bfloat16, self.inputs[0].is_cuda
        sizes = dict(zip("UICH", self.counts, strict=True))
        sizes |= {name: getattr(self.plan, name) for name in ("UP", "IP", "CP", "HP")}
        sizes |= {"DROP": self.noise[2] > 0, "CORRECTED": self.log_q_V is not None}
        return {**sizes, "COARSE": half and on_gpu, "EMULATED": half and not on_gpu, "num_stages": 1}

    @property
    def correction(self) -> Tensor:
        """log_q_V, or some tensor."""
        return self.inputs[0] if self.log_q_V is None else self.log_q_V

    def programs(self, tiles: int, warps: int) -> int:
        """Of the backward pass: as many as share the device's multiprocessors."""
        device = self.target_T.device
        if device.type != "cuda":
            return min(tiles, INTERPRETED_PROGRAMS)
        return min(tiles, max(8 // warps, 1) * torch.cuda.get_device_properties(device).multi_processor_count)

    def tiles(self) -> "_Tiles":
        start, end, group = spans(self.bounds, self.plan.TT)
        tiles = len(group)
        programs = self.programs(tiles, self.plan.warps)
        # Program p has tiles p * tiles // programs and on.
        program = (torch.arange(1, tiles + 1) * programs - 1) // max(tiles, 1)
        G = max(len(self.negatives_GN), 1)
        # As one number, because torch compares pairs one by one.
        pair, slot = torch.unique_consecutive(program * G + group, return_inverse=True)
        table = torch.stack([start, end, group, slot], 1).flatten()
        both = on_device(torch.cat([table, pair % G]), self.target_T.device)
        return _Tiles(tiles, programs, both[: len(table)], both[len(table) :])


@dataclass(frozen=True)
class _Tiles:
    """Tiles of positions. Their table has start, end, group and slot: the program's own sums for that group."""

    count: int
    programs: int
    table: Tensor
    group_of_slot: Tensor


class _MolLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        examples: Examples,
        dropout: tuple[Noise, float] | None,
        *tensors: Tensor,
    ) -> Tensor:
        dtypes = [*[dtype] * 5, torch.float32, dtype, torch.float32]
        inputs = [tensor.detach().to(to).contiguous() for tensor, to in zip(tensors, dtypes, strict=True)]
        indices = (examples.target_T, examples.negatives_GN, examples.row_T)
        target_T, negatives_GN, row_T = (of.to(torch.int64).contiguous() for of in indices)
        noise = (*halves(derive_key(dropout[0].key, GATES)), threshold(dropout[1])) if dropout else (0, 0, 0)
        numbers = examples.log_q_V, examples.weight_T
        log_q_V, weight_T = (None if of is None else of.to(torch.float32).contiguous() for of in numbers)
        problem = _Problem(inputs, target_T, negatives_GN, examples.bounds, row_T, log_q_V, noise)
        tiles = problem.tiles()
        with torch.cuda.device_of(target_T):
            positive_T, others_T = _forward(problem, tiles)
        ctx.problem, ctx.tiles, ctx.dtypes = problem, tiles, [tensor.dtype for tensor in tensors]
        ctx.save_for_backward(positive_T, others_T, weight_T)
        loss_T = F.softplus(others_T - positive_T)
        return (loss_T if weight_T is None else loss_T * weight_T).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        with torch.cuda.device_of(scale):
            positive_T, others_T, weight_T = ctx.saved_tensors
            gradients = _backward(ctx.problem, ctx.tiles, positive_T, others_T, weight_T, scale)
            return None, None, None, *_cast(gradients, ctx.dtypes)


def _cast(gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """In one launch for each type."""
    cast = [
        of if of.dtype == dtype else torch.empty_like(of, dtype=dtype)
        for of, dtype in zip(gradients, dtypes, strict=True)
    ]
    copy_all(pair for pair in zip(cast, gradients, strict=True) if pair[0] is not pair[1])
    return cast


def _zeros(device: torch.device, *shapes: tuple[int, ...]) -> Iterator[Tensor]:
    """FP32, in one launch."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.zeros(sum(sizes), device=device).split(sizes)
    return (part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _forward(problem: _Problem, tiles: _Tiles) -> tuple[Tensor, Tensor]:
    """phi of the targets, and log-sum-exp of phi of the negatives: FP32 [T]."""
    target_T, plan = problem.target_T, problem.plan
    T, N = len(target_T), problem.negatives_GN.shape[1]
    # In BF16 it does not spill, and with fewer registers more programs share a multiprocessor.
    registers = {} if problem.inputs[0].dtype == torch.bfloat16 else _registers(plan.warps)
    positive_T, others_T = (torch.empty(T, dtype=torch.float32, device=target_T.device) for _ in range(2))
    if T:
        _target_forward[(triton.cdiv(T, plan.targets),)](
            *problem.inputs, target_T, problem.row_T, problem.correction, positive_T, T, N, *problem.noise,
            TT=plan.targets, num_warps=plan.target_warps, **problem.compiled_for, **registers,
        )  # fmt: skip
        _negatives_forward[(tiles.count,)](
            *problem.inputs, target_T, problem.negatives_GN, problem.row_T, problem.correction, tiles.table, positive_T,
            others_T, N, *problem.noise, TT=plan.TT, NT=plan.NT, num_warps=plan.warps, **problem.compiled_for,
        )  # fmt: skip
    return positive_T, others_T


def _backward(
    problem: _Problem, tiles: _Tiles, positive_T: Tensor, others_T: Tensor, weight_T: Tensor | None, scale: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the inputs, FP32."""
    item_VIC, item_VM = problem.inputs[2:4]
    target_T, plan, device = problem.target_T, problem.plan, problem.target_T.device
    T, N, slots = len(target_T), problem.negatives_GN.shape[1], len(tiles.group_of_slot)
    U, I, C, H = problem.counts
    M = U * I
    d_query_TUC, d_query_TM, d_target_TIC, d_target_TM = (
        torch.empty(T, *shape, dtype=torch.float32, device=device) for shape in ((U, C), (M,), (I, C), (M,))
    )
    target_tiles = triton.cdiv(T, plan.targets)
    target_programs = problem.programs(target_tiles, plan.target_warps)
    d_slot_NIC, d_item_VIC, d_slot_NM, d_item_VM, d_gate = _zeros(
        device, (slots * N, I, C), tuple(item_VIC.shape), (slots * N, M), tuple(item_VM.shape),
        (target_programs + tiles.programs, 2 * H * M + H + M),
    )  # fmt: skip
    scale = scale.to(torch.float32)
    if T:
        # Minus this is the targets' gradient, their probability minus one: no cancellation.
        of_others_T = torch.sigmoid(others_T - positive_T) * scale
        whole_T = torch.logaddexp(positive_T, others_T)
        if weight_T is not None:
            of_others_T = of_others_T * weight_T
            # What it is subtracted from gives weighted shares.
            whole_T = whole_T - weight_T.log()
        _target_backward[(target_programs,)](
            *problem.inputs, target_T, problem.row_T, of_others_T, d_query_TUC, d_query_TM, d_target_TIC, d_target_TM,
            d_gate, T, target_tiles, N, *problem.noise, TT=plan.targets, num_warps=plan.target_warps,
            **_registers(plan.target_warps), **problem.compiled_for,
        )  # fmt: skip
        _negatives_backward[(tiles.programs,)](
            *problem.inputs, target_T, problem.negatives_GN, problem.row_T, problem.correction, tiles.table, whole_T,
            scale, d_query_TUC, d_query_TM, d_slot_NIC, d_slot_NM, d_gate[target_programs:], tiles.count, N,
            *problem.noise, TT=plan.TT, NT=plan.NT, num_warps=plan.warps, **_registers(plan.warps),
            **problem.compiled_for,
        )  # fmt: skip
    item_of_slot = problem.negatives_GN[tiles.group_of_slot].flatten()
    for d_item, d_slot, d_target in ((d_item_VIC, d_slot_NIC, d_target_TIC), (d_item_VM, d_slot_NM, d_target_TM)):
        d_item.index_add_(0, item_of_slot, d_slot)
        d_item.index_add_(0, target_T, d_target)
    up, up_bias, down, down_bias = d_gate.sum(0).split([H * M, H, M * H, M])
    return d_query_TUC, d_query_TM, d_item_VIC, d_item_VM, up.view(H, M), up_bias, down.view(M, H), down_bias


@triton.jit
def _dot(a, b, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    return _dot_add(a, b, tl.zeros((a.shape[0], b.shape[1]), tl.float32), EMULATED)


@triton.jit
def _dot_add(a, b, c, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    if EMULATED:  # the interpreter would multiply the bits of BF16 numbers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _product(a, b, WARPGROUPS: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the product a b, which has few columns. Hopper's groups of four warps multiply 64 rows at once; others
    compute the transpose, whose columns Triton divides among the warps."""
    if WARPGROUPS and a.shape[0] >= 64:
        return _dot(a, b, EMULATED)
    else:
        return tl.trans(_dot(tl.trans(b), tl.trans(a), EMULATED))


@triton.jit
def _sigmoid(x, COARSE: tl.constexpr):  # type: ignore[no-untyped-def]
    if COARSE:  # one instruction of the unit that is short of time, not two
        half = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], tl.float32, True, 1)
        return 0.5 * half + 0.5
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def _none(COARSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """0, which the compiler does not know: addresses that contain it are not kept in registers over a loop."""
    if COARSE:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [0], tl.int32, False, 1)
    else:
        return 0


@triton.jit
def _components(U: tl.constexpr, I: tl.constexpr, UP: tl.constexpr, IP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of each of the padded components [M], and whether it exists."""
    padded = tl.arange(0, UP * IP)
    if I == IP:
        return padded, padded < U * I
    else:
        u, i = padded // IP, padded % IP
        return u * I + i, (u < U) & (i < I)


@triton.jit
def _load_gate(up, down, m, exists, M: tl.constexpr, H: tl.constexpr, HP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cross gate's weights."""
    h = tl.arange(0, HP)
    up_HM = tl.load(up + h[:, None] * M + m[None, :], mask=(h < H)[:, None] & exists[None, :], other=0.0)
    down_MH = tl.load(down + m[:, None] * H + h[None, :], mask=exists[:, None] & (h < H)[None, :], other=0.0)
    return up_HM, down_MH


@triton.jit
def _store_gate(  # type: ignore[no-untyped-def]
    to, d_up, d_down, m, exists, M: tl.constexpr, H: tl.constexpr, HP: tl.constexpr
):
    """d_up and d_down are [M, H]."""
    h = tl.arange(0, HP)
    inside = exists[:, None] & (h < H)[None, :]
    tl.store(to + h[None, :] * M + m[:, None], d_up, mask=inside)
    tl.store(to + H * M + H + m[:, None] * H + h[None, :], d_down, mask=inside)


@triton.jit
def _add_sums(  # type: ignore[no-untyped-def]
    to, x, k, exists, ones, WARPGROUPS: tl.constexpr, EMULATED: tl.constexpr
):
    """Adds the sums over the pairs of x [P, K] to memory."""
    column = tl.arange(0, ONES)
    mask = exists[:, None] & (column == 0)[None, :]
    sums = _product(tl.trans(x), tl.trans(ones), WARPGROUPS, EMULATED)
    tl.atomic_add(to + k[:, None] + 0 * column[None, :], sums, mask=mask, sem="relaxed")


@triton.jit
def _load_components(  # type: ignore[no-untyped-def]
    side, row, k, inside, COUNT: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, CACHE: tl.constexpr = _AS_USUAL
):
    """Component k of each row, [rows, CP]."""
    c = tl.arange(0, CP)
    at = side + (row * COUNT + k)[:, None] * C + c[None, :]
    return tl.load(at, mask=inside[:, None] & (c < C)[None, :], other=0.0, cache_modifier=CACHE)


@triton.jit
def _load_weights(  # type: ignore[no-untyped-def]
    side, row, inside, m, exists, M: tl.constexpr, CACHE: tl.constexpr = _AS_USUAL
):
    at = side + row[:, None] * M + m[None, :]
    return tl.load(at, mask=inside[:, None] & exists[None, :], other=0.0, cache_modifier=CACHE).to(tl.float32)


@triton.jit
def _pair_major(  # type: ignore[no-untyped-def]
    x, TT: tl.constexpr, NT: tl.constexpr, UP: tl.constexpr, IP: tl.constexpr
):
    return tl.permute(x.reshape(TT, UP, NT, IP), (0, 2, 1, 3)).reshape(TT * NT, UP * IP)


@triton.jit
def _side_major(  # type: ignore[no-untyped-def]
    x, TT: tl.constexpr, NT: tl.constexpr, UP: tl.constexpr, IP: tl.constexpr
):
    return tl.permute(x.reshape(TT, NT, UP, IP), (0, 2, 1, 3)).reshape(TT * UP, NT * IP)


@triton.jit
def _hidden(logit, up_HM, up_H, COARSE: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Hidden units [P, H] and the slope of SiLU there."""
    x = _dot(logit, tl.trans(up_HM), EMULATED) + up_H[None, :]
    s = _sigmoid(x, COARSE)
    y = x * s
    return y, s + y - y * s


@triton.jit
def _hidden_back(  # type: ignore[no-untyped-def]
    hidden, slope, logit, d_z, up_HM, down_MH, d_up, to_bias, d_down, d_logit, ones,
    H: tl.constexpr, HP: tl.constexpr, WARPGROUPS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The sums so far plus the contribution of the pairs of d_z [P, M] through these hidden units."""
    h = tl.arange(0, HP)
    d_down = _dot_add(tl.trans(d_z), hidden, d_down, EMULATED)
    d_hidden = rounded(_dot(d_z, down_MH, EMULATED) * slope, logit.dtype, EMULATED)
    d_up = _dot_add(tl.trans(logit), d_hidden, d_up, EMULATED)
    _add_sums(to_bias, d_hidden, h, h < H, ones, WARPGROUPS, EMULATED)
    d_logit = _dot_add(d_hidden, up_HM, d_logit, EMULATED)
    return d_up, d_down, d_logit


@triton.jit
def _mixture(  # type: ignore[no-untyped-def]
    z, logit, exists, row_hash, m, dropped, DROP: tl.constexpr, PADDED: tl.constexpr, COARSE: tl.constexpr
):
    """phi [P] of z and logit [P, M], and the factors of its derivatives:

    d phi / d logit = pi = kept * scale, d phi / d z = (pi * logit - other * other_scale) * slope."""
    s = _sigmoid(z, COARSE)
    y = z * s
    slope = s + y - y * s
    if PADDED:
        y = tl.where(exists[None, :], y, -float("inf"))
    e = tl.exp(y - tl.max(y, 1)[:, None])
    total = tl.sum(e, 1)
    if DROP:
        kept = tl.where(keep_mask(row_hash, m, dropped), e, 0.0)
        part = tl.sum(kept, 1)
        # The gates that dropout keeps are scaled, then divided by their sum, clamped to at least LEAST.
        rescale = 65536.0 / (65536 - dropped).to(tl.float32)
        starved = rescale * part < total * LEAST
        scale = tl.where(starved, rescale / (total * LEAST), 1 / tl.where(starved, 1.0, part))
        phi = tl.sum(kept * logit, 1) * scale
        other = tl.where(starved[:, None], e, kept)
        return phi, kept, scale, other, tl.where(starved, phi / total, phi * scale), slope
    else:
        scale = 1 / total
        phi = tl.sum(e * logit, 1) * scale
        return phi, e, scale, e, phi * scale, slope


@triton.jit(do_not_specialize=["key_low", "key_high", "dropped"])
def _negatives_forward(  # type: ignore[no-untyped-def]
    query, query_weights, item, item_weights, up, up_bias, down, down_bias, target, negative, row, log_q, tile,
    positive, others, N, key_low, key_high, dropped,
    DROP: tl.constexpr, CORRECTED: tl.constexpr,
    U: tl.constexpr, I: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    UP: tl.constexpr, IP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, TT: tl.constexpr, NT: tl.constexpr,
    COARSE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """others: log-sum-exp of phi over a position's negatives, without those that are its target."""
    M: tl.constexpr = U * I
    dtype = query.dtype.element_ty
    m, exists = _components(U, I, UP, IP)
    h = tl.arange(0, HP)
    up_HM, down_MH = _load_gate(up, down, m, exists, M, H, HP)
    up_H = tl.load(up_bias + h, mask=h < H, other=0.0)
    down_M = tl.load(down_bias + m, mask=exists, other=0.0)

    tile += tl.program_id(0) * TILE_FIELDS
    start, end, group = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    t = start + tl.arange(0, TT)
    tu, u = start + tl.arange(0, TT * UP) // UP, tl.arange(0, TT * UP) % UP
    query_TUC = _load_components(query, tu, u, (tu < end) & (u < U), U, C, CP)
    query_TM = _load_weights(query_weights, t, t < end, m, exists, M)
    target_T = tl.load(target + t, mask=t < end, other=-1)
    row_T = tl.load(row + t, mask=t < end, other=0)
    highest_T = tl.load(positive + t, mask=t < end, other=0.0)
    total_T = tl.zeros((TT,), tl.float32)
    for first in range(0, N, NT):
        n = first + tl.arange(0, NT)
        ni, i = first + tl.arange(0, NT * IP) // IP, tl.arange(0, NT * IP) % IP
        negative_N = tl.load(negative + group * N + n, mask=n < N, other=0)
        negative_NI = tl.load(negative + group * N + ni, mask=ni < N, other=0)
        item_NIC = _load_components(item, negative_NI, i, (ni < N) & (i < I), I, C, CP)
        item_NM = _load_weights(item_weights, negative_N, n < N, m, exists, M)
        logit = _pair_major(rounded(_dot(query_TUC, tl.trans(item_NIC), EMULATED), dtype, EMULATED), TT, NT, UP, IP)
        hidden = rounded(_hidden(logit, up_HM, up_H, COARSE, EMULATED)[0], dtype, EMULATED)
        z = _dot(hidden, tl.trans(down_MH), EMULATED)
        z += (query_TM[:, None, :] * item_NM[None, :, :]).reshape(TT * NT, UP * IP) + down_M[None, :]
        row_P = (row_T[:, None] * (N + 1) + 1 + n[None, :]).reshape(TT * NT)
        row_hash = hashed_rows(row_P, key_low, key_high)
        phi = _mixture(z, logit.to(tl.float32), exists, row_hash, m, dropped, DROP, UP * IP != M, COARSE)[0]
        counts = (negative_N[None, :] != target_T[:, None]) & (n < N)[None, :]
        phi_TN = phi.reshape(TT, NT)
        if CORRECTED:
            phi_TN -= tl.load(log_q + negative_N, mask=n < N, other=0.0)[None, :]
        phi_TN = tl.where(counts, phi_TN, -float("inf"))
        higher_T = tl.maximum(highest_T, tl.max(phi_TN, 1))
        total_T = total_T * tl.exp(highest_T - higher_T) + tl.sum(tl.exp(phi_TN - higher_T[:, None]), 1)
        highest_T = higher_T
    tl.store(others + t, highest_T + tl.log(total_T), mask=t < end)


@triton.jit(do_not_specialize=["tiles", "key_low", "key_high", "dropped"])
def _negatives_backward(  # type: ignore[no-untyped-def]
    query, query_weights, item, item_weights, up, up_bias, down, down_bias, target, negative, row, log_q, tile,
    whole, loss_scale, d_query, d_query_weights, d_item, d_item_weights, d_gate, tiles, N, key_low, key_high, dropped,
    DROP: tl.constexpr, CORRECTED: tl.constexpr,
    U: tl.constexpr, I: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    UP: tl.constexpr, IP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, TT: tl.constexpr, NT: tl.constexpr,
    COARSE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """whole: log-sum-exp of phi over target and negatives. Adds to d_query*, d_item* (by slot) and d_gate."""
    M: tl.constexpr = U * I
    MP: tl.constexpr = UP * IP
    WARPGROUPS: tl.constexpr = TT * NT * MP >= 8192
    JT: tl.constexpr = max(TT, ONES)
    JN: tl.constexpr = max(NT, ONES)
    dtype = query.dtype.element_ty
    m, exists = _components(U, I, UP, IP)
    c = tl.arange(0, CP)
    h = tl.arange(0, HP)
    up_HM, down_MH = _load_gate(up, down, m, exists, M, H, HP)
    scale_of_loss = tl.load(loss_scale)
    p = tl.arange(0, TT * NT)[None, :]
    ones_P = tl.full((ONES, TT * NT), 1.0, tl.float32).to(dtype)
    is_T = (tl.arange(0, JT)[:, None] == p // NT).to(tl.float32).to(dtype)
    is_N = (tl.arange(0, JN)[:, None] == p % NT).to(tl.float32).to(dtype)

    d_up, d_down = tl.zeros((MP, HP), tl.float32), tl.zeros((MP, HP), tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    d_gate += program.to(tl.int64) * (2 * H * M + H + M)
    # LLVM would move addresses in shared memory out of the loop, and spill them.
    for number in tl.range(program * tiles // programs, (program + 1) * tiles // programs, disable_licm=True):
        at = tile + number * TILE_FIELDS
        start, end, group, slot = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        t = start + tl.arange(0, TT)
        tu, u = start + tl.arange(0, TT * UP) // UP, tl.arange(0, TT * UP) % UP
        query_TUC = _load_components(query, tu, u, (tu < end) & (u < U), U, C, CP)
        target_T = tl.load(target + t, mask=t < end, other=-1)
        row_T = tl.load(row + t, mask=t < end, other=0)
        whole_T = tl.load(whole + t, mask=t < end, other=float("inf"))
        for first in tl.range(0, N, NT, disable_licm=COARSE):
            n = first + tl.arange(0, NT)
            ni, i = first + tl.arange(0, NT * IP) // IP, tl.arange(0, NT * IP) % IP
            item_inside = (ni < N) & (i < I)
            negative_N = tl.load(negative + group * N + n, mask=n < N, other=0)
            negative_NI = tl.load(negative + group * N + ni, mask=ni < N, other=0)
            item_NIC = _load_components(item, negative_NI, i, item_inside, I, C, CP)
            logit = _pair_major(rounded(_dot(query_TUC, tl.trans(item_NIC), EMULATED), dtype, EMULATED), TT, NT, UP, IP)
            # Small tensors are loaded where they are used: registers are scarce.
            none = _none(COARSE)
            up_H = tl.load(up_bias + none + h, mask=h < H, other=0.0)
            hidden, slope_H = _hidden(logit, up_HM, up_H, COARSE, EMULATED)
            hidden = rounded(hidden, dtype, EMULATED)
            z = _dot(hidden, tl.trans(down_MH), EMULATED)
            down_M = tl.load(down_bias + m, mask=exists, other=0.0)
            query_TM = _load_weights(query_weights, t, t < end, m, exists, M)
            item_NM = _load_weights(item_weights, negative_N, n < N, m, exists, M)
            z += (query_TM[:, None, :] * item_NM[None, :, :]).reshape(TT * NT, MP) + down_M[None, :]
            row_P = (row_T[:, None] * (N + 1) + 1 + n[None, :]).reshape(TT * NT)
            row_hash = hashed_rows(row_P, key_low, key_high)
            logit_F = logit.to(tl.float32)
            phi, kept, scale, other, other_scale, slope = _mixture(
                z, logit_F, exists, row_hash, m, dropped, DROP, MP != M, COARSE
            )
            counts = (negative_N[None, :] != target_T[:, None]) & (n < N)[None, :]
            phi_TN = phi.reshape(TT, NT)
            if CORRECTED:
                phi_TN -= tl.load(log_q + negative_N, mask=n < N, other=0.0)[None, :]
            share_TN = tl.where(counts, tl.exp(phi_TN - whole_T[:, None]), 0.0)
            d_phi = share_TN.reshape(TT * NT) * scale_of_loss

            d_logit = kept * (scale * d_phi)[:, None]
            d_z = (d_logit * logit_F - other * (other_scale * d_phi)[:, None]) * slope
            d_z_TNM = d_z.reshape(TT, NT, MP)
            # Loaded differently, as what follows: the compiler would keep them rather than load or compute them again.
            query_TM = _load_weights(query_weights, t, t < end, m, exists, M, ".ca")
            item_NM = _load_weights(item_weights, negative_N, n < N, m, exists, M, ".ca")
            to_query = rounded((d_z_TNM * item_NM[None, :, :]).reshape(TT * NT, MP), dtype, EMULATED)
            j = tl.arange(0, JT)
            tl.atomic_add(
                d_query_weights + (start + j)[None, :] * M + m[:, None],
                _product(tl.trans(to_query), tl.trans(is_T), WARPGROUPS, EMULATED),
                mask=((j < TT) & (start + j < end))[None, :] & exists[:, None], sem="relaxed",
            )  # fmt: skip
            to_item = rounded((d_z_TNM * query_TM[:, None, :]).reshape(TT * NT, MP), dtype, EMULATED)
            j = tl.arange(0, JN)
            tl.atomic_add(
                d_item_weights + (slot * N + first + j)[None, :] * M + m[:, None],
                _product(tl.trans(to_item), tl.trans(is_N), WARPGROUPS, EMULATED),
                mask=((j < NT) & (first + j < N))[None, :] & exists[:, None], sem="relaxed",
            )  # fmt: skip

            d_z = rounded(d_z, dtype, EMULATED)
            _add_sums(d_gate + none + 2 * H * M + H, d_z, m, exists, ones_P, WARPGROUPS, EMULATED)
            d_up, d_down, d_logit = _hidden_back(
                hidden, slope_H, logit, d_z, up_HM, down_MH, d_up, d_gate + none + H * M, d_down, d_logit, ones_P,
                H, HP, WARPGROUPS, EMULATED,
            )  # fmt: skip
            if query.dtype.element_ty != tl.float32:
                # Loaded again, because there are no registers to keep them.
                negative_NI = tl.load(negative + group * N + ni, mask=ni < N, other=0, cache_modifier=".ca")
                item_NIC = _load_components(item, negative_NI, i, item_inside, I, C, CP, ".ca")
            d_side = _side_major(rounded(d_logit, dtype, EMULATED), TT, NT, UP, IP)
            tl.atomic_add(
                d_query + (tu * U + u)[:, None] * C + c[None, :],
                _product(d_side, item_NIC, WARPGROUPS, EMULATED),
                mask=((tu < end) & (u < U))[:, None] & (c < C)[None, :], sem="relaxed",
            )  # fmt: skip
            tl.atomic_add(
                d_item + ((slot * N + ni) * I + i)[:, None] * C + c[None, :],
                _product(tl.trans(d_side), query_TUC, WARPGROUPS, EMULATED),
                mask=item_inside[:, None] & (c < C)[None, :], sem="relaxed",
            )  # fmt: skip
    _store_gate(d_gate, d_up, d_down, m, exists, M, H, HP)


@triton.jit
def _target_logit(  # type: ignore[no-untyped-def]
    query, item, t, target_T, inside, dtype: tl.constexpr,
    U: tl.constexpr, I: tl.constexpr, C: tl.constexpr, UP: tl.constexpr, IP: tl.constexpr, TT: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """[TT, M] of position t and its own target: too few for tensor cores."""
    u, i = tl.arange(0, UP), tl.arange(0, IP)
    logit_TUI = tl.zeros((TT, UP, IP), tl.float32)
    for c in range(C):
        query_TU = _load_components_at(query, t, c, u, inside, U, C)
        item_TI = _load_components_at(item, target_T, c, i, inside, I, C)
        logit_TUI += query_TU[:, :, None] * item_TI[:, None, :]
    return rounded(logit_TUI.reshape(TT, UP * IP), dtype, EMULATED)


@triton.jit
def _load_components_at(side, row, c, k, inside, COUNT: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Element c of all components of each row, FP32 [rows, COUNTP]."""
    at = side + (row[:, None] * COUNT + k[None, :]).to(tl.int64) * C + c
    return tl.load(at, mask=inside[:, None] & (k < COUNT)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "key_low", "key_high", "dropped"])
def _target_forward(  # type: ignore[no-untyped-def]
    query, query_weights, item, item_weights, up, up_bias, down, down_bias, target, row, log_q, positive,
    T, N, key_low, key_high, dropped,
    DROP: tl.constexpr, CORRECTED: tl.constexpr,
    U: tl.constexpr, I: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    UP: tl.constexpr, IP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, TT: tl.constexpr,
    COARSE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = U * I
    dtype: tl.constexpr = query.dtype.element_ty
    m, exists = _components(U, I, UP, IP)
    h = tl.arange(0, HP)
    up_HM, down_MH = _load_gate(up, down, m, exists, M, H, HP)
    up_H = tl.load(up_bias + h, mask=h < H, other=0.0)
    down_M = tl.load(down_bias + m, mask=exists, other=0.0)
    t = (tl.program_id(0) * TT + tl.arange(0, TT)).to(tl.int64)
    target_T = tl.load(target + t, mask=t < T, other=0)
    row_hash = hashed_rows(tl.load(row + t, mask=t < T, other=0) * (N + 1), key_low, key_high)
    logit = _target_logit(query, item, t, target_T, t < T, dtype, U, I, C, UP, IP, TT, EMULATED)
    hidden = rounded(_hidden(logit, up_HM, up_H, COARSE, EMULATED)[0], dtype, EMULATED)
    query_TM = _load_weights(query_weights, t, t < T, m, exists, M)
    item_TM = _load_weights(item_weights, target_T, t < T, m, exists, M)
    z = _dot(hidden, tl.trans(down_MH), EMULATED) + (query_TM * item_TM + down_M[None, :])
    phi = _mixture(z, logit.to(tl.float32), exists, row_hash, m, dropped, DROP, UP * IP != M, COARSE)[0]
    if CORRECTED:
        phi -= tl.load(log_q + target_T, mask=t < T, other=0.0)
    tl.store(positive + t, phi, mask=t < T)


@triton.jit
def _targets(number, target, T, TT: tl.constexpr, COARSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions of a tile [TT], and their targets, read anew by each call: no register keeps them between calls."""
    t = number * TT + _none(COARSE) + tl.arange(0, TT)
    return t, tl.load(target + t, mask=t < T, other=0)


@triton.jit(do_not_specialize=["T", "tiles", "key_low", "key_high", "dropped"])
def _target_backward(  # type: ignore[no-untyped-def]
    query, query_weights, item, item_weights, up, up_bias, down, down_bias, target, row,
    of_others, d_query, d_query_weights, d_target, d_target_weights, d_gate, T, tiles, N, key_low, key_high, dropped,
    DROP: tl.constexpr, CORRECTED: tl.constexpr,
    U: tl.constexpr, I: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    UP: tl.constexpr, IP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, TT: tl.constexpr,
    COARSE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Writes all of d_*: the target's share, to which the negatives' is added."""
    M: tl.constexpr = U * I
    MP: tl.constexpr = UP * IP
    dtype: tl.constexpr = query.dtype.element_ty
    m, exists = _components(U, I, UP, IP)
    u, i = tl.arange(0, UP), tl.arange(0, IP)
    h = tl.arange(0, HP)
    up_HM, down_MH = _load_gate(up, down, m, exists, M, H, HP)
    ones_P = tl.full((ONES, TT), 1.0, tl.float32).to(dtype)
    d_up, d_down = tl.zeros((MP, HP), tl.float32), tl.zeros((MP, HP), tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    d_gate += program.to(tl.int64) * (2 * H * M + H + M)
    for number in tl.range(program * tiles // programs, (program + 1) * tiles // programs, disable_licm=COARSE):
        t, target_T = _targets(number, target, T, TT, COARSE)
        logit = _target_logit(query, item, t, target_T, t < T, dtype, U, I, C, UP, IP, TT, EMULATED)
        none = _none(COARSE)
        t, target_T = _targets(number, target, T, TT, COARSE)
        up_H = tl.load(up_bias + none + h, mask=h < H, other=0.0)
        hidden, slope_H = _hidden(logit, up_HM, up_H, COARSE, EMULATED)
        hidden = rounded(hidden, dtype, EMULATED)
        z = _dot(hidden, tl.trans(down_MH), EMULATED)
        down_M = tl.load(down_bias + none + m, mask=exists, other=0.0)
        query_TM = _load_weights(query_weights, t.to(tl.int64), t < T, m, exists, M)
        item_TM = _load_weights(item_weights, target_T, t < T, m, exists, M)
        z += query_TM * item_TM + down_M[None, :]
        row_hash = hashed_rows(tl.load(row + t, mask=t < T, other=0) * (N + 1), key_low, key_high)
        logit_F = logit.to(tl.float32)
        _phi, kept, scale, other, other_scale, slope = _mixture(
            z, logit_F, exists, row_hash, m, dropped, DROP, MP != M, COARSE
        )
        d_phi = -tl.load(of_others + t, mask=t < T, other=0.0)
        d_logit = kept * (scale * d_phi)[:, None]
        d_z = (d_logit * logit_F - other * (other_scale * d_phi)[:, None]) * slope
        t, target_T = _targets(number, target, T, TT, COARSE)
        inside = (t < T)[:, None] & exists[None, :]
        query_TM = _load_weights(query_weights, t.to(tl.int64), t < T, m, exists, M)
        item_TM = _load_weights(item_weights, target_T, t < T, m, exists, M)
        tl.store(d_query_weights + t.to(tl.int64)[:, None] * M + m[None, :], d_z * item_TM, mask=inside)
        tl.store(d_target_weights + t.to(tl.int64)[:, None] * M + m[None, :], d_z * query_TM, mask=inside)
        d_z = rounded(d_z, dtype, EMULATED)
        _add_sums(d_gate + none + 2 * H * M + H, d_z, m, exists, ones_P, False, EMULATED)
        if dtype != tl.float32:
            # Computed again, a sixth more of the products, because there are no registers to keep it.
            up_H = tl.load(up_bias + _none(COARSE) + h, mask=h < H, other=0.0)
            slope_H = _hidden(logit, up_HM, up_H, COARSE, EMULATED)[1]
        d_up, d_down, d_logit = _hidden_back(
            hidden, slope_H, logit, d_z, up_HM, down_MH, d_up, d_gate + none + H * M, d_down, d_logit, ones_P,
            H, HP, False, EMULATED,
        )  # fmt: skip
        t, target_T = _targets(number, target, T, TT, COARSE)
        d_logit_TUI = d_logit.reshape(TT, UP, IP)
        for c in range(C):
            query_TU = _load_components_at(query, t, c, u, t < T, U, C)
            item_TI = _load_components_at(item, target_T, c, i, t < T, I, C)
            at_TU = (t[:, None] * U + u[None, :]).to(tl.int64) * C + c
            at_TI = (t[:, None] * I + i[None, :]).to(tl.int64) * C + c
            d_query_TU = tl.sum(d_logit_TUI * item_TI[:, None, :], 2)
            d_item_TI = tl.sum(d_logit_TUI * query_TU[:, :, None], 1)
            tl.store(d_query + at_TU, d_query_TU, mask=(t < T)[:, None] & (u < U)[None, :])
            tl.store(d_target + at_TI, d_item_TI, mask=(t < T)[:, None] & (i < I)[None, :])
    _store_gate(d_gate + _none(COARSE), d_up, d_down, m, exists, M, H, HP)
