"""Configuration -> encoder."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from logitmix.common.mappings import classes_by_kind

from ..batch import Packing
from ..config import EncoderConfig
from ..noise import Noise
from .hstu import HSTU
from .pooled import Pooled
from .sasrec import SASRec


class Encoder(Protocol):
    """The user side: takes the events at the positions of histories, returns one query per position."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws initial weights, from the generator only."""

    def __call__(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        """[T, D] -> [T, D]; position t of a sequence sees its positions 0..t. No dropout without noise."""


MODULES: dict[str, Callable[[int, Any], Encoder]] = {"sasrec": SASRec, "hstu": HSTU, "pooled": Pooled}
"""By kind: the class, built from a width and a configuration of that kind."""
assert MODULES.keys() == classes_by_kind(EncoderConfig).keys()


def build_encoder(dim: int, config: EncoderConfig) -> Any:
    return MODULES[config.kind](dim, config)
