"""Leave-one-out ranking against sorting and counting one user after the other."""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch
import two_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import in_memory
from torch import Tensor

from logitmix.comm.process_group import Ranks, process_group
from logitmix.modules.batch import Packing
from logitmix.modules.config import DotConfig, EncoderConfig, ModelConfig, MoLConfig
from logitmix.modules.towers import Tower
from logitmix.trainer import evaluate as module
from logitmix.trainer.config import Config, EvaluateConfig
from logitmix.trainer.data.batches import RankingUsers, ranking_users
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.evaluate import (
    NOT_SERVED,
    Evaluation,
    evaluate,
    excludes_history,
    rank_targets,
    score_corpus,
    summarize,
)

ITEMS = 60
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with process_group("cpu", 60) as alone:
        yield alone


def plain_rank(scores: list[float], target: int, history: list[int]) -> int:
    """One more than the items that are neither in the history nor surely below the target, which must not be there."""
    if target in history:
        return NOT_SERVED
    others = [score for item, score in enumerate(scores) if item != target and item not in history]
    return 1 + sum(not score < scores[target] for score in others)


def ranked(scores: list[list[float]], targets: list[int], histories: list[list[int]]) -> list[int]:
    flat = torch.tensor([item for history in histories for item in history], dtype=torch.int64)
    lengths = torch.tensor([len(history) for history in histories])
    return rank_targets(torch.tensor(scores), torch.tensor(targets), flat, lengths).tolist()


VALUES = st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0, INF, NAN])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), items=st.integers(1, 8), users=st.integers(1, 4))
def test_ranks_are_those_counted_by_hand_with_ties_infinities_and_nan(
    data: st.DataObject, items: int, users: int
) -> None:
    index = st.integers(0, items - 1)
    scores = [data.draw(st.lists(VALUES, min_size=items, max_size=items)) for _ in range(users)]
    targets = [data.draw(index) for _ in range(users)]
    histories = [data.draw(st.lists(index, max_size=5)) for _ in range(users)]
    expected = [plain_rank(*user) for user in zip(scores, targets, histories, strict=True)]
    assert ranked(scores, targets, histories) == expected


def test_a_rank_counts_what_stands_above() -> None:
    scores = [[0.1, 0.9, 0.5, 0.7]] * 4
    assert ranked(scores, [1, 3, 2, 0], [[], [], [], []]) == [1, 2, 3, 4]
    # Items of the history do not count, not even twice, and those of other users do.
    assert ranked(scores, [2, 2, 0, 0], [[1], [1, 1, 3], [2], [1, 2]]) == [2, 1, 3, 2]


def test_a_target_that_is_excluded_is_not_served() -> None:
    scores = [[0.1, 0.9, 0.5]] * 3
    assert ranked(scores, [2, 1, 2], [[2], [0, 1, 1], [1]]) == [NOT_SERVED, NOT_SERVED, 1]
    metrics = summarize(np.array([NOT_SERVED, 1]), 3)
    assert {metrics[name] for name in ("hr@1", "hr@500", "ndcg@10", "mrr")} == {0.5}


def test_a_model_that_knows_nothing_or_breaks_gets_the_last_place() -> None:
    history = [1, 2, 2, 9]
    for scores in ([0.0] * 20, [NAN] * 20, [-INF] * 20, [INF] * 20, [1.0] * 5 + [NAN] + [0.0] * 14):
        assert ranked([scores], [5], [history]) == [20 - 3]
        assert ranked([scores], [5], [[]]) == [20]
    # What is not a number stands above the target, too.
    assert ranked([[NAN, 1.0, 0.0, NAN]], [1], [[]]) == [3]


def test_summarize_is_the_formulas() -> None:
    rank_of = [1, 2, 10, 11, 50, 51, 500, 501]
    metrics = summarize(np.array(rank_of, np.int64), 700)
    for k, hits in {1: 1, 10: 3, 50: 5, 100: 6, 200: 6, 500: 7}.items():
        assert metrics[f"hr@{k}"] == hits / 8
    assert metrics["mrr"] == pytest.approx(sum(1 / rank for rank in rank_of) / 8, rel=1e-15)
    # One relevant item: the ideal gain is 1, and the second place counts 1 / log2(3).
    expected = (1 + 1 / math.log2(3) + 1 / math.log2(11)) / 8
    assert metrics["ndcg@10"] == pytest.approx(expected, rel=1e-15)
    assert (metrics["users"], metrics["corpus"]) == (8, 700)
    assert set(metrics) == {*(f"hr@{k}" for k in (1, 10, 50, 100, 200, 500)), "ndcg@10", "mrr", "users", "corpus"}


