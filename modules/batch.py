"""The input of a training step. No torchrec, so that serving and the towers can use it.

Axes: B sequences, T positions of all of them, packed, Q of these that have a target, L longest sequence, V unique
items, N negatives of a group.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .features import Features
from .noise import Noise
from .transfer import on_device, tensors_of


class Packing:
    """Where the positions of B sequences of the given lengths lie in a packed and in a padded array.

    `first_row`: the global number of the first position, which names the rows of the dropout masks. time_T, asked_T:
    for an encoder that sees times, when each position's action was, and when the query after it is asked (int64).
    """

    def __init__(
        self, lengths_B: Tensor, first_row: int = 0, time_T: Tensor | None = None, asked_T: Tensor | None = None
    ) -> None:
        total, longest = int(lengths_B.sum()), int(lengths_B.max()) if len(lengths_B) else 0
        self.offset_B = F.pad(lengths_B.cumsum(0), (1, 0))
        start_B = self.offset_B[:-1]
        sequence_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B, output_size=total)
        self.lengths_B, self.sequence_T = lengths_B, sequence_T
        self.bounds = self.offset_B.tolist()
        self.position_T = torch.arange(total) - start_B[sequence_T]
        self.row_T = torch.arange(first_row, first_row + total)
        self.padded_T = sequence_T * longest + self.position_T
        self.shape = (len(lengths_B), longest)
        self.shortest = int(lengths_B.min()) if len(lengths_B) else 0
        first_B, self.groups, self.source_S = _groups(lengths_B, start_B)
        self.grouped_T = first_B[sequence_T] + self.position_T
        self.last_B = self.offset_B[1:] - 1
        self.time_T, self.asked_T = time_T, asked_T

    def first(self, sequences: int) -> "Packing":
        """Returns the packing of the first sequences, whose positions are numbered from 0."""
        lengths_B = self.lengths_B[:sequences]
        total = int(lengths_B.sum())
        time_T, asked_T = (None if of is None else of[:total] for of in (self.time_T, self.asked_T))
        return Packing(lengths_B, time_T=time_T, asked_T=asked_T)

    def to(self, device: torch.device) -> "Packing":
        """Returns the packing with what the model reads on a device."""
        moved = copy(self)
        for name in (*_INDICES, *(() if self.time_T is None else ("time_T", "asked_T"))):
            setattr(moved, name, on_device(getattr(self, name), device))
        return moved


_INDICES = ("sequence_T", "position_T", "row_T", "padded_T", "grouped_T", "offset_B", "last_B")
_LIKE = 1.5
"""The longest sequence of a group by its shortest, at most; a few positions more do not count."""


def _groups(lengths_B: Tensor, start_B: Tensor) -> tuple[Tensor, list[tuple[int, int]], Tensor]:
    """Returns where the sequences begin if only those of like lengths are padded together, group after group, [B]; the
    groups' numbers of sequences and padded lengths; and the packed position at each place of the groups, [S], with
    which a sequence's last one is repeated."""
    sorted_B, order_B = lengths_B.sort(stable=True)
    lengths, first_B, groups = sorted_B.numpy(), torch.empty_like(order_B), list[tuple[int, int]]()
    last_B, sources = sorted_B - 1, [start_B[:0]]
    start = base = 0
    while start < len(lengths):
        end = int(lengths.searchsorted(_LIKE * lengths[start] + 4, side="right"))
        sequences, longest = end - start, int(lengths[end - 1])
        first_B[order_B[start:end]] = base + longest * torch.arange(sequences)
        place_NL = torch.arange(longest).minimum(last_B[start:end, None])
        sources.append((start_B[order_B[start:end], None] + place_NL).clamp(min=0).flatten())
        groups.append((sequences, longest))
        start, base = end, base + sequences * longest
    return first_B, groups, torch.cat(sources)


class Bags(NamedTuple):
    """Bags of a table's ids: int64 values [S], and the offsets [R + 1] at which the R bags begin. shares: FP32 [S],
    what each id's row counts in the sum of its bag; None: the bag is the mean of its rows."""

    values: Tensor
    offsets: Tensor
    shares: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    ids: for each table, the sorted unique ids whose rows the batch needs (int64, on the CPU); for a pooled table, bags
    of ids. id_V: the batch's unique items (int64, sorted). features: those of these items, of the sequences' users and
    of the events at the positions. input_T: the history's items, as indices into id_V. position_Q: the positions that
    have a target; None: all. target_T: their targets [Q], the items that follow, as indices into id_V. negatives_GN:
    the negatives of each group, as indices into id_V. bounds: group g is bounds[g] to bounds[g + 1] of the Q.
    total_targets: Q summed over all ranks. log_q_V: for each unique item, the log of the probability that a negative is
    that item, FP32; None if negatives are uniform. weight_Q: the weight of each target, FP32, by the mean weight of the
    global batch's; None: 1.
    """

    ids: Mapping[str, Tensor | Bags]
    id_V: Tensor
    features: Features
    packing: Packing
    input_T: Tensor
    target_T: Tensor
    negatives_GN: Tensor
    bounds: Sequence[int]
    noise: Noise | None
    total_targets: int
    log_q_V: Tensor | None = None
    position_Q: Tensor | None = None
    weight_Q: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch on a device, but for the tables' ids, which stay on the CPU."""
        there = (name for name in _TENSORS if getattr(self, name) is not None)
        moved: dict[str, Any] = {name: on_device(getattr(self, name), device) for name in there}
        return replace(self, features=self.features.to(device), packing=self.packing.to(device), **moved)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Records that `stream` uses the memory too: once freed, it is not reused before the stream's queued work is
        done."""
        for tensor in tensors_of(self):
            if tensor.device.type == stream.device.type:
                tensor.record_stream(stream)

    @property
    def row_Q(self) -> Tensor:
        """The global number of each position that has a target."""
        return self.packing.row_T if self.position_Q is None else self.packing.row_T[self.position_Q]


_TENSORS = ("id_V", "input_T", "target_T", "negatives_GN", "log_q_V", "position_Q", "weight_Q")
