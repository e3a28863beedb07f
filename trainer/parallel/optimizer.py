"""Optimizers of the sharded tables and of the dense part.

FBGEMM fuses its table optimizers into the backward of the lookup, but it has no Adam on CPU. That, and the table
optimizers of plugins, are TableOptimizers, which TouchedRows applies in the same place.

Axes: R rows, C columns of a shard.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.optim.adam import adam
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding, BatchedDenseEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import Shard, ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from logitmix.modules.embeddings import own_name
from logitmix.trainer.config import TABLE_OPTIMIZERS, DenseConfig, TablesConfig, TableSettings

ShardedCollection: TypeAlias = ShardedEmbeddingCollection | ShardedEmbeddingBagCollection

_FUSED: dict[str, tuple[type[torch.optim.Optimizer], Sequence[str]]] = {
    "adam": (torch.optim.Adam, ("eps", "beta1", "beta2")),
    "rowwise_adagrad": (RowWiseAdagrad, ("eps",)),
    "sgd": (torch.optim.SGD, ()),
}
"""TorchRec's classes for FBGEMM's fused optimizers, and the settings that they take beside the learning rate."""


class TableOptimizer(ABC):
    """Moves the rows that a batch has looked up; others, and what is kept for them, do not change."""

    states: tuple[str, ...] = ()
    """Names of what it keeps for a row: each is as wide as the row, in FP32, and zero at first."""

    @abstractmethod
    def update(
        self,
        row_RC: Tensor,
        gradient_RC: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        settings: TableSettings,
    ) -> None:
        """Changes rows and their state [R, C] in place, by the gradients of the loss. `step` counts from 1; `lr` is
        that of the step, and `settings` has the others, such as eps."""


class Adam(TableOptimizer):
    """Like FBGEMM's on CUDA, it adds eps after the bias correction (torch.optim.SparseAdam adds it before). torch's
    fused Adam passes over the rows once, SparseAdam a dozen times."""

    states = ("exp_avg", "exp_avg_sq")

    def update(
        self,
        row_RC: Tensor,
        gradient_RC: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        settings: TableSettings,
    ) -> None:
        adam(
            [row_RC],
            [gradient_RC],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            max_exp_avg_sqs=[],
            state_steps=[torch.tensor(float(step - 1))],
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=lr,
            weight_decay=0.0,
            eps=settings.eps,
            maximize=False,
        )


ADAM = Adam()


def table_kernel(settings: TableSettings, device: str) -> EmbeddingComputeKernel:
    """Returns how a table is looked up and trained on a device, cpu or cuda."""
    if settings.optimizer not in _FUSED or (settings.optimizer == "adam" and device == "cpu"):
        return EmbeddingComputeKernel.DENSE
    cached = settings.cache_load_factor < 1
    return EmbeddingComputeKernel.FUSED_UVM_CACHING if cached else EmbeddingComputeKernel.FUSED


def state_per_row(settings: TableSettings, dim: int) -> int:
    """Returns how many FP32 numbers the optimizer keeps for a row."""
    if settings.optimizer in ("rowwise_adagrad", "sgd"):
        return int(settings.optimizer == "rowwise_adagrad")
    return dim * len(TABLE_OPTIMIZERS.find(settings.optimizer).states)


def set_fused_optimizer(weight: nn.Parameter, settings: TableSettings) -> None:
    """Sets FBGEMM's fused optimizer for a table, if it has one, before TorchRec shards it."""
    if settings.optimizer not in _FUSED:
        return
    kind, names = _FUSED[settings.optimizer]
    marked = cast(Any, weight)
    marked._optimizer_classes = [kind]
    marked._optimizer_kwargs = [{"learning_rate": settings.lr} | {name: getattr(settings, name) for name in names}]


def dense_optimizer(module: nn.Module, config: DenseConfig) -> torch.optim.Optimizer:
    # On CUDA all weights are moved by one kernel, which also has the step there, and is told there to leave it out.
    fused = any(parameter.is_cuda for parameter in module.parameters()) or None
    if config.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay, fused=fused
    )
    # The moments exist from the start, so that a checkpoint has tensors to load into.
    for parameter in module.parameters():
        zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in ADAM.states}
        step = torch.zeros((), device=parameter.device if fused else None)
        optimizer.state[parameter] = {"step": step, **zeros}
    return optimizer


def bytes_per_weight(config: DenseConfig, averaged: bool) -> int:
    """Returns the bytes of the dense part for each weight: the weight, its gradient, the optimizer's state and, if it
    is averaged, the moving average, in FP32."""
    moments = 0 if config.optimizer == "sgd" else len(ADAM.states)
    return 4 * (2 + moments + averaged)


