"""Signs of life of all ranks, so that a rank that waits in vain can say for whom.

A thread of each rank counts up its entry in the group's store. When a collective has timed out, the ranks whose entries
stand still are stopped or gone. If there are none, those that have begun fewer collectives than others hang, and their
entries say where. The ranks' clocks need not agree. Where ranks may wait for each other without a time limit, each also
watches the next one.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

import torch.distributed as dist

INTERVAL = 1.0
"""Seconds between the signs of a rank."""
LISTENS = 2.5
"""Seconds in which a living rank gives at least one."""
ANSWERS = 1.5
"""Seconds in which the store answers more than once."""
SILENT = 30.0
"""Seconds without a sign after which a rank that is watched is asked for, at least: long, because a thread gives none
while another one holds the interpreter's lock."""
NAMING = 30.0
"""Seconds in which a rank that has been silent for too long is named, on a busy host too: two INTERVALs to notice it,
LISTENS and twice ANSWERS."""

T = TypeVar("T")
OURS = __name__.partition(".")[0] + "."


class _Sign(NamedTuple):
    """What a rank's entry in the store says."""

    host: str
    pid: int
    parent: int
    beats: int
    begun: int
    """Collectives."""
    place: str

    @classmethod
    def of(cls, entry: str) -> "_Sign":
        return cls(*json.loads(entry))


