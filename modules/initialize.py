"""Initial weights of the dense part."""

import torch
from torch import nn


def reset_layers(module: nn.Module, generator: torch.Generator) -> None:
    """Xavier for the matrices of all linear layers within, zero biases, unit norm weights; drawn in the modules'
    order."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
