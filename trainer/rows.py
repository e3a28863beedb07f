"""The exchange of a batch's rows between the ranks that own them and the rank that needs them, and of their gradients.

Axes: V unique items of a batch, P those of a part, D encoder width.
"""

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from logitmix.comm.exchange import split_backward
from logitmix.modules.embeddings import ITEM, item_lookup


class RowExchange:
    """The rows of the item table that this rank needs for one batch.

    Making one sends the owners the number of rows that they will be asked for. Then come `send_ids`, `send_rows`,
    `wait`, `send_gradients` and `apply_gradients`, in this order. All are collective, none but `wait` and
    `apply_gradients` blocks for long, and what a rank computes in between overlaps with the transfers. The rows are
    exchanged in parts: while one part is in flight, another is looked up, encoded, decoded or updated.
    """

    def __init__(
        self,
        table: ShardedEmbeddingCollection,
        id_V: Tensor,
        slices: list[list[slice]],
        leaf_VD: Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """id_V is sorted and on the CPU; each part takes some slices of it. `leaf_VD` is where the rows will stand. On
        CUDA, sizes and ids are made on a `stream` of their own, so that they need not wait for the batch before."""
        self.leaf_VD, self.stream = leaf_VD, stream
        with torch.cuda.stream(stream):
            self.parts = [_Part(table, id_V, of_part, leaf_VD.device) for of_part in slices]
        self.rows_sent = False

    def send_ids(self) -> None:
        """Sends the ids to their owners, once these know how many; does nothing when called again."""
        with torch.cuda.stream(self.stream):
            for part in self.parts:
                part.send_ids()

    def send_rows(self) -> None:
        """Sends the rows that all ranks asked this one for."""
        self.send_ids()
        self.rows_sent = True
        for part in self.parts:
            part.send_rows(self.stream)

    def wait(self) -> Tensor:
        """The rows [V, D], a leaf: the graph is cut where model parallelism ends."""
        for part in self.parts:
            part.wait(self.leaf_VD)
        return self.leaf_VD.requires_grad_()

    def send_gradients(self) -> None:
        """Sends the leaf's gradient to the owners."""
        assert self.leaf_VD.grad is not None
        for part in self.parts:
            part.send_gradient(self.leaf_VD.grad)

    def apply_gradients(self, following: "RowExchange | None" = None) -> None:
        """Adds up the gradients of all ranks and updates the rows. Those of the `following` batch are sent, each part
        as soon as its rows are updated: parts are ranges of ids, the same for every batch."""
        if following:
            following.send_ids()
            following.rows_sent = True
        for number, part in enumerate(self.parts):
            part.apply_gradient()
            if following:
                following.parts[number].send_rows(following.stream)

    def abandon(self) -> None:
        """Ends what all ranks have begun before `wait`: gloo may hang where a rank leaves the group earlier."""
        if self.rows_sent:
            self.wait()
            return
        with torch.cuda.stream(self.stream):
            self.send_ids()
            for part in self.parts:
                part.ids_in_flight.wait()


class _Part:
    """Rows that are exchanged together."""

    def __init__(
        self, table: ShardedEmbeddingCollection, id_V: Tensor, slices: list[slice], device: torch.device
    ) -> None:
        self.table, self.slices, self.context = table, slices, table.create_context()
        self.sizes_in_flight = table.input_dist(self.context, item_lookup(_select(id_V, slices).to(device)))
        self.ids_in_flight: Any = None

    def send_ids(self) -> None:
        self.ids_in_flight = self.ids_in_flight or self.sizes_in_flight.wait()

    def send_rows(self, stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            ids = self.ids_in_flight.wait()
        if stream:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            for held in (ids, self.context):
                held.record_stream(current)
        for sharding in self.context.sharding_contexts:
            # Row-wise, ranks own consecutive ids, so the rows of sorted ids come back in order.
            sharding.unbucketize_permute_tensor = None
        self.rows_in_flight = self.table.compute_and_output_dist(self.context, ids)

    def wait(self, rows_VD: Tensor) -> None:
        """Puts the part's rows in their place."""
        self.row_PD: Tensor = self.rows_in_flight.wait()[ITEM].values()
        sizes = [each.stop - each.start for each in self.slices]
        for each, rows in zip(self.slices, self.row_PD.detach().split(sizes), strict=True):
            rows_VD[each] = rows

    def send_gradient(self, gradient_VD: Tensor) -> None:
        """The backward as far as the wire."""
        self.split = split_backward(self.row_PD)
        self.gradient_in_flight = torch.autograd.grad(self.row_PD, [self.split], _select(gradient_VD, self.slices))

    def apply_gradient(self) -> None:
        """The rest of the backward."""
        torch.autograd.backward([self.split], self.gradient_in_flight)


def slices_of(id_V: Tensor, num_items: int, owners: int, parts: int) -> list[list[slice]]:
    """For each part, where its ids lie among the sorted ones: an equal share of each owner's range of ids."""
    if parts == 1:
        return [[slice(0, len(id_V))]]
    owned = -(-num_items // owners)
    cuts = torch.arange(owners)[:, None] * owned + torch.arange(parts + 1) * owned // parts
    bounds = torch.searchsorted(id_V, cuts).tolist()
    return [[slice(of[part], of[part + 1]) for of in bounds] for part in range(parts)]


def _select(of_V: Tensor, slices: list[slice]) -> Tensor:
    pieces = [of_V[each] for each in slices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
