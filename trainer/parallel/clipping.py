"""The norm of all gradients, those of the tables' rows included, and the scale that clips them to a norm.

A row's gradient is the sum over the ranks, which is known only when the row's owner has received all parts. But the
tables update their rows inside the backward of the lookup. With clipping, the graph is therefore cut at the lookup's
output: gradients stop there until the norm is known.

Axes: S ids that a lookup names, R bags, U unique ids, C columns that a rank has of a table.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from logitmix.trainer.parallel.optimizer import ShardedCollection, bags_by_feature, kernels, of_each_id

Kernel: TypeAlias = BaseBatchedEmbedding[Any] | BaseBatchedEmbeddingBag[Any]


class DetachedLookup(NamedTuple):
    """One lookup of a rank's shards: `output` has the graph that updates them; `leaf` has its values, and gets its
    gradient from the rest of the step. Both [S, C], or for bags [R, C of all tables]."""

    kernel: Kernel
    features: KeyedJaggedTensor
    output: Tensor
    leaf: Tensor

    def squares(self) -> Tensor:
        """The sum of squares of the rows' gradients; the gradients of a row that was asked for several times are summed
        first."""
        ids = self.features.values().long().split(self.features.length_per_key())
        total = torch.zeros((), dtype=torch.float64, device=self.leaf.device)
        for ids_S, gradient_SC in zip(ids, self._gradients(), strict=True):
            unique_U, inverse_S = ids_S.unique(return_inverse=True)
            row_UC = gradient_SC.new_zeros(len(unique_U), gradient_SC.shape[1]).index_add_(0, inverse_S, gradient_SC)
            total += row_UC.square().sum(dtype=torch.float64)
        return total

    def update(self, scale: Tensor) -> None:
        """The rest of the backward, which updates the rows."""
        torch.autograd.backward([self.output], [self._gradient * scale])

    def _gradients(self) -> Iterable[Tensor]:
        """The gradients of each feature's ids [S, C], feature by feature."""
        if isinstance(self.kernel, BaseBatchedEmbedding):
            return self._gradient.split(self.features.length_per_key())
        tables = self.kernel.config.embedding_tables
        columns = [tables[table].local_cols for table in self.kernel._feature_table_map]
        by_feature = zip(self._gradient.split(columns, dim=1), bags_by_feature(self.features), strict=True)
        return (of_each_id(gradient_RC, *of_bags) for gradient_RC, of_bags in by_feature)

    @property
    def _gradient(self) -> Tensor:
        assert self.leaf.grad is not None
        return self.leaf.grad


class DetachedLookups:
    """Cuts the graph at the output of every lookup of sharded tables."""

    def __init__(self, collections: Iterable[ShardedCollection]) -> None:
        self._cuts: list[DetachedLookup] = []
        for collection in collections:
            for kernel in kernels(collection):
                if isinstance(kernel, BaseBatchedEmbedding | BaseBatchedEmbeddingBag):
                    kernel.register_forward_hook(cast(Any, self._cut))

    def pop(self) -> list[DetachedLookup]:
        """The cut lookups since the last call."""
        cuts, self._cuts = self._cuts, []
        return cuts

    def _cut(self, kernel: Kernel, arguments: tuple[KeyedJaggedTensor], output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        self._cuts.append(DetachedLookup(kernel, arguments[0], output, leaf))
        return leaf


def clip_scale(norm: Tensor, clip: float) -> Tensor:
    """The factor for gradients of this norm, as in torch.nn.utils.clip_grad_norm_."""
    return (clip / (norm + 1e-6)).clamp(max=1.0)
