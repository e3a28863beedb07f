"""Deltas of exports: written from a run and an earlier export, and folded into an export again.

Axes: R rows of an export, C changed rows of a column.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from logitmix.common.checked import entry_of
from logitmix.common.files import clean_up, in_turn, only_writer, sync, whole_directory
from logitmix.common.storage import is_copy
from logitmix.launch.processes import is_main
from logitmix.modules.schema import ITEM
from logitmix.modules.values import Values
from logitmix.serving.columns import stored_columns
from logitmix.serving.directory import reader, writer
from logitmix.serving.directory.delta import (
    DELTA,
    DELTA_MANIFEST,
    ROWS,
    Delta,
    all_applied,
    applied,
    bits_differ,
    chain,
    columns,
    computable,
    differ,
    in_order,
    joined,
    read_delta,
    rows_of,
    stamps,
    taken,
    tensors_of,
)
from logitmix.serving.directory.format import (
    CARD,
    COLUMNS,
    FORMAT,
    MANIFEST,
    WEIGHTS,
    Contents,
    Entries,
    numbered,
    tables_file,
)
from logitmix.serving.model import scales_of
from logitmix.serving.texts import Texts
from logitmix.trainer.export.catalog import Catalog
from logitmix.trainer.export.export import export

WHOLE = ".whole"
"""How the hidden name of the whole export ends that a delta is made of."""
COMPARED_ROWS = 2**16
"""Rows that are compared at once."""


def export_delta(
    run: Path, earlier: Path, out: Path, which: Literal["best", "last"] = "best", catalog: Catalog | None = None
) -> dict[str, Any]:
    """Writes what the export of a run, with a catalog if there is one, has that an earlier export, with the deltas that
    lie beside `out`, lacks; returns the content of its delta.json. The item cache, its precision and the names of the
    filterable columns are those of the earlier export. Alone, or under torchrun. Raises ValueError as `export` does, if
    `out` exists or another process writes it, if the deltas beside it do not all follow the earlier export, if the
    model is another, and if nothing differs.
    """
    _require_folders(earlier, out)
    out = out.absolute()
    whole = out.with_name(f".{out.name}{WHOLE}")
    for left in out.parent.glob(f".*{WHOLE}"):
        # Of a process that was killed when its delta was complete.
        if left.with_name(left.name.removeprefix(".").removesuffix(WHOLE)).exists():
            shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as held:
        if is_main():
            held.enter_context(only_writer(out))
            held.callback(shutil.rmtree, whole, ignore_errors=True)
        if out.exists():
            raise ValueError(f"{out} exists already; give another --out: a delta is not replaced")
        base = reader.read(earlier)
        columns = base.about.filterable
        cache, precision = base.about.item_cache, base.about.precision
        export(run, whole, True, which, cache, precision, filterable=columns, catalog=catalog)
        if not is_main():
            return {}
        with in_turn(out.parent):
            clean_up(out)
            before, _ = with_deltas(base, out.parent)
            last = max((read_delta(out.parent / name).number for name, *_ in stamps(out.parent)), default=0)
            return write_delta(before, whole, out, last + 1)


def fold(earlier: Path, folder: Path, out: Path, overwrite: bool = False, keep: int | None = None) -> dict[str, Any]:
    """Writes the export that an earlier one and the deltas of a folder give, and returns its manifest: the same files
    as those of a whole export, but for its extras. `keep` is as for `export`. ValueError if `out` must not be written
    or another process writes it, if the deltas do not all follow the export, and where this processor computes other
    bits than that which exported."""
    _require_folders(earlier, folder, out)
    writer.require_keepable(out, keep)
    with ExitStack() as held:
        held.enter_context(in_turn(out))
        held.enter_context(only_writer(out))
        # It may give the earlier export its name back.
        clean_up(out)
        writer.check_target(out, overwrite)
        contents, deltas = with_deltas(reader.read(earlier), folder)
        if not deltas:
            raise ValueError(f"no delta in {folder} is to be applied to {earlier}")
        last = deltas[-1]
        staging = held.enter_context(whole_directory(out, writer.kept(out, keep)))
        entries = _written(staging, contents, last.manifest["files"])
        if CARD in last.manifest["files"]:
            shutil.copyfile(last.path / CARD, staging / CARD)
            entries |= writer.extra_entry(staging, CARD)
        for name, entry in last.manifest["files"].items():
            if entries.get(name) != entry:
                raise ValueError(
                    f"{name} would not be that of the export that {last.path} was made of: this processor or torch "
                    "computes other bits; fold where it was exported, or export the run"
                )
        return FORMAT.write(staging / MANIFEST, last.manifest)


def _require_folders(*paths: Path) -> None:
    for path in paths:
        if is_copy(path):
            raise ValueError(f"{path} is at a URL; deltas are made from an export in a folder, into a folder")


def with_deltas(contents: Contents, folder: Path) -> tuple[Contents, list[Delta]]:
    """An export with the deltas of a folder, and these. ValueError if not all of them follow it."""
    deltas, problem = chain(folder, contents.digest)
    if not problem:
        contents, problem = all_applied(contents, deltas)
    if problem:
        raise ValueError(problem)
    return contents, deltas


def write_delta(before: Contents, whole: Path, out: Path, number: int) -> dict[str, Any]:
    """Writes what the export in the directory `whole` has that an earlier one lacks; returns the content of its
    delta.json. ValueError if the model is another, and if nothing differs."""
    now, manifest = reader.read(whole), reader.read_manifest(whole)
    _require_same_model(before, now)
    if now.digest == before.digest:
        raise ValueError(
            f"the export of {now.about.source.run} does not differ from the earlier one: there is no delta"
        )
    with whole_directory(out) as staging:
        tower_changed = any(not _same(before.weights[name], of) for name, of in now.weights.items())
        scales = scales_of(now.shards[0])
        one, other = (stored_columns(of.columns) for of in (before, now))
        others = one.keys() != other.keys() or any(not _same(one[name], other[name]) for name in one)
        names = [WEIGHTS] * tower_changed + [COLUMNS] * (others and bool(other)) + [CARD] * (CARD in manifest["files"])
        for name in names:
            shutil.copyfile(whole / name, staging / name)
            sync(staging / name)
        can = computable(now.about) and (tower_changed or scales != scales_of(before.shards[0]))
        for computed in (True, False) if can else (False,):
            save_file(_rows(before, now, computed), staging / ROWS)
            sync(staging / ROWS)
            content = DELTA.write(
                staging / DELTA_MANIFEST,
                {
                    "number": number,
                    "applies_to": before.digest,
                    "manifest": manifest,
                    "computed": computed,
                    "scales": {name: of for name, of in asdict(scales).items() if of is not None},
                    "files": {name: entry_of(staging / name) for name in (*names, ROWS)},
                },
            )
            # Where another number of threads gives other bits, what could be computed is stored.
            if _equal(applied(before, read_delta(staging)), now):
                return content
    raise AssertionError("the delta does not give the export that it was made of")


def _require_same_model(before: Contents, now: Contents) -> None:
    """ValueError if a delta cannot give the export, because tensors have other names or widths."""

    def said(of: Contents) -> dict[str, object]:
        about, schema = of.about, of.about.schema
        features = {
            feature.name: (feature.owner, feature.kind, feature.table, feature.width, feature.version)
            for feature in schema.features
        }
        return {
            "model": about.model,
            "features": features,
            "width of a table": schema.dims(about.model.dim),
            "precision": about.precision,
            "item cache": about.item_cache,
        }

    one, other = said(before), said(now)
    if differ := [name for name in one if one[name] != other[name]]:
        raise ValueError(
            f"the {differ[0]} of the run is not that of the earlier export, so there is no delta; export it whole"
        )


def _rows(before: Contents, now: Contents, computed: bool) -> dict[str, Tensor]:
    """The tensors of a delta's rows."""
    of_before, of_now = columns(before, computed), columns(now, computed)
    tensors: dict[str, Tensor] = {}
    places = {"items": _places(before.raw_ids, now.raw_ids), f"tables/{ITEM}": torch.zeros(1, dtype=torch.int64)}
    for name, texts in now.vocabularies.items():
        places[f"tables/{name}"] = _places(before.vocabularies[name], texts)
    for group, place_R in places.items():
        earlier = of_before["items/raw_ids" if group == "items" else group]
        if not torch.equal(place_R, in_order(sum(map(rows_of, earlier)), len(place_R))):
            tensors[f"{group}/places"] = place_R
    for name, parts in of_now.items():
        group = "items" if name.startswith("items/") else f"tables/{name.partition('/')[2]}"
        changed_C = _changed(of_before.get(name, []), parts, places[group])
        if len(changed_C):
            tensors |= {f"{name}/changed": changed_C} | tensors_of(name, taken(parts, changed_C))
    return tensors


