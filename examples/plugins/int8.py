"""A codec: INT8 with a scale for each table's columns of a row.

logitmix train demo-mol --processes 2 --import int8.py --comm.forward int8 --comm.backward int8
"""

import torch
from torch import Tensor

from logitmix.comm.codec import Codec, RowLayout
from logitmix.comm.config import CODECS


class RowwiseInt8(Codec):
    def row_bytes(self, layout: RowLayout) -> int:
        return sum(segment.width + 4 for segment in layout)

    def encode(self, values_RW: Tensor, layout: RowLayout, out: Tensor, seed: int | None) -> None:
        pieces = out.split([segment.width + 4 for segment in layout], dim=1)
        for piece, value_RC in zip(pieces, values_RW.split([of.width for of in layout], dim=1), strict=True):
            scale_R1 = (value_RC.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
            piece[:, :-4] = (value_RC.float() / scale_R1).round().to(torch.int8).view(torch.uint8)
            piece[:, -4:] = scale_R1.view(torch.uint8)

    def decode(self, encoded: Tensor, layout: RowLayout, out_RW: Tensor) -> None:
        pieces = encoded.split([segment.width + 4 for segment in layout], dim=1)
        for piece, out_RC in zip(pieces, out_RW.split([of.width for of in layout], dim=1), strict=True):
            # A scale that is not finite makes the whole segment so, and the step is skipped.
            out_RC.copy_(piece[:, :-4].view(torch.int8) * piece[:, -4:].clone().view(torch.float32))


CODECS["forward"]["int8"] = CODECS["backward"]["int8"] = RowwiseInt8()
