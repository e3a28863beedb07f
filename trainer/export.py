"""Checkpoint -> serving directory, shard by shard: no rank has more of the items in memory than one shard.

Axes: X items in the corpus, R items of a shard, D width of a row.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from logitmix.comm.collectives import on_all_ranks, on_first_rank
from logitmix.comm.process_group import Ranks, process_group
from logitmix.common.files import publish, staging_path
from logitmix.modules.schema import ITEM, Owner
from logitmix.modules.towers import Tower
from logitmix.serving import format as serving
from logitmix.serving.format import About, Entries, Source
from logitmix.serving.model import item_cache, item_shapes
from logitmix.serving.texts import Texts
from logitmix.trainer.checkpoint import SavedModel, load_saved
from logitmix.trainer.data.dataset import Column, load_dataset
from logitmix.trainer.data.lookups import columns_of, look_up
from logitmix.trainer.evaluate import excludes_history
from logitmix.trainer.run import read_config, require_same_dataset
from logitmix.trainer.sharded_rows import own_range

SHARD_BYTES = 2**28
"""Size of a shard of items, roughly."""
CHUNK_ITEMS = 2**13
"""Items whose cache is computed at once."""


@dataclass(frozen=True)
class DatasetItems:
    """What an export takes from the dataset: its features, and ids and texts that are read when they are asked for."""

    raw_ids: Callable[[], pa.ChunkedArray]
    titles: Callable[[], pa.ChunkedArray | None]
    columns: Mapping[Owner, Mapping[str, Column]] = field(default_factory=dict)
    vocabulary: Callable[[str], list[str]] = lambda table: []
    """The values of a table of features, by row."""


def export(run: Path, out: Path, overwrite: bool = False, which: Literal["best", "last"] = "best") -> dict[str, Any]:
    """Writes a serving directory of a run's best checkpoint (or its last one) and gives its manifest; alone, or under
    torchrun, where the ranks share out the shards.

    The raw ids and titles come from the dataset directory that the run names. Raises ValueError where `out` is there
    and is not to be overwritten, where the run has no intact checkpoint, or where the dataset is not there or is
    not the one that the run was trained on.
    """
    with process_group("cpu", read_config(run).comm.timeout_seconds) as ranks:
        model = load_saved(run, which, ranks)
        dataset = load_dataset(model.config.data.path)
        require_same_dataset(run, dataset)
        source = Source(run.resolve().name, model.step, dataset.name)
        exclude_history = excludes_history(model.config.evaluate.exclude_history, dataset)
        about = About(model.config.model, source, model.num_items, exclude_history, model.tower.schema)
        columns = columns_of(dataset, model.tower.schema)
        items = DatasetItems(dataset.raw_id_column, dataset.title_column, columns, dataset.vocabulary)
        return export_model(model, about, items, out, overwrite, ranks)


def export_model(
    model: SavedModel,
    about: About,
    dataset: DatasetItems,
    out: Path,
    overwrite: bool,
    ranks: Ranks,
) -> dict[str, Any]:
    """Writes a serving directory, complete or not at all, of a model whose items have these raw ids and titles; gives
    its manifest. Collective.

    Raises ValueError where `out` must not be overwritten, for weights that are not finite and for raw ids that name an
    item twice, and OSError where the disk is full or forbids it.
    """
    out = out.resolve()

    def make() -> Path:
        serving.check_target(out, overwrite)
        staging = staging_path(out)
        staging.mkdir(parents=True)
        return staging

    staging = on_first_rank(make, ranks)
    try:
        entries = on_all_ranks(lambda: _write_own(model, about, dataset, staging, ranks), ranks)

        def finish() -> dict[str, Any]:
            manifest = serving.write_manifest(staging, about, {name: of[name] for of in entries for name in of})
            serving.check_target(out, overwrite)
            publish(staging, out)
            return manifest

        return on_first_rank(finish, ranks)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_own(
    model: SavedModel,
    about: About,
    dataset: DatasetItems,
    staging: Path,
    ranks: Ranks,
) -> Entries:
    """Writes this rank's files: a share of the shards, and on rank 0 the weights and ids."""
    tower, entries = model.tower.eval(), Entries()
    tables = [table for table in about.schema.tables if table.name != ITEM]
    rows = {table.name: model.read_rows(table.name, 0, table.rows) for table in tables}
    if ranks.rank == 0:
        entries |= serving.write_weights(staging, about, tower.state_dict())
        vocabularies = {name: Texts.of(dataset.vocabulary(name)) for name in rows}
        unknown_1D = model.read_rows(ITEM, model.num_items, model.num_items + 1)
        entries |= serving.write_tables(staging, about, rows | {ITEM: unknown_1D}, vocabularies)
        column = dataset.titles()
        shown = None if column is None else texts_of(column)
        entries |= serving.write_ids(staging, about, with_order(texts_of(dataset.raw_ids())), shown)
    bounds = _shard_bounds(tower, about.num_items)
    count = len(bounds) - 1
    for number in range(*own_range(count, ranks.rank, ranks.world_size)):
        own = model.read_rows(ITEM, bounds[number], bounds[number + 1])
        items = _items(tower, bounds[number], rows | {ITEM: own}, dataset.columns)
        entries |= serving.write_items(staging, about, number, count, items)
    return entries


def _shard_bounds(tower: Tower, num_items: int) -> list[int]:
    item_bytes = 4 * sum(math.prod(shape) for shape in item_shapes(tower.config, 1, tower.schema).values())
    rows = max(1, SHARD_BYTES // item_bytes)
    return [*range(0, num_items, rows), num_items]


@torch.inference_mode()
def _items(
    tower: Tower, first: int, rows: Mapping[str, Tensor], columns: Mapping[Owner, Mapping[str, Column]]
) -> dict[str, Tensor]:
    """Vectors and sides of the items from number `first` on whose own rows [R, W] these are, beside all of the other
    tables'."""
    count = len(rows[ITEM])
    items = {name: torch.empty(shape) for name, shape in item_shapes(tower.config, count, tower.schema).items()}
    none = np.empty(0, np.int64)
    for start in range(0, count, CHUNK_ITEMS):
        item_N = np.arange(first + start, first + min(start + CHUNK_ITEMS, count))
        found = look_up(columns, tower.schema, item_N, item_N, none, none)
        chunk = {name: rows[name][id_V] for name, id_V in found.ids.items() if name != ITEM}
        own_ND = rows[ITEM][start : start + CHUNK_ITEMS]
        for name, value in item_cache(tower, tower.item_tower(chunk | {ITEM: own_ND}, found.features)).items():
            items[name][start : start + CHUNK_ITEMS] = value
    return items


def texts_of(column: pa.ChunkedArray) -> Texts:
    """Arrow's texts, "" for what is null."""
    array = column.fill_null("").cast(pa.large_string()).combine_chunks()
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    texts = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return Texts(torch.from_numpy(texts.copy()), torch.from_numpy(bounds - bounds[0]))


def with_order(raw_ids: Texts) -> Texts:
    """Raw ids that can be looked up; ValueError where two are the same."""
    buffers = [pa.py_buffer(tensor.numpy()) for tensor in (raw_ids.bounds, raw_ids.data)]
    array = pa.LargeStringArray.from_buffers(len(raw_ids), *buffers)
    order = pc.sort_indices(array)
    ordered = array.take(order)
    if pc.any(pc.equal(ordered[1:], ordered[:-1])).as_py():
        raise ValueError("the dataset's raw_ids name an item twice; prepare it again")
    return replace(raw_ids, order=torch.from_numpy(order.to_numpy().astype(np.int64)))
