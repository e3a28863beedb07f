"""Deltas: what an export has that an earlier one lacks, as a directory of safetensors and JSON. Format version 2.

    delta.json          number (1 for the first of a chain, then one more each), applies_to (the sha256 of the manifest
                        of the export that it applies to), manifest (that of the export that results), computed, scales,
                        files
    tower.safetensors   the weights of the towers, if they are others
    columns.safetensors the columns to filter by, if they are others
    rows.safetensors    COLUMN/changed (I64 [C], rising) and the values of these rows: COLUMN/values, for bags and texts
                        also COLUMN/offsets and what each value has beside it. A column is items/NAME for what an export
                        stores of items, their ids and titles; tables/TABLE; or vocabularies/TABLE. A column without a
                        changed row is not here. GROUP/places (I64 [R], for items or tables/TABLE): the place of each
                        row in the earlier export, -1 for none; where it is not here, the earlier rows come first, in
                        their order
    README.md           the model card of the export that results, if it has one

If `computed` is true, what follows from the items' rows and features (their sides, the h-indexer's vectors, and their
vectors where they have features) is not here: whoever applies the delta computes it with its towers and `scales`, as
the export did. The same bits come out where the processor
is the same; on another, they differ by rounding.

Axes: R rows of an export, C changed rows of a column.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from logitmix.common.checked import Checked, check_file, fields_of, json_digest, require_entry, require_fields
from logitmix.common.mappings import from_mapping
from logitmix.modules.features import stored_tensors, values_of_tensors
from logitmix.modules.schema import ITEM
from logitmix.modules.stage1 import LANES, ZERO, rows_of_blocks
from logitmix.modules.values import Values
from logitmix.serving.columns import read_columns, stored_columns
from logitmix.serving.directory.checks import about_of
from logitmix.serving.directory.format import (
    CARD,
    COLUMNS,
    IDS,
    WEIGHTS,
    About,
    Contents,
    described,
    items_file,
    numbered,
    row_tensor,
    tables_file,
)
from logitmix.serving.items import ItemInputs, items_of
from logitmix.serving.model import (
    COMPONENTS_SCALE,
    CORPUS,
    CORPUS_SCALE,
    OWN_ROW,
    TABLE,
    Scales,
    is_side,
    scales_of,
    trained_tower,
)
from logitmix.serving.stored_table import StoredTable, gather
from logitmix.serving.texts import Texts

DELTA = Checked("logitmix export delta", 2)
DELTA_MANIFEST, ROWS = "delta.json", "rows.safetensors"

Columns = dict[str, list[Values]]
"""By name of a column, its rows in parts, one after the other."""


@dataclass(frozen=True, eq=False)
class Delta:
    """delta.json of a delta; its other files are not read yet."""

    path: Path
    number: int
    applies_to: str
    manifest: Mapping[str, Any]
    about: About
    computed: bool
    scales: Scales
    files: Mapping[str, Mapping[str, Any]]

    @property
    def gives(self) -> str:
        """The digest of the export that results."""
        return str(self.manifest["sha256"])


@dataclass(frozen=True)
class _Fields:
    """What delta.json holds."""

    number: int
    applies_to: str
    manifest: dict[str, Any]
    computed: bool
    scales: dict[str, float]
    files: dict[str, Any]


def read_delta(path: Path) -> Delta:
    """ValueError that names the file if its delta.json is damaged, or not as it must be."""
    file = path / DELTA_MANIFEST
    of = from_mapping(_Fields, fields_of(DELTA.read(file)), str(file))
    if not 1 <= of.number < 2**63:
        raise ValueError(f"{file}: number is {of.number}; it must be at least 1")
    if not isinstance(of.manifest.get("files"), dict):
        raise ValueError(f"{file}: manifest is not that of an export")
    if of.manifest.get("sha256") != json_digest({name: each for name, each in of.manifest.items() if name != "sha256"}):
        raise ValueError(f"{file}: manifest.sha256 is not the digest of the manifest")
    where = ((WEIGHTS, of.files), (COLUMNS, of.files), (CARD, of.manifest["files"]))
    require_fields(of.files, (ROWS, *(name for name, there in where if name in there)), f"{file}: files")
    for name, entry in of.files.items():
        require_entry(entry, f"{file}: files.{name}")
    about = about_of(file, of.manifest)
    scales = Scales(of.scales.get("corpus"), of.scales.get("components"))
    return Delta(path, of.number, of.applies_to, of.manifest, about, of.computed, scales, of.files)


def stamps(folder: Path) -> tuple[tuple[Any, ...], ...]:
    """Returns the name of each delta in a folder, with what differs when one of its files is another. A folder without
    files, or with a name that begins with a dot, is no delta."""
    found = []
    for delta in folder.glob("[!.]*/"):
        try:
            of_files = {of.name: of.stat() for of in sorted(delta.iterdir())}
        except OSError:  # it is gone
            continue
        if of_files:
            stats = ((name, of.st_ino, of.st_size, of.st_mtime_ns) for name, of in of_files.items())
            found.append((delta.name, *stats))
    return tuple(sorted(found))


def chain(folder: Path, digest: str, number: int | None = None) -> tuple[list[Delta], str]:
    """The deltas of a folder that follow an export with this digest, in order, and one line that says why the rest does
    not; empty where there is no rest. `number` is that of the last delta that the export has, if that is known."""
    deltas, problems = list[Delta](), list[str]()
    for name, *_ in stamps(folder):
        try:
            deltas.append(read_delta(folder / name))
        except FileNotFoundError:
            # If it has neither, it has gone, or something else is there, such as an export.
            if (folder / name / ROWS).exists():
                problems.append(f"{folder / name} has no {DELTA_MANIFEST}; copy the whole delta, or remove it")
        except (ValueError, OSError) as error:
            problems.append(" ".join(str(error).split()))
    deltas.sort(key=lambda delta: delta.number)
    for one, other in pairwise(deltas):
        if one.number == other.number:
            problems.append(f"{one.path} and {other.path} both have number {one.number}; remove one of them")
            deltas = [delta for delta in deltas if delta.number < one.number]
            break
    last = max([number or 0, *(delta.number for delta in deltas if delta.gives == digest)])
    found: list[Delta] = []
    for delta in deltas:
        if delta.number <= last:
            continue
        if delta.applies_to != digest or (last and delta.number != last + 1):
            problems.append(
                f"{delta.path}, number {delta.number}, applies to an export with digest {delta.applies_to[:12]}, but "
                f"the one before it has {digest[:12]}: a delta between them is missing, or it is of another export"
            )
            break
        else:
            found.append(delta)
            last, digest = delta.number, delta.gives
    return found, "; ".join(problems)


def all_applied(contents: Contents, deltas: Sequence[Delta]) -> tuple[Contents, str]:
    """The export that results from as many of these deltas as can be applied, and one line why the next one cannot be;
    empty where there is none. What the last one that is `computed` computes, those before it need not."""
    last = max((number for number, delta in enumerate(deltas) if delta.computed), default=0)
    result = contents
    for number, delta in enumerate(deltas):
        try:
            result = applied(result, delta, sides=number >= last)
        except (ValueError, OSError) as error:
            if 0 < number <= last:
                result, _ = all_applied(contents, deltas[:number])
            return result, " ".join(str(error).split())
    return result, ""


@torch.no_grad()
def applied(contents: Contents, delta: Delta, sides: bool = True) -> Contents:
    """The export that results. What did not change stays mapped from the earlier one's files, all else is in memory.
    Without `sides`, it lacks what can be computed from the items' rows. ValueError that names the delta if it is
    damaged, or not for such an export."""
    assert delta.applies_to == contents.digest
    where = delta.path / ROWS
    weights = _tensors(delta, WEIGHTS) if WEIGHTS in delta.files else dict(contents.weights)
    rows = _tensors(delta, ROWS)
    of_columns = _tensors(delta, COLUMNS) if COLUMNS in delta.files else stored_columns(contents.columns)
    try:
        found = read_columns(delta.about.filterable, of_columns)
        return _applied(replace(contents, columns=found), delta, weights, rows, sides)
    except (LookupError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} does not fit the export: {' '.join(str(error).split()):.200}") from None


def _applied(
    contents: Contents, delta: Delta, weights: dict[str, Tensor], rows: dict[str, Tensor], sides: bool
) -> Contents:
    about, entries, stored = delta.about, delta.manifest["files"], sides and not delta.computed
    sizes = defaultdict[str, list[int]](list)
    """The rows of each file, by group."""
    for name in numbered(items_file, entries):
        sizes["items"].append(entries[name]["tensors"][row_tensor(about)]["shape"][0])
    for name in numbered(tables_file, entries):
        for table, of in entries[name]["tensors"].items():
            sizes[f"tables/{table}"].append(of["shape"][0])
    names = {group: [group, group.replace("tables", "vocabularies", 1)] for group in sizes}
    titles = "titles.data" in entries[IDS]["tensors"]
    names["items"] = [*_of_shards(about, contents.shards[0], not stored), *TEXTS[: 1 + titles]]
    names[f"tables/{ITEM}"] = [f"tables/{ITEM}"]
    before, found, texts = columns(contents, not stored), Columns(), dict[str, Texts]()
    for group, parts in sizes.items():
        earlier = before["items/raw_ids" if group == "items" else group]
        place_R = rows.get(f"{group}/places", in_order(sum(map(rows_of, earlier)), sum(parts)))
        for name in names[group]:
            is_text = name in TEXTS or name.startswith("vocabularies/")
            found[name] = _patched(before.get(name, []), place_R, [sum(parts)] if is_text else parts, rows, name)
            if is_text:
                texts[name] = Texts(found[name][0].values, offsets_of(found[name][0]))
                if name != "items/titles":
                    was = contents.raw_ids if group == "items" else contents.vocabularies[group.partition("/")[2]]
                    texts[name] = _ordered(texts[name], was, place_R, _changed(rows, name))
    tables = {
        name: StoredTable([of.values for of in found[f"tables/{name}"]])
        for name in (group.partition("/")[2] for group in sizes if group != "items")
    }
    tower = trained_tower(about.model, about.schema, weights)
    shards = []
    for number in range(len(sizes["items"])):
        part = {name.removeprefix("items/"): found[name][number] for name in names["items"] if name not in TEXTS}
        shards.append(_shard(part, delta, tower, tables, sides))
    result = replace(
        contents,
        about=about,
        weights=weights,
        tables=tables,
        vocabularies={name: texts[f"vocabularies/{name}"] for name in contents.vocabularies},
        shards=shards,
        raw_ids=texts["items/raw_ids"],
        titles=texts.get("items/titles"),
        digest=delta.gives,
        delta=delta.number,
    )
    _require_described(result, entries, sides)
    return result


TEXTS = ("items/raw_ids", "items/titles")


def columns(contents: Contents, computed: bool) -> Columns:
    """What an export has by rows; without what can be computed from the items' rows, if `computed`."""
    found = {
        name: [_column(shard, name, contents.about) for shard in contents.shards]
        for name in _of_shards(contents.about, contents.shards[0], computed)
    }
    found["items/raw_ids"] = [_of_texts(contents.raw_ids)]
    if contents.titles is not None:
        found["items/titles"] = [_of_texts(contents.titles)]
    found |= {f"tables/{name}": [Values(part) for part in table.parts] for name, table in contents.tables.items()}
    return found | {f"vocabularies/{name}": [_of_texts(texts)] for name, texts in contents.vocabularies.items()}


