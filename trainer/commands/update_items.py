"""`logitmix update-items`: another catalog for a serving directory, without training."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from logitmix.common.storage import path_of
from logitmix.trainer.commands.options import ExportPlace, JSONOption, importing
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments(JSONOption):
    """Add items to a serving directory, change their features and titles, and remove items: no training, no new
    export."""

    directory: ExportPlace
    """Serving directory."""
    items: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """CSV, JSON lines or Parquet: a table of new and changed items, with the features' names as columns. What it has no
    column for stays."""
    item_column: str = "item"
    """Column with the item ids; the first column if there is none of this name."""
    remove: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """File with the id of an item in each line: these are in no answer any more, and histories may still hold them."""
    only: bool = False
    """Also remove the items that are not in the table."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "update-items", words)
    with importing():
        from logitmix.trainer.export.catalog import Catalog, in_words
        from logitmix.trainer.export.update import update_items

    catalog = Catalog(arguments.items, arguments.item_column, arguments.remove, arguments.only)
    counts = update_items(path_of(arguments.directory), catalog, Console(stderr=True))
    arguments.tell(counts, f"{arguments.directory}: {in_words(counts)}")
