"""Which actions of a dataset are predicted (data.targets), and how much each counts (data.weight)."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from logitmix.common.mappings import nearest
from logitmix.modules.schema import Feature
from logitmix.trainer.config import DataConfig, conditions_of
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.data.numbers import read_numbers
from logitmix.trainer.data.where import Condition

FLAG = "--data.targets"
NEGATIVES = "--data.negatives"


def target_places(dataset: Dataset, conditions: Sequence[str], negatives: Sequence[str] = ()) -> Ints | None:
    """The places of the actions for which all conditions hold, and which are no explicit negatives, in order; None
    without conditions, when all actions may be targets. Conditions are those of `prepare --where`, on features of
    actions; a missing number is the mean, as in the dataset. ValueError for other conditions, and if no action is
    left."""
    places = negative_places(dataset, negatives)
    if not conditions and not len(places):
        return None
    chosen = np.ones(len(dataset.items_flat), bool)
    for condition in conditions:
        chosen &= _fulfill(dataset, condition, FLAG)
    chosen[places] = False
    if not chosen.any():
        given = ", ".join([*conditions, *negatives])
        raise ValueError(f"{FLAG} and {NEGATIVES} ({given}): no action is left that may be a target")
    return np.flatnonzero(chosen)


def negative_places(dataset: Dataset, negatives: Sequence[str]) -> Ints:
    """The places of the actions that fulfill one of the conditions of data.negatives, in order. ValueError as of
    `target_places`."""
    chosen = np.zeros(len(dataset.items_flat), bool)
    for condition in conditions_of(negatives):
        chosen |= _fulfill(dataset, condition, NEGATIVES)
    return np.flatnonzero(chosen)


def _fulfill(dataset: Dataset, condition: str, flag: str) -> NDArray[np.bool_]:
    """Which actions fulfill a condition [actions]; ValueError if none does."""
    columns, parsed = list(dataset.event_features), Condition.parse(condition, flag)
    parsed.require_column(columns)
    values = _values(dataset, parsed.column, f"{flag} {condition!r}")
    if not (found := parsed.fulfilled(values, columns)).any():
        raise ValueError(f"{flag} {condition!r}: no action of {dataset.path} fulfills this")
    return found


def said_of_targets(
    dataset: Dataset,
    places: Ints | None,
    config: DataConfig,
    features: Sequence[str],
) -> str:
    """How many actions may be targets, those at `places` by the settings, and how many users have none; empty if all
    may. `features` are those of the model."""
    if places is None:
        return ""
    first, last = (np.searchsorted(places, of) for of in (dataset.offsets[:-1], dataset.offsets[1:]))
    without = int((first == last).sum())
    others = conditions_of(config.negatives)
    said = f"{len(places):,} of {len(dataset.items_flat):,} actions "
    said += f"({' and '.join([*config.targets, *(f'not {of}' for of in others)])})"
    said += f"; {without:,} of {dataset.num_users:,} users have none" if without else ""
    columns = {Condition.parse(condition, "").column for condition in (*config.targets, *others)}
    if unseen := sorted(columns - {*features} if "all" not in features else ()):
        said += f"; the model does not see which, without --model.features {' '.join(unseen)}"
    return said


def target_weights(dataset: Dataset, name: str, places: Ints | None) -> NDArray[np.float32] | None:
    """The weights of the actions [actions], from a feature of theirs; None without a name. A missing one is the mean.
    ValueError if there is no such feature, or if the weight of an action that may be a target is no number, or is below
    0, or if all are 0."""
    if not name:
        return None
    flag = f"--data.weight {name}"
    values = _values(dataset, name, flag)
    if pa.types.is_dictionary(values.type):
        numbers = read_numbers(values.dictionary.cast(pa.string()), pa.float64()).values
        known = values.dictionary.is_valid()
        found = pc.if_else(known, numbers.fill_null(np.nan), None).take(values.indices)
        weights = found.fill_null(pc.mean(found).as_py() or 0.0).to_numpy().astype(np.float32)
    else:
        weights = dataset.event_features[name].values
    wrong = ~((weights >= 0) & (weights < np.inf))
    of_targets = slice(None) if places is None else places
    if wrong[of_targets].any():
        found = np.arange(len(weights))[of_targets][wrong[of_targets]]
        raise ValueError(
            f"{flag}: the values of {len(found):,} targets are no finite numbers of 0 or more, such as "
            f"{str(values[int(found[0])].as_py())!r:.40}; correct "
            "them, or leave them out by --data.targets"
        )
    if not weights[of_targets].any():
        raise ValueError(f"{flag}: the weights of all targets are 0")
    return weights


def event_feature(dataset: Dataset, name: str, flag: str) -> Feature:
    """The feature of actions of this name; ValueError if there is none."""
    if name not in (columns := list(dataset.event_features)):
        raise ValueError(
            f"{flag}: no such column{nearest(name, columns)}; it must be one of the actions' features: "
            f"{', '.join(columns) or 'none'}"
        )
    return next(of for of in dataset.schema.of("event") if of.name == name)


def _values(dataset: Dataset, name: str, what: str) -> pa.Array:
    """A feature of the actions, as `holds` takes it; `what` names the setting."""
    feature = event_feature(dataset, name, what)
    if feature.form.bag or feature.form.wide:
        raise ValueError(f"{what}: {name} has several values for an action")
    return dataset.single_values(feature)
