"""Which rank holds which rows and columns of which table.

TorchRec's planner places all tables together. If `tables.sharding` is auto, it chooses between row_wise and table_wise
for each table. But a table larger than one rank's share of all bytes is always row_wise, because a rank that held it
whole would hold most of everything. column_wise is used only on request: it sends each id to all owners of its columns,
and the FP8 wire gives each shard's columns their own scale. A table with too few rows for all ranks is table_wise
instead of row_wise.
"""

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DEFAULT_ASSOC
from torch.distributed import _remote_device
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import CacheParams, ParameterSharding

from logitmix.comm.process_group import Ranks
from logitmix.common.mappings import first_line
from logitmix.modules.embeddings import EmbeddingTable, embedding_collections, own_name, torchrec_name
from logitmix.trainer.config import TablesConfig, TableSettings
from logitmix.trainer.parallel.optimizer import set_fused_optimizer, state_per_row, table_kernel, table_name
from logitmix.trainer.parallel.row_map import map_bytes
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
    cache_load_factor: float = 1.0
    """Below 1, the rows are in the host's memory, and a GPU caches this share of them."""
    map_bytes: int = 0
    """Bytes of host memory, of all ranks together, that know which value has which row."""

    def held(self, shard: ShardPlace) -> "Held":
        """Returns what the owner of a shard holds of the table."""
        whole = self.bytes * shard.rows * shard.columns // (self.rows * self.dim)
        if self.cache_load_factor == 1 or not shard.rows:
            return Held(whole, 0)
        # As FBGEMM's SplitTableBatchedEmbeddingBagsCodegen: slots in sets, each with a row, the row's id and the time
        # of its last use; the table of each row; and an optimizer's one number for a row stays on the GPU.
        slots = max(1, -(-int(shard.rows * self.cache_load_factor) // DEFAULT_ASSOC)) * DEFAULT_ASSOC
        row_bytes = shard.columns * _BYTES[self.precision]
        on_device = 4 * shard.rows if self.optimizer == "rowwise_adagrad" else 0
        return Held(on_device + slots * (row_bytes + 16) + 4 * shard.rows, whole - on_device)


class Held(NamedTuple):
    """Bytes in a device's own memory and in that of its host."""

    device: int
    host: int


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
    host_bytes: int | None = None
    """Memory of a host with GPUs, where it is known."""

    def of_group(self, tables: TablesConfig) -> "Devices":
        """Returns the devices that hold all tables together. ValueError where the groups would not be equal."""
        size = tables.ranks_of_group(self.world_size)
        return replace(self, world_size=size, per_host=math.gcd(size, self.per_host))

    @staticmethod
    def of(ranks: Ranks) -> "Devices":
        """Returns the devices of a job."""
        per_host = get_local_size(ranks.world_size)
        if ranks.device.type == "cpu":
            return Devices(ranks.world_size, per_host, "cpu")
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Devices(ranks.world_size, per_host, ranks.device.type, memory, host)


@dataclass(frozen=True)
class TableRules:
    """What decides how the tables are divided, and how much memory they take."""

    settings: TablesConfig
    averaged: bool
    """Whether a moving average of their rows is kept (train.ema)."""
    parts: int
    """In how many parts rows are sent (comm.parts)."""

    def of(self, name: str) -> TableSettings:
        return self.settings.of(name)


def plan_tables(
    tables: Sequence[EmbeddingTable], rules: TableRules, devices: Devices, group: dist.ProcessGroup | None = None
) -> Plans:
    """Returns the planner's choice within the configuration's limits, for the ranks of one group of tables.group_size,
    which are numbered from 0. With a process group, collective: rank 0's choice, on all ranks. Raises ValueError if the
    devices have no room.
    """
    settings, job, devices = rules.settings, devices, devices.of_group(rules.settings)
    _require_room(tables, rules, devices)
    # The planner does not know of moving averages, so it is told of less room: what they take in equal shares.
    averages = sum(_average_bytes(table, rules) for table in tables) // devices.world_size
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=devices.world_size,
            local_world_size=devices.per_host,
            compute_device=devices.kind,
            hbm_cap=devices.bytes and max(0, devices.bytes - averages),
            # What the host has room for is checked below.
            ddr_cap=2**60 if devices.kind == "cuda" else None,
        ),
        # The planner's grid search takes seconds for a dozen tables.
        proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()],
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED),
        constraints=_constraints(tables, settings, devices),
    )
    # Pooled tables are planned like the others, because on CPU the planner does not know that a row_wise
    # EmbeddingBagCollection exists.
    collections = embedding_collections([replace(table, pooled=False) for table in tables])
    for key, weight in collections.named_parameters():
        of = settings.of(table_name(key))
        # The planner would count Adam's state of cached rows as memory of the GPU.
        set_fused_optimizer(weight, replace(of, optimizer="sgd") if of.cache_load_factor < 1 else of)
    try:
        sharders = [EmbeddingCollectionSharder()]
        whole = planner.collective_plan(collections, sharders, group) if group else planner.plan(collections, sharders)
    except PlannerError as error:
        raise ValueError(
            f"the planner cannot place the tables with tables.sharding {settings.sharding}: {first_line(error)}"
        ) from None
    plans: dict[str, ParameterSharding] = {}
    for collection in collections:
        found = cast(dict[str, ParameterSharding], whole.get_plan_for_module(collection))
        plans |= {own_name(name): plan for name, plan in found.items()}
    for name, plan in plans.items():
        plan.compute_kernel = table_kernel(settings.of(name), devices.kind).value
        plan.cache_params = _cache(settings.of(name))
    held = bytes_by_rank(describe(plans, tables, rules), devices.world_size)
    most, in_host = (max(of) for of in zip(*held, strict=True))
    if devices.bytes is not None and most > devices.bytes:
        raise ValueError(
            f"a rank would hold {binary_size(most)} of tables, their optimizers' state and moving averages, and it has "
            f"{binary_size(devices.bytes)}; use more ranks, tables.sharding row_wise, a lower "
            "tables.NAME.cache_load_factor, or no train.ema"
        )
    if devices.host_bytes is not None and in_host * job.per_host > devices.host_bytes:
        raise ValueError(
            f"the {job.per_host} ranks of a host would hold {binary_size(in_host * job.per_host)} of tables in its "
            f"memory, and it has {binary_size(devices.host_bytes)}; use more hosts, or tables.optimizer rowwise_adagrad"
        )
    return plans


