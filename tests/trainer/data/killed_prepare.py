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

from rich.console import Console

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.prepare import prepare

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


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


def killing_itself(work: Callable[[], None], count: int, folder: Path) -> None:
    """Kills this process before its operation of that number (from 0) on a file in `folder`: those on Python's modules
    and on the system's files differ from machine to machine."""
    left = [count]

    def hook(event: str, arguments: Any) -> None:
        if event in EVENTS and (folder / str(arguments[0])).is_relative_to(folder):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work()


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
