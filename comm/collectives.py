"""What ranks tell each other outside the embedding exchange.

Every function is the identity at world size 1, so that no caller asks whether it runs distributed.
With more ranks each is collective: all ranks call it, in the same order. Tensors lie on
`ranks.device` or on the CPU, alike on all ranks. No gradient passes through.
"""

from typing import TypeVar

import torch
import torch.distributed as dist

from logitmix.comm.process_group import Ranks

T = TypeVar("T")


def all_reduce_sum(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum over the ranks of a tensor of one shape and dtype; the argument stays as it is."""
    if ranks.world_size == 1:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ranks.group)
    return total


def all_gather_variable(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The ranks' tensors one after the other along dimension 0, by rank, and the same on every rank.

    `tensor` is [n, ...], n of each rank its own (0 allowed); the other dimensions and the dtype agree.
    """
    if ranks.world_size == 1:
        return tensor
    tensor = tensor.detach()
    lengths = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(ranks.world_size)]
    dist.all_gather(lengths, torch.tensor([len(tensor)], device=tensor.device), group=ranks.group)
    counts = [int(length) for length in lengths]
    padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    # Gathered as bytes: backends differ in the dtypes they know.
    wire = padded.flatten().view(torch.uint8) if padded.numel() else padded.new_empty(0, dtype=torch.uint8)
    pieces = [torch.empty_like(wire) for _ in counts]
    if len(wire):
        dist.all_gather(pieces, wire, group=ranks.group)
    rows = [piece.view(tensor.dtype).view(padded.shape)[:count] for piece, count in zip(pieces, counts, strict=True)]
    return torch.cat(rows)


def broadcast_object(obj: T, ranks: Ranks) -> T:
    """Rank 0's object on every rank, pickled on the way; what the other ranks pass is ignored."""
    if ranks.world_size == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=0, group=ranks.group, device=torch.device("cpu"))
    return box[0]


def agreed(flag: bool, ranks: Ranks) -> bool:
    """True on every rank as soon as one rank says True: an agreed stop."""
    if ranks.world_size == 1:
        return flag
    # On the CPU, so that asking does not wait for the CUDA stream.
    votes = torch.tensor([int(flag)])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=ranks.group)
    return bool(votes.item())


def barrier(ranks: Ranks) -> None:
    """Returns once every rank has called it."""
    # A reduction rather than dist.barrier, which on CUDA has to guess a device.
    agreed(False, ranks)
