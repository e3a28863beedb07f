"""A user side without a sequence model: the mean of the history so far (the paper's non-sequential setting).

Axes: B sequences, T positions of all of them, packed, L longest sequence, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Packing
from ..config import PooledConfig
from ..initialize import reset_layers
from ..linear import Linear
from ..noise import Noise


class Pooled(nn.Module):
    """Packed item embeddings in, one query per position out: the mean of a sequence's items up to the position, through
    a two-layer MLP."""

    def __init__(self, dim: int, config: PooledConfig) -> None:
        super().__init__()
        self.rate = config.dropout
        self.hidden = Linear(dim, config.hidden)
        self.output = Linear(config.hidden, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-8)

    def reset_parameters(self, generator: torch.Generator) -> None:
        reset_layers(self, generator)

    def forward(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        """item_TD [T, D] -> query_TD [T, D]; position t of a sequence sees positions 0..t."""
        mean_TD = running_mean(item_TD, packing)
        if noise:
            mean_TD = noise.dropout(mean_TD, self.rate, "input", packing.row_T)
        hidden_TF = F.silu(self.hidden(mean_TD))
        if noise:
            hidden_TF = noise.dropout(hidden_TF, self.rate, "hidden", packing.row_T)
        return self.norm(mean_TD + self.output(hidden_TF))


def running_mean(x_TD: Tensor, packing: Packing) -> Tensor:
    """Mean over the positions 0..t of each sequence, FP32 [T, D]."""
    B, L = packing.shape
    x_TD = x_TD.float()
    padded = x_TD.new_zeros(B * L, x_TD.shape[1]).index_copy(0, packing.padded_T, x_TD)
    # Per sequence: the rounding of sums over the whole batch would depend on the sequences before.
    summed = padded.unflatten(0, (B, L)).cumsum(1).flatten(0, 1).index_select(0, packing.padded_T)
    return summed / (packing.position_T + 1)[:, None]
