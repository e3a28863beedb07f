"""`prepare` killed at many moments: run as a program, which forks a process for each moment.

Prints one JSON object a moment: what was there after the kill, and after the next job.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killed import killing_itself
from rich.console import Console

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.prepare import prepare


def job(source: str, out: Path) -> None:
    prepare(PrepareOptions("table", source, str(out), overwrite=True), Console(quiet=True))


def in_child(work: Callable[[], None]) -> int:
    """Returns the process; its exit status is 0 if the work is done."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def state(folder: Path) -> dict[str, str]:
    """What lies there, as hexadecimal digits."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().hex() for path in folder.rglob("*") if path.is_file()
    }


def intact(out: Path) -> bool:
    try:
        load_dataset(out)
    except ValueError:
        return False
    return True


def attempt(before: str, source: str, folder: Path, moment: str) -> dict[str, Any]:
    """`before` is the source of the dataset that is replaced, or empty. A moment is a number of operations, or seconds
    with a point."""
    folder.mkdir()
    out = folder / "out"
    if before:
        assert os.waitpid(in_child(lambda: job(before, out)), 0)[1] == 0
    if "." in moment:
        child = in_child(lambda: job(source, out))
        time.sleep(float(moment))
        os.kill(child, signal.SIGKILL)
    else:
        child = in_child(lambda: killing_itself(lambda: job(source, out), int(moment), folder))
    status = os.waitpid(child, 0)[1]
    there = state(out) if out.exists() else None
    fine = not there or intact(out)
    assert os.waitpid(in_child(lambda: job(source, out)), 0)[1] == 0
    return {"killed": status == signal.SIGKILL, "there": there, "intact": fine, "after": state(folder)}


if __name__ == "__main__":
    before, source, folder, *moments = sys.argv[1:]
    for number, moment in enumerate(moments):
        print(json.dumps(attempt(before, source, Path(folder) / str(number), moment)), flush=True)
