import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_data import in_memory, small_config, write_dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from logitmix.comm.config import WireConfig
from logitmix.modules.config import ModelConfig
from logitmix.trainer.config import Config, TrainConfig, flatten
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.logs import projector, telemetry
from logitmix.trainer.logs.board import Board
from logitmix.trainer.logs.loggers import Loggers
from logitmix.trainer.logs.telemetry import LEAST_LOSSES, Pace, Spikes, Telemetry, start_block
from logitmix.trainer.loop import train
from logitmix.trainer.parallel.plan import TablePlan
from logitmix.trainer.quiet import quietly
from logitmix.trainer.run.metrics import RunProgress, read_rows
from logitmix.trainer.step.pipeline import Pipeline

DATASET = in_memory(np.array([0, 2, 5]), np.arange(5), 7)
PLAN = {"item": TablePlan(7, 4, "row_wise", "sgd", "fp32", False, 112, ())}


def some_model(world_size: int = 1, comm: WireConfig | None = None, **settings: Any) -> Any:
    ranks = SimpleNamespace(rank=0, world_size=world_size, device=torch.device("cpu"))
    tower = torch.nn.Linear(3, 5)
    tower.config = ModelConfig()  # type: ignore[assignment]
    wire = SimpleNamespace(config=comm or WireConfig())
    return SimpleNamespace(train=TrainConfig(**settings), wire=wire, ranks=ranks, plan=PLAN, tower=tower)


def telemetry_of(run: Path, steps: int) -> Telemetry:
    model, done = some_model(), RunProgress()
    dataset: Any = SimpleNamespace(description=lambda: "{}")
    (run / "config.toml").touch()
    loggers = Loggers(run, flatten(Config()), dataset, done, model.ranks)
    return Telemetry(run, model, loggers, done, steps)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_start_block_names_what_is_computed_in(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    said = start_block(DATASET, some_model(precision="bf16")).splitlines()
    assert said[:-1] == [
        "dataset     made: 2 users, 7 items, 5 actions",
        "parameters  28 in tables, 20 in the tower",
        "ranks       1 on cpu with 1 thread each",
        "precision   " + ("BF16 autocast" if has_bf16 else "FP32 (this CPU has no BF16 arithmetic)"),
        "wire        one rank sends nothing",
    ]
    assert said[-1].startswith("table item  7 x 4  row_wise")
    two = start_block(DATASET, some_model(2, WireConfig(backward="bf16"), precision="fp32"))
    assert "embeddings fp8, their gradients bf16, the tower's gradients fp32" in two and "precision   FP32\n" in two
    of_data = start_block(DATASET, some_model(), {"targets": "", "histories": "2 of 3"})
    assert "histories   2 of 3\n" in of_data and "targets" not in of_data


@pytest.mark.parametrize(("batch_size", "said"), [(32, ""), (16, "16 of 32 ranks have no sequence in a step of 16 (t")])
def test_the_start_block_says_which_ranks_have_nothing_to_train_on(batch_size: int, said: str) -> None:
    lines = start_block(DATASET, some_model(32, batch_size=batch_size)).splitlines()
    assert [line[12:].startswith(said) for line in lines if line.startswith("batch ")] == [True] * bool(said)


def test_what_remains_follows_from_steps_or_minutes() -> None:
    """4 of 10 steps before this process, in a minute; then a step takes 40 s with its share of the evaluations."""
    for minutes, remaining in ((math.inf, "0:02:40"), (3.0, "0:00:40"), (1.0, "0:00:00"), (60.0, "0:02:40")):
        pace = Pace(TrainConfig(epochs=5), RunProgress(step=4, seconds=60), 10, minutes)
        line = pace.line(6, 140, 2.5, "loss 1  ")
        # Where the minutes end the run, it does not come to the last step.
        place = "epoch 3  step 6" if minutes < 60 else "epoch 3/5  step 6/10"
        assert line == f"{place}  loss 1  0:01:20 elapsed  {remaining} remaining"
    early = Pace(TrainConfig(epochs=5, stop_after_epochs=3.5), RunProgress(), 10)
    assert early.line(6, 100, 2.5, "").startswith("epoch 3/4  step 6/10")


def test_without_a_terminal_lines_come_seldom_and_the_last_one_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Telemetry, "_log_training", lambda self, pipeline, counts, epoch: None)
    with telemetry_of(tmp_path, 40) as telemetry:
        for step in range(1, 36):
            now[0] += 2
            logged = torch.zeros(1) if step % 5 == 0 else None
            telemetry.log_step(SimpleNamespace(step=step, wire_counts=logged, clock=SimpleNamespace(elapsed=now[0])), 1)
    said = capsys.readouterr().err.splitlines()
    # Logged steps are 10 s apart, so every second one is at least 15 s after the line before it.
    assert [int(re.findall(r"step (\d+)/40", line)[0]) for line in said] == [10, 20, 30, 35]


