"""`logitmix serve`: batches, errors, limits, reloads, and the command."""

import asyncio
import base64
import ctypes
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import uvicorn
from asking import answered
from pydantic import TypeAdapter
from small_models import every_feature, export_small, in_order, random_histories, raw_ids, small_model
from waiting import until

from logitmix.common.files import publish
from logitmix.common.storage import alone, path_of
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.serving import batcher as batcher_module
from logitmix.serving import connection as connection_module
from logitmix.serving import live as live_module
from logitmix.serving import openapi
from logitmix.serving import server as server_module
from logitmix.serving import workers as workers_module
from logitmix.serving.batcher import BATCH, Answered, Batcher, ClientGone, QueueFull
from logitmix.serving.body import MAX_K
from logitmix.serving.body import parse as parse_body
from logitmix.serving.connection import MAX_BODY, json_response
from logitmix.serving.guards import Allowed, read_token
from logitmix.serving.live import LiveExport, search
from logitmix.serving.mapped import MappedFiles
from logitmix.serving.metrics import PATHS
from logitmix.serving.request import Options, Question, Request
from logitmix.serving.retriever import Answer, Retriever, Row
from logitmix.serving.server import make_app
from logitmix.serving.settings import Settings
from logitmix.serving.tls import Tls
from logitmix.serving.workers import bound, make_config, say
from logitmix.trainer import cli
from logitmix.trainer.export.columns import column_of

X = 60
ALLOWED = Allowed(hosts=("here",))
ROWS = list[Row]


@dataclass
class Running:
    port: int
    export: LiveExport
    said: list[str]
    server: uvicorn.Server

    def ask(self, body: bytes | dict[str, Any], method: str = "POST", path: str = "/retrieve") -> tuple[int, Any]:
        """Status and content of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, *parts: bytes) -> bytes:
        """All that comes back before the server closes the connection."""
        with self.connect() as client:
            for part in parts:
                client.sendall(part)
            return read_all(client)

    def get(self, path: str) -> tuple[str, Message]:
        """Text and headers of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read().decode(), response.headers

    def status(self, path: str, headers: dict[str, str] | None = None) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", path, headers=headers or {})
            return connection.getresponse().status

    def metric(self, name: str) -> float:
        lines = self.get("/metrics")[0].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextmanager
def running(
    folder: Path | LiveExport,
    allowed: Allowed = ALLOWED,
    deltas: Path | None = None,
    shadow: LiveExport | None = None,
    tls: Tls | None = None,
    **others: Any,
) -> Iterator[Running]:
    said: list[str] = []
    export = LiveExport(folder, said.append, deltas=deltas) if isinstance(folder, Path) else folder
    settings = Settings(**others)
    vars(settings).update(allowed=allowed, tls=tls)  # what it makes of the names of files
    with bound("127.0.0.1", 0) as listening:
        server = uvicorn.Server(make_config(make_app(export, settings, shadow), settings))
        thread = threading.Thread(target=server.run, args=[[listening]])
        thread.start()
        try:
            until(lambda: server.started)
            yield Running(listening.getsockname()[1], export, said, server)
        finally:
            server.should_exit = True
            thread.join(10)
    assert not thread.is_alive()


def read_all(client: socket.socket) -> bytes:
    received = b""
    try:
        while part := client.recv(2**16):
            received += part
    except ConnectionResetError:
        pass
    return received


