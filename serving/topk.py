"""Top-k in a fixed order: higher scores first, and the lower index first among equal scores.

torch.topk breaks ties in an order that depends on the device. Here score and index become one integer, so there are no
ties.

Axes: B queries, N items, K of them kept, G groups of items, R items of some of them.
"""

import math

import torch
from torch import Tensor

NOTHING = torch.iinfo(torch.int64).min
"""The key that stands for no item, below every item's key."""

_LOW = 0xFFFFFFFF

_GROUP, _MANY = 4, 2**16
"""Items of a group and scores of all rows, below which groups save nothing."""

MAX_ITEMS = _LOW
"""Indices below this number fit into a key."""


def rank_keys(score_BN: Tensor, index_N: Tensor) -> Tensor:
    """int64 [B, N], ordered like FP32 scores [B, N], and for equal scores in reverse order of indices [N] below
    2^32."""
    # Adding 0 makes -0 equal to 0, as it is in every comparison of scores.
    ordered_BN = _reorder((score_BN + 0.0).view(torch.int32))
    return (ordered_BN.to(torch.int64) << 32) | (_LOW - index_N)


def best_keys(score_BN: Tensor, index_BN: Tensor, k: int) -> Tensor:
    """The k highest keys [B, k] of each row in any order, or all if there are fewer; NOTHING for scores of -inf.
    index_BN: or [1, N], the same for all rows.

    FP32 scores take a third of the time that keys take, and half of that in groups: the k highest scores are in the k
    groups with the highest maxima. A row in which others are equal to the k-th is ranked by its keys, and so is one
    with NaN.
    """
    index_BN, N = index_BN.expand_as(score_BN), score_BN.shape[1]
    if k >= N:
        return _keys(score_BN, index_BN)
    if (size := math.isqrt(N // k)) < _GROUP or score_BN.numel() < _MANY:
        score_BK, place_BK = score_BN.topk(k, sorted=False)
        tied_B = (score_BN >= score_BK.amin(1, keepdim=True)).sum(1) != k
    else:
        G = N // size
        # Item n is in group n % G; the last ones, fewer than G, are in none.
        most_BK, group_BK = score_BN[:, : size * G].unflatten(1, (size, G)).amax(1).topk(k + 1)
        place_BR = (G * torch.arange(size, device=score_BN.device)[:, None] + group_BK[:, None, :k]).flatten(1)
        rest_R = torch.arange(size * G, N, device=score_BN.device)
        place_BR = torch.cat([place_BR, rest_R.expand(len(place_BR), -1)], dim=1)
        score_BR = score_BN.gather(1, place_BR)
        score_BK, place_BK = score_BR.topk(k, sorted=False)
        place_BK, least_B1 = place_BR.gather(1, place_BK), score_BK.amin(1, keepdim=True)
        tied_B = ((score_BR >= least_B1).sum(1) != k) | ~(most_BK[:, k:] < least_B1)[:, 0]
    keys_BK = _keys(score_BK, index_BN.gather(1, place_BK))
    if tied_B.any():
        keys_BK[tied_B] = _keys(score_BN[tied_B], index_BN[tied_B]).topk(k).values
    return keys_BK


def _keys(score_BN: Tensor, index_BN: Tensor) -> Tensor:
    return rank_keys(score_BN, index_BN).masked_fill(score_BN == -torch.inf, NOTHING)


def merge(best_BK: Tensor, keys_BN: Tensor, k: int) -> Tensor:
    """The k highest keys of both, highest first; all if there are fewer."""
    keys = torch.cat([best_BK, keys_BN], dim=1)
    return keys.topk(min(k, keys.shape[1])).values


def boosted(keys_BN: Tensor, boost: float) -> Tensor:
    """Keys of the same items with so much more score."""
    items_BN, score_BN = split_keys(keys_BN)
    return best_keys(score_BN + boost, items_BN, keys_BN.shape[1])


def least_key(keys_BN: Tensor, k: int) -> Tensor:
    """The lowest key [B] of the k highest of each row; that of any item, if there are fewer items."""
    N = keys_BN.shape[1]
    least_B = keys_BN.kthvalue(N - k + 1).values if k <= N else keys_BN.new_full((len(keys_BN),), NOTHING)
    return least_B.clamp(min=NOTHING + 1)


def split_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (int64) and scores (FP32) of keys; -1 and -inf for NOTHING."""
    score = _reorder((keys >> 32).to(torch.int32)).view(torch.float32)
    nothing = keys == NOTHING
    return (_LOW - (keys & _LOW)).masked_fill(nothing, -1), score.masked_fill(nothing, -torch.inf)


def _reorder(bits: Tensor) -> Tensor:
    """Bits of FP32 numbers <-> integers in the order of the numbers: the negative ones count downwards."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
