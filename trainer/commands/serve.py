"""`logitmix serve`: answers over HTTP, with a page to try it out."""

from dataclasses import dataclass

import tyro

from logitmix.common.storage import path_of
from logitmix.trainer.commands.options import ExportPlace, ItemProcessesOption, items_group
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments(ItemProcessesOption):
    """Answer requests over HTTP until SIGTERM or Ctrl-C. A new export written in place of the directory takes over
    without a restart. docs/serving.md describes requests and answers."""

    directory: ExportPlace
    """Serving directory."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this host. There is no authentication."""
    port: int = 8080
    """Port to listen on; any free one when 0."""
    threads: int = 0
    """CPU threads of the model; torch's default when 0, and all cores divided among the processes of this host."""
    wait_ms: float = 10.0
    """Milliseconds that a request waits, at most, for others to be answered with it."""
    allow_host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A name by which clients reach the server, such as that of a reverse proxy; * for any. Addresses, localhost,
    --host and this machine's name always are."""
    allow_origin: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An origin whose pages may ask from browsers (CORS), such as https://shop.example; * for any."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "serve", words)
    arguments.start_ranks("serve", words)
    from logitmix.serving.server import Allowed, serve

    allowed = Allowed(arguments.allow_host, arguments.allow_origin)
    directory = path_of(arguments.directory)
    with items_group("serve") as group:
        serve(directory, arguments.host, arguments.port, arguments.threads, arguments.wait_ms, group, allowed)