def head(length: int | str, path: str = "/retrieve", *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {length}", *lines, "", ""]).encode()


def assert_alike(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Up to FP32's rounding, which depends on a batch's shape: scores are sums of terms of about 20."""
    assert [(row["rank"], row["id"], row["title"]) for row in found] == [
        (row["rank"], row["id"], row["title"]) for row in expected
    ]
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in expected], rel=0, abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small(small_model("mol", X, schema=every_feature(X)), tmp_path_factory.mktemp("server") / "served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as found:
        yield found


@pytest.fixture
def silent(server: Running, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[Running]:
    """The server, which must say nothing and still answer at the end."""
    yield server
    assert server.ask({"history": ["id 7"], "k": 2})[0] == 200
    assert (server.said, caplog.records, capfd.readouterr()) == ([], [], ("", ""))


def question(request: Request, *arguments: Any, **options: Any) -> Question:
    return Question(request, Options(*arguments, **options))


def questions() -> list[Question]:
    """More kinds than one, and more of the first than a batch has room for."""
    ids = raw_ids(X)
    histories = [[ids[item] for item in of] for of in random_histories(X, [1 + place % 12 for place in range(50)])]
    found = [question({"history": history}, 1 + place % 20) for place, history in enumerate(histories)]
    found += [question({"history": history}, 10, exclude_history=False, stage1=15) for history in histories[:5]]
    found += [question({"history": [*history, "new"]}, 5, "unknown") for history in histories[:5]]
    found += [question({"history": history, "user": {"age": 50, "country": "3"}}) for history in histories[:5]]
    return [*found, question({"user": {"country": "2"}}), question({"history": ids[:3], "allowed": ids[:9]}, 20)]


def one_by_one(retriever: Retriever, of: Question) -> ROWS:
    return answered(retriever, [of.request], of.options)[0]


@asynccontextmanager
async def batching(retriever: Any = None, wait: float = 0.01) -> AsyncIterator[tuple[Batcher, list[int]]]:
    """A batcher at work, and the sizes of its batches."""
    sizes: list[int] = []
    batcher = Batcher(lambda: retriever, wait, sizes.append)
    task = asyncio.create_task(batcher.run())
    yield batcher, sizes
    task.cancel()
    await asyncio.wait([task])


async def at_once(batcher: Batcher, of: Sequence[Question], clients: Sequence[Any] = ()) -> list[Any]:
    """The answers to questions, or exceptions. `clients`: for each question, what says whether its client is gone."""
    clients = clients or [bool] * len(of)
    return await asyncio.gather(*map(batcher.ask, of, clients), return_exceptions=True)


def in_batches(retriever: Any, of: Sequence[Question]) -> tuple[list[Any], list[int]]:
    """Answers to questions asked at once, and the sizes of the batches."""

    async def asked() -> tuple[list[Any], list[int]]:
        async with batching(retriever) as (batcher, sizes):
            return await at_once(batcher, of), sizes

    return asyncio.run(asked())


class NothingFound:
    """A retriever whose answers have no items."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        """The k's of each batch."""

    def answer(self, asked: Sequence[Question]) -> list[Answer]:
        self.batches.append([of.options.k for of in asked])
        return [{"items": []} for _ in asked]


def test_batches_answer_like_the_retriever(server: Running) -> None:
    asked = questions()
    found, sizes = in_batches(server.export.retriever, asked)
    assert (sum(sizes), max(sizes)) == (len(asked), BATCH)
    for (answer, _), of in zip(found, asked, strict=True):
        assert_alike(answer["items"], one_by_one(server.export.retriever, of))


def test_a_number_too_large_for_stage_1_fails_alone(tmp_path: Path) -> None:
    age = Feature("age", "user", "number", deviation=0.1)
    schema = Schema((Feature("item", "item", "id", "item"), age), (Table("item", X + 1),))
    retriever = Retriever.load(export_small(small_model("mol", X, schema=schema), tmp_path / "served"))
    good = question({"history": raw_ids(3)}, stage1=20)
    bad = question({"history": raw_ids(3), "user": {"age": 3e38}}, stage1=20)
    found, sizes = in_batches(retriever, [good, bad, good])
    assert sizes == [3]
    for answer, _ in (found[0], found[2]):
        assert_alike(answer["items"], one_by_one(retriever, good))
    problem = {"error": "the request: a number among its features is too large"}
    assert found[1].answer == retriever.recommend([good.request, bad.request], 10, stage1=20)[1] == problem


def test_an_error_of_ours_ends_its_batch_and_no_more(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> ROWS:
        monkeypatch.undo()
        raise RuntimeError("broken")

    async def asked() -> None:
        async with batching(server.export.retriever) as (batcher, _):
            with pytest.raises(RuntimeError, match="broken"):
                await batcher.ask(questions()[0])
            assert (await batcher.ask(questions()[0])).answer["items"]

    monkeypatch.setattr(Retriever, "answer", broken)
    asyncio.run(asked())


def test_one_client_does_not_wait_and_several_wait_for_each_other() -> None:
    """A batch begins when it is as large as the last one, or after the wait."""

    async def asked() -> list[tuple[int, bool]]:
        seen = []
        async with batching(NothingFound(), wait=1.0) as (batcher, sizes):
            for count in (1, 1, 3, 3, 2, 2, 1, 1):
                start = time.monotonic()
                await at_once(batcher, [question({})] * count)
                seen.append((sizes[-1], time.monotonic() - start >= 1.0))
        assert len(sizes) == len(seen)
        return seen

    waited = [(1, False), (1, False), (3, False), (3, False), (2, True), (2, False), (1, True), (1, False)]
    assert asyncio.run(asked()) == waited


def test_a_batch_does_not_hold_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "ROWS", 10)
    retriever = NothingFound()
    in_batches(retriever, [question({}, k) for k in (4, 4, 4, 20, 1)])
    assert retriever.batches == [[4, 4], [4], [20], [1]]


def test_stage_1_keeps_a_hundredth_whatever_other_requests_of_the_batch_ask_for() -> None:
    for k, kept in ((10, [10_000, 10_000, 15_000, 100_000]), (1024, [100_000] * 4), (200_000, [200_000] * 4)):
        assert [Options(k).kept(X) for X in (10, 1_000_000, 1_500_000, 10**9)] == kept
        assert Options(k, stage1=k + 1).kept(10**9) == k + 1
    kept_by: dict[object, set[int]] = {}
    for k in range(1, MAX_K + 1):
        kept_by.setdefault(question({}, k).group, set()).add(Options(k).kept(1_500_000))
    assert all(len(kept) == 1 for kept in kept_by.values())


def test_a_full_queue_says_so_and_the_rest_goes_on(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin, compute = threading.Event(), threading.Event(), Retriever.answer

    def waiting(*arguments: Any) -> Any:
        begun.set()
        assert begin.wait(30)
        return compute(*arguments)

    monkeypatch.setattr(batcher_module, "QUEUE", 2)
    monkeypatch.setattr(Retriever, "answer", waiting)
    with ThreadPoolExecutor(3) as clients:
        found = []
        for place in range(3):
            found.append(clients.submit(silent.ask, {"history": ["id 7"]}))
            # The first one is alone in its batch, and the others wait for it.
            assert begun.wait(10)
            until(lambda place=place: silent.metric("logitmix_queue_requests") == place)
        response = silent.send(head(2), b"{}", head(0, "/nothing", "Connection: close"))
        assert response.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 1\r\n" in response
        # The event loop is free while the model computes.
        assert silent.ask(b"", "GET", "/healthz")[0] == 200
        begin.set()
        assert [of.result()[0] for of in found] == [200] * 3


def test_what_is_new_has_the_boost_that_the_server_says_where_the_request_does_not() -> None:
    for said, boost in ((b"{}", 2.0), (b'{"boost_new": 0}', 0.0), (b'{"boost_new": -1}', -1.0)):
        assert parse_body(said, {"boost_new": 2.0}).options.boost_new == boost
    with pytest.raises(ValueError, match="--boost-new is inf; it must be a finite number"):
        Settings(boost_new=float("inf"))


def test_stage_1_keeps_what_the_server_says_where_the_request_does_not() -> None:
    bodies = {b"{}": 40, b'{"k": 50}': 50, b'{"stage1": 20}': 20}
    assert [parse_body(body, {"stage1": 40}).options.stage1 for body in bodies] == list(bodies.values())
    assert parse_body(b"{}").options.stage1 is None


def test_an_answer_says_what_answered(server: Running) -> None:
    retriever = server.export.retriever
    known = {"run": "small", "step": 12, "dataset": "demo", "digest": retriever.digest, "delta": 0}
    known["logitmix"] = version("logitmix")
    status, found = server.ask({"history": ["id 7", "id 14"], "k": 3, "user": None})
    items = found.pop("items")
    assert (status, found) == (200, known)
    assert_alike(items, retriever.rows(["id 7", "id 14"], 3))
    about = {"status": "ok", **known, "num_items": X, "shadow": None, "attributes": None, "refused": None}
    assert server.ask(b"", "GET", "/healthz") == (200, about)
    assert server.ask(b"", "GET", "/readyz") == (200, {"status": "ready"})
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(known.items()))
    assert server.metric(f"logitmix_export_info{{{labels}}}") == 1


NESTED = b'{"user": {"age": ' + b"[" * 900 + b"]" * 900 + b"}}"
MALFORMED = [
    b"",
    b"{",
    b"{} {}",
    b"\xff\xfe\x00",
    b'{"history": ["\xff"]}',
    b"[" * 100_000,
    NESTED,
    b'{"user": {"age": Infinity}}',
    b'{"user": {"age": 3e38}}',
    b'{"k": 1' + b"0" * 5000 + b"}",
    b'{"history": "id 7"}',
    b'{"history": [1.5]}',
    b'{"history": ["id 7", "\\udc00"], "unknown": "refuse"}',
    b'{"history": ["id 7"], "histroy": []}',
    b'{"history": ["id 7"], "' + b"a\\n" * 10_000 + b'": []}',
    b'{"history": ["id 7"], "k": 0}',
    b'{"history": ["id 7"], "stage1": 9}',
    b'{"history": ["id 7"], "timestamps": [1.5]}',
    b'{"history": ["id 7"], "events": [{"action": [1]}]}',
    b'{"history": ["id 7"], "user": {"country": ["' + b"a" * 10_000 + b'"]}}',
    b'{"history": ["id 7"], "blocked": [{}]}',
    json.dumps({"history": ["id 7"] * 10_001}).encode(),
    json.dumps({"history": [{}] * 200_000}).encode(),
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: body[:60].decode(errors="replace"))
def test_what_a_client_gets_wrong_is_said_in_one_line(silent: Running, body: bytes) -> None:
    status, found = silent.ask(body)
    assert status == 400, found
    assert list(found) == ["error"] and re.fullmatch(r"[^\n\r]{5,500}", found["error"])
    assert "request 0" not in found["error"] and "sys." not in found["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/retrieve", 405),
        ("BREW", "/items", 405),
        ("GET", "/nothing", 404),
        ("GET", "/%ff%00%0a..%2f..%2fetc/passwd", 404),
        ("GET", "/items?limit=0", 400),
        ("GET", "/items?limit=" + "9" * 5000, 400),
        ("GET", "/items?query=" + "a" * 101, 400),
        ("GET", "/items?query=%ff%fe", 200),
        ("GET", "/items?query=(%5B.*", 200),
    ],
)
def test_methods_paths_and_queries(silent: Running, method: str, path: str, status: int) -> None:
    found = silent.ask(b"", method, path)
    assert found[0] == status
    assert status == 200 or (list(found[1]) == ["error"] and "\n" not in found[1]["error"])


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xff HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nHost: there\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nlong: " + b"a" * 10**6 + b"\r\n\r\n",
        head("0x10"),
        head(5, "/retrieve", "Content-Length: 6"),
        head(5, "/retrieve", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        b"POST /retrieve HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
        b"POST /retrieve HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n",
    ],
)
def test_what_is_not_http_is_refused(silent: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection_module, "PATIENCE_SECONDS", 0.2)
    received = silent.send(sent)
    assert received == b"" or re.match(rb"HTTP/1.1 4\d\d ", received), received
    text = received.partition(b"\r\n\r\n")[2]
    assert text == b"" or b"Invalid HTTP request received." in text or list(json.loads(text)) == ["error"]


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which the memory of this process, clients and server, rises meanwhile."""

    def kib(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    work()
    return (kib("VmHWM") - before) * 1024


SIZE = 40 * 2**20


@pytest.mark.parametrize(
    ("first", "part", "last"),
    [
        (head(SIZE), b" " * 2**16, b""),
        (b"POST /retrieve HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n",
         b"10000\r\n" + b" " * 2**16 + b"\r\n", b"0\r\n\r\n"),
    ],
    ids=["stated", "chunked"],
)  # fmt: skip
def test_a_huge_body_is_not_held(silent: Running, first: bytes, part: bytes, last: bytes) -> None:
    received = b""

    def send() -> None:
        nonlocal received
        received = silent.send(first, *[part] * (SIZE // 2**16), last)

    assert peak_growth(send) < SIZE / 4
    assert received.startswith(b"HTTP/1.1 413 ") and b'{"error": "the body is larger than 1,048,576 bytes"}' in received


def test_the_limit_of_a_body_is_exact(silent: Running) -> None:
    body = b'{"history": ["id 7"]}'
    assert silent.ask(body + b" " * (MAX_BODY - len(body)))[0] == 200
    assert silent.ask(body + b" " * (MAX_BODY - len(body) + 1))[0] == 413


def test_a_body_without_an_end_is_cut_off(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "DISCARDED", 2 * MAX_BODY)
    with silent.connect() as client:
        client.sendall(head(10**12))
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                client.sendall(b" " * 2**16)


def test_slow_clients_are_cut_off(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "PATIENCE_SECONDS", 0.3)
    start = time.monotonic()
    received = silent.send(head(100), b"{")
    assert 0.2 < time.monotonic() - start < 5
    assert (
        received.startswith(b"HTTP/1.1 408 ") and b'{"error": "the body did not arrive within 0.3 seconds"}' in received
    )
    assert silent.send(b"POST /retr") == silent.send() == b""
    # With a byte now and then.
    with silent.connect() as client:
        start = time.monotonic()
        with pytest.raises(ConnectionError):
            for byte in b"GET /" + b"a" * 1000:
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        assert 0.2 < time.monotonic() - start < 5


def test_who_goes_on_after_the_answer_is_cut_off(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a wrong path does not wait for the body."""
    monkeypatch.setattr(connection_module, "PATIENCE_SECONDS", 0.3)
    with silent.connect() as client:
        client.sendall(head(10**9, "/nothing"))
        assert client.recv(2**16).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b" " * 100)
                time.sleep(0.02)


