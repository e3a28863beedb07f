"""Whose requests a server answers."""

import hmac
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from logitmix.serving.connection import CLOSE, WATCHED, error_response

PAGES = ("/", "/docs")
"""Paths of pages, the same for all exports and tokens: a browser that is led there has no token yet."""
STATIC = "/static/"
"""What the pages load."""
OPEN = (*PAGES, "/openapi.json", "/healthz", "/readyz")
"""Paths that need no token: what asks for them is a browser, or an orchestrator of containers."""
LEAST_TOKEN = 16


@dataclass(frozen=True)
class Allowed:
    """Whose requests are answered, besides those to an address, to localhost and to this machine's name. A page of a
    stranger in somebody's browser can reach this server too, by a name of its own that leads here (DNS rebinding)."""

    hosts: Sequence[str] = ()
    """Names in Host, such as that of a reverse proxy; * for any."""
    origins: Sequence[str] = ()
    """Origins of pages whose scripts may ask, such as https://shop.example (CORS); * for any."""
    token: str = field(default="", repr=False)
    """What a request has to have as its bearer token; nothing if empty."""

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

    def bearer(self, headers: Headers) -> bool:
        """Whether the request has the token, if there is one."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        return not self.token or (
            kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())
        )


def read_token(file: Path) -> str:
    """The token in a file, whose last line end is not part of it. ValueError if there is none that is safe to use."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError(f"--token-file {file} cannot be read: {error.strerror}") from None
    except UnicodeError:
        token = ""
    if len(token) < LEAST_TOKEN or not re.fullmatch(r"[!-~]+", token):
        raise ValueError(
            f"--token-file {file} must hold one token of at least {LEAST_TOKEN} characters without spaces; make one "
            f"with: openssl rand -hex 32 > {file}"
        )
    return token


def exposed(flag: str, file: Path) -> str:
    """Returns a line that says that other users of this machine may read a secret file, or "".

    The group may read a file that is another user's: in a volume of Kubernetes, a server that is not root has no other
    way to read it.
    """
    status = file.stat()
    others = stat.S_IRWXG | stat.S_IRWXO if status.st_uid == os.geteuid() else stat.S_IRWXO
    if not status.st_mode & others:
        return ""
    mode = stat.S_IMODE(status.st_mode)
    return f"{flag} {file} may be read by other users of this machine (mode {mode:04o}); better: chmod go= {file}"


def _name_of(host: str) -> str:
    """Without the port."""
    return re.sub(r":\d*$", "", host.strip()).strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


class Guarding:
    """Refuses requests to names that are not this server's, those of other sites' pages that cost something, those
    without the token, and those whose length two headers state."""

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
        is_static = path.startswith(STATIC)
        if not (is_static or path in (*PAGES, *WATCHED) or self.allowed.origin(headers)):
            origin = headers.get("origin", "another site")
            return error_response(403, f"pages of {origin:.100} may not ask; --allow-origin ORIGIN lets them", CLOSE)
        if not (is_static or path in OPEN or self.allowed.bearer(headers)):
            return error_response(
                401, "the request needs the header Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
            )
        return None
