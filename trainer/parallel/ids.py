"""The exchange of ids: what each rank asks of each other rank, before the rows come back.

The host knows all ids when a batch is made, so it also counts them. The counts go over gloo, and nothing waits for a
CUDA device; then the ids of all tables travel in one message.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from logitmix.modules.transfer import on_device

BAG, BAGS = 16, 2**17
"""Ids of a bag, at least, and about how many bags there are at most. Rows are not summed, but one of FBGEMM's warps
looks up a whole bag, an id at a time: with a bag for each rank, 3,706 rows took an H100 a millisecond."""


class AskedIds(NamedTuple):
    """Ids that all ranks ask this one for, list by list and rank by rank within each [S], and their numbers by rank and
    list."""

    values: Tensor
    counts: Sequence[Sequence[int]]

    def lookup(self, names: Sequence[str]) -> KeyedJaggedTensor:
        """Returns a lookup's input, whose features are the lists, with as many bags for each rank."""
        W, F = len(self.counts), len(names)
        count_FW = torch.tensor(self.counts, dtype=torch.int64).view(W, F).t()
        largest = int(count_FW.max()) if F else 0
        bag = max(BAG, -(-largest * W * F // BAGS))
        first_B = torch.arange(0, max(largest, 1), bag)
        length_FWB = (count_FW[:, :, None] - first_B).clamp_(0, bag)
        return KeyedJaggedTensor(
            keys=[*names],
            values=self.values,
            lengths=on_device(length_FWB.flatten(), self.values.device),
            stride=W * len(first_B),
            # Otherwise it would ask the device.
            length_per_key=count_FW.sum(1).tolist(),
        )


class IdExchange:
    """The ids that this rank asks of each rank, as lists: a rank gets as many lists of each other, and of the same
    meaning. What else is asked in whole numbers, such as the lengths of bags, is a list, too. All calls are collective.
    The constructor begins the exchange of counts."""

    def __init__(
        self,
        asked: Sequence[Sequence[Tensor]],
        group: dist.ProcessGroup,
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """`asked` has the lists for each rank: int64, on the CPU, as numbered where the owner keeps its rows. On CUDA
        they arrive on `stream`."""
        self.group, self.device, self.stream, self.asked = group, device, stream, asked
        W, lists = group.size(), len(asked[group.rank()])
        self.counts_sent = [[len(ids) for ids in of_rank] for of_rank in asked]
        sent = torch.tensor([*chain(*self.counts_sent)], dtype=torch.int64)
        if W == 1:
            self._counts, self._pending = sent, None
        else:
            self._counts = torch.empty(W * lists, dtype=torch.int64)
            splits = [lists] * W, [*map(len, asked)]
            self._pending = dist.all_to_all_single(self._counts, sent, *splits, group=group, async_op=True)
        self._ids: Tensor | None = None

    def send(self) -> None:
        """Sends the ids, once the counts are there; does nothing when called again."""
        if self._ids is not None:
            return
        if self._pending:
            self._pending.wait()
        self.counts = self._counts.view(self.group.size(), -1).tolist()
        ids = on_device(torch.cat([*chain(*self.asked)]), self.device)
        self.asked, self._pending = (), None
        if self.group.size() == 1:
            self._ids = ids
            return
        self._ids = torch.empty(sum(map(sum, self.counts)), dtype=torch.int64, device=self.device)
        splits = [sum(of_rank) for of_rank in self.counts], [sum(of_rank) for of_rank in self.counts_sent]
        self._pending = dist.all_to_all_single(self._ids, ids, *splits, group=self.group, async_op=True)

    def wait(self) -> None:
        """Waits for the ids of all ranks; on CUDA the current stream does."""
        assert self._ids is not None
        if self._pending:
            with torch.cuda.stream(self.stream):
                self._pending.wait()
            self._pending = None
        if self.stream:
            current = torch.cuda.current_stream()
            current.wait_stream(self.stream)
            self._ids.record_stream(current)
        from_ranks = self._ids.split([sum(of_rank) for of_rank in self.counts])
        pairs = zip(from_ranks, self.counts, strict=True)
        self._received = [from_rank.split(of_rank) for from_rank, of_rank in pairs]

    def of(self, lists: range) -> AskedIds:
        """Returns some of this rank's lists, after `wait`."""
        return AskedIds(self.joined(lists), [of_rank[lists.start : lists.stop] for of_rank in self.counts])

    def joined(self, lists: Sequence[int]) -> Tensor:
        """Returns some of this rank's lists one after the other, each as rank after rank sent it."""
        chosen = [of_rank[number] for number in lists for of_rank in self._received]
        if len(chosen) == 1:
            return chosen[0]
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=self.device)
