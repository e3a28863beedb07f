"""Which actions of a dataset are predicted (data.targets)."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.data.where import column_of, holds

FLAG = "--data.targets"


def target_places(dataset: Dataset, conditions: Sequence[str]) -> Ints | None:
    """The places of the actions for which all conditions hold, in order; None without conditions, when all actions may
    be targets. Conditions are those of `prepare --where`, on features of actions; a missing number is the mean, as in
    the dataset. ValueError for other conditions, and if no action is left."""
    if not conditions:
        return None
    chosen = np.ones(len(dataset.items_flat), bool)
    for condition in conditions:
        name = column_of(condition, list(dataset.event_features), FLAG)
        values = _values(dataset, name, condition)
        chosen &= holds(condition, {name: values}, flag=FLAG)
        if not chosen.any():
            some = ""
            if pa.types.is_dictionary(values.type):
                some = f"; {name} is {', '.join(values.dictionary.drop_null()[:5].to_pylist())}, for example"
            raise ValueError(f"{FLAG} {condition!r}: no action of {dataset.path} fulfills this{some}")
    return np.flatnonzero(chosen)


def said_of_targets(dataset: Dataset, conditions: Sequence[str], features: Sequence[str]) -> str:
    """How many actions may be targets, and how many users have none; empty if all may. `features` are those of the
    model."""
    places = target_places(dataset, conditions)
    if places is None:
        return ""
    first, last = (np.searchsorted(places, of) for of in (dataset.offsets[:-1], dataset.offsets[1:]))
    without = int((first == last).sum())
    said = f"{len(places):,} of {len(dataset.items_flat):,} actions ({' and '.join(conditions)})"
    said += f"; {without:,} of {dataset.num_users:,} users have none" if without else ""
    columns = {column_of(condition, list(dataset.event_features)) for condition in conditions}
    if unseen := sorted(columns - {*features} if "all" not in features else ()):
        said += f"; the model does not see which, without --model.features {' '.join(unseen)}"
    return said


def _values(dataset: Dataset, name: str, condition: str) -> pa.Array:
    """A feature of the actions, as `holds` takes it."""
    values, feature = dataset.event_features[name].values, next(f for f in dataset.schema.of("event") if f.name == name)
    if feature.form.bag or feature.form.wide:
        raise ValueError(f"{FLAG} {condition!r}: {name} has several values for an action, and cannot be compared")
    if not feature.sparse:
        return pa.array(values)
    vocabulary = dataset.vocabulary_column(feature.table).combine_chunks()
    return pa.DictionaryArray.from_arrays(pa.array(values), vocabulary)