class TableOptimizers:
    """The optimizers of all tables, by the table's name.

    They move rows inside the backward of the lookup: fused into FBGEMM's kernels, or TouchedRows.
    """

    finite: Tensor | None = None
    """On CUDA, a bool scalar of the device: whether the step moves rows. None: it does."""

    def __init__(self, collections: Iterable[ShardedCollection], config: TablesConfig) -> None:
        """Takes collections that are sharded with `table_kernel` and `set_fused_optimizer`."""
        self.config, self.steps = config, 0
        self.first_rows: list[Tensor] = []
        """The first row of each shard that FBGEMM's Adam trains, and what is kept of it, by reference."""
        self.fused: list[CombinedOptimizer] = []
        self.touched: dict[str, TouchedRows] = {}
        for collection in collections:
            self.fused.append(cast(CombinedOptimizer, collection.fused_optimizer))
            weights = {table_name(key): weight for key, weight in collection.state_dict().items()}
            for name, parameter in cast(dict[str, Any], collection.module_sharding_plan).items():
                if parameter.compute_kernel == EmbeddingComputeKernel.DENSE.value:
                    table = own_name(name)
                    self.touched[table] = TouchedRows(weights[table], config.of(table))
            for kernel in kernels(collection):
                if isinstance(kernel, BatchedDenseEmbedding | BatchedDenseEmbeddingBag):
                    _take_over(kernel, self.touched)
                elif tables := fused_adam(kernel):
                    for row, states in zip(
                        tables.split_embedding_weights(), tables.split_optimizer_states(), strict=True
                    ):
                        self.first_rows += [memory.data[0] for memory in (row, *states) if len(memory)]

    def begin_step(self, rate: float, finite: Tensor | None = None) -> None:
        """Begins a step. To be called before the gradients of a step are applied: each learning rate is `rate` times
        the configured one, and no row moves if `finite`, a bool scalar on the device, is False."""
        self.steps, self.finite = self.steps + 1, finite
        for touched in self.touched.values():
            touched.begin_step(rate, self.steps, finite)
        for optimizer in self.fused:
            for _, part in optimizer.optimizers:
                # The tables of one fused kernel have all their settings in common.
                lr = self.config.of(table_name(next(iter(part.params)))).lr
                for group in part.param_groups:
                    group["lr"] = rate * lr
            # FBGEMM reads the rates here; the rows are updated in the backward that follows.
            optimizer.step()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the sharded state by table, by reference: loading into its tensors in place takes effect."""
        state = {name: touched.state_dict() for name, touched in self.touched.items()}
        for optimizer in self.fused:
            state |= {table_name(key): of_table for key, of_table in optimizer.state_dict()["state"].items()}
        return state

    def restore(self, state: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        """Adopts the state that was loaded into `state_dict()`, after this many steps."""
        self.steps = steps
        for optimizer in self.fused:
            whole = optimizer.state_dict()
            loaded = {key: state.get(table_name(key), of_table) for key, of_table in whole["state"].items()}
            optimizer.load_state_dict(whole | {"state": loaded})
            for _, part in optimizer.optimizers:
                cast(Any, part).set_optimizer_step(steps)


def table_name(key: str) -> str:
    """Returns the table of a name in a state dict, such as "embeddings.table_TABLE.weight"."""
    return own_name(key.split(".")[-2])


def with_shards(whole: ShardedTensor, held: Sequence[Tensor]) -> ShardedTensor:
    """Returns an FP32 tensor that is sharded as `whole` is; this rank holds `held`, in the order of its local
    shards."""
    shards = [Shard(tensor, shard.metadata) for tensor, shard in zip(held, whole.local_shards(), strict=True)]
    metadata = whole.metadata()
    # The whole may be in FP16.
    properties = replace(metadata.tensor_properties, dtype=torch.float32)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, replace(metadata, tensor_properties=properties), process_group=whole._process_group
    )


class TouchedRows:
    """A TableOptimizer over this rank's shards of a table, inside the backward of a lookup."""

    def __init__(self, weight: ShardedTensor, settings: TableSettings) -> None:
        self.weight, self.settings = weight, settings
        self.begin_step(1.0, 0)
        self.optimizer: TableOptimizer = TABLE_OPTIMIZERS.find(settings.optimizer)
        self.shards: list[_RowStates] = []

    def add_shard(self, row: Tensor) -> "_RowStates":
        """Adds rows of this rank, with new state."""
        self.shards.append(_RowStates(row, {name: torch.zeros_like(row) for name in self.optimizer.states}))
        return self.shards[-1]

    def begin_step(self, rate: float, step: int, finite: Tensor | None = None) -> None:
        self.lr, self.step, self.finite = rate * self.settings.lr, step, finite

    def update(self, shard: "_RowStates", ids: Tensor, gradient: Tensor) -> None:
        """Updates a shard's rows that were looked up; ids may repeat."""
        summed = torch.sparse_coo_tensor(ids[None], gradient, shard.row.shape, check_invariants=False).coalesce()
        most = _ROWS if shard.row.is_cpu else max(1, len(ids))
        for ids_R, gradient_RC in zip(summed.indices()[0].split(most), summed.values().split(most), strict=True):
            row_RC = shard.row.index_select(0, ids_R)
            state = {name: table.index_select(0, ids_R) for name, table in shard.state.items()}
            self.optimizer.update(row_RC, gradient_RC, state, self.step, self.lr, self.settings)
            for table, moved_RC in ((shard.row, row_RC), *((shard.state[name], of) for name, of in state.items())):
                if self.finite is not None:
                    moved_RC = torch.where(self.finite, moved_RC, table.index_select(0, ids_R))
                table.index_copy_(0, ids_R, moved_RC)

    def state_dict(self) -> dict[str, Any]:
        state = {shard.row.data_ptr(): shard.state for shard in self.shards}
        held = [state[shard.tensor.data_ptr()] for shard in self.weight.local_shards()]
        return {name: with_shards(self.weight, [of[name] for of in held]) for name in self.optimizer.states}


