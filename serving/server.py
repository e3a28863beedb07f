"""`logitmix serve`: a serving directory behind HTTP. docs/serving.md describes it to those who use it.

A request's way: a body within its limits (connection.py) -> a question (body.py) -> a batch (batcher.py) -> an answer
from the last intact export (live.py). What a client does wrong ends as a status from 400 to 499 with {"error": one
line}.
"""

import asyncio
import base64
import contextlib
import hashlib
import math
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client import generate_latest as prometheus_text
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from logitmix.common.mappings import require
from logitmix.serving.batcher import Batcher, ClientGone, QueueFull
from logitmix.serving.body import MAX_STAGE_1, parse
from logitmix.serving.connection import (
    BUSY,
    CLOSE,
    CONNECTIONS,
    SPARE,
    BodyRefused,
    Connection,
    Unread,
    error_response,
    json_response,
    read_body,
)
from logitmix.serving.group import ShardsLost
from logitmix.serving.guards import Allowed, Guarding
from logitmix.serving.live import POLL_SECONDS, LiveExport, search
from logitmix.serving.mapped import WrittenInPlace
from logitmix.serving.metrics import PATHS, TRACING, VERSION, Counting, Metrics, OfWorkers, identity
from logitmix.serving.openapi import Answer, Health, Ready, Search, describe, of_export
from logitmix.serving.shadow import Shadow
from logitmix.serving.tls import Encrypted, Tls
from logitmix.serving.workers import CLOSED, DRAINING, LEAVING, READY, TICK, Worker, bound, listen, say

UNREAD = 2**26
"""Bytes of answers that clients have not read yet, beyond which /retrieve and /items answer with 503."""
KEEP_ALIVE_SECONDS = 30
MOST_THREADS = 1024
SEARCHES = 16
"""Most searches for items that wait."""
MOST_DRAIN = 3600
GRACE_SECONDS = 30
"""Time for requests in flight when the server stops."""

LAST_GIVEN_SECONDS = 0.1
"""Time for the requests of a worker's last connections, which are on their way, to arrive."""


@dataclass(frozen=True)
class Settings:
    """How a server answers, whatever the export is. ValueError for what is impossible."""

    wait_ms: float = 10.0
    """Milliseconds that a request waits for others, at most."""
    stage1: int | None = None
    """For requests that do not say."""
    boost_new: float = 0.0
    """For requests that do not say."""
    where: str = ""
    """A condition on the items of all answers."""
    attributes: Path | None = None
    """A file with values of filterable columns that differ from the export's."""
    drain: float = 0.0
    """Seconds between the signal to end and the last new connection; meanwhile /readyz answers 503."""
    shadow_share: float = 1.0
    """Share of the requests that the shadow answers too, if there is one."""
    allowed: Allowed = field(default_factory=Allowed)
    tls: Tls | None = None
    """For HTTPS."""

    def __post_init__(self) -> None:
        require(0 <= self.wait_ms <= 1000, "--wait-ms", self.wait_ms, "from 0 to 1000")
        require(
            self.stage1 is None or 1 <= self.stage1 <= MAX_STAGE_1, "--stage1", self.stage1, f"from 1 to {MAX_STAGE_1}"
        )
        require(math.isfinite(self.boost_new), "--boost-new", self.boost_new, "a finite number")
        require(0 <= self.drain <= MOST_DRAIN, "--drain-seconds", self.drain, f"from 0 to {MOST_DRAIN}")
        require(0 < self.shadow_share <= 1, "--shadow-share", self.shadow_share, "above 0 and at most 1")


