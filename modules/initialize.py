"""Initial weights of the dense part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def initialized(build: Callable[[], M], generator: torch.Generator) -> M:
    """Returns the module that `build` makes on the CPU, with the initial weights of its `reset_parameters`. They depend
    on the generator alone: layers that `reset_parameters` leaves as they are, such as an nn.GRU, keep what their
    constructors drew, from the generator's seed.

    Raises ValueError that names a parameter or buffer of floating type that nothing has filled.
    """
    with torch.random.fork_rng(devices=[]), _marked_memory():
        torch.default_generator.manual_seed(generator.initial_seed())
        module = build()
        cast(Any, module).reset_parameters(generator)
    for name, weight in chain(module.named_parameters(), module.named_buffers()):
        # Buffers may hold infinity, as masks of attention do.
        if weight.isnan().any() or (isinstance(weight, nn.Parameter) and weight.isinf().any()):
            raise ValueError(f"{name} was not initialized: its module must fill it, or reset_parameters")
    return module


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Tensors made without values are full of NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def reset_layers(module: nn.Module, generator: torch.Generator) -> None:
    """Xavier for the matrices of all linear layers within, zero biases, unit norm weights; drawn in the modules' order.
    Other layers are left as their constructors made them."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
