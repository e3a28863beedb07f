"""Which rows of which tables some items, users and actions need.

Axes: T actions, V items, B users, S ids of a feature's bags.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitmix.modules.batch import Bags
from logitmix.modules.features import Features, Values
from logitmix.modules.schema import ITEM, RECENCY, RECENCY_FEATURE, USER, USER_FEATURE, Owner, Schema
from logitmix.trainer.data.dataset import Column, Dataset

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lookups:
    """The sorted unique ids of each table (int64), or bags of ids for a pooled table, and the features as indices into
    them."""

    ids: dict[str, Tensor | Bags]
    features: Features


def columns_of(
    dataset: Dataset, schema: Schema, trained_U: NDArray[np.bool_] | None = None
) -> dict[Owner, Mapping[str, Column]]:
    """The dataset's features, by owner and name; with recency and user if `schema`, the model's, has them. The ids of
    the users `trained_U` are known, and of all without it.
    """
    users, events = dataset.user_features, dataset.event_features
    if RECENCY_FEATURE in schema.features and RECENCY not in events:
        events = {**events, RECENCY: dataset.recency}
    if USER_FEATURE in schema.features and USER not in users:
        row_U = np.arange(1, dataset.num_users + 1)
        users = {**users, USER: Column(row_U if trained_U is None else np.where(trained_U, row_U, 0))}
    return {"item": dataset.item_features, "user": users, "event": events}


def look_up(
    columns: Mapping[Owner, Mapping[str, Column]],
    schema: Schema,
    item_row_V: Ints,
    items_V: Ints,
    users_B: Ints,
    actions_T: Ints,
    pooled: Collection[str] = (),
    user_row_B: Ints | None = None,
) -> Lookups:
    """The lookups of the features of `schema` for these items, users (by index) and actions (by place in the dataset).

    The items are unique and sorted. `columns` has these features. `item_row_V` are the items' rows of the item table:
    their own, or the unknown item's. `user_row_B`, where it is given, replaces the column of the users' ids. For a
    `pooled` table, the features' bags are looked up rather than their rows.
    """
    rows: Mapping[Owner, Ints] = {"item": items_V, "user": users_B, "event": actions_T}
    named: dict[str, dict[str, Ints]] = {table.name: {} for table in schema.tables}
    named[ITEM][ITEM] = item_row_V
    values: dict[str, Values] = {}
    offsets: dict[str, Ints | None] = {}
    for feature in schema.features:
        if feature.name == ITEM:
            continue
        taken, offsets[feature.name] = taken_rows(columns[feature.owner][feature.name], rows[feature.owner])
        if feature == USER_FEATURE and user_row_B is not None:
            taken = user_row_B
        if feature.sparse:
            named[feature.table][feature.name] = taken.astype(np.int64, copy=False)
        else:
            values[feature.name] = Values(torch.from_numpy(np.ascontiguousarray(taken, np.float32)))
    ids: dict[str, Tensor | Bags] = {}
    for table, by_feature in named.items():
        if table in pooled:
            ids[table], of_table = _pooled(by_feature, offsets)
            values |= of_table
            continue
        if list(by_feature) == [ITEM] and item_row_V is items_V:
            # Already sorted and unique.
            ids[table], values[ITEM] = torch.from_numpy(items_V), Values(torch.arange(len(items_V)))
            continue
        unique, inverse = unique_inverse(np.concatenate([*by_feature.values()]), schema.table(table).rows)
        ids[table] = torch.from_numpy(unique)
        ends = np.cumsum([len(part) for part in by_feature.values()])[:-1]
        for name, index in zip(by_feature, np.split(inverse, ends), strict=True):
            bags = offsets.get(name)
            values[name] = Values(torch.from_numpy(index), None if bags is None else torch.from_numpy(bags))
    row_V = values.pop(ITEM).values
    in_order = len(row_V) == len(ids[ITEM]) and torch.equal(row_V, torch.arange(len(row_V)))
    return Lookups(ids, Features(None if in_order else row_V, values))


def _pooled(named: Mapping[str, Ints], offsets: Mapping[str, Ints | None]) -> tuple[Bags, dict[str, Values]]:
    """The bags of all features that look up a pooled table, and each feature as the numbers of its bags, each a bag of
    one pooled row. A single id is a bag of one."""
    lengths, values, first = [], {}, 0
    for name, ids in named.items():
        bags = offsets[name]
        lengths.append(np.ones(len(ids), np.int64) if bags is None else np.diff(bags))
        number_R = torch.arange(first, first + len(lengths[-1]))
        values[name] = Values(number_R, None if bags is None else torch.arange(len(number_R) + 1))
        first += len(number_R)
    ends = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return Bags(torch.from_numpy(np.concatenate([*named.values()])), torch.from_numpy(ends)), values


def taken_rows(column: Column, rows: Ints) -> tuple[np.ndarray, Ints | None]:
    """The values of rows, one after the other, and the offsets of each row's values if rows have several."""
    if column.offsets is None:
        return column.values[rows], None
    starts = column.offsets[rows].astype(np.int64)
    lengths = column.offsets[rows + 1] - starts
    return column.values[ranges(starts, lengths)], np.concatenate([[0], np.cumsum(lengths)])


def unique_inverse(named: Ints, count: int) -> tuple[Ints, Ints]:
    """Sorted unique numbers, all from 0 to count - 1, and the place of each of `named` among them."""
    if count > 4 * len(named):
        unique, inverse = np.unique(named, return_inverse=True)
        return unique.astype(np.int64), inverse
    # A pass over all numbers costs less than sorting.
    present = np.zeros(count, dtype=bool)
    present[named] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[named]


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenated arange(start, start + length) of each pair."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
