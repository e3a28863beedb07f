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
from logitmix.comm.exchange import Exchange, RowSpan, Wire, side_by_side, stacked

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
        if isinstance(module, ShardedEmbeddingCollection):
            shardings: Sequence[Any] = list(module._sharding_type_to_sharding.values())
        elif isinstance(module, ShardedEmbeddingBagCollection):
            shardings = module._embedding_shardings
        elif isinstance(module, ShardedEmbeddingTower | ShardedEmbeddingTowerCollection | ShardedEmbeddingBag):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, whose exchange cannot be encoded; "
                "shard its tables as EmbeddingBagCollection or EmbeddingCollection"
            )
        else:
            continue
        for sharding, output in zip(shardings, module._output_dists, strict=True):
            _replace(output, sharding, wire)
        found += 1
    if not found:
        raise ValueError("no table of the model is sharded; attach after TorchRec has sharded it")
    return wire


def _replace(output: nn.Module, sharding: Any, wire: Wire) -> None:
    """Replaces the modules that do the sending, whether they are already built or not."""
    if isinstance(output, DpPooledEmbeddingDist | DpSequenceEmbeddingDist):
        return
    layouts = _layouts(sharding._grouped_embedding_configs_per_rank)
    match output:
        case TwSequenceEmbeddingDist() | RwSequenceEmbeddingDist():
            output._dist = SequenceAllToAll(sharding._pg, layouts, wire)
        case TwPooledEmbeddingDist():
            output._dist = PooledAllToAll(sharding._pg, layouts, wire, output._callbacks)
            output._variable_dist = VariablePooledAllToAll(sharding._pg, layouts, wire)
        case RwPooledEmbeddingDist():
            output._dist = ReduceScatter(sharding._pg, layouts[0], wire)
        case TwRwPooledEmbeddingDist() | GridPooledEmbeddingDist():
            per_node = _layouts(sharding._grouped_embedding_configs_per_node)
            local = per_node[sharding._rank // sharding._intra_pg.size()]
            output._intra_dist = output._variable_intra_dist = ReduceScatter(sharding._intra_pg, local, wire)
            callbacks = getattr(output, "_callbacks", None)
            output._cross_dist = PooledAllToAll(sharding._cross_pg, per_node, wire, callbacks)
            output._variable_cross_dist = VariablePooledAllToAll(sharding._cross_pg, per_node, wire)
        case _:
            raise ValueError(f"the exchange {type(output).__name__} is not known here and cannot be encoded")
    for layout in layouts:
        for segment in layout:
            wire.register(segment.table)


def _layouts(groups_per_rank: Sequence[Any]) -> list[RowLayout]:
    """For each rank (or node), its features in the order of its output."""
    return [
        tuple(
            Segment(table.name, table.local_cols)
            for group in groups
            for table in group.embedding_tables
            for _ in table.feature_names
        )
        for groups in groups_per_rank
    ]


class SequenceAllToAll(nn.Module):
    """Replaces TorchRec's SequenceEmbeddingsAllToAll: one row for each id."""

    def __init__(self, group: dist.ProcessGroup, layout_by_rank: Sequence[RowLayout], wire: Wire) -> None:
        super().__init__()
        self.group, self.layout_by_rank, self.wire = group, layout_by_rank, wire
        self.layout = layout_by_rank[group.rank()]
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
        """`local_embs` [R, D], of which `output_splits` rows go to each rank and `input_splits` come from each."""
        D = local_embs.shape[1]
        rows_FW = self._rows_per_feature(lengths, batch_size_per_rank)
        sent, received = self._spans(output_splits, input_splits, rows_FW, D)
        exchange = Exchange(
            self.wire,
            self.group,
            owner=stacked(sent),
            requester=stacked(received),
            requester_shape=(sum(input_splits), D),
            order=self._order(local_embs, lengths, batch_size_per_rank, sparse_features_recat),
            counted=self._counted(output_splits, rows_FW),
        )
        return SequenceEmbeddingsAwaitable(exchange.start(local_embs), unbucketize_permute_tensor, D)

    def _spans(
        self, sent: Sequence[int], received: Sequence[int], rows_FW: Tensor | None, D: int
    ) -> tuple[list[list[RowSpan]], list[list[RowSpan]]]:
        if not self.wire.sampling or rows_FW is None:
            # Any feature's name will do: nothing depends on it.
            return [[RowSpan(rows, (Segment(_name(self.layout), D),))] for rows in sent], [
                [RowSpan(rows, (Segment(_name(layout), D),))]
                for rows, layout in zip(received, self.layout_by_rank, strict=True)
            ]
        # Samples are counted by table, and only the owners know how many rows each of their features sends.
        counts = [len(layout) for layout in self.layout_by_rank]
        to_receive = rows_FW.new_empty(sum(counts))
        to_send = rows_FW.t().contiguous().view(-1)
        if self.group.size() > 1:
            dist.all_to_all_single(to_receive, to_send, counts, [len(self.layout)] * self.group.size(), self.group)
        else:
            to_receive = to_send
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

    def _counted(self, sent: Sequence[int], rows_FW: Tensor | None) -> list[tuple[RowLayout, int | Tensor]]:
        mine = self.group.rank()
        if rows_FW is None:
            return [(self.layout, sum(sent) - sent[mine])]
        return [(self.layout, rows_FW.sum(1) - rows_FW[:, mine])]

    def _rows_per_feature(self, lengths: Tensor, batch_size_per_rank: Sequence[int] | None) -> Tensor | None:
        """Rows [F, W] that each own feature sends to each rank, from the lengths of the bags that ask for them; None if
        no rank has several features, so that the splits give the numbers."""
        F, W = len(self.layout), self.group.size()
        if all(len(layout) <= 1 for layout in self.layout_by_rank):
            return None
        if F == 0 or lengths.numel() == 0:
            return lengths.new_zeros((F, W), dtype=torch.int64)
        length_FB = lengths.view(F, -1).to(torch.int64)
        bags = list(batch_size_per_rank) if batch_size_per_rank else [length_FB.shape[1] // W] * W
        return torch.stack([part.sum(1) for part in length_FB.split(bags, dim=1)], dim=1)


def _name(layout: RowLayout) -> str:
    return layout[0].table if layout else ""


def _spans_by_segment(rows: Sequence[int], layout: RowLayout) -> list[RowSpan]:
    """A separate span for each segment."""
    return [RowSpan(count, (segment,)) for count, segment in zip(rows, layout, strict=True)]


class PooledAllToAll(nn.Module):
    """Replaces TorchRec's PooledEmbeddingsAllToAll: each rank owns columns of every user's row."""

    def __init__(
        self, group: dist.ProcessGroup, layout_by_rank: Sequence[RowLayout], wire: Wire, callbacks: Any = None
    ) -> None:
        super().__init__()
        self.group, self.layout_by_rank, self.wire = group, layout_by_rank, wire
        self.callbacks = callbacks or []

    @eager
    def forward(
        self, local_embs: Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """`local_embs` [users of all ranks, own columns] becomes [own users, columns of all ranks]."""
        W, mine = self.group.size(), self.group.rank()
        users = list(batch_size_per_rank) if batch_size_per_rank else [len(local_embs) // W] * W
        layout = self.layout_by_rank[mine]
        exchange = Exchange(
            self.wire,
            self.group,
            owner=stacked([[RowSpan(count, layout)] for count in users]),
            requester=side_by_side(users[mine], self.layout_by_rank),
            requester_shape=(users[mine], sum(map(width_of, self.layout_by_rank))),
            counted=[(layout, sum(users) - users[mine])],
        )
        return _pooled(exchange, local_embs, self.callbacks)


class VariablePooledAllToAll(nn.Module):
    """Replaces VariableBatchPooledEmbeddingsAllToAll: the number of bags differs by feature."""

    def __init__(self, group: dist.ProcessGroup, layout_by_rank: Sequence[RowLayout], wire: Wire) -> None:
        super().__init__()
        self.group, self.layout_by_rank, self.wire = group, layout_by_rank, wire

    @eager
    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: Sequence[Sequence[int]],
        batch_size_per_feature_pre_a2a: Sequence[int],
    ) -> PooledEmbeddingsAwaitable:
        """Flat `local_embs`, by rank and own feature, becomes flat, by rank and that rank's feature."""
        layout = self.layout_by_rank[self.group.rank()]
        sent = _spans_by_rank(batch_size_per_rank_per_feature, layout, self.group.size())
        bags = iter(batch_size_per_feature_pre_a2a)
        received = [[RowSpan(next(bags), (segment,)) for segment in layout] for layout in self.layout_by_rank]
        exchange = Exchange(
            self.wire,
            self.group,
            owner=stacked(sent),
            requester=stacked(received),
            requester_shape=(_elements(received),),
            counted=_leaving(sent, self.group.rank()),
        )
        return _pooled(exchange, local_embs)


class ReduceScatter(nn.Module):
    """Replaces TorchRec's reduce-scatter of pooled embeddings, with one batch size or one for each feature."""

    def __init__(self, group: dist.ProcessGroup, layout: RowLayout, wire: Wire) -> None:
        super().__init__()
        self.group, self.layout, self.wire = group, layout, wire

    @eager
    def forward(
        self,
        local_embs: Tensor,
        input_splits: Sequence[int] | None = None,
        batch_size_per_rank_per_feature: Sequence[Sequence[int]] | None = None,
        embedding_dims: Sequence[int] | None = None,
    ) -> PooledEmbeddingsAwaitable:
        """Partial sums of all ranks' users, [users of all ranks, columns] or flat, become sums of this rank's users."""
        W, mine = self.group.size(), self.group.rank()
        if batch_size_per_rank_per_feature is not None:
            sent = _spans_by_rank(batch_size_per_rank_per_feature, self.layout, W)
            shape: tuple[int, ...] = (_elements(sent[mine : mine + 1]),)
        else:
            users = list(input_splits) if input_splits else [len(local_embs) // W] * W
            sent, shape = [[RowSpan(count, self.layout)] for count in users], (users[mine], local_embs.shape[1])
        exchange = Exchange(
            self.wire,
            self.group,
            owner=stacked(sent),
            requester=stacked([sent[mine]] * W),
            requester_shape=shape,
            summed=True,
            counted=_leaving(sent, mine),
        )
        return _pooled(exchange, local_embs)


def _spans_by_rank(bags_WF: Sequence[Sequence[int]], layout: RowLayout, W: int) -> list[list[RowSpan]]:
    """A rank without features gets no list of bags from TorchRec."""
    return [_spans_by_segment(bags, layout) for bags in bags_WF] if layout else [[] for _ in range(W)]


def _elements(spans_by_rank: Sequence[Sequence[RowSpan]]) -> int:
    return sum(span.rows * width_of(span.layout) for spans in spans_by_rank for span in spans)


def _leaving(spans_by_rank: Sequence[Sequence[RowSpan]], mine: int) -> list[tuple[RowLayout, int | Tensor]]:
    return [(span.layout, span.rows) for rank, spans in enumerate(spans_by_rank) if rank != mine for span in spans]


def _pooled(exchange: Exchange, values: Tensor, callbacks: Any = ()) -> PooledEmbeddingsAwaitable:
    awaitable = PooledEmbeddingsAwaitable(tensor_awaitable=exchange.start(values))
    awaitable.callbacks.extend(callbacks)
    return awaitable