def _of_shards(about: About, first: Mapping[str, Tensor], computed: bool) -> list[str]:
    """The names of the columns of items but the texts, by the first shard."""
    names = list[str]()
    if about.holds_inputs:
        names += [OWN_ROW, *(f"{feature.name}.values" for feature in about.schema.of("item"))]
    if about.item_cache and not (computed and about.holds_inputs):
        names.append(TABLE)
    if not computed:
        names += [name for name in first if name == CORPUS or is_side(name)]
    return [f"items/{name}" for name in names]


def computable(about: About) -> bool:
    """Whether an export holds the inputs of its item tower."""
    alone = not about.schema.of("item") and about.schema.dims(about.model.dim)[ITEM] == about.model.dim
    return about.holds_inputs or alone


def rows_as_shard(shards: Sequence[Mapping[str, Tensor]], about: About, index_N: Tensor) -> dict[str, Tensor]:
    """The tensors of a shard of some rows of others, by place among those of all."""
    names = _of_shards(about, shards[0], False)
    part = {
        name.removeprefix("items/"): taken([_column(shard, name, about) for shard in shards], index_N) for name in names
    }
    return _stored(part, about, scales_of(shards[0]))


def tensors_of(name: str, of: Values) -> dict[str, Tensor]:
    """The rows of a column, as a delta stores them."""
    offsets = {} if of.offsets is None else {f"{name}/offsets": of.offsets}
    beside = {f"{name}/beside/{what}": values for what, values in of.parallel.items()}
    return {f"{name}/values": of.values.contiguous(), **offsets, **beside}


