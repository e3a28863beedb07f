"""An encoder: a gated recurrent unit over each history.

logitmix train demo-mol --import gru.py --model.encoder.kind gru
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logitmix.modules.batch import Packing
from logitmix.modules.config import ENCODERS
from logitmix.modules.initialize import reset_layers
from logitmix.modules.noise import Noise


class GRU(nn.Module):
    def __init__(self, dim: int, config: "GRUConfig") -> None:
        super().__init__()
        self.rate, self.gru = config.dropout, nn.GRU(dim, dim, batch_first=True)

    def reset_parameters(self, generator: torch.Generator) -> None:
        reset_layers(self, generator)

    def forward(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        if noise:
            item_TD = noise.dropout(item_TD, self.rate, "input", packing.row_T)
        B, L = (max(1, size) for size in packing.shape)  # a rank's part of a batch may be empty
        padded = item_TD.new_zeros(B * L, item_TD.shape[1]).index_copy(0, packing.padded_T, item_TD)
        query_BLD, _ = self.gru(padded.unflatten(0, (B, L)))
        return query_BLD.flatten(0, 1).index_select(0, packing.padded_T)


@dataclass(frozen=True)
class GRUConfig:
    """The user side, of kind "gru": a gated recurrent unit."""

    module = GRU
    kind: str = "gru"
    dropout: float = 0.2
    """Rate on the input."""
    max_length: int = 200
    """L: history positions that the encoder sees."""

    def require_width(self, dim: int) -> None:
        """Any width will do."""


ENCODERS["gru"] = GRUConfig
