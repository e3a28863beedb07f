"""The exchange of pooled rows: the owner ranks sum the rows of each bag and send one row for each bag.

Axes: S ids of all bags, R bags, D width of a table's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection

from logitmix.comm.exchange import split_backward
from logitmix.modules.batch import Bags
from logitmix.modules.embeddings import own_name
from logitmix.modules.transfer import on_device
from logitmix.trainer.parallel.ids import IdExchange


@dataclass(frozen=True)
class PooledTable:
    """A table whose bags are pooled by the owners of its rows, which are divided into ranges of `block` rows.

    `ranges` are the numbers of the ranges, one for each of a rank's shards, in the order in which they are looked up.
    """

    module: ShardedEmbeddingBagCollection
    name: str
    dim: int
    block: int
    ranges: Sequence[Sequence[int]]

    @classmethod
    def of(cls, module: ShardedEmbeddingBagCollection) -> "PooledTable":
        (config,), (sharding,) = module._embedding_bag_configs, cast(Any, module)._embedding_shardings
        by_rank = [
            [table.local_metadata for group in groups for table in group.embedding_tables]
            for groups in sharding._grouped_embedding_configs_per_rank
        ]
        block = max(place.shard_sizes[0] for places in by_rank for place in places)
        # Where there are few rows, some ranges have none, and begin where the table ends.
        ranges = [[-(-place.shard_offsets[0] // block) for place in places] for places in by_rank]
        return cls(module, own_name(config.name), config.embedding_dim, block, ranges)


class PooledRows:
    """The mean row of each bag of one table, or the sum that its shares say, zero for empty bags; used as a part of a
    RowExchange."""

    def __init__(
        self,
        table: PooledTable,
        bags: Bags,
        asked: Sequence[list[Tensor]],
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Adds what it asks of each rank to the lists in `asked`: for each of the rank's shards, ids counted from
        the shard's first row, the lengths of their bags, and the bits of their shares, if there are any."""
        length_R = bags.offsets.diff()
        self.table, self.weighted, self.bags = table, bags.shares is not None, len(length_R)
        self.first = [len(lists) for lists in asked]
        count = 1 + max(number for of_rank in table.ranges for number in of_rank)
        length_NR, id_S, share_S, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            length_R, bags.values, False, False, torch.tensor([table.block]), count, bags.shares
        )
        lengths = length_NR.view(count, self.bags)
        sizes = lengths.sum(1).tolist()
        of_range = [[*of] for of in zip(id_S.split(sizes), lengths, strict=True)]
        if self.weighted:
            for lists, bits in zip(of_range, share_S.view(torch.int32).long().split(sizes), strict=True):
                lists.append(bits)
        for lists, numbers in zip(asked, table.ranges, strict=True):
            lists += [each for number in numbers for each in of_range[number]]
        with torch.cuda.stream(stream):
            count_R = torch.ones_like(length_R) if self.weighted else length_R.clamp(min=1)
            self.count_R1 = on_device(count_R.unsqueeze(1), device)

    def send_rows(self, ids: IdExchange) -> None:
        if ids.stream:
            self.count_R1.record_stream(torch.cuda.current_stream())
        table, mine = self.table, ids.group.rank()
        kinds, shards = 3 if self.weighted else 2, len(table.ranges[mine])
        first, end = self.first[mine], self.first[mine] + kinds * shards
        id_lists, length_lists, share_lists = (range(first + kind, end, kinds) for kind in range(3))
        # Whoever owns nothing needs to know its own bags alone.
        bags = [of_rank[length_lists[0]] if shards else self.bags for of_rank in ids.counts]
        features = KeyedJaggedTensor(
            keys=[table.name] * shards,
            values=ids.joined(id_lists),
            weights=ids.joined(share_lists).int().view(torch.float32) if self.weighted else None,
            lengths=ids.joined(length_lists),
            stride=sum(bags),
            # Otherwise it would ask the device.
            length_per_key=[sum(of_rank[number] for of_rank in ids.counts) for number in id_lists],
        )
        context = EmbeddingBagCollectionContext([EmbeddingShardingContext(batch_size_per_rank=bags)])
        self.rows_in_flight = table.module.compute_and_output_dist(context, KJTList([features]))

    def wait(self, rows: dict[str, Tensor]) -> None:
        self.sum_RD: Tensor = cast(Any, self.rows_in_flight.wait())[self.table.name]
        rows[self.table.name].copy_(self.sum_RD.detach() / self.count_R1)

    def send_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Does the backward up to sending the gradients."""
        self.split = split_backward(self.sum_RD)
        gradient_RD = gradients[self.table.name] / self.count_R1
        self.gradient_in_flight = torch.autograd.grad(self.sum_RD, [self.split], gradient_RD)

    def apply_gradients(self) -> None:
        """Does the rest of the backward: receives the gradients and updates the rows."""
        torch.autograd.backward([self.split], self.gradient_in_flight)
