"""One run under random faults, which ends with the metrics of an undisturbed one."""

import os
import random
import re
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jobs
import pytest
from small_data import small_config, write_dataset
from test_resume import SETTINGS

from logitmix.launch.processes import SIGNALS, STOPPED
from logitmix.trainer.config import dump_toml
from logitmix.trainer.run.folder import checkpoint_paths

MINUTES = float(os.environ.get("LOGITMIX_SOAK_MINUTES", "60"))


def kill(job: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    jobs.kill(job.pid)


def kill_rank(job: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    os.kill(chance.choice(jobs.children(job.pid)), signal.SIGKILL)


def stop_rank(job: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    os.kill(chance.choice(jobs.children(job.pid)), signal.SIGSTOP)


def tell(job: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    target = chance.choice([job.pid, *jobs.children(job.pid)])
    os.kill(target, chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))


def fill_disk(job: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    """From now on, no file of a rank may grow beyond a few bytes: a write fails as on a full disk."""
    for rank in jobs.children(job.pid):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (100, 100))


def flip_bit(job: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    """Of the newest checkpoint, once all processes are dead; an older one stays whole."""
    jobs.kill(job.pid)
    job.wait()
    paths = checkpoint_paths(run)
    if len(paths) > 1:
        file = chance.choice([path for path in paths[-1].iterdir() if path.stat().st_size])
        content = bytearray(file.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)


LAUNCHERS: dict[str, dict[str, Any]]
LAUNCHERS = {"processes": {}, "torchrun": {"torchrun": True}, "restarts": {"torchrun": True, "restarts": 3}}
FAULTS: list[Callable[[subprocess.Popen[str], Path, random.Random], None]]
FAULTS = [kill, kill_rank, stop_rank, tell, fill_disk, flip_bit]


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 3600)
def test_random_faults_leave_no_trace(tmp_path: Path) -> None:
    """Kills, stops, signals, full disks and flipped bits, one after the other, at random moments of a run on two
    ranks, which --processes or torchrun starts, and which save in the background or not."""
    settings = SETTINGS | {"train.epochs": 40, "train.keep": 3, "comm.timeout_seconds": 5}
    (tmp_path / "recipe.toml").write_text(dump_toml(small_config(write_dataset(tmp_path / "data"), settings)))
    jobs.run(["train", "recipe.toml", "--run", "whole"], tmp_path, processes=2)
    expected, chance = jobs.metrics(tmp_path / "whole"), random.Random(0)
    until, met = time.monotonic() + 60 * MINUTES, Counter[str]()
    for run in (tmp_path / f"disturbed{number}" for number in range(1000)):
        disturb(run, chance, until, met)
        assert jobs.metrics(run) == expected
        assert jobs.results(run) == jobs.results(tmp_path / "whole")
        assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
        if time.monotonic() > until:
            break
    print(f"faults: {dict(met)}")
    assert MINUTES < 10 or len(met) == len(FAULTS) + len(LAUNCHERS)


@contextmanager
def continuing_the_last(job: subprocess.Popen[str]) -> Iterator[None]:
    """Continues a rank that was stopped when the other had ended: its launcher waits for it."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(5):
            if len(ranks := jobs.children(job.pid)) == 1:
                with suppress(ProcessLookupError):
                    os.kill(ranks[0], signal.SIGCONT)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def disturb(run: Path, chance: random.Random, until: float, met: Counter[str]) -> None:
    """Trains a run to its end, with a fault in every job until its time is over."""
    words = ["train", "recipe.toml", "--run", str(run)]
    while True:
        how = chance.choice(["--train.save-in-background", "--train.no-save-in-background"])
        launcher = chance.choice(list(LAUNCHERS))
        job = jobs.start([*words, how], run.parent, processes=2, **LAUNCHERS[launcher])
        ends = time.monotonic() > until
        if not ends:
            time.sleep(chance.uniform(5, 15))
            fault = chance.choice(FAULTS)
            if job.poll() is None and len(jobs.children(job.pid)) == 2:
                fault(job, run, chance)
                met.update([fault.__name__, launcher])
        with continuing_the_last(job):
            out, said = jobs.finish(job)
        # A rank that the system kills after its launcher takes a moment to be gone.
        gone = time.monotonic() + 10
        while jobs.living(run) and time.monotonic() < gone:
            time.sleep(0.1)
        assert not jobs.living(run)
        assert not jobs.traces(said) and (launcher != "processes" or "Traceback" not in said), said
        if job.returncode == 0:
            return
        assert not ends, f"{out}\n{said}"
        of_ranks = [int(status) for status in re.findall(r"exitcode *: (-?\d+)", said)]
        ended = {-number for number in (signal.SIGKILL, *SIGNALS)}  # by a signal
        # 120 is Python's where it cannot flush its output: `fill_disk` limits this file, too.
        assert {job.returncode, *of_ranks} <= {1, 2, 3, STOPPED, 120, 137, 143, 130, 129} | ended, said