def test_a_run_says_what_it_trains_and_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(write_dataset(tmp_path / "data"), {"train.epochs": 1, "train.profile": 3})
    train(config, tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == ""
    assert "no profile: it begins after 10 steps, and there were 4" in err
    assert err.startswith(
        f"dataset     demo: 60 users, 50 items, {len(load_dataset(config.data.path).items_flat)} actions"
    )
    assert re.search(
        r"^epoch 1/1  step 4/4  loss [\d.]+  [\d,]+ examples/s  0:00:\d\d elapsed  0:00:00 remaining$", err, re.M
    )
    assert telemetry.SECONDS_BETWEEN_LINES >= 15


def events_of(run: Path) -> EventAccumulator:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def test_the_board_draws_the_rows_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projector, "PROJECTED_ITEMS", 3)
    settings = {"train.warmup_steps": 2, "train.projector": True, "evaluate.groups": ["item_actions"]}
    config = small_config(write_dataset(tmp_path / "data"), settings)
    results = train(config, tmp_path / "run")
    events = events_of(tmp_path / "run")
    curves = set(events.Tags()["scalars"])
    assert {"loss", "loss/similarity", "gates/entropy", "validation/hr@10", "learning_rate/dense"} < curves
    groups = {tag for tag in curves if tag.startswith("test/groups/item_actions=")}
    assert sum(events.Scalars(tag)[-1].value for tag in groups if tag.endswith("/users")) == 60
    assert [point.value for point in events.Scalars("test/mrr")] == [pytest.approx(results["mrr"])]
    assert [point.step for point in events.Scalars("loss")] == list(range(1, 9))
    texts = events.Tensors("configuration/text_summary")
    assert b"warmup_steps = 2" in texts[0].tensor_proto.string_val[0]
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 4, "no run beside the run"

    vectors, titles = ((tmp_path / "run/tensorboard" / name).read_text().splitlines() for name in TSV)
    assert len(vectors) == 3 and len(vectors[0].split("\t")) == 8
    assert titles[0] == "title\tid\tactions"
    counts = np.bincount(load_dataset(config.data.path).items_flat)
    shown = [title.split("\t") for title in titles[1:]]
    assert [int(count) for _, _, count in shown] == [counts[int(name.removeprefix("item-"))] for _, name, _ in shown]
    assert sorted(int(count) for _, _, count in shown) == sorted(counts.tolist())[-3:]


TSV = ("items.tsv", "titles.tsv")


def test_a_profile_holds_the_steps_after_the_warm_up_and_changes_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(write_dataset(tmp_path / "data"), {"train.epochs": 3, "evaluate.every_epochs": 0})
    for name, steps in (("plain", 0), ("traced", 100)):
        train(replace(config, train=replace(config.train, profile=steps)), tmp_path / name)
    plain, traced = ([row["loss"] for row in read_rows(tmp_path / name)] for name in ("plain", "traced"))
    assert plain == traced and len(plain) == 12
    assert not (tmp_path / "plain/profile").exists()
    (file,) = (tmp_path / "traced/profile").iterdir()
    assert file.name == "steps-11-12.json" and f"profile of steps 11 to 12: {file}" in capsys.readouterr().err
    events = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    # The profiler counts the steps of this process from 0.
    assert {"ProfilerStep#10", "ProfilerStep#11", "aten::mm"} <= events


def test_a_loss_far_above_the_last_ones_is_a_spike_and_the_first_ones_are_none() -> None:
    noise = np.random.default_rng(0).normal(4.0, 0.1, 300)
    spikes = Spikes()
    assert not any(spikes.note(float(loss)) for loss in noise)
    assert spikes.note(4.5) == ""
    assert re.match(r"the loss, 6.0000, is a spike: the median of the last 100 rows is (3\.9|4\.0)", spikes.note(6.0))
    spikes = Spikes()
    assert not any(spikes.note(loss) for loss in [1.0] * (LEAST_LOSSES - 1) + [9.0])
    assert spikes.note(9.0)


@pytest.mark.parametrize("seeds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_clean_runs_have_no_spike_and_a_loss_that_is_doubled_is_one(
    seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last batch of each epoch has one sequence, and the others 32."""
    settings = {"train.batch_size": 32, "train.epochs": 15, "train.checkpoint_every": 60, "train.precision": "fp32"}
    settings |= {"evaluate.every_epochs": 0, "model.similarity.kind": "dot", "model.hindexer.weight": 0.0}
    settings |= {"dense.lr": 1e-4, "tables.lr": 1e-4}
    config = small_config(write_dataset(tmp_path / "data", users=97), settings)
    of_step = Pipeline.loss

    def doubled(pipeline: Pipeline) -> None:
        of_step(pipeline)
        if pipeline.step == 58:
            pipeline.losses["loss"] = pipeline.losses["loss"] * 2

    def spikes_of(name: str, seed: int) -> list[str]:
        train(replace(config, train=replace(config.train, seed=seed)), tmp_path / name)
        return re.findall(r"^step (\d+): the loss, [\d.]+, is a spike", capsys.readouterr().err, re.M)

    assert [spikes_of(f"clean-{seed}", seed) for seed in range(1, 1 + seeds)] == [[]] * seeds
    monkeypatch.setattr(Pipeline, "loss", doubled)
    assert spikes_of("doubled", 1) == ["58"]


def test_without_space_for_tensorboard_it_is_left_out_and_without_space_for_rows_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes in a thread of its own, whose errors come with the next row."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with quietly():
        loggers = telemetry_of(tmp_path, 4).loggers
        _, board = loggers.loggers
        assert isinstance(board, Board)
        written = board.writer._get_file_writer().event_writer._async_writer
        with monkeypatch.context() as patch:
            patch.setattr(type(written._writer), "write", full)
            for step in range(20):
                loggers.row("train", step, {"loss": 1.0})
                time.sleep(0.05)
        written._worker.exception = None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the logger Board is left out from here on, because its row failed: OSError: [Errno 28] ")
    assert line.endswith(f"No space left on device: '{tmp_path / 'tensorboard'}'")
    assert len(read_rows(tmp_path)) == 20
    (tmp_path / "no" / "metrics.jsonl").mkdir(parents=True)
    loggers.loggers[0].run = tmp_path / "no"  # type: ignore[attr-defined]
    with pytest.raises(IsADirectoryError) as of_rows:
        loggers.row("train", 1, {})
    assert of_rows.value.filename == str(tmp_path / "no/metrics.jsonl")