def test_a_connection_that_is_in_use_stays(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "PATIENCE_SECONDS", 0.2)
    with closing(http.client.HTTPConnection("127.0.0.1", silent.port, timeout=10)) as connection:
        connection.connect()
        socket_of_it = connection.sock
        for _ in range(3):
            connection.request("POST", "/retrieve", b'{"history": ["id 7"]}')
            assert connection.getresponse().read()
            time.sleep(0.3)
        assert connection.sock is socket_of_it


def test_too_many_connections_are_refused(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: silent.metric("process_open_fds") > 0)
    monkeypatch.setattr(connection_module, "CONNECTIONS", 2)
    monkeypatch.setattr(connection_module, "SPARE", 1)
    held = [silent.connect() for _ in range(3)]
    try:
        assert silent.send() == b""
        held.pop().close()
        # The spare connection is for those who watch the server.
        until(lambda: b"\r\nretry-after: 1\r\n" in silent.send(head(2, "/retrieve", "Connection: close"), b"{}"))
        until(lambda: silent.send(GET_HEALTH).startswith(b"HTTP/1.1 200 "))
    finally:
        for client in held:
            client.close()
    until(lambda: silent.send(head(0, "/nothing", "Connection: close")).startswith(b"HTTP/1.1 404"))


GET_HEALTH = b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


