"""From the host's memory to the device's."""

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. To CUDA it goes by way of pinned memory: the host does not wait for the copy, which
    the current stream makes. torch keeps the pinned memory until then."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
