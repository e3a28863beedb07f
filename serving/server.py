"""`logitmix serve`: a serving directory behind HTTP. docs/serving.md describes it to those who use it.

A request's way: a body within its limits (connection.py) -> a question (body.py) -> a batch (batcher.py) -> an answer
from the last intact export (live.py). What a client does wrong ends as a status from 400 to 499 with {"error": one
line}.
"""

import asyncio
import base64
import contextlib
import gc
import hashlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.resources import files
from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client import generate_latest as prometheus_text
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from logitmix.common.messages import prefixed
from logitmix.common.storage import path_of
from logitmix.serving.batcher import Batcher, ClientGone, QueueFull
from logitmix.serving.body import parse
from logitmix.serving.connection import (
    BUSY,
    CLOSE,
    Connection,
    Paced,
    Unread,
    error_response,
    json_response,
    read_body,
)
from logitmix.serving.group import ShardsLost
from logitmix.serving.guards import Guarding
from logitmix.serving.live import POLL_SECONDS, LiveExport, search
from logitmix.serving.mapped import WrittenInPlace
from logitmix.serving.metrics import PATHS, VERSION, Counting, Metrics, OfWorkers, identity, leave_metrics
from logitmix.serving.openapi import Answer, describe
from logitmix.serving.settings import ServerSettings, Settings
from logitmix.serving.shadow import Shadow

UNREAD = 2**26
"""Bytes of answers that clients have not read yet, beyond which /retrieve and /items answer with 503."""
SEARCHES = 16
"""Most searches for items that wait."""


