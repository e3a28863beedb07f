"""LiGR's blocks (Borisyuk et al., "From Features to Transformers", 2025) in SASRec, as in eSASRec (Tikhonovich et al.,
2025).

Axes: B sequences, T positions of all of them, packed, D width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..batch import Packing
from ..config import LiGRConfig
from ..linear import Linear
from ..noise import Noise
from .sasrec import Attention
from .stack import Stack

EPSILON = 1e-5


class _Block(Attention):
    """O = X + sigmoid(X W_a + b_a) * attention(N(X)); Y = O + sigmoid(O W_f + b_f) * (silu(N(O) W_1) * N(O) W_2) W_3,
    with N for the norms."""

    def __init__(self, dim: int, config: LiGRConfig, site: str) -> None:
        super().__init__(dim, config, site, EPSILON)
        hidden = config.expansion * dim
        self.attention_gate = Linear(dim, dim)
        self.up = Linear(dim, 2 * hidden, bias=False)
        self.down = Linear(hidden, dim, bias=False)
        self.feed_gate = Linear(dim, dim)

    def forward(self, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        normed_TD = self.attention_norm(x_TD)
        attended_TD = self._drop(self._attend(normed_TD, normed_TD, packing), noise, "attention", packing)
        return self._feed(x_TD, attended_TD, packing, noise)

    def last(self, x_TD: Tensor, packing: Packing) -> Tensor:
        """The last positions [B, D] of `forward` without noise."""
        normed_TD = self.attention_norm(x_TD)
        attended_BD = self._attend_last(normed_TD.index_select(0, packing.last_B), normed_TD, packing)
        return self._feed(x_TD.index_select(0, packing.last_B), attended_BD, packing, None)

    def _feed(self, x_TD: Tensor, attended_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        x_TD = x_TD + torch.sigmoid(self.attention_gate(x_TD)) * attended_TD
        left, right = self.up(self.feed_norm(x_TD)).chunk(2, dim=1)
        down_TD = self.down(self._drop(F.silu(left) * right, noise, "up", packing))
        return x_TD + torch.sigmoid(self.feed_gate(x_TD)) * self._drop(down_TD, noise, "down", packing)


class LiGR(Stack):
    """Packed item embeddings in, one query per position out.

    A block is that of RecTools' LiGRLayers with SwiGLU. What is around it and the initial weights are as in SASRec
    here, and so is dropout of attention: of its output alone (theirs: of its weights, too).
    """

    block, epsilon = _Block, EPSILON
