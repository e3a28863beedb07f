"""The tower's weights as one parameter, of which the ranks sum one gradient.

On CUDA a step of a small model takes as long as its kernels' launches. With torch's DistributedDataParallel, autocast,
the gradients' casts, their copies into buckets and their norms take five launches a weight, for a few hundred numbers
each. Here all weights are cast in one launch, and their gradients are gathered in three. The loss and the gradients are
the same, bit for bit.

Axes: P numbers of all weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from logitmix.modules.batch import Batch
from logitmix.modules.model import SampledLosses
from logitmix.modules.transfer import copy_all

_ALIGNED = 64
"""A weight begins at a multiple of so many numbers: products read 16 bytes at a time, in BF16 too."""


class _Part(NamedTuple):
    """One weight's place among all, and whether autocast would cast it."""

    name: str
    start: int
    shape: torch.Size
    strides: tuple[int, ...]
    cast: bool

    def of(self, flat_P: Tensor) -> Tensor:
        """Returns a view, made by one operation, as there are many in a step."""
        return flat_P.as_strided(self.shape, self.strides, self.start)


class FlatLosses(nn.Module):
    """A tower's losses, of which the one parameter has all weights. The tower's own parameters become parts of its
    memory, so whoever moves, loads or reads them does so as before; their gradients are parts of its gradient.

    Under autocast, weights of linear layers are cast together. Those that score pairs are not: their gradients are sums
    of many small ones, in FP32.
    """

    def __init__(self, losses: SampledLosses, group: dist.ProcessGroup, wire: torch.dtype = torch.float32) -> None:
        """`group` averages the gradients, as numbers of type `wire`; nothing else runs in it, so that its collectives
        run beside others. All weights are FP32 and on one device."""
        super().__init__()
        # In a tuple, because its parameters are no others than the flat one.
        self._held, self.group, self.wire = (losses,), group, wire
        self.parts = _parts(losses)
        last = self.parts[-1]
        first = next(losses.parameters())
        self.flat_P = nn.Parameter(first.new_zeros(_aligned(last.start + last.shape.numel())))
        self._ranks = torch.full((), float(group.size()), device=first.device)
        """What the loss is multiplied by, for a mean over the ranks."""
        self._pending: list[tuple[dist.Work, Tensor]] = []
        self._summed = first.new_zeros(len(self.flat_P) + group.size() + 2)
        """What the ranks sum: the gradient [P], and `checks`. Its memory is that of every step, so that its parts are
        made once."""
        self.gradient_P, self.checks = self._summed[: len(self.flat_P)], self._summed[len(self.flat_P) :]
        """`checks`, after `check`: the gradient's norm, of each rank a number that is finite if its loss and its rows'
        gradients are, and the sum of all these."""
        self._gradients = [part.of(self.gradient_P) for part in self.parts]
        weights = dict(losses.named_parameters())
        with torch.no_grad():
            for part in self.parts:
                of_flat = part.of(self.flat_P.detach())
                of_flat.copy_(weights[part.name])
                weights[part.name].data = of_flat
        self.weights = [weights[part.name] for part in self.parts]
        self._places = _places(losses, self.weights)

    @property
    def losses(self) -> SampledLosses:
        return self._held[0]

    def forward(self, rows: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        device = self.flat_P.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        parts = _Divided.apply(self.flat_P, self.parts, dtype, self._summed, self._gradients)
        # What torch's functional_call does, which looks through all modules for the places each time.
        self._place(parts)
        try:
            losses: dict[str, Tensor] = self.losses(rows, batch)
            return losses
        finally:
            self._place(self.weights)

    def _place(self, weights: Sequence[Tensor]) -> None:
        for places, weight in zip(self._places, weights, strict=True):
            for parameters, name in places:
                parameters[name] = weight

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of all weights on this rank."""
        loss.backward(self._ranks)
        for weight, gradient in zip(self.weights, self._gradients, strict=True):
            weight.grad = gradient

    def share(self, loss: Tensor, rows: Iterable[Tensor]) -> None:
        """Begins the gradients' mean over the ranks, and has all ranks know whether this one's loss and its gradients
        of `rows` are finite."""
        norms = torch._foreach_norm([loss.detach(), *(row.grad for row in rows if row.grad is not None)])
        torch.sum(torch.stack(norms), 0, out=self.checks[1 + self.group.rank()])
        if self.group.size() > 1:
            sent = self._summed.mul_(1 / self.group.size()).to(self.wire)
            self._pending.append((dist.all_reduce(sent, group=self.group, async_op=True), sent))

    def gradient(self) -> Tensor:
        """Returns the gradient [P], the mean of the ranks'."""
        while self._pending:
            work, summed = self._pending.pop()
            work.wait()
            if summed is not self._summed:
                self._summed.copy_(summed)
        return self.gradient_P

    def check(self) -> Tensor:
        """Returns whether the loss and all gradients of all ranks are finite, a bool scalar on the device: the same on
        every rank. Fills `checks`."""
        torch.linalg.vector_norm(self.gradient(), out=self.checks[0])
        return torch.sum(self.checks[:-1], 0, out=self.checks[-1]) < inf


def _parts(losses: SampledLosses) -> list[_Part]:
    of_pairs = {
        id(weight)
        for stage in (losses.tower.similarity, losses.tower.hindexer)
        if stage is not None
        for weight in stage.pair_parameters()
    }
    linear = {
        id(weight) for module in losses.modules() if isinstance(module, nn.Linear) for weight in module.parameters()
    }
    weights = dict(losses.named_parameters())
    cast = {name: id(weight) in linear - of_pairs for name, weight in weights.items()}
    parts, start = [], 0
    for name in sorted(weights, key=lambda name: not cast[name]):
        weight = weights[name]
        strides = torch.empty(weight.shape, device="meta").stride()
        parts.append(_Part(name, start, weight.shape, strides, cast[name]))
        start = _aligned(start + weight.numel())
    return parts


def _places(losses: SampledLosses, weights: Sequence[Tensor]) -> list[list[tuple[dict[str, Any], str]]]:
    """Returns for each weight the modules' parameters that it is one of, and its name there."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {id(weight): [] for weight in weights}
    for module in losses.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                found[id(weight)].append((module._parameters, name))
    return [found[id(weight)] for weight in weights]


def _aligned(numbers: int) -> int:
    return -(-numbers // _ALIGNED) * _ALIGNED


class _Divided(torch.autograd.Function):
    """The parts of all weights, those to cast in `dtype`. Their gradients go to `gradients`, parts of the memory
    `summed`, and not to the flat parameter's: autograd would copy them."""

    @staticmethod
    def forward(
        ctx: Any,
        flat_P: Tensor,
        parts: Sequence[_Part],
        dtype: torch.dtype | None,
        summed: Tensor,
        gradients: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.summed, ctx.gradients = summed, gradients
        full = flat_P.detach()
        end = max((part.start + _aligned(part.shape.numel()) for part in parts if part.cast), default=0)
        low = full if dtype is None else full[:end].to(dtype)
        return tuple(part.of(low if part.cast else full) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.summed.zero_()
        copy_all((part, of) for part, of in zip(ctx.gradients, gradients, strict=True) if of is not None)
        return (None,) * 5
