"""Explicit negatives of targets (data.negatives): items that were shown and not taken, or that were disliked.

Axes: Q targets, E their explicit negatives, G groups of targets, N negatives of a group.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from logitmix.modules.schema import ITEM
from logitmix.trainer.config import conditions_of
from logitmix.trainer.data.columns import Column, ranges
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.data.targets import NEGATIVES, event_feature, negative_places


class ExplicitNegatives:
    """Those of a dataset, for targets by their places among its actions."""

    def __init__(self, dataset: Dataset, names: Sequence[str], places: Ints | None) -> None:
        """`names`: data.negatives; `places`: the actions that may be targets, None for all. ValueError for what is
        neither a list of items nor a condition, and for a list whose values are no items of the dataset."""
        self.dataset, self.names, self.places = dataset, names, places
        self._rows = negative_places(dataset, names)
        conditions = conditions_of(names)
        self._lists = {name: _items_of(dataset, name) for name in names if name not in conditions}

    def of(self, place_Q: Ints, first_Q: Ints, most: int) -> tuple[Ints, Ints]:
        """The targets [E], in order, and their items [E]; of each target the last `most`. The items of lists are those
        that the target's own action has, and the actions that fulfill a condition those since the target before, or
        since `first_Q`, the user's first place. The target itself is none."""
        rows, items = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        if len(self._rows):
            # They are no targets, so that not all actions are.
            assert self.places is not None
            before_Q = np.insert(self.places, 0, -1)[np.searchsorted(self.places, place_Q)]
            start_Q = np.searchsorted(self._rows, np.maximum(before_Q + 1, first_Q))
            count_Q = np.searchsorted(self._rows, place_Q) - start_Q
            rows.append(np.repeat(np.arange(len(place_Q)), count_Q))
            items.append(self.dataset.items_flat[self._rows[ranges(start_Q, count_Q)]])
        for column in self._lists.values():
            taken = column.take(place_Q)
            assert taken.offsets is not None
            rows.append(np.repeat(np.arange(len(place_Q)), np.diff(taken.offsets)))
            items.append(taken.values)
        row_E, item_E = np.concatenate(rows), np.concatenate(items).astype(np.int64)
        there = (item_E >= 0) & (item_E != self.dataset.items_flat[place_Q][row_E])
        row_E, item_E = row_E[there], item_E[there]
        order_E = np.argsort(row_E, kind="stable")
        row_E, item_E = row_E[order_E], item_E[order_E]
        kept = _from_end(row_E, len(place_Q)) <= most
        return row_E[kept], item_E[kept]

    def said(self, negatives: int, targets: int, of_targets: int) -> str:
        """`negatives` of `targets`, of all `of_targets` of an epoch. ValueError if there are none."""
        what = " and ".join(self.names)
        if not negatives:
            raise ValueError(f"{NEGATIVES} {what}: no target that is trained on has any")
        said = f"{negatives:,} explicit ones of {targets:,} of {of_targets:,} targets ({what})"
        for name, column in self._lists.items():
            if unknown := int((column.values < 0).sum()):
                said += f"; {unknown:,} of {len(column.values):,} values of {name} are no items of the run"
        return said


def with_explicit(negatives_GN: Ints, bounds: list[int], row_E: Ints, item_E: Ints) -> tuple[Ints, list[int]]:
    """Groups of targets, cut so that each target with explicit negatives (`row_E`, `item_E`) is a group by itself, in
    which they take the place of the last of the negatives that it shared."""
    if not len(row_E):
        return negatives_GN, bounds
    Q, N = bounds[-1], negatives_GN.shape[1]
    has_Q = np.zeros(Q, bool)
    has_Q[row_E] = True
    begins_Q = has_Q.copy()
    begins_Q[1:] |= has_Q[:-1]
    begins_Q[bounds[:-1]] = True
    begin_G = np.flatnonzero(begins_Q)
    mixed_GN = negatives_GN[np.searchsorted(bounds, begin_G, side="right") - 1]
    mixed_GN[np.searchsorted(begin_G, row_E), N - _from_end(row_E, Q)] = item_E
    return mixed_GN, [*begin_G.tolist(), Q]


def _from_end(row_E: Ints, rows: int) -> Ints:
    """The place of each among those of its row, counted from the last one, which is 1."""
    length = np.bincount(row_E, minlength=rows)
    return np.repeat(np.cumsum(length), length) - np.arange(len(row_E))


def _items_of(dataset: Dataset, name: str) -> Column:
    """A feature of actions with its values as item indices; -1 for those that are no item."""
    flag = f"{NEGATIVES} {name}"
    feature, column = event_feature(dataset, name, flag), dataset.event_features[name]
    if not feature.sparse or not feature.form.bag:
        raise ValueError(f'{flag}: it must be a list of items, or a condition such as "event = dislike"')
    if feature.table == ITEM:
        values = column.values.astype(np.int64)
        return Column(np.where(values < dataset.num_items, values, -1), column.offsets)
    items = dataset.raw_id_column().combine_chunks()
    vocabulary = dataset.vocabulary_column(feature.table)
    item_of = pc.index_in(vocabulary, value_set=items).combine_chunks().fill_null(-1).to_numpy().astype(np.int64)
    item_of[0] = -1
    if not (item_of >= 0).any():
        raise ValueError(f"{flag}: none of its values is the id of an item, such as {items[0].as_py()!r:.40}")
    return Column(item_of[column.values], column.offsets)
