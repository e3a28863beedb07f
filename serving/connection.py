"""A client's connection: how long the client may take, and how much of what it sends and has not read is held."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY = 2**20
"""Bytes of a request's body."""
DISCARDED = 2**26
"""Bytes of a larger body that are read and dropped, so that a client that sends all of it can read the answer."""
PATIENCE_SECONDS = 10.0
"""Time that a client has to send the head of a request, and then to send its body."""
READ_RATE = 2**18
"""Bytes a second, at least, that a client reads of its answer, after PATIENCE_SECONDS."""
PART = 2**18
"""Bytes of an answer that are sent at once."""
CONNECTIONS = 512
SPARE = 32
"""Connections beyond these, for WATCHED alone."""
WATCHED = ("/healthz", "/metrics", "/readyz")
"""Paths of those who watch the server, which cost little."""
BUSY = {"Retry-After": "1"}
CLOSE = {"Connection": "close"}


def json_response(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII with escapes, because raw ids and titles may hold what UTF-8 cannot.
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return json_response({"error": " ".join(message.split())[:500]}, status, headers)


async def read_body(request: Request) -> bytes:
    """Returns the body of a request, of which no more than MAX_BODY bytes are ever held. Raises HTTPException and
    ClientDisconnect."""
    too_large = HTTPException(413, f"the body is larger than {MAX_BODY:,} bytes", CLOSE)
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BODY:
                    body += part
                elif size > DISCARDED:
                    break
    except TimeoutError:
        if size <= MAX_BODY:
            message = f"the body did not arrive within {PATIENCE_SECONDS:g} seconds"
            raise HTTPException(408, message, CLOSE) from None
    if size > MAX_BODY:
        raise too_large
    return bytes(body)


@dataclass
class Unread:
    """Size of the answers that clients have not read yet, in bytes."""

    size: int = 0


class Paced:
    """Sends answers no faster than clients read them, and closes the connections of clients that are too slow."""

    def __init__(self, app: ASGIApp, unread: Unread) -> None:
        self.app, self.unread = app, unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get("connection")

        async def sending(message: Message) -> None:
            if message["type"] != "http.response.body":
                return await send(message)
            body = message.get("body", b"")
            self.unread.size += len(body)
            try:
                # `send` first waits until what was sent before has left, so the last call waits for the whole answer.
                async with asyncio.timeout(PATIENCE_SECONDS + len(body) / READ_RATE):
                    for start in range(0, len(body), PART):
                        await send({**message, "body": body[start : start + PART], "more_body": True})
                    await send({**message, "body": b""})
            except TimeoutError:
                connection.transport.abort()
                while (await receive())["type"] != "http.disconnect":
                    pass
            finally:
                self.unread.size -= len(body)

        await self.app(scope, receive, sending if connection else send)


class Connection(H11Protocol):
    """Closes connections whose clients are slow with the head of a request, and those beyond CONNECTIONS and SPARE."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # For `Paced`: by default, up to 64 KiB that wait count as sent. A limit of 0 pauses asyncio's TLS for good.
        transport.set_write_buffer_limits(high=1, low=0)
        self.app_state = {**self.app_state, "connection": self}
        patience = PATIENCE_SECONDS
        if len(self.connections) > CONNECTIONS + SPARE:
            transport.abort()
        elif len(self.connections) > CONNECTIONS:
            self.app, patience = partial(_for_watchers, self.app), min(1.0, PATIENCE_SECONDS)
        self._update_deadline(patience)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_deadline()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            super().send_400_response(msg)
        else:  # an answer is under way
            self.transport.close()

    def _update_deadline(self, patience: float | None = None) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(patience or PATIENCE_SECONDS, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def _for_watchers(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a spare connection."""
    if scope["path"] in WATCHED:
        await app(scope, receive, send)
    else:
        message = f"more than {CONNECTIONS} connections are open; try again later"
        await error_response(503, message, BUSY | CLOSE)(scope, receive, send)