def joined(parts: Sequence[Values]) -> Values:
    """The rows of all parts."""
    first = parts[0]
    values = torch.cat([of.values for of in parts])
    if first.offsets is None:
        return Values(values)
    lengths = torch.cat([offsets_of(of).diff() for of in parts])
    parallel = {name: torch.cat([of.parallel[name] for of in parts]) for name in first.parallel}
    return Values(values, F.pad(lengths.cumsum(0), (1, 0)), parallel)


def taken(parts: Sequence[Values], index_N: Tensor) -> Values:
    """Some rows, by place among those of all parts."""
    if parts[0].offsets is not None:
        return joined(parts).take(index_N)
    starts, tensors = torch.tensor([0, *map(rows_of, parts)]).cumsum(0), [of.values for of in parts]
    out = tensors[0].new_empty(len(index_N), *tensors[0].shape[1:])
    return Values(gather(index_N, starts, lambda number, at_N: tensors[number][at_N], out))


def differ(one: Values, other: Values) -> Tensor:
    """Which of as many rows have other bits, bool [N]."""
    if one.offsets is None or other.offsets is None:
        return bits_differ(one.values, other.values)
    lengths_N = one.offsets.diff()
    differs_N = lengths_N != other.offsets.diff()
    (same_M,) = (~differs_N).nonzero(as_tuple=True)
    mine, theirs = one.take(same_M), other.take(same_M)
    differs_S = bits_differ(mine.values, theirs.values)
    for name, beside in mine.parallel.items():
        differs_S |= bits_differ(beside, theirs.parallel[name])
    differs_N[same_M.repeat_interleave(lengths_N[same_M])[differs_S]] = True
    return differs_N