def asked_with(server: Running, path: str, *lines: str) -> tuple[int, bytes]:
    """Status and whole answer to a request with these headers and an empty object as its body."""
    received = server.send(
        "\r\n".join([f"POST {path} HTTP/1.1", "Content-Length: 2", "Connection: close", *lines, "", "{}"]).encode()
    )
    return int(received.split(b" ", 2)[1]), received


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: stranger.example"], 421),
        (["Host: 127.0.0.1:99"], 200),
        (["Host: [::1]:8080"], 200),
        (["Host: LOCALHOST"], 200),
        (["Host: here", "Origin: http://here"], 200),
        (["Host: here", "Origin: http://stranger.example"], 403),
        (["Host: here", "Origin: http://here:81"], 403),
        (["Host: here", "Origin: null"], 403),
        (["Host: here", "Sec-Fetch-Site: cross-site"], 403),
    ],
)
def test_other_sites_pages_may_not_ask(silent: Running, lines: list[str], status: int) -> None:
    """By a name of their own that leads here, or by the address."""
    found, received = asked_with(silent, "/retrieve", *lines)
    assert found == status
    assert status == 200 or list(json.loads(received.partition(b"\r\n\r\n")[2])) == ["error"]


def test_hosts_and_origins_can_be_allowed(folder: Path) -> None:
    shop = "https://shop.example"
    with running(folder, Allowed(("api.shop.example",), (shop,), TOKEN)) as server:
        lines = ["Host: api.shop.example", f"Origin: {shop}"]
        status, received = asked_with(server, "/retrieve", *lines, f"Authorization: Bearer {TOKEN}")
        assert status == 200 and f"access-control-allow-origin: {shop}".encode() in received
        # What a browser asks first, without the token.
        asks = "Access-Control-Request-Method: POST\r\n"
        asks += "Access-Control-Request-Headers: authorization, content-type"
        received = server.send(
            "\r\n".join(["OPTIONS /retrieve HTTP/1.1", *lines, asks, "Connection: close", "", ""]).encode()
        )
        assert received.startswith(b"HTTP/1.1 200 ")
        assert asked_with(server, "/retrieve", "Host: here")[0] == 421
        assert asked_with(server, "/retrieve", lines[0], "Origin: http://stranger.example")[0] == 403