def tower_of(kind: str) -> Tower:
    mol = MoLConfig(query_components=2, item_components=3, component_dim=4, gate_hidden=5, projection_hidden=6)
    config = ModelConfig(
        dim=8,
        encoder=EncoderConfig(blocks=1, max_length=6, dropout=0.5),
        similarity=mol if kind == "mol" else DotConfig(),
    )
    tower = Tower(config)
    tower.reset_parameters(torch.Generator().manual_seed(0))
    return tower


def item_table() -> Tensor:
    return torch.randn(ITEMS, 8, generator=torch.Generator().manual_seed(1))


L = 6
"""Of longer histories the last L are encoded."""


def dataset_of(sequences: list[list[int]]) -> Dataset:
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in sequences])])
    return in_memory(offsets, np.concatenate(sequences), ITEMS)


def users_of(lengths: tuple[int, ...] = (4, 9, 2, 3, 25, 5, 12)) -> RankingUsers:
    random = np.random.default_rng(2)
    return ranking_users(dataset_of([random.integers(0, ITEMS, length).tolist() for length in lengths]), "test", L)


def histories_of(users: RankingUsers) -> list[list[int]]:
    return [part.tolist() for part in np.split(users.seen, np.cumsum(users.seen_lengths)[:-1])]


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("kind", ["dot", "mol"])
def test_evaluate_equals_scoring_every_item_for_every_user(kind: str, exclude: bool, ranks: Ranks) -> None:
    tower, item_XD, users = tower_of(kind), item_table(), users_of()
    told: list[int] = []
    metrics = evaluate(tower, item_XD, users, 4, exclude, ranks, told.append)
    rank_of = []
    with torch.no_grad():
        for history, target in zip(histories_of(users), users.target.tolist(), strict=True):
            encoded = history[-L:]
            query_1D = tower.queries(item_XD[encoded], Packing(torch.tensor([len(encoded)])))
            query = tower.similarity.query(query_1D, torch.arange(1))
            scores = [
                float(tower.similarity.pairs(query, tower.similarity.item(row[None], torch.arange(1))))
                for row in item_XD
            ]
            rank_of.append(plain_rank(scores, target, history if exclude else []))
    repeated = np.mean([target in seen for seen, target in zip(histories_of(users), users.target, strict=True)])
    assert metrics == summarize(np.array(rank_of), ITEMS) | {"repeated_targets": repeated}
    assert 0 < repeated < 1 and (NOT_SERVED in rank_of) == exclude
    assert told == [4, 2] and (metrics["users"], metrics["corpus"]) == (6, ITEMS)
    assert len(set(rank_of)) > 3 and tower.training


