"""FuXi-alpha (Ye et al., "Scaling Recommendation Model with Feature Interaction Enhanced Transformer", 2025).

Axes: B sequences, T positions of all of them, packed, L longest sequence, D width, G heads, d their width, K time
buckets, C channels, H hidden width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Packing
from ..config import FuXiConfig
from ..linear import Linear
from ..noise import Noise
from .hstu_attention import TIME_BUCKETS, attend, time_buckets
from .stack import Stack

EPSILON = 1e-6


class _Block(nn.Module):
    """Adaptive multi-channel self-attention and a feed-forward network of two stages, with N for the RMS norm:

    U, V, Q, K = silu(N(X) W); A = [A_semantic V, A_position V, A_time V], of which A_semantic is HSTU's attention of Q
    and K without biases; O = X + (N(A) * U) W_0 + b_0; Y = O + (silu(N(O) W_1) * N(O) W_2) W_3.
    """

    def __init__(self, dim: int, config: FuXiConfig, site: str) -> None:
        super().__init__()
        self.heads, self.rate, self.site = config.heads, config.dropout, site
        channels, hidden = 3 if config.times else 2, config.expansion * dim
        self.gate = Linear(dim, channels * dim, bias=False)
        self.value_query_key = Linear(dim, 3 * dim, bias=False)
        self.merge = Linear(channels * dim, dim)
        self.up = Linear(dim, 2 * hidden, bias=False)
        self.down = Linear(hidden, dim, bias=False)
        self.position_L = nn.Parameter(torch.empty(config.max_length))
        self.time_K = nn.Parameter(torch.empty(TIME_BUCKETS)) if config.times else None

    def forward(self, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        T, D = x_TD.shape
        normed_TD = _norm(x_TD)
        packed = F.silu(self.value_query_key(normed_TD)).view(T, 3, self.heads, D // self.heads)
        semantic_TD = self._attend(packed, packing).reshape(T, D)
        others = attend_places(packed[:, 0].reshape(T, D), self.position_L, self.time_K, packing)
        gated = _norm(torch.cat([semantic_TD, *others], dim=1)) * F.silu(self.gate(normed_TD))
        x_TD = x_TD + self.merge(self._drop(gated, noise, "gated", packing))
        left, right = self.up(self._drop(_norm(x_TD), noise, "feed", packing)).chunk(2, dim=1)
        return x_TD + self.down(F.silu(left) * right)

    def _attend(self, packed_T3Gd: Tensor, packing: Packing) -> Tensor:
        """HSTU's attention without biases."""
        return attend(packed_T3Gd, torch.zeros_like(self.position_L), None, packing)

    def _drop(self, x: Tensor, noise: Noise | None, site: str, packing: Packing) -> Tensor:
        return noise.dropout(x, self.rate, f"{self.site}.{site}", packing.row_T) if noise else x


class FuXi(Stack):
    """Packed item embeddings in, one query per position out.

    A block is that of the authors' code (USTC-StarTeam/FuXi-alpha), dropout included. What is around it, the initial
    weights and the buckets of times are as in HSTU here. Without `times` there is no temporal channel.
    """

    block, epsilon = _Block, EPSILON


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON)


def attend_places(value_TD: Tensor, position_L: Tensor, time_K: Tensor | None, packing: Packing) -> list[Tensor]:
    """Position i of a sequence: sum over j <= i of position[i - j] v_j; and with `time_K` that of time[bucket(i, j)]
    v_j, whose buckets are those of HSTU. [T, D] -> [T, D] of each channel, in the type of `position_L`. IndexError for
    a sequence longer than L.

    Sequences of like lengths are padded together. The weights of times, [B, L, L], are kept for backward."""
    shapes = packing.groups or [(0, 0)]
    with torch.autocast(value_TD.device.type, enabled=False):

        def groups(of_T: Tensor) -> list[Tensor]:
            sizes = [B * L for B, L in shapes]
            padded = of_T.new_zeros(sum(sizes), *of_T.shape[1:]).index_copy(0, packing.grouped_T, of_T)
            return [part.unflatten(0, shape) for part, shape in zip(padded.split(sizes), shapes, strict=True)]

        values = groups(value_TD.to(position_L.dtype))
        place_L = torch.arange(packing.shape[1], device=value_TD.device)
        back_LL = (place_L[:, None] - place_L).clamp(min=0)
        weight_LL = _biases(position_L, back_LL)
        channels = [[weight_LL[:L, :L] @ of_BLD for of_BLD, (_, L) in zip(values, shapes, strict=True)]]
        if time_K is not None:
            assert packing.asked_T is not None and packing.time_T is not None
            asked, times = groups(packing.asked_T), groups(packing.time_T)
            channels.append(
                [
                    _biases(time_K, time_buckets(asked_BL[:, :, None] - time_BL[:, None])) @ of_BLD
                    for of_BLD, asked_BL, time_BL in zip(values, asked, times, strict=True)
                ]
            )
        return [
            torch.cat([of_BLD.flatten(0, 1) for of_BLD in channel]).index_select(0, packing.grouped_T)
            for channel in channels
        ]


def _biases(bias: Tensor, index: Tensor) -> Tensor:
    """[..., L, L]: bias[index] up to the diagonal."""
    return bias.index_select(0, index.flatten()).view(index.shape).tril()
