"""Which rank holds which rows and columns of which table.

TorchRec's planner places all tables together. If `tables.sharding` is auto, it chooses between row_wise and table_wise
for each table. But a table larger than one rank's share of all bytes is always row_wise, because a rank that held it
whole would hold most of everything. column_wise is used only on request: it sends each id to all owners of its columns,
and the FP8 wire gives each shard's columns their own scale. A table with too few rows for all ranks is table_wise
instead of row_wise. Pooled tables can be divided by hosts, on request (by_host.py).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import _remote_device
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ParameterSharding

from logitmix.comm.process_group import Ranks
from logitmix.common.mappings import first_line
from logitmix.modules.embeddings import EmbeddingTable, embedding_collections, own_name, torchrec_name
from logitmix.trainer.config import BY_HOST, Config, TablesConfig, TableSettings
from logitmix.trainer.parallel.by_host import plan_by_host
from logitmix.trainer.parallel.optimizer import set_fused_optimizer, state_per_row, table_kernel, table_name
from logitmix.trainer.parallel.sharded_rows import ShardPlace

_IDS = 10_000
"""Rows that a batch is assumed to ask for; all rows of a smaller table."""


@dataclass(frozen=True)
class TablePlan:
    """Where a table is placed and how it is trained."""

    rows: int
    dim: int
    sharding: str
    optimizer: str
    precision: str
    pooled: bool
    bytes: int
    """Bytes of its rows, their optimizer's state and their moving average."""
    shards: tuple[ShardPlace, ...]


Plans = Mapping[str, ParameterSharding]
"""TorchRec's plan of each table."""


@dataclass(frozen=True)
class Devices:
    """What the tables are placed on, a device for each rank."""

    world_size: int
    per_host: int
    kind: str
    """cpu or cuda."""
    bytes: int | None = None
    """Memory of a GPU."""

    def of_group(self, tables: TablesConfig) -> "Devices":
        """Those that hold all tables together. ValueError where the groups would not be equal."""
        size = tables.ranks_of_group(self.world_size)
        return replace(self, world_size=size, per_host=math.gcd(size, self.per_host))

    @staticmethod
    def of(ranks: Ranks) -> "Devices":
        """Those of a job."""
        memory = torch.cuda.get_device_properties(ranks.device).total_memory if ranks.device.type == "cuda" else None
        return Devices(ranks.world_size, get_local_size(ranks.world_size), ranks.device.type, memory)


def plan_tables(
    tables: Sequence[EmbeddingTable], config: Config, devices: Devices, group: dist.ProcessGroup | None = None
) -> Plans:
    """The planner's choice within the configuration's limits, for the ranks of one group of tables.group_size, which
    are numbered from 0. With a process group, collective: rank 0's choice, on all ranks. Raises ValueError if the
    devices have no room.
    """
    settings, devices = config.tables, devices.of_group(config.tables)
    _require_room(tables, config, devices)
    plans: dict[str, ParameterSharding] = plan_by_host(
        [table for table in tables if settings.of(table.name).sharding in BY_HOST],
        {table.name: settings.of(table.name).sharding for table in tables},
        {table.name: _bytes(table, settings.of(table.name)) for table in tables},
        devices.world_size // devices.per_host,
        devices.per_host,
        devices.kind,
    )
    placed = max(
        bytes_by_rank(describe(plans, [table for table in tables if table.name in plans], config), devices.world_size)
    )
    others = [table for table in tables if table.name not in plans]
    # The planner does not know of moving averages, so it is told of less room: what they take in equal shares.
    averages = sum(_average_bytes(table, config) for table in others) // devices.world_size
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=devices.world_size,
            local_world_size=devices.per_host,
            compute_device=devices.kind,
            hbm_cap=devices.bytes and max(0, devices.bytes - averages - placed),
        ),
        # The planner's grid search takes seconds for a dozen tables.
        proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()],
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED),
        constraints=_constraints(others, settings, devices),
    )
    # Pooled tables are planned like the others, because on CPU the planner does not know that a row_wise
    # EmbeddingBagCollection exists.
    collections = embedding_collections([replace(table, pooled=False) for table in others])
    for key, weight in collections.named_parameters():
        set_fused_optimizer(weight, settings.of(table_name(key)))
    try:
        sharders = [EmbeddingCollectionSharder()]
        whole = planner.collective_plan(collections, sharders, group) if group else planner.plan(collections, sharders)
    except PlannerError as error:
        raise ValueError(
            f"the planner cannot place the tables with tables.sharding {settings.sharding}: {first_line(error)}"
        ) from None
    for collection in collections:
        found = cast(dict[str, ParameterSharding], whole.get_plan_for_module(collection))
        plans |= {own_name(name): plan for name, plan in found.items()}
    for name, plan in plans.items():
        plan.compute_kernel = table_kernel(settings.of(name), devices.kind).value
    most = max(bytes_by_rank(describe(plans, tables, config), devices.world_size))
    if devices.bytes is not None and most > devices.bytes:
        raise ValueError(
            f"a rank would hold {binary_size(most)} of tables, their optimizers' state and moving averages, and it has "
            f"{binary_size(devices.bytes)}; use more ranks, tables.sharding row_wise, or no train.ema"
        )
    return plans


def placed(plans: Plans, first_rank: int, per_host: int) -> Plans:
    """The plans of a group whose first rank is this one: TorchRec's places of shards have the ranks of the whole job,
    its lists of ranks those of the group."""
    moved = copy.deepcopy(dict(plans))
    for plan in moved.values():
        for shard in cast(Any, plan.sharding_spec).shards:
            rank, device = first_rank + shard.placement.rank(), shard.placement.device()
            where = device.type if device.type == "cpu" else f"{device.type}:{rank % per_host}"
            shard.placement = _remote_device(f"rank:{rank}/{where}")
    return moved


