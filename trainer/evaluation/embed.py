"""Embeddings of items and queries by the tower, from tables whose rows are on several ranks.

Axes: V items, B users, T positions of their histories, packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from logitmix.comm.process_group import Ranks
from logitmix.modules.batch import Packing
from logitmix.modules.config import sees_times
from logitmix.modules.features import Embedded
from logitmix.modules.schema import ITEM, Owner
from logitmix.modules.towers import Tower
from logitmix.trainer.data.batches import RankingUsers
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.lookups import Ints, Lookups, look_up
from logitmix.trainer.parallel.sharded_rows import ShardedRows


@dataclass(frozen=True)
class Embedder:
    """Every method is collective: each rank asks for its own items or users, or for none. The tower is in evaluation
    mode from then on."""

    tower: Tower
    tables: Mapping[str, ShardedRows]
    columns: Mapping[Owner, Mapping[str, Column]] = field(default_factory=dict)
    """The dataset's features, by owner and name; not read if the tower uses none."""

    def __post_init__(self) -> None:
        self.tower.eval()

    @property
    def ranks(self) -> Ranks:
        return self.tables[ITEM].ranks

    def items(self, item_V: Ints) -> Embedded:
        """Items by sorted index [V]."""
        rows, found = self._fetch(item_V, _NONE, _NONE)
        return self.tower.item_tower(rows, found.features.to(self.ranks.device))

    def queries(self, users: RankingUsers) -> Embedded:
        """The query after the last position of each user's history [B]."""
        item_V, place_T = np.unique(users.history, return_inverse=True)
        rows, found = self._fetch(item_V, users.user, users.encoded)
        features, device = found.features.to(self.ranks.device), self.ranks.device
        vector_TD = self.tower.item_tower(rows, features).vector_RD[torch.from_numpy(place_T).to(device)]
        times = users.times if sees_times(self.tower.config.encoder, self.tower.schema) else (None, None)
        packing = Packing(torch.from_numpy(users.lengths), 0, *times).to(device)
        return self.tower.queries(vector_TD, packing, rows, features)

    def _fetch(self, item_V: Ints, user_B: Ints, action_T: Ints) -> tuple[dict[str, torch.Tensor], Lookups]:
        found = look_up(self.columns, self.tower.schema, item_V, item_V, user_B, action_T)
        return {name: self.tables[name].fetch(cast(torch.Tensor, id_V)) for name, id_V in found.ids.items()}, found


_NONE = np.empty(0, np.int64)
