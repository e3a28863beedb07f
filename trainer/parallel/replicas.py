"""Tables that are divided among the ranks of a group, with a copy in every group (tables.group_size).

Rows and gradients are exchanged within a group. The ranks that hold the same rows in all groups, peers, then send one
another the gradients that arrived, and each adds up those of all groups in one order: the copies stay bit-equal.

Axes: S ids that a lookup names, R bags, C columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from logitmix.comm.codec import Segment
from logitmix.comm.exchange import Exchange, RowSpan, Wire, stacked
from logitmix.comm.process_group import Ranks, limit_waiting
from logitmix.trainer.parallel.ids import IdExchange

SUFFIX = "/peers"
"""Of a table's name where what peers send is counted."""


@dataclass(frozen=True)
class Replicas:
    """The groups that a rank is in."""

    group: dist.ProcessGroup
    """Ranks that hold all tables together."""
    peers: dist.ProcessGroup | None
    """One rank of each group, which hold the same rows; None where there is one group."""
    number: int
    """Of this rank's group, from 0."""

    @classmethod
    def of(cls, ranks: Ranks, size: int, timeout_seconds: int) -> "Replicas":
        """Makes groups of `size` consecutive ranks. Collective."""
        count = ranks.world_size // size
        if count == 1:
            return cls(ranks.group, None, 0)
        groups = np.arange(ranks.world_size).reshape(count, size)
        own, peers = (_own(of, ranks, timeout_seconds) for of in (groups, groups.T))
        return cls(own, peers, ranks.rank // size)


def _own(groups: np.ndarray, ranks: Ranks, timeout_seconds: int) -> dist.ProcessGroup:
    """Returns the group with this rank among some groups [groups, ranks], which together are all ranks."""
    made = {tuple(members): dist.new_group(members) for members in groups.tolist()}
    (own,) = (group for members, group in made.items() if ranks.rank in members)
    limit_waiting(own, ranks.device, timeout_seconds)
    return own


class PeerGradients:
    """The gradients of a lookup's ids, which peers send one another. All calls are collective among the peers. The
    constructor begins the exchange of the ids' counts."""

    def __init__(
        self, features: KeyedJaggedTensor, tables: Sequence[str], pooled: bool, peers: dist.ProcessGroup, wire: Wire
    ) -> None:
        """`tables` has the table of each feature; `pooled`: whether the lookup adds up bags."""
        self.keys, self.tables, self.pooled, self.peers, self.wire = features.keys(), tables, pooled, peers, wire
        self.weighted = features.weights_or_none() is not None
        ids = [of.long() for of in features.values().split(features.length_per_key())]
        self._received: tuple[KeyedJaggedTensor, list[Tensor]] | None = None
        self.ids = IdExchange([ids] * peers.size(), peers, features.device(), None)

    def send(self, gradients: Sequence[Tensor]) -> None:
        """Sends the gradients [S, C] of the ids of each feature."""
        self.ids.send()
        self.widths = widths = [of.shape[1] for of in gradients]
        self.sizes = [[rows * width for rows, width in zip(of, widths, strict=True)] for of in self.ids.counts]
        segments = [Segment(table + SUFFIX, width) for table, width in zip(self.tables, widths, strict=True)]
        spans = [
            [RowSpan(rows, (segment,)) for rows, segment in zip(of_peer, segments, strict=True)]
            for of_peer in self.ids.counts
        ]
        mine, count = self.peers.rank(), self.peers.size()
        others = [of for peer, of in enumerate(spans) if peer != mine]
        self.exchange = Exchange(
            self.wire,
            self.peers,
            owner=stacked(spans),
            requester=stacked([spans[mine]] * count),
            requester_shape=(),
            summed=True,
            counted=[(span.layout, span.rows) for of in others for span in of],
            owner_like=(torch.Size([sum(map(sum, self.sizes))]), torch.float32),
        )
        self.exchange.send_gradients(torch.cat([of.flatten() for of in gradients]))

    def receive(self) -> tuple[KeyedJaggedTensor, list[Tensor]]:
        """Returns the ids of all groups, each a bag by itself where the lookup adds up bags, and the gradients [S, C]
        of each feature's, divided by the number of groups."""
        if self._received is None:
            self._received = self._receive()
        return self._received

    def _receive(self) -> tuple[KeyedJaggedTensor, list[Tensor]]:
        self.ids.wait()
        asked = self.ids.of(range(len(self.keys)))
        flat = self.exchange.receive_gradients()
        pieces = [
            of_peer.split(sizes) for of_peer, sizes in zip(flat.split([*map(sum, self.sizes)]), self.sizes, strict=True)
        ]
        gradients = [
            torch.cat([of_peer[number] for of_peer in pieces]).view(-1, width)
            for number, width in enumerate(self.widths)
        ]
        if not self.pooled:
            return asked.lookup(self.keys), gradients
        values, count = asked.values, len(gradients[0])
        # Its features are shards of one table's columns, so they have the same ids.
        features = KeyedJaggedTensor(
            keys=self.keys,
            values=values,
            weights=torch.ones(len(values), device=values.device) if self.weighted else None,
            lengths=torch.ones(len(values), dtype=torch.int64, device=values.device),
            stride=count,
            length_per_key=[count] * len(self.keys),
        )
        return features, gradients