def _require_room(tables: Sequence[EmbeddingTable], config: Config, devices: Devices) -> None:
    """ValueError if the devices have no room for the tables however they are cut."""
    if devices.bytes is None:
        return
    sizes = {
        table.name: _bytes(table, config.tables.of(table.name)) + _average_bytes(table, config) for table in tables
    }
    total, room = sum(sizes.values()), devices.bytes * (1 - _RESERVED)
    if total > room * devices.world_size:
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"the tables take {binary_size(total)} with their optimizers' state and moving averages, "
            f"{binary_size(sizes[largest])} of it table {largest}, and {devices.world_size} GPUs have "
            f"{binary_size(int(room) * devices.world_size)} for them; use {math.ceil(total / room)} ranks or more, a "
            f"smaller --tables.{largest}.dim, or --tables.optimizer rowwise_adagrad or sgd, which keep less"
        )


_RESERVED = 0.15
"""Share of a GPU's memory that is not for tables."""


def describe(plans: Plans, tables: Sequence[EmbeddingTable], config: Config) -> dict[str, TablePlan]:
    """The plans by table, as TablePlans."""
    return {table.name: _describe(plans[table.name], table, config) for table in tables}


def _describe(parameter: Any, table: EmbeddingTable, config: Config) -> TablePlan:
    settings = config.tables.of(table.name)
    return TablePlan(
        rows=table.rows,
        dim=table.dim,
        sharding=parameter.sharding_type,
        optimizer=settings.optimizer,
        precision=table.precision,
        pooled=table.pooled,
        bytes=_bytes(table, settings) + _average_bytes(table, config),
        shards=tuple(map(ShardPlace.of, parameter.sharding_spec.shards)),
    )


def bytes_by_rank(plan: Mapping[str, TablePlan], world_size: int) -> list[int]:
    """Bytes of rows, their optimizers' state and their moving averages that each rank holds."""
    held = [0] * world_size
    for table in plan.values():
        for shard in table.shards:
            held[shard.rank] += table.bytes * shard.rows * shard.columns // (table.rows * table.dim)
    return held


def with_plan(block: Mapping[str, str], plan: Mapping[str, TablePlan]) -> str:
    """A line for each name of the block, and one for each table."""
    return "\n".join([*(f"{name:<10}  {said}" for name, said in block.items()), plan_summary(plan)])


def plan_summary(plan: Mapping[str, TablePlan]) -> str:
    """A line for each table."""
    lines = []
    width = max(len(name) for name in plan)
    for name, table in plan.items():
        owners = sorted({shard.rank for shard in table.shards if shard.rows})
        where = f"rank {owners[0]}" if len(owners) == 1 else f"{len(owners)} ranks"
        lines.append(
            f"table {name:<{width}}  {table.rows:,} x {table.dim}  {table.sharding} on {where}, "
            f"{'pooled, ' if table.pooled else ''}{table.optimizer}, "
            f"{binary_size(table.bytes)}"
        )
    return "\n".join(lines)


def binary_size(count: int) -> str:
    """Bytes in KiB, MiB, GiB or TiB."""
    unit, name = next((of for of in _UNITS if count >= of[0]), _UNITS[-1])
    return f"{count / unit:,.1f} {name}"


_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _constraints(
    tables: Sequence[EmbeddingTable], config: TablesConfig, devices: Devices
) -> dict[str, ParameterConstraints]:
    sizes = {table.name: _bytes(table, config.of(table.name)) for table in tables}
    share = sum(sizes.values()) / devices.world_size
    return {
        torchrec_name(table.name): ParameterConstraints(
            sharding_types=_sharding_types(table, config.of(table.name), sizes[table.name] > share, devices.world_size),
            # Free to choose, the planner would keep rows in host memory where a GPU has no room for them.
            compute_kernels=[EmbeddingComputeKernel.FUSED.value] if devices.kind == "cuda" else None,
            min_partition=_columns_per_rank(table.dim, devices.world_size),
            pooling_factors=[float(min(table.rows, _IDS))],
            batch_sizes=[1],
        )
        for table in tables
    }


def _sharding_types(table: EmbeddingTable, settings: TableSettings, large: bool, world_size: int) -> list[str]:
    if settings.sharding in ("table_wise", "column_wise"):
        return [settings.sharding]
    # FBGEMM's kernels need a row of at least one table, and the last ranks may get none of a table with few rows.
    if (world_size - 1) * -(-table.rows // world_size) >= table.rows:
        return ["table_wise"]
    return ["row_wise"] if settings.sharding == "row_wise" or large else ["row_wise", "table_wise"]


def _columns_per_rank(dim: int, world_size: int) -> int:
    """Width of a column-wise shard: at least dim / ranks, a divisor of dim, and a multiple of 4 for FBGEMM."""
    return next(width for width in range(4, dim + 1, 4) if dim % width == 0 and width * world_size >= dim)


def _average_bytes(table: EmbeddingTable, config: Config) -> int:
    return 4 * table.rows * table.dim if config.train.ema else 0


def _bytes(table: EmbeddingTable, settings: TableSettings) -> int:
    row_bytes = table.dim * (2 if table.precision == "fp16" else 4)
    return table.rows * (row_bytes + 4 * state_per_row(settings, table.dim))
