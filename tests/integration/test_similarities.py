"""Every kind of similarity, trained, evaluated, exported and served."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import small_config, write_dataset

from logitmix.modules.config import SIMILARITIES
from logitmix.serving.retriever import Retriever
from logitmix.trainer.data.batches import ranking_users
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.evaluation.evaluate import HIT_RATES, evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"model.similarity.hidden": 64},
    "neumf": {"model.similarity.hidden": 64, "model.similarity.final_hidden": 64},
    "deepfm": {"model.similarity.projection_hidden": 64, "model.similarity.hidden": 64},
}
"""Settings of the kinds that are large by default."""


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_is_trained_evaluated_exported_and_served(kind: str, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", users=120, items=30, ring=True)
    settings = {"model.similarity.kind": kind, "model.dim": 16, "dense.lr": 1e-2, "tables.lr": 1e-2}
    schedule = {"train.epochs": 25, "evaluate.every_epochs": 25, "evaluate.exclude_history": "no"}
    schedule |= {"train.precision": "fp32"}
    run = tmp_path / "run"
    results = train(small_config(data, settings | schedule | SMALL.get(kind, {})), run)
    # The next item follows from the last one; a random order would hit 1 time in 30.
    assert results["hr@1"] > 0.5

    again = evaluate_run(run, "test", None, None, "cpu", 1)
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
    least = results["hr@1"] + results["hindexer/hr@10"] - 1
    assert (by_way_of_stage_1 == users.target[:, None]).mean() > least - 0.05 > 0.1


GUIDE = Path(__file__).parents[2] / "docs/extending.md"
COMMANDS = """
import json, sys
from logitmix.trainer.cli import main

data, run, served, items = sys.argv[1:]
small = "--model.dim 8 --model.features brand --model.loss.negatives 8 --train.epochs 2 --train.threads 1".split()
kinds = "--model.similarity.kind bilinear --model.encoder.kind gru --model.encoder.max-length 9".split()
main(["train", "demo-mol", "--data.path", data, "--run", run, "--train.ema", "0.9", *kinds, *small])
print("EVALUATED")
main(["evaluate", run, "--json"])
main(["export", run, "--out", served])
main(["update-items", served, "--items", items])
print("RETRIEVED")
main(["retrieve", served, "--history", "item-1,item-2", "--json"])
"""


def test_kinds_of_another_package_go_all_the_way(tmp_path: Path) -> None:
    """As the guide says: its files, installed."""
    guide = GUIDE.read_text(encoding="utf-8").partition("## Both in a package of your own")[2]
    (entries,) = re.findall(r"```toml\n(.*?)```", guide.partition("## A source")[0], re.DOTALL)
    kinds, modules = re.findall(r"```python\n(.*?)```", guide.partition("## A source")[0], re.DOTALL)
    package = tmp_path / "installed"
    (package / "own-1.dist-info").mkdir(parents=True)
    (package / "own-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    # As an installer writes them.
    entries = re.sub(r'\[project.entry-points."(.*?)"\]', r"[\1]", entries).replace('"', "")
    (package / "own-1.dist-info/entry_points.txt").write_text(entries)
    (package / "own_kinds.py").write_text(kinds)
    (package / "own_modules.py").write_text(modules)

    data = write_dataset(tmp_path / "data", features=True)
    (tmp_path / "new.csv").write_text("item,brand\nnew,brand-1\n")
    places = [str(data), *(str(tmp_path / name) for name in ("run", "served", "new.csv"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *sys.path])}
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, *places], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "run/results.json").read_text())
    evaluated = json.loads(re.findall(r"EVALUATED\n(.*?\n)", ran.stdout)[0])
    assert evaluated["hr@10"] == results["hr@10"] and evaluated["mrr"] == results["mrr"]
    assert "the similarity is of kind bilinear" in (tmp_path / "served/README.md").read_text()
    found = json.loads(ran.stdout.partition("RETRIEVED\n")[2])
    assert len(found) == 10
