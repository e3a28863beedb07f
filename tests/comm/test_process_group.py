import multiprocessing
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import two_ranks

from logitmix.comm import heartbeat
from logitmix.comm import process_group as module
from logitmix.comm.collectives import agreed, barrier, on_all_ranks
from logitmix.comm.heartbeat import Heartbeat
from logitmix.comm.process_group import LAUNCHER_VARIABLES, LostRank, process_group
from logitmix.launch.processes import held_port

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TIMEOUT_SECONDS = 60
STANDS_STILL = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def hooks_of_groups() -> list[Any]:
    """What prints the traceback of an error, before each of three groups and after them."""
    hooks = [sys.excepthook]
    for _ in range(3):
        with process_group("cpu", TIMEOUT_SECONDS):
            pass
        hooks.append(sys.excepthook)
    return [hook is hooks[0] for hook in hooks] + [hook is hooks[1] for hook in hooks]


def test_a_traceback_has_its_rank_once_whatever_the_number_of_groups() -> None:
    """And none in a program that is no rank."""
    assert hooks_of_groups() == [True] * 8
    assert two_ranks.run(hooks_of_groups) == [[True, False, False, False, False, True, True, True]] * 2


def test_an_address_left_behind_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(KeyError, match="mine"), process_group("auto", TIMEOUT_SECONDS) as ranks:
        assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.device.type) == (0, 1, 0, "cpu")
        raise KeyError("mine")
    assert not dist.is_initialized()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_alone_listens_on_the_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = listening()
    with process_group("cpu", TIMEOUT_SECONDS) as ranks:
        second = dist.new_group([0])
        barrier(ranks)
        assert all(address.startswith(("0100007F", "0" * 24 + "01000000")) for address in listening() - before)
        dist.destroy_process_group(second)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_group_in_a_reference_cycle_ends_before_the_interpreter() -> None:
    """Its destructor joins gloo's threads; one that is still at work when Python shuts down aborts the process."""
    script = """
import atexit, weakref
groups = []
atexit.register(lambda: print([group() for group in groups]))
from logitmix.comm.process_group import process_group
with process_group("cpu", 60) as ranks:
    cycle = [ranks.group]
    cycle.append(cycle)
    groups.append(weakref.ref(ranks.group))
del cycle, ranks
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "[None]\n"


def listening() -> set[str]:
    inodes = {
        os.readlink(f"/proc/self/fd/{name}")[8:-1]
        for name in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    }
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def listening_as_a_rank(port: int, agent_hosts: bool) -> tuple[str, set[str]]:
    """gloo's interface and the addresses of this rank, where the launcher says that all are on one host."""
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    if not agent_hosts:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    with process_group("cpu", TIMEOUT_SECONDS) as ranks:
        barrier(ranks)
        return os.environ["GLOO_SOCKET_IFNAME"], listening()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("agent_hosts", [True, False], ids=["torchrun", "processes"])
def test_ranks_of_one_host_listen_on_the_loopback_only(agent_hosts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with held_port() as port:
        interfaces, of_ranks = zip(*two_ranks.run(listening_as_a_rank, port, agent_hosts), strict=True)
    # A host whose name is that of the loopback, as in many containers, would listen there by itself.
    assert interfaces == ("lo", "lo")
    assert len(of_ranks[0]) == (1 if agent_hosts else 2) and len(of_ranks[1]) == 1
    for address in set.union(*of_ranks):
        assert address.startswith(("0100007F", "0" * 24 + "01000000"))


@pytest.mark.parametrize(
    "changes",
    [{"RANK": ""}, {"MASTER_PORT": ""}, {"RANK": "one"}, {"WORLD_SIZE": "-2"}, {"RANK": "2"}, {"MASTER_PORT": "65536"}],
)
def test_bad_launcher_variables(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]) -> None:
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.setenv(name, value)
    ((name, value),) = changes.items()
    said = f"not as torchrun sets them: .*{name}={value}[,;]"
    with pytest.raises(ValueError, match=said), process_group("cpu", TIMEOUT_SECONDS):
        pass


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with (
        pytest.raises(ValueError, match=r"^GLOO_SOCKET_IFNAME is eth77, but the interfaces of this host are .*\blo"),
        process_group("cpu", TIMEOUT_SECONDS),
    ):
        pass


