"""`logitmix check`: what a dataset directory of another program lacks."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from logitmix.common.mappings import counted
from logitmix.common.storage import fetch
from logitmix.trainer.commands.options import JSONOption
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments(JSONOption):
    """Say what a dataset directory lacks that another program has written: files, columns and entries that are missing,
    values of another type or out of range, counts and digests that do not match. Exit status 1 if it lacks
    something."""

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Dataset directory."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "check", words)
    from logitmix.trainer.data.check import COUNTS, check_dataset

    problems, description = check_dataset(fetch(arguments.directory))
    if problems:
        lines = [*problems, f"{arguments.directory} has {counted(len(problems), 'problem')}; see docs/dataset.md"]
    else:
        counts = ", ".join(counted(description[name], name.removesuffix("s")) for name in COUNTS)
        files = "all files have their digests" if "sha256" in description else "there are no digests of the files"
        lines = [f"{arguments.directory} is whole: {counts}; {files}"]
    arguments.tell({"problems": problems, **{name: description.get(name) for name in COUNTS}}, "\n".join(lines))
    if problems:
        raise SystemExit(1)
