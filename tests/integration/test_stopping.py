"""Signals in this process: a checkpoint of the step, and a run that goes on as if nothing had happened."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import metrics
from small_data import small_config, write_dataset
from two_ranks import started, wait_for

from logitmix.comm.process_group import Ranks, process_group
from logitmix.launch.processes import Stopped
from logitmix.trainer import loop, stopping
from logitmix.trainer.config import Config, with_settings
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.loop import train
from logitmix.trainer.run import saving
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.results import write_results
from logitmix.trainer.run.tensor_files import TensorFile
from logitmix.trainer.step.pipeline import Pipeline

SETTINGS = {"train.epochs": 3, "model.encoder.dropout": 0.3, "train.checkpoint_every": 3}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return small_config(write_dataset(tmp_path / "data"), SETTINGS)


def send_at_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Sends this process a signal in the forward of a step."""
    of_step = Pipeline.loss

    def loss(pipeline: Pipeline) -> None:
        if pipeline.step == step:
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        of_step(pipeline)

    monkeypatch.setattr(Pipeline, "loss", loss)


def stopped(config: Config, run: Path, step: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Trains up to a signal in a step."""
    said = rf"stopped by {number.name} after step {step}, which is saved in .*{run.name}"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match=said):
        send_at_step(patch, step, number)
        train(config, run)


def goes_on(config: Config, cut: Path, whole: Path, within: str = "") -> None:
    """To the end, as a run that was not stopped."""
    train(config, cut)
    assert metrics(cut / within) == metrics(whole / within)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(of, marks=pytest.mark.slow) for of in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_saves_the_step_and_the_run_goes_on(config: Config, tmp_path: Path, number: signal.Signals) -> None:
    train(config, tmp_path / "whole")
    stopped(config, tmp_path / "cut", 5, number)
    assert load_saved(tmp_path / "cut", "last").step == 5
    goes_on(config, tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_signal_ends_an_evaluation_which_the_next_start_makes_up_for(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    train(config, tmp_path / "whole")
    users = Evaluation.users

    def signalled(evaluation: Evaluation, of: Any) -> Any:
        if of == split:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return users(evaluation, of)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "users", signalled)
        with pytest.raises(Stopped, match="saved"):
            train(config, tmp_path / "cut")
    assert load_saved(tmp_path / "cut", "last").step == (4 if split == "validation" else 12)
    goes_on(config, tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("settings", [{"train.refit": True}, {"start.train.epochs": 1}], ids=["refit", "start"])
def test_a_signal_at_the_end_of_a_run_keeps_the_next_one_from_beginning(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    config = with_settings(config, settings)
    train(config, tmp_path / "whole")

    def signalled(run: Path, results: Any) -> None:
        write_results(run, results)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_results", signalled)
        with pytest.raises(Stopped, match="saved"):
            train(config, tmp_path / "cut")
    first, other = ("", "refit") if config.train.refit else ("start", "")
    assert (tmp_path / "cut" / first / "results.json").exists()
    assert not (tmp_path / "cut" / other / "plan.json").exists()
    assert config.train.refit == (not (tmp_path / "cut" / other / "config.toml").exists())
    goes_on(config, tmp_path / "cut", tmp_path / "whole", other)


def test_the_signals_actions_are_as_before_once_training_has_ended(config: Config, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    threads = threading.active_count()
    train(config, tmp_path / "run")
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]
    assert threading.active_count() <= threads + 1  # torch keeps one


def test_training_in_a_thread_takes_no_signals(config: Config, tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train(config, tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0]["step"] > 0


RANK = """
import ctypes, sys, time
from logitmix.comm.process_group import process_group
from logitmix.trainer import stopping
stopping.SAME, stopping.PATIENCE, stopping.launched = 0.2, 1.0, lambda: True
limit = 2.0 if sys.argv[1] == "moves too long" else 30.0
with process_group("cpu", 60) as ranks, stopping.Stopping(ranks, limit) as stop:
    print("ready", flush=True)
    while "moves" in sys.argv[1] and not stop.number:
        time.sleep(0.05)
    for _ in range({"moves": 16, "moves too long": 60, "moves and stops": 4}.get(sys.argv[1], 0)):
        time.sleep(0.1)
        stop.progressed()
    while sys.argv[1] in ("blocked", "moves and stops"):
        ctypes.CDLL(None).sleep(60)
    while not stop.agreed():
        time.sleep(0.05)
print(stop.why)
"""


def rank() -> None:
    exec(RANK, {})


def told(does: str, folder: Path, *signals: int) -> tuple[int | None, str]:
    """The status of a rank that gets signals, 0.4 s after each other, and what it says on standard error."""
    with started(rank, ["rank", does], folder) as ((process,), outputs):
        wait_for(outputs / "0.1", "ready")
        assert process.pid
        for number in signals:
            os.kill(process.pid, number)
            process.join(0.4)
        process.join(100)
        return process.exitcode, (outputs / "0.2").read_text()


def start(*before: str) -> subprocess.Popen[str]:
    """A rank in a process that something else starts."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", RANK, "waiting"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_a_signal_that_comes_while_the_ranks_agree_counts_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks do not know of it yet, and would go on alone."""
    with process_group("cpu", 60) as ranks, stopping.Stopping(ranks, 600) as stop:

        def largest(number: int, _: Ranks) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.number:
                time.sleep(0.01)
            return number

        monkeypatch.setattr(stopping, "largest", largest)
        assert not stop.agreed()
        monkeypatch.undo()
        assert stop.agreed() and stop.why == "SIGTERM"


def test_a_second_signal_ends_a_step_that_takes_too_long(tmp_path: Path) -> None:
    status, said = told("blocked", tmp_path, signal.SIGTERM, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "a second signal stops at once" in said and "rank 0 was stopped at once" in said


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As under nohup, where the terminal's end is not that of the job."""
    process = start("nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=100)[0] == "SIGTERM\n"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("moves", ""),
        ("moves too long", "rank 0 could not save its step in 2 s (train.stop_seconds), and is ended"),
        ("moves and stops", "rank 0 has written nothing of its checkpoint for 1 s, and is ended"),
    ],
)
def test_a_checkpoint_that_is_being_written_is_waited_for(does: str, said: str, tmp_path: Path) -> None:
    """For longer than for a step, up to a limit."""
    status, lines = told(does, tmp_path, signal.SIGTERM)
    assert status == (128 + signal.SIGTERM if said else 0)
    limit = 2 if does == "moves too long" else 30
    assert f"up to {limit} s while it is being written (train.stop_seconds)" in lines and said in lines


