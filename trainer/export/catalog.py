"""The catalog of an export changed, without training: items that are new, that have other features or titles, or that
are removed. Their sides are those of the exported item tower: a new item has the row of the unknown one, a known item
keeps its own. An item that is removed stays in the export behind the others, for the histories that hold it.

Axes: X items, N items of a table, C of which change, S shards of the export.
"""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Console
from torch import Tensor

from logitmix.common.mappings import counted
from logitmix.common.messages import tell
from logitmix.modules.schema import ITEM
from logitmix.serving.columns import ACTIONS, NEW, Column
from logitmix.serving.directory import reader, writer
from logitmix.serving.directory.delta import differ, rows_as_shard
from logitmix.serving.directory.format import (
    CARD,
    COLUMNS,
    IDS,
    About,
    Contents,
    Entries,
    is_extra,
    items_file,
    numbered,
    row_tensor,
)
from logitmix.serving.encoding import require_finite
from logitmix.serving.features import FeatureReader
from logitmix.serving.items import CHUNK_ITEMS, ItemInputs, items_of, stored_type
from logitmix.serving.model import scales_of, trained_tower
from logitmix.serving.texts import ABSENT, Texts
from logitmix.trainer.export.columns import read_items, updated
from logitmix.trainer.prepare.features import as_in_requests, find_features
from logitmix.trainer.prepare.joined import joins_of
from logitmix.trainer.prepare.prepare import TITLE, titles_of
from logitmix.trainer.prepare.tables import SideTable


@dataclass(frozen=True)
class Catalog:
    """What the items of an export are to be."""

    items: str = ""
    """Table of new and changed items (CSV, JSON lines or Parquet). Features that it has no column for stay."""
    id_column: str = "item"
    remove: str = ""
    """File with the raw id of an item in each line."""
    only: bool = False
    """Whether the items that are not in the table are removed, too."""

    def __post_init__(self) -> None:
        if self.only and not self.items:
            raise ValueError("--only leaves the items of a table: give it with --items")
        if not (self.items or self.remove):
            raise ValueError("nothing to do: give a table with --items, or a file of ids with --remove")


@dataclass(frozen=True, eq=False)
class _Rows:
    """Items whose sides are computed: their places in their shard, rising, and what the item tower takes."""

    place_C: np.ndarray
    ids: list[str]
    inputs: ItemInputs

    def take(self, rows: range | None) -> "_Rows":
        """Some of them; all if None."""
        if rows is None:
            return self
        inputs = self.inputs.take(torch.arange(rows.start, rows.stop))
        return _Rows(self.place_C[rows.start : rows.stop], self.ids[rows.start : rows.stop], inputs)


@dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of an export's items."""

    parts: list[np.ndarray]
    """For each shard of the new export, where its items were among all items; ABSENT for new ones."""
    removed: int
    """Items of the last part, if that is of removed ones."""
    changed: list[_Rows]
    """The items of each shard that have other features; at last the new ones."""
    titles: Mapping[str, str]
    """Those of the table, by raw id."""
    columns: Mapping[str, Column]
    """Of the new export."""
    counts: dict[str, int]


