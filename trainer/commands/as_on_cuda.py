"""A tower whose modules compute as on CUDA, so that what a GPU's kernels take can be counted on the CPU.

Where a GPU has a kernel that a CPU lacks, or that compiled C replaces there, a stand-in takes its place: it has the
kernel's shapes, memory and number of launches, and zeros for numbers. So nothing that is counted depends on this CPU.

Axes: T positions, V unique items, D width, G heads, d their width, R rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logitmix.modules.batch import Packing
from logitmix.modules.encoders import fuxi, hstu, sasrec
from logitmix.modules.linear import Linear
from logitmix.modules.losses import blockwise
from logitmix.modules.losses.blockwise import Examples, Side
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.components import Projection
from logitmix.modules.similarity.dot import Dot
from logitmix.modules.similarity.mol import JointMoL, MoL
from logitmix.modules.towers import Tower


class Counter(Protocol):
    """What counts torch's operations; `add` counts what these do not show."""

    def add(self, kernels: int, traffic: int) -> None: ...


NORM, FLASH, HSTU_ATTENTION, HSTU_UNIT, HSTU_UNIT_WITH_TIMES = (1, 1), (3, 4), (1, 4), (1, 7), (1, 9)
MOL_LOSS, DOT_LOSS = (8, 14), (4, 2)
"""Launches of a kernel's forward and backward, with what torch does around them: counted by benchmarks/launches.py."""
HSTU_TILES = 4
"""Launches of the tables that divide a batch's attention among the programs of HSTU's kernels."""
MOST_COMPONENTS, MOST_OF_A_SIDE, MOST_HIDDEN, WIDEST_COMPONENT = 64, 16, 128, {torch.bfloat16: 128, torch.float32: 64}
WIDEST_DOT = 512
"""What the losses' kernels are for (mol_triton.covers, dot_triton.covers); other sizes run block by block."""


def as_on_cuda(tower: Tower, counter: Counter) -> None:
    """Changes the modules of a tower, which is used for nothing else."""
    for module in tower.modules():
        if isinstance(module, Linear):
            module.forward = partial(nn.Linear.forward, module)  # type: ignore[method-assign]
        elif isinstance(module, Projection):
            module.forward = partial(_projection, module, counter)  # type: ignore[method-assign]
        elif isinstance(module, sasrec.Attention):
            module._attend = partial(_attention, module, counter)  # type: ignore[method-assign]
        elif isinstance(module, hstu.HSTU | fuxi.FuXi):
            counter.add(HSTU_TILES, 0)
        elif isinstance(module, hstu._Block):
            module.forward = partial(_hstu_block, module, counter)  # type: ignore[method-assign]
        elif isinstance(module, fuxi._Block):
            module._attend = partial(_semantic_attention, module, counter)  # type: ignore[method-assign]
        elif isinstance(module, MoL | Dot):
            module._scaled = partial(_scaled, module, counter)  # type: ignore[method-assign]


@contextmanager
def blocks_as_on_cuda(share: float) -> Iterator[None]:
    """Within, a loss that runs block by block on the CPU, with this share of the negatives, has as many blocks as on
    CUDA with all of them."""
    numbers, before = blockwise._NUMBERS, blockwise._NUMBERS["cpu"]
    numbers["cpu"] = int(numbers["cuda"] * share)
    try:
        yield
    finally:
        numbers["cpu"] = before


class NoiseOnCUDA(Noise):
    """Dropout in one kernel each way."""

    def relu_dropout(self, x: Tensor, rate: float, site: str, rows_R: Tensor) -> Tensor:
        return F.relu(x)

    def dropout(self, x: Tensor, rate: float, site: str, rows_R: Tensor, onto: Tensor | None = None) -> Tensor:
        if rate == 0 or len(x) == 0:
            return x if onto is None else onto + x
        return x * 0.5 if onto is None else torch.add(onto, x, alpha=0.5)


