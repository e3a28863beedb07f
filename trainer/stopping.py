"""Signals that end a training job: all ranks finish the step, save it, and end.

A job that is to end (a scheduler's SIGTERM, Ctrl-C, a closed terminal) is told so by one signal to any of its
processes. A second signal ends a process at once, and so does PATIENCE if the step cannot be finished, because another
rank is gone; but a checkpoint has up to train.stop_seconds while it is being written. A rank whose launcher has ended
(killed, perhaps) ends in the same way as on a signal.
"""

import os
import select
import signal
import sys
import threading
import time

from logitmix.comm.collectives import largest
from logitmix.comm.process_group import Ranks
from logitmix.launch.processes import INTERRUPTS, SIGNALS, Stopped, heeded_signals, launched

SAME = 1.0
"""Seconds in which a second signal counts as the first: a launcher passes on what the terminal has sent to all."""
PATIENCE = 25.0
"""Seconds from a signal to the end of the step and its checkpoint, not counting those in which it is being written."""
LAUNCHER_ENDED = 100
"""In place of a signal's number, and above all of them."""


class Stopping:
    """Notes the signals of this process, within a `with` block; outside the main thread, where Python allows no
    handlers, it only takes part in what the ranks agree on.

    The signals are read by a thread: while the main thread waits for another rank, no handler of Python runs there.
    """

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        """`seconds`: those of train.stop_seconds."""
        self.ranks, self.seconds, self.number, self.since = ranks, seconds, 0, 0.0
        self.moved = 0.0
        """When `progressed` was called last."""
        self.cause = (0, 0)
        """The number of the signal that the ranks have agreed on, and the rank that got it."""
        self.parent = os.getppid()
        self.handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Stopping":
        if INTERRUPTS:
            raise KeyboardInterrupt
        if self.handles:
            self.read_end, self.write_end = os.pipe()
            os.set_blocking(self.write_end, False)
            # Until the handlers are there and once they are gone, signals are those of others, and none is lost.
            self.wakeup = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
            self.handlers = {number: signal.signal(number, _note) for number in heeded_signals()}
            self.thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.handles:
            return
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        os.close(self.write_end)  # which ends the thread
        self.thread.join()
        os.close(self.read_end)

    def progressed(self) -> None:
        """To be called while a checkpoint is being written, whenever something of it was written."""
        self.moved = time.monotonic()

    def agreed(self) -> bool:
        """Whether a rank has been told to end. Collective."""
        # The other ranks do not know of a signal that comes after this line: it counts the next time.
        number = self.number
        told = largest(number and number * self.ranks.world_size + self.ranks.rank, self.ranks)
        if told and not self.cause[0]:
            self.cause = divmod(told, self.ranks.world_size)
        return told > 0

    def check(self) -> None:
        """Raises Stopped on all ranks if one has been told to end. Collective."""
        if self.agreed():
            raise Stopped(f"stopped by {self.why}; what was trained is saved")

    @property
    def why(self) -> str:
        """After `agreed`: what the first such rank was told."""
        number, rank = self.cause
        told = "the end of its launcher" if number == LAUNCHER_ENDED else signal.Signals(number).name
        return f"{told} (rank {rank})" if self.ranks.world_size > 1 else told

    def _watch(self) -> None:
        while True:
            readable, _, _ = select.select([self.read_end], [], [], 0.5)
            numbers = os.read(self.read_end, 64) if readable else b""
            if readable and not numbers:
                return
            for number in numbers:
                self._told(number)
            if launched() and os.getppid() != self.parent and not self.number:
                self._told(LAUNCHER_ENDED)
            if self.since and (problem := self._too_slow(time.monotonic())):
                _end(f"rank {self.ranks.rank} {problem}, and is ended", self.number)

    def _too_slow(self, now: float) -> str:
        """Why the end is no longer waited for; "" if it is."""
        if now - self.since > self.seconds:
            return f"could not save its step in {self.seconds:g} s (train.stop_seconds)"
        if now - max(self.since, self.moved) > PATIENCE:
            doing = (
                "has written nothing of its checkpoint for"
                if self.moved > self.since
                else "could not finish its step in"
            )
            return f"{doing} {PATIENCE:g} s"
        return ""

    def _told(self, number: int) -> None:
        if number not in (*SIGNALS, LAUNCHER_ENDED):
            return
        now = time.monotonic()
        if not self.since:
            self.number, self.since = number, now
            if self.ranks.rank == 0 and number != LAUNCHER_ENDED:
                name = signal.Signals(number).name
                limit = f"up to {self.seconds:g} s while it is being written (train.stop_seconds)"
                line = f"\n{name}: finishing the step and saving it, {limit}; a second signal stops at once"
                print(line, file=sys.stderr)
        elif now - self.since > SAME:
            _end(f"rank {self.ranks.rank} was stopped at once", number)


def _note(number: int, frame: object) -> None:
    """In place of the signal's own action; the thread reads its number."""


def _end(line: str, number: int) -> None:
    """Ends the process, whatever its main thread waits for."""
    print(f"logitmix: {line}", file=sys.stderr, flush=True)
    os._exit(128 + number)
