import os
import random
import signal
import time
from pathlib import Path

import jobs
import pytest
from small_data import small_config, write_dataset

from logitmix.trainer.config import dump_toml

SETTINGS = {"train.epochs": 10, "train.checkpoint_every": 2, "train.keep": 1, "model.encoder.dropout": 0.3}


def train(folder: Path, run: str) -> list[str]:
    return ["train", str(folder / "recipe.toml"), "--run", str(folder / run)]


def kill_at(words: list[str], folder: Path, run: Path, rows: int, delay: float) -> bool:
    """SIGKILLs every process of the job `delay` seconds after it has written that many rows; False if it ended."""
    file = run / "metrics.jsonl"
    before = _changed(file)
    process = jobs.start(words, folder, processes=2)
    try:
        while process.poll() is None and (_changed(file) == before or len(file.read_text().splitlines()) < rows):
            time.sleep(0.01)
        time.sleep(delay)
        ended = process.poll() is not None
    finally:
        _kill_session(process.pid)
        process.communicate()
    assert not ended or process.returncode == 0
    return not ended


def _changed(file: Path) -> int:
    """When; a job that goes on rewrites the rows of the one before."""
    return file.stat().st_mtime_ns if file.exists() else 0


def _kill_session(leader: int) -> None:
    """The command, and the ranks that it started."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


FEATURES = {"model.features": ["all"], "model.item_id_dropout": 0.2, "tables.tags.pooled": True, "comm.parts": 2}
"""Many tables, one of them pooled where its rows lie."""


@pytest.mark.parametrize(
    ("kills", "features"),
    [(1, False), (1, True), pytest.param(10, True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_a_killed_job_goes_on_as_if_nothing_had_happened(tmp_path: Path, kills: int, features: bool) -> None:
    """SIGKILL at random moments, start again: the same losses and metrics as the uninterrupted job, to the last bit."""
    data = write_dataset(tmp_path / "data", features=features)
    config = small_config(data, SETTINGS | (FEATURES if features else {}))
    (tmp_path / "recipe.toml").write_text(dump_toml(config))
    jobs.run(train(tmp_path, "whole"), tmp_path, processes=2)
    expected = jobs.metrics(tmp_path / "whole")

    chance, killed = random.Random(kills), 0
    for attempt in range(kills):
        # Each attempt gets a little further, so that kills fall on all parts of the run.
        rows = 1 + attempt * (len(expected) - 12) // kills + chance.randrange(4)
        killed += kill_at(train(tmp_path, "killed"), tmp_path, tmp_path / "killed", rows, chance.random() * 0.1)
    assert killed == kills
    jobs.run(train(tmp_path, "killed"), tmp_path, processes=2)
    assert jobs.metrics(tmp_path / "killed") == expected

    whole, resumed = (jobs.results(tmp_path / run) for run in ("whole", "killed"))
    assert whole == resumed


def test_another_number_of_processes_goes_on_within_rounding(tmp_path: Path) -> None:
    settings = SETTINGS | {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}
    config = small_config(write_dataset(tmp_path / "data"), settings)
    (tmp_path / "recipe.toml").write_text(dump_toml(config))
    jobs.run(train(tmp_path, "whole"), tmp_path)
    half = ["--train.epochs", "5"]
    jobs.run([*train(tmp_path, "changed"), *half], tmp_path, processes=2)
    jobs.run(train(tmp_path, "changed"), tmp_path)
    losses = [
        [row["loss"] for row in jobs.metrics(tmp_path / run) if row["kind"] == "train"] for run in ("whole", "changed")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
