"""Start and end of a process group; device and backend.

The same calls work for one process and many. Started by torchrun (or torchx), the group spans its workers; started
alone, it holds only this process and opens no port that another host could reach.
"""

import atexit
import functools
import gc
import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and the group that its collectives run in."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes of this host; it selects the CUDA device."""
    device: torch.device
    group: dist.ProcessGroup


@contextmanager
def process_group(device: Literal["auto", "cpu", "cuda"], timeout_seconds: int) -> Iterator[Ranks]:
    """Joins the launcher's group, or makes one of a single process; always leaves it at the end.

    `timeout_seconds` bounds the rendezvous and every collective. After an error the group is aborted rather than
    drained, so that this rank does not wait for one that is gone; the others notice when this process exits.

    Raises ValueError for a device that does not exist and for launcher variables that are missing or invalid.
    """
    place = _place_from(os.environ)
    chosen = _choose_device(device, place.local_rank)
    timeout = timedelta(seconds=timeout_seconds)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    _end_groups_before_the_interpreter()
    with _loopback_only(place.launched):
        dist.init_process_group(
            "gloo" if chosen.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=_store(place, timeout),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
        group = dist.group.WORLD
        assert group is not None
        try:
            yield Ranks(place.rank, place.world_size, place.local_rank, chosen, group)
        except BaseException:
            _abort_process_group()
            raise
        else:
            dist.destroy_process_group()


@functools.cache
def _end_groups_before_the_interpreter() -> None:
    """Collects garbage, so that process groups are destroyed before Python shuts down.

    `destroy_process_group` does not join gloo's threads: the group's destructor does, once nothing refers to the group.
    Reference cycles (a caught error's traceback is enough) can keep the group until Python shuts down. If a gloo thread
    then takes the interpreter lock to release a tensor of its last collective, Python ends the thread inside a
    destructor, which aborts the process (SIGABRT, "terminate called without an active exception").
    """
    atexit.register(gc.collect)


@dataclass(frozen=True)
class _Place:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    launched: bool = False


def _place_from(environment: Mapping[str, str]) -> _Place:
    # MASTER_ADDR and MASTER_PORT alone are often left over in a shell and do not mean a launcher.
    if not any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _Place()
    missing = [name for name in LAUNCHER_VARIABLES if not environment.get(name)]
    if missing:
        raise ValueError(
            f"a launcher's variables are set, but not {', '.join(missing)}; start with torchrun, or unset them"
        )
    rank, world_size, local_rank, port = (
        _whole_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    if world_size < 1 or rank >= world_size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE is {world_size}; ranks count from 0 to WORLD_SIZE - 1")
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT is {port}; it must be a port from 1 to 65535")
    return _Place(rank, world_size, local_rank, environment["MASTER_ADDR"], port, launched=True)


def _whole_number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {text!r}; it must be a whole number, as torchrun sets it")
    return int(text)


def _choose_device(device: str, local_rank: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device is cuda, but torch sees no CUDA device here; set train.device to cpu or auto")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, but this host has {count} CUDA devices; "
            f"start at most {count} processes per host, or set train.device to cpu"
        )
    return torch.device("cuda", local_rank)


def _store(place: _Place, timeout: timedelta) -> dist.Store:
    if not place.launched:
        return dist.HashStore()
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        place.address,
        place.port,
        place.world_size,
        is_master=place.rank == 0 and not agent_hosts,
        timeout=timeout,
        multi_tenant=not agent_hosts,
    )
    # torchrun keeps one store over its restarts, which still holds the addresses of dead processes. On several hosts
    # its restart count may differ among them (pytorch #135712).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"logitmix/attempt_{attempt}/group_{next(_GROUPS)}", store)


_GROUPS = itertools.count()
"""Number of groups that this process has made: over one store, each needs its own names."""


@contextmanager
def _loopback_only(launched: bool) -> Iterator[None]:
    """gloo listens even for a single process: keep that off the network."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if launched or loopback is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
