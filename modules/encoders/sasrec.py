"""SASRec (Kang and McAuley, 2018): causal self-attention over a user's history.

Axes: B sequences, T positions of all of them, packed, L longest sequence, D width, G heads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Packing
from ..config import AttentionConfig, SASRecConfig
from ..linear import Linear
from ..noise import Noise
from ..transfer import on_device
from .stack import Stack

EPSILON = 1e-8
_MANY = 4
"""With so many positions for each number of a vector, the product of two layers' matrices takes less time than one of
these layers does for all positions."""
FLASH_WIDTH, CAUSAL = 256, 1
"""The widest head that flash attention has a kernel for; and efficient attention's number of the causal mask."""


class Attention(nn.Module):
    """What blocks of softmax attention share: its layers, two norms and dropout."""

    def __init__(self, dim: int, config: AttentionConfig, site: str, epsilon: float) -> None:
        super().__init__()
        self.heads, self.rate, self.site = config.heads, config.dropout, site
        self.attention_norm = nn.LayerNorm(dim, eps=epsilon)
        self.query = Linear(dim, dim)
        self.key_value = Linear(dim, 2 * dim)
        self.output = Linear(dim, dim)
        self.feed_norm = nn.LayerNorm(dim, eps=epsilon)

    def _attend(self, q_TD: Tensor, x_TD: Tensor, packing: Packing) -> Tensor:
        T, D = x_TD.shape
        elsewhere = x_TD.is_cuda or torch.is_grad_enabled() or torch.compiler.is_exporting()
        if self.heads == 1 and T > _MANY * D and not elsewhere:
            # As in `_attend_last`; the products of the layers' matrices take less time than keys and values.
            key_DD, value_DD = self.key_value.weight.chunk(2)
            query_TD = F.linear(q_TD, key_DD.t() @ self.query.weight, self.query.bias @ key_DD)
            mean_TD = attend_padded(query_TD[:, None, None], packing, x_TD[:, None, None]).view(T, D)
            bias_D = self.output(self.key_value.bias[None, D:])[0]
            return F.linear(mean_TD, self.output.weight @ value_DD, bias_D)
        packed = torch.cat([self.query(q_TD), self.key_value(x_TD)], dim=1).view(T, 3, self.heads, D // self.heads)
        jagged = x_TD.is_cuda and packing.shortest > 0 and D // self.heads % 8 == 0
        return self.output((attend_jagged if jagged else attend_padded)(packed, packing).reshape(T, D))

    def _attend_last(self, q_BD: Tensor, x_TD: Tensor, packing: Packing) -> Tensor:
        """The last positions [B, D] of `_attend`, from their q_BD.

        Nothing is computed of the others: q · (K x + b) is (Kᵀ q) · x, but for a term that is the same for all of a
        sequence; and weights that sum to 1 give V x + b the mean V (Σ w x) + b.
        """
        query_BGd = self.query(q_BD).unflatten(1, (self.heads, -1))
        key_GdD, value_GdD = self.key_value.weight.unflatten(0, (2, self.heads, -1))
        scale = query_BGd.shape[2] ** -0.5
        mean_BGD = attend_last(torch.einsum("bgd,gde->bge", query_BGd * scale, key_GdD), x_TD, packing)
        attended_BD = torch.einsum("bge,gde->bgd", mean_BGD, value_GdD).flatten(1) + self.key_value.bias.chunk(2)[1]
        return self.output(attended_BD)

    def _drop(self, x: Tensor, noise: Noise | None, site: str, packing: Packing, onto: Tensor | None = None) -> Tensor:
        """x after dropout, added to `onto`."""
        if noise is None:
            return x if onto is None else onto + x
        return noise.dropout(x, self.rate, f"{self.site}.{site}", packing.row_T, onto)


class _Block(Attention):
    def __init__(self, dim: int, config: SASRecConfig, site: str) -> None:
        super().__init__(dim, config, site, EPSILON)
        self.up = Linear(dim, dim)
        self.down = Linear(dim, dim)

    def forward(self, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        q_TD = self.attention_norm(x_TD)
        return self._feed(
            self._drop(self._attend(q_TD, x_TD, packing), noise, "attention", packing, q_TD), packing, noise
        )

    def last(self, x_TD: Tensor, packing: Packing) -> Tensor:
        """The last positions [B, D] of `forward` without noise."""
        q_BD = self.attention_norm(x_TD.index_select(0, packing.last_B))
        return self._feed(q_BD + self._attend_last(q_BD, x_TD, packing), packing, None)

    def _feed(self, x_TD: Tensor, packing: Packing, noise: Noise | None) -> Tensor:
        x_TD = self.feed_norm(x_TD)
        hidden_TD = self.up(x_TD)
        if noise:
            hidden_TD = noise.relu_dropout(hidden_TD, self.rate, f"{self.site}.up", packing.row_T)
        else:
            hidden_TD = F.relu(hidden_TD)
        return self._drop(self.down(hidden_TD), noise, "down", packing, x_TD)


class SASRec(Stack):
    """Packed item embeddings in, one query per position out.

    Every layer but attention works on the packed positions. The blocks, their dropout rates and the items' factor of
    sqrt(D) are those of the authors' code (facebookresearch/generative-recommenders). What differs: matrices start from
    Xavier's uniform distribution (theirs: its normal one, of the same variance), biases from 0 (theirs: torch's, where
    a layer is a convolution) and positions with a deviation of 0.02 (theirs: 1 / sqrt(D)); norms have learned weights,
    and there is one after the last block (theirs: none, but the division by the length, which follows here, too); and
    attention's dropout applies to its output, not to its weights, so that its mask does not depend on how sequences are
    padded. On MovieLens-1M the two are level: test HR@10 0.2972 as there, 0.2944 as here (`train ml-1m-dot`, seed 0).
    """

    block, epsilon = _Block, EPSILON


def attend_padded(packed_TnGd: Tensor, packing: Packing, key_T1Gd: Tensor | None = None) -> Tensor:
    """Causal self-attention of each sequence, [T, 3, G, d] of query, key and value -> [T, G, d]; or of queries
    [T, 1, G, d] and keys that are the values."""
    sides, outs = [packed_TnGd] if key_T1Gd is None else [packed_TnGd, key_T1Gd], []
    for of_group in zip(*(_groups(side, packing) for side in sides), strict=True):
        q, *kv = (part for parts in of_group for part in parts)
        # Padding comes after the valid positions, so the causal mask alone hides it.
        out_BGLd = F.scaled_dot_product_attention(q, kv[0], kv[-1], is_causal=True)
        outs.append(out_BGLd.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, packing.grouped_T) if outs else packed_TnGd[:, 0]


def attend_last(query_BGD: Tensor, x_TD: Tensor, packing: Packing) -> Tensor:
    """The mean [B, G, D] of each sequence's positions [T, D], for each of G queries weighted by the softmax of their
    products."""
    order_B, length_B = packing.grouped_T[packing.last_B].argsort(), packing.position_T[packing.last_B] + 1
    outs = []
    groups = zip(_groups(x_TD[:, None, None], packing), order_B.split([B for B, _ in packing.groups]), strict=True)
    for (x_N1LD,), row_N in groups:
        seen_NL = torch.arange(x_N1LD.shape[2], device=x_TD.device) < length_B[row_N, None]
        query_N1GD, seen_N11L = query_BGD[row_N, None], seen_NL[:, None, None]
        out_N1GD = F.scaled_dot_product_attention(query_N1GD, x_N1LD, x_N1LD, attn_mask=seen_N11L, scale=1.0)
        outs.append(out_N1GD[:, 0])
    return torch.cat(outs)[order_B.argsort()] if outs else query_BGD


def _groups(packed: Tensor, packing: Packing) -> Iterator[Tensor]:
    """[T, n, G, d] -> [n, B, G, L, d] of each group of sequences of like lengths. What follows a sequence repeats its
    last position: finite wherever the sequence is. No batch of a GPU carries these places: jagged attention needs
    none."""
    padded = packed.index_select(0, on_device(packing.source_S, packed.device))
    for group, shape in zip(padded.split([B * L for B, L in packing.groups]), packing.groups, strict=True):
        yield group.unflatten(0, shape).permute(2, 0, 3, 1, 4)


def attend_jagged(packed_T3Gd: Tensor, packing: Packing) -> Tensor:
    """`attend_padded` without padding, by torch's kernels for CUDA: widths d are multiples of 8, and no sequence is
    empty. They are called by themselves, because a nested tensor, which would choose one, takes the host longer than
    all the rest of a step."""
    sides, offset_B, longest = packed_T3Gd.unbind(1), packing.offset_B.int(), packing.shape[1]
    bounds = offset_B, offset_B, longest, longest
    if packed_T3Gd.dtype != torch.float32 and packed_T3Gd.shape[3] <= FLASH_WIDTH:
        return torch.ops.aten._flash_attention_forward(*sides, *bounds, 0.0, True, False)[0]
    q, k, v = (side[None] for side in sides)
    return torch.ops.aten._efficient_attention_forward(q, k, v, None, *bounds, 0.0, CAUSAL, True)[0][0]
