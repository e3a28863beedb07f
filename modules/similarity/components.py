"""Vectors of queries or items as components: several vectors of one smaller width, for MoL and DeepFM.

Axes: R rows (queries or items), D width, K components, C their width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logitmix.common.compiled import has_triton

from ..features import AdaptiveCompression
from ..linear import Linear


class Projection(nn.Module):
    """D -> K C: a gated linear unit and a linear layer, or without hidden units the linear layer alone."""

    def __init__(self, dim: int, hidden: int, components: int, width: int) -> None:
        super().__init__()
        self.dim, self.shape = dim, (components, width)
        self.gated = Linear(dim, 2 * hidden) if hidden else None
        self.output = Linear(hidden or dim, components * width)

    def forward(self, x_RD: Tensor) -> Tensor:
        """[R, D] -> [R, K, C]."""
        if self.gated is not None:
            x_RD = _gated(self.gated(x_RD))
        return self.output(x_RD).unflatten(-1, self.shape)


def _gated(both_RH: Tensor) -> Tensor:
    """[R, 2 H] of values and gates -> [R, H]."""
    if both_RH.is_cuda and has_triton() and both_RH.dtype in (torch.float32, torch.bfloat16):
        # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
        from . import gated_triton

        return gated_triton.gated(both_RH)
    value, gate = both_RH.chunk(2, dim=-1)
    return value * F.silu(gate)


class Compressed(nn.Module):
    """The K components of the whole vector and one of each feature, compressed to K (adaptive embedding compression,
    section 3.1.1)."""

    def __init__(self, dim: int, groups: int, kept: int, width: int, hidden: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(Linear(dim, width) for _ in range(groups))
        self.compression = AdaptiveCompression(kept + groups, kept, width, hidden)

    def forward(self, whole_RKC: Tensor, groups: Sequence[Tensor]) -> Tensor:
        of_groups = [map_(group_RD) for map_, group_RD in zip(self.maps, groups, strict=True)]
        compressed: Tensor = self.compression(torch.cat([whole_RKC, torch.stack(of_groups, 1)], 1))
        return compressed


@torch.no_grad()
def begin_as_dot_product(query: Projection, item: Projection, generator: torch.Generator) -> None:
    """Call after the random initialization of the layers: the products of component c of the query with component c of
    the item begin so that their sum is the dot product of query and item, and each is about an equal share of it.

    Both sides' components c begin as the same linear map: C rows of random rotations of the width D, one rotation after
    the other. The gated units begin as constants, so a map through hidden units is linear, too. The sum is exact where
    the rows are whole rotations (K C is a multiple of D) and there are at least D hidden units. With L2 norms of the
    components, that holds of the cosine only where each is a whole rotation (C = D).
    """
    (K, C), D = min(query.shape, item.shape), query.dim
    rotations = [nn.init.orthogonal_(torch.empty(D, D), generator=generator) for _ in range(0, K * C, D)]
    maps = torch.cat(rotations)[: K * C] * math.sqrt(D / (K * C))
    for projection in (query, item):
        weight = projection.output.weight[: K * C]
        if projection.gated is None:
            weight.copy_(maps)
            continue
        value, gate = projection.gated.weight.chunk(2)
        gate.zero_()
        projection.gated.bias.chunk(2)[1].fill_(1.0)
        # Orthonormal columns, so that their transpose inverts them.
        nn.init.orthogonal_(value, generator=generator)
        weight += (maps / F.silu(torch.ones(())) - weight @ value) @ value.t()
