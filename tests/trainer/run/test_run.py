import fcntl
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from small_data import small_config, write_dataset

from logitmix.comm.process_group import Ranks
from logitmix.common.code import code
from logitmix.trainer.config import dump_toml
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.run import folder
from logitmix.trainer.run.checksums import checksum_rows, sync_rows
from logitmix.trainer.run.folder import read_code, read_config, run_lock, start_run
from logitmix.trainer.run.metrics import append_row, keep_rows, read_rows, still_rising


@pytest.mark.parametrize("tail", ['{"kind": "train", "step": 1', '{"kind": "train", "step": 2}'])
def test_rows_after_the_checkpoint_and_a_line_cut_short_are_dropped(tmp_path: Path, tail: str) -> None:
    """Also a whole object without its line end: a row would be appended to it."""
    file = tmp_path / "metrics.jsonl"
    for kind, step in (("train", 5), ("train", 10), ("train", 15), ("validation", 10)):
        append_row(tmp_path, kind, step, {"loss": 0.1 + 0.2})
    with file.open("a") as stream:
        stream.write(tail)
    assert [row["step"] for row in read_rows(tmp_path)] == [5, 10, 15, 10]
    keep_rows(tmp_path, 10)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [5, 10, 10]
    assert read_rows(tmp_path, "validation") == [{"kind": "validation", "step": 10, "loss": 0.1 + 0.2}]
    keep_rows(tmp_path, 0)
    assert file.read_text() == ""
    keep_rows(tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_rows_of_an_evaluation_that_is_made_again_are_dropped(tmp_path: Path) -> None:
    """Those of a checkpoint that was saved before it was evaluated."""
    for kind in ("train", "peeked", "validation", "skipped"):
        append_row(tmp_path, kind, 10, {})
    for evaluated, kept in ((True, ["train", "peeked", "validation", "skipped"]), (False, ["train", "skipped"])):
        keep_rows(tmp_path, 10, evaluated)
        assert [row["kind"] for row in read_rows(tmp_path)] == kept


def test_rows_that_a_power_loss_has_damaged_are_dropped(tmp_path: Path) -> None:
    """None up to the checkpoint, of which the last ones are on disk, but not noted if the job was killed in between."""
    file, lost = tmp_path / "metrics.jsonl", b"\0" * 30 + b'\n{"kind": "tr\n\n'
    append_row(tmp_path, "train", 5, {})
    checksum_rows(tmp_path)
    append_row(tmp_path, "train", 10, {})
    up_to_10 = file.read_bytes()
    append_row(tmp_path, "train", 15, {})
    file.write_bytes(file.read_bytes() + lost + up_to_10.replace(b"10", b"20").splitlines(keepends=True)[1])
    whole = file.read_bytes()
    keep_rows(tmp_path, 10)
    assert file.read_bytes() == up_to_10 and [row["step"] for row in read_rows(tmp_path)] == [5, 10]
    file.write_bytes(whole.replace(b"5", b"\0", 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged \(its SHA-256"):
        keep_rows(tmp_path, 0)


def test_the_file_of_rows_outlasts_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is on disk too before a checkpoint is."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    append_row(tmp_path, "train", 1, {})
    sync_rows(tmp_path)
    assert synced == [path.stat().st_ino for path in (tmp_path / "metrics.jsonl", tmp_path)]


def test_one_job_at_a_time_trains_a_run(tmp_path: Path, ranks: Ranks) -> None:
    run = tmp_path / "runs" / "run"
    with run_lock(run, ranks):
        with (
            pytest.raises(ValueError, match=f"^another job is training {run}; wait for it, or use another run"),
            run_lock(run, ranks),
        ):
            pass
        with run_lock(tmp_path / "other", ranks):
            pass
    with run_lock(run, ranks):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file cannot be a run directory"), run_lock(tmp_path / "file", ranks):
        pass


def test_a_command_that_looks_whether_a_run_is_trained_keeps_no_job_out(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(look, fcntl.LOCK_UN))
        with run_lock(tmp_path / "run", ranks):
            pass


def test_a_run_with_checkpoints_goes_on_with_its_settings_and_dataset(tmp_path: Path, ranks: Ranks) -> None:
    run, data = tmp_path / "run", write_dataset(tmp_path / "data")
    dataset, config = load_dataset(data), small_config(data)
    (run / "checkpoints").mkdir(parents=True)
    start_run(run, small_config(data, {"train.seed": 7}), dataset, ranks)
    # Without a checkpoint there is nothing that other settings could contradict.
    start_run(run, config, dataset, ranks)
    (run / "checkpoints/step-3").mkdir()
    with pytest.raises(ValueError, match=r"other settings: train\.seed was 0, is 7; use another run directory"):
        start_run(run, small_config(data, {"train.seed": 7}), dataset, ranks)
    sharding = {"tables.sharding": "row_wise", "tables.item.sharding": "column_wise"}
    longer = small_config(data, {"train.epochs": 9, "comm.timeout_seconds": 5, **sharding})
    start_run(run, longer, dataset, ranks)
    assert read_config(run) == longer
    other = load_dataset(write_dataset(tmp_path / "other", users=50))
    with pytest.raises(ValueError, match=r"other is not the dataset that .*run began with"):
        start_run(run, longer, other, ranks)


def test_a_run_that_goes_on_with_other_code_says_so(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = tmp_path / "run", write_dataset(tmp_path / "data")
    given = (run, small_config(data), load_dataset(data), ranks)
    (run / "checkpoints").mkdir(parents=True)
    assert start_run(*given) == "" and read_code(run) == code()
    other = code() | {f"{name}.py of logitmix": "f00" for name in "abcd"} | {"the version of torch": "9"}
    monkeypatch.setattr(folder, "code", lambda: other)
    # A run without a checkpoint has computed nothing with the code that it began with.
    assert start_run(*given) == "" and read_code(run) == other
    (run / "checkpoints/step-3").mkdir()
    assert start_run(*given) == ""
    monkeypatch.setattr(folder, "code", code)
    said = start_run(*given)
    assert said.startswith(f"{run} goes on with other code than before: the version of torch was 9, is ")
    assert said.endswith("(5 differences)")
    assert start_run(*given) == "" and read_code(run) == code()
    (run / "code.json").unlink()
    assert start_run(*given) == f"{run} has no code.json: whether it began with this code is not known"


@pytest.mark.parametrize(
    ("schedule", "name", "before", "now", "said"),
    [
        ("cosine", "minutes", 5.0, 9.0, r"other settings: train\.minutes was 5\.0, is 9\.0; use another run directory"),
        ("linear", "minutes", 0.0, 9.0, ""),
        ("constant", "minutes", 5.0, 9.0, ""),
        ("cosine", "epochs", 2, 9, r"other settings: train\.epochs was 2\.0, is 9\.0; use another run directory"),
    ],
)
def test_rates_that_have_fallen_do_not_rise_again(
    tmp_path: Path, ranks: Ranks, schedule: str, name: str, before: float, now: float, said: str
) -> None:
    data = write_dataset(tmp_path / "data")
    earlier, later = (
        small_config(data, {"train.schedule": schedule, f"train.{name}": value}) for value in (before, now)
    )
    (tmp_path / "checkpoints/step-3").mkdir(parents=True)
    (tmp_path / "config.toml").write_text(dump_toml(earlier))
    (tmp_path / "dataset.json").write_text(load_dataset(data).description())
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        start_run(tmp_path, later, load_dataset(data), ranks)
    assert read_config(tmp_path) == (earlier if said else later)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], ""),
        ([0.1, 0.3, 0.2], ""),
        ([0.1, 0.3, 0.4], "(0.3000 -> 0.4000 over the last 2 of 3 evaluations)"),
        # Of 20, the last two have the best one, and are better than the two before them.
        ([*[0.1] * 16, 0.2, 0.2, 0.5, 0.4], "(0.2000 -> 0.4000 over the last 3 of 20 evaluations)"),
        ([*[0.1] * 16, 0.2, 0.5, 0.4, 0.4], ""),
    ],
)
def test_a_metric_that_still_rises_is_named(tmp_path: Path, values: list[float], said: str) -> None:
    for step, value in enumerate(values):
        append_row(tmp_path, "validation", step, {"mrr": value, "hr@10": 1 - value})
        append_row(tmp_path, "train", step, {"loss": 1.0})
    line = still_rising(tmp_path, "mrr")
    assert line.startswith("validation mrr was still rising at the end " + said) if said else line == ""
