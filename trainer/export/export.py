"""Checkpoint -> serving directory, file by file: no rank has more rows or items in memory than one file holds. The
tables of features are written first. The items' features are then looked up in these files, mapped into memory, so
every rank must see the other ranks' files.

Axes: R items of a shard, W width of a table.
"""

import math
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Console

from logitmix.comm.collectives import on_all_ranks, on_first_rank, on_first_rank_at_length
from logitmix.comm.process_group import Ranks, process_group
from logitmix.common.files import clean_up, held_alone, in_turn, naming, only_writer, publish, staging_path
from logitmix.common.messages import say
from logitmix.common.storage import alone, fetch_names
from logitmix.modules.config import ModelConfig
from logitmix.modules.features import Embedded
from logitmix.modules.schema import ITEM, USER, Schema
from logitmix.modules.stage1 import LANES
from logitmix.serving.columns import ACTIONS
from logitmix.serving.columns import Column as FilterColumn
from logitmix.serving.directory import reader, writer
from logitmix.serving.directory.format import About, Contents, Entries, Source
from logitmix.serving.items import ItemInputs, items_of
from logitmix.serving.model import Precision, Scales, estimated, item_types, row_shapes
from logitmix.trainer.config import dump_toml
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, encoders_of, load_dataset
from logitmix.trainer.data.limited import held_out, limited, said_of_limit
from logitmix.trainer.data.lookups import values_of
from logitmix.trainer.evaluation.evaluate import excludes_history
from logitmix.trainer.export.card import Facts, read_facts, write_card
from logitmix.trainer.export.catalog import Catalog, in_order, in_words, planned, texts_of, write_planned
from logitmix.trainer.export.columns import dataset_columns, filter_columns
from logitmix.trainer.export.indexes import INDEXES, check_index, write_index
from logitmix.trainer.export.programs import check_onnx, check_programs, write_onnx, write_programs
from logitmix.trainer.parallel.sharded_rows import own_range
from logitmix.trainer.run.agreement import facts_of
from logitmix.trainer.run.checkpoint import SavedModel, load_saved
from logitmix.trainer.run.folder import (
    read_config,
    require_one_host,
    require_same_dataset,
    require_shared,
    said_of_code,
    start_path,
    upload_run,
)
from logitmix.trainer.run.stages import final_run

SHARD_BYTES = 2**28
"""Size of a shard of items, and of a file of tables, roughly."""
SAMPLED_PARTS, SAMPLED_ITEMS = 2**4, 2**9
"""Parts of the corpus, and in each as many items that the scales are estimated on."""


Extra = Literal["faiss", "vectors", "onnx", "programs"]
EXTRAS: Mapping[Extra, tuple[Callable[[ModelConfig], None], Callable[[Path, Contents], Entries]]] = {
    **{kind: (partial(check_index, kind), partial(write_index, kind)) for kind in INDEXES},
    "onnx": (check_onnx, write_onnx),
    "programs": (check_programs, write_programs),
}
"""Of each, what raises ValueError if it cannot be made here of such a model, and what writes it beside the other files
of an export and returns the manifest's entries."""