def _places(before: Texts, now: Texts) -> Tensor:
    """For each text, where it was before, int64 [R]. One that was not there has the place of what it replaces, or
    -1."""
    place_R = in_order(len(before), len(now))
    earlier, later = ([Values(texts.data, texts.bounds)] for texts in (before, now))
    changed = [index for index in _changed(earlier, later, place_R).tolist() if now.encoded(index)]
    was = torch.tensor(before.places([now[index] for index in changed]), dtype=torch.int64)
    there = was >= 0
    place_R[torch.tensor(changed, dtype=torch.int64)[there]] = was[there]
    return place_R


def _changed(earlier: Sequence[Values], parts: Sequence[Values], place_R: Tensor) -> Tensor:
    """The rows of a column that are not the earlier ones at these places, int64 [C]."""
    if not earlier:
        return torch.arange(len(place_R))
    if parts[0].offsets is not None:
        earlier, parts = [joined(earlier)], [joined(parts)]
    found = []
    for start in range(0, len(place_R), COMPARED_ROWS):
        place_N = place_R[start : start + COMPARED_ROWS]
        known_N = place_N >= 0
        differs_N, row_N = ~known_N, torch.arange(start, start + len(place_N))
        if known_N.any():
            differs_N[known_N] = differ(taken(earlier, place_N[known_N]), taken(parts, row_N[known_N]))
        found.append(row_N[differs_N])
    return torch.cat(found)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and not bool(bits_differ(one[None], other[None]).any())


