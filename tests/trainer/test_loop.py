from pathlib import Path

import two_ranks
from small_data import small_config, write_dataset

from logitmix.trainer.checkpoint import load_saved
from logitmix.trainer.config import Config
from logitmix.trainer.evaluate import evaluate_run
from logitmix.trainer.loop import train
from logitmix.trainer.run import checkpoint_paths, read_rows


def attempt(config: Config, run: str) -> str:
    try:
        return str(train(config, Path(run))["step"])
    except ValueError as error:
        return str(error)


def test_ranks_stop_together_with_ids_in_flight(tmp_path: Path) -> None:
    """Well before the end, where the ids of the next batch are in flight: by an error, and when time is up."""
    data = write_dataset(tmp_path / "data")
    common = {"train.epochs": 1000, "comm.timeout_seconds": 100, "train.precision": "fp32"}
    diverging = small_config(data, common | {"dense.lr": 1e30})
    for said in two_ranks.run(attempt, diverging, str(tmp_path / "diverging")):
        assert said.startswith("the loss or a gradient is not finite at step")
    short = small_config(data, common | {"train.minutes": 0.02, "evaluate.every_epochs": 1000})
    first, second = two_ranks.run(attempt, short, str(tmp_path / "short"))
    assert first == second and int(first) > 0


def test_evaluation_can_be_switched_off(tmp_path: Path) -> None:
    settings = {"evaluate.every_epochs": 0, "train.epochs": 3, "train.keep": 5}
    config, run = small_config(write_dataset(tmp_path / "data"), settings), tmp_path / "run"
    results = train(config, run)
    assert set(results) == {"step", "seconds", "examples_per_second"} and results["step"] == 12
    assert {row["kind"] for row in read_rows(run)} == {"train"}
    # A checkpoint an epoch, as otherwise; the last one stands for the best.
    assert [path.name for path in checkpoint_paths(run)] == ["step-4", "step-8", "step-12"]
    assert load_saved(run).step == 12
    metrics = evaluate_run(run, "test", None, None, "cpu", 1)
    assert metrics["users"] == 60 and metrics["step"] == 12
    sampled = evaluate_run(run, "validation", "no", 7, "cpu", 1)
    assert sampled["users"] == 7


def test_a_sample_of_the_users_is_evaluated(tmp_path: Path) -> None:
    config = small_config(write_dataset(tmp_path / "data"), {"evaluate.users": 9, "train.epochs": 1})
    results = train(config, tmp_path / "run")
    (row,) = read_rows(tmp_path / "run", "validation")
    assert results["users"] == row["users"] == 9
    for name in ("hindexer/hr@10", "repeated_targets"):
        assert 0 <= results[name] <= 1 and name in row