def planned(contents: Contents, catalog: Catalog, said: Console | None = None) -> Plan:
    """What a catalog changes of an export. Raises ValueError if the table or the file cannot be read, for values that
    do not fit the features of the model's schema, for an id that is both in the table and to be removed, and if no item
    would be left."""
    about, X, every = contents.about, contents.about.num_items, len(contents.raw_ids)
    features = {feature.name: feature for feature in about.schema.of("item")}
    table = read_items(catalog.items, catalog.id_column, joins_of(features.values()), said) if catalog.items else None
    used = {*features, TITLE, *contents.columns}
    columns, ids = _columns_of(table or SideTable(), Path(catalog.items).name, used, said)
    absent = [name for name in contents.columns if table and name not in (*columns, ACTIONS, NEW)]
    if said and absent:
        tell(said, f"{Path(catalog.items).name} has no column {', '.join(absent)}: items keep the values that they had")
    if TITLE in columns and f"item_{TITLE}" in features:
        columns[f"item_{TITLE}"] = columns[TITLE]
    place_N = np.array(contents.raw_ids.places(ids), np.int64)
    stays_X = _stays(contents, catalog, ids, place_N, said)
    # New items come last.
    place_N[place_N == ABSENT] = every
    order_N = place_N.argsort(kind="stable")
    ids, place_N = [ids[row] for row in order_N], place_N[order_N]
    columns = {name: column.take(pa.array(order_N)) for name, column in columns.items()}
    back_N, added = place_N[(place_N >= X) & (place_N < every)], int((place_N == every).sum())
    if not (left := int(stays_X.sum()) + len(back_N) + added):
        raise ValueError(f"no item of {X:,} would be left; an export needs at least one")

    try:
        changed = _changed(contents, columns, ids, place_N)
    except ValueError as error:
        raise ValueError(f"{Path(catalog.items).name}: {error}") from None
    of_ids = titles_of("items", columns[TITLE]).fill_null("").to_pylist() if TITLE in columns else []
    titles = dict(zip(ids, of_ids, strict=False))
    known = {raw_id: int(place) for raw_id, place in zip(ids, place_N, strict=True) if place < X}
    before = contents.titles or [""] * every
    altered = {raw_id for rows in changed for raw_id in rows.ids} & known.keys()
    altered |= {raw_id for raw_id, place in known.items() if raw_id in titles and titles[raw_id] != before[place]}
    bounds = _bounds(contents)
    ranked = [first + stays_X[first:stop].nonzero()[0] for first, stop in pairwise(bounds) if first < X]
    chunks = [np.full(min(CHUNK_ITEMS, added - start), ABSENT) for start in range(0, added, CHUNK_ITEMS)]
    gone = np.concatenate([(~stays_X).nonzero()[0], np.setdiff1d(np.arange(X, every), back_N)])
    now_X = np.concatenate([*ranked, back_N, *chunks])
    old = left - added
    at = np.concatenate([np.searchsorted(now_X[:old], place_N[place_N < every]), np.arange(old, left)])
    filterable = updated(contents.columns, now_X, columns, ids, at)
    for name, column in filterable.items():
        one, other = contents.columns[name].values[list(known.values())], column.values[at[: len(known)]]
        differs = (one != other) & ~(one.isnan() & other.isnan())
        altered |= {ids[row] for row in differs.nonzero().flatten().tolist()}
    counts = {
        "added": len(back_N) + added,
        "changed": len(altered),
        "unchanged": len(known) - len(altered),
        "removed": int(X - stays_X.sum()),
        "num_items": left,
    }
    parts = [part for part in (*ranked, back_N, *chunks, gone) if len(part)]
    return Plan(parts, len(gone), changed, titles, filterable, counts)


def in_words(counts: Mapping[str, int]) -> str:
    """What a plan does, for people to read."""
    return (
        "items: {added:,} added, {changed:,} changed, {unchanged:,} unchanged, {removed:,} removed, {num_items:,} now"
    ).format(**counts)


def read_ids(file: str, flag: str, of: str) -> list[str]:
    """The raw ids in the lines of a file. ValueError, with the flag that names it, if it cannot be read."""
    if not Path(file).exists() or Path(file).is_dir():
        raise ValueError(f"no file at {file}; {flag} must name one, with the id of {of} in each line")
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text in UTF-8; {flag} needs the id of {of} in each line") from None
    return [line.strip() for line in lines if line.strip()]


def _columns_of(
    table: SideTable, label: str, used: Collection[str], said: Console | None
) -> tuple[dict[str, pa.Array], list[str]]:
    """The table's columns by the names that are `used`, a row for each of its ids; and these ids."""
    for line in table.remarks(label) if said else ():
        tell(said, line)
    names = find_features(list(table.columns), used)
    if said and (unused := sorted(column for column, name in names.items() if name not in used)):
        tell(said, f"not used, for the model has no such features: {', '.join(unused)}")
    row_of = {raw_id: row for row, raw_id in enumerate(table.ids.to_pylist())}
    rows = pa.array(row_of.values(), pa.int64())
    return {names[column]: values.take(rows) for column, values in table.columns.items()}, list(row_of)


