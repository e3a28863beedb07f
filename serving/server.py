"""`logitmix serve`: a serving directory behind HTTP. docs/serving.md describes it to those who use it.

A request's way: a body within its limits (connection.py) -> a question (body.py) -> a batch (batcher.py) -> an answer
from the last intact export (live.py). What a client does wrong ends as a status from 400 to 499 with {"error": one
line}.
"""

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client import generate_latest as prometheus_text
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as families_of
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch.distributed import ProcessGroup

from logitmix.common.mappings import require
from logitmix.serving.batcher import BATCH, Batcher, ClientGone, QueueFull
from logitmix.serving.body import MAX_STAGE_1, Body, parse
from logitmix.serving.connection import (
    BUSY,
    CLOSE,
    WATCHED,
    BodyRefused,
    Connection,
    Unread,
    error_response,
    json_response,
    read_body,
)
from logitmix.serving.group import Group
from logitmix.serving.live import LiveExport, search
from logitmix.serving.mapped import WrittenInPlace
from logitmix.serving.workers import CLOSED, LEAVING, READY, Worker, bound, listen, say

UNREAD = 2**26
"""Bytes of answers that clients have not read yet, beyond which /retrieve and /items answer with 503."""
KEEP_ALIVE_SECONDS = 30
MOST_THREADS = 1024
SEARCHES = 16
"""Most searches for items that wait."""
POLL_SECONDS = 1.0
"""Time between two looks at the manifest."""
GRACE_SECONDS = 30
"""Time for requests in flight when the server stops."""

LAST_GIVEN_SECONDS = 0.1
"""Time for the requests of a worker's last connections, which are on their way, to arrive."""

