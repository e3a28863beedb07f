"""Whole commands, started as a user would."""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from logitmix.common.files import file_digest
from logitmix.trainer.run.metrics import read_rows

QUIET = {"OMP_NUM_THREADS": "1"}


def start(
    words: list[str], folder: Path, processes: int = 1, torchrun: bool = False, restarts: int = 0
) -> subprocess.Popen[str]:
    """`logitmix WORDS` in a session of its own, with --processes or under torchrun where there is more than one."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if torchrun else []
    launcher += [f"--max-restarts={restarts}"] if restarts else []
    module = ["-m", "logitmix.trainer.cli", *(["--"] if launcher else []), *words]
    several = ["--processes", str(processes)] if processes > 1 and not torchrun else []
    process = subprocess.Popen(
        [sys.executable, *launcher, *module, *several],
        cwd=folder,
        env=os.environ | QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # A test that fails in between leaves it.
    atexit.register(lambda: process.poll() is None and kill(process.pid))
    return process


def run(words: list[str], folder: Path, processes: int = 1, torchrun: bool = False) -> str:
    """Its standard output; an AssertionError with what it said where it fails."""
    process = start(words, folder, processes, torchrun)
    out, err = finish(process)
    assert process.returncode == 0, f"{words}: {out}\n{err}"
    return out


def finish(process: subprocess.Popen[str], seconds: float = 240) -> tuple[str, str]:
    """What a command says until it has ended; after `seconds`, it is killed with its ranks, and the test fails."""
    try:
        return process.communicate(timeout=seconds)
    except BaseException:
        kill(process.pid)
        out, err = process.communicate()
        print(out, err)
        raise


def children(pid: int) -> list[int]:
    """The processes that a process has started, in that order."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(pid: int) -> None:
    """SIGKILLs a command that `start` has started, and its ranks."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # starts no more ranks
        ranks = children(pid)
        os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            kill(rank)


def living(run: Path) -> list[str]:
    """The processes that name this run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(run).encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def traces(said: str) -> list[str]:
    """Lines of a traceback or crash of logitmix; torchrun's own tracebacks are none."""
    return [line for line in said.splitlines() if re.search(r'trainer/cli\.py", line|in thread|terminate called', line)]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, without what depends on the clock and the machine."""
    rows = read_rows(run)
    measured = ("time/", "memory/", "examples_per_second")
    # Bytes are counted from the last row on, or from the start of the process.
    measured += ("wire/",)
    return [{key: value for key, value in row.items() if not key.startswith(measured)} for row in rows]


def results(run: Path) -> dict[str, Any]:
    """results.json without what depends on the machine."""
    found = json.loads((run / "results.json").read_text())
    return {key: value for key, value in found.items() if key not in ("seconds", "examples_per_second")}


def digests(run: Path) -> dict[str, str]:
    """Of the files of a run's checkpoints that have tables, tower and optimizers' states."""
    return {path.relative_to(run).as_posix(): file_digest(path) for path in run.rglob("part-*")}
