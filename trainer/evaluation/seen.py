"""What an earlier run was trained on, as actions of the dataset of the run that goes on from it. Users and items are
matched by their raw ids.

Axes: U users, X items, N users to rank.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from logitmix.trainer.data.batches import HeldOut, RankingUsers, ranking_users
from logitmix.trainer.data.columns import ranges
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.limited import held_out
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.run.folder import read_config

_USERS_AT_ONCE = 2**14


class Seen:
    """The actions that a run was trained on."""

    def __init__(self, run: Path, dataset: Dataset) -> None:
        """ValueError if it is no run directory, or if its dataset is missing."""
        config = read_config(run)
        self.run, self.dataset, self.earlier = run, dataset, load_dataset(config.data.path)
        self._counts = held_out(config.data, self.earlier).train_end - self.earlier.offsets[:-1]
        """For each user of the earlier dataset, how many actions, the first ones, were trained on."""
        # By index in the earlier dataset, -1 for those that it does not have.
        self._user_U = _places(dataset.raw_user_id_column(), self.earlier.raw_user_id_column())

    @cached_property
    def _item_X(self) -> Ints:
        """Likewise."""
        return _places(self.dataset.raw_id_column(), self.earlier.raw_id_column())

    def users_with_new(self, held: HeldOut) -> NDArray[np.bool_]:
        """Which users have more actions that are not `held` out than the run was trained on [U]."""
        known_U = self._user_U >= 0
        before_U = np.where(known_U, self._counts[self._user_U], 0)
        return held.train_end - self.dataset.offsets[:-1] > before_U

    def targets(self, users: RankingUsers) -> NDArray[np.bool_]:
        """Whether the run was trained on each user's target, the same item at the same time [N]."""
        return np.concatenate([np.zeros(0, bool), *map(self._targets, users.batches(_USERS_AT_ONCE))])

    def _targets(self, users: RankingUsers) -> NDArray[np.bool_]:
        user_N, item_N = self._user_U[users.user], self._item_X[users.target]
        count_N = np.where((user_N >= 0) & (item_N >= 0), self._counts[user_N].clip(0), 0)
        place_T = ranges(self.earlier.offsets[:-1][user_N], count_N)
        which_T = np.repeat(np.arange(len(users)), count_N)
        same_T = self.earlier.items_flat[place_T] == item_N[which_T]
        same_T &= self.earlier.timestamps_flat[place_T] == users.timestamps[users.place][which_T]
        found_N = np.zeros(len(users), bool)
        found_N[which_T[same_T]] = True
        return found_N

    def require_unseen(self, held: HeldOut) -> str:
        """What to say of the held-out targets; ValueError, with their number, if the run was trained on some."""
        counts = {}
        for split in held.targets:
            users = ranking_users(self.dataset, split, 1, held)
            if (seen_N := self.targets(users)).any():
                place = int(np.flatnonzero(seen_N)[0])
                user = self.dataset.raw_user_ids(users.user[place : place + 1])[0]
                item = self.dataset.raw_ids()[int(users.target[place])]
                raise ValueError(
                    f"{self.run} was trained on {int(seen_N.sum()):,} of the {len(users):,} {split} targets (such as "
                    f"item {item!r:.40} of user {user!r:.40}): give a dataset that goes further, or hold out later "
                    "actions alone, with --data.split time and a smaller --data.held-out"
                )
            counts[split] = len(users)
        of_splits = " and ".join(f"{count:,} {split}" for split, count in counts.items())
        return f"of the {of_splits} targets, {self.run} was trained on none"

    @property
    def said(self) -> str:
        """How many users and items are new."""
        users, items = (int((of < 0).sum()) for of in (self._user_U, self._item_X))
        return f"{users:,} of {len(self._user_U):,} users and {items:,} of {len(self._item_X):,} items are new"


def _places(wanted: pa.ChunkedArray, values: pa.ChunkedArray) -> Ints:
    """The place of each wanted text among the values, -1 where it is not there."""
    found = pc.index_in(wanted, value_set=values.combine_chunks())
    return found.fill_null(-1).to_numpy().astype(np.int64)
