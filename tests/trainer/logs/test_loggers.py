"""Loggers: what they are told, what becomes of a run whose logger fails, and that no row comes twice.

MLflow and W&B are tested where they are installed; W&B offline, MLflow with its database in the run directory.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import small_config, write_dataset

from logitmix.common import plugins
from logitmix.trainer.config import Config, with_settings
from logitmix.trainer.logs.logger import LOGGERS, Logger, Sent
from logitmix.trainer.loop import train
from logitmix.trainer.run.metrics import RunProgress, read_rows


class Recorder(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        self.calls.append(("start", run.name, dataset["items"], done.step))

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls.append((kind, step, dict(metrics)))

    def text(self, name: str, text: str) -> None:
        self.calls.append(("text", name, text))

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self.calls.append(("histogram", name, step, values.shape))

    def end(self, results: Mapping[str, float] | None) -> None:
        self.calls.append(("end", results))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [rest for what, *rest in self.calls if what == kind]


class Interrupting(Logger):
    """Ends the process, as Ctrl-C does, at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Four steps an epoch, two epochs, a row each step, a checkpoint after steps 4 and 8."""
    return small_config(write_dataset(tmp_path / "data"), {"train.log_every": 1, "train.precision": "fp32"})


def test_a_logger_is_told_all_in_order(config: Config, tmp_path: Path) -> None:
    recorder, run = Recorder(), tmp_path / "run"
    results = train(config, run, [recorder])
    rows = [{"kind": row[0], "step": row[1], **row[2]} for row in recorder.calls if len(row) == 3 and row[0] != "text"]
    assert rows == read_rows(run) and [row["kind"] for row in rows].count("validation") == 2
    first, (_, name, said), *_, last = recorder.calls
    assert first == ("start", "run", 50, 0) and name == "start" and "60 users, 50 items" in said
    assert last == ("end", results) == ("end", json.loads((run / "results.json").read_text()))
    ((step, tested),) = recorder.of("test")
    assert step == results["step"] and tested["hr@10"] == results["hr@10"] and tested["item_knn/mrr"] >= 0
    assert [step for _, step, shape in recorder.of("histogram") if len(shape)][:1] == [1]
    assert any(name == "test" and "popularity" in said for name, said in recorder.of("text"))


def test_the_runs_of_a_run_start_and_end_on_their_own(config: Config, tmp_path: Path) -> None:
    recorder = Recorder()
    settings = {"train.refit": True, "train.epochs": 1, "start.train.epochs": 1}
    train(with_settings(config, settings), tmp_path / "run", [recorder])
    # The refit of the run that gives the initial weights comes before that of the run.
    assert [call[1] for call in recorder.calls if call[0] == "start"] == ["start", "run", "start", "refit"]


def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Recorder):
        def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
            super().row(kind, step, metrics)
            if step == 3:
                raise ConnectionError("no route\nto host")

    failing, recorder = Failing(), Recorder()
    train(config, tmp_path / "run", [failing, recorder])
    said = [line for line in capsys.readouterr().err.splitlines() if "is left out from here" in line]
    because = "because its row failed: ConnectionError: no route to host"
    assert said == [f"the logger Failing is left out from here on, {because}"]
    assert failing.calls[-1][:2] == ("train", 3) and recorder.calls[-1][0] == "end"


def test_no_row_comes_twice(config: Config, tmp_path: Path) -> None:
    """Steps 5 and 6 are trained again after the interruption, and the test of a finished run is made again."""
    run, whole, recorder = tmp_path / "run", tmp_path / "whole", Recorder()
    train(config, whole)
    with pytest.raises(KeyboardInterrupt):
        train(config, run, [recorder, Interrupting(7)])
    assert recorder.calls[-1] == ("end", None)
    for _ in range(2):
        train(config, run)
        assert [(row["kind"], row["step"]) for row in read_rows(run)] == [
            (row["kind"], row["step"]) for row in read_rows(whole)
        ]


def test_what_was_sent_is_noted_for_the_process_that_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    sent = Sent(file, RunProgress())
    sent.begin("a1")
    for kind, step in (("train", 5), ("train", 10), ("validation", 8)):
        assert sent.is_new(kind, step)
        sent.note(kind, step)
    again = Sent(file, RunProgress(step=8))
    assert again.id == "a1" and not again.is_new("train", 10) and again.is_new("train", 11)
    assert not again.is_new("validation", 8) and again.is_new("test", 8)
    assert Sent(file, RunProgress()).id == "", "a run that begins anew is another run there"
    for damage in ("", "[]", "{}", '{"run": "a1", "steps": 3}', '{"run": "a1", "steps": {"train": "x"}}'):
        file.write_text(damage)
        with pytest.raises(ValueError, match=r"service\.json"):
            Sent(file, RunProgress(step=8))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mlfow"], r"train.loggers names 'mlfow' \(did you mean mlflow\?\); there are: tensorboard, mlflow, wandb"),
        (["wandb"], r"train.loggers names wandb, which needs wandb: pip install 'logitmix\[wandb\]', or leave it out"),
    ],
)
def test_a_logger_that_is_not_there_is_named_before_a_step(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "logitmix.trainer.logs.wandb", raising=False)
    with pytest.raises(ValueError, match=said):
        train(with_settings(config, {"train.loggers": names}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_loggers_there_are_rows_alone(config: Config, tmp_path: Path) -> None:
    train(with_settings(config, {"train.loggers": [], "train.epochs": 1}), tmp_path / "run")
    assert read_rows(tmp_path / "run") and not (tmp_path / "run/tensorboard").exists()


def test_a_plugin_adds_a_logger(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGERS, "data", dict(LOGGERS.data))
    monkeypatch.setattr(plugins, "_loaded", {})
    plugins.load_plugins([str(Path(__file__).parents[3] / "examples/plugins/logger.py")])
    config = with_settings(config, {"train.loggers": ["csv"], "train.epochs": 2})
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", [Interrupting(7)])
    train(config, tmp_path / "run")
    lines = (tmp_path / "run/train.csv").read_text().splitlines()
    assert lines == ["step,loss", *(f"{row['step']},{row['loss']}" for row in read_rows(tmp_path / "run", "train"))]


def interrupted_and_resumed(config: Config, run: Path, name: str) -> list[tuple[str, int]]:
    """Kinds and steps of the rows of a run that some of the rows were sent twice of, if nothing prevented it."""
    config = with_settings(config, {"train.loggers": [name], "train.epochs": 2})
    with pytest.raises(KeyboardInterrupt):
        train(config, run, [Interrupting(7)])
    for _ in range(2):
        train(config, run)
    return [(row["kind"], row["step"]) for row in read_rows(run)]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_every_row_once(config: Config, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = tmp_path / "run"
    rows = interrupted_and_resumed(config, run, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (experiment,) = [found for found in client.search_experiments() if found.name == "logitmix"]
    (found,) = client.search_runs([experiment.experiment_id])
    for kind, metric in (("train", "loss"), ("validation", "hr_at_10"), ("test", "hr_at_10")):
        history = client.get_metric_history(found.info.run_id, f"{kind}/{metric}")
        assert [(kind, point.step) for point in history] == [row for row in rows if row[0] == kind]
    assert found.data.params["train.epochs"] == "2" and found.data.tags["dataset.items"] == "50"
    assert found.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(found.info.run_id)} == {"start.txt", "test.txt"}
    assert (run / "mlflow").is_dir()


@pytest.mark.filterwarnings("ignore")
def test_wandb_has_every_row_once(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its folders of temporary files are removed when the process ends.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[dict[str, Any]] = []
    log = wandb.Run.log

    def noting(run: Any, data: dict[str, Any]) -> None:
        logged.append(data)
        log(run, data)

    monkeypatch.setattr(wandb.Run, "log", noting)
    rows = interrupted_and_resumed(config, tmp_path / "run", "wandb")
    wandb.teardown()
    folders = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1 and folders[0].glob("*.wandb")
    for kind, metric in (("train", "loss"), ("validation", "hr@10"), ("test", "hr@10")):
        steps = [data["step"] for data in logged if f"{kind}/{metric}" in data]
        assert [(kind, step) for step in steps] == [row for row in rows if row[0] == kind]
