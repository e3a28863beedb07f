"""Tables whose rows are in FP16, trained on a CPU: their bytes, resumed runs and exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from small_data import a_pipeline, losses_of, small_config

from logitmix.trainer import loop
from logitmix.trainer.config import Config
from logitmix.trainer.export.export import export
from logitmix.trainer.parallel.plan import bytes_by_rank
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.state import pieces_of, state_of

SETTINGS = {"tables.precision": "fp16", "train.epochs": 2, "train.precision": "fp32", "evaluate.every_epochs": 1}


def config_of(featured: Path, optimizer: str, **more: Any) -> Config:
    return small_config(featured, SETTINGS | {"tables.optimizer": optimizer, "model.features": ["all"]} | more)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_the_bytes_are_those_of_the_plan_and_rows_move(featured: Path, optimizer: str) -> None:
    config = config_of(featured, optimizer, **{"tables.tags.pooled": True, "tables.lr": 0.1})
    with a_pipeline(config, 1) as pipeline:
        model = pipeline.model
        before = {name: table.local_shards()[0].tensor.detach().clone() for name, table in model.shards().items()}
        pipeline.train_step()
        held = {name: of for name, of in state_of(model, pipeline.optimizer).items() if name.startswith("table")}
        found = sum(piece.values.nbytes for of in held.values() for piece in pieces_of(of))
        assert (found, 0) == bytes_by_rank(model.plan, 1)[0]
        for name, table in model.shards().items():
            (shard,) = table.local_shards()
            assert shard.tensor.dtype == torch.float16 and not torch.equal(shard.tensor, before[name])


def test_a_run_is_resumed_bit_for_bit_and_exported(featured: Path, tmp_path: Path) -> None:
    config = config_of(featured, "rowwise_adagrad")
    whole, resumed, fp32 = tmp_path / "whole", tmp_path / "resumed", tmp_path / "fp32"
    loop.train(config, whole)
    for epochs in (1, 2):
        loop.train(replace(config, train=replace(config.train, epochs=epochs)), resumed)
    loop.train(config_of(featured, "rowwise_adagrad", **{"tables.precision": "fp32"}), fp32)
    exact = {"comm.forward": "fp32", "comm.backward": "fp32"}
    two_ranks.run(loop.train, config_of(featured, "rowwise_adagrad", **exact), two := tmp_path / "two")
    losses = {run: losses_of(run) for run in (whole, resumed, fp32, two)}
    assert losses[resumed] == losses[whole] != losses[fp32]
    assert losses[whole] == pytest.approx(losses[fp32], rel=0.01)
    assert losses[two] == pytest.approx(losses[whole], rel=1e-3)
    saved = load_saved(whole)
    row_RD = saved.read_rows("item", 0, saved.num_items)
    assert torch.equal(row_RD, row_RD.half().float())
    export(whole, tmp_path / "export")
    assert (tmp_path / "export" / "manifest.json").exists()
