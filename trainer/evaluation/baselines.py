"""Baselines for a model: popularity, item-kNN and EASE, fitted to the same training actions and ranked by the same
rules as the model.

Popularity scores an item by its training actions that may be targets. Item-kNN scores it by the sum of its similarities
to the items of the user's history, each action counting RECENCY of the one after it; similarity is the cosine of the
sets of users whose training actions have the items, and an item of the history counts only for the NEIGHBORS items most
similar to it.
EASE ("Embarrassingly Shallow Autoencoders for Sparse Data", Steck, 2019) scores it by the sum of weights from the items
of the history, in any order; the weights are those of a ridge regression of each item on all others.

Axes: U users, B users of a batch, X items in the corpus, N items of a block, E entries of a sparse matrix.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitmix.trainer.data.batches import HeldOut, RankingUsers
from logitmix.trainer.data.columns import ranges
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.metrics import NOT_SERVED

NEIGHBORS = 100
"""K: neighbors of an item that are kept, the nearest."""
RECENCY = 0.8
"""Without it, HR@10 is a fifth to a third lower on ml-100k, the demo and Amazon Beauty."""
PAIRS = 2**30
"""Pairs of actions of one user that similarities are computed from, about; where there are more, from a sample of the
users."""
ACTIONS = 2**25
"""Actions that similarities are computed from, at most."""
BLOCK_PAIRS = 2**24
"""Pairs worked on at once."""
SCORES = 2**22
"""Scores held at once, about."""
MOST_SCORES = 2**33
"""Scores computed for a method, about; where all users have more, a sample of them is ranked."""
MOST_ITEMS = 2**17
"""Items that similarities are kept of, with 2.4 kB for each; of a larger corpus popularity alone is ranked."""
MOST_EASE_ITEMS = 2**14
"""Items that EASE is fitted to; its matrices, three at once, take 8 bytes for each pair of them."""
BLOCK_SCORES = 2**25
"""Numbers of a block of users and all items, when EASE counts pairs of items."""
ROUNDING = 1e-9
"""Relative difference below which two sums of similarities are a tie: their terms may come in another order."""

Score = Callable[[RankingUsers], NDArray[np.float64]]
"""Of a batch of users, the scores [B, X] of all items."""


def rank_targets(score: Score, users: RankingUsers, num_items: int, exclude_history: bool) -> Ints:
    """Rank of each user's target [U], from 1: ties count against it, and excluded items have rank NOT_SERVED and stand
    below everything, as in trainer/evaluation/ranking.py."""
    rank_U = np.empty(len(users), np.int64)
    size = max(1, SCORES // num_items)
    for start in range(0, len(users), size):
        part = users.of(slice(start, start + size))
        score_BX, row_B = score(part), np.arange(len(part))
        of_target_B1 = score_BX[row_B, part.target][:, None]
        # Not "at least": what is not a number counts against the target, too.
        above_BX = ~(score_BX < of_target_B1 - np.abs(of_target_B1) * ROUNDING)
        above_BX[row_B, part.target] = False
        if exclude_history:
            above_BX[np.repeat(row_B, part.seen_lengths), part.seen] = False
        rank_U[start : start + size] = above_BX.sum(1) + 1
    if exclude_history:
        rank_U[users.repeats()] = NOT_SERVED
    return rank_U


def target_counts(dataset: Dataset, held_out: HeldOut) -> Ints:
    """How many training actions each item has that may be targets [X]."""
    if held_out.places is None:
        return held_out.training_counts(dataset)
    user = np.searchsorted(dataset.offsets, held_out.places, side="right") - 1
    seen = held_out.places[held_out.places < held_out.train_end[user]]
    return np.bincount(dataset.items_flat[seen], minlength=dataset.num_items)


def popularity(count_X: Ints) -> Score:
    """From `target_counts` [X]."""
    score_X = count_X.astype(np.float64)
    return lambda users: np.broadcast_to(score_X, (len(users), len(score_X)))


@dataclass(frozen=True)
class ItemKNN:
    """Similarities of items, and how many users they come from."""

    similarity_XX: Tensor
    """Sparse, float64: row x has the NEIGHBORS items that are most similar to item x, the lower index first of
    equals."""
    users: int
    """Users whose histories were counted."""
    of_users: int
    """Users with training actions."""

    @classmethod
    def fit(cls, dataset: Dataset, held_out: HeldOut, pairs: int = PAIRS) -> "ItemKNN":
        """From about so many pairs of actions at most."""
        length_U = _lengths(dataset, held_out)
        users = _within(length_U, pairs)
        user_E, item_E = _distinct(*_training(dataset, held_out, users), dataset.num_items)
        blocks = list(_neighbors(user_E, item_E, dataset.num_users, dataset.num_items))
        index_E, value_E = (torch.cat(parts, dim=-1) for parts in zip(*blocks, strict=True))
        size = (dataset.num_items, dataset.num_items)
        similarity_XX = torch.sparse_coo_tensor(index_E, value_E, size, check_invariants=False).coalesce()
        return cls(similarity_XX, int((length_U[users] > 0).sum()), int((length_U > 0).sum()))

    def __call__(self, users: RankingUsers) -> NDArray[np.float64]:
        length_B = users.seen_lengths
        row_E, end_E = (np.repeat(of_B, length_B) for of_B in (np.arange(len(users)), np.cumsum(length_B)))
        weight_E = RECENCY ** (end_E - 1.0 - np.arange(len(row_E)))
        history_BX = _sparse(row_E, users.seen, torch.from_numpy(weight_E), len(users), len(self.similarity_XX))
        return _product(history_BX, self.similarity_XX).to_dense().numpy()


@dataclass(frozen=True)
class EASE:
    """B of Steck's equation 8."""

    weight_XX: Tensor
    """float64: the weight of an item of the history (row) in the score of an item (column); the diagonal is 0."""

    @classmethod
    def fit(cls, both_XX: Tensor, penalty: float) -> "EASE":
        """From `users_of_both`; `penalty` is lambda, that of the weights' squares."""
        weight_XX = both_XX.clone()
        weight_XX.diagonal().add_(penalty)
        # In place: each matrix may take gigabytes. It is symmetric, and LAPACK's order is by column.
        torch.linalg.cholesky(weight_XX.mT, out=weight_XX.mT)
        torch.cholesky_inverse(weight_XX.mT, out=weight_XX.mT)
        weight_XX /= -weight_XX.diagonal().clone()
        return cls(weight_XX.fill_diagonal_(0.0))

    def __call__(self, users: RankingUsers) -> NDArray[np.float64]:
        row_E, item_E = _distinct(np.repeat(np.arange(len(users)), users.seen_lengths), users.seen, len(self.weight_XX))
        return _product(_has(row_E, item_E, len(users), len(self.weight_XX)), self.weight_XX).numpy()


