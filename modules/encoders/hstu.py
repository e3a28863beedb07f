"""HSTU (Zhai et al., "Actions Speak Louder than Words", 2024): hierarchical sequential transduction units.

Axes: T positions of all sequences, packed, L longest sequence, D width, G heads, d their width, K time buckets.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logitmix.common.compiled import has_triton

from ..batch import Packing
from ..config import HSTUConfig
from ..linear import Linear
from ..noise import Noise, derive_key, threshold
from .hstu_attention import TIME_BUCKETS, attend
from .stack import Stack

EPSILON = 1e-6


class _Block(nn.Module):
    """U, V, Q, K = silu(f1(norm(X))); Y = X + f2(norm(A V) * U), with A the pointwise attention of Q and K."""

    def __init__(self, dim: int, config: HSTUConfig, site: str) -> None:
        super().__init__()
        self.heads, self.rate, self.site = config.heads, config.dropout, site
        self.gate = Linear(dim, dim, bias=False)
        self.value_query_key = Linear(dim, 3 * dim, bias=False)
        self.output = Linear(dim, dim)
        self.position_L = nn.Parameter(torch.empty(config.max_length))
        self.time_K = nn.Parameter(torch.empty(TIME_BUCKETS)) if config.times else None

    def forward(self, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        T, D = x_TD.shape
        if x_TD.is_cuda and has_triton() and (fused_TD := _fused(self, x_TD, packing, noise)) is not None:
            return fused_TD
        normed_TD = F.layer_norm(x_TD, (D,), eps=EPSILON)
        packed = F.silu(self.value_query_key(normed_TD)).view(T, 3, self.heads, D // self.heads)
        attended_TD = attend(packed, self.position_L, self.time_K, packing).reshape(T, D)
        gated_TD = F.layer_norm(attended_TD, (D,), eps=EPSILON) * F.silu(self.gate(normed_TD))
        if noise:
            gated_TD = noise.dropout(gated_TD, self.rate, f"{self.site}.gated", packing.row_T)
        return x_TD + self.output(gated_TD)


class HSTU(Stack):
    """Packed item embeddings in, one query per position out.

    A block is that of the authors' code (facebookresearch/generative-recommenders), dropout included. What is around it
    is as in SASRec here, so that only blocks differ: matrices start from Xavier's distribution and positions with a
    deviation of 0.02 (theirs: 0.02 and 1 / sqrt(D)), and the last norm has learned weights (theirs has none, or only
    divides by the length). Gaps of time have two buckets for each power of 2, read from their bits (theirs 2.3, from a
    logarithm in FP32, which processors round differently).
    """

    block, epsilon = _Block, EPSILON


def _fused(block: _Block, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor | None:
    """The block on CUDA, in a third of the launches; None where its kernels are for other sizes."""
    # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
    from . import hstu_unit_triton

    T, D = x_TD.shape
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_TD.dtype
    if x_TD.dtype != torch.float32 or not hstu_unit_triton.covers(D, D // block.heads, dtype):
        return None
    normed_TD, past_TD = hstu_unit_triton.normed(x_TD, EPSILON, dtype)
    weight = torch.cat([block.value_query_key.weight, block.gate.weight])
    raw = F.linear(normed_TD, weight).view(T, 4, block.heads, D // block.heads)
    mask = (derive_key(noise.key, f"{block.site}.gated"), threshold(block.rate)) if noise else None
    gated_TD = hstu_unit_triton.unit(raw, block.position_L, block.time_K, packing, EPSILON, mask)
    return past_TD + block.output(gated_TD)
