"""What a server is told, by the command line or the configuration of a cluster."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from logitmix.common.mappings import require
from logitmix.common.storage import path_of

if TYPE_CHECKING:
    from logitmix.serving.guards import Allowed
    from logitmix.serving.tls import Tls

MAX_STAGE_1 = 1_000_000
MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How requests are answered, on one machine and on a cluster. ValueError for what is impossible."""

    stage1: int | None = None
    """Items that the h-indexer keeps, for requests that do not say. By default a hundredth of all, but from 10,000 to
    100,000; for a k of 1,024 or more 100,000."""
    boost_new: float = 0.0
    """Added to the scores of new items, for requests that do not say: those for which the filterable column new is not
    0."""
    where: str = ""
    """A condition on the export's filterable columns, such as "in_stock = 1", on the items of all answers, besides that
    of a request."""
    attributes: str = ""
    """File with values of filterable columns that differ from the export's: CSV with a header, with the ids as `item`.
    It is looked at every second."""
    deltas: str = ""
    """Folder to which deltas of the export come; they are applied in order."""
    wait_ms: float = 10.0
    """Milliseconds that a request waits, at most, for others to be answered with it."""
    allow_host: tuple[str, ...] = ()
    """A name by which clients reach the server, such as that of a reverse proxy; * for any. Addresses, localhost,
    --host and this machine's name always are."""
    allow_origin: tuple[str, ...] = ()
    """An origin whose pages may ask from browsers (CORS), such as https://shop.example; * for any."""
    token_file: str = ""
    """File with the token that requests must have: Authorization: Bearer TOKEN."""

    shadow_share = 1.0  # of ServerSettings, for a server that has no shadow

    def __post_init__(self) -> None:
        require(0 <= self.wait_ms <= 1000, "--wait-ms", self.wait_ms, "from 0 to 1000")
        require(
            self.stage1 is None or 1 <= self.stage1 <= MAX_STAGE_1, "--stage1", self.stage1, f"from 1 to {MAX_STAGE_1}"
        )
        require(math.isfinite(self.boost_new), "--boost-new", self.boost_new, "a finite number")

    @property
    def conditions(self) -> tuple[str, Path | None]:
        """What the items of all answers fulfill: `where`, and the local path of `attributes`."""
        return self.where, path_of(self.attributes) if self.attributes else None

    @property
    def deltas_path(self) -> Path | None:
        """The local path of the folder `deltas`; None if there is none."""
        return path_of(self.deltas) if self.deltas else None

    @cached_property
    def allowed(self) -> "Allowed":
        """The clients whose requests are answered. ValueError if the token cannot be used."""
        from logitmix.serving.guards import Allowed, read_token

        token = read_token(path_of(self.token_file)) if self.token_file else ""
        return Allowed(self.allow_host, self.allow_origin, token)

    @cached_property
    def tls(self) -> "Tls | None":
        """Certificates for HTTPS; None without it. ValueError if a file cannot be used."""
        return None


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """Of a server on one machine, too."""

    threads: int = 0
    """CPU threads of the model; torch's default when 0, and all cores divided among the workers."""
    shadow: str = ""
    """Another serving directory that answers requests too: /metrics and the page compare the answers."""
    shadow_share: float = 1.0
    """Share of the requests that it answers."""
    tls_certificate: str = ""
    """File with the certificate for HTTPS, in PEM, and those between it and one that clients know."""
    tls_key: str = ""
    """File with its private key, in PEM."""
    tls_client_ca: str = ""
    """File with authorities, one of which must have signed each client's certificate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.shadow_share <= 1, "--shadow-share", self.shadow_share, "above 0 and at most 1")
        require(0 <= self.threads <= MOST_THREADS, "--threads", self.threads, f"from 0 to {MOST_THREADS}")

    @cached_property
    def tls(self) -> "Tls | None":
        from logitmix.serving.tls import Tls

        files = self.tls_certificate, self.tls_key, self.tls_client_ca
        if any(files) and not (self.tls_certificate and self.tls_key):
            raise ValueError("HTTPS needs both --tls-certificate FILE and --tls-key FILE")
        return Tls(*(path_of(file) if file else None for file in files)) if any(files) else None  # type: ignore[arg-type]
