"""Dot product of query and item, the two-tower setup of section 2.1.

Axes: T queries, N items, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitmix.common.compiled import has_triton

from ..config import DotConfig
from ..losses.blockwise import Examples, Side
from ..losses.dot_loss import dot_sampled_softmax
from ..noise import Noise
from .base import PairDropout, Similarity


class Dot(Similarity):
    """Cosine, or the plain dot product where `normalize` is off, divided by a temperature."""

    def __init__(self, dim: int, config: DotConfig) -> None:
        super().__init__()
        self.dim, self.normalize, self.temperature = dim, config.normalize, config.temperature

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        return (self._scaled(query_TD, 1 / self.temperature),)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        return (self._scaled(item_ND, 1.0),)

    def _scaled(self, x: Tensor, scale: float) -> Tensor:
        if self.normalize:
            return l2_normalize(x, scale)
        return x if scale == 1.0 else x * scale

    def all_pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        # Not in BF16, where cosines over a temperature of 0.05 would be off by up to 0.06.
        with torch.autocast(query[0].device.type, enabled=False):
            return torch.mm(query[0].float(), item[0].float().t())

    def pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        return (query[0].float() * item[0].float()).sum(-1)

    def sampled_softmax(self, query: Side, item: Side, examples: Examples, noise: Noise | None = None) -> Tensor:
        return dot_sampled_softmax(query[0], item[0], examples)


def l2_normalize(x: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns x scaled to length `scale` along the last axis, computed in FP32; zero where x is zero (F.normalize with
    an eps of 1e-6, in fewer passes over memory and keeping only x for the backward)."""
    if x.is_cuda and has_triton():
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from . import normalize_triton

        if normalize_triton.covers(x, dtype):
            return normalize_triton.l2_normalize(x, scale, dtype, _EPS)
    return _Normalize.apply(x, scale, dtype)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        ctx.save_for_backward(x, norm)
        ctx.scale = scale
        return (x * (scale / norm.clamp(min=_EPS))).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, norm = ctx.saved_tensors
        along = (gradient.float() * x).sum(-1, keepdim=True) / norm.square()
        # Below eps, x is only scaled.
        across = gradient - x * along.where(norm > _EPS, 0.0)
        return across.mul_(ctx.scale / norm.clamp(min=_EPS)).to(x.dtype), None, None


_EPS = 1e-6
