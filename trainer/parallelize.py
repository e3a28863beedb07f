"""The only file that shards or wraps a model.

The item table is model-parallel: TorchRec shards it. The tower is data-parallel. Between them the rows of a batch
change sides (rows.py) through the wire's codec, and so do their gradients on the way back.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardedTensor, ShardingEnv

from logitmix.comm.exchange import Wire
from logitmix.comm.hooks import attach
from logitmix.comm.process_group import Ranks
from logitmix.modules.batch import Batch
from logitmix.modules.embeddings import ITEM
from logitmix.modules.model import RetrievalModel, SampledLosses
from logitmix.modules.noise import derive_key, truncated_normal
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config, TablesConfig
from logitmix.trainer.optimizer import TableOptimizer, fused_params, table_kernel, table_optimizer
from logitmix.trainer.rows import RowExchange, slices_of
from logitmix.trainer.sharded_rows import ShardedRows

WEIGHT = f"embeddings.{ITEM}.weight"
"""Name of the item table in state dicts, sharded or not."""


@dataclass(frozen=True)
class ParallelModel:
    """A sharded table and a replicated tower, ready to train."""

    num_items: int
    table: ShardedEmbeddingCollection
    table_optimizer: TableOptimizer
    replicated: DistributedDataParallel
    wire: Wire
    ranks: Ranks
    config: Config
    stream: torch.cuda.Stream | None
    """CUDA: where the next batch is brought to the device while one is trained on."""

    @property
    def tower(self) -> Tower:
        return cast(SampledLosses, self.replicated.module).tower

    def row_exchange(self, id_V: Tensor) -> RowExchange:
        """Begins the exchange of the rows of sorted ids [V], given on the CPU; collective."""
        owners = self.ranks.world_size if self.config.tables.sharding == "row_wise" else 1
        slices = slices_of(id_V, self.num_items, owners, self.config.comm.parts)
        leaf_VD = torch.empty(len(id_V), self.tower.config.dim, device=self.ranks.device)
        return RowExchange(self.table, id_V, slices, leaf_VD, self.stream)

    def to_device(self, batch: Batch) -> Batch:
        """The batch, for use once its rows are sent."""
        with torch.cuda.stream(self.stream):
            moved = batch.to(self.ranks.device)
        if self.stream:
            moved.record_stream(torch.cuda.current_stream())
        return moved

    def loss(self, rows_VD: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The tower's losses; autocast as configured."""
        with autocast(self.config, self.ranks.device):
            return self.replicated(rows_VD, batch)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the tower, summed over the ranks: DDP averages, hence the factor."""
        (loss * self.ranks.world_size).backward()

    def shard(self) -> ShardedTensor:
        """The item table, of which each rank holds its shards."""
        return cast(ShardedTensor, self.table.state_dict()[WEIGHT])

    def item_rows(self) -> ShardedRows:
        """The item table's rows, to be fetched in FP32 past the codec."""
        return ShardedRows.of_shards(self.shard(), self.ranks)


def parallelize(num_items: int, config: Config, ranks: Ranks) -> ParallelModel:
    """Plan, shard, attach the codecs, initialise, replicate. The weights depend on the seed alone."""
    require_whole_steps(config, ranks.device)
    with torch.device("meta"):
        model = RetrievalModel(num_items, config.model)
    plan = _plan(model, config.tables, ranks)
    sharder = EmbeddingCollectionSharder(fused_params=fused_params(config.tables))
    table = sharder.shard(model.table, plan, ShardingEnv.from_process_group(ranks.group), ranks.device)
    wire = attach(table, config.comm, seed=derive_key("wire", config.train.seed))
    optimizer = table_optimizer(table, WEIGHT, config.tables)
    _initialise_table(table, config)

    tower = model.tower.to_empty(device="cpu")
    tower.reset_parameters(torch.Generator().manual_seed(derive_key("tower", config.train.seed)))
    replicated = DistributedDataParallel(
        SampledLosses(tower.to(ranks.device)), process_group=ranks.group, gradient_as_bucket_view=True
    )
    if config.comm.dense == "bf16":
        replicated.register_comm_hook(ranks.group, _bf16_gradients)
    stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
    return ParallelModel(num_items, table, optimizer, replicated, wire, ranks, config, stream)


def require_whole_steps(config: Config, device: torch.device) -> None:
    """Raises ValueError where the table's optimizer would take each part of a batch's rows for a step."""
    if config.comm.parts > 1 and config.tables.optimizer == "adam" and device.type == "cuda":
        raise ValueError(
            f"comm.parts is {config.comm.parts}, but FBGEMM's Adam on CUDA counts each part as a step; "
            "give --comm.parts 1 or another --tables.optimizer"
        )


def _bf16_gradients(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # By its own name DDP grants the hook to NCCL only; gloo adds BF16 as well.
    return bf16_compress_hook(group, bucket)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    bf16 = config.train.precision == "bf16" and computes_bf16(device)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def computes_bf16(device: torch.device) -> bool:
    """Whether a CPU has arithmetic for BF16 (without, it takes several times as long as for FP32); GPUs count as having
    it."""
    return device.type != "cpu" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def _plan(model: RetrievalModel, config: TablesConfig, ranks: Ranks) -> EmbeddingModuleShardingPlan:
    sharder = EmbeddingCollectionSharder()
    hbm_bytes = torch.cuda.get_device_properties(ranks.device).total_memory if ranks.device.type == "cuda" else None
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks.world_size,
            local_world_size=get_local_size(ranks.world_size),
            compute_device=ranks.device.type,
            hbm_cap=hbm_bytes,
        ),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.15),
        constraints={
            ITEM: ParameterConstraints(
                sharding_types=[config.sharding], min_partition=_columns_per_rank(model.tower.config.dim, ranks)
            )
        },
    )
    try:
        plan = planner.collective_plan(model, [sharder], ranks.group).get_plan_for_module("table")
    except PlannerError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the item table finds no place with tables.sharding {config.sharding}: {reason}") from None
    assert plan is not None
    for parameter in cast(dict, plan).values():
        parameter.compute_kernel = table_kernel(config, ranks.device).value
    return cast(EmbeddingModuleShardingPlan, plan)


def _columns_per_rank(dim: int, ranks: Ranks) -> int:
    """Width of a column-wise shard: at least dim / ranks, a divisor of dim, and a multiple of 4 for FBGEMM."""
    return next(width for width in range(4, dim + 1, 4) if dim % width == 0 and width * ranks.world_size >= dim)


def _initialise_table(table: ShardedEmbeddingCollection, config: Config) -> None:
    key = derive_key("table", ITEM, config.train.seed)
    for shard in cast(ShardedTensor, table.state_dict()[WEIGHT]).local_shards():
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        column_C = torch.arange(column, column + columns)
        for start in range(0, rows, _ROWS):
            part = shard.tensor[start : start + _ROWS].detach()
            row_R = torch.arange(row + start, row + start + len(part))
            part.copy_(truncated_normal(key, row_R, column_C, config.tables.init_std))


_ROWS = 2**16
"""Rows initialised at once."""
