"""`logitmix prepare`: raw files -> dataset directory."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from logitmix.trainer.commands.options import JSONOption
from logitmix.trainer.commands.words import parse
from logitmix.trainer.prepare.config import PrepareOptions


@tyro.conf.configure(tyro.conf.UseAppendAction)
@dataclass(frozen=True)
class Arguments(JSONOption, PrepareOptions):
    """Raw files in, dataset directory out."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "prepare", words)
    from logitmix.trainer.prepare.prepare import prepare
    from logitmix.trainer.prepare.summary import summarize

    description = prepare(arguments)
    arguments.tell(description, summarize(description, arguments.directory))
