import dataclasses
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare
from logitmix.trainer.prepare.sources import demo_features
from logitmix.trainer.prepare.sources.demo import (
    DemoParameters,
    Generated,
    generate,
)

pytestmark = pytest.mark.long

HIGH = DemoParameters(users=600, items=1_000, topics=50, shortest=20, longest=50)
NAMES = ("demo", "demo-features")


def histories(made: Generated) -> list[np.ndarray]:
    return np.split(made.items, np.flatnonzero(np.diff(made.users)) + 1)


def topics_and_places(made: Generated) -> tuple[np.ndarray, np.ndarray]:
    parsed = np.array([[int(number) for number in re.findall(r"\d+", title)] for title in made.titles])
    return parsed[:, 0], parsed[:, 1]


def test_the_seed_decides_everything() -> None:
    first, again, other = (generate(HIGH, seed) for seed in (3, 3, 4))
    for entry in dataclasses.fields(Generated):
        assert np.array_equal(getattr(first, entry.name), getattr(again, entry.name))
    assert not np.array_equal(first.items[:1000], other.items[:1000])


def test_sizes_are_as_asked() -> None:
    parameters, made = HIGH, generate(HIGH, 0)
    lengths = np.bincount(made.users)
    assert len(lengths) == parameters.users
    assert (lengths.min(), lengths.max()) == (parameters.shortest, parameters.longest)
    assert len(made.item_ids) == len(made.titles) == parameters.items
    assert made.item_ids[7] == "item-0007" and made.user_ids[7] == "user-0007"
    for history, times in zip(
        histories(made), np.split(made.timestamps, np.flatnonzero(np.diff(made.users)) + 1), strict=True
    ):
        assert len(set(history.tolist())) == len(history), "an item comes twice"
        assert (np.diff(times) > 0).all()


def test_features_tell_of_the_world_but_not_all_of_it() -> None:
    made, topic_TC = generate(HIGH, 0), np.random.default_rng(1).normal(size=(HIGH.topics, 4))
    topics, _ = topics_and_places(made)
    items, users, actions = (
        demo_features.of_items(made, topic_TC, np.random.default_rng(2)),
        demo_features.of_users(made, topic_TC, np.random.default_rng(3)),
        demo_features.of_actions(made, np.random.default_rng(4)),
    )
    share = np.mean(items["topic"].to_numpy() == topics)
    assert share == pytest.approx(1 - demo_features.WRONG * (1 - 1 / HIGH.topics), abs=0.04)
    assert np.array_equal(items["theme"].to_numpy(), topics // demo_features.THEME)
    assert items["arc"].to_numpy().max() == demo_features.ARCS - 1
    taken = [set(topics[history].tolist()) for history in histories(made)]
    told = [set(of) for of in users["interests"].to_pylist()]
    shares = [len(of & there) / len(of) for of, there in zip(told, taken, strict=True)]
    assert 0.4 < np.mean(shares) < 0.9
    # An action that stays in its topic is near the one before it, and its page says so.
    stays = np.concatenate([np.append(False, np.diff(topics[history]) == 0) for history in histories(made)])
    rating, page = actions["rating"].to_numpy(), actions["page"].to_numpy()
    assert rating[stays].mean() > rating[~stays].mean() + 0.5
    assert np.mean(page == ~stays) > 0.8


def test_features_change_no_action(tmp_path: Path) -> None:
    said = [prepare(PrepareOptions(name, out=str(tmp_path / name)), Console(quiet=True)) for name in NAMES]
    assert all(len(of["schema"]["features"]) == count for of, count in zip(said, (1, 21), strict=True))
    plain, featured = (
        pq.read_table(tmp_path / name / "sequences").select(["item_indices", "timestamps"]) for name in NAMES
    )
    assert plain.equals(featured)
