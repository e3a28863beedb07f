"""`--processes N`: the ranks of a command on this host, started together and ended together.

Rank 0 has the terminal. Another rank's output is shown if that rank is the first to fail.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NoReturn

from logitmix.common.mappings import require
from logitmix.common.messages import say

GRACE = 10.0
"""Seconds for ranks to end by themselves, once one of them has failed."""
SAVING = 40.0
"""Seconds for them to end once a signal has told them to, and they save what they have done."""
CAUSE = 5.0
"""Seconds that a rank's own failure may show later than that it was lost, because a busy machine is slow to end it."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Those that end a job."""
INTERRUPTS: list[int] = []
"""Not empty once Ctrl-C has raised KeyboardInterrupt, which code of a library may have swallowed."""
LAST = 5.0
"""Seconds after the other ranks have ended. Then a stopped rank is continued (SIGCONT), because no rank is left that
would notice that it does not answer."""
USER_ERROR = 2
"""Exit status for a user's mistake: mostly every rank finds it, and rank 0 reports it."""
THREADS_A_CORE = 4
"""Most threads of a process, for each core."""
MISTAKE = "mistake"
"""The file in torchrun's directory of a job that has the message of a user's mistake."""
LOST_PEER = 3
"""Exit status of a rank that lost the connection to another."""
STOPPED = 75
"""Exit status of training that a signal has ended, with all that was done saved: EX_TEMPFAIL, "try again later"."""


class Stopped(Exception):
    """Training was ended by a signal. What was done is saved, and the same command goes on."""


def launched() -> bool:
    """Whether torchrun, torchx or `run_ranks` has started this process as a rank."""
    return "RANK" in os.environ


def is_main() -> bool:
    """Whether this process is rank 0, or no rank."""
    return os.environ.get("RANK", "0") == "0"


def cores() -> int:
    """Those of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_threads(flag: str, threads: int) -> None:
    """ValueError for none, and for far more than cores, which would wait for each other all the time."""
    most = THREADS_A_CORE * cores()
    require(1 <= threads <= most, flag, threads, f"from 1 to {most} here")


def end_lost(line: str) -> NoReturn:
    """Ends a rank that lost another, without destructors, which may wait for the lost one."""
    say(f"logitmix: {line}")
    os._exit(LOST_PEER)


def note_mistake(message: str) -> bool:
    """Notes a user's mistake under torchrun, whose other ranks on this host, and restarts, find it too. Whether it was
    noted before."""
    job = _torchrun_job()
    if job is None:
        return False
    with tempfile.NamedTemporaryFile("w", dir=job, suffix=".part") as file:
        file.write(message)
        file.flush()
        try:
            os.link(file.name, job / MISTAKE)
        except FileExistsError:
            return (job / MISTAKE).read_text() == message
    return False


def ended_by_a_mistake() -> bool:
    """Whether this process was started by torchrun after a user's mistake, which a restart cannot mend."""
    # Not by the restart count, which an agent does not raise where another host's process has failed.
    job = _torchrun_job()
    return job is not None and (job / MISTAKE).exists()


def _torchrun_job() -> Path | None:
    """The directory that torchrun keeps for a job on this host, over its restarts."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # torchrun puts the error file at JOB/attempt_N/RANK/error.json.
    job = Path(own).parents[2] if own and len(Path(own).parents) > 3 else None
    return job if job and job.is_dir() else None


def run_ranks(words: Sequence[str], count: int, threads: int = 1) -> int:
    """Runs `logitmix WORDS` as `count` ranks of this host; returns the exit status of the first that failed, or 0.
    `threads`: CPU threads of each, where OMP_NUM_THREADS does not say. A signal that ends the command is passed on to
    the ranks, and a second one ends them at once."""
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(1, count)]
        ranks = stack.enter_context(_ranks(words, count, said, threads))
        told = stack.enter_context(_passing_on(ranks))
        failed = _first_to_fail(ranks)
        if failed is None:
            return 0
        status = ranks[failed].returncode
        if told:
            _wait(ranks, SAVING)
            return max(0, *(process.returncode or 0 for process in ranks)) or 128 + told[0]
        if status not in (USER_ERROR, STOPPED):
            _tell(failed, status, said)
        # A rank that others wait for does not end by itself.
        _wait(ranks, 0 if status == LOST_PEER else GRACE)
        # If rank 0 has found it too, it has reported it.
        if status == USER_ERROR and ranks[0].returncode != USER_ERROR:
            _tell(failed, status, said)
        return status if status > 0 else 128 - status


@contextmanager
def _ranks(
    words: Sequence[str], count: int, said: Sequence[IO[str]], threads: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes; none of them runs any more on exit."""
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        stack.callback(_end, ranks)
        common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        for rank in range(count):
            place = {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            own = said[rank - 1] if rank else None
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "logitmix.trainer", *words],
                    env=os.environ | place,
                    stdout=own,
                    stderr=own,
                    preexec_fn=_end_with_parent,
                    # A terminal sends its signals to all processes of a group; the ranks get them from here.
                    process_group=0,
                )
            )
        yield ranks


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        process.kill()
        process.wait()


@contextmanager
def _passing_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Passes signals on to the ranks; yields those that have come."""
    told: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        if len(told) > 1:
            sys.exit(128 + number)
        for process in ranks:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in heeded_signals()}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heeded_signals() -> list[signal.Signals]:
    """Those of SIGNALS that this process was not started to ignore, as nohup does with SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def _end_with_parent() -> None:
    """Ends this rank when its parent process ends, even if that is killed; on Linux."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _first_to_fail(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until a rank has failed or all have ended."""
    alone = waited = 0.0
    while True:
        statuses = [process.poll() for process in ranks]
        failed = [rank for rank, status in enumerate(statuses) if status]
        causes = [rank for rank in failed if statuses[rank] != LOST_PEER]
        # This rank only lost another one, whose failure will show in a moment.
        if causes or alone > CAUSE:
            return (causes or failed)[0]
        if None not in statuses and not failed:
            return None
        alone += 0.05 if failed else 0.0
        waited += 0.05 if 0 in statuses else 0.0
        if waited > LAST:
            for process in ranks:
                process.send_signal(signal.SIGCONT)
        time.sleep(0.05)


def _tell(rank: int, status: int, said: Sequence[IO[str]]) -> None:
    if rank:
        file = said[rank - 1]
        file.seek(0)
        sys.stderr.write(file.read())
    if status < 0:
        print(f"logitmix: rank {rank} was ended by {signal.Signals(-status).name}", file=sys.stderr)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all ranks have ended, or that time has passed."""
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in ranks) and time.monotonic() < until:
        time.sleep(0.05)


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback that is given to nobody meanwhile. Only who names it, with SO_REUSEADDR, can listen
    there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
