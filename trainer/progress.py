"""Progress bars of long work."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed"),
        TimeRemainingColumn(),
        TextColumn("remaining"),
        console=console,
    )


@contextmanager
def counting(title: str, total: int, shown: bool) -> Iterator[Any]:
    """A progress bar over `total` things; yields a function to call with the number of newly finished ones."""
    console = Console(stderr=True)
    visible = shown and console.is_terminal
    bar = progress_bar(console)
    with bar if visible else nullcontext():
        task = bar.add_task(title, total=total)
        yield lambda more: bar.advance(task, more)
