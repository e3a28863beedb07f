"""Which rows of which tables some items, users and actions need.

Axes: T actions, V items, B users, S ids of a feature's bags.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logitmix.modules.batch import Bags
from logitmix.modules.features import Features
from logitmix.modules.schema import ITEM, RECENCY, RECENCY_FEATURE, USER, USER_FEATURE, WANTED, Owner, Schema
from logitmix.modules.values import Values
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, of_next

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
    for name in (of.name for of in schema.of("event") if of.name not in events and of.name.startswith(WANTED)):
        if (source := events.get(name.removeprefix(WANTED))) is not None:
            events = {**events, name: of_next(source, dataset.offsets)}
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
    instead: Mapping[str, Ints] = MappingProxyType({}),
) -> Lookups:
    """The lookups of the features of `schema` for these items, users (by index) and actions (by place in the dataset).

    The items are unique and sorted. `columns` has these features. `item_row_V` are the items' rows of the item table:
    their own, or the unknown item's. `instead` has rows that features take in place of those of their columns. For a
    `pooled` table, the features' bags are looked up rather than their rows.
    """
    rows: Mapping[Owner, Ints] = {"item": items_V, "user": users_B, "event": actions_T}
    named: dict[str, dict[str, Column]] = {table.name: {} for table in schema.tables}
    named[ITEM][ITEM] = Column(item_row_V)
    values: dict[str, Values] = {}
    for feature in schema.features:
        if feature.name == ITEM:
            continue
        taken = columns[feature.owner][feature.name].take(rows[feature.owner])
        if feature.name in instead:
            taken = Column(instead[feature.name])
        if feature.sparse:
            named[feature.table][feature.name] = replace(taken, values=taken.values.astype(np.int64, copy=False))
        else:
            values[feature.name] = values_of(taken, np.ascontiguousarray(taken.values, np.float32))
    ids: dict[str, Tensor | Bags] = {}
    for table, by_feature in named.items():
        if table in pooled:
            ids[table], of_table = _pooled(by_feature, schema, table)
            values |= of_table
            continue
        if list(by_feature) == [ITEM] and item_row_V is items_V:
            # Already sorted and unique.
            ids[table], values[ITEM] = torch.from_numpy(items_V), Values(torch.arange(len(items_V)))
            continue
        named_ids = [column.values for column in by_feature.values()]
        unique, inverse = unique_inverse(np.concatenate(named_ids), schema.table(table).ids)
        ids[table] = torch.from_numpy(unique)
        ends = np.cumsum([len(part) for part in named_ids])[:-1]
        for (name, column), index in zip(by_feature.items(), np.split(inverse, ends), strict=True):
            values[name] = values_of(column, index)
    row_V = values.pop(ITEM).values
    in_order = len(row_V) == len(ids[ITEM]) and torch.equal(row_V, torch.arange(len(row_V)))
    return Lookups(ids, Features(None if in_order else row_V, values))


def values_of(column: Column, values: np.ndarray) -> Values:
    """A column's rows as tensors, with other values."""
    offsets = None if column.offsets is None else torch.from_numpy(column.offsets)
    return Values(
        torch.from_numpy(values), offsets, {name: torch.from_numpy(of) for name, of in column.parallel.items()}
    )


def _pooled(named: Mapping[str, Column], schema: Schema, table: str) -> tuple[Bags, dict[str, Values]]:
    """The bags of all features that look up a pooled table, and each feature as the numbers of its bags, each a bag of
    one pooled row. A single id is a bag of one."""
    lengths, shares, values, first = [], list[Tensor](), {}, 0
    forms = {feature.name: feature.form for feature in schema.features}
    for name, column in named.items():
        lengths.append(np.ones(len(column.values), np.int64) if column.offsets is None else np.diff(column.offsets))
        of_each = forms[name].shares(values_of(column, column.values))
        equal = np.repeat(1 / np.maximum(lengths[-1], 1), lengths[-1])
        shares.append(torch.from_numpy(equal).float() if of_each is None else of_each)
        R, form = len(lengths[-1]), forms[name]
        bags = torch.arange(R + 1) if form.bag else None
        values[name] = Values(torch.arange(first, first + R), bags, {of: torch.ones(R) for of in form.parallel})
        first += R
    ends = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    ids = np.concatenate([column.values for column in named.values()])
    weights = torch.cat(shares) if schema.weighs(table) else None
    return Bags(torch.from_numpy(ids), torch.from_numpy(ends), weights), values


def unique_inverse(named: Ints, count: int) -> tuple[Ints, Ints]:
    """Sorted unique numbers, all from 0 to count - 1, and the place of each of `named` among them."""
    if count > 4 * len(named):
        unique, inverse = np.unique(named, return_inverse=True)
        return unique.astype(np.int64), inverse
    # A pass over all numbers costs less than sorting.
    present = np.zeros(count, dtype=bool)
    present[named] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[named]
