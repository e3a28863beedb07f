"""Whole commands, started as a user would."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from logitmix.trainer.run import read_rows

QUIET = {"OMP_NUM_THREADS": "1"}


def start(words: list[str], folder: Path, processes: int = 1, torchrun: bool = False) -> subprocess.Popen[str]:
    """`logitmix WORDS` in a session of its own, with --processes or under torchrun where there is more than one."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if torchrun else []
    module = ["-m", "logitmix.trainer.cli", *(["--"] if launcher else []), *words]
    several = ["--processes", str(processes)] if processes > 1 and not torchrun else []
    return subprocess.Popen(
        [sys.executable, *launcher, *module, *several],
        cwd=folder,
        env=os.environ | QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(words: list[str], folder: Path, processes: int = 1, torchrun: bool = False) -> str:
    """Its standard output; an AssertionError with what it said where it fails."""
    process = start(words, folder, processes, torchrun)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{words}: {out}\n{err}"
    return out


def refused(words: list[str], folder: Path, processes: int = 1) -> str:
    """What it says in its one line on standard error, where it must fail."""
    process = start(words, folder, processes)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, f"{words}: {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return err.strip()


def kill_session(leader: int) -> None:
    """SIGKILLs a command that `start` has started, and its ranks."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


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