def _stays(
    contents: Contents, catalog: Catalog, ids: Sequence[str], place_N: np.ndarray, said: Console | None
) -> np.ndarray:
    """Which items are not removed, bool [X]."""
    X = contents.about.num_items
    stays_X = np.ones(X, bool)
    if catalog.only:
        if (place_N == ABSENT).all():
            raise ValueError(
                f"none of the {len(ids):,} items in {catalog.items} is in the export (ids {next(iter(ids), 'none')} / "
                f"{contents.raw_ids[0]}); give both the same ids, or leave out --only, which would remove all {X:,}"
            )
        stays_X[:] = False
        stays_X[place_N[(place_N >= 0) & (place_N < X)]] = True
    if catalog.remove:
        gone = list(dict.fromkeys(read_ids(catalog.remove, "--remove", "an item")))
        listed = set(ids)
        if both := [raw_id for raw_id in gone if raw_id in listed]:
            raise ValueError(f"{both[0]!r} is in {catalog.items} and in {catalog.remove}; leave it out of one of them")
        places = dict(zip(gone, contents.raw_ids.places(gone), strict=True))
        unknown = [raw_id for raw_id, place in places.items() if not 0 <= place < X]
        stays_X[[place for place in places.values() if 0 <= place < X]] = False
        if said and unknown:
            of = f"{len(unknown):,} of {len(gone):,} items in {catalog.remove} are not in the export"
            tell(said, f"{of}, such as {unknown[0]!r}")
    if said and not stays_X.all():
        (gone_N,) = (~stays_X).nonzero()
        tell(said, f"removes {counted(len(gone_N), 'item')}, such as {contents.raw_ids[int(gone_N[0])]!r}")
    return stays_X


def _bounds(contents: Contents) -> list[int]:
    """Where the items of each shard begin, and the end [S + 1]."""
    sizes = [len(shard[row_tensor(contents.about)]) for shard in contents.shards]
    return np.cumsum([0, *sizes]).tolist()


def _changed(
    contents: Contents,
    columns: Mapping[str, pa.Array],
    ids: Sequence[str],
    place_N: np.ndarray,
) -> list[_Rows]:
    """As of a plan; the table's items are in the order of their places."""
    schema, bounds = contents.about.schema, _bounds(contents)
    reader = FeatureReader(schema, contents.vocabularies, contents.projections)
    features = {of.name: of for of in schema.of("item")}
    given = {
        name: as_in_requests(features[name], column, reader.encoders.get(name))
        for name, column in columns.items()
        if name in features
    }
    found = []
    for number, (first, stop) in enumerate(pairwise(np.searchsorted(place_N, [*bounds, bounds[-1] + 1]).tolist())):
        some, records = ids[first:stop], [{name: of[row] for name, of in given.items()} for row in range(first, stop)]
        read = reader.read("item", records, [f"item {raw_id!r}" for raw_id in some])
        for name, of in read.items():
            read[name] = replace(of, values=of.values.to(stored_type(features[name], schema)))
        place, differs = place_N[first:stop] - bounds[number], np.ones(stop - first, bool)
        own = contents.tables[ITEM].fetch(torch.zeros(stop - first, dtype=torch.int64))
        if number < len(contents.shards):
            differs[:] = False
            if given:
                before = ItemInputs.of_tensors(contents.shards[number], schema).take(torch.from_numpy(place))
                own, read = before.own_RW, {**before.values, **{name: read[name] for name in given}}
                for name in given:
                    differs |= differ(before.values[name], read[name]).numpy()
        at = differs.nonzero()[0]
        own_ids = [some[row] for row in at.tolist()]
        found.append(_Rows(place[at], own_ids, ItemInputs(own, read).take(torch.from_numpy(at))))
    return found


