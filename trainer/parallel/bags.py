"""The exchange of pooled rows: the owner ranks sum the rows of each bag and send one row for each bag.

Axes: S ids of all bags, R bags, D width of a table's rows.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from logitmix.comm.exchange import split_backward
from logitmix.modules.batch import Bags
from logitmix.modules.embeddings import bag_lookup, own_name


@dataclass(frozen=True)
class PooledTable:
    """A table whose bags are pooled by the owners of its rows."""

    module: ShardedEmbeddingBagCollection
    name: str
    dim: int

    @classmethod
    def of(cls, module: ShardedEmbeddingBagCollection) -> "PooledTable":
        (config,) = module._embedding_bag_configs
        return cls(module, own_name(config.name), config.embedding_dim)


class PooledRows:
    """The mean row of each bag of one table, or the sum that its shares say, zero for empty bags; used as a part of a
    RowExchange."""

    def __init__(self, table: PooledTable, bags: Bags, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.table, self.stream, self.context = table, stream, table.module.create_context()
        self.ids_in_flight: Any = None
        with torch.cuda.stream(stream):
            bags = bags.to(device)
            lengths_R = bags.offsets.diff()
            self.count_R1 = (lengths_R.clamp(min=1) if bags.shares is None else torch.ones_like(lengths_R)).unsqueeze(1)
            self.sizes_in_flight = table.module.input_dist(self.context, bag_lookup(table.name, bags))

    def send_ids(self) -> None:
        self.ids_in_flight = self.ids_in_flight or self.sizes_in_flight.wait()

    def receive_ids(self) -> Any:
        """The ids that all ranks ask this one for. On CUDA they arrive on a separate stream: the current stream waits
        for it, and the memory of what was made there is kept for the current stream."""
        with torch.cuda.stream(self.stream):
            ids = self.ids_in_flight.wait()
        if self.stream:
            current = torch.cuda.current_stream()
            current.wait_stream(self.stream)
            for each in (ids, self.context, self.count_R1):
                each.record_stream(current)
        return ids

    def send_rows(self, _: Any) -> None:
        self.rows_in_flight = self.table.module.compute_and_output_dist(self.context, self.receive_ids())

    def wait(self, rows: dict[str, Tensor]) -> None:
        self.sum_RD: Tensor = cast(Any, self.rows_in_flight.wait())[self.table.name]
        rows[self.table.name].copy_(self.sum_RD.detach() / self.count_R1)

    def send_gradients(self, gradients: dict[str, Tensor]) -> None:
        """The backward up to sending the gradients."""
        self.split = split_backward(self.sum_RD)
        gradient_RD = gradients[self.table.name] / self.count_R1
        self.gradient_in_flight = torch.autograd.grad(self.sum_RD, [self.split], gradient_RD)

    def apply_gradients(self) -> None:
        """The rest of the backward: receives the gradients and updates the rows."""
        torch.autograd.backward([self.split], self.gradient_in_flight)
