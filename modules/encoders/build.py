"""Configuration -> encoder."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from logitmix.common.plugins import module_of

from ..batch import Packing
from ..config import EncoderConfig
from ..noise import Noise


class Encoder(Protocol):
    """The user side: takes the events at the positions of histories, returns one query per position."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws initial weights, from the generator only."""

    def __call__(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        """[T, D] -> [T, D]; position t of a sequence sees its positions 0..t. No dropout without noise. An encoder that
        can compute the sequences' last positions alone, [B, D], has `last(item_TD, packing)`, too."""


def build_encoder(dim: int, config: EncoderConfig) -> Any:
    """ValueError for a plugin's that is none."""
    encoder = module_of(config)(dim, config)
    if not isinstance(encoder, nn.Module) or not hasattr(encoder, "reset_parameters"):
        raise ValueError(f"{type(encoder).__name__} of kind {config.kind} is no nn.Module with reset_parameters")
    return encoder
