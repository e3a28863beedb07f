"""`logitmix fold`: an export and its deltas -> one export."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from logitmix.common.mappings import counted
from logitmix.common.storage import path_of
from logitmix.trainer.commands.options import ExportPlace, JSONOption, OverwriteOption, importing
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments(OverwriteOption, JSONOption):
    """Write the export that a serving directory and its deltas give, file for file the same as a whole export."""

    directory: ExportPlace
    """Serving directory."""
    deltas: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """Folder with the deltas."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Serving directory to write; with --overwrite it may be the first one."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "fold", words)
    with importing():
        from logitmix.trainer.export.delta import fold

    directory, deltas, out = (path_of(of) for of in (arguments.directory, arguments.deltas, arguments.out))
    manifest = fold(directory, deltas, out, arguments.overwrite, arguments.keep)
    said = f"{arguments.out}: {counted(manifest['num_items'], 'item')}, step {manifest['step']} of {manifest['run']}"
    arguments.tell(manifest, said)
