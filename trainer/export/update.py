"""New items in a serving directory, without training: their sides from the exported item tower and their features.

Axes: R new items.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from torch import Tensor

from logitmix.common.files import clean_up, in_turn, whole_directory
from logitmix.common.messages import tell
from logitmix.common.storage import alone, fetch, push
from logitmix.modules.schema import Feature
from logitmix.serving.directory import reader, writer
from logitmix.serving.directory.format import CARD, COLUMNS, IDS, Contents, is_extra, items_file
from logitmix.serving.items import CHUNK_ITEMS
from logitmix.serving.retriever import Retriever
from logitmix.serving.texts import Texts
from logitmix.trainer.data.features import as_in_requests, find_features
from logitmix.trainer.data.joined import joins_of
from logitmix.trainer.data.prepare import TITLE, titles_of
from logitmix.trainer.export.card import renew_card
from logitmix.trainer.export.columns import read_items, updated
from logitmix.trainer.export.export import EXTRAS, about_new_items, in_order, texts_of, write_extras
from logitmix.trainer.export.indexes import index_of


def update_items(directory: Path, items: str, id_column: str = "item", said: Console | None = None) -> dict[str, int]:
    """Adds the items of a table (CSV, JSON lines or Parquet) to a serving directory, which is replaced when the new one
    is complete; returns how many were added, and how many were there already and are unchanged. Raises ValueError if
    there is no intact serving directory, if the table cannot be read, and for values that do not fit the features of
    the model's schema.
    """
    directory = directory.resolve()
    with alone(directory):
        fetch(directory)
        with in_turn(directory):
            clean_up(directory)
            counts = _update(directory, items, id_column, said)
        push(directory)
    return counts


def _update(directory: Path, items: str, id_column: str, said: Console | None) -> dict[str, int]:
    contents = reader.read(directory)
    retriever = Retriever(contents)
    table = read_items(items, id_column, joins_of(contents.about.schema.of("item")), said)
    if said and (line := table.contradictions(Path(items).name)):
        tell(said, line)
    features = {feature.name: feature for feature in contents.about.schema.of("item")}
    names = find_features(list(table.columns), features)
    if said and (
        unused := sorted(column for column, name in names.items() if name not in (*features, TITLE, *contents.columns))
    ):
        tell(said, f"not used, for the model has no such features: {', '.join(unused)}")
    places = {raw_id: place for place, raw_id in enumerate(table.ids.to_pylist())}
    new = {raw_id: place for raw_id, place in places.items() if contents.raw_ids.find(raw_id) is None}
    if new and said and (line := about_new_items(contents.about)):
        tell(said, line)
    if new:
        rows = np.array(list(new.values()))
        columns = {names[column]: values.take(pa.array(rows)) for column, values in table.columns.items()}
        shards = list(_shards(retriever, features, columns, list(new)))
        titles = titles_of("items", columns[TITLE]).fill_null("").to_pylist() if TITLE in columns else None
        _write(directory, contents, shards, list(new), titles, columns)
    return {"added": len(new), "known": len(places) - len(new), "num_items": contents.about.num_items + len(new)}


def _shards(
    retriever: Retriever, features: Mapping[str, Feature], columns: Mapping[str, pa.Array], ids: Sequence[str]
) -> Iterator[dict[str, Tensor]]:
    values = {name: as_in_requests(features[name], column) for name, column in columns.items() if name in features}
    for start in range(0, len(ids), CHUNK_ITEMS):
        part = enumerate(ids[start : start + CHUNK_ITEMS], start)
        yield retriever.new_items({raw_id: {name: of[row] for name, of in values.items()} for row, raw_id in part})


def _write(
    directory: Path,
    contents: Contents,
    shards: Sequence[Mapping[str, Tensor]],
    ids: list[str],
    titles: list[str] | None,
    table: Mapping[str, pa.Array],
) -> None:
    about = replace(contents.about, num_items=contents.about.num_items + len(ids))
    before, files = len(contents.shards), reader.read_manifest(directory)["files"]
    count = before + len(shards)
    indexed = {name: kind for name in files if (kind := index_of(name))}
    kinds = list(dict.fromkeys(indexed.values()))
    for kind in kinds:
        EXTRAS[kind].check(about.model)
    with whole_directory(directory, writer.kept(directory, None)) as staging:
        names = {items_file(number, before): items_file(number, count) for number in range(before)}
        kept = [name for name in files if name not in (*names, *indexed, IDS, COLUMNS, CARD)]
        # Nobody needs an extra that was removed.
        names |= {name: name for name in kept if (directory / name).exists() or not is_extra(name)}
        for old, name in names.items():
            _link(directory / old, staging / name)
        entries = {name: files[old] for old, name in names.items()}
        for number, shard in enumerate(shards, start=before):
            entries |= writer.write_items(staging, about, number, count, shard)
        shown = None
        if contents.titles is not None or titles is not None:
            old_titles = list(contents.titles or [""] * contents.about.num_items)
            shown = Texts.of([*old_titles, *(titles or [""] * len(ids))])
        raw_ids = texts_of(pa.chunked_array([[*contents.raw_ids, *ids]]))
        entries |= writer.write_ids(staging, about, in_order(raw_ids, "raw_ids name an item"), shown)
        first = contents.about.num_items
        entries |= writer.write_columns(staging, updated(contents.columns, about.num_items, table, ids, first))
        entries |= write_extras(staging, about, entries, kinds)
        if CARD in files:
            card = directory / CARD
            text = card.read_text(encoding="utf-8") if card.exists() else ""
            entries |= renew_card(staging, about, entries, text)
        writer.write_manifest(staging, about, entries)


def _link(old: Path, new: Path) -> None:
    new.parent.mkdir(exist_ok=True)
    try:
        os.link(old, new)
    except OSError:
        # If the file system has no links.
        shutil.copyfile(old, new)
