"""Configuration -> encoder."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from logitmix.common.mappings import classes_by_kind

from ..batch import Packing
from ..config import EncoderConfig
from ..noise import Noise
from .pooled import Pooled
from .sasrec import SASRec


class Encoder(Protocol):
    """The user side: what happened at the positions of histories in, one query per position out."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initial weights, from the generator alone."""

    def __call__(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        """[T, D] -> [T, D]; position t of a sequence sees its positions 0..t. Without noise nothing is dropped."""


MODULES: dict[str, Callable[[int, Any], Encoder]] = {"sasrec": SASRec, "pooled": Pooled}
"""By kind: what is made of a width and a configuration of that kind."""
assert MODULES.keys() == classes_by_kind(EncoderConfig).keys()


def build_encoder(dim: int, config: EncoderConfig) -> Any:
    return MODULES[config.kind](dim, config)
