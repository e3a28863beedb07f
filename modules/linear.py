"""Linear layers whose number of rows differs from batch to batch.

Axes: R rows, D and H widths.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """nn.Linear, quick for any number of rows: [R, D] -> [R, H].

    On a CPU, oneDNN compiles a BF16 product for its exact shape, which takes longer than most of these products. So
    rows of zeros are added, up to one of eight numbers between any power of two and the next, and each is compiled
    once.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        rows = len(x)
        padded = F.pad(x.to(torch.get_autocast_dtype("cpu")), (0, 0, 0, _padded(rows) - rows))
        return super().forward(padded)[:rows]


def _padded(rows: int) -> int:
    """`rows`, rounded up to a multiple of an eighth of the power of two below them, but of at least 16."""
    step = max(16, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step