def users_of_both(dataset: Dataset, held_out: HeldOut) -> Tensor:
    """How many users have training actions with both of two items [X, X] (float64), from at most ACTIONS actions."""
    X = dataset.num_items
    users = _within(_lengths(dataset, held_out), np.iinfo(np.int64).max)
    both_XX = torch.zeros(X, X, dtype=torch.float64)
    size = max(1, BLOCK_SCORES // X)
    for start in range(0, len(users), size):
        part = users[start : start + size]
        user_E, item_E = _distinct(*_training(dataset, held_out, part), X)
        row_E = np.searchsorted(part, user_E)
        both_XX += _product(_has(item_E, row_E, X, len(part)), _has(row_E, item_E, len(part), X).to_dense())
    return both_XX


def _lengths(dataset: Dataset, held_out: HeldOut) -> Ints:
    """How many actions of each user may be trained on [U]."""
    return np.maximum(held_out.train_end - dataset.offsets[:-1], 0)


def _training(dataset: Dataset, held_out: HeldOut, users: Ints) -> tuple[Ints, Ints]:
    """User and item of each action of some users that may be trained on."""
    lengths = _lengths(dataset, held_out)[users]
    items = dataset.items_flat[ranges(dataset.offsets[users], lengths)].astype(np.int64)
    return np.repeat(users, lengths), items


def _distinct(user_E: Ints, item_E: Ints, num_items: int) -> tuple[Ints, Ints]:
    """Each pair of user and item once."""
    return np.divmod(np.unique(user_E * num_items + item_E), num_items)


def _within(length_U: Ints, pairs: int) -> Ints:
    """The users that are drawn, in a fixed random order, as long as their actions are no more than ACTIONS and make no
    more pairs; at least one."""
    order_U = np.random.default_rng(0).permutation(len(length_U))
    length_U = length_U[order_U]
    fits_U = (np.cumsum(length_U**2) <= pairs) & (np.cumsum(length_U) <= ACTIONS)
    fits_U[0] = True
    return np.sort(order_U[fits_U])


def _neighbors(user_E: Ints, item_E: Ints, num_users: int, num_items: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Places [2, E] and values [E] of the similarities that are kept, of a block of items at a time."""
    order_E = np.argsort(item_E, kind="stable")
    user_E, item_E = user_E[order_E], item_E[order_E]
    has_UX = _has(user_E, item_E, num_users, num_items)
    count_X = torch.from_numpy(np.bincount(item_E, minlength=num_items)).double()
    first_X = np.searchsorted(item_E, np.arange(num_items + 1))
    pairs_E = np.concatenate([[0], np.cumsum(np.bincount(user_E, minlength=num_users)[user_E])])
    # A block is the items whose pairs begin within the same range of that many pairs.
    _, starts = np.unique(pairs_E[first_X[:-1]] // BLOCK_PAIRS, return_index=True)
    for start, stop in zip(starts, [*starts[1:], num_items], strict=True):
        part = slice(first_X[start], first_X[stop])
        has_NU = _has(item_E[part] - start, user_E[part], int(stop - start), num_users)
        both_NX = _product(has_NU, has_UX).coalesce()
        item, other = both_NX.indices()[0] + start, both_NX.indices()[1]
        value = both_NX.values() / (count_X[item] * count_X[other]).sqrt()
        near = _nearest(item, other, value)
        yield torch.stack([item, other])[:, near], value[near]


def _nearest(item_E: Tensor, other_E: Tensor, value_E: Tensor) -> Tensor:
    """Places of each item's NEIGHBORS largest values, itself left out; the entries are sorted by item and other."""
    place_E = (item_E != other_E).nonzero()[:, 0]
    # One key sorts by item, then by value from the largest: the bits of positive FP32 numbers rise with them.
    bits_E = value_E[place_E].float().view(torch.int32)
    item_E, order_E = ((item_E[place_E] << 32) - bits_E).sort(stable=True)
    item_E = -(-item_E >> 32)
    return place_E[order_E[torch.arange(len(item_E)) - torch.searchsorted(item_E, item_E) < NEIGHBORS]]


def _has(row_E: Ints, column_E: Ints, rows: int, columns: int) -> Tensor:
    return _sparse(row_E, column_E, torch.ones(len(row_E), dtype=torch.float64), rows, columns)


def _sparse(row_E: Ints, column_E: Ints, value_E: Tensor, rows: int, columns: int) -> Tensor:
    index_E = torch.from_numpy(np.stack([row_E, column_E]))
    return torch.sparse_coo_tensor(index_E, value_E, (rows, columns), check_invariants=False).coalesce()


def _product(a: Tensor, b: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
        return torch.sparse.mm(a, b)
