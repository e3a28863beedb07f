"""What a checkpoint holds of a model and its optimizers, by the names of its tensors."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from logitmix.modules.schema import Table
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.run.tensor_files import Kind, Rectangle, SavedTensors

State: TypeAlias = dict[str, ShardedTensor | Tensor]
"""Tensors of a checkpoint by name and by reference: loading into them in place restores the model."""


def state_of(model: ParallelModel, optimizer: torch.optim.Optimizer) -> State:
    """The content of a checkpoint."""
    of_tables = model.table_optimizers.state_dict()
    of_tower = {name: optimizer.state[parameter] for name, parameter in model.tower.named_parameters()}
    return {
        **weights_of(model.tower, model.shards()),
        **{f"table_optimizers/{name}/{key}": of for name, states in of_tables.items() for key, of in states.items()},
        **{f"dense_optimizer/{name}/{key}": of for name, states in of_tower.items() for key, of in states.items()},
        **evaluated(model),
    }


def evaluated(model: ParallelModel) -> State:
    """The weights that are evaluated."""
    if model.average is None:
        return weights_of(model.tower, model.shards())
    return weights_of(model.average.tower, model.average.tables, AVERAGE)


def weights_of(tower: Tower, tables: Mapping[str, ShardedTensor], prefix: str = "") -> State:
    of_tables: State = {f"{prefix}tables/{name}": table for name, table in tables.items()}
    return of_tables | {f"{prefix}tower/{name}": weight for name, weight in tower.state_dict().items()}


def kinds_in(state: Mapping[str, ShardedTensor | Tensor]) -> dict[str, Kind]:
    """Dtypes and whole shapes."""
    return {
        name: Kind(of.dtype, tuple(of.size() if isinstance(of, ShardedTensor) else of.shape))
        for name, of in state.items()
    }


def kind_of(table: Table, config: Config) -> Kind:
    fp16 = config.tables.of(table.name).precision == "fp16" and not config.train.ema
    return Kind(torch.float16 if fp16 else torch.float32, (table.rows, table.dim))


def pieces_of(of: ShardedTensor | Tensor) -> list[Rectangle]:
    """What this rank holds of a tensor."""
    if not isinstance(of, ShardedTensor):
        return [Rectangle((0,) * of.ndim, of.detach())]
    held = [Rectangle(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in of.local_shards()]
    return [piece for piece in held if piece.values.numel()]


def fill(state: Mapping[str, ShardedTensor | Tensor], tensors: SavedTensors) -> None:
    for name, of in state.items():
        for piece in pieces_of(of):
            tensors.read(name, piece.place, piece.values)


AVERAGE = "average/"


def only_for_training(config: Config) -> tuple[str, ...]:
    """How the names of tensors begin that only training needs."""
    return "table_optimizers/", "dense_optimizer/", *(("tables/", "tower/") if config.train.ema else ())
