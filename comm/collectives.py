"""Collectives outside the embedding exchange.

Every function is the identity at world size 1, so that no caller needs to check whether it runs distributed. With more
ranks, all ranks must call it, in the same order. Tensors are on `ranks.device` or on the CPU, the same on all ranks. No
gradient passes through.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from logitmix.comm.process_group import Ranks

T = TypeVar("T")
SIGN_OF_LIFE = 0.5
"""Seconds."""


def all_reduce_sum(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Returns the sum over the ranks of a tensor of one shape and dtype; the argument is unchanged."""
    if ranks.world_size == 1:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ranks.group)
    return total


def all_gather(tensor: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """Returns every rank's tensor, of one shape and dtype, in the order of the ranks."""
    if ranks.world_size == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, tensor.contiguous(), group=ranks.group)
    return gathered


def all_to_all(parts: Sequence[torch.Tensor], ranks: Ranks) -> list[torch.Tensor]:
    """Sends parts[r], flat and of any length, to rank r; returns what each rank sent to this one. One dtype for all."""
    if ranks.world_size == 1:
        return list(parts)
    lengths = torch.tensor([len(part) for part in parts])
    received = torch.empty_like(lengths)
    dist.all_to_all_single(received, lengths, group=ranks.group)
    out = parts[0].new_empty(int(received.sum()))
    sizes, sent = received.tolist(), lengths.tolist()
    dist.all_to_all_single(out, torch.cat(list(parts)), sizes, sent, group=ranks.group)
    return list(out.split(sizes))


def broadcast_object(obj: T, ranks: Ranks) -> T:
    """Returns rank 0's object on every rank, pickled on the way; what the other ranks pass is ignored."""
    if ranks.world_size == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=0, group=ranks.group, device=torch.device("cpu"))
    return box[0]


def largest(value: int, ranks: Ranks) -> int:
    """Returns the largest of the ranks' numbers, on every rank."""
    if ranks.world_size == 1:
        return value
    # On the CPU, so that asking does not wait for the CUDA stream.
    votes = torch.tensor([value])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=ranks.group)
    return int(votes.item())


def agreed(flag: bool, ranks: Ranks) -> bool:
    """Returns True on every rank as soon as one rank says True: an agreed stop."""
    return bool(largest(int(flag), ranks))


def barrier(ranks: Ranks) -> None:
    """Returns once every rank has called it."""
    # A reduction rather than dist.barrier, which on CUDA has to guess a device.
    agreed(False, ranks)


def on_first_rank(action: Callable[[], T], ranks: Ranks) -> T:
    """Lets rank 0 act for all: every rank returns its result, or raises its ValueError or OSError."""
    return _results([broadcast_object(_outcome(action) if ranks.rank == 0 else None, ranks)])[0]


def on_first_rank_at_length(action: Callable[[], T], ranks: Ranks) -> T:
    """As `on_first_rank`, for what may take longer than the ranks wait for each other: meanwhile rank 0 tells them that
    it is at work."""
    if ranks.world_size == 1:
        return action()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(action) if ranks.rank == 0 else None
        while not agreed(future is not None and bool(wait([future], timeout=SIGN_OF_LIFE).done), ranks):
            pass
        return on_first_rank(lambda: future.result(), ranks)  # type: ignore[union-attr]


def on_all_ranks(action: Callable[[], T], ranks: Ranks) -> list[T]:
    """Lets every rank act, and returns the results of all ranks. If some raise ValueError or OSError, all raise the
    first."""
    outcomes: list[Any] = [_outcome(action)]
    if ranks.world_size > 1:
        outcomes, own = [None] * ranks.world_size, outcomes[0]
        dist.all_gather_object(outcomes, own, group=ranks.group)
    return _results(outcomes)


def own_result(action: Callable[[], T], ranks: Ranks) -> T:
    """Lets every rank act, and returns the result of this rank, which is sent nowhere. If some raise ValueError or
    OSError, all raise the first."""
    found: list[T] = []
    on_all_ranks(lambda: found.append(action()), ranks)
    return found[0]


def _outcome(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except (ValueError, OSError) as error:
        return None, error


def _results(outcomes: list[Any]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
