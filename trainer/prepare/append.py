"""`logitmix prepare --append`: later actions -> a folder of a dataset; dataset.py describes it.

They are prepared as a dataset of their own, by the same rules. Its users, items and values then get the numbers that
they have in the dataset, by raw ids and texts; new ones follow in order. No file changes that is there, but for
dataset.json, so that the time is that of the new actions and of reading the raw ids.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logitmix.common.mappings import counted
from logitmix.modules.schema import ITEM, Feature, Schema
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
from logitmix.trainer.data.writer import rows_of
from logitmix.trainer.prepare.matching import alike

OWN = ("titles", "read", "filters", "times", "rejected_lines", "source", "generator", "side_tables")
"""What dataset.json says of each part by itself."""
LEFT_OUT = ("repeated_targets", "last_actions", "kind", "format_version", "sha256")


@dataclass(frozen=True)
class _Numbers:
    """Those that something of the later actions has in the dataset."""

    of: np.ndarray
    """int64, by the number among the later ones."""
    new: np.ndarray
    """Which of the later ones are new, in order."""

    @classmethod
    def find(cls, later: pa.Array, known: pa.Array, admitted: np.ndarray | None = None) -> "_Numbers":
        """Of those that the dataset does not have, only the `admitted` are new, and the others 0; all without it."""
        found = pc.index_in(later, value_set=known)
        missing = as_numpy(found.is_null())
        new = np.flatnonzero(missing if admitted is None else missing & admitted)
        of = found.fill_null(0).to_numpy().astype(np.int64)
        of[new] = len(known) + np.arange(len(new))
        return cls(of, new)


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


def append(
    path: Path, description: Mapping[str, Any], schema: Schema, later: Path, staging: Path
) -> tuple[dict[str, Any], list[str]]:
    """Makes of the directory `staging` the dataset at `path`, of which `read_for_appending` has found the others, with
    the actions of that at `later` behind its own; returns the content of its dataset.json, and notes. Files of `path`
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
    user_ids, item_ids = _joined(raw_user_ids_of(later)), dataset.raw_id_column().combine_chunks()
    known_users, known_items = _joined(raw_user_ids_of(path)), _joined(stored_values(path, schema, ITEM))[:-1]
    users, items = _Numbers.find(user_ids, known_users), _Numbers.find(item_ids, known_items)
    found = [
        line
        for what, ids, known, of in (("user", user_ids, known_users, users), ("item", item_ids, known_items, items))
        for line in alike(f"new {what}", ids.take(pa.array(of.new)), known)
    ]
    features = [of for of in schema.features if of.name != ITEM]
    new_rows = {"user": users.new, "item": items.new, "event": np.arange(len(dataset.items_flat))}
    columns = {of.name: _column(dataset, of, new_rows[of.owner]) for of in features}
    named = [table.name for table in schema.tables if table.name != ITEM]
    values_of = {table: _number_values(path, dataset, schema, table, columns) for table in named}
    for table, values in values_of.items():
        if len(values):
            (folder / "vocabularies").mkdir(exist_ok=True)
            pq.write_table(pa.table({"value": values}), folder / "vocabularies" / f"{table}.parquet")

    pq.write_table(_actions(dataset, users.of, items.of, schema, columns), folder / "sequences.parquet")
    for name, owner, index, ids, new in (
        ("users", "user", "user_index", ("raw_user_id", user_ids), users.new),
        ("items", "item", "item_index", ("raw_id", item_ids), items.new),
    ):
        first = description[name]
        rows: dict[str, pa.Array] = {index: pa.array(np.arange(first, first + len(new)), pa.int64())}
        rows[ids[0]] = ids[1].take(pa.array(new))
        if owner == "item" and (titles := dataset.title_column()) is not None:
            rows["title"] = titles.combine_chunks().take(pa.array(new))
        rows |= {of.name: rows_of(of, columns[of.name], 0, len(new)) for of in features if of.owner == owner}
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
    for name in ("rejects.tsv", WAITING):
        if (later / name).exists():
            shutil.copy(later / name, folder)
    counts = {"users": len(users.new), "items": len(items.new), "actions": len(dataset.items_flat)}
    tables = [replace(of, rows=of.rows + len(values_of.get(of.name, items.new))) for of in schema.tables]
    whole = {name: of for name, of in description.items() if name not in LEFT_OUT}
    whole |= {
        **{name: description[name] + of for name, of in counts.items()},
        "schema": replace(schema, tables=tuple(tables)).to_mapping(),
        APPENDED: [*(description.get(APPENDED) or []), counts | {name: added[name] for name in OWN if name in added}],
        "files": (description.get("files") or entries_of(staging, linked))
        | entries_of(staging, sorted(folder.rglob("*"))),
    }
    return FORMAT.write(staging / "dataset.json", whole), [*_notes(dataset, counts), *found]


def _require_widths(schema: Schema, later: Schema) -> None:
    widths = {feature.name: feature.width for feature in later.features}
    for feature in schema.features:
        if (width := widths.get(feature.name, feature.width)) != feature.width:
            raise ValueError(
                f"feature {feature.name} has vectors of {width} numbers in what is to be appended, and of "
                f"{feature.width} in the dataset"
            )


def _notes(dataset: Dataset, new: Mapping[str, int]) -> list[str]:
    """Of what is not used, because the dataset has it already."""
    items = dataset.num_items - new["items"]
    known = {"item": items if dataset.schema.of("item") or dataset.title_column() is not None else 0}
    known["user"] = dataset.num_users - new["users"] if dataset.schema.of("user") else 0
    said = " and ".join(counted(count, name) for name, count in known.items() if count)
    are = "is" if sum(known.values()) == 1 else "are"
    return [f"{said} {are} in the dataset already: what it says of them stays"] if said else []


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
    numbers = _Numbers.find(later, known, counts > 0)
    for name in named:
        columns[name] = replace(columns[name], values=numbers.of[columns[name].values])
    return later.take(pa.array(numbers.new))


def _actions(
    dataset: Dataset, user_U: np.ndarray, item_X: np.ndarray, schema: Schema, columns: Mapping[str, Column]
) -> pa.Table:
    """The later actions by the numbers of their users in the dataset."""
    order = np.argsort(user_U)
    lengths = np.diff(dataset.offsets)[order]
    places = ranges(dataset.offsets[:-1][order], lengths)
    starts = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    lists = {
        "item_indices": pa.array(item_X[dataset.items_flat[places]], pa.int64()),
        "timestamps": pa.array(dataset.timestamps_flat[places], pa.int64()),
    } | {of.name: rows_of(of, columns[of.name].take(places), 0, len(places)) for of in schema.of("event")}
    found = {name: pa.ListArray.from_arrays(starts, values) for name, values in lists.items()}
    return pa.table({"user_index": pa.array(user_U[order], pa.int64()), **found})


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
