"""The part of a dataset that a run with a limited number of items sees (data.items), and what it holds out.

The items are chosen once, from the dataset and the settings alone: first those with data.items_after training actions
or more; of these and of the others those with the latest ones, then those with more of them, then those of the lowest
index. So items without one, whose first action is held out, come last. Kept items are numbered 0 … N - 1 in their
order, and actions of others are left out, as requests leave unknown items out of histories. All that follows sees a
dataset of N items, but for evaluation, which counts the targets that have no place in it as misses.

Axes: U users, T actions and X items of the whole dataset, N items kept.
"""

import hashlib
from dataclasses import replace

import numpy as np

from logitmix.modules.schema import ITEM, Feature
from logitmix.trainer.config import DataConfig
from logitmix.trainer.data import arrays
from logitmix.trainer.data.batches import HeldOut, leave_one_out, split_by_time
from logitmix.trainer.data.columns import Column, index_type, user_blocks
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.description import LATEST
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.data.targets import target_places


def held_out(config: DataConfig, dataset: Dataset) -> HeldOut:
    """The held-out actions of the run's split; ValueError as of `target_places` and `within`, or if a split by time
    leaves nobody to rank."""
    whole = dataset.whole or dataset
    places = target_places(whole, config.targets, config.negatives)
    if config.split == "time":
        return within(split_by_time(whole, config.held_out, config.validation, places), dataset)
    return within(leave_one_out(whole, config.validation, places), dataset)


def kept_items(config: DataConfig, dataset: Dataset) -> Ints | None:
    """The indices of the items that the run keeps [N], in order; None if these are all."""
    if not 0 < config.items < dataset.num_items:
        return None
    held, last_X = held_out(config, dataset), np.full(dataset.num_items, -LATEST, np.int64)
    for places in held.training_places(dataset):
        np.maximum.at(last_X, dataset.items_flat[places], dataset.timestamps_flat[places])
    count_X = held.training_counts(dataset)
    order_X = np.lexsort((-count_X, -last_X, count_X < config.items_after))
    return np.sort(order_X[: config.items])


def limited(config: DataConfig, dataset: Dataset) -> Dataset:
    """What the run sees of a whole dataset: itself, if it has no more than data.items items."""
    if (kept := kept_items(config, dataset)) is None:
        return dataset
    X, N = dataset.num_items, len(kept)
    number_X = np.full(X + 1, N, index_type(N + 1))
    number_X[kept] = np.arange(N)

    def renumbered(feature: Feature, column: Column) -> Column:
        return replace(column, values=number_X[column.values]) if feature.table == ITEM else column

    def make() -> arrays.Arrays:
        has_X = number_X < N
        has_T = has_X[dataset.items_flat]
        offsets = np.concatenate([[0], _kept_before(dataset.offsets[1:], dataset, has_X)])
        times = dataset.timestamps_flat[has_T]
        made = {"items": number_X[dataset.items_flat[has_T]], "offsets": offsets, "timestamps": times}
        for feature in (*dataset.schema.of("item"), *dataset.schema.of("event")):
            column = dataset.features_of(feature.owner)[feature.name]
            rows = kept if feature.owner == "item" else has_T if column.offsets is None else np.flatnonzero(has_T)
            made |= renumbered(feature, column.take(rows)).arrays(f"{feature.owner}.{feature.name}")
        return made

    size = dataset.items_flat.nbytes + dataset.timestamps_flat.nbytes
    size += sum(of.nbytes for of in dataset.event_features.values())
    found = arrays.kept(dataset.path, size, make, f"items-{hashlib.sha256(kept.tobytes()).hexdigest()[:16]}")
    tables = tuple(replace(of, rows=N + 1) if of.name == ITEM else of for of in dataset.schema.tables)
    return replace(
        dataset,
        num_items=N,
        items_flat=found["items"],
        offsets=found["offsets"],
        timestamps_flat=found["timestamps"],
        schema=replace(dataset.schema, tables=tables),
        item_features={name: Column.from_arrays(found, f"item.{name}") for name in dataset.item_features},
        user_features={of.name: renumbered(of, dataset.user_features[of.name]) for of in dataset.schema.of("user")},
        event_features={name: Column.from_arrays(found, f"event.{name}") for name in dataset.event_features},
        whole=dataset,
        kept=kept,
    )


def _kept_before(place_U: Ints, whole: Dataset, has_X: np.ndarray) -> Ints:
    """How many kept actions come before a place of each user's, its end among them: where this is in the limited
    dataset."""
    number_U, before = np.empty_like(place_U), 0
    for users, bounds in user_blocks(whole.offsets):
        count = np.concatenate([[0], np.cumsum(has_X[whole.items_flat[bounds[0] : bounds[-1]]])])
        number_U[users] = before + count[place_U[users] - bounds[0]]
        before += count[-1]
    return number_U


def within(held: HeldOut, dataset: Dataset) -> HeldOut:
    """What is held out of a whole dataset, in the limited one: a target has a place only if its item and one before it
    are kept; ValueError if no target of a part is. Of a whole dataset, the same."""
    if (whole := dataset.whole) is None:
        return held
    has_X = dataset.is_kept()
    targets = {}
    for split, place_U in held.targets.items():
        there_U = place_U >= 0
        there_U[there_U] = has_X[whole.items_flat[place_U[there_U]]]
        targets[split] = np.where(there_U, asked_places(place_U, dataset), -1)
        if (place_U >= 0).any() and (targets[split] < 0).all():
            raise ValueError(
                f"data.items is {dataset.num_items}, but no {split} target in {whole.path} is one of these items, with "
                "another one before it; raise data.items"
            )
    places = held.places
    if places is not None:
        may_T = np.zeros(len(whole.items_flat), bool)
        may_T[places] = True
        places = np.flatnonzero(may_T[has_X[whole.items_flat]])
    return HeldOut(_kept_before(held.train_end, whole, has_X), targets, places)


def asked_places(place_U: Ints, dataset: Dataset) -> Ints:
    """Where targets at these places of the whole dataset would stand in the limited one, whether their items are kept
    or not: behind the kept actions before them; -1 where there are none, and for -1."""
    assert dataset.whole is not None
    start_U = dataset.whole.offsets[:-1]
    now_U = _kept_before(np.where(place_U < 0, start_U, place_U), dataset.whole, dataset.is_kept())
    return np.where(now_U > dataset.offsets[:-1], now_U, -1)


def said_of_limit(config: DataConfig, dataset: Dataset) -> str:
    """What a limited dataset leaves out; empty for a whole one."""
    if (whole := dataset.whole) is None:
        return ""
    was = held_out(config, whole)
    now = within(was, dataset)
    actions, left = len(whole.items_flat), len(dataset.items_flat)
    missed = " and ".join(
        f"{int((place_U >= 0).sum() - (now.targets[split] >= 0).sum()):,} of {int((place_U >= 0).sum()):,} {split}"
        for split, place_U in was.targets.items()
    )
    return (
        f"the {dataset.num_items:,} with the latest training actions, of {whole.num_items:,} (data.items); the others "
        f"are left out with {actions - left:,} of {actions:,} actions; {missed} targets count as misses: no row, or "
        "none before them"
    )