def _equal(one: Contents, other: Contents) -> bool:
    """Whether two exports have the same bits."""

    def tensors(of: Contents) -> dict[str, Tensor | None]:
        texts = {"raw_ids": of.raw_ids, "titles": of.titles, **of.vocabularies}
        return {
            **{f"weights/{name}": weight for name, weight in of.weights.items()},
            **{f"columns/{name}": values for name, values in stored_columns(of.columns).items()},
            **{f"{number}/{name}": value for number, shard in enumerate(of.shards) for name, value in shard.items()},
            **{f"{name}/{at}": part for name, table in of.tables.items() for at, part in enumerate(table.parts)},
            **{f"{name}/{what}": getattr(given, what, None) for name, given in texts.items() for what in _OF_TEXTS},
        }

    mine, theirs = tensors(one), tensors(other)
    return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)


_OF_TEXTS = ("data", "bounds", "order")


def _written(staging: Path, contents: Contents, files: Mapping[str, Any]) -> Entries:
    """Writes the data of an export into files that have the tables' rows as in these entries of a manifest."""
    about, entries = contents.about, writer.write_weights(staging, contents.about, contents.weights)
    parts = {name: iter(table.parts) for name, table in contents.tables.items()}
    names = numbered(tables_file, files)
    for number, name in enumerate(names):
        rows = {table: next(parts[table]) for table in files[name]["tensors"]}
        entries |= writer.write_tables(staging, about, number, len(names), rows)
    entries |= writer.write_vocabularies(staging, about, contents.vocabularies)
    entries |= writer.write_columns(staging, contents.columns)
    entries |= writer.write_projections(staging, about, contents.projections)
    for number, shard in enumerate(contents.shards):
        entries |= writer.write_items(staging, about, number, len(contents.shards), shard)
    return entries | writer.write_ids(staging, about, contents.raw_ids, contents.titles)
