"""What a checkpoint holds of a model and its optimizers, by the names of its tensors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from logitmix.modules.schema import Table
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config
from logitmix.trainer.parallel.growing import GrowingTable
from logitmix.trainer.parallel.row_map import Ints, Layout
from logitmix.trainer.run.tensor_files import Kind, Rectangle, SavedTensors

if TYPE_CHECKING:
    # As in checkpoint.py.
    from logitmix.trainer.parallel.parallelize import ParallelModel


class Part(NamedTuple):
    """This rank's rows of a tensor of this shape, from `first` on; each rank has others."""

    shape: tuple[int, ...]
    first: int
    rows: Tensor


Held: TypeAlias = ShardedTensor | Tensor | Part
State: TypeAlias = dict[str, Held]
"""Tensors of a checkpoint by name and by reference: loading into them in place restores the model."""


def state_of(model: "ParallelModel", optimizer: torch.optim.Optimizer) -> State:
    """The content of a checkpoint."""
    of_tables = model.table_optimizers.state_dict()
    of_tower = {name: optimizer.state[parameter] for name, parameter in model.tower.named_parameters()}
    return {
        **weights_of(model.tower, model.shards()),
        **{f"table_optimizers/{name}/{key}": of for name, states in of_tables.items() for key, of in states.items()},
        **{f"dense_optimizer/{name}/{key}": of for name, states in of_tower.items() for key, of in states.items()},
        **{
            f"{GROWING}{name}/{key}": of
            for name, table in model.growing.items()
            for key, of in _parts(table, table.state()).items()
        },
        **{f"{GROWING}{name}/steps": table.steps for name, table in model.growing.items()},
        **_averages(model),
        **_values(model),
    }


def evaluated(model: "ParallelModel") -> State:
    """The weights that are evaluated, and which value each row of growing tables has."""
    return (_averages(model) or weights_of(model.tower, model.shards())) | _values(model)


def _averages(model: "ParallelModel") -> State:
    return weights_of(model.average.tower, model.average.tables, AVERAGE) if model.average else {}


def _values(model: "ParallelModel") -> State:
    values: State = {}
    for name, table in model.growing.items():
        values |= _parts(table, {f"{VALUES}{name}": table.map.rows.id})
    return values


def _parts(table: GrowingTable, of_buckets: Mapping[str, Ints]) -> dict[str, Part]:
    """What this rank knows of a table's buckets, by name."""
    return {
        name: Part(_shape(table.map.layout), table.part[0], torch.from_numpy(of_BK))
        for name, of_BK in of_buckets.items()
    }


def _shape(layout: Layout) -> tuple[int, int]:
    return layout.buckets, layout.ways


def weights_of(tower: Tower, tables: Mapping[str, ShardedTensor], prefix: str = "") -> State:
    of_tables: State = {f"{prefix}tables/{name}": table for name, table in tables.items()}
    return of_tables | {f"{prefix}tower/{name}": weight for name, weight in tower.state_dict().items()}


def kinds_in(state: Mapping[str, Held]) -> dict[str, Kind]:
    """Dtypes and whole shapes."""
    return {
        name: Kind(
            of.rows.dtype if isinstance(of, Part) else of.dtype,
            tuple(of.size() if isinstance(of, ShardedTensor) else of.shape),
        )
        for name, of in state.items()
    }


def kind_of(table: Table, config: Config) -> Kind:
    fp16 = config.tables.of(table.name).precision == "fp16" and not config.train.ema
    return Kind(torch.float16 if fp16 else torch.float32, (table.rows, table.dim))


def kind_of_values(table: Table) -> Kind:
    """Of a table whose rows pass from value to value: the ids that have its rows, by bucket."""
    return Kind(torch.int64, _shape(Layout(table.rows - 1)))


def pieces_of(of: Held) -> list[Rectangle]:
    """What this rank holds of a tensor."""
    if isinstance(of, Tensor) and not isinstance(of, ShardedTensor):
        return [Rectangle((0,) * of.ndim, of.detach())]
    if isinstance(of, Part):
        held = [Rectangle((of.first, *[0] * (of.rows.ndim - 1)), of.rows)]
    else:
        held = [Rectangle(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in of.local_shards()]
    return [piece for piece in held if piece.values.numel()]


def fill(state: Mapping[str, Held], tensors: SavedTensors) -> None:
    for name, of in state.items():
        for piece in pieces_of(of):
            tensors.read(name, piece.place, piece.values)


AVERAGE = "average/"
VALUES, GROWING = "values/", "growing/"
"""Of tables whose rows pass from value to value: the ids that have the rows, and what training alone needs."""


def only_for_training(config: Config) -> tuple[str, ...]:
    """How the names of tensors begin that only training needs."""
    return "table_optimizers/", "dense_optimizer/", GROWING, *(("tables/", "tower/") if config.train.ema else ())