def bits_differ(one: Tensor, other: Tensor) -> Tensor:
    if not len(one):
        return torch.zeros(0, dtype=torch.bool)
    mine, theirs = (of.contiguous().view(len(one), -1).view(torch.uint8) for of in (one, other))
    return (mine != theirs).any(1)


def _changed(rows: Mapping[str, Tensor], name: str) -> Tensor:
    """The rows of a column that a delta has, int64 [C]."""
    return rows.get(f"{name}/changed", torch.zeros(0, dtype=torch.int64))


def _patched(
    earlier: Sequence[Values], place_R: Tensor, sizes: Sequence[int], rows: Mapping[str, Tensor], name: str
) -> list[Values]:
    """A column in parts of these sizes: the earlier rows at these places, but for those that changed."""
    changed_C, source, place_R = _changed(rows, name), list(earlier), place_R.clone()
    count, first_of = sum(map(rows_of, earlier)), [0, *accumulate(map(rows_of, earlier))]
    if len(changed_C):
        beside = {key.rpartition("/")[2]: of for key, of in rows.items() if key.startswith(f"{name}/beside/")}
        source.append(Values(rows[f"{name}/values"], rows.get(f"{name}/offsets"), beside))
        place_R[changed_C] = count + torch.arange(len(changed_C))
    there = count + len(changed_C)
    if sum(map(rows_of, source)) != there or len(place_R) != sum(sizes):
        raise ValueError(f"{name} has other rows")
    if len(place_R) and not 0 <= int(place_R.min()) <= int(place_R.max()) < there:
        raise ValueError(f"{name} lacks rows")
    found = []
    for place_N in place_R.split(list(sizes)):
        number = first_of.index(int(place_N[0])) if len(place_N) and int(place_N[0]) in first_of else len(earlier)
        if number < len(earlier) and torch.equal(place_N, torch.arange(first_of[number], first_of[number + 1])):
            found.append(earlier[number])  # still mapped
        else:
            found.append(taken(source, place_N))
    return found


def _shard(
    part: dict[str, Values], delta: Delta, tower: Any, tables: Mapping[str, StoredTable], sides: bool
) -> dict[str, Tensor]:
    """The tensors of a shard."""
    about, scales = delta.about, delta.scales
    if delta.computed and sides:
        own = part[OWN_ROW if about.holds_inputs else TABLE].values
        inputs = ItemInputs(own, {of.name: part[f"{of.name}.values"] for of in about.schema.of("item")})
        return items_of(tower, inputs, tables, about.precision, about.item_cache, scales)
    return _stored(part, about, scales)


