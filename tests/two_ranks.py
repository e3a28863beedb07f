"""Real processes on the loopback, as torchrun would start them; the caller's process hosts the store.

They are forks of one process that has torch and torchrec loaded and does nothing else, because loading them takes each
rank several seconds.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from logitmix.trainer.__main__ import main

WORLD_SIZE = 2
SECONDS = 240.0
"""The longest that a program may take."""
LOADED = ("logitmix.trainer.loop", "logitmix.trainer.export.export")
"""Modules that the ranks find loaded, with all that they import."""
multiprocessing.get_context("forkserver").set_forkserver_preload(list(LOADED))


class Job(NamedTuple):
    port: int
    """Of the store."""
    world_size: int
    folder: Path
    """For what the ranks leave."""
    environment: dict[str, str]


def run(worker: Callable[..., Any], *args: Any, world_size: int = WORLD_SIZE) -> list[Any]:
    """What `worker(*args)` returned on each rank; raises what a rank raised."""
    with tempfile.TemporaryDirectory() as folder:
        store = host_store()
        job = Job(store.port, world_size, Path(folder), dict(os.environ))
        mp.start_processes(_enter, args=(job, worker, args), nprocs=world_size, start_method="forkserver")
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world_size)]


def command(words: Sequence[str], folder: Path, world_size: int = 1, status: int = 0) -> str:
    """What `said` says of `logitmix WORDS`."""
    return said(main, ["logitmix", *words], folder, world_size, status)


def said(
    program: Callable[[], object], words: Sequence[str], folder: Path, world_size: int = 1, status: int = 0
) -> str:
    """What a program that `started` starts says on rank 0: on standard output, or on standard error where it must end
    with another status than 0. An AssertionError where it ends otherwise, or another rank where it must not fail."""
    with started(program, words, folder, world_size) as (ranks, outputs):
        for rank in ranks:
            rank.join(SECONDS)
        out, err = ((outputs / f"0.{descriptor}").read_text() for descriptor in (1, 2))
        statuses = [rank.exitcode for rank in ranks]
        assert statuses[0] == status and (status or not any(statuses)), f"{words}: {statuses}\n{out}\n{err}"
        assert "Traceback" not in err
        return err if status else out


@contextmanager
def started(
    program: Callable[[], object], words: Sequence[str], folder: Path, world_size: int = 1
) -> Iterator[tuple[list[BaseProcess], Path]]:
    """Processes in which a program is called from a folder, with `words` as sys.argv; ranks as torchrun starts them
    where there are several. Standard output and error go to the files RANK.1 and RANK.2 of the folder that it yields
    too. None of them runs any more on exit."""
    with tempfile.TemporaryDirectory() as outputs:
        store, context = host_store(), multiprocessing.get_context("forkserver")
        common = (Job(store.port, world_size, Path(outputs), dict(os.environ)), program, list(words), folder)
        ranks = [context.Process(target=_program, args=(rank, *common), daemon=True) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start()
            yield ranks, Path(outputs)
        finally:
            for rank in (rank for rank in ranks if rank.pid):
                rank.kill()
                rank.join()


def wait_for(file: Path, text: str) -> None:
    """Until a process has written this into its output."""
    until = time.monotonic() + SECONDS
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < until, f"no {text!r} in {file.read_text() if file.exists() else file}"
        time.sleep(0.01)


def host_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def set_launcher_variables(rank: int, port: int, attempt: int = 0, world_size: int = WORLD_SIZE) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(attempt),
    )


def _enter(rank: int, job: Job, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _begin(job)
    set_launcher_variables(rank, job.port, world_size=job.world_size)
    torch.save(worker(*args), job.folder / str(rank))


def _program(rank: int, job: Job, program: Callable[[], object], words: list[str], folder: Path) -> None:
    _begin(job)
    if job.world_size > 1:
        set_launcher_variables(rank, job.port, world_size=job.world_size)
    os.chdir(folder)
    for descriptor in (1, 2):
        os.dup2(os.open(job.folder / f"{rank}.{descriptor}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = words
    program()


def _begin(job: Job) -> None:
    os.environ.clear()
    os.environ |= job.environment
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # as in conftest.py: the disk is not waited for
