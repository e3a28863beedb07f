"""Leave-one-out ranking against sorting and counting one user after the other."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from rich.console import Console
from small_data import in_memory, small_config, write_late_items
from torch import Tensor

from logitmix.comm.process_group import Ranks
from logitmix.modules.config import ModelConfig, SASRecConfig
from logitmix.modules.features import Embedded
from logitmix.modules.schema import ITEM, Feature, Schema
from logitmix.modules.towers import Tower
from logitmix.trainer import cli
from logitmix.trainer.commands.report_page import write_report
from logitmix.trainer.config import Config, DataConfig, EvaluateConfig
from logitmix.trainer.data.batches import ranking_users, split_by_time
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.evaluation.evaluate import Evaluation, excludes_history, how_popular, metrics_of
from logitmix.trainer.evaluation.ranking import Rankings
from logitmix.trainer.loop import train
from logitmix.trainer.metrics import NOT_SERVED
from logitmix.trainer.parallel.sharded_rows import ShardedRows
from logitmix.trainer.run.results import read_ranks, read_test_users

ITEMS = 60


def test_metrics_are_the_formulas() -> None:
    rank_U = torch.tensor([1, 2, 10, 11, 50, 51, 500, NOT_SERVED])
    metrics = metrics_of(Rankings(rank_U), 700)
    for k, hits in {1: 1, 10: 3, 50: 5, 100: 6, 200: 6, 500: 7}.items():
        assert metrics[f"hr@{k}"] == hits / 8
    assert metrics["mrr"] == pytest.approx(sum(1 / rank for rank in rank_U.tolist()[:-1]) / 8, rel=1e-15)
    # One relevant item: the ideal gain is 1, and the second place counts 1 / log2(3).
    expected = (1 + 1 / math.log2(3) + 1 / math.log2(11)) / 8
    assert metrics["ndcg@10"] == pytest.approx(expected, rel=1e-15)
    assert set(metrics) == {*(f"hr@{k}" for k in (1, 10, 50, 100, 200, 500)), "ndcg@10", "mrr"}


def test_the_h_indexer_is_measured_by_itself_and_by_what_it_leaves_of_the_best() -> None:
    stage1_UK = torch.arange(1, 101).repeat(2, 1)
    stage1_UK[0, 8:] += 95
    stage1_UK[1, 50:] = NOT_SERVED
    metrics = metrics_of(Rankings(torch.tensor([1, 2]), torch.tensor([20, 5]), stage1_UK), 1000)
    assert (metrics["hr@10"], metrics["hindexer/hr@10"], metrics["hindexer/hr@50"]) == (1.0, 0.5, 1.0)
    assert metrics["hindexer/mrr"] == (1 / 20 + 1 / 5) / 2
    # Of 10 and 10, two are beyond 100; of 100 and 50, those that came after them too.
    recalls = {name: value for name, value in metrics.items() if "recall" in name}
    assert recalls == {
        "hindexer/recall_of_top10@100": 18 / 20,
        "hindexer/recall_of_top10@500": 1.0,
        "hindexer/recall_of_top100@100": 58 / 150,
        "hindexer/recall_of_top100@500": 1.0,
    }


def small_tower() -> Tower:
    tower = Tower(ModelConfig(dim=8, encoder=SASRecConfig(blocks=1, max_length=6, dropout=0.5)), Schema.of_ids(ITEMS))
    tower.reset_parameters(torch.Generator().manual_seed(0))
    return tower


def item_table() -> Tensor:
    return torch.randn(ITEMS, 8, generator=torch.Generator().manual_seed(1))


def whole(item_XD: Tensor, ranks: Ranks) -> dict[str, ShardedRows]:
    return {ITEM: ShardedRows.of_ranges(ITEMS, item_XD, ranks)}


L = 6
"""Of longer histories the last L are encoded."""


def dataset_of(sequences: list[list[int]]) -> Dataset:
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in sequences])])
    return in_memory(offsets, np.concatenate(sequences), ITEMS)


def test_popularity_of_the_best_items_and_of_the_targets() -> None:
    """Of 200 items the most popular 1 % are 7 and 9, and the most popular 10 % are these and 18 others."""
    count_X = np.zeros(200, np.int64)
    count_X[[9, 7]], count_X[20:40] = [50, 40], 5
    best_UK = np.array([[7, 9, 20, 37, 38], [7, 150, -1, -1, -1]])
    found = how_popular(best_UK, np.array([9, 38, 150, 37]), count_X)
    assert found == {
        "recommended/coverage@10": 6 / 200,
        "recommended/top_1_percent": 3 / 7,
        "recommended/top_10_percent": 5 / 7,
        "targets/top_1_percent": 1 / 4,
        "targets/top_10_percent": 2 / 4,
    }


def test_nothing_is_said_of_recommendations_where_there_are_none(ranks: Ranks) -> None:
    """Every history has the whole corpus: the shares would be of no items, and NaN is no JSON."""
    dataset = dataset_of([[*range(ITEMS), *range(5)]] * 3)
    model = ModelConfig(encoder=SASRecConfig(max_length=L))
    config = Config(model=model, evaluate=EvaluateConfig(exclude_history="yes"))
    metrics = Evaluation(config.evaluate, config.data, config.model, dataset, ranks)(
        "test", small_tower(), whole(item_table(), ranks)
    )
    assert metrics["hr@500"] == metrics["targets/cold"] == 0.0
    assert (metrics["users"], metrics["corpus"], metrics["repeated_targets"]) == (3, ITEMS, 1.0)
    assert not [name for name in metrics if name.startswith(("recommended/", "targets/top"))]


@pytest.mark.parametrize(("held_out", "cold"), [(0.1, 0.5), (0.2, 0.0)])
def test_targets_that_training_never_saw_are_counted_and_said(
    tmp_path: Path, held_out: float, cold: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the last two actions of all in the test part, the one before the last is the target."""
    settings = {"data.split": "time", "data.held_out": held_out, "train.epochs": 1, "evaluate.users": 30}
    config, run = small_config(write_late_items(tmp_path / "data"), settings), tmp_path / "run"
    results = train(config, run)
    trained = capsys.readouterr().err
    cli.main(["evaluate", str(run)])
    evaluated = capsys.readouterr().err
    write_report([run], tmp_path / "report.html")
    users = [int(user.removeprefix("u-")) for user in read_test_users(run)]
    assert len(users) == len(read_ranks(run)) == 30 == len(set(users)) and users == sorted(users)
    assert results["targets/cold"] == (np.mean([user % 2 == 0 for user in users]) if cold else 0)
    said = "of the targets are items that training has no action of (targets/cold): without features of items"
    before, _, after = trained.partition("epoch 1, step")
    assert (f"test part: {results['targets/cold']:.0%} {said}" in before) == (cold > 0)
    assert (f"test: {results['targets/cold']:.0%} {said}" in after) == (cold > 0)
    for text in (evaluated, (tmp_path / "report.html").read_text()):
        assert (said in text) == (cold > 0)
    # A rank belongs to the user at its place.
    dataset = load_dataset(tmp_path / "data")
    ranked = ranking_users(dataset, "test", 12, split_by_time(dataset, held_out)).sample(30, 0)
    assert ranked.user.tolist() == users


