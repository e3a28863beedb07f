"""Dot product of query and item, the paper's «Dot product» (Equation 2).

Axes: T queries, N items, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..noise import Noise


class Dot(nn.Module):
    """Cosine divided by a temperature, or the plain dot product where `normalize` is off."""

    def __init__(self, normalize: bool, temperature: float) -> None:
        super().__init__()
        self.normalize, self.temperature = normalize, temperature

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None) -> tuple[Tensor, ...]:
        """The query's side of the similarity, computed once per query: a tuple of tensors [T, ...]."""
        if self.normalize:
            query_TD = l2_normalize(query_TD) / self.temperature
        return (query_TD,)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None) -> tuple[Tensor, ...]:
        """The item's side, which serving caches: a tuple of tensors [N, ...]."""
        return (l2_normalize(item_ND) if self.normalize else item_ND,)

    def all_pairs(self, query: tuple[Tensor, ...], item: tuple[Tensor, ...], dropout: object = None) -> Tensor:
        """phi(x, u) of each query with each item, FP32 [T, N]."""
        # Not in BF16, where cosines over a temperature of 0.05 would be off by up to 0.06.
        with torch.autocast(query[0].device.type, enabled=False):
            return torch.mm(query[0].float(), item[0].float().t())

    def pairs(self, query: tuple[Tensor, ...], item: tuple[Tensor, ...], dropout: object = None) -> Tensor:
        """phi(x, u) of query t with item t, FP32 [T]."""
        return (query[0].float() * item[0].float()).sum(-1)

    def pair_parameters(self) -> list[nn.Parameter]:
        """The parameters that all_pairs and pairs use."""
        return []


def l2_normalize(x: Tensor) -> Tensor:
    """x over its L2 norm along the last axis, in FP32, zero where x is zero."""
    return F.normalize(x.float(), dim=-1, eps=1e-6)
