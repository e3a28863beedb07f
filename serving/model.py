"""The trained tower for serving: loaded from its weights, and the names and shapes of an export's tensors.

Axes: R items, D width of the model.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from logitmix.modules.config import ModelConfig
from logitmix.modules.features import Embedded
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.towers import Sides, Tower

TABLE = "table"
"""Name of the items' vectors [R, D] beside the cache: histories are encoded with them."""
OWN_ROW = "own_row"
"""Name of the items' rows of the item table [R, W], used without the cache."""
IDS_ALONE = Schema.of_ids(1)


def trained_tower(config: ModelConfig, schema: Schema, weights: Mapping[str, Tensor]) -> Tower:
    """The tower with these weights, without a copy, on their device."""
    tower = _empty_tower(config, schema)
    tower.load_state_dict(weights, assign=True)
    return tower.requires_grad_(False).eval()


def item_cache(tower: Tower, items: Embedded) -> dict[str, Tensor]:
    """The items' vectors and sides of both stages by name: table, similarity.0, … and hindexer.0, each [R, ...]."""
    return {TABLE: items.vector_RD, **named(tower.item_sides(items))}


def named(sides: Sides) -> dict[str, Tensor]:
    """Both stages' sides by name: similarity.0, … and hindexer.0, each [R, ...]."""
    return {f"{stage}.{i}": part for stage, side in sides._asdict().items() for i, part in enumerate(side or ())}


def weight_shapes(config: ModelConfig, schema: Schema = IDS_ALONE) -> dict[str, list[int]]:
    """The weights of a tower of this configuration."""
    return {name: list(value.shape) for name, value in _empty_tower(config, schema).state_dict().items()}


def item_shapes(config: ModelConfig, count: int, schema: Schema = IDS_ALONE) -> dict[str, list[int]]:
    """Shapes of `item_cache`'s output for `count` items and a tower of this configuration."""
    # Computed for one real item: torch takes seconds to load what it needs to compute with shapes alone.
    zeros = {name: torch.zeros(shape) for name, shape in weight_shapes(config, schema).items()}
    tower, vector_1D = trained_tower(config, schema, zeros), torch.zeros(1, config.dim)
    with torch.inference_mode():
        cache = item_cache(tower, Embedded(vector_1D, [vector_1D] * (len(schema.of("item")) - 1)))
    return {name: [count, *value.shape[1:]] for name, value in cache.items()}


def row_shapes(config: ModelConfig, schema: Schema) -> dict[str, list[int]]:
    """By table, the shape of the rows in an export: all rows, but only the unknown item's row of the item table."""
    dims = schema.dims(config.dim)
    return {table.name: [1 if table.name == ITEM else table.rows, dims[table.name]] for table in schema.tables}


def _empty_tower(config: ModelConfig, schema: Schema) -> Tower:
    with torch.device("meta"):
        return Tower(config, schema)
