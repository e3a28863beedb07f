"""Configuration -> encoder."""

from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor

from ..batch import Packing
from ..config import EncoderConfig
from ..noise import Noise


class Encoder(Protocol):
    """The user side: takes the events at the positions of histories, returns one query per position."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws initial weights, from the generator only."""

    def __call__(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        """[T, D] -> [T, D]; position t of a sequence sees its positions 0..t. No dropout without noise."""


def build_encoder(dim: int, config: EncoderConfig) -> Any:
    return resolve_name(config.module)(dim, config)
