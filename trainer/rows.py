"""The rows of a batch on their way from the ranks that own them to the rank that needs them, and their gradients back.

Axes: V unique items of a batch, P those of a part, D encoder width.
"""

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from logitmix.comm.exchange import departure
from logitmix.modules.embeddings import ITEM, item_lookup


class Rows:
    """Rows of the item table that this rank needs, in parts: while one part is under way, another is looked up,
    encoded, decoded or updated.

    Making one tells the owners how many rows they will be asked for. Then come `ask`, `send`, `wait`,
    `return_gradients` and `update`, in this order. All ranks call them, and what a rank does in between goes on beside
    the wire.
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
        self.sent = False

    def ask(self) -> None:
        """Sends the ids, once the owners know how many."""
        with torch.cuda.stream(self.stream):
            for part in self.parts:
                part.ids = part.ids or part.sizes.wait()

    def send(self) -> None:
        """Sends the rows that all ranks asked this one for."""
        self.ask()
        self.sent = True
        for part in self.parts:
            part.send(self.stream)

    def wait(self) -> Tensor:
        """The rows [V, D], a leaf: the graph is cut where model parallelism ends."""
        for part in self.parts:
            part.wait(self.leaf_VD)
        return self.leaf_VD.requires_grad_()

    def return_gradients(self) -> None:
        """Sends the leaf's gradient to the owners."""
        assert self.leaf_VD.grad is not None
        for part in self.parts:
            part.return_gradient(self.leaf_VD.grad)

    def update(self, following: "Rows | None" = None) -> None:
        """Sums the gradients that came over the ranks and moves the rows. Those of the `following` batch are sent, each
        part as soon as no update of its rows is to come: parts are ranges of ids, the same for every batch."""
        if following:
            following.ask()
            following.sent = True
        for number, part in enumerate(self.parts):
            part.update()
            if following:
                following.parts[number].send(following.stream)

    def abandon(self) -> None:
        """Ends what all ranks have begun before `wait`: gloo may hang where a rank leaves the group earlier."""
        if self.sent:
            self.wait()
            return
        with torch.cuda.stream(self.stream):
            self.ask()
            for part in self.parts:
                part.ids.wait()


class _Part:
    """Rows that cross together."""

    def __init__(
        self, table: ShardedEmbeddingCollection, id_V: Tensor, slices: list[slice], device: torch.device
    ) -> None:
        self.table, self.slices, self.context = table, slices, table.create_context()
        self.sizes = table.input_dist(self.context, item_lookup(_taken(id_V, slices).to(device)))
        self.ids: Any = None

    def send(self, stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            ids = self.ids.wait()
        if stream:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            for held in (ids, self.context):
                held.record_stream(current)
        for sharding in self.context.sharding_contexts:
            # Row-wise, ranks own consecutive ids, so the rows of sorted ids come back in order.
            sharding.unbucketize_permute_tensor = None
        self.answer = self.table.compute_and_output_dist(self.context, ids)

    def wait(self, rows_VD: Tensor) -> None:
        """Puts the part in its place."""
        self.row_PD: Tensor = self.answer.wait()[ITEM].values()
        sizes = [each.stop - each.start for each in self.slices]
        for each, rows in zip(self.slices, self.row_PD.detach().split(sizes), strict=True):
            rows_VD[each] = rows

    def return_gradient(self, gradient_VD: Tensor) -> None:
        """The backward as far as the wire."""
        self.departed = departure(self.row_PD)
        self.under_way = torch.autograd.grad(self.row_PD, [self.departed], _taken(gradient_VD, self.slices))

    def update(self) -> None:
        """The rest of the backward."""
        torch.autograd.backward([self.departed], self.under_way)


def slices_of(id_V: Tensor, num_items: int, owners: int, parts: int) -> list[list[slice]]:
    """For each part, where its ids lie among the sorted ones: an equal share of each owner's range of ids."""
    if parts == 1:
        return [[slice(0, len(id_V))]]
    owned = -(-num_items // owners)
    cuts = torch.arange(owners)[:, None] * owned + torch.arange(parts + 1) * owned // parts
    bounds = torch.searchsorted(id_V, cuts).tolist()
    return [[slice(of[part], of[part + 1]) for of in bounds] for part in range(parts)]


def _taken(of_V: Tensor, slices: list[slice]) -> Tensor:
    pieces = [of_V[each] for each in slices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
