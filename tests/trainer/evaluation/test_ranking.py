"""The sharded ranking against counting by hand, one user after the other."""

from itertools import product
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import two_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import one_of_each
from torch import Tensor, nn

from logitmix.comm.process_group import Ranks, process_group
from logitmix.modules.batch import Packing
from logitmix.modules.config import DotConfig, HIndexerConfig, ModelConfig, MoLConfig, SASRecConfig
from logitmix.modules.features import Embedded
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.towers import Tower
from logitmix.trainer.data.batches import RankingUsers
from logitmix.trainer.evaluation import ranking as module
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.evaluation.ranking import TOP, Rankings, rank_corpus
from logitmix.trainer.metrics import NOT_SERVED
from logitmix.trainer.parallel.sharded_rows import ShardedRows, own_range

ITEMS, DIM, L = 150, 8, 6
NAN, INF = float("nan"), float("inf")


def users_of(histories: list[list[int]], targets: list[int]) -> RankingUsers:
    items = [item for history, target in zip(histories, targets, strict=True) for item in (*history, target)]
    ends = np.cumsum([len(history) + 1 for history in histories])
    first = ends - [len(history) + 1 for history in histories]
    return RankingUsers(np.array(items, np.int32), np.arange(len(items)), np.arange(len(first)), first, ends - 1, L)


def sharded(item_XD: Tensor, ranks: Ranks) -> ShardedRows:
    start, stop = own_range(len(item_XD), ranks.rank, ranks.world_size)
    return ShardedRows.of_ranges(len(item_XD), item_XD[start:stop], ranks)


def plain_rank(scores: list[float], target: int, history: list[int]) -> int:
    """One more than the items that are neither in the history nor surely below the target, which must not be there."""
    if target in history:
        return NOT_SERVED
    others = [score for item, score in enumerate(scores) if item != target and item not in history]
    return 1 + sum(not score < scores[target] for score in others)


class GivenScores(nn.Module):
    """User u's score of an item is entry `first` + u of the item's row."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def query_side(self, query: Embedded, row_B: Tensor) -> tuple[Tensor]:
        return (query.vector_RD,)

    def item_side(self, item: Embedded, row_N: Tensor) -> tuple[Tensor]:
        return (item.vector_RD,)

    def all_pairs(self, query: tuple[Tensor], item: tuple[Tensor]) -> Tensor:
        return item[0][:, self.first + query[0][:, 0].long()].t()


def rank_scores(
    stages: list[list[list[float]]], targets: list[int], histories: list[list[int]], ranks: Ranks
) -> Rankings:
    """Of scores [stage, user, item]."""
    item_XD = torch.tensor(stages).flatten(0, 1).t().contiguous()
    users, D = len(targets), item_XD.shape[1]
    tower = SimpleNamespace(
        eval=lambda: None,
        similarity=GivenScores(0),
        hindexer=GivenScores(users) if len(stages) > 1 else None,
        schema=Schema.of_ids(len(item_XD)),
        item_tower=lambda rows, features: Embedded(rows[ITEM]),
        queries=lambda row_TD, packing, *_: Embedded(
            torch.arange(len(packing.lengths_B))[:, None].float().expand(-1, D)
        ),
        config=SimpleNamespace(dim=D, encoder=SASRecConfig()),
    )
    rows, ranking_users = sharded(item_XD, ranks), users_of(histories, targets)
    return rank_corpus(Embedder(cast(Tower, tower), {ITEM: rows}), len(item_XD), ranking_users, users, True)


VALUES = st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0, INF, NAN])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), items=st.integers(1, 8), users=st.integers(1, 4))
def test_ranks_are_those_counted_by_hand_with_ties_infinities_and_nan(
    ranks: Ranks, data: st.DataObject, items: int, users: int
) -> None:
    index = st.integers(0, items - 1)
    stages = [[data.draw(st.lists(VALUES, min_size=items, max_size=items)) for _ in range(users)] for _ in range(2)]
    targets = [data.draw(index) for _ in range(users)]
    histories = [data.draw(st.lists(index, max_size=5)) for _ in range(users)]
    found = rank_scores(stages, targets, histories, ranks)
    expected = [[plain_rank(*user) for user in zip(scores, targets, histories, strict=True)] for scores in stages]
    assert found.hindexer_U is not None
    assert [found.similarity_U.tolist(), found.hindexer_U.tolist()] == expected


def tower_of(kind: str, hindexer: bool = True) -> Tower:
    mol = MoLConfig(query_components=2, item_components=3, component_dim=4, gate_hidden=5, projection_hidden=6)
    config = ModelConfig(
        dim=DIM,
        encoder=SASRecConfig(blocks=1, max_length=L, dropout=0.5),
        similarity=mol if kind == "mol" else DotConfig(),
        hindexer=HIndexerConfig(dim=4, weight=1.0 if hindexer else 0.0),
    )
    tower = Tower(config, Schema.of_ids(ITEMS))
    tower.reset_parameters(torch.Generator().manual_seed(0))
    return tower


def item_table(items: int = ITEMS) -> Tensor:
    return torch.randn(items, DIM, generator=torch.Generator().manual_seed(1))


def random_users(lengths: tuple[int, ...] = (3, 8, 1, 24, 4, 11, 2), items: int = ITEMS) -> RankingUsers:
    random = np.random.default_rng(2)
    histories = [random.integers(0, items, length).tolist() for length in lengths]
    targets = random.integers(0, items, len(lengths)).tolist()
    # Two of the targets are repeats.
    return users_of(histories, [histories[0][0], histories[1][0], *targets[2:]])


def histories_of(users: RankingUsers) -> list[list[int]]:
    return [part.tolist() for part in np.split(users.seen, np.cumsum(users.seen_lengths)[:-1])]


@torch.no_grad()
def scores_of(tower: Tower, item_XD: Tensor, history: list[int]) -> dict[str, Tensor]:
    """One user's scores of all items, one pair after the other, for each stage."""
    encoded = history[-L:]
    query_1D = tower.queries(item_XD[encoded], Packing(torch.tensor([len(encoded)]))).vector_RD
    scores = {}
    for name in ("similarity", "hindexer"):
        if (stage := getattr(tower, name)) is not None:
            query = stage.query(query_1D, torch.arange(1))
            pairs = [stage.pairs(query, stage.item(row[None], torch.arange(1))) for row in item_XD]
            scores[name] = torch.cat(pairs)
    return scores