TOKEN = "a" * 8 + "-." + "9" * 8


def test_a_token_lets_in_who_has_it(folder: Path) -> None:
    with running(folder, Allowed(("here",), token=TOKEN)) as server:
        for given in (
            "",
            f"Authorization: Bearer {TOKEN[1:]}",
            f"Authorization: Basic {TOKEN}",
            "Authorization: Bearer",
        ):
            status, received = asked_with(server, "/retrieve", "Host: here", *filter(None, [given]))
            assert status == 401 and b"www-authenticate: Bearer\r\n" in received
        for given in (f"Authorization: Bearer {TOKEN}", f"authorization: bearer  {TOKEN} "):
            assert asked_with(server, "/retrieve", "Host: here", given)[0] == 200
        assert server.status("/static/page.js") == 200
        for path, methods in server.ask(b"", "GET", "/openapi.json")[1]["paths"].items():
            for method, of in methods.items():
                is_closed = of.get("security") == [{"token": []}]
                assert is_closed == (path not in ("/", "/docs", "/openapi.json", "/healthz", "/readyz"))
                with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
                    connection.request(method.upper(), path)
                    assert (connection.getresponse().status == 401) == is_closed, path
        assert server.status("/metrics", {"Authorization": f"Bearer {TOKEN}"}) == 200
    assert TOKEN not in repr(Allowed(token=TOKEN))


