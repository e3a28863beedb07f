"""`logitmix rollback`: a former export in place of the one that is there."""

from dataclasses import dataclass

from logitmix.common.mappings import counted
from logitmix.common.storage import path_of
from logitmix.trainer.commands.options import ExportPlace, JSONOption, importing
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments(JSONOption):
    """Exchange a serving directory and a former one that `export --overwrite --keep` has kept. A server takes it over
    as it does a new export; the same command undoes it."""

    directory: ExportPlace
    """Serving directory."""
    to: int | None = None
    """Number of the former one; the last, which is 1, unless it is given."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "rollback", words)
    with importing():
        from logitmix.serving.directory.writer import roll_back

    manifest = roll_back(path_of(arguments.directory), arguments.to)
    items = counted(manifest["num_items"], "item")
    said = f"{arguments.directory}: {items}, step {manifest['step']} of {manifest['run']}"
    arguments.tell(manifest, said)
