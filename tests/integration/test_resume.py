import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import jobs
import pytest
import two_ranks
from small_data import losses_of, small_config, write_dataset
from waiting import until

from logitmix.launch.processes import STOPPED
from logitmix.trainer import loop
from logitmix.trainer.__main__ import main
from logitmix.trainer.config import Config, dump_toml
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import checkpoint_paths, read_config

SETTINGS = {"train.epochs": 10, "train.checkpoint_every": 2, "train.keep": 1, "model.encoder.dropout": 0.3}


def train(folder: Path, run: str) -> list[str]:
    return ["train", str(folder / "recipe.toml"), "--run", str(folder / run)]


def start(
    words: list[str], folder: Path, run: Path, rows: int, torchrun: bool = False, restarts: int = 0
) -> subprocess.Popen[str]:
    """A job that has just written that many rows, or has ended."""
    written = rows_written(run, rows)
    process = jobs.start(words, folder, processes=2, torchrun=torchrun, restarts=restarts)
    try:
        while process.poll() is None and not written():
            time.sleep(0.01)
    except BaseException:  # the time of the test is over
        jobs.kill(process.pid)
        raise
    return process


@contextmanager
def two_that_wrote(words: list[str], folder: Path, run: Path, rows: int) -> Iterator[tuple[list[BaseProcess], Path]]:
    """Both ranks of a job that has just written that many rows, or has ended; and the folder of what they say."""
    written = rows_written(run, rows)
    with two_ranks.started(main, ["logitmix", *words], folder, world_size=2) as (ranks, said):
        while all(rank.is_alive() for rank in ranks) and not written():
            time.sleep(0.01)
        yield ranks, said


def kill_at(words: list[str], folder: Path, run: Path, rows: int, delay: float) -> bool:
    """SIGKILLs both ranks of a job `delay` seconds after it has written that many rows; False if it ended."""
    with two_that_wrote(words, folder, run, rows) as (ranks, _):
        time.sleep(delay)
        statuses = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
    assert statuses in ([None, None], [0, 0])
    return statuses[0] is None


def rows_written(run: Path, rows: int) -> Callable[[], bool]:
    """Whether a job that begins now has written that many; one that goes on rewrites the rows of the one before."""
    file = run / "metrics.jsonl"

    def changed() -> int:
        return file.stat().st_mtime_ns if file.exists() else 0

    before = changed()
    return lambda: changed() != before and len(file.read_text().splitlines()) >= rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and an undisturbed run of it on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.toml").write_text(dump_toml(small_config(write_dataset(folder / "data"), SETTINGS)))
    two_ranks.command(train(folder, "whole"), folder, world_size=2)
    return folder


FEATURES = {"model.features": ["all"], "model.item_id_dropout": 0.2, "tables.tags.pooled": True, "comm.parts": 2}
"""Many tables, one of them pooled where its rows lie."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_job_goes_on_as_if_nothing_had_happened(whole: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments, start again: the same losses and metrics as the undisturbed job, to the last bit."""
    kill_and_go_on(whole, tmp_path / "killed", 10)


@pytest.mark.slow
def test_a_killed_job_with_many_tables_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    config = small_config(write_dataset(tmp_path / "data", features=True), SETTINGS | FEATURES)
    (tmp_path / "recipe.toml").write_text(dump_toml(config))
    two_ranks.command(train(tmp_path, "whole"), tmp_path, world_size=2)
    kill_and_go_on(tmp_path, tmp_path / "killed", 10)


def kill_and_go_on(whole: Path, run: Path, kills: int) -> None:
    words = ["train", str(whole / "recipe.toml"), "--run", str(run)]
    rows_of_whole = len(jobs.metrics(whole / "whole"))
    chance, killed = random.Random(kills), 0
    for attempt in range(kills):
        # Each attempt gets a little further, so that kills fall on all parts of the run.
        rows = 1 + attempt * (rows_of_whole - 12) // kills + chance.randrange(4)
        killed += kill_at(words, whole, run, rows, chance.random() * 0.1)
    assert killed == kills
    go_on_to_the_end(words, run, whole)


def test_another_number_of_processes_goes_on_within_rounding(tmp_path: Path) -> None:
    settings = SETTINGS | {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}
    config = small_config(write_dataset(tmp_path / "data"), settings | {"train.epochs": 4})
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    two_ranks.run(train_runs, {changed: replace_epochs(config, 2)})
    train_runs({whole: config, changed: config})
    assert losses_of(changed) == pytest.approx(losses_of(whole), rel=1e-4)


