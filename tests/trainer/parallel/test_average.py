"""The moving average of the weights: its definition, and that everything but training takes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_ranks
from small_data import a_model, a_pipeline, gather_table, losses_of, small_config
from torchrec.distributed.types import Shard, ShardedTensor, ShardMetadata

from logitmix.comm.process_group import process_group
from logitmix.modules.schema import ITEM
from logitmix.trainer import cli
from logitmix.trainer.config import Config, dump_toml
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.parallel.average import MovingAverage
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.tensor_files import SavedTensors
from logitmix.trainer.run.warm_start import warm_start

WEIGHT = "query_tower.encoder.position_LD"
PLACE = ShardMetadata([0, 0], [4, 8], placement="rank:0/cpu")
STEPS, BROKEN = 42, 4
"""Steps, one of which moves no weight."""
EVERY_STEP = 20
"""Here after fewer steps than 100, only every tenth computes the average."""


def weights(model: ParallelModel) -> dict[str, np.ndarray]:
    found = {name: gather_table(model, name) for name in model.plan} | {WEIGHT: model.tower.state_dict()[WEIGHT]}
    return {name: weight.double().numpy() for name, weight in found.items()}


def averages(model: ParallelModel) -> dict[str, np.ndarray]:
    tower, tables = model.evaluated()
    found = {name: rows.fetch(torch.arange(model.plan[name].rows)) for name, rows in tables.items()}
    return {name: weight.double().numpy() for name, weight in (found | {WEIGHT: tower.state_dict()[WEIGHT]}).items()}


def trained(config: Config) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """The weights after each step that moved them, and their average at the end."""
    found = []
    with pytest.MonkeyPatch.context() as patch, a_pipeline(config, STEPS) as pipeline:
        patch.setattr("logitmix.trainer.parallel.average.EVERY_STEP", EVERY_STEP)
        for step in range(1, STEPS + 1):
            pipeline.receive_rows()
            pipeline.loss()
            if step == BROKEN:
                pipeline.losses["loss"] = pipeline.losses["loss"] * torch.nan
            pipeline.backward()
            pipeline.check_gradients()
            pipeline.apply_gradients()
            if step != BROKEN:
                found.append(weights(pipeline.model))
        return found, averages(pipeline.model)


@pytest.mark.parametrize(
    ("decay", "sharding"), [pytest.param(0.999, "row_wise", marks=pytest.mark.slow), (0.5, "column_wise")]
)
def test_the_average_is_that_of_its_definition(featured: Path, decay: float, sharding: str) -> None:
    settings = {"train.ema": decay, "tables.sharding": sharding, "model.features": ["tags"], "tables.tags.pooled": True}
    for of_steps, at_end in two_ranks.run(trained, small_config(featured, settings)):
        for name, found in at_end.items():
            expected = np.zeros_like(found)
            for count, of_step in enumerate(of_steps, 1):
                times = 1 if count <= EVERY_STEP else 10
                if count % times == 0:
                    kept = min(decay, (count - 1) / (count + 8)) ** times
                    expected = kept * expected + (1 - kept) * of_step[name]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
            assert np.abs(found - of_steps[-1][name]).max() > 1e-4


def saved_weights(run: Path) -> dict[str, torch.Tensor]:
    model = load_saved(run)
    return {ITEM: model.read_rows(ITEM, 0, model.num_items), WEIGHT: model.tower.state_dict()[WEIGHT]}


def started(config: Config, run: Path) -> dict[str, torch.Tensor]:
    dataset = load_dataset(config.data.path)
    with a_model(config) as (model, _):
        warm_start(run, config, dataset, model)
        taken = {ITEM: gather_table(model)[: dataset.num_items], WEIGHT: model.tower.state_dict()[WEIGHT]}
        # The average is that, too, until a step moves the weights.
        for name, average in averages(model).items():
            np.testing.assert_array_equal(average[: dataset.num_items], weights(model)[name][: dataset.num_items])
        return taken


def test_what_reads_a_run_takes_the_average(featured: Path, tmp_path: Path) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    config = small_config(featured, {"train.ema": 0.9, "train.epochs": 3, "evaluate.baselines": False})
    results = train(config, run)
    assert evaluate_run(run, "test", "cpu", 1) == {
        name: value for name, value in results.items() if name not in ("seconds", "examples_per_second")
    }
    found = saved_weights(run)
    stored = SavedTensors((run / "checkpoints" / f"step-{load_saved(run).step}").glob("part-*"))
    for name, prefix in ((ITEM, "tables/"), (WEIGHT, "tower/")):
        for of, same in (("average/", True), ("", False)):
            read = torch.empty_like(found[name])
            stored.read(f"{of}{prefix}{name}", (0, 0), read)
            assert torch.equal(read, found[name]) == same
    for name, weight in started(config, run).items():
        assert torch.equal(weight, found[name])
    export(run, tmp_path / "export")
    # Training itself is that without an average.
    train(small_config(featured, {"train.epochs": 3, "evaluate.baselines": False}), plain)
    assert losses_of(run) == losses_of(plain)
    assert read_rows(run, "validation") != read_rows(plain, "validation")


def rows(run: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in ("step", "hr@10", "mrr")} for row in read_rows(run, "validation")]


def test_a_resumed_run_goes_on_with_its_average(featured: Path, tmp_path: Path) -> None:
    settings = {"train.ema": 0.95, "comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}
    whole, half = (small_config(featured, settings | {"train.epochs": epochs}) for epochs in (4, 2))
    train(whole, tmp_path / "whole")
    train(half, tmp_path / "halves")
    train(whole, tmp_path / "halves")
    assert rows(tmp_path / "halves") == rows(tmp_path / "whole")
    expected = saved_weights(tmp_path / "whole")
    for name, weight in saved_weights(tmp_path / "halves").items():
        assert torch.equal(weight, expected[name])


def test_the_plan_counts_the_average(featured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(dump_toml(small_config(featured)))
    plans = []
    for words in ([], ["--train.ema", "0.99"]):
        cli.main(["plan", str(tmp_path / "small.toml"), "--world-size", "2", "--device", "cpu", "--json", *words])
        plans.append(json.loads(capsys.readouterr().out))
    without, plan = plans
    assert sum(plan["table_bytes"]) * 3 == sum(without["table_bytes"]) * 4
    assert plan["tower_bytes"] == without["tower_bytes"] + 4 * plan["tower_parameters"]


def test_the_average_of_a_table_in_fp16_is_in_fp32() -> None:
    with process_group("cpu", 60):
        half = ShardedTensor._init_from_local_shards([Shard(torch.ones(4, 8).half(), PLACE)], (4, 8))
        average = MovingAverage(torch.nn.Linear(1, 1), {ITEM: half}, 0.9)  # type: ignore[arg-type]
        for value in (1.0, 3.0):
            half.local_shards()[0].tensor.fill_(value)
            average.update(int(value))
        table = average.tables[ITEM]
        assert table.metadata().tensor_properties.dtype == table.local_shards()[0].tensor.dtype == torch.float32
        # d is 0 at first, and then 2 / 11.
        torch.testing.assert_close(table.local_shards()[0].tensor, torch.full((4, 8), 2 / 11 + 3 * 9 / 11))
