import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import two_ranks
from small_data import interrupted, small_config, write_dataset

from logitmix.launch.processes import Stopped
from logitmix.trainer.config import Config
from logitmix.trainer.data.batches import split_by_time
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.evaluation.evaluate import Evaluation, evaluate_run
from logitmix.trainer.loop import train
from logitmix.trainer.parallel import parallelize
from logitmix.trainer.run import saving
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import checkpoint_paths
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.step import pipeline
from logitmix.trainer.stopping import Stopping


def attempt(config: Config, run: Path) -> str:
    try:
        return str(train(config, run)["step"])
    except ValueError as error:
        return str(error)


def attempts(configs: Mapping[str, Config], folder: Path) -> dict[str, str]:
    return {name: attempt(config, folder / name) for name, config in configs.items()}


def test_ranks_stop_together_with_ids_in_flight(tmp_path: Path) -> None:
    """Well before the end, where the ids of the next batch are in flight: by an error, when time is up, and where
    validation gets no better."""
    data = write_dataset(tmp_path / "data")
    common = {"train.epochs": 1000, "comm.timeout_seconds": 100, "train.precision": "fp32"}
    settings = {
        "diverging": {"dense.lr": 1e30},
        "short": {"train.minutes": 0.02, "evaluate.every_epochs": 1000},
        "still": STILL | {"train.patience": 2, "comm.parts": 2},
    }
    configs = {name: small_config(data, common | of_run) for name, of_run in settings.items()}
    first, second = two_ranks.run(attempts, configs, tmp_path)
    assert first == second
    assert first["diverging"].startswith("the loss or a gradient is not finite at step")
    assert int(first["short"]) > 0
    # The metric stays as it is, so the best checkpoint is the first; two more evaluations end the run.
    assert first["still"] == "4" and evaluated(tmp_path / "still") == [4, 8, 12]


def test_a_signal_does_not_claim_a_step_that_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(write_dataset(tmp_path / "data"), {"train.on_save_failure": "continue"})
    monkeypatch.setattr(Stopping, "agreed", lambda self: True)
    monkeypatch.setattr(Stopping, "why", "SIGTERM")
    for free, said in ((0, "after step 1, which could not be saved in"), (10**9, "after step 1, which is saved in")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(free, 0, free))
        with pytest.raises(Stopped, match=said):
            train(config, tmp_path / "run")


STILL = {"dense.lr": 1e-20, "tables.lr": 1e-20, "train.precision": "fp32"}
"""Rates at which no FP32 weight moves."""


def evaluated(run: Path) -> list[int]:
    return [row["step"] for row in read_rows(run, "validation")]


def test_patience_counts_the_evaluations_of_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was continued ends where it would have ended; one that has ended stays so, or goes on with more."""
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    patient = small_config(data, STILL | {"train.epochs": 9, "train.patience": 3, "train.keep": 1})
    train(small_config(data, STILL | {"train.epochs": 2}), run)
    said = "training ends: 3 evaluations without a better validation hr@10 than"
    assert evaluated(run) == [4, 8] and said not in capsys.readouterr().err
    for _ in range(2):
        assert train(patient, run)["step"] == 4
        assert evaluated(run) == [4, 8, 12, 16]
        (line,) = [line for line in capsys.readouterr().err.splitlines() if said in line]
        assert line.endswith("at step 4 (train.patience 3)")
    train(small_config(data, STILL | {"train.epochs": 9, "train.patience": 4}), run)
    assert evaluated(run) == [4, 8, 12, 16, 20]


def test_parts_of_epochs_are_trained_and_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch is 4 steps. Where it stops may change when the run is resumed."""
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    settings = STILL | {"train.epochs": 1.5, "evaluate.every_epochs": 0.5, "train.schedule": "cosine"}
    train(small_config(data, settings | {"train.stop_after_epochs": 0.75}), run)
    assert evaluated(run) == [2, 3]
    train(small_config(data, settings | {"train.stop_after_epochs": 1.25}), run)
    assert evaluated(run) == [2, 3, 4, 5]
    train(small_config(data, settings), run)
    assert evaluated(run) == [2, 3, 4, 5, 6] and "nothing is left to train" not in capsys.readouterr().err
    train(small_config(data, settings | {"train.stop_after_epochs": 1.25}), run)
    said = capsys.readouterr().err
    assert "nothing is left to train: 6 of 5 steps are done\n" in said and "trained anew" not in said
    shutil.rmtree(run / "checkpoints")
    train(small_config(data, settings | {"train.stop_after_epochs": 0.25}), run)
    assert f"{run} has results, but no checkpoint: it is trained anew\n" in capsys.readouterr().err
    train(small_config(data, settings), run)
    with pytest.raises(ValueError, match=r"train.epochs was 1\.5, is 2\.0; use another run"):
        train(small_config(data, settings | {"train.epochs": 2}), run)


