"""Real processes on the loopback, as torchrun would start them; the caller's process hosts the store.

They are forks of one process that has torch and torchrec loaded and does nothing else, because loading them takes each
rank several seconds.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2
LOADED = ("logitmix.trainer.loop", "logitmix.trainer.export.export")
"""Modules that the ranks find loaded, with all that they import."""
multiprocessing.get_context("forkserver").set_forkserver_preload(list(LOADED))


def run(worker: Callable[..., Any], *args: Any, world_size: int = WORLD_SIZE) -> list[Any]:
    """What `worker(*args)` returned on each rank; raises what a rank raised."""
    with tempfile.TemporaryDirectory() as folder:
        store = host_store()
        arguments = (store.port, folder, world_size, dict(os.environ), worker, args)
        mp.start_processes(_enter, args=arguments, nprocs=world_size, start_method="forkserver")
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world_size)]


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


def _enter(
    rank: int,
    port: int,
    folder: str,
    world_size: int,
    environment: dict[str, str],
    worker: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    set_launcher_variables(rank, port, world_size=world_size)
    torch.save(worker(*args), Path(folder, str(rank)))
