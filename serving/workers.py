"""`logitmix serve --workers N`: processes that answer from one export, whose mapped files they share. This process
listens, and passes each connection to the worker that has the fewest; it loads no torch.

Between it and a worker is a socket: to the worker go connections, DRAINING, and the end when it shall end; from it come
lines, READY with what it serves, CLOSED for each connection that is closed, LEAVING when it wants to end.
"""

import errno
import ipaddress
import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from logitmix.common.mappings import require
from logitmix.common.messages import say as _print
from logitmix.serving.connection import CONNECTIONS

WORKER = "LOGITMIX_WORKER"
"""The environment variable by which a worker knows itself."""
MOST_WORKERS = 256
READY, CLOSED, LEAVING = "ready", "closed", "leaving"
GIVEN, DRAINING = b".", b"d"
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a worker that has died is replaced; twice as many each time that it dies before it is ready."""
LAST_SECONDS = 40.0
"""Time for the workers to answer what is in flight and end."""
TICK = 0.1


def say(line: str) -> None:
    # Where nobody reads the lines any more, the server still answers and takes over new exports.
    with suppress(OSError):
        _print(f"logitmix: {line}")


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound, and does not listen yet. ValueError for what is no host or port, and OSError that says
    why the address cannot be taken."""
    require(0 <= port <= 65535, "--port", port, "from 0 to 65535")
    require(bool(host), "--host", repr(host), "an address, such as 127.0.0.1, or 0.0.0.0 for all of this host")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0]
        # With the protocol left open, asyncio would not set TCP_NODELAY, and each answer would take 40 ms more.
        listening = socket.socket(family, kind, proto)
    except (OSError, UnicodeError):
        raise OSError(f"there is no address for --host {host}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} of {host} is in use; give another --port") from None
        raise OSError(f"port {port} of {host}: {error.strerror}") from None
    return listening


def listen(listening: socket.socket, described: str, has_token: bool = False, protocol: str = "http") -> None:
    """From now on, and says so."""
    listening.listen(CONNECTIONS)
    address, port = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    if not has_token and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        say(f"whoever reaches {shown} can use this server, as there is no --token-file")
    say(f"serving {described} on {protocol}://{shown}:{port}")


@dataclass(frozen=True)
class Worker:
    """What a worker has of its own."""

    number: int
    control: socket.socket
    folder: Path
    """Where the workers leave their metrics, and what they share in memory."""

    @classmethod
    def of_environment(cls) -> "Worker | None":
        """This process, if it is a worker."""
        if (said := os.environ.get(WORKER)) is None:
            return None
        number, control, folder = json.loads(said)
        return cls(number, socket.socket(fileno=control), Path(folder))

    def write_metrics(self, text: str) -> None:
        """For the other workers."""
        part = self.folder / f"{self.number}.part"
        with suppress(OSError):  # they do without, and this one goes on
            part.write_text(text)
            part.replace(_metrics_of(self.folder, self.number))

    def metrics(self) -> dict[int, str]:
        """What the workers have written."""
        found = {}
        for file in self.folder.glob("*.prom"):
            with suppress(FileNotFoundError):  # that worker has just ended
                found[int(file.stem)] = file.read_text()
        return found

    def tell(self, line: str) -> None:
        with suppress(OSError):  # nobody is there any more, and the worker ends
            self.control.sendall(f"{line}\n".encode())


def _metrics_of(folder: Path, number: int) -> Path:
    return folder / f"{number}.prom"


def run_workers(
    command: Sequence[str],
    count: int,
    threads: int,
    host: str,
    port: int,
    drain: float = 0.0,
    has_token: bool = False,
    protocol: str = "http",
) -> int:
    """Serves by `count` processes of a command until SIGTERM or SIGINT, and then `drain` seconds more, which a second
    signal ends; the next one ends the workers at once. `threads`: CPU threads of each, where OMP_NUM_THREADS does not
    say. The exit status: that of a worker that ends before all of them have been ready, or 0.

    ValueError and OSError as `bound` raises them.
    """
    require(count <= MOST_WORKERS, "--workers", count, f"at most {MOST_WORKERS}")
    with (
        bound(host, port) as listening,
        tempfile.TemporaryDirectory(prefix="logitmix-") as folder,
        ExitStack() as stack,
    ):
        workers = [_Process(number, list(command), threads, Path(folder)) for number in range(count)]
        for worker in workers:
            stack.callback(worker.kill)
        listening.setblocking(False)
        supervisor = _Supervisor(workers, listening, drain, has_token, protocol)
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, supervisor.told))
        return supervisor.run()