def write_planned(directory: Path, contents: Contents, plan: Plan, staging: Path) -> tuple[About, Entries]:
    """Writes the export in `directory` with the changes of a plan into `staging`, but for its manifest, its card and
    its vectors for other engines. ValueError for features that are too large for the tower."""
    files, shards, count = reader.read_manifest(directory)["files"], contents.shards, len(plan.parts)
    about = replace(contents.about, num_items=plan.counts["num_items"], removed=plan.removed)
    bounds, entries, added = _bounds(contents), Entries(), 0

    def link(old: str, name: str) -> None:
        (staging / name).parent.mkdir(exist_ok=True)
        try:
            os.link(directory / old, staging / name)
        except OSError:
            # If the file system has no links.
            shutil.copyfile(directory / old, staging / name)
        entries[name] = files[old]

    for name in files:
        # Vectors for other engines begin with the name of their stage.
        renewed = name in (*numbered(items_file, files), IDS, COLUMNS, CARD) or name.startswith(
            ("similarity", "hindexer")
        )
        # Nobody needs an extra that was removed.
        if not renewed and ((directory / name).exists() or not is_extra(name)):
            link(name, name)
    for number, part in enumerate(plan.parts):
        if part[0] == ABSENT:
            (shard,) = _computed(contents, plan.changed[-1], range(added, added := added + len(part)))
        else:
            source = int(np.searchsorted(bounds, part[0], "right")) - 1
            # Nothing changes of removed items.
            rows = plan.changed[source].take(range(0) if plan.removed and number == count - 1 else None)
            if not rows.ids and np.array_equal(part, np.arange(*bounds[source : source + 2])):
                link(items_file(source, len(shards)), items_file(number, count))
                continue
            index = part.copy()
            index[np.searchsorted(part, bounds[source] + rows.place_C)] = bounds[-1] + np.arange(len(rows.ids))
            computed = _computed(contents, rows, range(len(rows.ids)))
            shard = rows_as_shard([*shards, *computed], about, torch.from_numpy(index))
        entries |= writer.write_items(staging, about, number, count, shard)
    return about, entries | _write_ids(staging, about, contents, plan) | writer.write_columns(staging, plan.columns)


def _computed(contents: Contents, rows: _Rows, places: range) -> list[dict[str, Tensor]]:
    """What an export stores of some of the rows, at most CHUNK_ITEMS in each part. ValueError that names an item whose
    features are too large."""
    about, scales = contents.about, scales_of(contents.shards[0])
    tower = trained_tower(about.model, about.schema, contents.weights)
    found = []
    for start in range(places.start, places.stop, CHUNK_ITEMS):
        some = rows.take(range(start, min(start + CHUNK_ITEMS, places.stop)))
        require_finite(
            tower.item_sides(some.inputs.embed(tower, contents.tables)), [f"item {raw_id!r}" for raw_id in some.ids]
        )
        found.append(items_of(tower, some.inputs, contents.tables, about.precision, about.item_cache, scales))
    return found


def _write_ids(staging: Path, about: About, contents: Contents, plan: Plan) -> Entries:
    new, raw_ids = iter(plan.changed[-1].ids), contents.raw_ids
    places = [place for part in plan.parts for place in part.tolist()]
    ids = [next(new) if place == ABSENT else raw_ids[place] for place in places]
    shown = None
    if contents.titles is not None or plan.titles:
        before = contents.titles or [""] * len(raw_ids)
        old = ["" if place == ABSENT else before[place] for place in places]
        shown = Texts.of([plan.titles.get(raw_id, title) for raw_id, title in zip(ids, old, strict=True)])
    return writer.write_ids(staging, about, in_order(texts_of(pa.chunked_array([ids])), "raw_ids name an item"), shown)


def texts_of(column: pa.ChunkedArray) -> Texts:
    """Arrow's texts, "" for null."""
    array = column.fill_null("").cast(pa.large_string()).combine_chunks()
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    texts = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return Texts(torch.from_numpy(texts.copy()), torch.from_numpy(bounds - bounds[0]))


def as_arrow(texts: Texts) -> pa.Array:
    """The other way round."""
    buffers = [pa.py_buffer(tensor.numpy()) for tensor in (texts.bounds, texts.data)]
    return pa.LargeStringArray.from_buffers(len(texts), *buffers)


def in_order(texts: Texts, what: str, blanks: bool = False) -> Texts:
    """Texts with the order for finding them, equal ones by rising index; ValueError if two are the same, unless they
    are empty and there may be `blanks`. `what` they name: "raw_ids name an item"."""
    array = as_arrow(texts)
    order = pc.sort_indices(array)
    ordered = array.take(order)
    twice = pc.equal(ordered[1:], ordered[:-1])
    if pc.any(pc.and_(twice, pc.not_equal(ordered[1:], "")) if blanks else twice).as_py():
        raise ValueError(f"the dataset's {what} twice; prepare it again")
    return replace(texts, order=torch.from_numpy(order.to_numpy().astype(np.int64)))