def placed(plans: Plans, first_rank: int, per_host: int) -> Plans:
    """Returns the plans of a group whose first rank is this one: TorchRec's places of shards have the ranks of the
    whole job, its lists of ranks those of the group."""
    moved = copy.deepcopy(dict(plans))
    for plan in moved.values():
        for shard in cast(Any, plan.sharding_spec).shards:
            rank, device = first_rank + shard.placement.rank(), shard.placement.device()
            where = device.type if device.type == "cpu" else f"{device.type}:{rank % per_host}"
            shard.placement = _remote_device(f"rank:{rank}/{where}")
    return moved


def _require_room(tables: Sequence[EmbeddingTable], rules: TableRules, devices: Devices) -> None:
    """Raises ValueError if the devices have no room for the tables however they are cut."""
    if devices.bytes is None:
        return
    sizes = {table.name: _whole(table, rules).device for table in tables}
    total, room = sum(sizes.values()), devices.bytes * (1 - _RESERVED)
    if total > room * devices.world_size:
        name = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"the tables take {binary_size(total)} with their optimizers' state and moving averages, "
            f"{binary_size(sizes[name])} of it table {name}, and {devices.world_size} GPUs have "
            f"{binary_size(int(room) * devices.world_size)} for them; use {math.ceil(total / room)} ranks or more, "
            f"a smaller --tables.{name}.dim or --tables.{name}.cache-load-factor, or --tables.optimizer "
            "rowwise_adagrad or sgd, which keep less"
        )


_RESERVED = 0.15
"""Share of a GPU's memory that is not for tables."""


def describe(plans: Plans, tables: Sequence[EmbeddingTable], rules: TableRules) -> dict[str, TablePlan]:
    """Returns the plans by table, as TablePlans."""
    found = {}
    for table in tables:
        plan = cast(Any, plans[table.name])
        found[table.name] = _described(table, rules, plan.sharding_type, map(ShardPlace.of, plan.sharding_spec.shards))
    return found


def _described(table: EmbeddingTable, rules: TableRules, sharding: str, shards: Iterable[ShardPlace]) -> TablePlan:
    settings = rules.of(table.name)
    return TablePlan(
        rows=table.rows,
        dim=table.dim,
        sharding=sharding,
        optimizer=settings.optimizer,
        precision=table.precision,
        pooled=table.pooled,
        bytes=_bytes(table, settings) + _average_bytes(table, rules),
        shards=tuple(shards),
        cache_load_factor=settings.cache_load_factor,
        map_bytes=map_bytes(table.rows - 1, settings.admit_after) if table.values else 0,
    )


