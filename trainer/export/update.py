"""A serving directory with another catalog in its place, without training (catalog.py)."""

from pathlib import Path

from rich.console import Console

from logitmix.common.files import clean_up, in_turn, whole_directory
from logitmix.common.messages import tell
from logitmix.common.storage import alone, fetch, push
from logitmix.serving.directory import reader, writer
from logitmix.serving.directory.format import CARD, Contents
from logitmix.trainer.export.card import renew_card
from logitmix.trainer.export.catalog import Catalog, Plan, planned, write_planned
from logitmix.trainer.export.export import EXTRAS, about_new_items, write_extras
from logitmix.trainer.export.indexes import INDEXES


def update_items(directory: Path, catalog: Catalog, said: Console | None = None) -> dict[str, int]:
    """Changes the items of a serving directory, which is replaced when the new one is complete; returns how many were
    added, changed, unchanged and removed, and how many there are now. Raises ValueError if there is no intact serving
    directory, and as `planned` does.
    """
    directory = directory.resolve()
    with alone(directory):
        fetch(directory)
        with in_turn(directory):
            clean_up(directory)
            contents = reader.read(directory)
            plan = planned(contents, catalog, said)
            if said and plan.counts["added"] and (line := about_new_items(contents.about)):
                tell(said, line)
            if any(plan.counts[what] for what in ("added", "changed", "removed")):
                _write(directory, contents, plan)
        push(directory)
    return plan.counts


def _write(directory: Path, contents: Contents, plan: Plan) -> None:
    files = reader.read_manifest(directory)["files"]
    kinds = [kind for kind, (end, _) in INDEXES.items() if f"hindexer{end}" in files or f"similarity{end}" in files]
    for kind in kinds:
        EXTRAS[kind][0](contents.about.model)
    with whole_directory(directory, writer.kept(directory, None)) as staging:
        about, entries = write_planned(directory, contents, plan, staging)
        entries |= write_extras(staging, about, entries, kinds)
        if CARD in files:
            card = directory / CARD
            text = card.read_text(encoding="utf-8") if card.exists() else ""
            entries |= renew_card(staging, about, entries, text)
        writer.write_manifest(staging, about, entries)