@pytest.mark.parametrize(
    ("mode", "owned", "warned"),
    [(0o600, True, False), (0o640, True, True), (0o440, False, False), (0o444, False, True)],
)
def test_a_token_that_others_may_read_is_warned_of(
    mode: int, owned: bool, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In a volume of Kubernetes, the file is root's, and the group is that of the server."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    monkeypatch.setattr("os.geteuid", lambda: file.stat().st_uid + (not owned))
    monkeypatch.setattr(workers_module, "serve", lambda *_: 0)
    cli.main(["serve", str(tmp_path), "--token-file", str(file)])
    line = f"logitmix: --token-file {file} may be read by other users of this machine (mode {mode:04o})"
    assert capsys.readouterr().err == warned * f"{line}; better: chmod go= {file}\n"


def test_tokens_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for content in (None, "", "two words of some length", "ÿ" * 20, f"{TOKEN}\n{TOKEN}"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ValueError, match=r"^--token-file \S+ (must|cannot)"):
            read_token(file)
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN


def test_a_bad_chunk_after_the_answer_ends_the_connection(silent: Running) -> None:
    chunked = b"POST /nothing HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    with silent.connect() as client:
        client.sendall(chunked + b"2\r\n{}\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += client.recv(2**16)
        assert received.startswith(b"HTTP/1.1 404 ")
        client.sendall(b"no number\r\n")
        assert read_all(client) == b""


def require_cut_off(
    server: Running, client: socket.socket, metrics: Callable[[], str], monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """Asks for many pages at once, and reads nothing. They are made one by one, as the client reads them."""
    monkeypatch.setattr(connection_module, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(connection_module, "READ_RATE", 2**30)

    def pages() -> int:
        return sum(int(float(of)) for of in re.findall(r'requests_total{path="/",.*} (.*)', metrics()))

    before = pages()
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * asked)
    until(lambda: bool(server.server.server_state.connections))
    until(lambda: not server.server.server_state.connections)
    assert 0 < pages() - before < asked


def test_who_does_not_read_is_cut_off(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of 20 pages, which are less than asyncio takes before it says that a client is slow."""
    (listening,) = silent.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for asked in (20, 4000):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(10)
            client.connect(("127.0.0.1", silent.port))
            require_cut_off(silent, client, lambda: silent.get("/metrics")[0], monkeypatch, asked)


def test_answers_that_nobody_reads_are_bounded(silent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNREAD", 1000)
    asked = {"history": ["id 7"], "k": X}
    assert silent.ask(asked) == (503, {"error": "too many answers wait to be read; try again later"})
    assert silent.ask({**asked, "k": 2})[0] == 200


def test_who_is_gone_is_not_answered_and_makes_room_in_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "QUEUE", 2)
    retriever = NothingFound()

    async def asked() -> list[Any]:
        async with batching(retriever) as (batcher, _):
            return await at_once(batcher, [question({}, k) for k in range(1, 5)], [bool, lambda: True, bool, bool])

    assert [type(of) for of in asyncio.run(asked())] == [Answered, ClientGone, Answered, QueueFull]
    assert retriever.batches == [[1, 3]]


def test_files_that_are_written_to_while_they_are_served(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page behind the end of a mapped file ends a process: so it must not be touched."""
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    served = shutil.copytree(folder, tmp_path / "served")
    with running(served) as server:
        for file in (served / "items-00000-of-00001.safetensors", served / "ids.safetensors"):
            content, said = file.read_bytes(), f"{file} was written to while it was in use, and is not used any more"
            server.said.clear()
            file.write_bytes(b"")
            for method, path in (
                ("POST", "/retrieve"),
                ("GET", "/items?query=7"),
                ("GET", "/readyz"),
            ):
                status, found = server.ask({"history": ["id 7"]}, method, path)
                assert status == 503 and found["error"].startswith(said)
            assert server.ask(b"", "GET", "/healthz")[0] == 200
            until(lambda: bool(server.said))
            assert [line.startswith(said) for line in server.said] == [True]
            file.write_bytes(content)
            again = Path(shutil.copytree(folder, tmp_path / "again"))
            publish(again, served)
            until(lambda: server.ask({"history": ["id 7"]})[0] == 200)
        # Another file at the path of a mapped one does no harm.
        file.with_suffix(".new").write_bytes(b"")
        file.with_suffix(".new").rename(file)
        assert server.ask({"history": ["id 7"]})[0] == 200


def test_clients_that_leave_are_not_missed(silent: Running) -> None:
    whole = head(21) + b'{"history": ["id 7"]}'
    for sent in (whole[:20], whole[:-5], whole, whole * 3):
        client = silent.connect()
        client.sendall(sent)
        # A reset, and not just an end.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    time.sleep(0.1)


def test_texts_that_utf_8_cannot_hold_are_sent_as_escapes() -> None:
    assert json.loads(bytes(json_response({"id": "\ud800"}).body)) == {"id": "\ud800"}


def test_scores_that_json_cannot_hold_are_an_error_of_their_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = Retriever.load(export_small(small_model("dot", 20), tmp_path / "served"))
    scored, infinite = Retriever._rows, float("inf")
    monkeypatch.setattr(
        Retriever, "_rows", lambda *given: [[{**row, "score": infinite} for row in of] for of in scored(*given)]
    )
    problem = "the request's scores are not finite: a number among its features is too large"
    assert retriever.recommend([{"history": ["id 7"]}]) == [{"error": problem}]


def searched(ids: list[str], titles: list[str] | None, *words: Any, **columns: list[Any]) -> list[str]:
    """The ids of what a search finds."""
    made = {name: column_of(name, pa.array(values)) for name, values in columns.items()}
    retriever: Any = SimpleNamespace(
        raw_ids=in_order(ids),
        num_items=len(ids),
        titles=in_order(titles) if titles else None,
        files=MappedFiles(),
        filters=SimpleNamespace(columns=made),
        kinds={},
        values=lambda item: {},
    )
    return [row["id"] for row in search(retriever, *words)["items"]]


def test_items_are_searched_by_words_and_the_most_popular_come_first(
    silent: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_WINDOW", 2)
    titles, actions = ["red train", "Red 4", "blue", "the red", "blue"], [2, 9, None, 9, 1]
    for query, limit, ids in (
        ("red", 9, "241"),
        ("RED", 2, "24"),
        ("train red", 9, "1"),
        ("blue", 9, "53"),
        ("", 3, "241"),
        ("", 9, "24153"),
        ("4", 9, "42"),  # the very id, though it is second
        ("green", 9, ""),
    ):
        assert "".join(searched([*"12345"], titles, query, limit, actions=actions)) == ids, query
    assert "".join(searched([*"123"], ["a", "a", "a"], "a", 9, actions=["x", "y", "z"])) == "123"
    item = {"id": "id 49", "title": "«id 49»", "columns": silent.export.retriever.values(7)}
    kinds = silent.export.retriever.kinds
    assert silent.ask(b"", "GET", "/items?query=id%2049&limit=2") == (
        200,
        {"items": [item], "more": False, "columns": kinds},
    )
    monkeypatch.setattr(live_module, "SEARCH_SECONDS", 0.0)
    assert silent.ask(b"", "GET", "/items?query=7")[1] == {"items": [], "more": True, "columns": kinds}


def test_pages_need_nothing_else(server: Running) -> None:
    for path in ("/", "/docs"):
        page, headers = server.get(path)
        policy = headers["Content-Security-Policy"]
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self';" in policy
        for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL):
            assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
        loaded = re.findall(r'(?:src|href)="(static/[^"]*)"', page)
        assert len(loaded) == 2 and all(server.status(f"/{file}") == 200 for file in loaded)
        # No address but its own.
        assert re.findall(r"https?:|//\w|@import", page) == []
    # Nothing from data becomes markup.
    script, _ = server.get("/static/page.js")
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script) == []


def test_openapi_describes_all_paths_entries_and_answers(server: Running) -> None:
    found, operations = server.ask(b"", "GET", "/openapi.json")[1], list[Any]()
    assert sorted(found["paths"]) == sorted(PATHS)
    for methods in found["paths"].values():
        operations += methods.values()
    assert all(of["summary"] and of["description"] and [*of["responses"]] == ["200", "default"] for of in operations)
    assert len({of["operationId"] for of in operations}) == len(PATHS)
    assert found["components"]["schemas"].keys() >= {"Body", "Answer", "Row", "Why", "Error"}
    for schema in found["components"]["schemas"].values():
        assert all(each["description"] for each in schema["properties"].values())
    for request in ({"history": ["id 7"], "explain": True}, {"user": {"age": 7}, "columns": True}):
        answer = json.dumps(server.ask(request)[1])
        TypeAdapter(openapi.Answer).validate_json(answer, strict=True, extra="forbid")


def test_metrics(folder: Path) -> None:
    with running(folder) as server:
        server.ask({"history": ["id 7"]})
        server.ask({"history": ["id 7"]})
        server.ask(b"{")
        server.ask(b"", "GET", "/nothing")
        assert server.metric('logitmix_requests_total{path="/retrieve",status="200"}') == 2
        assert server.metric('logitmix_requests_total{path="/retrieve",status="400"}') == 1
        assert server.metric('logitmix_requests_total{path="other",status="404"}') == 1
        assert server.metric("logitmix_retrieve_seconds_count") == 3
        assert server.metric("logitmix_batch_requests_sum") == 2
        assert server.metric("logitmix_export_step") == 12
        assert server.metric("process_resident_memory_bytes") > 0


def replaced(folder: Path, seed: int) -> Retriever:
    """Publishes another model in a folder."""
    made = export_small(small_model("mol", X, seed=seed), folder.with_name(f"seed {seed}"))
    kept = shutil.copytree(made, folder.with_name(f"kept {seed}"))
    publish(made, folder)
    return Retriever.load(kept)


def test_a_new_export_takes_over_without_a_lost_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    folder = export_small(small_model("mol", X, seed=0), tmp_path / "served")
    asked = question({"history": ["id 7", "id 14", "id 70"]}, 5)
    scores = [[row["score"] for row in one_by_one(Retriever.load(folder), asked)]]
    done, seen = threading.Event(), []

    def client(server: Running) -> None:
        while not done.is_set():
            status, found = server.ask({**asked.request, "k": asked.options.k})
            seen.append((status, [row["score"] for row in found["items"]]))

    with running(folder) as server, ThreadPoolExecutor(4) as clients:
        tasks = [clients.submit(client, server) for _ in range(4)]
        try:
            for seed in (1, 2):
                scores.append([row["score"] for row in one_by_one(replaced(folder, seed), asked)])
                until(lambda: seen[-1:] and seen[-1][1] == pytest.approx(scores[-1], rel=1e-5))
        finally:
            done.set()
        for task in tasks:
            task.result()
        assert server.metric("logitmix_reloads_total") == 2
    assert {status for status, _ in seen} == {200}
    # Each answer comes from one of the exports.
    of = [next(n for n, these in enumerate(scores) if found == pytest.approx(these, rel=1e-5)) for _, found in seen]
    assert set(of) == {0, 1, 2}
    assert server.said == [f"new export: {X} items of demo, step 12 of run small"] * 2


def test_lines_that_nobody_reads_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_small(small_model("mol", X), tmp_path / "served")
    export = LiveExport(folder, say)
    export_small(small_model("mol", X + 1), folder, overwrite=True)
    reading, writing = os.pipe()
    os.close(reading)
    gone = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stderr", gone)
    assert export.refresh() and export.retriever.num_items == X + 1
    with pytest.raises(BrokenPipeError):
        gone.close()


def test_a_broken_export_is_not_used(tmp_path: Path) -> None:
    said: list[str] = []
    folder = export_small(small_model("mol", X, seed=0), tmp_path / "served")
    export = LiveExport(folder, said.append)
    first = export.retriever
    assert not export.refresh()
    weights = folder / "tower.safetensors"
    broken = weights.read_bytes()[:-1] + b"?"
    export_small(small_model("mol", X, seed=1), folder, overwrite=True)
    weights.write_bytes(broken)
    assert not export.refresh() and not export.refresh()
    assert export.retriever is first and len(said) == 1
    assert said[0].startswith(f"the new export is not used: {weights} is damaged") and "\n" not in said[0]
    shutil.rmtree(folder)
    assert not export.refresh() and export.retriever is first and len(said) == 1
    export_small(small_model("mol", X + 1, seed=2), folder)
    assert export.refresh() and export.retriever.num_items == X + 1 and len(said) == 2


def test_what_takes_too_long_when_the_server_stops_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    monkeypatch.setattr(workers_module, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(Retriever, "answer", lambda of, asked: [{"items": []} for _ in asked if begin.wait(10)])
    with ThreadPoolExecutor(1) as clients, running(folder) as server:
        found = clients.submit(server.ask, {"history": ["id 7"]})
        until(lambda: server.metric("logitmix_batch_requests_count") == 1)
        server.server.should_exit = True
        assert found.result() == (503, {"error": "the server stops"})
        begin.set()


def test_the_command_answers_and_ends(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request in flight when SIGTERM comes is answered. Nobody waits for the process that writes the export."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    copy = path_of(url := f"file://{folder}")
    code = "import sys; from logitmix.serving import live, server; from logitmix.trainer import cli; "
    code += "live.STORE_SECONDS = server.POLL_SECONDS = 0.01; cli.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "serve", url, "--port", "0", "--threads", "1"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert server.stderr.readline().startswith("fetching ")
        started = re.fullmatch(
            rf"logitmix: serving {X} items of demo, step 12 of run small on http://127.0.0.1:(\d+)\n",
            server.stderr.readline(),
        )
        assert started
        body = b'{"history": ["id 7"], "k": 3}'
        with alone(copy), socket.create_connection(("127.0.0.1", int(started[1])), timeout=30) as client:
            client.sendall(head(len(body)).replace(b"here", b"localhost") + body[:5])
            time.sleep(0.2)
            server.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(started[1])), timeout=30)
            client.sendall(body[5:])
            answer = read_all(client)
            assert server.communicate(timeout=30)[1] == "" and server.returncode == 0
        assert answer.startswith(b"HTTP/1.1 200 ") and len(json.loads(answer.partition(b"\r\n\r\n")[2])["items"]) == 3
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("FOLDER --port PORT", "port PORT of 127.0.0.1 is in use; give another --port"),
        (
            "nowhere --port 0",
            "no serving directory at nowhere (it has no manifest.json); make it with: logitmix export",
        ),
        ("FOLDER --port 70000", "--port is 70000; it must be from 0 to 65535"),
        ("FOLDER --port 0 --host 192.0.2.1", "port 0 of 192.0.2.1: Cannot assign requested address"),
        ("FOLDER --port 0 --wait-ms -1", "--wait-ms is -1.0; it must be from 0 to 1000"),
        ("FOLDER --workers 0 --port 0", "--workers is 0; it must be from 1 to 256"),
    ],
)
def test_what_the_command_refuses(folder: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        arguments = [{"FOLDER": str(folder), "PORT": port}.get(word, word) for word in words.split()]
        with pytest.raises(SystemExit) as stop:
            cli.main(["serve", *arguments])
    assert stop.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("logitmix: " + said.replace("PORT", port))


def test_answers_are_sent_at_once(server: Running) -> None:
    """Without TCP_NODELAY, the end of an answer waits for the client's acknowledgment of its head, some 40 ms."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - start)
    connection.close()
    assert min(seconds[10:]) < 0.03