def serve(
    directory: Path,
    host: str,
    port: int,
    threads: int,
    settings: Settings,
    worker: Worker | None = None,
    deltas: Path | None = None,
    shadow: Path | None = None,
) -> None:
    """Answers requests until SIGTERM or SIGINT, and then those in flight. `port` 0 is any free one; `threads` of torch,
    0 for its default. A `worker` does not listen, but is given its connections. Deltas that come to the folder `deltas`
    are applied. The export `shadow` is compared with the one that is served.

    Raises ValueError if there is no intact export or a setting is impossible, and OSError if the address cannot be
    listened on.
    """
    _set_threads(threads)
    with contextlib.ExitStack() as stack:
        listening = [] if worker else [stack.enter_context(bound(host, port))]
        saying = partial(say_of, say, f"worker {worker.number}") if worker else say
        shared = worker.folder if worker else None
        export = LiveExport(directory, saying, None, deltas, shared, settings.where, settings.attributes)
        if settings.boost_new:
            export.retriever.new_items()
        allowed = replace(settings.allowed, hosts=(host, *settings.allowed.hosts))
        other = _shadow(shadow, partial(say_of, saying, "shadow"), settings) if shadow else None
        server = make_server(export, replace(settings, allowed=allowed), worker, other)
        # When it has stopped, uvicorn raises again the signal that stopped it, which then changes nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        for socket_ in listening:
            protocol = "https" if settings.tls else "http"
            listen(socket_, export.retriever.described, bool(allowed.token), protocol)
        server.run(sockets=listening)
        export.release()


def _shadow(directory: Path, saying: Callable[[str], object], settings: Settings) -> LiveExport:
    try:
        return LiveExport(directory, saying, where=settings.where, attributes=settings.attributes)
    except ValueError as error:
        raise ValueError(f"--shadow: {error}") from None


def _set_threads(threads: int) -> None:
    require(0 <= threads <= MOST_THREADS, "--threads", threads, f"from 0 to {MOST_THREADS}")
    if threads:
        torch.set_num_threads(threads)


def say_of(saying: Callable[[str], object], who: str, line: str) -> None:
    saying(f"{who}: {line}")


