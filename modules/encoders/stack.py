"""What sequence models share: learned positions, blocks one after the other, a norm.

Axes: B sequences, T positions of all of them, packed, L longest sequence, D width.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from logitmix.common.plugins import module_of

from ..batch import Packing
from ..config import AttentionConfig, EncoderConfig
from ..initialize import reset_layers
from ..noise import Noise


class Stack(nn.Module):
    """Packed item embeddings in, one query per position out. Each block takes ([T, D], packing, noise); parameters of
    its own, outside its layers, are biases of attention. One that can compute its last positions alone has `last`."""

    block: Callable[[int, Any, str], nn.Module]
    """A block's class: made from the width, the settings and its name."""
    epsilon: float
    """Of the last norm."""

    def __init__(self, dim: int, config: AttentionConfig) -> None:
        super().__init__()
        self.scale, self.rate, self.history_rate = math.sqrt(dim), config.dropout, config.history_dropout
        self.position_LD = nn.Parameter(torch.empty(config.max_length, dim))
        self.blocks = nn.ModuleList(type(self).block(dim, config, f"block{i}") for i in range(config.blocks))
        self.norm = nn.LayerNorm(dim, eps=self.epsilon)

    def reset_parameters(self, generator: torch.Generator) -> None:
        _reset_bias(self.position_LD, generator)
        reset_layers(self, generator)
        for block in self.blocks:
            for bias in block.parameters(recurse=False):
                _reset_bias(bias, generator)

    def forward(self, item_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        """item_TD [T, D] -> query_TD [T, D]; position t of a sequence sees positions 0..t."""
        if noise:
            item_TD = noise.without_rows(item_TD, self.history_rate, "history", packing.row_T)
        x_TD = self._placed(item_TD, packing)
        if noise:
            x_TD = noise.dropout(x_TD, self.rate, "input", packing.row_T)
        for block in self.blocks:
            x_TD = block(x_TD, packing, noise)
        return self.norm(x_TD)

    def last(self, item_TD: Tensor, packing: Packing) -> Tensor:
        """The last positions [B, D] of `forward` without noise."""
        *others, final = self.blocks
        x_TD = self._placed(item_TD, packing)
        for block in others:
            x_TD = block(x_TD, packing, None)
        alone = getattr(final, "last", None)
        return self.norm(alone(x_TD, packing) if alone else final(x_TD, packing, None)[packing.last_B])

    def _placed(self, item_TD: Tensor, packing: Packing) -> Tensor:
        position_TD = self.position_LD.index_select(0, packing.position_T)
        if item_TD.is_cuda:
            # One kernel.
            return torch.add(position_TD, item_TD, alpha=self.scale)
        return item_TD * self.scale + position_TD


def _reset_bias(bias: Tensor, generator: torch.Generator) -> None:
    nn.init.trunc_normal_(bias, std=0.02, a=-0.04, b=0.04, generator=generator)


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