@dataclass(frozen=True)
class DatasetItems:
    """The dataset's part of an export: features, and ids and texts that are read on demand."""

    raw_ids: Callable[[], pa.ChunkedArray]
    titles: Callable[[], pa.ChunkedArray | None]
    features: Mapping[str, Column] = field(default_factory=dict)
    """The items' features, by name."""
    vocabulary: Callable[[str], pa.ChunkedArray] = lambda table: pa.chunked_array([[]], pa.string())
    """The values of a table of features by row, null for unknown."""
    columns: Mapping[str, FilterColumn] = field(default_factory=dict)
    """Those that requests can filter by."""
    projections: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Of features of texts."""


def export(
    run: Path,
    out: Path,
    overwrite: bool = False,
    which: Literal["best", "last"] = "best",
    item_cache: bool = True,
    precision: Precision = "fp32",
    extras: Collection[Extra] = (),
    keep: int | None = None,
    filterable: Collection[str] | None = None,
    catalog: Catalog | None = None,
) -> dict[str, Any]:
    """Writes a serving directory of a run's best checkpoint (or its last one; of its refit, if there is one, else of
    the run trained first if that is better) and returns its manifest; alone, or under torchrun, where the ranks
    divide the shards. Without `item_cache` the shards hold the items' rows and features, and the Retriever passes them
    through the item tower for each request.
    `precision` is that of the item cache; INT8 is for MoL's components. `extras` are files for other servers, which
    rank 0 makes. An export that is replaced is kept beside it as the last of `keep` former ones, of as many as there
    are if None. Requests can filter by the columns `filterable` of the catalog's table, or without one of the dataset,
    and by the number of actions; where none are named, a line says which there could be, but not for None. The items
    are those of the dataset directory that the run names, as the catalog changes them. Raises ValueError if `out`
    exists and must not be overwritten, if another process writes it, if the run has no intact checkpoint, if its refit
    is not finished or of other epochs than its best, if the dataset is missing or is not the one that the run was
    trained on, if an extra cannot be made, or if the precision cannot hold the items' sides.
    """
    require_one_host(out)
    writer.require_keepable(out, keep)
    final = final_run(run)
    if which == "last" and final == start_path(run):
        final = run
    config = read_config(final)
    dataset = load_dataset(config.data.path)
    require_same_dataset(final, dataset)
    compared = facts_of(
        "export",
        config,
        dataset,
        checkpoint=which,
        item_cache=item_cache,
        precision=precision,
        extras=sorted(extras),
        filterable=sorted(filterable or ()),
        catalog=str(catalog),
    )
    with process_group("cpu", config.comm.timeout_seconds, compared) as ranks:
        model = load_saved(final, which, ranks)
        dataset = limited(config.data, dataset)
        tell = say if ranks.rank == 0 else lambda line: None
        if line := said_of_code(final):
            tell(line)
        if line := said_of_limit(config.data, dataset):
            tell(f"items: {line}")
        schema = served_schema(model.tower.schema)
        columns = filter_columns(filterable, dataset, catalog.items if catalog else "", tell) if filterable else {}
        if ACTIONS not in columns:
            # It says what is popular, for requests of which nothing is known.
            columns |= filter_columns([ACTIONS], dataset, "", tell)
        if filterable is not None and not filterable and (could := ",".join(dataset_columns(dataset))):
            tell(f"requests cannot filter by features of the items; this export can keep --filterable {could}")
        about = About(
            config.model,
            Source(run.resolve().name, model.step, dataset.name),
            model.num_items,
            excludes_history(config.evaluate.exclude_history, config.data, dataset),
            schema,
            item_cache,
            precision,
            {name: column.kind for name, column in columns.items()},
        )
        vocabulary = partial(known_values, dataset, held_out(config.data, dataset).trained(dataset), model)
        encoders = encoders_of(dataset.path, schema).items()
        projections = {name: of.projection for name, of in encoders if of.projection is not None}
        of_dataset = DatasetItems(
            dataset.raw_id_column, dataset.title_column, dataset.item_features, vocabulary, columns, projections
        )
        shown = replace(config.data, path=Path(config.data.path).name)
        settings = dump_toml(replace(config, warm_start=Path(config.warm_start).name, data=shown))
        facts = read_facts(final, settings, model.step, dataset.description(), model.validation)
        if model.tower.schema.of("item") and (line := about_new_items(about)):
            tell(line)
        with ExitStack() as held:
            held.enter_context(naming(out))

            def begin() -> None:
                held.enter_context(only_writer(out))
                held.enter_context(alone(out))
                fetch_names(out)

            on_first_rank_at_length(begin, ranks)
            manifest = export_model(model, about, of_dataset, out, overwrite, ranks, facts, extras, keep, catalog)
            upload_run(out, ranks)
    return manifest


def export_model(
    model: SavedModel,
    about: About,
    dataset: DatasetItems,
    out: Path,
    overwrite: bool,
    ranks: Ranks,
    facts: Facts | None = None,
    extras: Collection[Extra] = (),
    keep: int | None = None,
    catalog: Catalog | None = None,
) -> dict[str, Any]:
    """Writes a serving directory, complete or not at all, of a model whose items have these raw ids and titles, as the
    catalog changes them; returns its manifest. It has a model card where there are `facts` of the training. Collective.
    Raises ValueError if `out` must not be overwritten, for weights that are not finite and for duplicate raw ids or
    values of features, as `planned` does, and OSError if the disk is full or forbids it.
    """
    out = out.resolve()

    def make() -> Path:
        clean_up(out)
        writer.check_target(out, overwrite)
        _require_exportable(about, extras)
        staging = staging_path(out)
        staging.mkdir(parents=True)
        held.enter_context(held_alone(staging))
        return staging

    held = ExitStack()
    staging = on_first_rank(make, ranks)
    try:
        require_shared(staging, ranks)
        tables = _merged(on_all_ranks(lambda: _write_tables(model, about, staging, ranks), ranks))
        precision, scales = on_first_rank(lambda: _estimated(model, about, dataset, tables, staging), ranks)
        about = replace(about, precision=precision)
        others = on_all_ranks(lambda: _write_items(model, about, dataset, tables, scales, staging, ranks), ranks)

        def finish() -> dict[str, Any]:
            entries = tables | _merged(others)
            if not catalog:
                return publish_whole(staging, about, entries)
            writer.write_manifest(staging, about, entries)
            contents, changed = reader.read(staging), staging_path(out)
            plan = planned(contents, catalog, Console(stderr=True))
            say(f"{catalog.items}: {in_words(plan.counts)}")
            changed.mkdir()
            try:
                held.enter_context(held_alone(changed))
                return publish_whole(changed, *write_planned(staging, contents, plan, changed))
            finally:
                shutil.rmtree(changed, ignore_errors=True)
                shutil.rmtree(staging, ignore_errors=True)

        def publish_whole(staging: Path, about: About, entries: Entries) -> dict[str, Any]:
            entries |= write_extras(staging, about, entries, extras)
            if facts:
                examples = [name for name in dataset.raw_ids()[:3].to_pylist() if name]
                entries |= write_card(staging, about, entries, facts, examples)
            manifest = writer.write_manifest(staging, about, entries)
            with in_turn(out):
                writer.check_target(out, overwrite)
                publish(staging, out, writer.kept(out, keep, staging))
            return manifest

        return on_first_rank(finish, ranks)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        held.close()


def _require_exportable(about: About, extras: Collection[Extra]) -> None:
    """ValueError for what an export of such a model cannot have."""
    if about.precision == "int8" and about.model.similarity.kind != "mol":
        kind = about.model.similarity.kind
        raise ValueError(f"precision int8 is for the components of mol, and the similarity is {kind}: give bf16")
    if features := about.schema.item_valued:
        raise ValueError(
            f"exports hold no table of items for other features, and the model uses {', '.join(features)}: train "
            "without them (--model.features), or prepare them with a table of their own"
        )
    if about.precision != "fp32" and not about.item_cache:
        raise ValueError(
            f"precision {about.precision} is that of the item cache, and --no-item-cache leaves the cache out: "
            "give only one of them"
        )
    for name in extras:
        EXTRAS[name][0](about.model)


def about_new_items(about: About) -> str:
    """Why items that are added to an export may hardly be recommended; empty where nothing speaks against it. Without
    dropout it depends on how much the features say (benchmarks/notes/features.md)."""
    if about.schema.of("item") and about.model.item_id_dropout > 0:
        return ""
    return (
        "the model knows items by their ids, so new ones may hardly be recommended: train with --model.features of the "
        "items and --model.item-id-dropout 0.1"
    )


def write_extras(staging: Path, about: About, entries: Entries, extras: Collection[Extra]) -> Entries:
    """Writes extras of the export that has these files, from its files."""
    written = Entries()
    if extras:
        writer.write_manifest(staging, about, entries)
        contents = reader.read(staging)
        for name in extras:
            written |= EXTRAS[name][1](staging, contents)
    return written


def _merged(of_ranks: list[Entries]) -> Entries:
    return {name: entry for entries in of_ranks for name, entry in entries.items()}


def _write_tables(model: SavedModel, about: About, staging: Path, ranks: Ranks) -> Entries:
    """Writes this rank's share of the files of tables."""
    files, entries = _table_files(about), Entries()
    for number in range(*own_range(len(files), ranks.rank, ranks.world_size)):
        rows = {name: model.read_rows(name, start, stop) for name, (start, stop) in files[number].items()}
        entries |= writer.write_tables(staging, about, number, len(files), rows)
    return entries


