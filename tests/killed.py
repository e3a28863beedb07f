"""Processes that are killed, some at an operation on a file."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import two_ranks

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
assert two_ranks.LOADED, "each process is a fork of one that has loaded these"


def ended(work: Callable[..., None], *arguments: Any, after: float | None = None) -> int:
    """The exit code of a process that does this; it is killed after so many seconds."""
    process = multiprocessing.get_context("forkserver").Process(target=work, args=arguments)
    process.start()
    process.join(after)
    process.kill()
    process.join()
    return process.exitcode or 0


def killing_itself(work: Callable[..., None], count: int, folder: Path, *arguments: Any) -> None:
    """Works, and kills this process before its operation of that number (from 0) on a file in `folder`: those on
    Python's modules and on the system's files differ from machine to machine."""
    left = [count]

    def hook(event: str, arguments: Any) -> None:
        if event in EVENTS and (folder / str(arguments[0])).is_relative_to(folder):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work(*arguments)
