"""Progress bars of long work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def counting(title: str, total: int, shown: bool = True) -> Iterator[Any]:
    """A progress bar over `total` things, on a terminal; yields a function to call with the number of newly finished
    ones."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("elapsed"), TimeRemainingColumn(), TextColumn("remaining"))
    with Progress(*columns, *times, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda more: bar.advance(task, more)
