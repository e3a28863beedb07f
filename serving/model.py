"""The trained tower as serving needs it: from its weights, and by the names and shapes of what an export holds.

Axes: X items in the corpus, D encoder width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from logitmix.modules.config import ModelConfig
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.towers import Tower

TABLE = "table"
"""Name of the item table [X, D] beside the cache: histories are encoded with its rows."""


def trained_tower(config: ModelConfig, weights: Mapping[str, Tensor]) -> Tower:
    """The tower with these weights as they are, on the device that they are on."""
    tower = _empty_tower(config)
    tower.load_state_dict(weights, assign=True)
    return tower.requires_grad_(False).eval()


def item_cache(tower: Tower, row_XD: Tensor) -> dict[str, Tensor]:
    """The items' side of both stages, by name: similarity.0, … and hindexer.0, each [X, ...]."""
    sides = tower.item_sides(tower.item_tower({ITEM: row_XD}))._asdict()
    return {f"{stage}.{i}": part for stage, side in sides.items() for i, part in enumerate(side or ())}


def weight_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """The weights of a tower of this configuration."""
    return {name: list(value.shape) for name, value in _empty_tower(config).state_dict().items()}


def item_shapes(config: ModelConfig, num_items: int) -> dict[str, list[int]]:
    """What `item_cache` gives for a tower of this configuration, and the table."""
    row_XD = torch.empty(num_items, config.dim, device="meta")
    cache = item_cache(_empty_tower(config), row_XD)
    return {name: list(value.shape) for name, value in {TABLE: row_XD, **cache}.items()}


def _empty_tower(config: ModelConfig) -> Tower:
    with torch.device("meta"):
        return Tower(config, Schema.of_ids(1))