_ROWS = 512
"""Rows that are moved at once on CPU, as many as a core's cache holds."""


class _RowStates(NamedTuple):
    """Rows [any number, C], and what the optimizer keeps for them."""

    row: Tensor
    state: dict[str, Tensor]


def _looked_up(shards: Sequence[tuple[TouchedRows, "_RowStates"]], pooled: bool, features: KeyedJaggedTensor) -> Tensor:
    """Returns what `_Lookup` gives for each feature's shard: rows below each other, or `pooled` bags side by side."""
    values = features.values().long().split(features.length_per_key())
    bags = bags_by_feature(features) if pooled else [()] * len(values)
    # There is a backward only if an input requires a gradient.
    asks = torch.empty(0, requires_grad=True)
    found = [_Lookup.apply(*of, asks, ids, *of_bags) for of, ids, of_bags in zip(shards, values, bags, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=int(pooled))


class _Lookup(torch.autograd.Function):
    """Rows [S, C] of a shard, or with `lengths` [R] the sums of bags of them [R, C]; the backward updates the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        optimizer: TouchedRows,
        shard: _RowStates,
        asks: Tensor,
        ids: Tensor,
        lengths: Tensor | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        ctx.update, ctx.count = partial(optimizer.update, shard, ids), len(ids)
        ctx.lengths, ctx.shares = lengths, shares
        if lengths is None:
            return shard.row.index_select(0, ids)
        ends = lengths.cumsum(0)
        return F.embedding_bag(ids, shard.row, ends - lengths, mode="sum", per_sample_weights=shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.update(gradient if ctx.lengths is None else of_each_id(gradient, ctx.count, ctx.lengths, ctx.shares))
        return (None,) * 6


def bags_by_feature(features: KeyedJaggedTensor) -> Iterable[tuple[Tensor, Tensor | None]]:
    """Returns the lengths [R] of each feature's bags, and the ids' shares of the bags' sums [S], if they have any."""
    counts = features.length_per_key()
    lengths = features.lengths().long().view(len(counts), -1)
    shares = features.weights_or_none()
    return zip(lengths, [None] * len(counts) if shares is None else shares.split(counts), strict=True)


def of_each_id(gradient_RC: Tensor, S: int, lengths_R: Tensor, shares_S: Tensor | None) -> Tensor:
    """Returns the gradients of the rows in bags [S, C], from those of the bags' sums."""
    gradient_SC = gradient_RC.repeat_interleave(lengths_R, dim=0, output_size=S)
    return gradient_SC if shares_S is None else gradient_SC * shares_S.unsqueeze(1)


def _take_over(kernel: BatchedDenseEmbedding | BatchedDenseEmbeddingBag, optimizers: Mapping[str, TouchedRows]) -> None:
    """Has the kernel look up the rows that it had by `_looked_up`, whose backward updates them."""
    rows = [weight.detach() for weight in kernel.split_embedding_weights()]
    owners = [optimizers[own_name(table.name)] for table in kernel.config.embedding_tables]
    shards = [(owner, owner.add_shard(row)) for owner, row in zip(owners, rows, strict=True)]
    # TorchRec builds its kernels itself and has no option for another class.
    of_features = [shards[table] for table in kernel._feature_table_map]
    kernel.forward = partial(_looked_up, of_features, isinstance(kernel, BatchedDenseEmbeddingBag))


def fused_adam(kernel: nn.Module) -> Any:
    """FBGEMM's tables of a kernel, if its Adam trains them; else None. It moves the rows that it is given by what it
    keeps of them, be their gradients zero, and counts each lookup as a step."""
    tables = getattr(kernel, "emb_module", None)
    return tables if getattr(tables, "optimizer", None) is EmbOptimType.ADAM else None


def kernels(collection: ShardedCollection) -> Iterator[nn.Module]:
    """Returns the modules of a sharded collection's lookups, TorchRec's kernels among them."""
    # The lookups are not among the module's children.
    for lookup in collection._lookups:
        yield from lookup.modules()
