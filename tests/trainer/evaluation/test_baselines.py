"""Popularity and item-kNN against the same computed user by user, in plain Python; EASE against its formula."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_data import in_memory, small_config, write_dataset

from logitmix.comm.process_group import process_group
from logitmix.trainer.data import columns
from logitmix.trainer.data.batches import HeldOut, leave_one_out, ranking_users, split_by_time
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.evaluation import baselines, evaluate
from logitmix.trainer.evaluation.baselines import EASE, ItemKNN, popularity, rank_targets, users_of_both
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.metrics import NOT_SERVED
from logitmix.trainer.run.results import beside_baselines


@pytest.fixture
def dataset() -> Dataset:
    """40 users with 1 to 24 random actions each, at random times; items 30 and 31 have no action."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 25, 40)
    made = in_memory(np.concatenate([[0], np.cumsum(lengths)]), random.integers(0, 30, lengths.sum()), 32)
    times = [np.sort(random.integers(0, 1000, length)) for length in lengths]
    return replace(made, timestamps_flat=np.concatenate(times))


@pytest.fixture(params=["leave-one-out", "time"])
def held_out(request: pytest.FixtureRequest, dataset: Dataset) -> HeldOut:
    return leave_one_out(dataset) if request.param == "leave-one-out" else split_by_time(dataset, 0.2)


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("block_pairs", [2**24, 50])
def test_ranks_are_those_of_a_plain_computation(
    dataset: Dataset, held_out: HeldOut, exclude: bool, block_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "NEIGHBORS", 4)
    monkeypatch.setattr(baselines, "BLOCK_PAIRS", block_pairs)
    monkeypatch.setattr(baselines, "SCORES", 100)  # three users at a time
    monkeypatch.setattr(columns, "USERS_AT_ONCE", 7)
    users = ranking_users(dataset, "test", 5, held_out)
    trained = training_histories(dataset, held_out)
    neighbors = plain_neighbors(trained, 4)
    counts = Counter(item for history in trained for item in history)
    expected: dict[str, list[int]] = {"popularity": [], "item_knn": []}
    for user, place in zip(users.user, users.place, strict=True):
        history = dataset.items_flat[dataset.offsets[user] : place].tolist()
        knn: Counter[int] = Counter()
        for age, item in enumerate(reversed(history)):
            for other, similarity in neighbors.get(item, {}).items():
                knn[other] += similarity * 0.8**age
        out = set(history) if exclude else set()
        target = int(dataset.items_flat[place])
        expected["popularity"].append(plain_rank(counts, target, out, dataset.num_items))
        expected["item_knn"].append(plain_rank(knn, target, out, dataset.num_items))
    for name, score in (
        ("popularity", popularity(held_out.training_counts(dataset))),
        ("item_knn", ItemKNN.fit(dataset, held_out)),
    ):
        assert rank_targets(score, users, dataset.num_items, exclude).tolist() == expected[name]
    assert len(set(expected["item_knn"])) > 8 and len(set(expected["popularity"])) > 8


def training_histories(dataset: Dataset, held_out: HeldOut) -> list[list[int]]:
    bounds = zip(dataset.offsets[:-1], held_out.train_end, strict=True)
    return [dataset.items_flat[start : max(start, end)].tolist() for start, end in bounds]


def plain_neighbors(trained: list[list[int]], count: int) -> dict[int, dict[int, float]]:
    of: dict[int, set[int]] = {}
    for user, history in enumerate(trained):
        for item in history:
            of.setdefault(item, set()).add(user)
    found = {}
    for item in of:
        similarity = {x: len(of[item] & of[x]) / math.sqrt(len(of[item]) * len(of[x])) for x in of if x != item}
        nearest = sorted((-value, x) for x, value in similarity.items() if value)[:count]
        found[item] = {x: -value for value, x in nearest}
    return found


def plain_rank(score: Counter[int], target: int, out: set[int], num_items: int) -> int:
    if target in out:
        return int(NOT_SERVED)
    others = [score[item] for item in range(num_items) if item != target and item not in out]
    return 1 + sum(of >= score[target] or math.isclose(of, score[target]) for of in others)


def test_sums_that_differ_by_rounding_are_ties() -> None:
    users = ranking_users(in_memory(np.array([0, 3]), np.array([0, 1, 2]), 4), "test", 5)
    score_BX = np.array([[0.0, 0.0, 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]])
    assert score_BX[0, 2] > score_BX[0, 3]
    assert rank_targets(lambda _: score_BX, users, 4, True).tolist() == [2]
    # EASE has negative scores.
    assert rank_targets(lambda _: -score_BX, users, 4, True).tolist() == [2]
    for same in (-1.0, np.nan):
        assert rank_targets(lambda _, same=same: np.full((1, 4), same), users, 4, False).tolist() == [4]