class Heartbeat:
    """This rank's signs of life, from `start` to `stop`, and those of the others. One rank needs none."""

    def __init__(self, store: dist.Store | None, rank: int, world_size: int, first_host: str = "") -> None:
        """`store`: a connection of its own, for the process group waits in the one that it has. `first_host`: the host
        of rank 0."""
        self.store, self.rank, self.world_size, self.first_host = store, rank, world_size, first_host
        self.begun: Callable[[], int] = lambda: 0
        """How many collectives this rank has begun."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._beats = 0
        self._since = 0
        """Beats of this rank since the last one of the rank that it watches."""
        self._behind = 0
        """Beats of this rank for which the one that it watches has begun fewer collectives, and no new one."""

    def start(
        self, lost: Callable[[str], object] | None = None, silent: float | None = None, hung: float = SILENT
    ) -> None:
        """`lost` is called, in a thread, with a line that names a rank that has given no sign for `silent` seconds, or
        for SILENT, or that has held up others for `hung` seconds."""
        if self.store:
            self._thread = threading.Thread(target=self._beat, args=(self.store,), name="heartbeat", daemon=True)
            self._thread.start()
            if lost:
                watched = (lost, SILENT if silent is None else silent, hung)
                self._watcher = threading.Thread(target=self._watch, args=watched, name="watch", daemon=True)
                self._watcher.start()

    def stop(self) -> None:
        """Ends the threads, which could abort the process if they came back from the store while Python shuts down."""
        self._ended.set()
        for thread in (self._thread, self._watcher):
            if thread and thread is not threading.current_thread():
                thread.join(ANSWERS)

    def who_is_missing(self, seconds: float = 0) -> str:
        """Returns the ranks that give no sign of life, for a sentence; "" if all do, or nobody can tell. Takes LISTENS
        and ANSWERS, and says that they have given none for `seconds`, if that is more. Those of this launcher on this
        host are killed: it would wait for them in vain."""
        if self.store is None:
            return ""
        before = after = self._entries(self.store)
        if before is not None:
            time.sleep(LISTENS)
            after = self._entries(self.store)
        if before is None or after is None:
            self._thread = None  # hangs in the store too: `stop` would wait for it in vain
            return f"rank 0 (on {self.first_host}), or what keeps the store of the job, does not answer"
        silent = [rank for rank in range(self.world_size) if rank != self.rank and after[rank] == before[rank]]
        if not silent:
            return ""
        for rank in silent:
            _kill(after[rank])
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        never = [rank for rank in silent if not after[rank]]
        if never == silent:
            return f"{ranks} never came"
        hosts = sorted({_Sign.of(after[rank]).host for rank in silent if after[rank]})
        return f"{ranks} (on {', '.join(hosts)}) gave no sign of life for {max(seconds, LISTENS):g} s"

    def who_is_behind(self) -> str:
        """Returns those of the living ranks that have begun the fewest collectives, and where they are, for a sentence;
        "" if all have begun as many, or nobody can tell."""
        entries = self._entries(self.store) if self.store else None
        if not entries or not all(entries.values()):
            return ""
        signs = {rank: _Sign.of(entry) for rank, entry in entries.items()}
        begun = [sign.begun for sign in signs.values()]
        return "; ".join(
            f"rank {rank} (on {sign.host}) gives signs of life, but has not come so far: it is in {sign.place}"
            for rank, sign in signs.items()
            if sign.begun == min(begun) < max(begun)
        )

    def _beat(self, store: dist.Store) -> None:
        watched, before = f"alive/{(self.rank + 1) % self.world_size}", ""
        with suppress(RuntimeError):  # the store is gone, and so is the job
            while not self._ended.is_set():
                begun, place = self.begun(), _place_of(sys._current_frames().get(threading.main_thread().ident or 0))
                sign = _Sign(socket.gethostname(), os.getpid(), os.getppid(), self._beats, begun, place)
                store.set(f"alive/{self.rank}", json.dumps(sign))
                if self._watcher and store.check([watched]):
                    last, before = before, store.get(watched).decode()
                    self._since = self._since + 1 if before == last else 0
                    stands = last and _Sign.of(last).begun == _Sign.of(before).begun < begun
                    self._behind = self._behind + 1 if stands else 0
                self._beats += 1
                self._ended.wait(INTERVAL)
            return
        self._ended.set()

    def _watch(self, lost: Callable[[str], object], silent: float, hung: float) -> None:
        # Signs are counted, not seconds: after a pause of all ranks, none is missing.
        before, stuck, patience = -1, 0, silent / INTERVAL
        while not self._ended.wait(INTERVAL):
            stuck, before = stuck + 1 if self._beats == before else 0, self._beats
            if max(stuck, self._since) >= patience:
                missing = self.who_is_missing(silent)
                stuck = self._since = 0
            else:
                missing = self.who_is_behind() if self._behind >= hung / INTERVAL else ""
            if missing:
                lost(f"rank {self.rank} waits for the others no longer: {missing}")
                return

    def _entries(self, store: dist.Store) -> dict[int, str] | None:
        """Returns every rank's entry, "" where it has none; None if the store does not answer."""

        def read() -> dict[int, str]:
            keys = {rank: f"alive/{rank}" for rank in range(self.world_size)}
            return {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}

        try:
            return within(ANSWERS, read)
        except (RuntimeError, TimeoutError):
            return None


def within(seconds: float, action: Callable[[], T]) -> T:
    """Returns or raises what the action does; TimeoutError if it does not end in time. It runs in a thread, which
    nothing ends: a client of a store waits for an answer of a stopped process without a time limit."""
    result: Future[T] = Future()

    def act() -> None:
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return result.result(seconds)


def _place_of(frame: FrameType | None) -> str:
    """Returns the innermost of this project's functions that a thread is in."""
    while frame:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OURS):
            return f"{frame.f_code.co_name} ({module}:{frame.f_lineno})"
        frame = frame.f_back
    return "other code"


def _kill(entry: str) -> None:
    """Ends the process of an entry, if it runs on this host under this process's launcher."""
    if sys.platform != "linux" or not entry:
        return
    sign = _Sign.of(entry)
    if sign.host != socket.gethostname() or sign.parent != os.getppid():
        return
    with suppress(OSError, ValueError):
        if int(Path(f"/proc/{sign.pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getppid():
            os.kill(sign.pid, signal.SIGKILL)