@pytest.mark.parametrize("kind", ["dot", "mol"])
def test_neither_users_at_once_nor_chunks_of_items_change_a_figure(
    kind: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, item_XD, users = tower_of(kind), item_table(), users_of()
    whole = evaluate(tower, item_XD, users, 64, True, ranks)
    for pairs in (1, 7, 64, 2**20):
        monkeypatch.setattr(module, "PAIRS", pairs)
        for batch_size in (1, 3):
            assert evaluate(tower, item_XD, users, batch_size, True, ranks) == whole


@pytest.mark.parametrize("pairs", [1, 10, 61, 2**14])
def test_scores_of_chunks_are_those_of_the_whole(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAIRS", pairs)
    similarity = tower_of("mol").similarity
    with torch.no_grad():
        query = similarity.query(item_table()[:5], torch.arange(5))
        item = similarity.item(item_table(), torch.arange(ITEMS))
        scores = score_corpus(similarity, query, item)
        assert scores.shape == (5, ITEMS) and scores.dtype == torch.float32
        # Scores up to 20 in FP32, multiplied in another order.
        torch.testing.assert_close(scores, similarity.all_pairs(query, item), rtol=0, atol=20 * 16 * 2**-24)


def evaluate_three_batches() -> tuple[dict[str, float], int]:
    """The figures, and how many batches of users this rank encoded."""
    tower, users, encoded = tower_of("dot"), users_of((4, 9, 3, 3, 8)), []
    tower.query_tower.register_forward_hook(lambda *_: encoded.append(1))
    with process_group("cpu", 60) as ranks:
        metrics = evaluate(tower, item_table(), users, 2, True, ranks)
    return metrics, len(encoded)


def test_two_ranks_share_the_users_and_both_know_the_figures_of_all() -> None:
    alone, encoded = evaluate_three_batches()
    assert encoded == 3
    assert two_ranks.run(evaluate_three_batches) == [(alone, 2), (alone, 1)]


def test_a_constant_model_gets_the_last_place(ranks: Ranks) -> None:
    """All items alike: a ranking that breaks ties for the model would show a perfect one."""
    tower, users = tower_of("dot"), users_of()
    constant = item_table()[:1].expand(ITEMS, 8).contiguous()
    metrics = evaluate(tower, constant, users, 64, True, ranks)
    expected = [
        NOT_SERVED if target in history else ITEMS - len(set(history))
        for history, target in zip(histories_of(users), users.target.tolist(), strict=True)
    ]
    assert metrics == summarize(np.array(expected), ITEMS) | {"repeated_targets": 1 / 6}
    assert metrics["hr@10"] == metrics["ndcg@10"] == 0.0


def test_a_broken_model_is_no_better_either(ranks: Ranks) -> None:
    metrics = evaluate(tower_of("dot"), torch.full((ITEMS, 8), NAN), users_of(), 64, False, ranks)
    assert metrics["mrr"] == pytest.approx(1 / ITEMS, rel=1e-12) and metrics["hr@50"] == 0.0


def test_a_model_that_knows_the_targets_is_perfect(ranks: Ranks) -> None:
    """The encoder's query moved onto the target's row."""
    users = users_of((3,))
    tower, item_XD = tower_of("dot"), item_table()
    with torch.no_grad():
        query_1D = tower.queries(item_XD[users.history], Packing(torch.from_numpy(users.lengths)))
    item_XD[users.target[0]] = query_1D[0]
    if users.target[0] in users.history:
        pytest.fail("the dataset of this test must not repeat an item")
    metrics = evaluate(tower, item_XD, users, 64, True, ranks)
    assert metrics["hr@1"] == metrics["ndcg@10"] == metrics["mrr"] == 1.0


WALKS = [[item, item, 1, item, item] for item in range(2, 22)]
"""Everybody comes back to what they had before."""


def sharp_tower() -> Tower:
    """One that finds the last item of a history again."""
    tower = tower_of("dot")
    tower.queries = lambda item_TD, packing: item_TD[packing.last_B]  # type: ignore[method-assign]
    return tower


def test_repeats_are_common_or_not() -> None:
    repeats, some = dataset_of(WALKS), dataset_of([[1, 2, 3, 4, 5]] * 9 + [[1, 2, 3, 1, 5]])
    assert (excludes_history("auto", repeats), excludes_history("auto", some)) == (False, False)
    rare = dataset_of([[1, 2, 3, 4, 5]] * 10 + [[1, 2, 3, 1, 5]])
    assert excludes_history("auto", rare)
    # What the test items are does not decide.
    assert excludes_history("auto", dataset_of([[1, 2, 3, 4, 1]] * 10))
    for dataset in (repeats, some, rare):
        assert (excludes_history("yes", dataset), excludes_history("no", dataset)) == (True, False)


@pytest.mark.parametrize(("rule", "hits"), [("auto", 1.0), ("no", 1.0), ("yes", 0.0)])
def test_pure_repeats_are_found_where_the_history_is_kept(
    rule: Literal["auto", "yes", "no"], hits: float, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(evaluate=EvaluateConfig(exclude_history=rule))
    metrics = Evaluation(config, dataset_of(WALKS), ranks)("test", sharp_tower(), item_table())
    assert metrics["hr@1"] == metrics["mrr"] == hits and metrics["repeated_targets"] == 1.0
    said = "100% of the validation targets are in their user's history: it is not left out of the ranking"
    assert capsys.readouterr().err.count(said) == (rule == "auto")


def test_a_sample_of_users_is_fixed_by_the_seed(ranks: Ranks) -> None:
    dataset = dataset_of([[1, 2, 3, 4, user] for user in range(30)])
    users = ranking_users(dataset, "test", L)
    assert users.sample(0, 1) is users and users.sample(30, 1) is users
    chosen = [users.sample(10, seed).target.tolist() for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2] and chosen[0] == sorted(set(chosen[0])) and len(chosen[0]) == 10
    sampled = Evaluation(Config(evaluate=EvaluateConfig(users=10)), dataset, ranks)(
        "test", tower_of("dot"), item_table()
    )
    assert sampled["users"] == 10