@pytest.mark.parametrize(
    ("kind", "hindexer", "exclude"),
    one_of_each(product(["dot", "mol"], [True, False], [True, False]), *map(itemgetter, range(3))),
)
def test_a_ranking_is_that_of_scoring_every_item_for_every_user(
    kind: str, hindexer: bool, exclude: bool, ranks: Ranks
) -> None:
    tower, item_XD, users = tower_of(kind, hindexer), item_table(), random_users()
    told: list[int] = []
    found = rank_corpus(Embedder(tower, {ITEM: sharded(item_XD, ranks)}), ITEMS, users, 4, exclude, told.append, 7)
    assert sum(told) == len(users) and not tower.training
    expected: dict[str, list[Any]] = {"similarity": [], "hindexer": [], "stage1": [], "best": []}
    for history, target in zip(histories_of(users), users.target.tolist(), strict=True):
        scores, excluded = scores_of(tower, item_XD, history), history if exclude else []
        for name, score_X in scores.items():
            expected[name].append(plain_rank(score_X.tolist(), target, excluded))
        left = sorted(set(range(ITEMS)) - set(excluded))
        best = [sorted(left, key=lambda item: -score_X[item]) for score_X in scores.values()]
        expected["stage1"].append([best[-1].index(item) + 1 for item in best[0][:TOP]])
        expected["best"].append(best[0][:7])
    assert found.similarity_U.tolist() == expected["similarity"]
    assert found.best_UK is not None and found.best_UK.tolist() == expected["best"]
    assert len(set(expected["similarity"])) > 3 and (NOT_SERVED in expected["similarity"]) == exclude
    if hindexer:
        assert found.hindexer_U is not None and found.stage1_UK is not None
        assert found.hindexer_U.tolist() == expected["hindexer"] != expected["similarity"]
        assert found.stage1_UK.tolist() == expected["stage1"]
    else:
        assert found.hindexer_U is found.stage1_UK is None


