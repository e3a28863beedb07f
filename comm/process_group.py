"""Start and end of a process group; device and backend.

The same calls work for one process and many. Started by torchrun (or torchx), the group spans its workers; started
alone, it holds only this process and opens no port that another host could reach.
"""

import atexit
import functools
import gc
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from logitmix.comm.heartbeat import NAMING, SILENT, Heartbeat, within
from logitmix.comm.rendezvous import HEARS, TELLS, LostRank, Member, meet, unconnected
from logitmix.common.mappings import first_line

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


RENDEZVOUS = timedelta(seconds=30)
"""For ranks that were started together and load at different speeds, at least."""
LATE = 3.0
"""Seconds after its time limit in which a store that can end by itself has done so."""


@contextmanager
def process_group(
    device: Literal["auto", "cpu", "cuda"],
    timeout_seconds: int,
    facts: Mapping[str, str] | None = None,
    lost: Callable[[str], object] | None = None,
    silent: float | None = None,
) -> Iterator[Ranks]:
    """Joins the launcher's group, or makes one of a single process; always leaves it at the end.

    `timeout_seconds` bounds every collective, and the rendezvous unless RENDEZVOUS is longer. `facts`, by name, must be
    equal on all ranks. `lost` is called, in a thread, with a line that names a rank that has given no sign of life for
    `silent` seconds. Without `silent`, that is so on CUDA alone, after `timeout_seconds`: gloo's collectives raise an
    error then, NCCL's do not. After an error the group is aborted rather than drained, so that this rank does not wait
    for one that is gone; the others notice when this process exits.

    Raises ValueError for a device that does not exist and for launcher variables that are missing or invalid, and on
    all ranks for facts that differ and a rank that has failed before (`tell_failure`); LostRank when another rank is
    gone.
    """
    place = _place_from(os.environ)
    chosen = _choose_device(device, place)
    timeout = timedelta(seconds=timeout_seconds)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    _end_groups_before_the_interpreter()
    _require_interface(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    shape = {
        "device": chosen.type,
        "the number of processes": str(place.world_size),
        "the number of processes on a host": place.local_size,
    }
    store, heartbeat, members = _store(place, max(timeout, RENDEZVOUS), shape | dict(facts or {}))
    patience = max(timeout_seconds, SILENT)
    if silent is None and chosen.type == "cuda":
        silent = patience
    heartbeat.start(None if silent is None else lost, silent, patience)
    try:
        # By itself, another thread of NCCL's ends a process whose watchdog stands still for 8 minutes, as it does while
        # the device waits in a call to CUDA.
        patient = str(_nccl_seconds(timeout_seconds))
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
        with (
            # gloo listens even for a single process: keep that off the network.
            _environment("GLOO_SOCKET_IFNAME", loopback if place.one_host else ""),
            _environment("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", patient if chosen.type == "cuda" else ""),
        ):
            hook = sys.excepthook
            try:
                dist.init_process_group(
                    "gloo" if chosen.type == "cpu" else "cpu:gloo,cuda:nccl",
                    store=store,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=timeout,
                )
            except RuntimeError as error:
                why = heartbeat.who_is_missing() or unconnected(place.rank, members)
                raise LostRank(f"rank {place.rank} cannot connect to the others: {why} ({first_line(error)})") from None
            if len(_MET) > 1 or not place.launched:
                # torch puts the rank before each line of a traceback: once for each group that a process has had.
                sys.excepthook = hook
            group = dist.group.WORLD
            assert group is not None
            if chosen.type == "cuda":
                limit_waiting(group, chosen, timeout_seconds)
            if place.world_size > 1:
                # How many of the group's collectives this rank has begun.
                backends = [cast(Any, group)._get_backend(of) for of in {torch.device("cpu"), chosen}]
                heartbeat.begun = lambda: sum(of._get_sequence_number_for_group() for of in backends)
            try:
                yield Ranks(place.rank, place.world_size, place.local_rank, chosen, group)
            finally:  # and lets go of the group
                begun = heartbeat.begun()
                heartbeat.begun = lambda: begun
            dist.destroy_process_group()
    except BaseException as error:
        why = _lost(error, place.rank, timeout_seconds, heartbeat)
        if dist.is_initialized():
            _abort_process_group()
        if why:
            raise LostRank(why) from None
        raise
    finally:
        heartbeat.stop()


def own_group(ranks: Ranks, timeout_seconds: int) -> dist.ProcessGroup:
    """Makes another group of all ranks, for collectives that run beside those of `ranks.group`: on CUDA the collectives
    of one group wait for each other. Collective."""
    if ranks.world_size == 1:
        return ranks.group
    group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    limit_waiting(group, ranks.device, timeout_seconds)
    return group


def limit_waiting(group: dist.ProcessGroup, device: torch.device, timeout_seconds: int) -> None:
    """Has collectives of a group wait so long for the other ranks. On CUDA longer, because at its time limit NCCL's
    watchdog ends the process, and a rank that hangs is to be named before."""
    seconds = timeout_seconds if device.type == "cpu" else _nccl_seconds(timeout_seconds)
    cast(Any, group)._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


def _nccl_seconds(timeout_seconds: int) -> int:
    return int(max(timeout_seconds, SILENT) + NAMING)


def _lost(error: BaseException, rank: int, seconds: int, heartbeat: Heartbeat) -> str:
    """Returns what to say of an error of gloo, NCCL or the store if it means that another rank is gone; else ""."""
    if not isinstance(error, RuntimeError) or isinstance(error, LostRank):
        return ""
    if re.search("timed? ?out", str(error), re.IGNORECASE):
        missing = heartbeat.who_is_missing() or heartbeat.who_is_behind()
        missing = missing or "all ranks are alive, so one of them hangs or is too slow"
        return f"rank {rank} waited {seconds} s for the others (comm.timeout_seconds): {missing}"
    closed = re.search("Connection closed by peer|reset by peer|Broken pipe|Connection was likely closed", str(error))
    return f"rank {rank} lost the connection to another rank" if closed else ""


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
    local_size: str = ""
    """Processes of this host, as far as the launcher says."""
    one_host: bool = True
    """Whether all ranks are on this host, as far as the launcher says."""


def _place_from(environment: Mapping[str, str]) -> _Place:
    # MASTER_ADDR and MASTER_PORT alone are often left over in a shell and do not mean a launcher.
    if not any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _Place()
    texts = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
    rank, world_size, local_rank, port = (int(text) if re.fullmatch("[0-9]+", text) else -1 for text in texts)
    address = environment.get("MASTER_ADDR", "")
    if not (0 <= rank < world_size and local_rank >= 0 and address and 0 < port < 2**16):
        said = ", ".join(f"{name}={environment.get(name, '')}" for name in LAUNCHER_VARIABLES)
        raise ValueError(f"a launcher's variables are set, but not as torchrun sets them: {said}; unset them")
    local_size = environment.get("LOCAL_WORLD_SIZE", "")
    one_host = local_size == str(world_size)
    return _Place(rank, world_size, local_rank, address, port, True, local_size, one_host)


def _require_interface(names: str) -> None:
    """Raises ValueError if gloo is to listen at an interface that this host does not have."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in there:
            raise ValueError(f"GLOO_SOCKET_IFNAME is {names}, but the interfaces of this host are {', '.join(there)}")


def _choose_device(device: str, place: _Place) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device is cuda, but torch sees no CUDA device here; set train.device to cpu or auto")
    there = torch.cuda.device_count()
    # By the number of processes, where the launcher says it, so that none of them waits for the others.
    here = max(place.local_rank + 1, int(place.local_size) if place.local_size.isdecimal() else 1)
    if here > there:
        raise ValueError(
            f"{here} processes on this host need a GPU each and it has {there}; start {there} "
            f"(--processes {there}), or set train.device to cpu"
        )
    return torch.device("cuda", place.local_rank)


def tell_failure(message: str, is_mistake: bool) -> None:
    """Tells the ranks of other hosts why this one cannot meet them; takes TELLS at most. Does nothing once it has met
    them, and on one host, where the launcher ends the others."""
    try:
        place = _place_from(os.environ)
    except ValueError:
        return
    if not (_MET or place.one_host):
        with suppress(LostRank, ValueError):
            _store(place, timedelta(seconds=TELLS), {}, message, is_mistake)


def _store(
    place: _Place, timeout: timedelta, facts: Mapping[str, str], failed: str = "", is_mistake: bool = False
) -> tuple[dist.Store, Heartbeat, dict[int, Member]]:
    """Returns the store of a new group of all ranks, the heartbeat of this rank there, and who the ranks are.
    ValueError and LostRank as of `meet`, and LostRank if the store does not answer."""
    if not place.launched:
        return dist.HashStore(), Heartbeat(None, 0, 1), {}
    seconds, at = timeout.total_seconds(), f"{place.address}:{place.port}"
    # Several jobs can share a store, and a process can make several groups.
    prefix = f"logitmix/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{len(_MET)}"

    def meet_all() -> tuple[dist.Store, Heartbeat, dict[int, Member]]:
        own = Member.here(facts, failed, is_mistake)
        group, members = meet(dist.PrefixStore(prefix, store), place.rank, place.world_size, own, facts, seconds)
        of_group = f"{prefix}/{group}"
        # A connection of its own, for threads to use while the first one waits.
        of_heartbeat = dist.PrefixStore(of_group, cast(Any, store).clone()) if place.world_size > 1 else None
        heartbeat = Heartbeat(of_heartbeat, place.rank, place.world_size, members[0].host)
        return dist.PrefixStore(of_group, store), heartbeat, members

    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = place.rank == 0 and not agent_hosts

    def connect() -> dist.TCPStore:
        return dist.TCPStore(
            place.address,
            place.port,
            place.world_size,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timeout,
            multi_tenant=not agent_hosts,
            master_listen_fd=_loopback_listener(place) if is_master else None,
        )

    try:
        store = within(seconds + LATE, connect)
        return within(seconds + TELLS + HEARS + LATE, meet_all)
    except dist.DistError as error:
        raise LostRank(f"rank {place.rank} cannot meet the others at {at}: {first_line(error)}") from None
    except TimeoutError:
        silent = "rank 0, or what keeps the store of the job, does not answer"
        raise LostRank(f"rank {place.rank} waited {seconds:g} s to meet the others at {at}: {silent}") from None
    finally:
        _MET.append(prefix)


def _loopback_listener(place: _Place) -> int | None:
    """Returns a socket that listens on the loopback, where that is the address of the group: by itself, the store would
    listen on every interface of the host."""
    if place.address not in ("127.0.0.1", "localhost"):
        return None
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", place.port))
        except OSError:
            return None  # several groups of one process share a store
        listener.listen()
        return listener.detach()


_MET: list[str] = []
"""Names of the groups that this process has made or tried to make."""


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable to the value, if there is one, unless the user has set it, and takes it back."""
    ours = bool(value) and name not in os.environ
    if ours:
        os.environ[name] = value
    try:
        yield
    finally:
        if ours:
            os.environ.pop(name, None)