def stop_in_evaluation(config: Config, run: Path) -> None:
    """A signal comes while the run is evaluated for the first time."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match=r"stopped by SIGTERM after step \d"):

        def told(*_: object) -> None:
            patch.setattr(Stopping, "agreed", lambda self: True)
            raise Stopped

        patch.setattr(Evaluation, "__call__", told)
        patch.setattr(Stopping, "why", "SIGTERM")
        train(config, run)


def test_an_evaluation_that_is_made_again_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the first one, and the job that makes it again is killed before it has saved it."""
    run, patient = tmp_path / "run", STILL | {"train.epochs": 9, "train.patience": 2, "evaluate.peek_test": True}
    config = small_config(write_dataset(tmp_path / "data"), patient)
    stop_in_evaluation(config, run)
    assert evaluated(run) == []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saving.Saver, "save", interrupted)
        train(config, run)
    assert evaluated(run) == [4]
    train(config, run)
    assert evaluated(run) == [row["step"] for row in read_rows(run, "peeked")] == [4, 8, 12]


def with_slow_evaluations(config: Config, run: Path, seconds_by_rank: Sequence[float]) -> dict[str, float]:
    """Trains by a clock on which an evaluation takes so many seconds, and all else next to nothing."""
    now, evaluate = [0.0], Evaluation.__call__

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    def slow(evaluation: Evaluation, *arguments: Any) -> dict[str, float]:
        now[0] += seconds_by_rank[evaluation.ranks.rank]
        return evaluate(evaluation, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "time", SimpleNamespace(perf_counter=tick))
        patch.setattr(Evaluation, "__call__", slow)
        return train(config, run)


def test_evaluations_count_as_training_time_on_all_ranks(tmp_path: Path) -> None:
    """Of a minute, the third of three evaluations of 20 s would end too late, though rank 0 has time left."""
    timed = {"train.minutes": 1.0, "train.epochs": 100, "train.precision": "fp32"}
    config = small_config(write_dataset(tmp_path / "data"), timed)
    alone = with_slow_evaluations(config, tmp_path / "alone", [20.0])
    of_two = two_ranks.run(with_slow_evaluations, config, tmp_path / "two", [5.0, 20.0])
    assert evaluated(tmp_path / "alone") == evaluated(tmp_path / "two") == [4, 8]
    for results in (alone, *of_two):
        assert 40 < results["seconds"] < 45
        assert results["examples_per_second"] > 1000, "it is that of the steps alone"


def test_evaluation_can_be_switched_off(tmp_path: Path) -> None:
    settings = {"evaluate.every_epochs": 0, "train.epochs": 3, "train.keep": 5}
    config, run = small_config(write_dataset(tmp_path / "data"), settings), tmp_path / "run"
    results = train(config, run)
    assert set(results) == {"step", "seconds", "examples_per_second"} and results["step"] == 12
    assert {row["kind"] for row in read_rows(run)} == {"train"}
    # A checkpoint an epoch, as otherwise; the last one stands for the best.
    assert [path.name for path in checkpoint_paths(run)] == ["step-4", "step-8", "step-12"]
    assert load_saved(run).step == 12
    metrics = evaluate_run(run, "test", "cpu", 1)
    assert metrics["users"] == 60 and metrics["step"] == 12
    sampled = evaluate_run(run, "validation", "cpu", 1, exclude_history="no", users=7)
    assert sampled["users"] == 7


def test_a_run_split_by_time_ranks_those_who_act_in_the_latest_part(tmp_path: Path) -> None:
    settings = {"data.split": "time", "data.held_out": 0.2, "train.epochs": 1}
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    config = small_config(data, settings)
    held_out = split_by_time(load_dataset(data), 0.2)
    results = train(config, run)
    (row,) = read_rows(run, "validation")
    count = {split: int((places >= 0).sum()) for split, places in held_out.targets.items()}
    assert (row["users"], results["users"]) == (count["validation"], count["test"]) and results["users"] < 60
    assert evaluate_run(run, "test", "cpu", 1)["users"] == count["test"]
    with pytest.raises(ValueError, match=r"was started with other settings: data\.held_out was 0\.2, is 0\.1"):
        train(small_config(data, settings | {"data.held_out": 0.1}), run)


def test_threads_far_above_the_cores_are_refused(tmp_path: Path) -> None:
    config = small_config(write_dataset(tmp_path / "data"), {"train.threads": 100_000})
    with pytest.raises(ValueError, match=r"^train.threads is 100000; it must be from 1 to \d+ here$"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize("run", ["data/run", "served"])
def test_a_run_in_its_dataset_or_an_export_is_refused(tmp_path: Path, run: str) -> None:
    config = small_config(write_dataset(tmp_path / "data"))
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "manifest.json").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"is (in the dataset directory .*|an export); give another --run"):
        train(config, tmp_path / run)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_resumed_run_makes_no_initial_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has them, and the averages too."""
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    settings = {"train.epochs": 2, "train.ema": 0.9, "train.precision": "fp32", "train.schedule": "constant"}
    whole = train(small_config(data, settings), tmp_path / "whole")
    train(small_config(data, settings | {"train.epochs": 1}), run)
    monkeypatch.setattr(parallelize, "_initialize", lambda *_: pytest.fail("the rows that a checkpoint has were made"))
    resumed = train(small_config(data, settings), run)
    timed = ("seconds", "examples_per_second")
    assert {name: of for name, of in resumed.items() if name not in timed} == {
        name: of for name, of in whole.items() if name not in timed
    }
