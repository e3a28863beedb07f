"""HSTU (Zhai et al., "Actions Speak Louder than Words", 2024): hierarchical sequential transduction units.

Axes: T positions of all sequences, packed, L longest sequence, D width, G heads, d their width, K time buckets.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Packing
from ..config import HSTUConfig
from ..initialize import reset_layers
from ..noise import Noise
from .hstu_attention import TIME_BUCKETS, attend

EPSILON = 1e-6


class HSTU(nn.Module):
    """Packed item embeddings in, one query per position out."""

    def __init__(self, dim: int, config: HSTUConfig) -> None:
        super().__init__()
        self.scale, self.rate = math.sqrt(dim), config.dropout
        self.position_LD = nn.Parameter(torch.empty(config.max_length, dim))
        self.blocks = nn.ModuleList(_Block(dim, config, f"block{i}") for i in range(config.blocks))
        self.norm = nn.LayerNorm(dim, eps=EPSILON)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(self.position_LD, std=0.02, a=-0.04, b=0.04, generator=generator)
        reset_layers(self, generator)
        for block in self.blocks:
            for bias in (block.position_L, block.time_K):
                if bias is not None:
                    nn.init.trunc_normal_(bias, std=0.02, a=-0.04, b=0.04, generator=generator)

    def forward(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        """item_TD [T, D] -> query_TD [T, D]; position t of a sequence sees positions 0..t."""
        x_TD = item_TD * self.scale + self.position_LD.index_select(0, packing.position_T)
        if noise:
            x_TD = noise.dropout(x_TD, self.rate, "input", packing.row_T)
        for block in self.blocks:
            x_TD = block(x_TD, packing, noise)
        return self.norm(x_TD)


class _Block(nn.Module):
    """U, V, Q, K = silu(f1(norm(X))); Y = X + f2(norm(A V) * U), with A the pointwise attention of Q and K."""

    def __init__(self, dim: int, config: HSTUConfig, site: str) -> None:
        super().__init__()
        self.heads, self.rate, self.site, self.dim = config.heads, config.dropout, site, dim
        self.gate = nn.Linear(dim, dim, bias=False)
        self.value_query_key = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim)
        self.position_L = nn.Parameter(torch.empty(config.max_length))
        self.time_K = nn.Parameter(torch.empty(TIME_BUCKETS)) if config.times else None

    def forward(self, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        T, D = x_TD.shape
        normed_TD = F.layer_norm(x_TD, (D,), eps=EPSILON)
        packed = F.silu(self.value_query_key(normed_TD)).view(T, 3, self.heads, D // self.heads)
        attended_TD = attend(packed, self.position_L, self.time_K, packing).reshape(T, D)
        gated_TD = F.layer_norm(attended_TD, (D,), eps=EPSILON) * F.silu(self.gate(normed_TD))
        if noise:
            gated_TD = noise.dropout(gated_TD, self.rate, f"{self.site}.gated", packing.row_T)
        return x_TD + self.output(gated_TD)