def _whole(table: EmbeddingTable, rules: TableRules) -> Held:
    """Returns what a rank would hold that had the table to itself."""
    whole = ShardPlace(0, 0, table.rows, 0, table.dim)
    return _described(table, rules, "table_wise", [whole]).held(whole)


def bytes_by_rank(plan: Mapping[str, TablePlan], world_size: int) -> list[Held]:
    """Returns the bytes of rows, their optimizers' state and their moving averages that each rank holds, with the
    caches of rows that are in the host's memory."""
    held = [Held(0, 0)] * world_size
    for table in plan.values():
        for shard in table.shards:
            device, host = table.held(shard)
            held[shard.rank] = Held(held[shard.rank].device + device, held[shard.rank].host + host)
    return held


def with_plan(block: Mapping[str, str], plan: Mapping[str, TablePlan]) -> str:
    """Returns a line for each name of the block, and one for each table."""
    return "\n".join([*(f"{name:<10}  {said}" for name, said in block.items()), plan_summary(plan)])


def plan_summary(plan: Mapping[str, TablePlan]) -> str:
    """Returns a line for each table."""
    lines = []
    width = max(len(name) for name in plan)
    for name, table in plan.items():
        owners = sorted({shard.rank for shard in table.shards if shard.rows})
        where = f"rank {owners[0]}" if len(owners) == 1 else f"{len(owners)} ranks"
        held = list(map(table.held, table.shards))
        device, host = sum(of.device for of in held), sum(of.host for of in held)
        cached = f" in host memory, {table.cache_load_factor:.2%} of its rows cached in {binary_size(device)} of GPUs'"
        lines.append(
            f"table {name:<{width}}  {table.rows:,} x {table.dim}  {table.sharding} on {where}, "
            f"{'pooled, ' if table.pooled else ''}{table.optimizer}, "
            f"{binary_size(host or table.bytes)}{cached if host else ''}"
            + (f"; {binary_size(table.map_bytes)} on hosts for which value has which row" if table.map_bytes else "")
        )
    return "\n".join(lines)


def binary_size(count: int) -> str:
    """Returns a number of bytes in KiB, MiB, GiB or TiB."""
    power = min(4, max(1, (count.bit_length() - 1) // 10))
    return f"{count / 2 ** (10 * power):,.1f} {'KMGT'[power - 1]}iB"


def _constraints(
    tables: Sequence[EmbeddingTable], config: TablesConfig, devices: Devices
) -> dict[str, ParameterConstraints]:
    sizes = {table.name: _bytes(table, config.of(table.name)) for table in tables}
    share = sum(sizes.values()) / devices.world_size
    fused, cached = EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return {
        torchrec_name(table.name): ParameterConstraints(
            sharding_types=_sharding_types(table, config.of(table.name), sizes[table.name] > share, devices.world_size),
            # Free to choose, the planner would keep rows in host memory where a GPU has no room for them.
            compute_kernels=[cached if _cache(config.of(table.name)) else fused] if devices.kind == "cuda" else None,
            cache_params=_cache(config.of(table.name)),
            min_partition=_columns_per_rank(table.dim, devices.world_size),
            pooling_factors=[float(min(table.rows, _IDS))],
            batch_sizes=[1],
        )
        for table in tables
    }


def _cache(settings: TableSettings) -> CacheParams | None:
    return CacheParams(load_factor=settings.cache_load_factor) if settings.cache_load_factor < 1 else None


def _sharding_types(table: EmbeddingTable, settings: TableSettings, large: bool, world_size: int) -> list[str]:
    if settings.sharding in ("table_wise", "column_wise"):
        return [settings.sharding]
    # FBGEMM's kernels need a row of at least one table, and the last ranks may get none of a table with few rows.
    if (world_size - 1) * -(-table.rows // world_size) >= table.rows:
        return ["table_wise"]
    return ["row_wise"] if settings.sharding == "row_wise" or large else ["row_wise", "table_wise"]


def _columns_per_rank(dim: int, world_size: int) -> int:
    """Returns the width of a column-wise shard: at least dim / ranks, a divisor of dim, and a multiple of 4 for
    FBGEMM."""
    return next(width for width in range(4, dim + 1, 4) if dim % width == 0 and width * world_size >= dim)


def _average_bytes(table: EmbeddingTable, rules: TableRules) -> int:
    return 4 * table.rows * table.dim * rules.averaged


def _bytes(table: EmbeddingTable, settings: TableSettings) -> int:
    row_bytes = table.dim * _BYTES[table.precision]
    return table.rows * (row_bytes + 4 * state_per_row(settings, table.dim))


_BYTES = {"fp32": 4, "fp16": 2}