def _stored(part: Mapping[str, Values], about: About, scales: Scales) -> dict[str, Tensor]:
    """The tensors of a shard from its columns."""
    tensors: dict[str, Tensor] = {}
    for feature in about.schema.of("item") if about.holds_inputs else ():
        tensors |= stored_tensors(feature, part[f"{feature.name}.values"])
    tensors |= {name: of.values for name, of in part.items() if name in (TABLE, OWN_ROW) or is_side(name)}
    if CORPUS in part:
        tensors[CORPUS] = _blocks(part[CORPUS].values)
    if scales.corpus is not None:
        tensors[CORPUS_SCALE] = torch.tensor([scales.corpus])
    if scales.components is not None:
        tensors[COMPONENTS_SCALE] = torch.tensor([scales.components])
    return tensors


def _column(shard: Mapping[str, Tensor], name: str, about: About) -> Values:
    name = name.removeprefix("items/")
    if name == CORPUS:
        blocks = shard[CORPUS]
        items = len(shard[row_tensor(about)])
        return Values(rows_of_blocks(blocks, items))
    of_feature = {f"{of.name}.values": of for of in about.schema.of("item")}
    if name in of_feature:
        return values_of_tensors(of_feature[name], shard)
    return Values(shard[name])


def _blocks(item_RG: Tensor) -> Tensor:
    """Rows of the h-indexer's vectors [R, G, 4] as blocks of an Int8Corpus."""
    R, G, group = item_RG.shape
    padded = F.pad(item_RG, (0, 0, 0, 0, 0, -R % LANES), value=ZERO)
    return padded.view(-1, LANES, G, group).transpose(1, 2).contiguous()


def _tensors(delta: Delta, name: str) -> dict[str, Tensor]:
    """The tensors of a file of a delta, in memory. ValueError if it is not that of delta.json."""
    file = delta.path / name
    check_file(file, delta.files[name], DELTA_MANIFEST)
    try:
        return load(file.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file ({error})") from None


def _of_texts(texts: Texts) -> Values:
    return Values(texts.data, texts.bounds)


def offsets_of(of: Values) -> Tensor:
    assert of.offsets is not None
    return of.offsets


def rows_of(of: Values) -> int:
    return len(of.values) if of.offsets is None else len(of.offsets) - 1


def in_order(before: int, now: int) -> Tensor:
    """The places of rows that came to earlier ones."""
    place_R = torch.arange(now)
    place_R[before:] = -1
    return place_R


def _ordered(texts: Texts, earlier: Texts, place_R: Tensor, changed_C: Tensor) -> Texts:
    """Texts with their order, equal ones by rising index: that of the earlier ones, and the changed ones where they
    belong."""
    assert earlier.order is not None
    kept_R = place_R.clone()
    kept_R[changed_C] = -1
    now = torch.full((len(earlier),), -1)
    now[kept_R[kept_R >= 0]] = (kept_R >= 0).nonzero().flatten()
    order = now[earlier.order]
    kept = order[order >= 0].numpy()
    come = sorted(changed_C.tolist(), key=lambda index: (texts.encoded(index), index))
    at = [bisect_left(kept, texts.encoded(index), key=texts.encoded) for index in come]
    merged = np.insert(kept, at, np.array(come, np.int64))
    # Only blanks may be equal.
    blanks = int((texts.bounds.diff() == 0).sum())
    merged[:blanks].sort()
    return replace(texts, order=torch.from_numpy(merged))


def _require_described(contents: Contents, entries: Mapping[str, Any], sides: bool) -> None:
    """ValueError if the tensors are not those of the manifest."""
    for number, shard in enumerate(contents.shards if sides else ()):
        name = items_file(number, len(contents.shards))
        if described(shard) != entries[name]["tensors"]:
            raise ValueError(f"the tensors of {name} would not be those of its manifest")
    if described(stored_columns(contents.columns)) != entries.get(COLUMNS, {"tensors": {}})["tensors"]:
        raise ValueError(f"the tensors of {COLUMNS} would not be those of its manifest")
    for texts in (contents.raw_ids, *contents.vocabularies.values()):
        if problem := texts.problem():
            raise ValueError(problem)
