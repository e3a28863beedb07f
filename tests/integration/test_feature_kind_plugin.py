"""A kind of feature that a plugin brings goes through all commands, from a folder outside the repository."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from two_ranks import command

EXAMPLE = Path(__file__).parents[2] / "examples/plugins/hour.py"
SMALL = "--model.dim 8 --model.features all --model.loss.negatives 8"


def test_the_hours_of_actions_are_a_feature(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    random = np.random.default_rng(0)
    rows = [f"u{u},i{random.integers(30)},{t},{random.random() * 24:.2f}" for u in range(60) for t in range(12)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,timestamp,hour", *rows]) + "\n")
    (tmp_path / "schema.toml").write_text('[features.hour]\nkind = "hour"\n')
    plugin, data = ["--import", "hour.py"], ["--data.path", "data"]
    prepare = ["prepare", "table", "--source", "clicks.csv", "--schema", "schema.toml", "--out", "data"]
    assert "features.hour: its kind is 'hour'; it must be one of id, ids" in command(prepare, tmp_path, status=2)
    command([*prepare, *plugin], tmp_path)
    train = ["train", "demo-mol", *data, "--run", "run", *SMALL.split(), "--train.epochs", "1"]
    refused = command(train, tmp_path, status=2)
    assert "data needs the plugin hour.py (" in refused and "make it again" not in refused
    command([*train, *plugin], tmp_path)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert json.loads(command(["evaluate", "run", "--json", *plugin], tmp_path))["mrr"] == results["mrr"]
    command(["export", "run", "--out", "served", *plugin], tmp_path)

    retrieve = ["retrieve", "served", "--history", "i1,i2", "--json"]
    assert "served needs the plugin hour.py (" in command(retrieve, tmp_path, status=2)

    def scores(*hours: float) -> list[float]:
        events = ["--request", json.dumps({"events": [{"hour": hour} for hour in hours]})]
        return [row["score"] for row in json.loads(command([*retrieve, *events, *plugin], tmp_path))["items"]]

    assert scores(3, 24) == scores(3, 0)
    assert scores(3, 24) != pytest.approx(scores(3, 12), abs=1e-5)
