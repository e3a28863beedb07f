"""What an export holds of the items, shard by shard. On the CPU the tensors are mapped from the files: what is not used
is not in memory.

Axes: T items of histories, K candidates, N items of a chunk, D width of a row.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from logitmix.modules.similarity.base import Side
from logitmix.serving.model import TABLE
from logitmix.serving.pieces import Pieces

Chunk = tuple[Tensor, Side]
"""Indices [N] and sides of some items."""


class Items:
    """The table's rows and the items' sides of both stages."""

    def __init__(self, shards: Sequence[Mapping[str, Tensor]]) -> None:
        """Each shard has consecutive items, by the names of `item_cache`."""
        self.shards, self.table = shards, Pieces([shard[TABLE] for shard in shards])
        self.starts = self.table.starts

    def __len__(self) -> int:
        return len(self.table)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def rows(self, index_T: Tensor) -> Tensor:
        """Rows of the table [T, D] of items that are named on the CPU, in any order."""
        return self.table.fetch(index_T)

    def all(self, stage: str, chunk: int) -> Iterator[Chunk]:
        """All items, at most `chunk` at a time."""
        for number, start in enumerate(self.starts[:-1].tolist()):
            side = self._side(number, stage)
            for first in range(0, len(side[0]), chunk):
                parts = tuple(part[first : first + chunk] for part in side)
                yield torch.arange(start + first, start + first + len(parts[0]), device=self.device), parts

    def some(self, stage: str, index_K: Tensor, chunk: int) -> Iterator[Chunk]:
        """The items of indices that rise, at most `chunk` at a time."""
        bounds = torch.searchsorted(index_K, self.starts.to(index_K.device)).tolist()
        for number, start in enumerate(self.starts[:-1].tolist()):
            for index_N in index_K[bounds[number] : bounds[number + 1]].split(chunk):
                if len(index_N):
                    yield index_N, tuple(part[index_N - start] for part in self._side(number, stage))

    def _side(self, number: int, stage: str) -> Side:
        """similarity.0, similarity.1, … as the tuple that the stage's `item` gave."""
        shard = self.shards[number]
        count = sum(name.startswith(f"{stage}.") for name in shard)
        return tuple(shard[f"{stage}.{i}"] for i in range(count))