PATHS = ("/", "/healthz", "/items", "/metrics", "/openapi.json", "/retrieve")
ERROR: dict[str, Any] = {
    "description": "What is wrong, in one line",
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": ERROR, 503: ERROR}
"""What /openapi.json says of the answers that are not 200."""


@dataclass(frozen=True)
class Allowed:
    """Whose requests are answered, besides those to an address, to localhost and to this machine's name. A page of a
    stranger in somebody's browser can reach this server too, by a name of its own that leads here (DNS rebinding)."""

    hosts: Sequence[str] = ()
    """Names in Host, such as that of a reverse proxy; * for any."""
    origins: Sequence[str] = ()
    """Origins of pages whose scripts may ask, such as https://shop.example (CORS); * for any."""

    def host(self, given: str) -> bool:
        name = _name_of(given)
        own = ("localhost", socket.gethostname().lower())
        return "*" in self.hosts or name in own or _is_address(name) or name in map(_name_of, self.hosts)

    def origin(self, headers: Headers) -> bool:
        """Whether the page that asks, if one does, is this server's own or an allowed one."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site") not in ("cross-site", "same-site")
        own = origin.partition("://")[2].lower() == headers.get("host", "").lower()
        return own or "*" in self.origins or origin in self.origins


def _name_of(host: str) -> str:
    """Without the port."""
    return re.sub(r":\d*$", "", host.strip()).strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def serve(
    directory: Path,
    host: str,
    port: int,
    threads: int,
    wait_ms: float,
    group: "ProcessGroup | None" = None,
    allowed: Allowed = Allowed(),
    worker: Worker | None = None,
    stage1: int | None = None,
    deltas: Path | None = None,
) -> None:
    """Answers requests until SIGTERM or SIGINT, and then those in flight. `port` 0 is any free one; `threads` of torch,
    0 for its default. The processes of a `group` of torch.distributed share the items; rank 0 alone listens, and ends
    the others. A `worker` does not listen, but is given its connections. `stage1` is for requests that do not say.
    Deltas that come to the folder `deltas` are applied.

    Raises ValueError if there is no intact export or a setting is impossible, and OSError if the address cannot be
    listened on or another process is lost.
    """
    require(0 <= wait_ms <= 1000, "--wait-ms", wait_ms, "from 0 to 1000")
    require(0 <= threads <= MOST_THREADS, "--threads", threads, f"from 0 to {MOST_THREADS}")
    require(stage1 is None or 1 <= stage1 <= MAX_STAGE_1, "--stage1", stage1, f"from 1 to {MAX_STAGE_1}")
    if threads:
        torch.set_num_threads(threads)
    of_ranks = Group(group)
    if of_ranks.rank:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        return LiveExport(directory, say, of_ranks, deltas).follow()
    with contextlib.ExitStack() as stack:
        listening = [] if worker else [stack.enter_context(bound(host, port))]
        saying = partial(_say_of, worker.number) if worker else say
        export = LiveExport(directory, saying, of_ranks, deltas)
        server = make_server(export, wait_ms / 1000, replace(allowed, hosts=(host, *allowed.hosts)), worker, stage1)
        # When it has stopped, uvicorn raises again the signal that stopped it, which then changes nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        for socket_ in listening:
            listen(socket_, export.retriever.described)
        server.run(sockets=listening)
        export.release()


def _say_of(worker: int, line: str) -> None:
    say(f"worker {worker}: {line}")


def make_server(
    export: LiveExport, wait: float, allowed: Allowed, worker: Worker | None = None, stage1: int | None = None
) -> uvicorn.Server:
    """The server, for sockets that listen already, or for the connections of a worker; the rest as for `make_app`."""
    unread = Unread()
    config = uvicorn.Config(
        make_app(export, wait, allowed, unread, worker, stage1),
        http=partial(Connection, unread),  # type: ignore[arg-type]
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
    if worker is None:
        return uvicorn.Server(config)
    return _WorkersServer(config, worker, lambda: f"{READY} {export.retriever.described}")


class _WorkersServer(uvicorn.Server):
    """That of a worker: it serves the connections that it is given."""

    def __init__(self, config: uvicorn.Config, worker: Worker, ready: Callable[[], str]) -> None:
        super().__init__(config)
        self._worker, self._ready = worker, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._loop, self._all_taken = asyncio.get_running_loop(), asyncio.Event()
        self._given: set[asyncio.Task[None]] = set()
        self._worker.control.setblocking(False)
        self._loop.add_reader(self._worker.control, self._take)
        self._worker.tell(self._ready())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.tell(LEAVING)
        await self._all_taken.wait()
        if self._given:
            await asyncio.wait(self._given)
        await asyncio.sleep(LAST_GIVEN_SECONDS)
        await super().shutdown(sockets)

    def _take(self) -> None:
        try:
            told, files, _, _ = socket.recv_fds(self._worker.control, 64, 64)
        except BlockingIOError:
            return
        except OSError:
            told, files = b"", []
        for file in files:
            task = self._loop.create_task(self._serve_one(socket.socket(fileno=file)))
            self._given.add(task)
            task.add_done_callback(self._given.discard)
        if not told:
            self._loop.remove_reader(self._worker.control)
            self._all_taken.set()
            self.should_exit = True

    async def _serve_one(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the client is gone
            await self._loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> Connection:
        made: Any = self.config.http_protocol_class
        protocol: Connection = made(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=self._loop
        )
        protocol.closed = partial(self._worker.tell, CLOSED)
        return protocol


def make_app(
    export: LiveExport,
    wait: float,
    allowed: Allowed,
    unread: Unread,
    worker: Worker | None = None,
    stage1: int | None = None,
) -> FastAPI:
    """The application. `wait`: seconds that a request waits for others at most. `stage1`: of requests that do not
    say."""
    batcher = Batcher(lambda: export.retriever, wait, lambda size: metrics.batch.observe(size))
    metrics = Metrics(export, lambda: len(batcher))
    searcher = ThreadPoolExecutor(1, thread_name_prefix="search")
    searches = asyncio.Semaphore(SEARCHES)

    async def watch() -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            unread.give_back()
            if await asyncio.to_thread(export.refresh):
                metrics.reloads.inc()
            if worker:
                worker.write_metrics(prometheus_text(metrics.registry).decode())
            if export.lost:
                signal.raise_signal(signal.SIGTERM)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(batcher.run()), asyncio.create_task(watch())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        searcher.shutdown()

    app = FastAPI(title="logitmix", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(Guarding, allowed=allowed)
    if allowed.origins:
        app.add_middleware(CORSMiddleware, allow_origins=allowed.origins, allow_methods=["GET", "POST"])
    app.add_middleware(Counting, metrics=metrics)
    described_body = {"required": True, "content": {"application/json": {"schema": Body.model_json_schema()}}}

    @app.post("/retrieve", openapi_extra={"requestBody": described_body}, responses=ERRORS)
    async def retrieve(request: Request) -> Response:
        """The best items for a history."""
        if unread.size > UNREAD:
            return error_response(503, "too many answers wait to be read; try again later", BUSY)
        state = getattr(request.state, "connection", None)
        try:
            answer = await batcher.ask(parse(await read_body(request), stage1), state)
        except ValueError as error:
            return error_response(400, str(error))
        except BodyRefused as error:
            return error_response(error.status, str(error), CLOSE)
        except QueueFull:
            return error_response(503, "too many requests wait already; try again later", BUSY)
        except (ClientDisconnect, ClientGone):
            return Response(status_code=499)  # for the metrics; nobody reads it
        except asyncio.CancelledError:
            return error_response(503, "the server stops", CLOSE)
        except Exception:
            if not export.lost:
                raise
            return error_response(503, "another process of this server is gone, so it stops", CLOSE)
        source = answer.retriever.source
        found = json_response({"items": answer.rows, "run": source.run, "step": source.step})
        if unread.size + len(found.body) > UNREAD:
            return error_response(503, "too many answers wait to be read; try again later", BUSY)
        return found

    @app.get("/items", responses=ERRORS)
    async def items(
        query: Annotated[str, Query(max_length=100)] = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """Items with the query in their id or title."""
        if searches.locked() or unread.size > UNREAD:
            return error_response(503, "too many searches wait already; try again later", BUSY)
        async with searches:
            loop = asyncio.get_running_loop()
            return json_response(await loop.run_in_executor(searcher, search, export.retriever, query, limit))

    @app.get("/healthz")
    async def healthz() -> Response:
        """Which export answers, the last delta in it, and why there are deltas that are not."""
        of = export.retriever
        of.files.check()
        version = {"digest": of.digest, "delta": of.delta, "refused": export.refused or None}
        return json_response({"status": "ok", **vars(of.source), "num_items": of.num_items, **version})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Metrics in Prometheus's text format."""
        registry = OfWorkers(worker, metrics.registry) if worker else metrics.registry
        return Response(prometheus_text(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        """A page for people."""
        text, policy = _page()
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})

    _answer_errors(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    """Gives {"error": one line} also where no function of a path answers."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        said = {
            404: f"there is no {path:.100}; there are: {', '.join(PATHS)}",
            405: f"{path} takes no {request.method}",
        }
        return error_response(error.status_code, said.get(error.status_code, error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_response(400, f"{first['loc'][-1]}: {first['msg'][0].lower()}{first['msg'][1:]}")

    @app.exception_handler(WrittenInPlace)
    async def damaged(_: Request, error: WrittenInPlace) -> Response:
        return error_response(503, str(error), BUSY)

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        return error_response(500, "an error of the server; its log says more")


@cache
def _page() -> tuple[str, str]:
    """The page, and the policy that lets the browser run the page's own script and nothing else."""
    text = files("logitmix.serving").joinpath("page.html").read_text(encoding="utf-8")

    def hashed(tag: str) -> str:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return text, (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Metrics:
    """What GET /metrics shows, besides memory, CPU time and open files of the process."""

    def __init__(self, export: LiveExport, waiting: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("logitmix_requests", "Requests.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "logitmix_retrieve_seconds",
            "Time from the head of a request to /retrieve to the end of its answer.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            registry=registry,
        )
        sizes = [2**power for power in range(BATCH.bit_length())]
        self.batch = Histogram("logitmix_batch_requests", "Requests of a batch.", buckets=sizes, registry=registry)
        self.reloads = Counter("logitmix_reloads", "New exports that took over.", registry=registry)
        for name, meaning, read in (
            ("queue_requests", "Requests that wait for a batch.", waiting),
            ("export_step", "Step of the checkpoint that answers.", lambda: export.retriever.source.step),
            ("export_items", "Items of the export that answers.", lambda: export.retriever.num_items),
            ("export_delta", "Number of the last delta in it.", lambda: export.retriever.delta),
            ("deltas_refused", "Whether there are deltas that are not applied.", lambda: bool(export.refused)),
        ):
            Gauge(f"logitmix_{name}", meaning, registry=registry).set_function(read)


class OfWorkers(Collector):
    """The metrics of all workers, with a label that says whose they are: those of the others as they have left them."""

    def __init__(self, worker: Worker, own: CollectorRegistry) -> None:
        self._texts = worker.metrics() | {worker.number: prometheus_text(own).decode()}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for number, text in sorted(self._texts.items()):
            for found in families_of(text):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.samples.append(sample._replace(labels={**sample.labels, "worker": str(number)}))
        return families.values()


class Counting:
    """Counts and times requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, start = 500, time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"] if scope["path"] in PATHS else "other"
        try:
            await self.app(scope, receive, sending)
        finally:
            self.metrics.requests.labels(path, status).inc()
            if path == "/retrieve":
                self.metrics.seconds.observe(time.perf_counter() - start)


class Guarding:
    """Refuses requests to names that are not this server's, those of other sites' pages that cost something, and those
    whose length two headers state."""

    def __init__(self, app: ASGIApp, allowed: Allowed) -> None:
        self.app, self.allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope["path"], Headers(scope=scope))):
            return await refusal(scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            return error_response(
                400, "the request has Content-Length and Transfer-Encoding; it must have one of them", CLOSE
            )
        host = headers.get("host", "localhost")
        if not self.allowed.host(host):
            return error_response(
                421, f"{host:.100} is no name of this server; logitmix serve --allow-host NAME adds one", CLOSE
            )
        if path not in ("/", *WATCHED) and not self.allowed.origin(headers):
            origin = headers.get("origin", "another site")
            return error_response(403, f"pages of {origin:.100} may not ask; --allow-origin ORIGIN lets them", CLOSE)
        return None
