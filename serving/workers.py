"""The processes of `logitmix serve`: this one, or worker processes of uvicorn, which share the files of the export that
they map. The process that starts workers loads no torch."""

import errno
import faulthandler
import ipaddress
import signal
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from logitmix.common.mappings import require
from logitmix.common.messages import say as _print
from logitmix.common.plugins import load_plugins, references
from logitmix.serving.connection import CONNECTIONS, Connection
from logitmix.serving.settings import ServerSettings, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

MOST_WORKERS = 256
KEEP_ALIVE_SECONDS = 30
GRACE_SECONDS = 30
"""Time for requests in flight when the server stops."""
HUNG_SECONDS = 30
"""Time after which a worker that gives no sign of life is replaced."""


def say(line: str) -> None:
    # Where nobody reads the lines any more, the server still answers and takes over new exports.
    with suppress(OSError):
        _print(f"logitmix: {line}")


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound, and does not listen yet.

    Raises:
        ValueError: This is no host or port.
        OSError: The address cannot be taken; the message says why.
    """
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


def serve(directory: Path, host: str, port: int, settings: ServerSettings, workers: int = 1) -> int:
    """Answers requests until SIGTERM or SIGINT, and then those in flight. Returns the exit status.

    Args:
        directory: The serving directory.
        host: Address to listen on.
        port: Port to listen on; any free one when 0.
        settings: How requests are answered.
        workers: Processes that answer.

    Raises:
        ValueError: There is no intact export, or a setting is impossible.
        OSError: The address cannot be listened on.
    """
    require(1 <= workers <= MOST_WORKERS, "--workers", workers, f"from 1 to {MOST_WORKERS}")
    settings = replace(settings, allow_host=(host, *settings.allow_host))
    with bound(host, port) as listening:
        if workers > 1:
            with tempfile.TemporaryDirectory(prefix="logitmix-") as folder:
                supervisor = Workers(directory, settings, workers, listening, Path(folder))
                supervisor.run()
                return supervisor.status
        from logitmix.serving.server import load_app

        app = load_app(directory, settings, say)
        server = uvicorn.Server(make_config(app, settings))
        # When it has stopped, uvicorn raises again the signal that stopped it, which then changes nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        listen(listening, app.state.export.retriever.described, settings)
        server.run([listening])
    return 0


def make_config(app: "FastAPI | partial[FastAPI]", settings: Settings, workers: int = 1) -> uvicorn.Config:
    """Returns how uvicorn serves an application.

    Args:
        app: The application; of several workers, what each of them makes it with.
        settings: How requests are answered, among them the files for HTTPS.
        workers: Processes that answer.
    """
    return uvicorn.Config(
        app,
        factory=workers > 1,
        workers=workers,
        timeout_worker_healthcheck=HUNG_SECONDS,
        ssl_context_factory=settings.tls.load if settings.tls else None,
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def listen(listening: socket.socket, described: str, settings: Settings) -> None:
    """Lets a socket listen, and says what is served there.

    Args:
        listening: A socket that is bound.
        described: What is served, in words.
        settings: How requests are answered: who may ask is said where everybody may.
    """
    listening.listen(CONNECTIONS)
    address, port = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    if not settings.allowed.token and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        say(f"whoever reaches {shown} can use this server, as there is no --token-file")
    say(f"serving {described} on {'https' if settings.tls else 'http'}://{shown}:{port}")


class Workers(Multiprocess):
    """uvicorn's worker processes. The first loads the export before the others start, so what is wrong is said once."""

    def __init__(
        self, directory: Path, settings: ServerSettings, count: int, listening: socket.socket, folder: Path
    ) -> None:
        """Makes the worker processes of a server. In `folder`, they leave their metrics."""
        make = partial(_worker, directory, settings, folder, references())
        super().__init__(make_config(make, settings, count), [listening])
        self._directory, self._settings, self._folder = directory, settings, folder
        self.status = 0
        """The exit status: that of a worker that ended before all were ready, or 0."""

    def init_processes(self) -> None:
        count = self.processes_num
        for self.processes_num in (1, count - 1):
            super().init_processes()
            if not all(map(self._is_ready, self.processes)):
                self.should_exit.set()
                return
        self.processes_num = count
        listen(self.sockets[0], f"{self._directory} with {count} workers", self._settings)

    def _is_ready(self, process: Process) -> bool:
        """Waits until a worker has loaded the export; False if it has ended, or all shall end."""
        while not process.wait_until_ready(1.0):
            self.handle_signals()
            self.status = process.exitcode or 0
            if self.should_exit.is_set() or process.exitcode is not None:
                return False
        return True

    def terminate_all(self) -> None:
        # Otherwise connections would wait here for workers that take no more.
        self.sockets[0].close()
        super().terminate_all()

    def keep_subprocess_alive(self) -> None:
        before = list(self.processes)
        super().keep_subprocess_alive()
        for ended, started in zip(before, self.processes, strict=True):
            if ended is not started:
                say(f"worker {ended.pid} ended with status {ended.exitcode}; worker {started.pid} takes its place")
                (self._folder / f"{ended.pid}.prom").unlink(missing_ok=True)


def _worker(directory: Path, settings: ServerSettings, folder: Path, plugins: Sequence[str]) -> "FastAPI":
    """Returns the application of a worker. If there is none, the process ends with a line that says why."""
    faulthandler.enable()
    try:
        load_plugins(plugins)
        from logitmix.serving.server import load_app

        return load_app(directory, settings, say, folder)
    except (OSError, ValueError) as error:
        say(str(error))
        raise SystemExit(1) from None
