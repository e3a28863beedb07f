"""Metrics of groups of the users ranked, as evaluate.groups names them.

Axes: U users, P pairs of a user and a value, X items in the corpus.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from logitmix.common.mappings import nearest
from logitmix.modules.schema import Feature
from logitmix.trainer.data.batches import HeldOut, RankingUsers
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.metrics import means

COUNTED = ("new_user", "history_length", "item_actions")
"""Groups that need no feature."""
BOUNDS = np.array([0, 1, 3, 10, 30, 100, 300, 1000])
"""Counts with which a group begins."""
MOST = 10
"""Values of a feature that have a group of their own, those of the most users."""


def features_of(names: Sequence[str], dataset: Dataset) -> dict[str, Feature | None]:
    """The feature that each group is by, None for those of COUNTED. ValueError for one that the dataset has not, and
    for a vector."""
    features = {of.name: of for owner in ("user", "item", "event") for of in dataset.schema.of(owner)}
    for name in names:
        if name not in (known := [*COUNTED, *features]):
            raise ValueError(f"evaluate.groups names {name!r:.40}{nearest(name, known)}; there are: {', '.join(known)}")
        if name not in COUNTED and not features[name].sparse and features[name].form.wide:
            raise ValueError(f"evaluate.groups names {name}, whose values are vectors; name an id or a number")
    return {name: None if name in COUNTED else features[name] for name in names}


def means_by_group(
    features: dict[str, Feature | None],
    rank_U: Ints,
    users: RankingUsers,
    dataset: Dataset,
    held_out: HeldOut,
    count_X: Ints,
) -> dict[str, float]:
    """All METRICS of each group, as groups/country=DE/hr@10, and its users, as groups/country=DE/users; `rank_U` as in
    `means`, `count_X`: each item's training actions. A user with several values of a feature is in several groups."""
    found: dict[str, float] = {}
    groups: Iterable[tuple[str, Ints]]
    for name, feature in features.items():
        if feature:
            groups = _by_feature(feature, users, dataset)
        elif name == "new_user":
            new_U = ~held_out.trained(dataset)[users.user]
            groups = (("no", np.flatnonzero(~new_U)), ("yes", np.flatnonzero(new_U)))
        else:
            groups = _by_count(users.seen_lengths if name == "history_length" else count_X[users.target])
        for label, index_P in groups:
            if len(index_P):
                prefix = f"groups/{name}={label}"
                found |= {f"{prefix}/{metric}": mean for metric, mean in means(rank_U[index_P]).items()}
                found[f"{prefix}/users"] = len(index_P)
    return found


def _by_count(count_U: Ints) -> Iterator[tuple[str, Ints]]:
    part_U = np.searchsorted(BOUNDS, count_U, side="right") - 1
    for part, first in enumerate(BOUNDS):
        last = BOUNDS[part + 1] - 1 if part + 1 < len(BOUNDS) else ""
        yield (str(first) if first == last else f"{first}..{last}"), np.flatnonzero(part_U == part)


def _by_feature(feature: Feature, users: RankingUsers, dataset: Dataset) -> Iterator[tuple[str, Ints]]:
    """Of the user, the target or its action: groups of equal values, or quarters of the users by a number of which
    there are more than MOST."""
    row_U = {"user": users.user, "item": users.target, "event": users.place}[feature.owner]
    taken, user_U = dataset.features_of(feature.owner)[feature.name].take(row_U), np.arange(len(users))
    if not feature.sparse:
        yield from _by_number(taken.values)
        return
    value_P, user_P = taken.values.astype(np.int64), user_U
    unknown = dataset.schema.table(feature.table).unknown
    if taken.offsets is not None:
        length_U = np.diff(taken.offsets)
        empty_U = user_U[length_U == 0]
        value_P = np.append(value_P, np.full(len(empty_U), unknown))
        user_P = np.append(np.repeat(user_U, length_U), empty_U)
        value_P, user_P = np.unique(np.stack([value_P, user_P]), axis=1)
    value_V, users_V = np.unique(value_P, return_counts=True)
    # The lower row of equals.
    kept_V = value_V[np.argsort(-users_V, kind="stable")[:MOST]]
    labels = pa.array(dataset.vocabulary(feature.table)).take(pa.array(kept_V)).to_pylist()
    for value, label in zip(kept_V, labels, strict=True):
        yield ("(unknown)" if value == unknown else label), user_P[value_P == value]
    yield "(other)", np.unique(user_P[~np.isin(value_P, kept_V)])


def _by_number(value_U: np.ndarray) -> Iterator[tuple[str, Ints]]:
    value_V = np.unique(value_U)
    if len(value_V) <= MOST:
        for value in value_V:
            yield str(value), np.flatnonzero(value_U == value)
        return
    bounds = np.unique(np.quantile(value_U, (0.25, 0.5, 0.75), method="inverted_cdf").astype(value_U.dtype))
    part_U = np.searchsorted(bounds, value_U, side="left")
    for part, (low, high) in enumerate(zip(["", *bounds], [*bounds, ""], strict=True)):
        yield f"{low!s}..{high!s}", np.flatnonzero(part_U == part)
