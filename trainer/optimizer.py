"""Optimizers of the sharded tables and of the dense part.

Tables: TorchRec fuses most optimizers into the backward of the lookup, but FBGEMM has no fused Adam on CPU. There,
tables take another route with the same meaning.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.adam import adam
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import Shard, ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from logitmix.trainer.config import DenseConfig, TablesConfig


class TableOptimizer(Protocol):
    def begin_step(self, rate: float) -> None:
        """Before the gradients of a step are applied: its learning rate is `rate` times the configured one."""

    def state_dict(self) -> dict[str, Any]:
        """Sharded state, by reference: what is loaded into its tensors in place takes effect."""

    def restore(self, state: dict[str, Any], steps: int) -> None:
        """Take up the state that was loaded into `state_dict()`, after this many steps."""


def table_optimizer(table: ShardedEmbeddingCollection, weight: str, config: TablesConfig) -> TableOptimizer:
    """The optimizer of a table that was sharded with `table_kernel` and `fused_params`."""
    kernels = [module for module in _kernels(table) if isinstance(module, BatchedDenseEmbedding)]
    if config.optimizer == "adam" and table_kernel(config, _device(table)) is EmbeddingComputeKernel.DENSE:
        return TouchedRowsAdam(table, weight, kernels, config)
    return FusedOptimizer(table, config.lr)


def table_kernel(config: TablesConfig, device: torch.device) -> EmbeddingComputeKernel:
    if config.optimizer == "adam" and device.type == "cpu":
        return EmbeddingComputeKernel.DENSE
    return EmbeddingComputeKernel.FUSED


def fused_params(config: TablesConfig) -> dict[str, Any]:
    """What FBGEMM's fused kernels are to be told."""
    kind = {
        "adam": EmbOptimType.ADAM,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "sgd": EmbOptimType.EXACT_SGD,
    }[config.optimizer]
    params: dict[str, Any] = {"optimizer": kind, "learning_rate": config.lr}
    if config.optimizer != "sgd":
        params["eps"] = config.eps
    if config.optimizer == "adam":
        params |= {"beta1": config.beta1, "beta2": config.beta2}
    return params


def dense_optimizer(module: nn.Module, config: DenseConfig) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay
    )
    # The moments exist from the start, so that a checkpoint has tensors to be loaded into.
    for parameter in module.parameters():
        zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}
    return optimizer


class FusedOptimizer:
    """TorchRec's optimizer inside the backward of the lookup."""

    def __init__(self, table: ShardedEmbeddingCollection, lr: float) -> None:
        self.optimizer, self.lr = cast(CombinedOptimizer, table.fused_optimizer), lr

    def begin_step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.lr
        # FBGEMM takes the rate over here; the rows move in the backward that follows.
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()["state"]

    def restore(self, state: dict[str, Any], steps: int) -> None:
        whole = self.optimizer.state_dict()
        self.optimizer.load_state_dict(whole | {"state": whole["state"] | state})
        for _, part in self.optimizer.optimizers:
            cast(Any, part).set_optimizer_step(steps)


class TouchedRowsAdam:
    """Adam over this rank's shards, inside the backward of a lookup: rows that no rank looked up, and their moments,
    stay as they are.

    As FBGEMM's on CUDA, with eps added after the bias correction (torch.optim.SparseAdam adds it before). Rows are
    gathered, as many at once as a core's cache holds, and go through torch's fused Adam: one pass over them where
    SparseAdam takes a dozen.
    """

    def __init__(
        self, table: ShardedEmbeddingCollection, weight: str, kernels: list[BatchedDenseEmbedding], config: TablesConfig
    ) -> None:
        self.sharded = cast(ShardedTensor, table.state_dict()[weight])
        self.config, self.lr, self.steps = config, config.lr, 0
        self.shards = [shard for kernel in kernels for shard in _take_over(kernel, self)]

    def begin_step(self, rate: float) -> None:
        self.lr, self.steps = rate * self.config.lr, self.steps + 1

    def update(self, shard: "_Shard", ids: Tensor, gradient: Tensor) -> None:
        """Of a shard's rows that were looked up, maybe several times."""
        summed = torch.sparse_coo_tensor(ids[None], gradient, shard.row.shape, check_invariants=False).coalesce()
        for ids_R, gradient_RC in zip(summed.indices()[0].split(_ROWS), summed.values().split(_ROWS), strict=True):
            row_RC, first_RC, second_RC = (table.index_select(0, ids_R) for table in shard)
            adam(
                [row_RC],
                [gradient_RC],
                [first_RC],
                [second_RC],
                max_exp_avg_sqs=[],
                state_steps=[torch.tensor(float(self.steps - 1))],
                fused=True,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=self.lr,
                weight_decay=0.0,
                eps=self.config.eps,
                maximize=False,
            )
            for table, values_RC in zip(shard, (row_RC, first_RC, second_RC), strict=True):
                table.index_copy_(0, ids_R, values_RC)

    def state_dict(self) -> dict[str, Any]:
        return {name: self._sharded(name) for name in _MOMENTS}

    def restore(self, state: dict[str, Any], steps: int) -> None:
        self.steps = steps

    def _sharded(self, name: str) -> ShardedTensor:
        moments = {shard.row.data_ptr(): getattr(shard, name) for shard in self.shards}
        shards = self.sharded.local_shards()
        local = [Shard(moments[shard.tensor.data_ptr()], shard.metadata) for shard in shards]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local, self.sharded.metadata(), process_group=self.sharded._process_group
        )


_MOMENTS = ("exp_avg", "exp_avg_sq")
_ROWS = 512
"""Rows that Adam takes at once."""


class _Shard(NamedTuple):
    """Rows [R, width] and their moments."""

    row: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class _UpdatedRows(BatchedDenseEmbedding):
    """TorchRec's dense kernel, whose rows are updated in its backward."""

    _shards: list[_Shard]
    _optimizer: TouchedRowsAdam

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values = features.values().long().split(features.length_per_key())
        shards = [self._shards[table] for table in self._feature_table_map]
        # Something has to ask for a gradient, that there be a backward.
        asks = torch.empty(0, requires_grad=True)
        rows = [_Lookup.apply(self._optimizer, shard, ids, asks) for shard, ids in zip(shards, values, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, optimizer: TouchedRowsAdam, shard: _Shard, ids: Tensor, asks: Tensor) -> Tensor:
        ctx.update = partial(optimizer.update, shard, ids)
        return shard.row.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.update(gradient)
        return None, None, None, None


def _take_over(kernel: BatchedDenseEmbedding, optimizer: TouchedRowsAdam) -> list[_Shard]:
    """Turn the kernel into _UpdatedRows, over the storage it had."""
    rows = [weight.detach() for weight in kernel.split_embedding_weights()]
    shards = [_Shard(row, torch.zeros_like(row), torch.zeros_like(row)) for row in rows]
    # TorchRec builds its kernels itself and offers no place to name another class. The optimizer stays out of its
    # module tree, so that its state dict keeps the sharded names.
    kernel.__class__ = _UpdatedRows
    object.__setattr__(kernel, "_shards", shards)
    object.__setattr__(kernel, "_optimizer", optimizer)
    return shards


def _kernels(table: ShardedEmbeddingCollection) -> Iterator[nn.Module]:
    # The lookups are not among the module's children.
    for lookup in table._lookups:
        yield from lookup.modules()


def _device(table: ShardedEmbeddingCollection) -> torch.device:
    assert table._device is not None
    return table._device