@dataclass
class _Process:
    """A worker, as this process sees it; started again, it is another process."""

    number: int
    command: Sequence[str]
    threads: int
    folder: Path
    connections: int = 0
    is_ready: bool = False
    pause: float = PAUSE
    due: float = 0.0
    """When it is started again."""
    control: socket.socket | None = None
    _process: "subprocess.Popen[bytes] | None" = None
    _received: bytes = field(default=b"", repr=False)

    def start(self) -> None:
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        own = json.dumps([self.number, theirs.fileno(), str(self.folder)])
        with theirs:
            self._process = subprocess.Popen(
                self.command,
                env={"OMP_NUM_THREADS": str(self.threads)} | os.environ | {WORKER: own},
                pass_fds=[theirs.fileno()],
                # A terminal sends its signals to all processes of a group.
                process_group=0,
            )
        self.is_ready, self.connections, self._received = False, 0, b""

    def lines(self) -> list[str] | None:
        """What it has said; None once it has ended."""
        assert self.control is not None
        try:
            received = self.control.recv(2**16)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        return [line.decode() for line in lines] if received else None

    def give(self, connection: socket.socket) -> bool:
        """Whether it takes one more."""
        assert self.control is not None
        try:
            socket.send_fds(self.control, [GIVEN], [connection.fileno()])
        except OSError:  # it is stopped, or has ended just now
            return False
        self.connections += 1
        return True

    def drain(self) -> None:
        """Lets it say that no more requests shall be sent to it."""
        if self.control is not None:
            with suppress(OSError):
                self.control.send(DRAINING)

    def leave(self) -> None:
        """Lets it end, once it has taken what was given to it."""
        self.is_ready = False
        if self.control is not None:
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)

    def ended(self) -> int:
        """Its exit status, when its side of the control has been closed."""
        assert self._process is not None and self.control is not None
        self.control.close()
        self.control, self.is_ready = None, False
        _metrics_of(self.folder, self.number).unlink(missing_ok=True)
        try:
            return self._process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def terminate(self) -> None:
        """One that has taken nothing yet."""
        if self._process is not None:
            self._process.kill()

    def kill(self) -> None:
        if self.control is not None:
            self.control.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class _Supervisor:
    def __init__(
        self,
        workers: Sequence[_Process],
        listening: socket.socket,
        drain: float = 0.0,
        has_token: bool = False,
        protocol: str = "http",
    ) -> None:
        self._workers, self._listening, self._drain = workers, listening, drain
        self._said = has_token, protocol
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._serving = False
        """Whether all workers have been ready once."""

    def told(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def run(self) -> int:
        with self._selector:
            return self._run()

    def _run(self) -> int:
        # What is wrong with the export, or an option, is said once.
        self._start(self._workers[0])
        while not self._signals:
            status = self._turn()
            if status is not None:
                return status
        ends = time.monotonic() + self._drain
        for worker in self._workers if self._drain else ():
            worker.drain()
        while len(self._signals) < 2 and time.monotonic() < ends:
            self._turn()
        told = len(self._signals)
        self._listening.close()
        deadline = time.monotonic() + LAST_SECONDS
        for worker in self._workers:
            if worker.is_ready:
                worker.leave()
            elif not worker.connections:  # one that leaves already goes on with what it has
                worker.terminate()
        while any(worker.control for worker in self._workers):
            if len(self._signals) > told or time.monotonic() > deadline:
                return 128 + self._signals[-1]
            self._turn()
        return 0

    def _turn(self) -> int | None:
        """Does what there is to do. A worker's exit status, if it has ended before all were ready."""
        if not self._signals:
            for worker in self._workers:
                if worker.due and time.monotonic() >= worker.due:
                    self._start(worker)
        for key, _ in self._selector.select(TICK):
            if key.data is None:
                self._accept()
            elif (lines := key.data.lines()) is None:
                self._selector.unregister(key.fileobj)
                status = key.data.ended()
                if not self._signals:
                    if not self._serving:
                        return status or 1
                    self._replace(key.data, status)
            else:
                for line in lines:
                    self._heard(key.data, *line.split(" ", 1))
        if not self._signals and self._serving:
            self._listen_if(any(worker.is_ready for worker in self._workers))
        return None

    def _start(self, worker: _Process) -> None:
        worker.start()
        worker.due = 0.0
        assert worker.control is not None
        self._selector.register(worker.control, selectors.EVENT_READ, worker)

    def _heard(self, worker: _Process, word: str, rest: str = "") -> None:
        if word == CLOSED:
            worker.connections -= 1
        elif word == LEAVING:
            worker.leave()
        elif word == READY:
            worker.is_ready, worker.pause = True, PAUSE
            if self._serving:
                say(f"worker {worker.number} answers again")
            elif all(of.is_ready for of in self._workers):
                self._serving = True
                listen(self._listening, rest, *self._said)
            elif worker is self._workers[0]:
                for other in self._workers[1:]:
                    self._start(other)

    def _replace(self, worker: _Process, status: int) -> None:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        say(f"worker {worker.number} ended {how}; it is started again in {worker.pause:g} s")
        worker.due = time.monotonic() + worker.pause
        worker.pause = min(2 * worker.pause, LONGEST_PAUSE)

    def _listen_if(self, wanted: bool) -> None:
        """Where no worker is ready, connections wait."""
        is_registered = self._listening in self._selector.get_map()
        if wanted and not is_registered:
            self._selector.register(self._listening, selectors.EVENT_READ)
        elif is_registered and not wanted:
            self._selector.unregister(self._listening)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # the client is gone, or too many files are open
            return
        with connection:
            ready = sorted((of for of in self._workers if of.is_ready), key=lambda of: of.connections)
            any(worker.give(connection) for worker in ready)
