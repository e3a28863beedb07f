"""The only file that shards or wraps a model.

The tables are model-parallel: TorchRec shards them. The tower is data-parallel. Between them, a batch's rows are
exchanged (rows.py) through the wire's codec, and so are their gradients on the way back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import EmbeddingModuleShardingPlan, Shard, ShardedTensor, ShardingEnv

from logitmix.comm.collectives import all_reduce_sum
from logitmix.comm.config import WireConfig
from logitmix.comm.exchange import Wire
from logitmix.comm.hooks import attach
from logitmix.comm.process_group import Ranks, own_group
from logitmix.modules.batch import Bags, Batch
from logitmix.modules.config import ModelConfig, MoLConfig
from logitmix.modules.embeddings import EmbeddingTable, torchrec_name
from logitmix.modules.initialize import initialized
from logitmix.modules.model import RetrievalModel, SampledLosses
from logitmix.modules.noise import derive_key, truncated_normal
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.towers import Tower
from logitmix.trainer.config import TABLE_OPTIMIZERS, TablesConfig, TableSettings, TrainConfig
from logitmix.trainer.parallel.average import MovingAverage
from logitmix.trainer.parallel.bags import PooledTable
from logitmix.trainer.parallel.clipping import DetachedLookups
from logitmix.trainer.parallel.flat import FlatLosses
from logitmix.trainer.parallel.growing import GrowingTable, unique_ids, with_rows
from logitmix.trainer.parallel.optimizer import TableOptimizers, set_fused_optimizer, table_name
from logitmix.trainer.parallel.plan import Devices, Plans, TablePlan, TableRules, describe, placed, plan_tables
from logitmix.trainer.parallel.replicas import SUFFIX, Replicas
from logitmix.trainer.parallel.rows import RowExchange, ShardedTables
from logitmix.trainer.parallel.sharded_rows import ShardedRows

WIDE_MOL = 1024
"""Numbers of MoL's components for a pair, from which on a CPU computes the model faster in BF16."""