@pytest.mark.long
def test_a_stopped_process_at_the_meeting_point_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system accepts connections for it, and nobody answers."""
    monkeypatch.setattr(module, "RENDEZVOUS", timedelta(seconds=0.5))
    monkeypatch.setattr(module, "LATE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        port = stopped.getsockname()[1]
        for name, value in (LAUNCHED | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        said = (
            f"^rank 1 waited 1 s to meet the others at 127.0.0.1:{port}: rank 0, or what keeps the store of the job, "
        )
        with pytest.raises(LostRank, match=f"{said}does not answer$"), process_group("cpu", 1):
            pass


def test_cuda_that_is_not_there() -> None:
    one_line = r"^train\.device is cuda.*set train\.device to .*\Z"
    with pytest.raises(ValueError, match=one_line), process_group("cuda", TIMEOUT_SECONDS):
        pass


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the choice of a device and the start of a group see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("rank", "local_size"), [("0", "2"), ("1", "2"), ("1", "")])
def test_processes_without_a_gpu_of_their_own(
    device: Any, rank: str, local_size: str, one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each of them, as far as the launcher says how many there are: none waits for the others."""
    for name, value in (LAUNCHED | {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": local_size}).items():
        monkeypatch.setenv(name, value)
    said = r"^2 processes on this host need a GPU each and it has 1; start 1 \(--processes 1\), or set train\.device"
    with pytest.raises(ValueError, match=said), process_group(device, TIMEOUT_SECONDS):
        pass


@pytest.mark.parametrize("seconds", [5, 600])
def test_a_rank_that_hangs_is_named_before_nccl_ends_the_process(
    seconds: int, one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's collectives raise an error at the time limit, and where all wait for NCCL, a watcher names who is silent
    for so long. Both take a while to name, and only then NCCL's watchdog may end the process."""
    limits: dict[str, float] = {}
    start, backend = dist.init_process_group, Mock(_get_sequence_number_for_group=lambda: 0)

    def started(name: str, timeout: timedelta, **options: Any) -> None:
        limits[name] = timeout.total_seconds()
        limits["the watchdog itself"] = float(os.environ[STANDS_STILL])
        start("gloo", timeout=timeout, **options)

    watched = Mock()
    monkeypatch.setattr(dist, "init_process_group", started)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: backend)
    monkeypatch.setattr(Heartbeat, "start", watched)
    monkeypatch.delenv(STANDS_STILL, raising=False)
    with process_group("auto", seconds, lost=print) as ranks:
        assert ranks.device == torch.device("cuda", 0)
    assert STANDS_STILL not in os.environ
    naming, silent = 2 * heartbeat.INTERVAL + heartbeat.LISTENS + 2 * heartbeat.ANSWERS, max(seconds, heartbeat.SILENT)
    watched.assert_called_once_with(print, silent, silent)
    assert limits == {"cpu:gloo,cuda:nccl": seconds, "the watchdog itself": silent + heartbeat.NAMING}
    backend._set_default_timeout.assert_called_once_with(timedelta(seconds=silent + heartbeat.NAMING))
    assert 2 * naming < heartbeat.NAMING


def take_part(rank: int, port: int, attempt: int, answers: "Queue[Any]") -> None:
    """Rank 1 leaves attempt 0 by an error and attempt 1 without a word; attempt 2 makes three groups in a row. Its
    agent counts these restarts; that of rank 0 has only seen that ranks came."""
    two_ranks.set_launcher_variables(rank, port, attempt if rank else 0)
    started = time.monotonic()
    try:
        for late in (0, 1, 0):
            with process_group("cpu", TIMEOUT_SECONDS) as ranks:
                barrier(ranks)
                started = time.monotonic()
                if rank == 1 and attempt == 0:
                    raise SystemExit(3)
                if rank == 1 and attempt == 1:
                    os._exit(9)
                answers.put((attempt, rank, agreed(rank == 1, ranks)))
            # One of them comes late, so that the other would find what the last group left in the store.
            if rank == late:
                time.sleep(1)
    except RuntimeError:
        answers.put((attempt, rank, (time.monotonic() - started, dist.is_initialized())))


@pytest.fixture(scope="module")
def attempts() -> tuple[list[tuple[int, int, Any]], dict[tuple[int, int], int | None]]:
    """Three attempts that share a store, as under `torchrun --max-restarts` with two agents: answers and exit codes."""
    store = two_ranks.host_store()
    context = multiprocessing.get_context("forkserver")
    answers, exit_codes, received = context.Queue(), {}, []
    for attempt in range(3):
        processes = [context.Process(target=take_part, args=(rank, store.port, attempt, answers)) for rank in range(2)]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            process.join(TIMEOUT_SECONDS)
            process.kill()
            process.join()
            exit_codes[attempt, rank] = process.exitcode
    while not answers.empty():
        received.append(answers.get(timeout=5))
    return received, exit_codes


@pytest.mark.parametrize(("attempt", "exit_code"), [(0, 3), (1, 9)], ids=["an error", "a kill"])
def test_a_lost_peer_holds_nobody_up(attempts: Any, attempt: int, exit_code: int) -> None:
    answers, exit_codes = attempts
    assert (exit_codes[attempt, 0], exit_codes[attempt, 1]) == (0, exit_code)
    [(rank, (seconds, initialized))] = [answer[1:] for answer in answers if answer[0] == attempt]
    assert (rank, initialized) == (0, False)
    assert seconds < TIMEOUT_SECONDS / 4


def test_groups_that_share_a_store_find_no_stale_addresses(attempts: Any) -> None:
    answers, exit_codes = attempts
    assert (exit_codes[2, 0], exit_codes[2, 1]) == (0, 0)
    assert sorted(answer for answer in answers if answer[0] == 2) == [(2, 0, True)] * 3 + [(2, 1, True)] * 3


def hold_up(named: Path) -> str:
    """Rank 1 comes late to a collective, and lives."""

    def act() -> None:
        while ranks.rank == 1 and not named.exists():
            time.sleep(0.1)

    try:
        with process_group("cpu", 2) as ranks:
            barrier(ranks)
            on_all_ranks(act, ranks)
    except LostRank as lost:
        named.touch()
        return str(lost)
    return ""


def test_a_living_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    """And what it does."""
    line = two_ranks.run(hold_up, tmp_path / "named")[0]
    rank, place = line.removesuffix(")").split(": ", 1)[1].split(": it is in ")
    assert line.startswith("rank 0 waited 2 s for the others (comm.timeout_seconds): ")
    assert rank == f"rank 1 (on {socket.gethostname()}) gives signs of life, but has not come so far"
    assert place.startswith("_outcome (logitmix.comm.collectives:")
