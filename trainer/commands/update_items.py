"""`logitmix update-items`: new items into a serving directory, from their features."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from logitmix.common.storage import path_of
from logitmix.trainer.commands.options import ExportPlace, JSONOption
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments(JSONOption):
    """Add items to a serving directory, from their features alone: no training, no new export."""

    directory: ExportPlace
    """Serving directory."""
    items: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """CSV, JSON lines or Parquet: a table of the items, with the features' names as columns."""
    item_column: str = "item"
    """Column with the item ids; the first column if there is none of this name."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "update-items", words)
    from logitmix.trainer.export.update import update_items

    counts = update_items(path_of(arguments.directory), arguments.items, arguments.item_column, Console(stderr=True))
    arguments.tell(
        counts,
        f"{arguments.directory}: {counts['added']:,} items added, {counts['known']:,} were there already, "
        f"{counts['num_items']:,} now",
    )
