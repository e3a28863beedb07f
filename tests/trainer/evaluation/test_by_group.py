"""Metrics of groups of users against those of lists that are filled one user after the other, and torchmetrics'."""

import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import two_ranks
from small_data import a_model, small_config, write_dataset

from logitmix.trainer.config import Config
from logitmix.trainer.data.batches import leave_one_out, ranking_users
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.evaluation.baselines import ItemKNN
from logitmix.trainer.evaluation.by_group import features_of, means_by_group
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.metrics import NOT_SERVED, means

NAMES = ("new_user", "history_length", "item_actions", "country", "favorites", "brand", "tags", "action", "age")


def test_groups_are_those_of_lists(tmp_path: Path) -> None:
    """60 users, 3 countries, 7 brands, 11 tags in bags of 0 to 3, ages that all differ."""
    dataset = load_dataset(write_dataset(tmp_path / "data", features=True))
    held_out = leave_one_out(dataset)
    users, count_X = ranking_users(dataset, "test", 10, held_out), held_out.training_counts(dataset)
    rank_U = np.random.default_rng(1).integers(1, 60, len(users))
    rank_U[:3] = NOT_SERVED
    found = means_by_group(features_of(NAMES, dataset), rank_U, users, dataset, held_out, count_X)
    expected = groups_of_each(dataset, users.user.tolist(), users.place.tolist(), count_X)
    assert {name.rpartition("/")[0].removeprefix("groups/") for name in found} == set(expected)
    for name, members in expected.items():
        assert found[f"groups/{name}/users"] == len(members)
        for metric, mean in means(rank_U[members]).items():
            assert found[f"groups/{name}/{metric}"] == mean
    assert len(expected["tags=(other)"]) and len(expected["favorites=(unknown)"])


def groups_of_each(dataset: Dataset, users: list[int], places: list[int], count_X: np.ndarray) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    ages = sorted(dataset.user_features["age"].values[users])
    bounds = [ages[14], ages[29], ages[44]]
    for at, (user, place) in enumerate(zip(users, places, strict=True)):
        target, start = dataset.items_flat[place], dataset.offsets[user]
        found["new_user=no" if place - 1 - start >= 2 else "new_user=yes"].append(at)
        for name, count in (("history_length", place - start), ("item_actions", count_X[target])):
            named = {0: "0", 1: "1..2", 3: "3..9", 10: "10..29", 30: "30..99"}
            found[f"{name}={named[max(first for first in named if first <= count)]}"].append(at)
        age = dataset.user_features["age"].values[user]
        low, high = [str(of) for of in bounds if of < age][-1:], [str(of) for of in bounds if of >= age][:1]
        found[f"age={''.join(low)}..{''.join(high)}"].append(at)
    rows = {"country": users, "favorites": users, "action": places}
    for name in ("country", "favorites", "brand", "tags", "action"):
        feature = next(of for of in dataset.schema.features if of.name == name)
        column = dataset.features_of(feature.owner)[name]
        vocabulary = dataset.vocabulary(feature.table)
        of_each = []
        for row in rows.get(name, dataset.items_flat[places]):
            bag = [row] if column.offsets is None else range(column.offsets[row], column.offsets[row + 1])
            of_each.append({int(column.values[one]) for one in bag} or {0})
        counts = Counter(value for values in of_each for value in values)
        kept = sorted(counts, key=lambda value: (-counts[value], value))[:10]
        for at, values in enumerate(of_each):
            labels = {(vocabulary[value] or "(unknown)") if value in kept else "(other)" for value in values}
            for label in labels:
                found[f"{name}={label}"].append(at)
    return found


@pytest.mark.parametrize(
    ("name", "said"),
    [("contry", r"'contry' .did you mean country.*; there are: new_user, "), ("image", "image, whose values are vec")],
)
def test_groups_that_cannot_be_formed_are_named(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"evaluate.groups names {said}"):
        features_of([name], load_dataset(write_dataset(tmp_path / "data", features=True)))


def evaluated(config: Config) -> tuple[dict[str, float], list[bool]]:
    """Metrics, and whether this rank, if it has fitted a baseline, had its main thread free to tell others of it."""
    fit, aside = ItemKNN.fit, list[bool]()

    def noted(*given: Any) -> ItemKNN:
        aside.append(threading.current_thread() is not threading.main_thread())
        return fit(*given)

    with a_model(config) as (model, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ItemKNN, "fit", noted)
        evaluation = Evaluation(config.evaluate, config.data, config.model, load_dataset(config.data.path), model.ranks)
        return evaluation("test", *model.evaluated()) | evaluation.baselines("test"), aside


def test_they_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """Nor do baselines; ranks wait for them as long as they take."""
    data = write_dataset(tmp_path / "data", features=True)
    config = small_config(data, {"evaluate.groups": ["item_actions", "tags", "rating"], "train.precision": "fp32"})
    alone, _ = evaluated(config)
    assert {"groups/tags=(other)/mrr", "item_knn/groups/tags=(other)/hr@10", "popularity/mrr"} <= set(alone)
    assert two_ranks.run(evaluated, config) == [(alone, [True]), (alone, [])]
