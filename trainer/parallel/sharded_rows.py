"""Rows of a table whose shards are on several ranks, for evaluation: in FP32, without the wire's codec.

Axes: V ids, D width of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor

from logitmix.comm.collectives import all_to_all
from logitmix.comm.process_group import Ranks


@dataclass(frozen=True)
class ShardPlace:
    """Rows [first_row, first_row + rows) and columns [first_column, first_column + columns), held by a rank."""

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int

    @classmethod
    def of(cls, shard: ShardMetadata) -> "ShardPlace":
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        rank = shard.placement.rank() if shard.placement else None
        assert rank is not None
        return cls(rank, row, rows, column, columns)

    def inside(self, id_V: Tensor) -> Tensor:
        """Returns which of the ids have their row in this shard, bool [V]."""
        return (id_V >= self.first_row) & (id_V < self.first_row + self.rows)


class ShardedRows:
    """A table [X, D] in blocks; each rank holds some of them."""

    def __init__(
        self,
        blocks: Sequence[ShardPlace],
        held: Sequence[Tensor],
        dim: int,
        ranks: Ranks,
        row_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`held` are the tensors of this rank's blocks, in the order of `blocks`. `row_of`, collective, gives the rows
        of ids, where these are not the same."""
        self.dim, self.ranks, self.row_of = dim, ranks, row_of
        self.of_rank = [[block for block in blocks if block.rank == rank] for rank in range(ranks.world_size)]
        self.held = list(zip(self.of_rank[ranks.rank], held, strict=True))

    @classmethod
    def of_shards(
        cls, sharded: ShardedTensor, ranks: Ranks, row_of: Callable[[Tensor], Tensor] | None = None
    ) -> "ShardedRows":
        """Returns the rows of a table in training, by reference."""
        blocks = list(map(ShardPlace.of, sharded.metadata().shards_metadata))
        tensors = {tuple(shard.metadata.shard_offsets): shard.tensor.detach() for shard in sharded.local_shards()}
        held = [tensors[block.first_row, block.first_column] for block in blocks if block.rank == ranks.rank]
        return cls(blocks, held, sharded.size()[1], ranks, row_of)

    @classmethod
    def of_ranges(
        cls, num_rows: int, held_RD: Tensor, ranks: Ranks, row_of: Callable[[Tensor], Tensor] | None = None
    ) -> "ShardedRows":
        """Returns rows that are divided by ranges: rank r holds `own_range(num_rows, r, …)`."""
        ranges = [own_range(num_rows, rank, ranks.world_size) for rank in range(ranks.world_size)]
        dim = held_RD.shape[1]
        blocks = [ShardPlace(rank, start, stop - start, 0, dim) for rank, (start, stop) in enumerate(ranges)]
        return cls(blocks, [held_RD], dim, ranks, row_of)

    def fetch(self, id_V: Tensor) -> Tensor:
        """Returns the rows [V, D] of any ids (int64, on the CPU) on this rank's device. Collective: every rank asks for
        its own, or for none."""
        if self.row_of:
            id_V = self.row_of(id_V)
        # Places of the ids of which a rank holds any column.
        wanted = [
            sum((block.inside(id_V) for block in blocks), torch.zeros(len(id_V), dtype=torch.bool)).nonzero().flatten()
            for blocks in self.of_rank
        ]
        answers = all_to_all(
            [self._answer(id_A) for id_A in all_to_all([id_V[at] for at in wanted], self.ranks)], self.ranks
        )
        row_VD = torch.empty(len(id_V), self.dim, device=self.ranks.device)
        for blocks, at, answer in zip(self.of_rank, wanted, answers, strict=True):
            for block in blocks:
                at_N = at[block.inside(id_V[at])]
                values, answer = answer.tensor_split([len(at_N) * block.columns])
                columns = slice(block.first_column, block.first_column + block.columns)
                row_VD[at_N.to(row_VD.device), columns] = values.view(len(at_N), block.columns)
        return row_VD

    def _answer(self, id_A: Tensor) -> Tensor:
        """Returns this rank's columns of the rows of some ids, block after block, flat."""
        parts = [torch.empty(0, device=self.ranks.device)]
        for block, tensor in self.held:
            row_N = id_A[block.inside(id_A)] - block.first_row
            parts.append(tensor.index_select(0, row_N.to(tensor.device)).float().flatten())
        return torch.cat(parts)


def own_range(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns a rank's share of `count` things, first and last (excluded): ranks differ by at most one."""
    return count * rank // world_size, count * (rank + 1) // world_size
