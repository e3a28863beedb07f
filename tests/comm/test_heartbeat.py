"""Who is missing, from signs of life in a store."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from waiting import until

from logitmix.comm import heartbeat
from logitmix.comm.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    monkeypatch.setattr(heartbeat, "LISTENS", 0.8)
    monkeypatch.setattr(heartbeat, "ANSWERS", 0.8)
    monkeypatch.setattr(heartbeat, "SILENT", 1.2)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def beats(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeat]]:
    """Three ranks, all in this process, which nothing may kill."""
    monkeypatch.setattr(heartbeat, "_kill", lambda entry: None)
    of_ranks = [Heartbeat(store, rank, 3) for rank in range(3)]
    yield of_ranks
    for each in of_ranks:
        each.stop()
    # Those that hung in the store end a little later, and are none of the next test's.
    until(lambda: not threads())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("heartbeat", "watch")]


@pytest.mark.long
def test_a_rank_that_never_came_or_whose_signs_end_is_missing(beats: list[Heartbeat]) -> None:
    beats[0].start()
    assert beats[0].who_is_missing() == "ranks 1, 2 never came"
    for each in beats[1:]:
        each.start()
    assert beats[0].who_is_missing() == ""
    beats[1].stop()
    time.sleep(0.1)
    assert beats[0].who_is_missing().startswith("rank 1 (on ")


@pytest.mark.long
@pytest.mark.parametrize("stopped", [[1], [1, 2]])
def test_a_watched_rank_whose_signs_end_is_named_though_nobody_asks(beats: list[Heartbeat], stopped: list[int]) -> None:
    """Each rank watches the next; the one whose next has stopped names all that have."""
    said: list[str] = []
    for each in beats:
        each.start(said.append)
    time.sleep(1.5)
    assert not said
    for rank in stopped:
        beats[rank].stop()
    until(lambda: said)
    ranks = "rank 1" if len(stopped) == 1 else "ranks 1, 2"
    (line,) = said
    assert line.startswith(f"rank 0 waits for the others no longer: {ranks} (on ")
    assert line.endswith("gave no sign of life for 1.2 s")


@pytest.mark.long
@pytest.mark.parametrize("hangs", [True, False])
def test_a_living_rank_that_others_wait_for_is_named_though_nobody_asks(beats: list[Heartbeat], hangs: bool) -> None:
    """It has begun fewer collectives than the others, and begins no other; one that comes late is waited for."""
    said: list[str] = []
    late = iter(range(3, 1_000_000))
    beats[0].begun = beats[2].begun = lambda: 1_000_000
    beats[1].begun = lambda: 2 if hangs else next(late)
    for each in beats:
        each.start(said.append, 60.0, 0.5)
    if hangs:
        until(lambda: said)
    else:
        time.sleep(1.5)
    assert len(said) == hangs
    for line in said:
        assert re.fullmatch(r"rank 0 waits for the others no longer: rank 1 \(on \S+\) gives signs of life, .*", line)


@pytest.mark.long
def test_a_store_that_stops_is_noticed_though_nobody_asks(
    beats: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    hangs = threading.Event()
    for each in beats:
        each.start(said.append)
    for name in ("check", "set"):
        monkeypatch.setattr(dist.HashStore, name, lambda *_: hangs.wait(), raising=False)
    until(lambda: len(said) == 3)
    hangs.set()
    assert all("does not answer" in line for line in said)


def gone(*_: object) -> None:
    raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.long
def test_the_end_of_the_store_is_no_silence(beats: list[Heartbeat], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the job, whose connections tell more."""
    said: list[str] = []
    monkeypatch.setattr(dist.HashStore, "set", gone, raising=False)
    monkeypatch.setattr(Heartbeat, "_entries", lambda *_: pytest.fail("asked"))
    for each in beats:
        each.start(said.append)
    time.sleep(1.5)
    assert not said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ours", [True, False])
def test_a_silent_rank_of_this_launcher_is_killed(
    store: dist.Store, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the launcher is this process, which has started the silent rank; one that something else has started is left
    alone."""
    silent = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(heartbeat.os, "getppid", lambda: os.getpid() if ours else 1)
    entry = [heartbeat.socket.gethostname(), silent.pid, os.getppid(), 7, 0, "other code"]
    store.set("alive/1", json.dumps(entry))
    one = Heartbeat(store, 0, 2)
    assert one.who_is_missing().startswith("rank 1 (on ")
    time.sleep(0.1)
    assert silent.poll() == (-signal.SIGKILL if ours else None)
    silent.kill()
    silent.wait()