@dataclass(frozen=True)
class ParallelModel:
    """Sharded tables and a replicated tower, ready to train."""

    tables: Sequence[ShardedTables]
    pooled: Sequence[PooledTable]
    table_optimizers: TableOptimizers
    plan: Mapping[str, TablePlan]
    replicated: FlatLosses
    wire: Wire
    ranks: Ranks
    replicas: Replicas
    train: TrainConfig
    cuts: DetachedLookups | None
    """On CUDA, with gradient clipping or several groups of ranks: where the backward of lookups waits."""
    average: MovingAverage | None
    """With train.ema."""
    stream: torch.cuda.Stream | None
    """CUDA: the stream that copies the next batch to the device while one is trained on."""
    growing: Mapping[str, GrowingTable]
    """The tables whose rows pass from value to value, by name."""

    @property
    def tower(self) -> Tower:
        """The tower in training."""
        return self.replicated.losses.tower

    def placed(self, batch: Batch, step: int) -> Batch:
        """Returns the batch of a step, counted from 1, with rows in place of the ids of `growing` tables. Rows that
        another value has got start anew. To be called for one step after the other, and before the rows of this one are
        sent; those of the step before may be on their way. Collective."""
        rows = {}
        for name, table in self.growing.items():
            id_U, place_S = unique_ids(batch.ids[name])
            row_U, new_row, new_id = table.advance(id_U, step)
            rows[name] = row_U if place_S is None else row_U[place_S]
            if len(new_row):
                self._start_anew(name, new_row, new_id)
        return with_rows(batch, self.tower.schema, rows) if rows else batch

    def _start_anew(self, name: str, row_N: Tensor, id_N: Tensor) -> None:
        """Gives this rank's part of some rows of a table, of their moving average and of their optimizer's state the
        values that these ids start from. Through `data`, because the backward of a lookup is under way, which would
        refuse a table that has changed; it has none of these rows."""
        for sharded, is_state in self._of_growing[name]:
            for shard in sharded.local_shards():
                place_N = row_N - shard.metadata.shard_offsets[0]
                here = (place_N >= 0) & (place_N < shard.metadata.shard_sizes[0])
                at, id_R = (of[here].to(shard.tensor.device) for of in (place_N, id_N))
                if is_state:
                    shard.tensor.data[at] = 0
                    continue
                rows_RC = _initial_rows(name, self.table_optimizers.config, self.train.seed, id_R, _columns(shard))
                shard.tensor.data[at] = rows_RC.to(shard.tensor.dtype)

    @cached_property
    def _of_growing(self) -> dict[str, list[tuple[ShardedTensor, bool]]]:
        """By growing table, its rows, their moving average, and what its optimizer keeps of them, with whether it is
        that; by reference. Made once: `shards` writes back what GPUs have cached of all tables."""
        rows = [self.shards(), *([self.average.tables] if self.average else [])]
        states = self.table_optimizers.state_dict()
        return {
            name: [(of[name], False) for of in rows]
            + [(of, True) for of in states.get(name, {}).values() if isinstance(of, ShardedTensor)]
            for name in self.growing
        }

    def row_exchange(self, ids: Mapping[str, Tensor | Bags]) -> RowExchange:
        """Begins the exchange of the rows that a batch needs; collective."""
        ranks = self.ranks
        return RowExchange(self.tables, self.pooled, ids, self.replicas.group, ranks.device, self.stream, self.cuts)

    def to_device(self, batch: Batch) -> Batch:
        """Returns the batch, for use once its rows are sent."""
        with torch.cuda.stream(self.stream):
            moved = batch.to(self.ranks.device)
        if self.stream:
            moved.record_stream(torch.cuda.current_stream())
        return moved

    def loss(self, rows: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Returns the tower's losses, from the rows [V, D] of each table; autocast as configured."""
        if not self.tower.training:  # after an evaluation
            self.tower.train()
        with autocast(self.train.precision, self.ranks.device):
            losses: dict[str, Tensor] = self.replicated(rows, batch)
            return losses

    def backward(self, loss: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Computes the gradients of the rows and of the tower, and begins the tower's sum over the ranks, which
        `tower_gradients` waits for. It is computed as a mean, and so are the rows', hence a factor of the number of
        ranks."""
        self.replicated.backward(loss)
        self.replicated.share(loss, rows.values())

    def tower_gradients(self) -> list[Tensor]:
        """Returns the gradients of all weights, summed over the ranks: on CUDA as one tensor, for few launches."""
        whole = self.replicated.gradient()
        return [whole] if self.stream else [cast(Tensor, weight.grad) for weight in self.tower.parameters()]

    @property
    def _modules(self) -> list[Any]:
        return [*(each.module for each in self.tables), *(each.module for each in self.pooled)]

    def shards(self) -> dict[str, ShardedTensor]:
        """Returns the tables that are trained, by name, each with the shards that this rank holds. The tensors are
        those in use, not copies. If a GPU caches rows of tables in the host's memory, these rows are written back
        first."""
        states = [module.state_dict() for module in self._modules]
        return {table_name(key): cast(ShardedTensor, weight) for state in states for key, weight in state.items()}

    def forget_cached_rows(self) -> None:
        """Drops what GPUs have cached. To be called when the tensors of `shards` were written: of tables in the host's
        memory, a GPU may still have cached what was there before."""
        for lookup in (lookup for module in self._modules for lookup in module._lookups):
            lookup.purge()

    def evaluated(self) -> tuple[Tower, dict[str, ShardedRows]]:
        """Returns what is evaluated: the tower, and the tables' rows, to be fetched in FP32 without the codec. Their
        moving averages, if there are any."""
        tower, tables = (self.average.tower, self.average.tables) if self.average else (self.tower, self.shards())
        row_of = {name: table.find for name, table in self.growing.items()}
        return tower, {
            name: ShardedRows.of_shards(sharded, self.ranks, row_of.get(name)) for name, sharded in tables.items()
        }


def parallelize(
    schema: Schema,
    model: ModelConfig,
    tables: TablesConfig,
    wire: WireConfig,
    train: TrainConfig,
    ranks: Ranks,
    restored: bool = False,
) -> ParallelModel:
    """Plans, shards, attaches the codecs, initializes and replicates a model. The weights depend only on the seed.

    Args:
        schema: The features and tables of the model (`model_schema`).
        model: Settings of the tower.
        tables: Settings of the tables.
        wire: Settings of the exchanges.
        train: Its seed, clip, ema, precision and compile are used.
        ranks: Those that the model is divided among.
        restored: Leaves the tables' rows without values, because a checkpoint will fill them.

    Raises:
        ValueError: For settings that the device does not support or that leave the planner no room, and for weights
            that a module leaves without initial values.
    """
    rules = TableRules(tables, train.ema > 0, wire.parts)
    collections, embedded = unsharded(schema, model, rules, ranks.device)
    devices = Devices.of(ranks)
    plans = plan_tables(embedded, rules, devices, ranks.group)
    replicas = Replicas.of(ranks, tables.ranks_of_group(ranks.world_size), wire.timeout_seconds)
    group_plans = placed(plans, replicas.number * replicas.group.size(), devices.per_host)
    modules = _shard(collections.tables, group_plans, tables, ranks, replicas)
    attached = attach(modules, wire, seed=derive_key("wire", train.seed))
    sharded, pooled = [], []
    for each in modules.values():
        if isinstance(each, ShardedEmbeddingCollection):
            sharded.append(ShardedTables.of(each, wire.parts))
        else:
            pooled.append(PooledTable.of(cast(ShardedEmbeddingBagCollection, each)))
    optimizers = TableOptimizers(cast(Any, modules.values()), tables)
    cuts = None
    if train.clip or replicas.peers or ranks.device.type == "cuda":
        cuts = DetachedLookups(cast(Any, modules.values()), optimizers, replicas, attached)
    if replicas.peers:
        for table in embedded:
            attached.register(torchrec_name(table.name) + SUFFIX)

    generator = torch.Generator().manual_seed(derive_key("tower", train.seed))
    tower = initialized(lambda: Tower(model, schema), generator)
    losses = SampledLosses(tower.to(ranks.device), partial(all_reduce_sum, ranks=ranks))
    if train.compile:
        # It loads slowly.
        from logitmix.trainer.parallel.compiled import compile_towers

        compile_towers(losses, ranks.device)
    dense = torch.bfloat16 if wire.dense == "bf16" else torch.float32
    parallel = ParallelModel(
        sharded,
        pooled,
        optimizers,
        describe(plans, embedded, rules),
        FlatLosses(losses, own_group(ranks, wire.timeout_seconds), dense),
        attached,
        ranks,
        replicas,
        train,
        cuts,
        average=None,
        stream=torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None,
        growing={
            table.name: GrowingTable(table, tables.of(table.name), ranks) for table in schema.tables if table.values
        },
    )
    shards = parallel.shards()
    if not restored:
        _initialize(shards, tables, train.seed)
    return replace(parallel, average=MovingAverage(parallel.tower, shards, train.ema) if train.ema else None)


def unsharded(
    schema: Schema, model: ModelConfig, rules: TableRules, device: torch.device
) -> tuple[RetrievalModel, list[EmbeddingTable]]:
    """Returns the model on the meta device, and its tables. Raises ValueError for settings that the device does not
    support."""
    embedded = embedding_tables(schema, rules, device)
    with torch.device("meta"):
        return RetrievalModel(embedded, schema, model), embedded


def embedding_tables(schema: Schema, rules: TableRules, device: torch.device) -> list[EmbeddingTable]:
    """Returns the tables of a model's schema with their configured precisions.

    Raises ValueError for settings that the device does not support.
    """
    found = []
    for each in schema.tables:
        settings = rules.of(each.name)
        _require_supported(each.name, settings, rules, device.type)
        weighs = schema.weighs(each.name)
        found.append(
            EmbeddingTable(each.name, each.rows, each.dim, settings.precision, settings.pooled, weighs, each.values)
        )
    return found


def _require_supported(name: str, settings: TableSettings, rules: TableRules, device: str) -> None:
    optimizer, cached = settings.optimizer, settings.cache_load_factor < 1
    plugin, adam = optimizer in TABLE_OPTIMIZERS.plugins, optimizer == "adam"
    refused = {
        f"tables.{name}.pooled is true, but items are needed one by one; set it to false": (
            settings.pooled and name == ITEM
        ),
        f"the precision of table {name} is fp16, which FBGEMM's own optimizers train, and adam on CUDA only; set it to "
        "fp32, or tables.optimizer to rowwise_adagrad or sgd": (
            settings.precision == "fp16" and (plugin or (adam and device == "cpu"))
        ),
        f"comm.parts is {rules.parts}, but FBGEMM's Adam on CUDA, of table {name}, counts each part as a step; give "
        "--comm.parts 1 or another --tables.optimizer": rules.parts > 1 and adam and device == "cuda",
        # FBGEMM's backward looks for rows where the latest forward has cached them.
        f"tables.cache_load_factor is {settings.cache_load_factor:g} for table {name}, but only GPUs cache rows of the "
        "host's memory, with FBGEMM's own optimizers, comm.parts 1, no train.ema and no capacity; set "
        f"tables.{name}.cache_load_factor to 1": (
            cached and (device == "cpu" or plugin or settings.capacity or rules.averaged or rules.parts > 1)
        ),
    }
    if said := next((said for said, holds in refused.items() if holds), None):
        raise ValueError(said)


def _shard(
    collections: nn.ModuleDict, plans: Plans, settings: TablesConfig, ranks: Ranks, replicas: Replicas
) -> nn.ModuleDict:
    for key, weight in collections.named_parameters():
        set_fused_optimizer(weight, settings.of(table_name(key)))
    env, sharded = ShardingEnv.from_process_group(replicas.group), nn.ModuleDict()
    for name, each in collections.items():
        bags = isinstance(each, EmbeddingBagCollection)
        sharder: Any = EmbeddingBagCollectionSharder() if bags else EmbeddingCollectionSharder()
        tables = [table_name(key) for key, _ in each.named_parameters()]
        plan = EmbeddingModuleShardingPlan({torchrec_name(table): plans[table] for table in tables})
        sharded[name] = sharder.shard(each, plan, env, ranks.device)
    return sharded


def autocast(precision: str, device: torch.device) -> torch.autocast:
    assert precision != "auto", "`automatic_precision` comes before"
    bf16 = precision == "bf16" and computes_bf16(device)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def automatic_precision(model: ModelConfig, device_type: str, has_bf16: bool) -> Literal["bf16", "fp32"]:
    """Returns the precision of train.precision auto, from the kind of the device and whether it has BF16 arithmetic.
    On a CPU, BF16 speeds up MoL of many components; smaller models lose more by conversions than they gain."""
    of = model.similarity
    wide = isinstance(of, MoLConfig) and of.query_components * of.item_components * of.component_dim >= WIDE_MOL
    return "bf16" if has_bf16 and (wide or device_type == "cuda") else "fp32"


def computes_bf16(device: torch.device) -> bool:
    """Returns whether the device has BF16 arithmetic: true for GPUs; a CPU without it takes several times as long as in
    FP32."""
    return device.type != "cpu" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def _initialize(tables: Mapping[str, ShardedTensor], settings: TablesConfig, seed: int) -> None:
    """Fills rows from a truncated normal, each number a function of the seed and its place."""
    for name, sharded in tables.items():
        for shard in sharded.local_shards():
            row, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            column_C = _columns(shard)
            for start in range(0, rows, _ROWS):
                part = shard.tensor[start : start + _ROWS].detach()
                row_R = torch.arange(row + start, row + start + len(part), device=part.device)
                part.copy_(_initial_rows(name, settings, seed, row_R, column_C))


def _initial_rows(name: str, settings: TablesConfig, seed: int, id_R: Tensor, column_C: Tensor) -> Tensor:
    """Returns what the rows of some ids of a table start from, FP32 [R, C]."""
    return truncated_normal(derive_key("table", name, seed), id_R, column_C, settings.of(name).init_std)


def _columns(shard: Shard) -> Tensor:
    """Returns the columns [C] of a table that a shard has."""
    first, count = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
    return torch.arange(first, first + count, device=shard.tensor.device)


_ROWS = 2**16
"""Rows initialized at once."""