WALKS = [[item, item, 1, item, item] for item in range(2, 22)]
"""Everybody comes back to what they had before."""
DATA = DataConfig()


def sharp_tower() -> Tower:
    """One that finds the last item of a history again."""
    tower = small_tower()
    tower.queries = lambda item_TD, packing, *_: Embedded(item_TD[packing.last_B])  # type: ignore[method-assign]
    return tower


@pytest.mark.parametrize("repeated", [True, False])
def test_a_split_by_time_counts_repeats_of_its_own(repeated: bool) -> None:
    """Its validation target is everyone's fourth action; what prepare counted says the contrary."""
    dataset = dataset_of([[1, 2, 3, 1 if repeated else 4, 5]] * 4)
    dataset = replace(
        dataset, timestamps_flat=np.tile(np.arange(5), 4), repeated_targets={"validation": 0.0 if repeated else 1.0}
    )
    assert excludes_history("auto", DATA, dataset) is repeated
    assert excludes_history("auto", DataConfig(split="time", held_out=0.2), dataset) is not repeated


def test_repeats_are_those_of_the_targets() -> None:
    """The last action is new to each user, and the last one that may be a target is not."""
    dataset = dataset_of([[1, 2, 3, 1, 5]] * 4)
    rated = replace(dataset.schema, features=(*dataset.schema.features, Feature("rating", "event", "number")))
    ratings = np.tile(np.array([0, 0, 1, 1, 0], np.float32), 4)
    dataset = replace(dataset, schema=rated, event_features={"rating": Column(ratings)})
    dataset = replace(dataset, repeated_targets={"validation": 0.0, "test": 0.0})
    assert excludes_history("auto", DATA, dataset)
    assert not excludes_history("auto", DataConfig(targets=("rating = 1",)), dataset)


def test_repeats_are_common_or_not() -> None:
    repeats, some = dataset_of(WALKS), dataset_of([[1, 2, 3, 4, 5]] * 9 + [[1, 2, 3, 1, 5]])
    assert (excludes_history("auto", DATA, repeats), excludes_history("auto", DATA, some)) == (False, False)
    rare = dataset_of([[1, 2, 3, 4, 5]] * 10 + [[1, 2, 3, 1, 5]])
    assert excludes_history("auto", DATA, rare)
    # Test targets that cannot be found would make all methods alike.
    assert not excludes_history("auto", DATA, dataset_of([[1, 2, 3, 4, 1]] * 10))
    for dataset in (repeats, some, rare):
        assert (excludes_history("yes", DATA, dataset), excludes_history("no", DATA, dataset)) == (True, False)


def test_hits_that_cannot_be_are_said() -> None:
    shown = Console(file=io.StringIO(), width=500)
    dataset = dataset_of([[1, 2, 3, 4, 5]] * 18 + [[1, 2, 3, 4, 1]])
    assert excludes_history("auto", DATA, dataset, shown) and not excludes_history("no", DATA, dataset, shown)
    (said,) = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "no hit rate can be above 1.00 in validation and 0.95 in test" in said


@pytest.mark.parametrize(("rule", "hits"), [("auto", 1.0), ("no", 1.0), ("yes", 0.0)])
def test_pure_repeats_are_found_where_the_history_is_kept(
    rule: Literal["auto", "yes", "no"], hits: float, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(evaluate=EvaluateConfig(exclude_history=rule))
    metrics = Evaluation(config.evaluate, config.data, config.model, dataset_of(WALKS), ranks)(
        "test", sharp_tower(), whole(item_table(), ranks)
    )
    assert metrics["hr@1"] == metrics["mrr"] == hits and metrics["repeated_targets"] == 1.0
    said = "100% of the test targets are in their user's history: it is not left out of the ranking"
    assert capsys.readouterr().err.count(said) == (rule == "auto")


def test_a_sample_of_users_is_fixed_by_the_seed() -> None:
    users = ranking_users(dataset_of([[1, 2, 3, 4, user] for user in range(30)]), "test", L)
    assert users.sample(0, 1) is users and users.sample(30, 1) is users
    chosen = [users.sample(10, seed).target.tolist() for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2] and chosen[0] == sorted(set(chosen[0])) and len(chosen[0]) == 10
