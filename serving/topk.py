"""Top-k in a fixed order: higher scores first, and the lower index first among equal scores.

torch.topk breaks ties in an order that depends on the device. Here score and index become one integer, so there are no
ties.

Axes: B queries, N items, K of them kept, G groups of S items, T groups or items of all queries, M the most of one.
"""

import math

import numpy as np
import torch
from torch import Tensor

NOTHING = torch.iinfo(torch.int64).min
"""The key that stands for no item, below every item's key."""

_LOW = 0xFFFFFFFF

_FEW = 2
"""Fewer items than so many for each of the K are ranked by all their keys."""

_LEAST = torch.finfo(torch.float32).min
"""The lowest score of an item."""

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
    index_BN: or [1, N], the same for all rows."""
    index_BN, N = index_BN.expand_as(score_BN), score_BN.shape[1]
    if _FEW * k > N:
        return _highest(_keys(score_BN, index_BN), min(k, N))
    return (_best_by_topk if score_BN.is_cuda else _best_by_sort)(score_BN, index_BN, k)


def _best_by_topk(score_BN: Tensor, index_BN: Tensor, k: int) -> Tensor:
    """FP32 scores take a third of the time that keys take. A row in which others are equal to the k-th, or with NaN, is
    ranked by its keys."""
    score_BK, place_BK = score_BN.topk(k, sorted=False)
    keys_BK = _keys(score_BK, index_BN.gather(1, place_BK))
    tied_B = (score_BN >= score_BK.amin(1, keepdim=True)).sum(1) != k
    if tied_B.any():
        keys_BK[tied_B] = _keys(score_BN[tied_B], index_BN[tied_B]).topk(k).values
    return keys_BK


def _best_by_sort(score_BN: Tensor, index_BN: Tensor, k: int) -> Tensor:
    """At least k scores are no lower than the k-th highest of the groups' maxima, and few more are: only the keys of
    these are sorted. In a third of the time that torch's topk takes on a CPU, as NumPy's partition and sort use AVX2
    and AVX-512."""
    B, N = score_BN.shape
    size = math.isqrt(N // k)
    G = N // size
    # Item n is in group n % G.
    most_BG = score_BN[:, : size * G].unflatten(1, (size, G)).amax(1).numpy()
    most_BG[:, : N - size * G] = np.maximum(most_BG[:, : N - size * G], score_BN[:, size * G :].numpy())
    least_B = np.partition(most_BG, G - k, axis=1)[:, G - k]
    # Keys of NaN, which is not below anything, are the highest or the lowest, by its sign.
    least_B = np.where(np.isnan(most_BG).any(1), _LEAST, np.maximum(least_B, _LEAST))
    place_T = np.flatnonzero(~(score_BN.numpy() < least_B[:, None]))
    row_T, item_T = np.divmod(place_T, N)
    count_B = np.bincount(row_T, minlength=B)
    keys_BM = np.full((B, count_B.max(initial=k)), NOTHING)
    score_T, index_T = (torch.from_numpy(of.numpy()[row_T, item_T]) for of in (score_BN, index_BN))
    keys_BM[np.arange(keys_BM.shape[1]) < count_B[:, None]] = rank_keys(score_T, index_T).numpy()
    return _highest(torch.from_numpy(keys_BM), k)


def _highest(keys_BN: Tensor, k: int) -> Tensor:
    """The k highest keys of each row, highest first."""
    if keys_BN.is_cuda:
        return keys_BN.topk(k).values
    return torch.from_numpy(np.sort(keys_BN.numpy(), axis=1)[:, ::-1][:, :k].copy())


def _keys(score_BN: Tensor, index_BN: Tensor) -> Tensor:
    return rank_keys(score_BN, index_BN).masked_fill(score_BN == -torch.inf, NOTHING)


def merge(best_BK: Tensor, keys_BN: Tensor, k: int) -> Tensor:
    """The k highest keys of both, highest first; all if there are fewer."""
    keys = torch.cat([best_BK, keys_BN], dim=1)
    return _highest(keys, min(k, keys.shape[1]))


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
