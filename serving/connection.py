"""A client's connection: how long the client may take, and how much of what it sends and has not read is held."""

import asyncio
import contextlib
import ctypes
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY = 2**20
"""Bytes of a request's body."""
DISCARDED = 2**26
"""Bytes of a larger body that are read and dropped, so that a client that sends all of it can read the answer."""
PATIENCE_SECONDS = 10.0
"""Time that a client has to send the head of a request, and then to send its body."""
READ_RATE = 2**18
"""Bytes a second, at least, that a client reads of its answer, after PATIENCE_SECONDS."""
TRIMMED = 2**23
"""Bytes of unread answers whose memory is given back when they have been read."""
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


class BodyRefused(Exception):
    """Why a body is not read, and the status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: Request) -> bytes:
    """The body, of which no more than MAX_BODY is ever held. Raises BodyRefused and ClientDisconnect."""
    too_large = BodyRefused(413, f"the body is larger than {MAX_BODY:,} bytes")
    if "expect" in request.headers and int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise too_large  # before the client sends it
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
            raise BodyRefused(408, f"the body did not arrive within {PATIENCE_SECONDS:g} seconds") from None
    if size > MAX_BODY:
        raise too_large
    return bytes(body)


@dataclass
class Unread:
    """Bytes of answers that clients have not read yet."""

    size: int = 0
    largest: int = 0
    """Since `give_back`."""

    def add(self, size: int) -> None:
        self.size += size
        self.largest = max(self.largest, self.size)

    def give_back(self) -> None:
        """The memory of many answers that have been read: the C library keeps it otherwise."""
        if self.size == 0 and self.largest > TRIMMED:
            self.largest = 0
            with contextlib.suppress(AttributeError):  # another C library than glibc
                ctypes.CDLL(None).malloc_trim(0)


class Connection(H11Protocol):
    """Closes connections whose clients are slow with the head of a request, or to read an answer, or go on to send
    after it, and those beyond CONNECTIONS. One answer at a time waits to be read."""

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _size = 0
    _finished = False
    """Whether the answer that is being read is complete."""
    below: asyncio.Transport | None = None
    """That of an encrypted connection, whose own `transport` is in front of it."""
    half_closed = False
    """Whether the client has ended its side: it may read, or be gone."""

    def __init__(self, unread: Unread, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.unread, self._patience = unread, PATIENCE_SECONDS
        self.closed: Callable[[], object] = lambda: None
        self.app_state = {**self.app_state, "connection": self}

    @property
    def is_made(self) -> bool:
        """Whether there is a transport, for which an encrypted connection needs a handshake."""
        return self.transport is not None

    @property
    def gone(self) -> bool:
        """Whether nobody can read an answer."""
        return self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.below is None:
            self.below = transport
            # So that `resume_writing` says that all has been sent.
            transport.set_write_buffer_limits(high=0)
        if len(self.connections) > CONNECTIONS + SPARE:
            self._refuse("503 Service Unavailable", TOO_MANY, "Retry-After: 1\r\n")
        elif len(self.connections) > CONNECTIONS:
            self.app, self._patience = partial(_for_watchers, self.app), min(1.0, PATIENCE_SECONDS)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent a whole request is answered, for it may still read."""
        self.half_closed = True
        if self.below is not self.transport:  # TLS has no half of a connection
            return False
        if self.cycle is None or (self.cycle.response_complete and not self._finished):
            return False
        if self.cycle.more_body:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            return False
        self.cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed()
        self._cancel_deadline()
        self._stop_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_reading()
        assert self.below is not None
        self._size = self.below.get_write_buffer_size()
        self.unread.add(self._size)
        patience = PATIENCE_SECONDS + self._size / READ_RATE
        self._reading = self.loop.call_later(patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading()
        if self._finished:
            self._finished = False
            self.on_response_complete()

    def on_response_complete(self) -> None:
        """Goes on with the next request of the connection when the client has read the answer to this one."""
        if self.flow.write_paused and not self.transport.is_closing():
            self._finished = True
            return
        super().on_response_complete()
        if self.half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self._refuse("400 Bad Request", "this is no valid HTTP request")
        else:
            self.transport.close()

    def _refuse(self, status: str, message: str, lines: str = "") -> None:
        body = error_response(500, message).body
        head = f"HTTP/1.1 {status}\r\n{lines}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(b"".join([head.encode(), b"Connection: close\r\n\r\n", body]))
        self.transport.close()

    def _stop_reading(self) -> None:
        self.unread.size -= self._size
        self._size = 0
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _update_deadline(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(min(self._patience, PATIENCE_SECONDS), self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


TOO_MANY = f"more than {CONNECTIONS} connections are open; try again later"


async def _for_watchers(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a spare connection."""
    if scope["path"] in WATCHED:
        await app(scope, receive, send)
    else:
        await error_response(503, TOO_MANY, BUSY | CLOSE)(scope, receive, send)
