"""`logitmix serve`: answers over HTTP, with a page to try it out."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from logitmix.common.storage import path_of
from logitmix.launch.processes import launched
from logitmix.trainer.commands.options import ExportPlace, threads_of_each
from logitmix.trainer.commands.words import parse

if TYPE_CHECKING:
    from logitmix.serving.tls import Tls


@dataclass(frozen=True)
class Arguments:
    """Answer requests over HTTP until SIGTERM or Ctrl-C. A new export written in place of the directory takes over
    without a restart. docs/serving.md describes requests and answers."""

    directory: ExportPlace
    """Serving directory."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this host, whose users need no token unless there is a --token-file."""
    port: int = 8080
    """Port to listen on; any free one when 0."""
    workers: int = 1
    """Processes that each answer from the whole export, for more requests; they share the files in memory."""
    threads: int = 0
    """CPU threads of the model; torch's default when 0, and all cores divided among the workers."""
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
    """File with values of filterable columns that differ from the export's (CSV with a header, or JSON lines, with the
    ids as `item`). It is looked at every second."""
    wait_ms: float = 10.0
    """Milliseconds that a request waits, at most, for others to be answered with it."""
    drain_seconds: float = 0.0
    """Seconds that the server goes on after SIGTERM, while /readyz tells load balancers to send requests elsewhere."""
    deltas: str = ""
    """Folder to which deltas of the export come; they are applied in order."""
    shadow: str = ""
    """Another serving directory that answers requests too: /metrics and the page compare the answers."""
    shadow_share: float = 1.0
    """Share of the requests that it answers."""
    allow_host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A name by which clients reach the server, such as that of a reverse proxy; * for any. Addresses, localhost,
    --host and this machine's name always are."""
    allow_origin: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An origin whose pages may ask from browsers (CORS), such as https://shop.example; * for any."""
    token_file: str = ""
    """File with the token that requests must have: Authorization: Bearer TOKEN."""
    tls_certificate: str = ""
    """File with the certificate for HTTPS, in PEM, and those between it and one that clients know."""
    tls_key: str = ""
    """File with its private key, in PEM."""
    tls_client_ca: str = ""
    """File with authorities, one of which must have signed each client's certificate."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "serve", words)
    if launched():
        raise ValueError("serve is no job for torchrun: docs/serving.md says how several machines share the items")
    from logitmix.serving.guards import Allowed, exposed, read_token
    from logitmix.serving.settings import Settings
    from logitmix.serving.workers import say, serve

    token, tls = read_token(path_of(arguments.token_file)) if arguments.token_file else "", _tls(arguments)
    for flag, file in {"--token-file": arguments.token_file, "--tls-key": arguments.tls_key}.items():
        if file and (line := exposed(flag, path_of(file))):
            say(line)
    attributes, deltas, shadow = (
        path_of(of) if of else None for of in (arguments.attributes, arguments.deltas, arguments.shadow)
    )
    settings = Settings(
        arguments.wait_ms,
        arguments.stage1,
        arguments.boost_new,
        arguments.where,
        attributes,
        deltas,
        shadow,
        arguments.shadow_share,
        arguments.threads,
        arguments.drain_seconds,
        Allowed(arguments.allow_host, arguments.allow_origin, token),
        tls,
    )
    if arguments.workers > 1:
        # The workers get it from here, and divide the cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_each(arguments.workers)))
    place = path_of(arguments.directory), arguments.host, arguments.port
    if status := serve(*place, settings, arguments.workers):
        raise SystemExit(status)


def _tls(arguments: Arguments) -> "Tls | None":
    if not (arguments.tls_certificate or arguments.tls_key or arguments.tls_client_ca):
        return None
    if not (arguments.tls_certificate and arguments.tls_key):
        raise ValueError("HTTPS needs both --tls-certificate FILE and --tls-key FILE")
    from logitmix.serving.tls import Tls

    ca = path_of(arguments.tls_client_ca) if arguments.tls_client_ca else None
    return Tls(path_of(arguments.tls_certificate), path_of(arguments.tls_key), ca)
