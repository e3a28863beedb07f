"""Processes that are killed at an operation on a file."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


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
