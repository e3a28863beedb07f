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
    LowRankParameters,
    generate,
    generate_low_rank,
)

pytestmark = pytest.mark.long

HIGH = DemoParameters(users=600, items=1_000, topics=50, shortest=20, longest=50)
LOW = LowRankParameters(users=400, items=500, shortest=20, longest=40)
NAMES = ("demo", "demo-features")
WORLDS = [(generate, HIGH), (generate_low_rank, LOW)]


def histories(made: Generated) -> list[np.ndarray]:
    return np.split(made.items, np.flatnonzero(np.diff(made.users)) + 1)


def topics_and_places(made: Generated) -> tuple[np.ndarray, np.ndarray]:
    parsed = np.array([[int(number) for number in re.findall(r"\d+", title)] for title in made.titles])
    return parsed[:, 0], parsed[:, 1]


@pytest.mark.parametrize(("world", "parameters"), WORLDS)
def test_the_seed_decides_everything(world, parameters) -> None:  # type: ignore[no-untyped-def]
    first, again, other = world(parameters, 3), world(parameters, 3), world(parameters, 4)
    for entry in dataclasses.fields(Generated):
        assert np.array_equal(getattr(first, entry.name), getattr(again, entry.name))
    assert not np.array_equal(first.items[:1000], other.items[:1000])


@pytest.mark.parametrize(("world", "parameters"), WORLDS)
def test_sizes_are_as_asked(world, parameters) -> None:  # type: ignore[no-untyped-def]
    made = world(parameters, 0)
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


@pytest.mark.parametrize(("world", "parameters"), WORLDS)
def test_popularity_falls_as_a_power(world, parameters) -> None:  # type: ignore[no-untyped-def]
    counts = np.sort(np.bincount(world(parameters, 0).items, minlength=parameters.items))[::-1]
    ranks = np.arange(10, parameters.items // 2)
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks]), 1)[0]
    assert -1.2 < slope < -0.3
    even = world(dataclasses.replace(parameters, popularity_exponent=0.0), 0)
    flat = np.sort(np.bincount(even.items, minlength=parameters.items))[::-1]
    assert counts[:10].sum() > 2 * flat[:10].sum()


def test_users_keep_to_their_interests() -> None:
    made = generate(HIGH, 0)
    topics, _ = topics_and_places(made)
    seen = [len(set(topics[history].tolist())) for history in histories(made)]
    assert max(seen) == HIGH.most_interests
    assert np.mean(seen) > HIGH.fewest_interests


def test_an_interest_moves_along_its_ring() -> None:
    made = generate(HIGH, 0)
    topics, places = topics_and_places(made)
    size = HIGH.items // HIGH.topics
    steps = []
    for history in histories(made):
        same = topics[history[1:]] == topics[history[:-1]]
        steps.append((places[history[1:]] - places[history[:-1]])[same] * 2 * np.pi / size)
    turned = np.concatenate(steps)
    assert np.cos(turned - HIGH.stride).mean() > 0.5
    assert np.sin(turned).mean() > 0.1, "forwards more than backwards"


def test_interests_switch_as_often_as_asked() -> None:
    parameters = dataclasses.replace(HIGH, fewest_interests=6, shortest=30, longest=30)
    made = generate(parameters, 0)
    topics, _ = topics_and_places(made)
    changes = np.concatenate([np.diff(topics[history]) != 0 for history in histories(made)])
    assert changes.mean() == pytest.approx(parameters.switch, abs=0.03)


def test_the_previous_item_tells_more_than_popularity_does() -> None:
    """A count of successors, trained on all but the last action, puts the last one into its 10 far more often."""
    made = generate(DemoParameters(), 0)
    split = histories(made)
    successors = np.zeros((3_000, 3_000), np.int32)
    for history in split:
        np.add.at(successors, (history[:-2], history[1:-1]), 1)
    popularity = np.bincount(np.concatenate([history[:-1] for history in split]), minlength=3_000)
    hits = {"successors": 0, "popularity": 0}
    for history in split:
        for name, scores in (("successors", successors[history[-2]] + popularity * 1e-6), ("popularity", popularity)):
            left = scores.astype(float)
            left[history[:-1]] = -1
            hits[name] += int(history[-1] in np.argpartition(-left, 10)[:10])
    assert hits["successors"] > 4 * hits["popularity"] > 0


def test_the_control_has_the_rank_it_says() -> None:
    """With no drift and even popularity, users' log-odds are `rank` numbers: so many directions hold their counts."""
    parameters = LowRankParameters(
        users=2_000, items=100, shortest=30, longest=30, popularity_exponent=0.0, rank=3, strength=3.0, drift=0.0
    )
    made = generate_low_rank(parameters, 0)
    counts = np.zeros((2_000, 100))
    counts[made.users, made.items] = 1
    values = np.linalg.svd(counts - counts.mean(axis=0), compute_uv=False)
    assert values[2] > 1.5 * values[3]


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