def test_too_many_pairs_or_actions_are_a_sample_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 users with 5 training items each, 25 pairs: 110 allow for four of them; one user is always there."""
    dataset = in_memory(np.arange(21) * 7, np.tile(np.arange(7), 20), 7)
    fitted = ItemKNN.fit(dataset, leave_one_out(dataset), pairs=110)
    assert (fitted.users, fitted.of_users) == (4, 20)
    assert ItemKNN.fit(dataset, leave_one_out(dataset), pairs=1).users == 1
    assert ItemKNN.fit(dataset, leave_one_out(dataset), pairs=500).users == 20
    monkeypatch.setattr(baselines, "ACTIONS", 17)
    assert ItemKNN.fit(dataset, leave_one_out(dataset), pairs=500).users == 3


def test_a_model_is_set_beside_the_better_baseline_at_each_k() -> None:
    results = {"hr@1": 0.2, "hr@10": 0.3, "hr@50": 0.4, "hr@100": 0.5, "hr@500": 0.6, "ndcg@10": 0.1, "mrr": 0.1}
    results |= {f"item_knn/{name}": of for name, of in zip(results, (0.1, 0.2, 0.41, 0.5, 0.55, 1, 1), strict=True)}
    results |= {"popularity/hr@1": 0.0, "popularity/hr@10": 0.3, "popularity/hr@500": 0.7, "peeked/hr@1": 1.0}
    assert beside_baselines(results) == (
        "ahead of item-kNN at hr@1; behind item-kNN at hr@50 (0.4000 < 0.4100); behind popularity at hr@500 "
        "(0.6000 < 0.7000); level with item-kNN at hr@100; level with popularity at hr@10"
    )
    assert beside_baselines({"hr@1": 0.2, "peeked/hr@1": 1.0, "step": 3}) == ""
    few = {"hr@10": 0.2, "hr@50": 1.0, "corpus": 50, "popularity/hr@10": 0.1, "popularity/hr@50": 1.0}
    assert beside_baselines(few) == "ahead of popularity at hr@10"


def test_a_large_corpus_has_a_sample_of_users_and_popularity_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(write_dataset(tmp_path / "data"))
    dataset = load_dataset(config.data.path)
    monkeypatch.setattr(evaluate, "MOST_SCORES", 10 * dataset.num_items)
    monkeypatch.setattr(evaluate, "MOST_ITEMS", dataset.num_items - 1)
    with process_group("cpu", 60) as ranks:
        found = Evaluation(config.evaluate, config.data, config.model, dataset, ranks).baselines("test")
    said = capsys.readouterr().err
    assert "the baselines are ranked for 10 of 60 users, a sample" in said and "item-kNN is left out" in said
    assert found["popularity/hr@10"] * 10 == pytest.approx(round(found["popularity/hr@10"] * 10))
    assert "item_knn/hr@10" not in found


def plain_users(dataset: Dataset, held_out: HeldOut) -> np.ndarray:
    """X of Steck's paper: which user has a training action with which item."""
    has_UX = np.zeros((dataset.num_users, dataset.num_items))
    for user, history in enumerate(training_histories(dataset, held_out)):
        has_UX[user, history] = 1
    return has_UX


@pytest.mark.parametrize("exclude", [True, False])
def test_ease_is_the_closed_form(
    dataset: Dataset, held_out: HeldOut, exclude: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B = I - P / diag(P), P = (X'X + lambda I)^-1, and ranks by the model's rules."""
    monkeypatch.setattr(baselines, "BLOCK_SCORES", 7 * 32)  # seven users at a time
    monkeypatch.setattr(baselines, "SCORES", 100)
    has_UX = plain_users(dataset, held_out)
    inverse_XX = np.linalg.inv(has_UX.T @ has_UX + 3 * np.eye(32))
    weight_XX = np.eye(32) - inverse_XX / np.diag(inverse_XX)
    ease = EASE.fit(users_of_both(dataset, held_out), 3)
    np.testing.assert_allclose(ease.weight_XX.numpy(), weight_XX, atol=1e-12)
    assert not ease.weight_XX.diagonal().any()
    users, expected = ranking_users(dataset, "test", 5, held_out), []
    for user, place in zip(users.user, users.place, strict=True):
        history, target = set(dataset.items_flat[dataset.offsets[user] : place].tolist()), dataset.items_flat[place]
        score_X = weight_XX[sorted(history)].sum(0)
        others = set(range(32)) - {int(target)} - (history if exclude else set())
        rank = 1 + sum(score_X[x] > score_X[target] - 1e-12 for x in others)
        expected.append(int(NOT_SERVED) if exclude and target in history else rank)
    assert rank_targets(ease, users, 32, exclude).tolist() == expected
    assert len(set(expected)) > 8