def fused_loss(stage: Similarity, counter: Counter, query: Side, item: Side, examples: Examples) -> Tensor | None:
    """Stands in for a stage's sampled softmax; None if CUDA has no kernel for it."""
    T = len(examples.target_T)
    if isinstance(stage, Dot) and stage.dim <= WIDEST_DOT:
        return _StandIn.apply(counter, DOT_LOSS, (), torch.float32, 0, *query, *item)
    if not isinstance(stage, MoL) or isinstance(stage, JointMoL):
        return None
    (_, U, C), I, H = query[0].shape, item[0].shape[1], len(stage.pair_parameters()[1])
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query[0].dtype
    if U * I > MOST_COMPONENTS or max(U, I) > MOST_OF_A_SIDE or H > MOST_HIDDEN or WIDEST_COMPONENT[dtype] < C:
        return None
    # Of each target's item, the backward has a gradient apart.
    scratch = T * (I * C + U * I)
    return _StandIn.apply(counter, MOL_LOSS, (), torch.float32, scratch, *query, *item, *stage.pair_parameters())


class _StandIn(torch.autograd.Function):
    """Zeros of a shape, for which kernels read the inputs; in backward kernels make their gradients, and meanwhile hold
    so many FP32 numbers of `scratch`."""

    @staticmethod
    def forward(
        ctx: Any,
        counter: Counter,
        kernels: tuple[int, int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scratch: int,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.counter, ctx.kernels, ctx.scratch = counter, kernels[1], scratch
        counter.add(kernels[0] - 1, sum(tensor.nbytes for tensor in inputs[1:]))
        return inputs[0].new_zeros(shape, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        scratch = gradient.new_empty(ctx.scratch, dtype=torch.float32)
        gradients = [torch.zeros_like(tensor) for tensor in ctx.saved_tensors]
        ctx.counter.add(ctx.kernels - len(gradients), gradient.nbytes + 2 * scratch.nbytes)
        return None, None, None, None, None, *gradients


def _projection(module: Projection, counter: Counter, x_RD: Tensor) -> Tensor:
    if module.gated is not None:
        both_RH = module.gated(x_RD)
        x_RD = _StandIn.apply(counter, NORM, (len(x_RD), both_RH.shape[1] // 2), both_RH.dtype, 0, both_RH)
    return module.output(x_RD).unflatten(-1, module.shape)


def _attention(module: sasrec.Attention, counter: Counter, q_TD: Tensor, x_TD: Tensor, packing: Packing) -> Tensor:
    T, D = x_TD.shape
    packed = torch.cat([module.query(q_TD), module.key_value(x_TD)], dim=1)
    if packing.shortest > 0 and D // module.heads % 8 == 0:
        attended_TD = _StandIn.apply(counter, FLASH, (T, D), packed.dtype, 0, packed)
    else:
        packed_T3Gd = packed.view(T, 3, module.heads, D // module.heads)
        attended_TD = sasrec.attend_padded(packed_T3Gd, packing).reshape(T, D)
    return module.output(attended_TD)


def _semantic_attention(module: fuxi._Block, counter: Counter, packed_T3Gd: Tensor, packing: Packing) -> Tensor:
    T, _, G, d = packed_T3Gd.shape
    bias_L = torch.zeros_like(module.position_L)
    return _StandIn.apply(counter, HSTU_ATTENTION, (T, G, d), packed_T3Gd.dtype, 0, packed_T3Gd, bias_L)


def _hstu_block(module: hstu._Block, counter: Counter, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_TD.dtype
    normed_TD = _StandIn.apply(counter, NORM, x_TD.shape, dtype, 0, x_TD)
    raw = F.linear(normed_TD, torch.cat([module.value_query_key.weight, module.gate.weight]))
    kernels, times = (HSTU_UNIT, ()) if module.time_K is None else (HSTU_UNIT_WITH_TIMES, (module.time_K,))
    return x_TD + module.output(
        _StandIn.apply(counter, kernels, x_TD.shape, raw.dtype, 0, raw, module.position_L, *times)
    )


def _scaled(module: MoL | Dot, counter: Counter, x: Tensor, scale: float) -> Tensor:
    normalize, dtype = module.normalize if isinstance(module, Dot) else module.config.normalize, torch.float32
    if isinstance(module, MoL):
        dtype = x.dtype
    return _StandIn.apply(counter, NORM, x.shape, dtype, 0, x) if normalize else x * scale