def _table_files(about: About) -> list[dict[str, tuple[int, int]]]:
    """The range of rows (first, last excluded) of each table in each file: table after table, cut where a file is
    full."""
    files: list[dict[str, tuple[int, int]]] = [{}]
    room = SHARD_BYTES
    for name, (count, W) in row_shapes(about.model, about.schema).items():
        # Only the last row of the item table.
        start, stop = (about.num_items, about.num_items + 1) if name == ITEM else (0, count)
        while start < stop:
            if files[-1] and room < 4 * W:
                files, room = [*files, {}], SHARD_BYTES
            rows = min(stop - start, max(1, room // (4 * W)))
            files[-1][name] = start, start + rows
            start, room = start + rows, room - 4 * W * rows
    return files


def _write_items(
    model: SavedModel,
    about: About,
    dataset: DatasetItems,
    written: Entries,
    scales: Scales,
    staging: Path,
    ranks: Ranks,
) -> Entries:
    """Writes this rank's other files, once the tables are `written`: a share of the shards, and on rank 0 the weights
    and texts."""
    tower, tables, entries = model.tower.eval(), reader.read_tables(staging, written), Entries()
    if ranks.rank == 0:
        entries |= writer.write_weights(staging, about, tower.state_dict())
        entries |= _write_texts(about, dataset, staging)
    bounds = _shard_bounds(about, dataset.features)
    count = len(bounds) - 1
    for number in range(*own_range(count, ranks.rank, ranks.world_size)):
        inputs = _inputs(model, about, dataset, bounds[number], bounds[number + 1])
        items = items_of(tower, inputs, tables, about.precision, about.item_cache, scales)
        entries |= writer.write_items(staging, about, number, count, items)
    return entries


def _inputs(model: SavedModel, about: About, dataset: DatasetItems, start: int, stop: int) -> ItemInputs:
    columns = {of.name: dataset.features[of.name].take(np.arange(start, stop)) for of in about.schema.of("item")}
    tables = {feature.name: feature.table for feature in about.schema.of("item") if feature.sparse}
    values = {
        name: values_of(column, model.rows_of(tables[name], column.values) if name in tables else column.values)
        for name, column in columns.items()
    }
    return ItemInputs(model.read_rows(ITEM, start, stop), values)


@torch.inference_mode()
def _estimated(
    model: SavedModel, about: About, dataset: DatasetItems, written: Entries, staging: Path
) -> tuple[Precision, Scales]:
    """By parts of the corpus that lie far apart."""
    tower, tables = model.tower.eval(), reader.read_tables(staging, written)
    bounds = [about.num_items * part // SAMPLED_PARTS for part in range(SAMPLED_PARTS + 1)]
    ranges = [(start, min(stop, start + SAMPLED_ITEMS)) for start, stop in pairwise(bounds) if start < stop]
    parts = [_inputs(model, about, dataset, start, stop) for start, stop in ranges]
    embedded = [part.embed(tower, tables) for part in parts]
    groups = zip(*(part.groups for part in embedded), strict=True)
    some = Embedded(torch.cat([part.vector_RD for part in embedded]), [torch.cat(group) for group in groups])
    return estimated(tower, about.precision, some)


def _write_texts(about: About, dataset: DatasetItems, staging: Path) -> Entries:
    vocabularies = {
        table.name: in_order(texts_of(dataset.vocabulary(table.name)), f"vocabulary {table.name} names a value", True)
        for table in about.schema.tables
        if table.name != ITEM
    }
    entries = writer.write_vocabularies(staging, about, vocabularies) | writer.write_columns(staging, dataset.columns)
    projections = {name: torch.from_numpy(of) for name, of in dataset.projections.items()}
    entries |= writer.write_projections(staging, about, projections)
    titles, raw_ids = dataset.titles(), in_order(texts_of(dataset.raw_ids()), "raw_ids name an item")
    return entries | writer.write_ids(staging, about, raw_ids, None if titles is None else texts_of(titles))


def _shard_bounds(about: About, columns: Mapping[str, Column]) -> list[int]:
    item_bytes = 0
    if about.item_cache:
        types = item_types(about.model, about.schema, LANES, about.precision).values()
        item_bytes += -(-sum(dtype.itemsize * math.prod(shape) for dtype, shape in types) // LANES)
    if about.holds_inputs:
        of_all = sum(columns[feature.name].nbytes for feature in about.schema.of("item"))
        item_bytes += 4 * about.schema.dims(about.model.dim)[ITEM] + of_all // about.num_items
    # Whole blocks of the INT8 corpus.
    rows = max(1, SHARD_BYTES // item_bytes // LANES) * LANES
    return [*range(0, about.num_items, rows), about.num_items]


def served_schema(schema: Schema) -> Schema:
    """That of an export, which knows the values that have rows alone."""
    return replace(schema, tables=tuple(replace(table, values=0) for table in schema.tables))


def known_values(dataset: Dataset, trained_U: np.ndarray, model: SavedModel, table: str) -> pa.ChunkedArray:
    """The values of a table of features by row, null for unknown; so is a user that training did not see, and a row
    that no value has."""
    values = dataset.vocabulary_column(table)
    if table == USER and USER not in [of.name for of in dataset.schema.tables]:
        values = pc.if_else(pa.array(np.concatenate([[False], trained_U])), values, None)
    id_R = model.id_of_row(table)
    if id_R is None:
        return values
    return values.take(pa.array(id_R.numpy(), mask=id_R.numpy() == 0))
