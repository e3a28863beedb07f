"""`logitmix serve --workers N`: connections go to the worker that has the fewest, and none is lost with a worker."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
import uvicorn
from small_models import export_small, small_model
from test_server import ALLOWED, X, head, read_all
from waiting import until

from logitmix.serving import server as server_module
from logitmix.serving import workers as workers_module
from logitmix.serving.live import LiveExport
from logitmix.serving.server import Settings, make_server
from logitmix.serving.tls import Tls
from logitmix.serving.workers import Worker, _Process, _Supervisor, bound

FAKE = r"""
import os, signal, socket, sys, time
from logitmix.serving.workers import Worker
worker = Worker.of_environment()
if sys.argv[1] == "refuses":
    raise SystemExit(2)
worker.tell("ready nothing")
signal.signal(signal.SIGTERM, lambda *_: worker.tell("leaving"))
held = []
while True:
    told, files, _, _ = socket.recv_fds(worker.control, 64, 64)
    if b"d" in told:
        for connection in held:
            connection.sendall(b" drains")
    for file in files:
        held.append(socket.socket(fileno=file))
        held[-1].sendall(f"{worker.number} {os.getpid()} {os.environ['OMP_NUM_THREADS']}".encode())
    if not told:
        break
for connection in held:
    connection.sendall(b" bye")
"""
"""A worker that says who it is to whoever comes, and holds the connection."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small(small_model("mol", X), tmp_path_factory.mktemp("workers") / "served")


def fakes(count: int, folder: Path, how: str = "") -> list[_Process]:
    return [_Process(number, [sys.executable, "-c", FAKE, how], 3, folder) for number in range(count)]


@contextmanager
def supervised(workers: list[_Process], drain: float = 0.0) -> Iterator[tuple[int, _Supervisor, list[int]]]:
    """Port, supervisor and where its exit status will be."""
    statuses: list[int] = []
    with bound("127.0.0.1", 0) as listening, ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.kill)
        listening.setblocking(False)
        supervisor = _Supervisor(workers, listening, drain)
        thread = threading.Thread(target=lambda: statuses.append(supervisor.run()))
        thread.start()
        stack.callback(thread.join, 20)
        stack.callback(lambda: supervisor._signals or supervisor.told(signal.SIGTERM, None))
        until(lambda: supervisor._serving or bool(statuses), 30)
        yield listening.getsockname()[1], supervisor, statuses


def who(connection: socket.socket) -> tuple[int, int]:
    """Number and process of the worker at the other end."""
    number, process, threads = connection.recv(100).split()
    assert threads == b"3"
    return int(number), int(process)


@pytest.mark.long
def test_connections_are_shared_and_a_worker_that_dies_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "PAUSE", 0.1)
    with ExitStack() as stack, supervised(workers := fakes(2, tmp_path)) as (port, supervisor, statuses):

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))

        first = [who(connect()) for _ in range(6)]
        assert sorted(number for number, _ in first) == [0, 0, 0, 1, 1, 1]
        os.kill(dict(first)[1], signal.SIGKILL)
        until(lambda: not workers[1].is_ready)
        assert [who(connect())[0] for _ in range(2)] == [0, 0]
        until(lambda: workers[1].is_ready, 30)
        again = [connect() for _ in range(5)]
        assert [who(connection)[0] for connection in again] == [1] * 5  # as many as the other has
        # One that is told to end takes what was given to it, and is replaced.
        os.kill(dict(first)[0], signal.SIGTERM)
        until(lambda: not workers[0].is_ready)
        until(lambda: workers[0].is_ready, 30)
        last = connect()
        assert who(last)[0] == 0
        again.append(last)
        supervisor.told(signal.SIGTERM, None)
        assert [read_all(connection) for connection in again] == [b" bye"] * 6
    assert statuses == [0]
    said = capfd.readouterr().err.splitlines()
    assert re.fullmatch(rf"logitmix: serving nothing on http://127.0.0.1:{port}", said[0])
    assert said[1:] == [
        "logitmix: worker 1 ended by SIGKILL; it is started again in 0.1 s",
        "logitmix: worker 1 answers again",
        "logitmix: worker 0 ended with status 0; it is started again in 0.1 s",
        "logitmix: worker 0 answers again",
    ]


@pytest.mark.long
def test_what_one_refuses_at_the_start_ends_all(tmp_path: Path) -> None:
    with supervised(fakes(3, tmp_path, "refuses")) as (port, _, statuses):
        assert statuses == [2]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)