def test_what_is_not_left_has_no_rank_in_stage_1(ranks: Ranks) -> None:
    tower, item_XD = tower_of("mol"), item_table()
    found = rank_corpus(
        Embedder(tower, {ITEM: sharded(item_XD, ranks)}),
        ITEMS,
        users_of([list(range(ITEMS - 3))], [ITEMS - 1]),
        4,
        True,
    )
    assert found.stage1_UK is not None
    assert sorted(found.stage1_UK[0].tolist()) == [1, 2, 3] + [NOT_SERVED] * (TOP - 3)


CHUNKS = {"CHUNK_ITEMS": (16, 64), "CHUNKS": 8, "PAIRS": {"cpu": 2**6}, "ROUND": 4}
"""Small ones: 10 chunks of a corpus of 150 items."""


@pytest.mark.parametrize(
    ("kind", "changes"),
    one_of_each(
        product(["dot", "mol"], [{"PAIRS": {"cpu": 1}}, {"CHUNKS": 1}, {"ROUND": 1}, CHUNKS]),
        itemgetter(0),
        lambda case: str(case[1]),
    ),
    ids=str,
)
def test_neither_users_at_once_nor_chunks_of_items_change_a_rank(
    kind: str, changes: dict[str, Any], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, rows, users = tower_of(kind), sharded(item_table(), ranks), random_users()
    whole = rank_corpus(Embedder(tower, {ITEM: rows}), ITEMS, users, 64, True)
    for name, value in (CHUNKS | changes).items():
        monkeypatch.setattr(module, name, value)
    for batch_size in (1, 3, 16):
        assert_same(rank_corpus(Embedder(tower, {ITEM: rows}), ITEMS, users, batch_size, True), whole)


def assert_same(found: Rankings, expected: Rankings) -> None:
    for name in ("similarity_U", "hindexer_U", "stage1_UK"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("dot", marks=pytest.mark.slow), "mol"])
def test_equal_items_have_equal_scores_wherever_they_stand(
    kind: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the corpus are copies of the target: they all tie with it, to the last bit, so it stands below them."""
    items = 1001
    for name, value in (CHUNKS | {"CHUNK_ITEMS": (64, 64), "PAIRS": {"cpu": 2**7}}).items():
        monkeypatch.setattr(module, name, value)
    tower, item_XD = tower_of(kind), item_table(items)
    item_XD[::2] = item_XD[0]
    users = users_of([[1, 3, 5], [7, 9], [11]], [0, 500, 1000])
    found = rank_corpus(Embedder(tower, {ITEM: sharded(item_XD, ranks)}), items, users, 2, True)
    for user, history in enumerate(histories_of(users)):
        score_X = scores_of(tower, item_XD, history)["similarity"]
        better = [item for item in range(1, items, 2) if score_X[item] > score_X[0] and item not in history]
        assert int(found.similarity_U[user]) == 501 + len(better)


def rank_in_small_chunks() -> tuple[list[Rankings], int, int]:
    """Rankings, how many batches of users this rank encoded, and the most rows that it fetched at once."""
    for name, value in CHUNKS.items():
        setattr(module, name, value)
    encoded: list[int] = []
    fetched: list[int] = []
    found = []
    with process_group("cpu", 60) as ranks:
        for kind in ("dot", "mol"):
            tower, rows = tower_of(kind), sharded(item_table(), ranks)
            tower.query_tower.register_forward_hook(lambda *call: encoded.extend([1] * (len(call[-1].vector_RD) > 0)))
            fetch = rows.fetch
            rows.fetch = lambda ids, fetch=fetch: fetched.append(len(ids)) or fetch(ids)  # type: ignore[method-assign]
            found.append(rank_corpus(Embedder(tower, {ITEM: rows}), ITEMS, random_users(), 2, True))
    return found, len(encoded), max(fetched)


def test_ranks_share_the_users_and_the_items_and_all_know_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHUNKS:
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    alone, encoded, most = rank_in_small_chunks()
    assert encoded == 8 and most < 40 < ITEMS
    for world_size, shares in ((2, [4, 4]), (3, [4, 4, 0])):
        on_ranks = two_ranks.run(rank_in_small_chunks, world_size=world_size)
        assert [encoded for _, encoded, _ in on_ranks] == shares
        for found, _, most in on_ranks:
            assert most < 40
            for ranking, expected in zip(found, alone, strict=True):
                assert_same(ranking, expected)
