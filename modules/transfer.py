"""Copies that a CUDA device need not be waited for, and few launches for many of them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device. To CUDA it goes by way of pinned memory: the host does not wait for the copy,
    which the current stream makes. torch keeps the pinned memory until then."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies the second tensor of each pair to the first, in one launch for each two types that occur."""
    by_types = defaultdict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]](list)
    for pair in pairs:
        by_types[pair[0].dtype, pair[1].dtype].append(pair)
    for alike in by_types.values():
        targets, sources = zip(*alike, strict=True)
        torch._foreach_copy_(targets, sources)


def tensors_of(holder: Any) -> Iterator[Tensor]:
    """Yields the tensors that an object holds in its attributes and mappings, and those in the objects there."""
    if isinstance(holder, Tensor):
        yield holder
        return
    inner = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
    for value in inner.values():
        yield from tensors_of(value)
