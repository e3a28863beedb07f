"""Which collective gets which codec (section 4.4, "FP8 Quantized Communication").

For any TorchRec model, once it is sharded, three lines:

    from logitmix.comm.config import WireConfig
    from logitmix.comm.hooks import attach
    wire = attach(model, WireConfig())  # model: a DistributedModelParallel, or anything that holds sharded tables

From then on embeddings are sent in E4M3 and their gradients in E5M2, and `wire` counts them. Every collective that
TorchRec has for the rows of EmbeddingCollection and EmbeddingBagCollection is covered: the all-to-all of sequences,
that of pooled embeddings, and the reduce-scatter of tables sharded by rows, which becomes an all-to-all of encoded
parts and a sum in FP32. Row widths are those of each call's tables. docs/wire.md has the table of sharding types.

TorchRec's own hook for codecs passes flat tensors without their shape, cannot replace a reduce-scatter, and is skipped
on its compiled paths. So the modules that do the exchange are replaced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable, SequenceEmbeddingsAwaitable
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower, ShardedEmbeddingTowerCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBag, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist

from logitmix.comm.codec import RowLayout, Segment, width_of
from logitmix.comm.config import WireConfig
from logitmix.comm.exchange import End, Exchange, RowSpan, Wire, side_by_side, stacked

# TorchRec compiles parts of a sharded module, but an exchange keeps state between two calls.
eager: Callable[[Any], Any] = torch.compiler.disable


def attach(model: nn.Module, config: WireConfig, seed: int = 0) -> Wire:
    """Gives every exchange of embedding rows in `model` the precisions of `config`, from the next batch on.

    `model` must be sharded; its data-parallel tables exchange no rows and are left alone. `seed` seeds stochastic
    rounding. Call `attach` again after resharding tables.

    Raises ValueError if there is no sharded table, and for TorchRec modules whose exchange is unknown here: none is
    silently left in another precision.
    """
    wire, found = Wire(config, seed), 0
    for name, module in model.named_modules():
        if isinstance(module, ShardedEmbeddingTower | ShardedEmbeddingTowerCollection | ShardedEmbeddingBag):
            raise ValueError(f"{name or 'the model'} is a {type(module).__name__}, whose exchange cannot be encoded")
        if isinstance(module, ShardedEmbeddingCollection):
            shardings: Sequence[Any] = list(module._sharding_type_to_sharding.values())
        elif isinstance(module, ShardedEmbeddingBagCollection):
            shardings = module._embedding_shardings
        else:
            continue
        for sharding, output in zip(shardings, module._output_dists, strict=True):
            _replace(output, sharding, wire)
        found += 1
    if not found:
        raise ValueError("no table of the model is sharded; attach after TorchRec has sharded it")
    return wire


def _replace(output: nn.Module, sharding: Any, wire: Wire) -> None:
    """Replaces the modules that do the sending, whether they are already built or not. TorchRec refuses batches with
    other numbers of bags for each feature where it has no `_variable_dist`."""
    if isinstance(output, DpPooledEmbeddingDist | DpSequenceEmbeddingDist):
        return
    layouts = _layouts(sharding._grouped_embedding_configs_per_rank)
    match output:
        case TwSequenceEmbeddingDist() | RwSequenceEmbeddingDist():
            output._dist = SequenceAllToAll(sharding._pg, layouts, wire)
        case TwPooledEmbeddingDist():
            output._dist = PooledAllToAll(sharding._pg, layouts, wire, output._callbacks)
            output._variable_dist = None
        case RwPooledEmbeddingDist():
            output._dist = ReduceScatter(sharding._pg, layouts, wire)
        case TwRwPooledEmbeddingDist() | GridPooledEmbeddingDist():
            per_node = _layouts(sharding._grouped_embedding_configs_per_node)
            ranks = sharding._intra_pg.size()
            local = [per_node[sharding._rank // ranks]] * ranks
            output._intra_dist = ReduceScatter(sharding._intra_pg, local, wire)
            callbacks = getattr(output, "_callbacks", ())
            output._cross_dist = PooledAllToAll(sharding._cross_pg, per_node, wire, callbacks)
            output._variable_intra_dist = output._variable_cross_dist = None
        case _:
            raise ValueError(f"the exchange {type(output).__name__} is not known here and cannot be encoded")
    for layout in layouts:
        for segment in layout:
            wire.register(segment.table)


def _layouts(groups_per_rank: Sequence[Any]) -> list[RowLayout]:
    """Returns for each rank (or node) its features in the order of its output."""
    return [
        tuple(
            Segment(table.name, table.local_cols)
            for group in groups
            for table in group.embedding_tables
            for _ in table.feature_names
        )
        for groups in groups_per_rank
    ]


class _Sender(nn.Module):
    """What sends the rows of the features of a layout for each rank."""

    def __init__(
        self, group: dist.ProcessGroup, layout_by_rank: Sequence[RowLayout], wire: Wire, callbacks: Any = ()
    ) -> None:
        super().__init__()
        self.group, self.layout_by_rank, self.wire, self.callbacks = group, layout_by_rank, wire, callbacks or ()
        self.layout, self.mine = layout_by_rank[group.rank()], group.rank()

    def _users(self, local_embs: Tensor, users: Sequence[int] | None) -> list[int]:
        """Returns the number of users of each rank, which are equal unless they are given."""
        W = self.group.size()
        return list(users) if users else [len(local_embs) // W] * W

    def _pooled(
        self,
        values: Tensor,
        sent: Sequence[Sequence[RowSpan]],
        requester: End,
        shape: tuple[int, ...],
        summed: bool = False,
    ) -> PooledEmbeddingsAwaitable:
        """Sends the values, spans for each rank, and counts those that leave."""
        others = [span for rank, spans in enumerate(sent) if rank != self.mine for span in spans]
        counted = [(span.layout, span.rows) for span in others]
        exchange = Exchange(self.wire, self.group, stacked(sent), requester, shape, summed, counted=counted)
        awaitable = PooledEmbeddingsAwaitable(tensor_awaitable=exchange.start(values))
        awaitable.callbacks.extend(self.callbacks)
        return awaitable


class SequenceAllToAll(_Sender):
    """Replaces TorchRec's SequenceEmbeddingsAllToAll: one row for each id."""

    def __init__(self, group: dist.ProcessGroup, layout_by_rank: Sequence[RowLayout], wire: Wire) -> None:
        super().__init__(group, layout_by_rank, wire)
        W, F = group.size(), len(self.layout)
        # The lookup's rows are ordered by (feature, rank), the wire's by (rank, feature).
        self.feature_by_rank = torch.tensor([rank + feature * W for rank in range(W) for feature in range(F)])

    @eager
    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: Sequence[int] | None = None,
        sparse_features_recat: Tensor | None = None,
    ) -> SequenceEmbeddingsAwaitable:
        """Sends `local_embs` [R, D], of which `output_splits` rows go to each rank and `input_splits` come from
        each."""
        D = local_embs.shape[1]
        rows_FW = self._rows_per_feature(lengths, batch_size_per_rank)
        sent, received = self._spans(output_splits, input_splits, rows_FW, D)
        leaving: int | Tensor = sum(output_splits) - output_splits[self.mine]
        if rows_FW is not None:
            leaving = rows_FW.sum(1) - rows_FW[:, self.mine]
        exchange = Exchange(
            self.wire,
            self.group,
            owner=stacked(sent),
            requester=stacked(received),
            requester_shape=(sum(input_splits), D),
            order=self._order(local_embs, lengths, batch_size_per_rank, sparse_features_recat),
            counted=[(self.layout, leaving)],
        )
        return SequenceEmbeddingsAwaitable(exchange.start(local_embs), unbucketize_permute_tensor, D)

    def _spans(
        self, sent: Sequence[int], received: Sequence[int], rows_FW: Tensor | None, D: int
    ) -> tuple[list[list[RowSpan]], list[list[RowSpan]]]:
        if not self.wire.sampling or rows_FW is None:
            # Of several tables any name will do: nothing depends on it.
            names = [layout[0].table if layout else "" for layout in self.layout_by_rank]
            return [[RowSpan(rows, (Segment(names[self.mine], D),))] for rows in sent], [
                [RowSpan(rows, (Segment(name, D),))] for rows, name in zip(received, names, strict=True)
            ]
        # Samples are counted by table, and only the owners know how many rows each of their features sends.
        counts = [len(layout) for layout in self.layout_by_rank]
        to_receive = rows_FW.new_empty(sum(counts))
        to_send, own = rows_FW.t().contiguous().view(-1), [len(self.layout)] * self.group.size()
        dist.all_to_all_single(to_receive, to_send, counts, own, self.group)
        rows_WF = [rows.tolist() for rows in to_receive.split(counts)]
        return (
            [_spans_by_segment(rows, self.layout) for rows in rows_FW.t().tolist()],
            [_spans_by_segment(rows, layout) for rows, layout in zip(rows_WF, self.layout_by_rank, strict=True)],
        )

    def _order(
        self, local_embs: Tensor, lengths: Tensor, batch_size_per_rank: Sequence[int] | None, recat: Tensor | None
    ) -> Tensor | None:
        F, W = len(self.layout), self.group.size()
        if F <= 1 or W == 1:
            return None
        index_R = torch.arange(len(local_embs), device=local_embs.device)
        if batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1:
            assert recat is not None
            permute, lengths = torch.ops.fbgemm.invert_permute(recat), lengths.view(-1)
            return torch.ops.fbgemm.permute_1D_sparse_data(permute, lengths, index_R, None, index_R.numel())[1]
        # Kept there, because the host would wait for each copy.
        permute = self.feature_by_rank = self.feature_by_rank.to(local_embs.device, torch.int32)
        lengths = lengths.view(F * W, -1)
        return torch.ops.fbgemm.permute_2D_sparse_data(permute, lengths, index_R, None, index_R.numel())[1]

    def _rows_per_feature(self, lengths: Tensor, batch_size_per_rank: Sequence[int] | None) -> Tensor | None:
        """Returns the rows [F, W] that each own feature sends to each rank, from the lengths of the bags that ask for
        them; None if no rank has several features, so that the splits give the numbers."""
        F, W = len(self.layout), self.group.size()
        if all(len(layout) <= 1 for layout in self.layout_by_rank):
            return None
        if F == 0 or lengths.numel() == 0:
            return lengths.new_zeros((F, W), dtype=torch.int64)
        length_FB = lengths.view(F, -1).to(torch.int64)
        bags = list(batch_size_per_rank) if batch_size_per_rank else [length_FB.shape[1] // W] * W
        return torch.stack([part.sum(1) for part in length_FB.split(bags, dim=1)], dim=1)


def _spans_by_segment(rows: Sequence[int], layout: RowLayout) -> list[RowSpan]:
    """Returns a separate span for each segment."""
    return [RowSpan(count, (segment,)) for count, segment in zip(rows, layout, strict=True)]


class PooledAllToAll(_Sender):
    """Replaces TorchRec's PooledEmbeddingsAllToAll: each rank owns columns of every user's row."""

    @eager
    def forward(
        self, local_embs: Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """Turns `local_embs` [users of all ranks, own columns] into [own users, columns of all ranks]."""
        users = self._users(local_embs, batch_size_per_rank)
        sent, own = [[RowSpan(count, self.layout)] for count in users], users[self.mine]
        shape = own, sum(map(width_of, self.layout_by_rank))
        return self._pooled(local_embs, sent, side_by_side(own, self.layout_by_rank), shape)


class ReduceScatter(_Sender):
    """Replaces TorchRec's reduce-scatter of pooled embeddings. All ranks have the same features."""

    @eager
    def forward(self, local_embs: Tensor, input_splits: Sequence[int] | None = None) -> PooledEmbeddingsAwaitable:
        """Turns `local_embs` [users of all ranks, columns], a part of each sum, into the sums of this rank's users."""
        users = self._users(local_embs, input_splits)
        sent, shape = [[RowSpan(count, self.layout)] for count in users], (users[self.mine], local_embs.shape[1])
        return self._pooled(local_embs, sent, stacked([sent[self.mine]] * self.group.size()), shape, summed=True)
