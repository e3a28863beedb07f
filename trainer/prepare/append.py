"""`logitmix prepare --append`: later actions -> a folder of a dataset; dataset.py describes it.

They are prepared as a dataset of their own, by the same rules. Its users, items and values then get the numbers that
they have in the dataset, by raw ids and texts; new ones follow in order. No file changes that is there, but for
dataset.json, so that the time is that of the new actions and of reading the raw ids.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logitmix.modules.schema import ITEM, Feature, Owner, Schema
from logitmix.trainer.data.arrays import FOLDER
from logitmix.trainer.data.arrow import as_numpy
from logitmix.trainer.data.columns import Column, ranges
from logitmix.trainer.data.dataset import Dataset, files_of, load_dataset, raw_user_ids_of, stored_values
from logitmix.trainer.data.description import (
    APPENDED,
    FORMAT,
    UNIT_NAMES,
    WAITING,
    entries_of,
    name_of,
    read_description,
    reading,
    schema_of,
)
from logitmix.trainer.data.writer import rows_table, sequences_of

OWN = ("titles", "read", "filters", "times", "rejected_lines", "source", "generator", "side_tables")
"""What dataset.json says of each part by itself."""
OWNERS: dict[str, Owner] = {"users": "user", "items": "item"}
LEFT_OUT = ("repeated_targets", "last_actions", "kind", "format_version", "sha256")


def _numbers(later: pa.Array, known: pa.Array, admitted: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The number that each of the later ones has in the dataset, int64, and which of them are new, in order. Of those
    that the dataset does not have, only the `admitted` are new, and the others 0; all without it."""
    found = pc.index_in(later, value_set=known)
    missing = as_numpy(found.is_null())
    new = np.flatnonzero(missing if admitted is None else missing & admitted)
    of = found.fill_null(0).to_numpy().astype(np.int64)
    of[new] = len(known) + np.arange(len(new))
    return of, new


def require_later(path: Path, description: Mapping[str, Any], later: Mapping[str, Any]) -> None:
    """ValueError if prepared actions, by their description, cannot follow those of the dataset at `path`."""
    if description["name"] != later["name"]:
        raise ValueError(f"{path} is of {description['name']}, not of {later['name']}; append what has the same format")
    digests = {of for part in parts_of(description) for of in _digests(part).values()}
    if again := [name for name, of in _digests(later).items() if of in digests]:
        raise ValueError(f"{again[0]} is in {path} already, and its actions would be there twice; append other files")
    times, new = parts_of(description)[-1].get("times"), later["times"]
    if not times:
        return
    if times.get("unit") != new["unit"]:
        units = [UNIT_NAMES.get(of.get("unit"), "numbers of no known unit") for of in (new, times)]
        raise ValueError(f"the times to append are {units[0]}, and those of {path} {units[1]}; they must be the same")
    if new["first"] < times.get("last", new["first"]):
        raise ValueError(
            f"the first time to append is {new['first']}, but {path} has actions up to {times['last']}, and what is "
            "appended must be later; leave the earlier ones out with --where, or prepare all of it again"
        )


