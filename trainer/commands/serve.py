"""`logitmix serve`: answers over HTTP, with a page to try it out."""

import os
from dataclasses import dataclass, field

import tyro

from logitmix.common.storage import path_of
from logitmix.launch.processes import launched
from logitmix.serving.settings import ServerSettings
from logitmix.trainer.commands.options import ExportPlace, threads_of_each
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments(ServerSettings):
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
    allow_host: tyro.conf.UseAppendAction[tuple[str, ...]] = field(default=(), kw_only=True)
    allow_origin: tyro.conf.UseAppendAction[tuple[str, ...]] = field(default=(), kw_only=True)


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "serve", words)
    if launched():
        raise ValueError("serve is no job for torchrun: docs/serving.md says how several machines share the items")
    from logitmix.serving.guards import exposed
    from logitmix.serving.workers import say, serve

    _ = arguments.allowed, arguments.tls  # which refuse files that cannot be used
    for flag, file in {"--token-file": arguments.token_file, "--tls-key": arguments.tls_key}.items():
        if file and (line := exposed(flag, path_of(file))):
            say(line)
    if arguments.workers > 1:
        # The workers get it from here, and divide the cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_each(arguments.workers)))
    place = path_of(arguments.directory), arguments.host, arguments.port
    if status := serve(*place, arguments, arguments.workers):
        raise SystemExit(status)
