"""The processes that share an export's items: each holds a part of them, and all give one answer.

Between them go only requests, and for each request the keys (topk.py) of stage 1's candidates and of the best items:
nothing that grows with the corpus.

Axes: B queries, N keys of each.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from logitmix.serving.topk import NOTHING, least_key

T = TypeVar("T")


class ShardsLost(ConnectionError):
    """Shards without which no answer is given do not answer."""


_CPU = torch.device("cpu")
_GROUPS: "weakref.WeakSet[Group]" = weakref.WeakSet()


class Group:
    """One process alone, or those of a group of torch.distributed that has gloo. All of them must make the same calls
    in the same order."""

    has_shards = False
    """Whether it asks processes that may be missing (cluster.py), by `best`."""
    missed: tuple[int, ...] = ()
    """The parts of the items, from 0, that the last answer lacks; who asks for one begins with none."""

    def __init__(self, group: "dist.ProcessGroup | None" = None, rank: int = 0, size: int = 1) -> None:
        """Makes the group of this process.

        Args:
            group: Processes that share the items. None: this process alone.
            rank: Number of the part of the items that a process without a group has.
            size: Number of such parts.
        """
        self._group = group
        self.rank, self.size = (rank, size) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.turn = threading.RLock()
        """Held by a thread from the first to the last of its calls that belong together."""
        _GROUPS.add(self)
        self.lost = False
        """Whether another process is gone, or this one no longer knows what it waits for."""

    @property
    def alone(self) -> bool:
        """Whether this process has all items."""
        return self.size == 1

    @property
    def checked(self) -> tuple[int, int]:
        """Which part of the items' files, of how many, this process checks."""
        return self.rank, self.size

    def part(self, whole: range) -> range:
        """Of the numbers of all shards, those whose items this process ranks."""
        return part_of(whole, self.rank, self.size)

    @property
    def missing(self) -> tuple[int, ...]:
        """The parts that are out of reach now."""
        return ()

    @property
    def refusal(self) -> str:
        """Why there are no answers without them; empty if there are."""
        return ""

    def look_after(self, digest: str) -> None:
        """Sees which parts are there, with which exports; `digest` is that of the export that answers."""

    def all_have(self, digest: str) -> bool:
        """Whether all parts that are there can answer from this export."""
        return True

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For what all processes do together: after an error, none of them can go on. ConnectionError if there was one
        before."""
        if self.lost:
            raise ConnectionError("the processes that share the items have lost each other")
        try:
            yield
        except BaseException:
            self.lost = self.size > 1
            raise

    def first(self, action: Callable[[], T]) -> T:
        """Rank 0 acts for all: its result, or its ValueError, on every rank."""
        if self.size == 1:
            return action()
        box: list[Any] = [_outcome(action) if self.rank == 0 else None]
        with self.in_step():
            dist.broadcast_object_list(box, group_src=0, group=self._group, device=_CPU)
        return _result(box[0])

    def next(self) -> Any:
        """What rank 0 gives to its next `first` that has a result, for a rank that does nothing but follow."""
        while True:
            with suppress(ValueError):  # rank 0 has it too
                return self.first(lambda: None)

    def all(self, action: Callable[[], T]) -> list[T]:
        """Every rank acts: the results of all, or the ValueError of the first that has one, on every rank."""
        if self.size == 1:
            return [action()]
        outcomes: list[Any] = [None] * self.size
        outcome = _outcome(action)
        with self.in_step():
            dist.all_gather_object(outcomes, outcome, group=self._group)
        return list(map(_result, outcomes))

    def gather(self, keys_BN: Tensor, width: int) -> Tensor:
        """Every rank's keys side by side, in the order of the ranks; each has at most `width`."""
        if self.size == 1:
            return keys_BN
        padded = F.pad(keys_BN, (0, width - keys_BN.shape[1]), value=NOTHING).cpu()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat(parts, dim=1).to(keys_BN.device)

    def best(self, task: Any, kept: int | None, k: int) -> Tensor:
        """Returns keys [B, k] of the best items of all shards for a task.

        Args:
            task: What is asked.
            kept: How many items stage 1 keeps; None if it is not asked.
            k: The number of items.
        """
        raise AssertionError("a group without shards is asked for their items")

    def least(self, keys_BN: Tensor, kept: int, widest: int) -> Tensor:
        """The lowest key [B] of the `kept` highest of all ranks, which have at most `widest` each."""
        return least_key(self.gather(keys_BN, min(kept, widest)), kept)


def _release_turns() -> None:
    """In a forked process, which has the locks of its parent's other threads, but not these threads."""
    for group in list(_GROUPS):
        group.turn = threading.RLock()


os.register_at_fork(after_in_child=_release_turns)


def part_of(whole: range, part: int, parts: int) -> range:
    """One of `parts` consecutive parts, of nearly equal lengths; empty ones where there are more parts than numbers."""
    return whole[len(whole) * part // parts : len(whole) * (part + 1) // parts]


def _outcome(action: Callable[[], T]) -> T | ValueError:
    try:
        return action()
    except ValueError as error:
        return error


def _result(outcome: T | ValueError) -> T:
    if isinstance(outcome, ValueError):
        raise outcome
    return outcome