def test_groups_of_ranks_go_on_as_one_process(tmp_path: Path) -> None:
    """Four ranks as 2 x 2, whose checkpoint has each row once: loading refuses rows that overlap."""
    settings = SETTINGS | {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}
    settings |= {"model.features": ["all"], "tables.tags.pooled": True, "train.epochs": 3, "tables.group_size": 2}
    settings |= {"tables.brand.pooled": True}
    config = small_config(write_dataset(tmp_path / "data", features=True), settings)
    began, alone = tmp_path / "began", tmp_path / "alone"
    two_ranks.run(train_runs, {began: replace_epochs(config, 1)}, world_size=4)
    train_runs(dict.fromkeys((began, alone), config))
    assert losses_of(began) == pytest.approx(losses_of(alone), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_number_of_ranks_goes_on_within_rounding(tmp_path: Path) -> None:
    """From one to four ranks to one to four, with many tables and each sharding: 52 steps after the change, compared
    with the run that goes on with as many as before. (Rounding grows from step to step: where the ranks are not as many
    from the start, it reaches 3e-4 in 72.)"""
    data = write_dataset(tmp_path / "data", features=True)
    settings = SETTINGS | FEATURES | {"train.epochs": 18, "model.dim": 16, "train.log_every": 1}
    settings |= {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}
    shardings = ("row_wise", "table_wise", "column_wise")
    configs = {sharding: small_config(data, settings | {"tables.sharding": sharding}) for sharding in shardings}
    for count in range(1, 5):
        began = {tmp_path / f"{of} {count}": replace_epochs(config, 5) for of, config in configs.items()}
        two_ranks.run(train_runs, began, world_size=count)
    for count in range(1, 5):
        goes_on: dict[Path, Config] = {}
        for of, config in configs.items():
            for before in range(1, 5):
                run = tmp_path / f"{of} {before} {count}"
                shutil.copytree(tmp_path / f"{of} {before}", run)
                goes_on[run] = config
        two_ranks.run(train_runs, goes_on, world_size=count)
    for of, before in itertools.product(shardings, range(1, 5)):
        expected = losses_of(tmp_path / f"{of} {before} {before}")
        assert len(expected) == 72
        for count in range(1, 5):
            run = tmp_path / f"{of} {before} {count}"
            assert losses_of(run) == pytest.approx(expected, rel=1e-4), run.name


def test_the_precision_auto_is_that_which_a_run_began_with(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data")
    began = small_config(data, {"train.precision": "bf16", "train.stop_after_epochs": 1})
    auto = small_config(data, {"train.precision": "auto"})
    for run, configs, expected in (("begun", (began, auto), "bf16"), ("new", (auto,), "fp32")):
        for config in configs:
            loop.train(config, tmp_path / run)
        assert read_config(tmp_path / run).train.precision == expected


def replace_epochs(config: Config, epochs: int) -> Config:
    return replace(config, train=replace(config.train, epochs=epochs))


def train_runs(configs: dict[Path, Config]) -> None:
    for run, config in configs.items():
        loop.train(config, run)


def test_a_killed_job_goes_on_and_a_signal_to_one_rank_saves_the_step(whole: Path, tmp_path: Path) -> None:
    """With the same losses, metrics and results as the undisturbed job, to the last bit."""
    run, words = tmp_path / "stopped", ["train", str(whole / "recipe.toml"), "--run", str(tmp_path / "stopped")]
    assert kill_at(words, whole, run, 2, 0.05)
    with two_that_wrote(words, tmp_path, run, 8) as (ranks, said):
        told = time.time()
        os.kill(ranks[1].pid or 0, signal.SIGTERM)
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [STOPPED] * 2
        check_that_it_was_saved(run, told, (said / "0.2").read_text())
    go_on_to_the_end(words, run, whole)


def check_that_it_was_saved(run: Path, told: float, said: str) -> None:
    saved = checkpoint_paths(run)[-1]
    assert (saved / "checkpoint.json").stat().st_mtime > told
    (line,) = [line for line in said.splitlines() if "go on with: logitmix train " in line]
    assert f"after step {saved.name.removeprefix('step-')}, which is saved in {run}" in line


def go_on_to_the_end(words: list[str], run: Path, whole: Path) -> None:
    two_ranks.command(words, run.parent, world_size=2)
    require_same(run, whole)


def require_same(run: Path, whole: Path) -> None:
    for of in (jobs.metrics, jobs.results, jobs.digests):
        assert of(run) == of(whole / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True], ids=["processes", "torchrun"])
def test_signals_to_a_job_save_the_step(whole: Path, tmp_path: Path, torchrun: bool) -> None:
    """After so many rows; to the launcher, to one rank and to all. Each rank is a group of its own."""
    run, words = tmp_path / "stopped", ["train", str(whole / "recipe.toml"), "--run", str(tmp_path / "stopped")]
    for rows, number, to in ((3, signal.SIGINT, "launcher"), (8, signal.SIGTERM, "rank"), (14, signal.SIGTERM, "all")):
        job = start(words, tmp_path, run, rows, torchrun)
        ranks = jobs.children(job.pid)
        for pid in {"launcher": [job.pid], "rank": ranks[-1:], "all": [job.pid, *ranks]}[to]:
            os.killpg(pid, number)
        told = time.time()
        _, said = jobs.finish(job, 60)
        assert not jobs.living(run)
        assert job.returncode == (1 if torchrun else STOPPED)
        check_that_it_was_saved(run, told, said)
        assert torchrun or "Traceback" not in said
    go_on_to_the_end(words, run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", "rank"])
def test_a_second_signal_harms_nothing(whole: Path, tmp_path: Path, to: str) -> None:
    """Its process ends at once, though the other rank is stopped, and the run goes on bit-equal from what was saved."""
    run, words = tmp_path / "run", ["train", str(whole / "recipe.toml"), "--run", str(tmp_path / "run")]
    job = start(words, tmp_path, run, 14)
    ranks = jobs.children(job.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    target = job.pid if to == "launcher" else ranks[0]
    os.kill(target, signal.SIGTERM)
    time.sleep(1.5)
    assert job.poll() is None
    saved = checkpoint_paths(run)
    os.kill(target, signal.SIGTERM)
    since = time.monotonic()
    _, said = jobs.finish(job, 60)
    # The launcher leaves a rank that does not end 10 s.
    assert time.monotonic() - since < (5 if to == "launcher" else 15) and not jobs.living(run)
    assert job.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    assert checkpoint_paths(run) == saved and f"step-{load_saved(run, 'last').step}" == saved[-1].name
    go_on_to_the_end(words, run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True], ids=["processes", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_ends_the_job(tmp_path: Path, rank: int, torchrun: bool) -> None:
    settings = SETTINGS | {"train.epochs": 1000, "comm.timeout_seconds": 5}
    (tmp_path / "recipe.toml").write_text(dump_toml(small_config(write_dataset(tmp_path / "data"), settings)))
    run = tmp_path / "run"
    job = start(train(tmp_path, "run"), tmp_path, run, 3, torchrun)
    os.kill(jobs.children(job.pid)[rank], signal.SIGSTOP)
    _, said = jobs.finish(job, 100)
    assert not jobs.living(run)
    assert job.returncode in (1, 3, 137)
    line = next(line for line in said.splitlines() if line.startswith("logitmix:"))
    assert f"rank {1 - rank} waited 5 s for the others (comm.timeout_seconds): rank {rank}" in line
    assert not jobs.traces(said) and (torchrun or "Traceback" not in said)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_torchrun_starts_a_job_again_that_lost_a_rank(whole: Path, tmp_path: Path, number: int) -> None:
    """It ends by itself with the metrics and weights of an undisturbed one."""
    run = tmp_path / "run"
    words = ["train", str(whole / "recipe.toml"), "--run", str(run), "--comm.timeout-seconds", "10"]
    job = start(words, tmp_path, run, 12, torchrun=True, restarts=3)
    os.kill(jobs.children(job.pid)[1], number)
    _, said = jobs.finish(job)
    assert job.returncode == 0 and not jobs.living(run) and not jobs.traces(said), said
    assert said.count(f"continuing {run} after step") == 1
    require_same(run, whole)


@pytest.mark.slow
def test_ranks_end_after_their_launcher_was_killed(tmp_path: Path) -> None:
    settings = SETTINGS | {"train.epochs": 1000, "train.checkpoint_every": 1000}
    (tmp_path / "recipe.toml").write_text(dump_toml(small_config(write_dataset(tmp_path / "data"), settings)))
    run = tmp_path / "run"
    job = start(train(tmp_path, "run"), tmp_path, run, 3, torchrun=True)
    job.kill()
    until(lambda: not jobs.living(run), 30)
    job.communicate()
    assert checkpoint_paths(run)