def test_a_slow_checkpoint_is_saved_on_a_signal(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than is waited for a step, and no part of it does."""
    of_parts, pauses, ended = TensorFile.parts, [], []

    def slow(file: TensorFile) -> Iterator[memoryview]:
        for part in of_parts(file):
            if sum(pauses) < 4:
                pauses.append(0.2)
                time.sleep(0.2)
            yield part

    config = with_settings(config, {"train.save_in_background": True})
    monkeypatch.setattr(TensorFile, "parts", slow)
    monkeypatch.setattr(stopping, "PATIENCE", 3.0)
    monkeypatch.setattr(saving, "SIGN_OF_LIFE", 0.1)
    monkeypatch.setattr(stopping, "_end", lambda line, _: ended.append(line))
    send_at_step(monkeypatch, 1, signal.SIGTERM)
    with pytest.raises(Stopped, match="after step 1, which is saved"):
        train(config, tmp_path / "run")
    assert sum(pauses) > 3 and not ended
    assert load_saved(tmp_path / "run", "last").step == 1


def test_patience_with_a_step_has_an_end(tmp_path: Path) -> None:
    status, said = told("blocked", tmp_path, signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert "rank 0 could not finish its step in 1 s" in said


def test_a_rank_notices_that_its_launcher_is_gone() -> None:
    # The shell ends when its input does.
    process = start("sh", "-c", '"$@" & read line', "sh")
    out, _ = process.communicate("", timeout=100)
    assert out == "the end of its launcher\n"


def test_a_skipped_step_is_logged_with_its_users_and_counted_in_the_checkpoint(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that stops after it goes on as one that does not: Adam counts updates, not steps."""
    of_step = Pipeline.backward

    def backward(pipeline: Pipeline) -> None:
        if pipeline.step == 2:
            pipeline.losses["loss"] = pipeline.losses["loss"] * float("nan")
        of_step(pipeline)

    monkeypatch.setattr(Pipeline, "backward", backward)
    train(config, tmp_path / "whole")
    assert "step 2 is skipped: its loss or gradients are not finite on rank 0 (user_index " in capsys.readouterr().err
    (row,) = read_rows(tmp_path / "whole", "skipped")
    assert (row["step"], row["rank"]) == (2, 0) and len(row["users"]) == config.train.batch_size
    stopped(config, tmp_path / "cut", 5)
    goes_on(config, tmp_path / "cut", tmp_path / "whole")