def make_server(
    export: LiveExport, settings: Settings, worker: Worker | None = None, shadow: LiveExport | None = None
) -> uvicorn.Server:
    """The server, for sockets that listen already, or for the connections of a worker."""
    unread, ending = Unread(), Event()
    config = uvicorn.Config(
        make_app(export, settings, unread, ending, worker, shadow),
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
        return _Server(config, ending, settings.drain, settings.tls)
    return _WorkersServer(config, ending, settings.tls, worker, lambda: f"{READY} {export.retriever.described}")


class _Server(uvicorn.Server):
    """One that goes on for a time after the first signal, which `ending` tells to those who send requests."""

    def __init__(self, config: uvicorn.Config, ending: Event, drain: float = 0.0, tls: Tls | None = None) -> None:
        super().__init__(config)
        self._ending, self._drain, self._ends, self._tls = ending, drain, math.inf, tls
        self._given: set[asyncio.Task[None]] = set()
        """Connections that are not made yet, for which a handshake may be under way."""
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=[] if self._tls else sockets)
        if self._tls and sockets:
            self._accepting = self._loop.create_task(self._accept(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting:
            self._accepting.cancel()
            for task in self._given:
                task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        listening.listen(CONNECTIONS)
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
            except OSError:  # the client is gone, or too many files are open
                await asyncio.sleep(TICK)
            else:
                self._take_one(connection)

    def _take_one(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._serve_one(connection))
        self._given.add(task)
        task.add_done_callback(self._given.discard)

    async def _serve_one(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        protocol, tls = self._protocol(), self._tls
        try:
            with contextlib.suppress(OSError):  # the client is gone, or no handshake comes about
                if tls is None:
                    await self._loop.connect_accepted_socket(lambda: protocol, connection)
                elif len(self._given) + len(self.server_state.connections) <= CONNECTIONS + SPARE:
                    done = self._loop.create_future()
                    await self._loop.connect_accepted_socket(lambda: Encrypted(protocol, tls.context, done), connection)
                    await done
        finally:
            if not protocol.is_made:
                if protocol.below is None:
                    connection.close()
                else:
                    protocol.below.abort()
                protocol.closed()

    def _protocol(self) -> Connection:
        made: Any = self.config.http_protocol_class
        protocol: Connection = made(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=self._loop
        )
        return protocol

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain and not self._ending.is_set():
            self._ends = time.monotonic() + self._drain
            self._ending.set()
        else:
            self._ending.set()
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= time.monotonic() >= self._ends
        return await super().on_tick(counter)


class _WorkersServer(_Server):
    """That of a worker: it serves the connections that it is given, until it is told to end."""

    def __init__(
        self, config: uvicorn.Config, ending: Event, tls: Tls | None, worker: Worker, ready: Callable[[], str]
    ) -> None:
        super().__init__(config, ending, tls=tls)
        self._worker, self._ready = worker, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._all_taken = asyncio.Event()
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
            self._take_one(socket.socket(fileno=file))
        if DRAINING in told:
            self._ending.set()
        if not told:
            self._loop.remove_reader(self._worker.control)
            self._all_taken.set()
            self.should_exit = True

    def _protocol(self) -> Connection:
        protocol = super()._protocol()
        protocol.closed = partial(self._worker.tell, CLOSED)
        return protocol


def make_app(
    export: LiveExport,
    settings: Settings,
    unread: Unread,
    ending: Event,
    worker: Worker | None = None,
    shadow: LiveExport | None = None,
) -> FastAPI:
    """The application."""
    allowed = settings.allowed
    batcher = Batcher(lambda: export.retriever, settings.wait_ms / 1000, lambda size: metrics.batch.observe(size))
    metrics = Metrics(export, lambda: len(batcher))
    compared = Shadow(shadow, settings.shadow_share, settings.wait_ms / 1000, metrics.registry) if shadow else None
    searcher = ThreadPoolExecutor(1, thread_name_prefix="search")
    searches = asyncio.Semaphore(SEARCHES)

    async def watch() -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            unread.give_back()
            if await asyncio.to_thread(export.refresh):
                metrics.reloads.inc()
                metrics.identify()
            if settings.tls:
                settings.tls.refresh(export.say)
            if compared:
                await asyncio.to_thread(compared.export.refresh)
            if worker:
                worker.write_metrics(prometheus_text(metrics.registry).decode())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batchers = [batcher, compared.batcher] if compared else [batcher]
        tasks = [asyncio.create_task(work) for work in (*(of.run() for of in batchers), watch())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        searcher.shutdown()

    app = FastAPI(
        title="logitmix",
        version=VERSION,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
    )
    app.add_middleware(Guarding, allowed=allowed)
    if allowed.origins:
        headers = ["Authorization", *(name.decode() for name in TRACING)]
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed.origins, allow_methods=["GET", "POST"], allow_headers=headers
        )
    app.add_middleware(Counting, metrics=metrics)
    defaults = {name: value for name in ("stage1", "boost_new") if (value := getattr(settings, name)) is not None}
    described = cache(lambda: describe(app, allowed))
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    asked: dict[str, Any] = {
        "response_model": Answer,
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }

    @app.post("/retrieve", summary="The best items", **asked)
    async def retrieve(request: Request) -> Response:
        """Those that the model expects next, after a history or for a user with such features."""
        return await answered(request, batcher, compared)

    @app.post("/shadow", summary="The shadow's best items", responses={} if compared else {404: {}}, **asked)
    async def shadow_(request: Request) -> Response:
        """The same from the export that is compared with the one that is served (`serve --shadow`)."""
        if not compared:
            raise HTTPException(404, "there is no shadow; logitmix serve --shadow DIR adds one")
        return await answered(request, compared.batcher)

    async def answered(request: Request, batcher: Batcher, compared: Shadow | None = None) -> Response:
        if unread.size > UNREAD:
            return error_response(503, "too many answers wait to be read; try again later", BUSY)
        state = getattr(request.state, "connection", None)
        try:
            question = parse(await read_body(request), defaults)
            start = time.perf_counter()
            answer, retriever = await batcher.ask(question, state)
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
        except ShardsLost as error:
            return error_response(503, str(error), BUSY)
        if "error" in answer:
            return error_response(400, answer["error"])
        if compared:
            compared.compare(question, answer, time.perf_counter() - start)
        found = json_response({**answer, **identity(retriever)})
        if unread.size + len(found.body) > UNREAD:
            return error_response(503, "too many answers wait to be read; try again later", BUSY)
        return found

    @app.get("/items", summary="Search for items", response_model=Search)
    async def items(
        query: Annotated[str, Query(max_length=100, description="Words; without any, all items are found.")] = "",
        limit: Annotated[int, Query(ge=1, le=100, description="Most items of the answer.")] = 20,
    ) -> Response:
        """Items with each word of the query in their id or title, in any case; where there are none, those with a slip
        in a word of five letters or more. With a column `actions`, the most popular come first."""
        if searches.locked() or unread.size > UNREAD:
            return error_response(503, "too many searches wait already; try again later", BUSY)
        async with searches:
            loop = asyncio.get_running_loop()
            return json_response(await loop.run_in_executor(searcher, search, export.retriever, query, limit))

    @app.get("/healthz", summary="Health", response_model=Health)
    async def healthz() -> Response:
        """That the process answers, with which export, and why there are deltas that are not in it."""
        of = export.retriever
        return json_response(
            {
                "status": "ok",
                **export.missing,
                **identity(of),
                "num_items": of.num_items,
                "shadow": identity(compared.export.retriever) if compared else None,
                "attributes": export.changed or None,
                "refused": "; ".join(filter(None, (export.refused, export.refused_attributes))) or None,
            }
        )

    @app.get("/readyz", summary="Readiness", response_model=Ready)
    async def readyz() -> Response:
        """Whether requests shall be sent here: not once the server shall end, or while a shard or a file of the export
        is missing."""
        if ending.is_set():
            return error_response(503, "the server stops")
        export.retriever.files.check()
        if export.refusal:
            return error_response(503, export.refusal, BUSY)
        return json_response({"status": "ready", **export.missing})

    @app.get("/metrics", summary="Metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Requests, times, batches and what answers, in Prometheus's text format."""
        registry = OfWorkers(worker, metrics.registry) if worker else metrics.registry
        return Response(prometheus_text(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/openapi.json", summary="This description", response_model=dict[str, Any])
    async def openapi() -> Response:
        """OpenAPI 3.1, with the features and examples of the export that answers."""
        return json_response(of_export(described(), export.retriever, defaults))

    @app.get("/", summary="A page that asks", response_class=HTMLResponse)
    async def page() -> Response:
        """For people who try the model out."""
        return _html("page", "text" in export.retriever.kinds.values())

    @app.get("/docs", summary="A page that describes", response_class=HTMLResponse)
    async def docs() -> Response:
        """For people who write programs: `/openapi.json`, and fields to send requests."""
        return _html("docs")

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
        known = error.detail if path in PATHS and error.status_code == 404 else said.get(error.status_code)
        return error_response(error.status_code, known or error.detail, error.headers)

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


def _html(name: str, has_texts: bool = False) -> Response:
    text, policy = _page(name, has_texts)
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})


@cache
def _page(name: str, has_texts: bool) -> tuple[str, str]:
    """A page, and the policy that lets the browser run the page's own script and nothing else, and load the pictures
    whose addresses the export's columns may have."""
    text, *shared = (
        files("logitmix.serving").joinpath(file).read_text(encoding="utf-8")
        for file in (f"{name}.html", "pages.css", "pages.js")
    )
    for tag, content in zip(("style", "script"), shared, strict=True):
        text = text.replace(f"<{tag}>\n", f"<{tag}>\n{content}")

    def hashed(tag: str) -> str:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return text, (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        f"img-src {'http: https: ' if has_texts else ''}data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
