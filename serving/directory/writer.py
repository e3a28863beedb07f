"""The writer of a serving directory; format.py describes it. Several processes can write it together, each some of the
shards, and one of them the manifest at the end.

All functions write_* but the manifest's return its entries of the files that they write. They raise ValueError for
numbers that are not finite, and OSError if the disk is full or forbids it.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from logitmix.common.checked import entry_of
from logitmix.common.files import clean_up, former, in_turn, restore, sync
from logitmix.common.mappings import require, to_mapping
from logitmix.common.storage import is_copy, place_of
from logitmix.modules.config import plugins_of
from logitmix.modules.schema import ITEM
from logitmix.serving.columns import Column, stored_columns
from logitmix.serving.directory.format import (
    COLUMNS,
    FORMAT,
    IDS,
    MANIFEST,
    PROGRAMS,
    PROJECTIONS,
    VOCABULARIES,
    WEIGHTS,
    About,
    Entries,
    described,
    is_compiled,
    is_extra,
    items_file,
    items_tensors,
    signature,
    tables_file,
)
from logitmix.serving.directory.reader import read, read_manifest
from logitmix.serving.model import row_shapes, weight_shapes
from logitmix.serving.texts import Texts

MOST_KEPT = 100


def write_weights(staging: Path, about: About, weights: Mapping[str, Tensor]) -> Entries:
    """Writes the towers' weights."""
    assert _shapes(weights) == weight_shapes(about.model, about.schema)
    return _write_tensors(staging / WEIGHTS, weights)


def write_tables(staging: Path, about: About, number: int, count: int, rows: Mapping[str, Tensor]) -> Entries:
    """Writes file `number` of `count` with rows of tables: those that follow the rows in the previous file."""
    shapes = row_shapes(about.model, about.schema)
    assert _shapes(rows) == {name: [len(of), shapes[name][1]] for name, of in rows.items()}
    return _write_tensors(staging / tables_file(number, count), rows)


def write_vocabularies(staging: Path, about: About, vocabularies: Mapping[str, Texts]) -> Entries:
    """Writes the values of the tables of features."""
    assert {ITEM, *vocabularies} == {table.name for table in about.schema.tables}
    tensors: dict[str, Tensor] = {}
    for name, texts in vocabularies.items():
        assert len(texts) == about.schema.table(name).rows
        tensors |= _tensors_of(texts, name)
    return _write_tensors(staging / VOCABULARIES, tensors)


def write_items(staging: Path, about: About, number: int, count: int, items: Mapping[str, Tensor]) -> Entries:
    """Writes the items of shard `number` of `count`."""
    assert described(items) == items_tensors(described(items), about)
    return _write_tensors(staging / items_file(number, count), items)


def write_ids(staging: Path, about: About, raw_ids: Texts, titles: Texts | None) -> Entries:
    """Writes the items' raw ids and titles."""
    tensors = _tensors_of(raw_ids, "raw_ids")
    if titles is not None:
        tensors |= {"titles.data": titles.data, "titles.bounds": titles.bounds}
    for texts in (raw_ids, titles or raw_ids):
        assert len(texts) == about.num_items + about.removed and texts.problem() is None
    return _write_tensors(staging / IDS, tensors)


def write_columns(staging: Path, columns: Mapping[str, Column]) -> Entries:
    """Writes the columns to filter by, if there are some."""
    return _write_tensors(staging / COLUMNS, stored_columns(columns)) if columns else {}


def write_projections(staging: Path, about: About, projections: Mapping[str, Tensor]) -> Entries:
    """Writes those of features of texts, if there are some."""
    assert {*projections} == {of.name for of in about.projected}
    return _write_tensors(staging / PROJECTIONS, projections) if projections else {}


