"""Every kind of similarity, trained, evaluated, exported and served."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import small_config, write_dataset

from logitmix.modules.config import SIMILARITIES
from logitmix.serving.retriever import Retriever
from logitmix.trainer.data.batches import ranking_users
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.metrics import HIT_RATES

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"model.similarity.hidden": 64},
    "neumf": {"model.similarity.hidden": 64, "model.similarity.final_hidden": 64},
    "deepfm": {"model.similarity.projection_hidden": 64, "model.similarity.hidden": 64},
}
"""Settings of the kinds that are large by default."""


@pytest.mark.parametrize("epochs", [2, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SIMILARITIES)
def test_is_trained_evaluated_exported_and_served(kind: str, epochs: int, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", users=120, items=30, ring=True)
    settings = {"model.similarity.kind": kind, "model.dim": 16, "dense.lr": 1e-2, "tables.lr": 1e-2}
    schedule = {"train.epochs": epochs, "evaluate.every_epochs": epochs, "evaluate.exclude_history": "no"}
    schedule |= {"train.precision": "fp32"}
    run = tmp_path / "run"
    results = train(small_config(data, settings | schedule | SMALL.get(kind, {})), run)
    # The next item follows from the last one; a random order would hit 1 time in 30.
    assert epochs == 2 or results["hr@1"] > 0.5

    again = evaluate_run(run, "test", "cpu", 1)
    assert {name: results[name] for name in again} == again

    export(run, tmp_path / "served")
    users = ranking_users(load_dataset(data), "test", 12)
    histories = [part.tolist() for part in np.split(users.seen, np.cumsum(users.seen_lengths)[:-1])]
    retriever = Retriever.load(tmp_path / "served")
    found = retriever.retrieve(histories, 30).items.numpy()
    for k in HIT_RATES:
        assert (found[:, :k] == users.target[:, None]).any(1).mean() == pytest.approx(results[f"hr@{k}"], abs=1e-12)
    # Who has the target as the best of all items, and among the h-indexer's, has it as the best of these.
    by_way_of_stage_1 = retriever.retrieve(histories, 1, stage1=10).items.numpy()
    least = results["hr@1"] + results["hindexer/hr@10"] - 1 - 0.05
    assert (by_way_of_stage_1 == users.target[:, None]).mean() > least
    assert epochs == 2 or least > 0.1
