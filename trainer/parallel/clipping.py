"""The norm of all gradients, those of the tables' rows included, the scale that clips them to a norm, the sum of rows'
gradients over copies of the tables, and on CUDA the update that the device leaves out.

A row's gradient is the sum over the ranks, which is known only when the row's owner has received all parts. But the
tables update their rows inside the backward of the lookup. With clipping, the graph is therefore cut at the lookup's
output: gradients stop there until the norm is known. Where several groups of ranks have copies of the tables, they stop
there until those of all groups are there; then the update looks up the rows of all groups. On CUDA they stop there
because the host does not know whether the step is finite.

Axes: S ids that a lookup names, R bags, U unique ids, C columns that a rank has of a table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from logitmix.comm.exchange import Wire
from logitmix.trainer.parallel.optimizer import (
    ShardedCollection,
    TableOptimizers,
    bags_by_feature,
    fused_adam,
    kernels,
    of_each_id,
)
from logitmix.trainer.parallel.replicas import PeerGradients, Replicas

Kernel: TypeAlias = BaseBatchedEmbedding[Any] | BaseBatchedEmbeddingBag[Any]


@dataclass(frozen=True)
class DetachedLookup:
    """One lookup of a rank's shards: `output` has the graph that updates them; `leaf` has its values, and gets its
    gradient from the rest of the step. Both [S, C], or for bags [R, C of all tables]."""

    kernel: Kernel
    features: KeyedJaggedTensor
    output: Tensor
    leaf: Tensor
    optimizers: TableOptimizers
    peers: PeerGradients | None = None
    """Where there are other groups of ranks."""
    step: int = 0
    """That FBGEMM's Adam took this lookup for."""

    def share(self) -> None:
        """Sends the gradients that have arrived to the other groups; does nothing where there are none."""
        if self.peers:
            self.peers.send([*self._gradients()])

    def squares(self) -> Tensor:
        """Returns the sum of squares of the rows' gradients; the gradients of a row that was asked for several times
        are summed first. Zero in all groups but the first, which have the same rows."""
        total = torch.zeros((), dtype=torch.float64, device=self.leaf.device)
        features, gradients = self.peers.receive() if self.peers else (self.features, self._gradients())
        if self.peers and self.peers.peers.rank():
            return total
        ids = features.values().long().split(features.length_per_key())
        for ids_S, gradient_SC in zip(ids, gradients, strict=True):
            # As many sums as ids, because a GPU would have to be waited for to know how many rows they are of.
            sorted_S, order_S = ids_S.sort(stable=True)
            row_S = F.pad(sorted_S.diff() != 0, (min(1, len(ids_S)), 0)).cumsum(0)
            row_SC = torch.zeros_like(gradient_SC).index_add_(0, row_S, gradient_SC[order_S])
            total += row_SC.square().sum(dtype=torch.float64)
        return total

    def update(self, scale: Tensor | None) -> None:
        """Does the rest of the backward, which updates the rows by the gradients times `scale`."""
        features, output, gradient = self.features, self.output, self._gradient
        step, finite, adam = self.optimizers.steps, self.optimizers.finite, fused_adam(self.kernel)
        if self.peers:
            features, gradients = self.peers.receive()
            gradient = torch.cat(gradients, dim=1 if self.peers.pooled else 0)
        if scale is not None:
            gradient = gradient * scale
        if finite is not None and adam:
            # In place of all rows the first, which `DetachedLookups.update` keeps. Through `data`, because the lookup's
            # backward would refuse ids that have changed.
            features.values().data.mul_(finite)
        elif finite is not None:
            gradient = torch.where(finite, gradient, 0.0)
        if self.peers or (adam and self.step != step):
            if adam:
                adam.iter.fill_(step - 1)
                adam.iter_cpu.fill_(step - 1)
            # Not through the hook that cuts.
            output = cast(Any, self.kernel).forward(features)
        torch.autograd.backward([output], [gradient])

    def _gradients(self) -> Iterable[Tensor]:
        """Returns the gradients of each feature's ids [S, C], feature by feature."""
        if isinstance(self.kernel, BaseBatchedEmbedding):
            return self._gradient.split(self.features.length_per_key())
        tables = self.kernel.config.embedding_tables
        columns = [tables[table].local_cols for table in self.kernel._feature_table_map]
        by_feature = zip(self._gradient.split(columns, dim=1), bags_by_feature(self.features), strict=True)
        counts = self.features.length_per_key()
        return (of_each_id(of, count, *of_bags) for count, (of, of_bags) in zip(counts, by_feature, strict=True))

    @property
    def _gradient(self) -> Tensor:
        assert self.leaf.grad is not None
        return self.leaf.grad


class DetachedLookups:
    """Cuts the graph at the output of every lookup of sharded tables."""

    def __init__(
        self,
        collections: Iterable[ShardedCollection],
        optimizers: TableOptimizers,
        replicas: Replicas,
        wire: Wire,
    ) -> None:
        self._cuts: list[DetachedLookup] = []
        self._optimizers, self._replicas, self._wire = optimizers, replicas, wire
        for collection in collections:
            for kernel in kernels(collection):
                if isinstance(kernel, BaseBatchedEmbedding | BaseBatchedEmbeddingBag):
                    kernel.register_forward_hook(cast(Any, self._cut))

    def pop(self) -> list[DetachedLookup]:
        """Returns the cut lookups since the last call."""
        cuts, self._cuts = self._cuts, []
        return cuts

    def update(self, lookups: Iterable[DetachedLookup], scale: Tensor | None) -> None:
        """Updates the rows of some lookups by their gradients times `scale`."""
        rows, finite = self._optimizers.first_rows, self._optimizers.finite
        kept = torch.cat(rows) if rows and finite is not None else None
        for lookup in lookups:
            lookup.update(scale)
        if kept is not None:
            right = torch.where(cast(Tensor, finite), torch.cat(rows), kept)
            torch._foreach_copy_(rows, right.split([len(row) for row in rows]))

    def _cut(self, kernel: Kernel, arguments: tuple[KeyedJaggedTensor], output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        (features,), peers = arguments, None
        if self._replicas.peers:
            tables = [kernel.config.embedding_tables[table].name for table in kernel._feature_table_map]
            pooled = isinstance(kernel, BaseBatchedEmbeddingBag)
            peers = PeerGradients(features, tables, pooled, self._replicas.peers, self._wire)
        adam = fused_adam(kernel)
        step = int(adam.iter_cpu) if adam else 0
        self._cuts.append(DetachedLookup(kernel, features, output, leaf, self._optimizers, peers, step))
        return leaf


def clip_scale(norm: Tensor, clip: float) -> Tensor:
    """Returns the factor for gradients of this norm, as in torch.nn.utils.clip_grad_norm_."""
    return (clip / (norm + 1e-6)).clamp(max=1.0)