def write_manifest(staging: Path, about: About, entries: Entries) -> dict[str, Any]:
    """Writes the last file, with the entries of all others; returns its content."""
    fields = {
        "logitmix": version("logitmix"),
        "torch": str(torch.__version__),
        **dataclasses.asdict(about.source),
        "model": to_mapping(about.model),
        "schema": about.schema.to_mapping(),
        "num_items": about.num_items,
        "exclude_history": about.exclude_history,
        "item_cache": about.item_cache,
        "precision": about.precision,
        "removed": about.removed,
        "signature": signature(about),
        "files": dict(sorted(entries.items())),
    }
    if about.filterable:
        fields["filterable"] = about.filterable
    if needed := plugins_of(about.model, about.schema):
        fields["plugins"] = needed
    return FORMAT.write(staging / MANIFEST, fields)


def extra_entry(staging: Path, name: str, cpu: Sequence[str] = ()) -> Entries:
    """The manifest's entry of an extra that was written there; `cpu` of a compiled program alone."""
    assert is_extra(name) and bool(cpu) == is_compiled(name)
    return {name: entry_of(staging / name) | ({"cpu": list(cpu)} if cpu else {})}


def kept(out: Path, keep: int | None, by: Path | None = None) -> int:
    """How many former exports are kept when `out` is replaced: as many as there are, if None. 0, which leaves them as
    they are, where it is replaced `by` its equal."""
    if by and (out / MANIFEST).is_file() and (out / MANIFEST).read_bytes() == (by / MANIFEST).read_bytes():
        return 0
    return len(former(out)) if keep is None else keep


def require_keepable(out: Path, keep: int | None) -> None:
    """ValueError if so many former exports cannot be kept."""
    require(keep is None or 0 <= keep <= MOST_KEPT, "--keep", keep, f"from 0 to {MOST_KEPT}")
    if keep and is_copy(out):
        raise ValueError(f"{place_of(out)} is at a URL; --keep is for exports in a folder")


def roll_back(out: Path, to: int | None = None) -> dict[str, Any]:
    """Exchanges a serving directory and a former one, the last if `to` is None, and returns the manifest that is there
    now. ValueError if there is none or it is damaged; then nothing changes."""
    with in_turn(out):
        clean_up(out)
        there = former(out)
        if not out.exists():
            raise ValueError(f"no serving directory at {out}")
        if not there:
            raise ValueError(f"{out} has no former exports; export --overwrite --keep 2 keeps the last two")
        number = min(there) if to is None else to
        if number not in there:
            raise ValueError(f"there is no {out}.former-{number}; there are: {', '.join(map(str, there))}")
        read(there[number])
        restore(out, number)
        return read_manifest(out)


def check_target(out: Path, overwrite: bool) -> None:
    """ValueError if `out` must not be written: it exists, and it is not a serving directory that may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not _is_ours(out):
        raise ValueError(f"{out} exists and is not a serving directory; give another --out, or remove it first")
    if not overwrite:
        raise ValueError(f"{out} exists already; give --overwrite to replace it, or another --out")


def _is_ours(path: Path) -> bool:
    """Whether this is a serving directory, intact or damaged, that holds nothing else."""
    if not (path / MANIFEST).is_file() or FORMAT.kind.encode() not in (path / MANIFEST).read_bytes():
        return False
    names = {entry.relative_to(path).as_posix() for entry in path.rglob("*")}
    names -= {MANIFEST, WEIGHTS, VOCABULARIES, IDS, COLUMNS, PROJECTIONS, PROGRAMS}
    return all(is_extra(name) or re.fullmatch(r"(items|tables)-\d{5,}-of-\d{5,}\.safetensors", name) for name in names)


def _tensors_of(texts: Texts, name: str) -> dict[str, Tensor]:
    assert texts.order is not None
    return {f"{name}.data": texts.data, f"{name}.bounds": texts.bounds, f"{name}.order": texts.order}


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> Entries:
    for name, value in tensors.items():
        # In columns NaN stands for no value.
        if value.dtype != torch.float64 and not torch.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinity: the training diverged; export another checkpoint")
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from None
    # safetensors makes files that only their owner can read; give them the umask's permissions, like the directory's.
    file.chmod(file.parent.stat().st_mode & 0o666)
    sync(file)
    return {file.name: entry_of(file) | {"tensors": described(tensors)}}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    assert all(value.dtype == torch.float32 for value in tensors.values())
    return {name: list(value.shape) for name, value in tensors.items()}
