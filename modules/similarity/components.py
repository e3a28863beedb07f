"""Vectors of queries or items as components: several vectors of one smaller width, for MoL and DeepFM.

Axes: R rows (queries or items), D width, K components, C their width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..features import AdaptiveCompression
from ..linear import Linear


class Projection(nn.Module):
    """D -> K C: a gated linear unit and a linear layer, or without hidden units the linear layer alone."""

    def __init__(self, dim: int, hidden: int, components: int, width: int) -> None:
        super().__init__()
        self.shape = (components, width)
        self.gated = Linear(dim, 2 * hidden) if hidden else None
        self.output = Linear(hidden or dim, components * width)

    def forward(self, x_RD: Tensor) -> Tensor:
        """[R, D] -> [R, K, C]."""
        if self.gated is not None:
            value, gate = self.gated(x_RD).chunk(2, dim=-1)
            x_RD = value * F.silu(gate)
        return self.output(x_RD).unflatten(-1, self.shape)


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
def begin_alike(query: Projection, item: Projection) -> None:
    """Call after the random initialization of the layers: component c of the query and component c of the item begin
    as the same map of the width D, so that queries and items are compared in one space. The map is nearly linear,
    because the gated units begin open."""
    paired = min(query.shape[0], item.shape[0]) * item.shape[1]
    for projection in (query, item):
        if projection.gated is not None:
            projection.gated.bias[projection.output.in_features :] = 1.0
    if query.gated is not None and item.gated is not None:
        query.gated.weight.copy_(item.gated.weight)
    elif query.gated is not None:
        # The linear part of the query's map.
        value_HD = query.gated.weight[: query.output.in_features]
        item.output.weight[:paired] = query.output.weight[:paired] @ value_HD * F.silu(torch.ones(()))
        return
    query.output.weight[:paired] = item.output.weight[:paired]