def load_app(
    directory: Path, settings: ServerSettings, say: Callable[[str], object], folder: Path | None = None
) -> FastAPI:
    """Returns the application that answers from the export in a directory.

    Args:
        directory: The serving directory.
        settings: How requests are answered.
        say: What is told of new exports and troubles.
        folder: Where several processes leave their metrics, and what they share of the items.

    Raises:
        ValueError: There is no intact export, or the export cannot have one of the settings.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    saying = partial(say_of, say, f"worker {os.getpid()}") if folder else say
    export = LiveExport(directory, saying, None, settings.deltas_path, *settings.conditions, shared=folder)
    if settings.boost_new:
        export.retriever.new_items()
    shadow = None
    if settings.shadow:
        with prefixed("--shadow: "):
            saying = partial(say_of, saying, "shadow")
            where, attributes = settings.conditions
            shadow = LiveExport(path_of(settings.shadow), saying, where=where, attributes=attributes)
    gc.freeze()  # of what stays, which takes a third of a second to go through
    return make_app(export, settings, shadow, folder)


def say_of(saying: Callable[[str], object], who: str, line: str) -> None:
    saying(f"{who}: {line}")


def make_app(
    export: LiveExport, settings: Settings, shadow: LiveExport | None = None, folder: Path | None = None
) -> FastAPI:
    """Returns the application that answers from an export.

    Args:
        export: What answers.
        settings: How requests are answered.
        shadow: An export whose answers are compared.
        folder: Where several processes leave their metrics.
    """
    allowed, unread, started_by = settings.allowed, Unread(), parent_process()
    batcher = Batcher(lambda: export.retriever, settings.wait_ms / 1000, lambda size: metrics.batch.observe(size))
    metrics = Metrics(export, lambda: len(batcher))
    compared = Shadow(shadow, settings.shadow_share, settings.wait_ms / 1000, metrics.registry) if shadow else None
    searcher = ThreadPoolExecutor(1, thread_name_prefix="search")
    searches = asyncio.Semaphore(SEARCHES)

    async def watch() -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if await asyncio.to_thread(export.refresh):
                metrics.reloads.inc()
                metrics.identify()
            if settings.tls:
                settings.tls.refresh(export.say)
            if compared:
                await asyncio.to_thread(compared.export.refresh)
            if folder:
                leave_metrics(folder, metrics.registry)
            if started_by and not started_by.is_alive():
                signal.raise_signal(signal.SIGTERM)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batchers = [batcher, compared.batcher] if compared else [batcher]
        tasks = [asyncio.create_task(work) for work in (*(of.run() for of in batchers), watch())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        searcher.shutdown()
        export.release()

    app = FastAPI(
        title="logitmix",
        version=VERSION,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.export = export
    app.add_middleware(Guarding, allowed=allowed)
    if allowed.origins:
        methods, headers = ["GET", "POST"], ["Authorization"]
        app.add_middleware(CORSMiddleware, allow_origins=allowed.origins, allow_methods=methods, allow_headers=headers)
    app.add_middleware(Counting, metrics=metrics)
    app.add_middleware(Paced, unread=unread)
    defaults = {name: value for name in ("stage1", "boost_new") if (value := getattr(settings, name)) is not None}
    described = cache(lambda: describe(app, allowed))
    body = {"schema": {"$ref": "#/components/schemas/Body"}, "example": {"history": [], "k": 5}}
    asked: dict[str, Any] = {
        "response_model": Answer,
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": body}}},
    }

    @app.post("/retrieve", summary="The best items", **asked)
    async def retrieve(request: Request) -> Response:
        """Those that the model expects next, after a history or for a user with such features."""
        return await answered(request, batcher, compared)

    @app.post("/shadow", summary="The shadow's best items", **asked)
    async def shadow_(request: Request) -> Response:
        """The same from the export that is compared with the one that is served (`serve --shadow`)."""
        if not compared:
            raise HTTPException(404, "there is no shadow; logitmix serve --shadow DIR adds one")
        return await answered(request, compared.batcher)

    async def answered(request: Request, batcher: Batcher, compared: Shadow | None = None) -> Response:
        if unread.size > UNREAD:
            return error_response(503, "too many answers wait to be read; try again later", BUSY)
        connection: Connection | None = getattr(request.state, "connection", None)
        try:
            question = parse(await read_body(request), defaults)
            start = time.perf_counter()
            gone = connection.transport.is_closing if connection else lambda: False
            answer, retriever = await batcher.ask(question, gone)
        except ValueError as error:
            return error_response(400, str(error))
        except QueueFull:
            return error_response(503, "too many requests wait already; try again later", BUSY)
        except (ClientDisconnect, ClientGone):
            return Response(status_code=499)  # for the metrics; nobody reads it
        except asyncio.CancelledError:
            return error_response(503, "the server stops", CLOSE)
        if "error" in answer:
            return error_response(400, answer["error"])
        if compared:
            compared.compare(question, answer, time.perf_counter() - start)
        found = json_response({**answer, **identity(retriever)})
        if unread.size + len(found.body) > UNREAD:
            return error_response(503, "too many answers wait to be read; try again later", BUSY)
        return found

    @app.get("/items", summary="Search for items", response_model=dict[str, Any])
    async def items(
        query: Annotated[str, Query(max_length=100, description="Words; without any, all items are found.")] = "",
        limit: Annotated[int, Query(ge=1, le=100, description="Most items of the answer.")] = 20,
    ) -> Response:
        """Items with each word of the query in their id or title, in any case. With a column `actions`, the most
        popular come first."""
        if searches.locked() or unread.size > UNREAD:
            return error_response(503, "too many searches wait already; try again later", BUSY)
        async with searches:
            loop = asyncio.get_running_loop()
            return json_response(await loop.run_in_executor(searcher, search, export.retriever, query, limit))

    @app.get("/healthz", summary="Health", response_model=dict[str, Any])
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

    @app.get("/readyz", summary="Readiness", response_model=dict[str, Any])
    async def readyz() -> Response:
        """Whether requests shall be sent here: not while a shard or a file of the export is missing."""
        export.retriever.files.check()
        if export.refusal:
            return error_response(503, export.refusal, BUSY)
        return json_response({"status": "ready", **export.missing})

    @app.get("/metrics", summary="Metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Requests, times, batches and what answers, in Prometheus's text format."""
        registry = OfWorkers(folder, metrics.registry) if folder else metrics.registry
        return Response(prometheus_text(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/openapi.json", summary="This description", response_model=dict[str, Any])
    async def openapi() -> Response:
        """OpenAPI 3.1."""
        return json_response(described())

    page = files("logitmix.serving").joinpath("page.html").read_text("utf-8")
    swagger = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="logitmix",
        swagger_js_url="static/swagger-ui-bundle.js",
        swagger_css_url="static/swagger-ui.css",
        swagger_favicon_url="data:,",
    )

    @app.get("/", summary="A page that asks", response_class=HTMLResponse)
    async def ask() -> Response:
        """For people who try the model out."""
        return _page(page)

    @app.get("/docs", summary="A page that describes", response_class=HTMLResponse)
    async def docs() -> Response:
        """For people who write programs: `/openapi.json`, and fields to send requests."""
        return _page(bytes(swagger.body).decode())

    app.mount("/static", StaticFiles(packages=[("logitmix.serving", "static"), ("fastapi_swagger", "resources")]))
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

    @app.exception_handler(ShardsLost)
    @app.exception_handler(WrittenInPlace)
    async def unable(_: Request, error: Exception) -> Response:
        return error_response(503, str(error), BUSY)

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        return error_response(500, "an error of the server; its log says more")


def _page(text: str) -> Response:
    """Returns a page, with the policy that lets the browser run the page's own scripts."""
    inline = (hashlib.sha256(script.encode()).digest() for script in re.findall(r"<script>(.*?)</script>", text, re.S))
    scripts = " ".join(["'self'", *(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in inline)])
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})