@pytest.mark.long
def test_workers_that_shall_end_take_connections_until_a_second_signal(tmp_path: Path) -> None:
    workers = fakes(2, tmp_path)
    with ExitStack() as stack, supervised(workers, drain=60) as (port, supervisor, statuses):

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))

        before = [connect() for _ in range(2)]
        assert sorted(who(of)[0] for of in before) == [0, 1]
        supervisor.told(signal.SIGTERM, None)
        assert [of.recv(100) for of in before] == [b" drains"] * 2
        after = connect()
        assert who(after)[0] in (0, 1) and not statuses
        supervisor.told(signal.SIGTERM, None)
        assert [read_all(of) for of in (*before, after)] == [b" bye"] * 3
    assert statuses == [0]


@contextmanager
def worker_of(
    number: int, folder: Path, metrics: Path, tls: Tls | None = None
) -> Iterator[tuple[socket.socket, uvicorn.Server]]:
    """The supervisor's end of a worker's control, and the worker."""
    ours, theirs = socket.socketpair()
    server = make_server(LiveExport(folder, print), Settings(allowed=ALLOWED, tls=tls), Worker(number, theirs, metrics))
    thread = threading.Thread(target=server.run, args=[[]])
    thread.start()
    with ours, theirs:
        ours.settimeout(10)
        try:
            assert ours.recv(100) == f"ready {X} items of demo, step 12 of run small\n".encode()
            yield ours, server
        finally:
            ours.shutdown(socket.SHUT_WR)
            thread.join(10)
        assert not thread.is_alive()


def given(control: socket.socket) -> socket.socket:
    """The client's end of a connection that the worker is given."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname(), timeout=10)
        connection, _ = listening.accept()
        with connection:
            socket.send_fds(control, [b"."], [connection.fileno()])
    return client


def test_a_worker_answers_what_it_is_given_and_shows_the_metrics_of_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    body = b'{"history": ["id 7"], "k": 3}'
    with worker_of(0, folder, tmp_path) as (control, _), worker_of(1, folder, tmp_path) as (other, _):
        for worker in (control, other, other):
            with given(worker) as client:
                client.sendall(head(len(body), "/retrieve", "Connection: close") + body)
                assert len(json.loads(read_all(client).partition(b"\r\n\r\n")[2])["items"]) == 3
            assert worker.recv(100) == b"closed\n"
        control.send(b"d")
        with given(control) as client:
            client.sendall(b"GET /readyz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            assert b"the server stops" in read_all(client)
        assert control.recv(100) == b"closed\n"
        of_other = tmp_path / "1.prom"
        until(lambda: of_other.exists() and 'path="/retrieve",status="200"} 2.0' in of_other.read_text())
        with given(control) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            text = read_all(client).partition(b"\r\n\r\n")[2].decode()
    for number, count in ((0, "1.0"), (1, "2.0")):
        assert f'logitmix_requests_total{{path="/retrieve",status="200",worker="{number}"}} {count}\n' in text
        assert f'logitmix_export_items{{worker="{number}"}} {X:.1f}\n' in text
    assert text.count("# TYPE logitmix_requests_total counter\n") == 1


def test_a_worker_that_ends_answers_what_is_in_flight(folder: Path, tmp_path: Path) -> None:
    body = b'{"history": ["id 7"], "k": 3}'
    with worker_of(0, folder, tmp_path) as (control, server), given(control) as client:
        client.sendall(head(len(body)) + body[:5])
        time.sleep(0.2)
        server.should_exit = True
        assert control.recv(100) == b"leaving\n"
        with given(control) as last:
            last.sendall(head(len(body)) + body)
            control.shutdown(socket.SHUT_WR)
            client.sendall(body[5:])
            for of in (client, last):
                assert read_all(of).startswith(b"HTTP/1.1 200 ")


def test_a_worker_that_ends_waits_for_what_it_was_given(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LAST_GIVEN_SECONDS", 0.0)
    body = b'{"history": ["id 7"], "k": 3}'
    with worker_of(0, folder, tmp_path) as (control, server):
        server.should_exit = True
        assert control.recv(100) == b"leaving\n"
        # It would have ended by now, but for the end of what it is given.
        time.sleep(0.5)
        with given(control) as last:
            last.sendall(head(len(body)) + body)
            control.shutdown(socket.SHUT_WR)
            assert read_all(last).startswith(b"HTTP/1.1 200 ")


def test_the_command(folder: Path) -> None:
    command = [sys.executable, "-m", "logitmix.trainer", "serve", str(folder), "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            started = re.fullmatch(
                rf"logitmix: serving {X} items of demo, step 12 of run small on (http://127.0.0.1:\d+)\n",
                server.stderr.readline(),
            )
            assert started
            for _ in range(2):
                with urlopen(f"{started[1]}/healthz", timeout=30) as answer:
                    assert json.load(answer)["num_items"] == X
            server.send_signal(signal.SIGTERM)
            assert server.communicate(timeout=60)[1] == "" and server.returncode == 0
        finally:
            server.kill()
