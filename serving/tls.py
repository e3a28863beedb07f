"""TLS: the certificate of a server and the certificates of its clients, of files that may be replaced."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitmix.common.files import file_stamp


@dataclass
class Tls:
    """Files in PEM. ValueError that names the one that cannot be used."""

    certificate: Path
    """With those of the authorities between it and one that clients know."""
    key: Path
    client_ca: Path | None = None
    """Authorities, one of which must have signed each client's certificate; clients need none without it."""

    def __post_init__(self) -> None:
        self._seen = self._stamps()
        self._made()

    def load(self, *_: object) -> ssl.SSLContext:
        """Returns what uvicorn encrypts connections with: each new one by the files as they are then."""
        self.context = self._made()
        current = _Current(ssl.PROTOCOL_TLS_SERVER)
        current.tls = self
        return current

    def refresh(self, say: Callable[[str], object]) -> None:
        """Takes over files that were replaced, for new connections; if they cannot be used, says so once."""
        if (seen := self._stamps()) != self._seen:
            self._seen = seen
            try:
                self.context = self._made()
                say("new TLS files")
            except ValueError as error:
                say(f"the TLS files stay as they were: {error}")

    @property
    def _files(self) -> dict[str, Path]:
        named = {"--tls-certificate": self.certificate, "--tls-key": self.key}
        return named | ({"--tls-client-ca": self.client_ca} if self.client_ca else {})

    def _stamps(self) -> list[object]:
        return [file_stamp(file) for file in self._files.values()]

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            for file in self._files.values():
                file.read_bytes()  # whose error names the file
            context.load_cert_chain(self.certificate, self.key, password=_refuse)
            if self.client_ca:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_ca)
        except OSError as error:
            files = " ".join(f"{flag} {file}" for flag, file in self._files.items())
            raise ValueError(f"{files} cannot be used: {getattr(error, 'reason', None) or error}") from None
        return context


def _refuse() -> str:
    # Otherwise the library asks for it on the terminal.
    raise ValueError("--tls-key is encrypted, and a server cannot ask for its password: openssl pkey writes it plainly")


class _Current(ssl.SSLContext):
    """Takes the context that the files give now for each connection."""

    tls: Tls

    def wrap_bio(self, *arguments: Any, **others: Any) -> ssl.SSLObject:
        return self.tls.context.wrap_bio(*arguments, **others)
