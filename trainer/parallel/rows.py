"""The exchange of a batch's rows between the ranks that own them and the rank that needs them, and of their gradients.

Axes: V unique ids of a table that a batch names, P rows that are received together, D width of a table's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable

from logitmix.comm.exchange import split_backward
from logitmix.modules.batch import Bags
from logitmix.modules.embeddings import own_name
from logitmix.trainer.parallel.bags import PooledRows, PooledTable
from logitmix.trainer.parallel.clipping import DetachedLookup, DetachedLookups
from logitmix.trainer.parallel.ids import IdExchange


class OwnedColumns(NamedTuple):
    """Columns of a range of a table's rows that a rank owns; `owner` is the number of the range, `first_row` where it
    begins."""

    table: str
    owner: int
    columns: slice
    first_row: int


class SentRows(NamedTuple):
    """The part of one table that one rank sends: its range among the table's unique ids, and its columns."""

    table: str
    rows: slice
    columns: slice

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class ShardedTables:
    """The tables of one width, as TorchRec shards them, and how their rows are exchanged.

    `exchanges` are TorchRec's all-to-alls, one for each sharding type of the tables, as lists of each rank's shards, in
    the order in which their ids are looked up and their rows are received. `cuts` [owners, parts + 1] are the ids that
    divide each table into the ranges of its owners, and each range into equal parts.
    """

    module: ShardedEmbeddingCollection
    dims: Mapping[str, int]
    exchanges: Sequence[Sequence[Sequence[OwnedColumns]]]
    cuts: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: ShardedEmbeddingCollection, parts: int) -> "ShardedTables":
        configs = module._embedding_configs
        ranges: dict[str, dict[tuple[int, int], int]] = {own_name(config.name): {} for config in configs}
        exchanges = []
        for sharding in cast(Any, module._sharding_type_to_sharding).values():
            by_rank = []
            for groups in sharding._grouped_embedding_configs_per_rank:
                shards = []
                for table in (table for group in groups for table in group.embedding_tables):
                    place, name = table.local_metadata, own_name(table.name)
                    (row, column), (rows, columns) = place.shard_offsets, place.shard_sizes
                    owner = ranges[name].setdefault((row, rows), len(ranges[name]))
                    shards.append(OwnedColumns(name, owner, slice(column, column + columns), row))
                by_rank.append(shards)
            exchanges.append(by_rank)
        part = torch.arange(parts + 1)
        cuts = {name: torch.stack([row + rows * part // parts for row, rows in ranges[name]]) for name in ranges}
        return cls(module, {own_name(config.name): config.embedding_dim for config in configs}, exchanges, cuts)

    def slices(self, ids: Mapping[str, Tensor]) -> list[dict[str, list[slice]]]:
        """Returns for each part and table the range of each owner's ids among the table's sorted ids [V]."""
        bounds = {name: torch.searchsorted(ids[name], cuts).tolist() for name, cuts in self.cuts.items()}
        parts = next(iter(self.cuts.values())).shape[1] - 1
        return [
            {name: [slice(of[part], of[part + 1]) for of in owners] for name, owners in bounds.items()}
            for part in range(parts)
        ]


class RowExchange:
    """The rows of all tables that this rank needs for one batch.

    The constructor begins the exchange of row counts between ranks. Call `send_ids`, `send_rows`, `wait`,
    `send_gradients` and `apply_gradients` next, in this order. All are collective, only `wait` and `apply_gradients`
    block for long, and a rank's computation in between overlaps with the transfers. The rows are exchanged in parts:
    while one part is in flight, another is looked up, encoded, decoded or updated.
    """

    def __init__(
        self,
        tables: Sequence[ShardedTables],
        pooled: Sequence[PooledTable],
        ids: Mapping[str, Tensor | Bags],
        group: dist.ProcessGroup,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        cuts: DetachedLookups | None = None,
    ) -> None:
        """`ids` has the batch's ids [V] of each table: unique, sorted, on the CPU, possibly an empty tensor. For a
        pooled table they are bags, and its rows [R, D] are the bags' means. On CUDA, ids are sent on a separate
        `stream`, so that they need not wait for the previous batch. With `cuts`, call `receive_gradients`
        before `apply_gradients`."""
        unique = {name: of_table for name, of_table in ids.items() if isinstance(of_table, Tensor)}
        bags = {name: of_table for name, of_table in ids.items() if isinstance(of_table, Bags)}
        shapes = {name: (len(unique[name]), dim) for each in tables for name, dim in each.dims.items()}
        shapes |= {each.name: (len(bags[each.name].offsets) - 1, each.dim) for each in pooled}
        self.rows = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}
        self.stream, self.cuts = stream, cuts
        self.lookups: list[list[DetachedLookup]] = []
        self.parts: list[list[_Part | PooledRows]] = []
        asked: list[list[Tensor]] = [[] for _ in range(group.size())]
        for of_part in zip(*(each.slices(unique) for each in tables), strict=True):
            pairs = zip(tables, of_part, strict=True)
            self.parts.append([_Part(each, unique, slices, asked, group) for each, slices in pairs])
        self.parts[0] += [PooledRows(each, bags[each.name], asked, device, stream) for each in pooled]
        self.ids = IdExchange(asked, group, device, stream)
        self.rows_sent = False

    def send_ids(self) -> None:
        """Sends the ids to their owners, after the exchange of their counts; does nothing when called again."""
        with torch.cuda.stream(self.stream):
            self.ids.send()

    def send_rows(self) -> None:
        """Sends the rows that all ranks asked this one for."""
        self._begin()
        for part in self.parts:
            self._send_part(part)

    def _begin(self) -> None:
        self.send_ids()
        self.ids.wait()
        self.rows_sent = True

    def wait(self) -> dict[str, Tensor]:
        """Returns the rows [V, D] of each table, leaves: the graph is cut where model parallelism ends."""
        for each in self._all():
            each.wait(self.rows)
        for leaf_VD in self.rows.values():
            leaf_VD.requires_grad_()
        return self.rows

    def send_gradients(self) -> None:
        """Sends the leaves' gradients to the owners; a leaf without one was not used, and its gradient is zero."""
        gradients = {
            name: torch.zeros_like(leaf_VD) if leaf_VD.grad is None else leaf_VD.grad
            for name, leaf_VD in self.rows.items()
        }
        for each in self._all():
            each.send_gradients(gradients)

    def receive_gradients(self) -> Tensor:
        """Waits, with `cuts`, for the gradients of all ranks, without an update; returns the sum of squares of the
        gradients of this rank's own rows, FP64 scalar. The ranks' sum has each row once."""
        for number in range(len(self.parts)):
            self._receive_part(number)
        squares = torch.zeros((), dtype=torch.float64, device=next(iter(self.rows.values())).device)
        return sum((lookup.squares() for part in self.lookups for lookup in part), squares)

    def apply_gradients(self, next_batch: "RowExchange | None" = None, scale: Tensor | None = None) -> None:
        """Sums the gradients of all ranks and updates the rows. The rows of the `next_batch` batch are sent, each part
        as soon as its rows are updated: parts are ranges of ids, the same for every batch. With a `scale`, the
        gradients have already arrived, and are multiplied by it."""
        if next_batch:
            next_batch._begin()
        for number in range(len(self.parts)):
            if scale is None:
                self._receive_part(number)
            if self.cuts:
                self.cuts.update(self.lookups[number], scale)
            if next_batch:
                next_batch._send_part(next_batch.parts[number])

    def _receive_part(self, number: int) -> None:
        """Waits for a part's gradients. Without `cuts`, this updates the rows."""
        for each in self.parts[number]:
            each.apply_gradients()
        for lookup in self.lookups[number] if self.cuts else ():
            lookup.share()

    def abandon(self) -> None:
        """Completes the transfers that all ranks began before `wait`: gloo may hang if a rank leaves the group
        earlier."""
        if self.rows_sent:
            self.wait()
            return
        self.send_ids()
        self.ids.wait()

    def _send_part(self, part: "list[_Part | PooledRows]") -> None:
        for each in part:
            each.send_rows(self.ids)
        if self.cuts:
            self.lookups.append(self.cuts.pop())

    def _all(self) -> "list[_Part | PooledRows]":
        return [each for part in self.parts for each in part]


class _Part:
    """A part of the rows of some tables of one width, which is exchanged together."""

    def __init__(
        self,
        tables: ShardedTables,
        ids: Mapping[str, Tensor],
        slices: Mapping[str, Sequence[slice]],
        asked: Sequence[list[Tensor]],
        group: dist.ProcessGroup,
    ) -> None:
        """`slices` of the batch's ids by table and owner. What it asks of each rank is added to the lists in `asked`:
        the ids for each of the rank's shards, counted from the shard's first row."""
        self.tables, self.group, self.first = tables, group, len(asked[group.rank()])
        self.pieces, self.rows_asked = [], []
        for by_rank in tables.exchanges:
            pieces = [
                [SentRows(shard.table, slices[shard.table][shard.owner], shard.columns) for shard in shards]
                for shards in by_rank
            ]
            self.pieces.append(_joined([*chain(*pieces)]))
            self.rows_asked.append([sum(piece.length for piece in of_rank) for of_rank in pieces])
            for shards, of_rank, lists in zip(by_rank, pieces, asked, strict=True):
                pairs = zip(shards, of_rank, strict=True)
                lists += [ids[piece.table][piece.rows] - shard.first_row for shard, piece in pairs]

    def send_rows(self, ids: IdExchange) -> None:
        context, inputs, first = EmbeddingCollectionContext(), [], self.first
        W = self.group.size()
        for by_rank, rows_asked in zip(self.tables.exchanges, self.rows_asked, strict=True):
            shards = by_rank[self.group.rank()]
            asked = ids.of(range(first, first + len(shards)))
            first += len(shards)
            inputs.append(asked.lookup([shard.table for shard in shards]))
            context.sharding_contexts.append(
                SequenceShardingContext(
                    batch_size_per_rank=[inputs[-1].stride() // W] * W,
                    input_splits=rows_asked,
                    output_splits=[*map(sum, asked.counts)],
                )
            )
        answer = cast(Any, self.tables.module.compute_and_output_dist(context, KJTList(inputs)))
        # The rows before TorchRec splits them by feature, which would need rows in the order of the ids.
        self.rows_in_flight: list[Awaitable[Tensor]] = answer._awaitables_per_sharding

    def wait(self, rows: Mapping[str, Tensor]) -> None:
        """Copies the received rows to their places."""
        self.received = [in_flight.wait() for in_flight in self.rows_in_flight]
        for received_PD, pieces in zip(self.received, self.pieces, strict=True):
            lengths = [piece.length for piece in pieces]
            for piece, part_PD in zip(pieces, received_PD.detach().split(lengths), strict=True):
                rows[piece.table][piece.rows, piece.columns] = part_PD

    def send_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Does the backward up to sending the gradients."""
        self.splits, self.gradients_in_flight = [], []
        for received_PD, pieces in zip(self.received, self.pieces, strict=True):
            none = received_PD.new_empty(0, received_PD.shape[1])
            parts = [gradients[piece.table][piece.rows, piece.columns] for piece in pieces] or [none]
            gradient_PD = parts[0] if len(parts) == 1 else torch.cat(parts)
            split = split_backward(received_PD)
            self.splits.append(split)
            self.gradients_in_flight.append(torch.autograd.grad(received_PD, [split], gradient_PD))

    def apply_gradients(self) -> None:
        """Does the rest of the backward: receives the gradients and updates the rows."""
        for split, in_flight in zip(self.splits, self.gradients_in_flight, strict=True):
            torch.autograd.backward([split], in_flight)


def _joined(pieces: Sequence[SentRows]) -> list[SentRows]:
    """Merges pieces that follow each other on the wire and in the rows of their table, and leaves out empty ones."""
    joined: list[SentRows] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.table == piece.table and last.columns == piece.columns and last.rows.stop == piece.rows.start:
            joined[-1] = last._replace(rows=slice(last.rows.start, piece.rows.stop))
        elif piece.length:
            joined.append(piece)
    return joined
