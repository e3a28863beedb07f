"""Options that several commands have, and how the ranks of a command start, share an export's items and end."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from logitmix.common.mappings import require
from logitmix.common.messages import show
from logitmix.common.plugins import flags
from logitmix.launch.processes import cores, end_lost, launched, run_ranks

if TYPE_CHECKING:
    from logitmix.comm.process_group import Ranks
    from logitmix.trainer.config import HistoryRule

PATIENCE = 365 * 24 * 3600
"""Seconds that the ranks of retrieve wait for each other: for a large export to be read, or for the next
request. The end of a rank is noticed at once, and one that is stopped by its heartbeat."""
OF_THE_RUN = "(default: the run's setting)"

RunPlace = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
ExportPlace = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True, kw_only=True)
class JSONOption:
    json: bool = False
    """Print JSON."""

    def tell(self, content: Any, text: str) -> None:
        """Prints the content as JSON, or the text."""
        if self.json:
            print(dumps(content))
        else:
            show(text)


@dataclass(frozen=True, kw_only=True)
class OverwriteOption:
    overwrite: bool = False
    """Replace the serving directory that is already there."""
    keep: int | None = None
    """Former exports to keep beside it when it is replaced, for rollback; as many as there are, unless it is given."""


@dataclass(frozen=True, kw_only=True)
class ThreadsOption:
    threads: int = 0
    """CPU threads of a rank; all cores divided among the ranks of this host when 0."""

    @property
    def threads_of_rank(self) -> int:
        return self.threads or threads_of_each(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@dataclass(frozen=True, kw_only=True)
class ProcessesOption:
    processes: int = 1
    """Processes to start on this host; torchrun and torchx start theirs themselves."""

    def start_ranks(self, command: str, words: list[str]) -> None:
        """Starts the ranks that the words of the command ask for, and ends with their exit status; does nothing within
        a rank, or for one rank."""
        require(self.processes >= 1, "--processes", self.processes, "at least 1")
        if launched():
            world_size = os.environ.get("WORLD_SIZE", "")
            if self.processes > 1 and world_size != str(self.processes):
                raise ValueError(
                    f"--processes is {self.processes}, but a launcher has started {world_size} ranks; leave it out"
                )
        elif self.processes > 1:
            raise SystemExit(run_ranks([command, *words, *flags()], self.processes, 1))


@dataclass(frozen=True, kw_only=True)
class ScaleOption:
    scale: int = 1
    """So many times the recipe's batch, with rates to match."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A command's imports of torch and what builds on it: without garbage collections, which find nothing, then or when
    the process ends, and take a third of the time from its start to its end."""
    is_first = "torch" not in sys.modules
    if is_first:
        gc.disable()
    yield
    if is_first:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def ranks_of(command: str) -> "Iterator[Ranks]":
    """The ranks of a command that answers from an export; of this process alone where no launcher has started it."""
    from logitmix.comm.heartbeat import SILENT
    from logitmix.comm.process_group import process_group
    from logitmix.trainer.run.agreement import facts_of

    with process_group("cpu", PATIENCE, facts_of(command, None, None), end_lost, SILENT) as ranks:
        yield ranks


def excludes_history(rule: "HistoryRule") -> bool | None:
    """What a rule says to `serving.request.Options`."""
    return None if rule == "auto" else rule == "yes"


def threads_of_each(count: int) -> int:
    """Of processes that divide the cores of this host."""
    return max(1, cores() // count)