def parts_of(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of dataset.json for what was prepared first, and for all that was appended."""
    return [description, *(description.get(APPENDED) or [])]


def _digests(part: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files that were read, by name."""
    found: dict[str, str] = (part.get("source") or {}).get("sha256") or {}
    return found


def read_for_appending(path: Path) -> tuple[dict[str, Any], Schema]:
    """The content of dataset.json of the dataset at `path`, and its schema. ValueError if nothing can be appended
    there."""
    description = read_description(path, sequences=False)
    with reading(path, "dataset.json"):
        schema = schema_of(description, description["items"])
    if schema.item_valued:
        raise ValueError(
            f"{path}: nothing can be appended, because {', '.join(schema.item_valued)} and the item ids share a table"
        )
    return description, schema


def read_waiting(path: Path) -> pa.Table | None:
    """What was shown and waits for actions that follow those of the dataset at `path`, as in Ordered. ValueError for a
    file that does not have it."""
    file = files_of(path, WAITING)[-1]
    if not file.exists():
        return None
    with reading(path, name_of(path, file)):
        found = pq.read_table(file)
        if found.schema.names != ["user", "item"]:
            raise ValueError("its columns are not user and item")
    return found


def append(path: Path, description: Mapping[str, Any], schema: Schema, later: Path, staging: Path) -> dict[str, Any]:
    """Makes of the directory `staging` the dataset at `path`, of which `read_for_appending` has found the others, with
    the actions of that at `later` behind its own; returns the content of its dataset.json. Files of `path`
    are linked where the file system can.

    ValueError as of `load_dataset` and `require_later`.
    """
    dataset = load_dataset(later)
    added = dataset.identity()
    require_later(path, description, added)
    _require_widths(schema, dataset.schema)
    linked = _link(path, staging)
    folder = staging / APPENDED / f"{len(description.get(APPENDED) or []) + 1:05d}"
    folder.mkdir(parents=True)
    ids = {"user": _joined(raw_user_ids_of(later)), "item": dataset.raw_id_column().combine_chunks()}
    known = {"user": _joined(raw_user_ids_of(path)), "item": _joined(stored_values(path, schema, ITEM))[:-1]}
    number_of, new = dict[str, np.ndarray](), {"event": np.arange(len(dataset.items_flat))}
    for owner in ids:
        number_of[owner], new[owner] = _numbers(ids[owner], known[owner])
    features = [of for of in schema.features if of.name != ITEM]
    columns = {of.name: _column(dataset, of, new[of.owner]) for of in features}
    named = [table.name for table in schema.tables if table.name != ITEM]
    values_of = {table: _number_values(path, dataset, schema, table, columns) for table in named}
    for table, values in values_of.items():
        if len(values):
            (folder / "vocabularies").mkdir(exist_ok=True)
            pq.write_table(pa.table({"value": values}), folder / "vocabularies" / f"{table}.parquet")

    order = np.argsort(number_of["user"])
    lengths = np.diff(dataset.offsets)[order]
    places, bounds = ranges(dataset.offsets[:-1][order], lengths), np.append(0, np.cumsum(lengths))
    actions = number_of["item"][dataset.items_flat[places]], dataset.timestamps_flat[places]
    events = {of.name: columns[of.name].take(places) for of in schema.of("event")}
    sequences = sequences_of(number_of["user"][order], bounds, *actions, schema, events)
    pq.write_table(pa.table(sequences), folder / "sequences.parquet")
    texts: dict[str, dict[str, pa.Array]] = {"user": {"raw_user_id": ids["user"]}, "item": {"raw_id": ids["item"]}}
    if (titles := dataset.title_column()) is not None:
        texts["item"]["title"] = titles.combine_chunks()
    for name, owner in OWNERS.items():
        of_new = {column: of.take(pa.array(new[owner])) for column, of in texts[owner].items()}
        rows = rows_table(f"{owner}_index", description[name], of_new, schema.of(owner), columns)
        pq.write_table(rows, folder / f"{name}.parquet")
    for name in ("rejects.tsv", WAITING):
        if (later / name).exists():
            shutil.copy(later / name, folder)
    counts = {"users": len(new["user"]), "items": len(new["item"]), "actions": len(dataset.items_flat)}
    tables = [replace(of, rows=of.rows + len(values_of.get(of.name, new["item"]))) for of in schema.tables]
    whole = {name: of for name, of in description.items() if name not in LEFT_OUT}
    whole |= {
        **{name: description[name] + of for name, of in counts.items()},
        "schema": replace(schema, tables=tuple(tables)).to_mapping(),
        APPENDED: [*(description.get(APPENDED) or []), counts | {name: added[name] for name in OWN if name in added}],
        "files": (description.get("files") or entries_of(staging, linked))
        | entries_of(staging, sorted(folder.rglob("*"))),
    }
    return FORMAT.write(staging / "dataset.json", whole)


def _require_widths(schema: Schema, later: Schema) -> None:
    widths = {feature.name: feature.width for feature in later.features}
    for feature in schema.features:
        if (width := widths.get(feature.name, feature.width)) != feature.width:
            raise ValueError(
                f"feature {feature.name} has vectors of {width} numbers in what is to be appended, and of "
                f"{feature.width} in the dataset"
            )


def _column(dataset: Dataset, feature: Feature, rows: np.ndarray) -> Column:
    """Some rows of the feature's column among the later ones; missing values where there is none."""
    if found := dataset.features_of(feature.owner).get(feature.name):
        return found.take(rows)
    if feature.form.bag:
        none = {name: np.empty(0, np.float32) for name in feature.form.parallel}
        return Column(np.empty(0, np.int64), np.zeros(len(rows) + 1, np.int64), none)
    if feature.sparse:
        return Column(np.zeros(len(rows), np.int64))
    shape = (len(rows), feature.width) if feature.form.wide else len(rows)
    return Column(np.full(shape, feature.mean, np.float32))


def _number_values(path: Path, dataset: Dataset, schema: Schema, table: str, columns: dict[str, Column]) -> pa.Array:
    """Gives the values of a table's features in `columns` their rows in the dataset at `path`, and returns those that
    are new, in the order of their rows."""
    named = [of.name for of in schema.features if of.table == table and of in dataset.schema.features]
    if not named:
        return pa.array([], pa.large_string())
    later = dataset.vocabulary_column(table).combine_chunks()
    known = _joined(stored_values(path, schema, table))
    counts = np.bincount(np.concatenate([columns[name].values for name in named]), minlength=len(later))
    # Row 0 stands for unknown values in both.
    counts[0] = 0
    row_of, new = _numbers(later, known, counts > 0)
    for name in named:
        columns[name] = replace(columns[name], values=row_of[columns[name].values])
    return later.take(pa.array(new))


def _joined(parts: Iterable[pa.Array]) -> pa.Array:
    return pa.concat_arrays([pa.array([], pa.large_string()), *parts])


def _link(path: Path, staging: Path) -> list[Path]:
    """Gives `staging` the files of `path` but dataset.json, and but those that are made from them; returns them."""
    linked = []
    for file in sorted(path.rglob("*")):
        name = name_of(path, file)
        if file.is_file() and name != "dataset.json" and not name.startswith(f"{FOLDER}/"):
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, staging / name)
            except OSError:
                shutil.copy2(file, staging / name)
            linked.append(staging / name)
    return linked
