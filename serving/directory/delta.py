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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from logitmix.common.checked import Checked, entry_of_bytes, fields_of, json_digest, require_entry, require_fields
from logitmix.common.files import require_file
from logitmix.common.mappings import brief
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
_READINGS = 3
_FIELDS = ("number", "applies_to", "manifest", "computed", "scales", "files")

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


def read_delta(path: Path) -> Delta:
    """ValueError that names the file if its delta.json is damaged, or not as it must be."""
    file = path / DELTA_MANIFEST
    fields = fields_of(DELTA.read(file))
    require_fields(fields, _FIELDS, str(file))
    number, manifest, files = fields["number"], fields["manifest"], fields["files"]
    if type(number) is not int or not 1 <= number < 2**63:
        raise ValueError(f"{file}: number is {brief(number)}, not a whole number from 1")
    if not isinstance(fields["applies_to"], str) or not isinstance(fields["computed"], bool):
        raise ValueError(f"{file}: applies_to is not a text, or computed not true or false")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{file}: manifest is not that of an export")
    if not isinstance(files, dict):
        raise ValueError(f"{file}: files is {brief(files)}, not a mapping")
    if manifest.get("sha256") != json_digest({name: of for name, of in manifest.items() if name != "sha256"}):
        raise ValueError(f"{file}: manifest.sha256 is not the digest of the manifest")
    where = ((WEIGHTS, files), (COLUMNS, files), (CARD, manifest["files"]))
    given = [name for name, there in where if name in there]
    require_fields(files, (ROWS, *given), f"{file}: files")
    for name, entry in files.items():
        require_entry(entry, f"{file}: files.{name}")
    scales = fields["scales"]
    if not isinstance(scales, dict) or not all(isinstance(of, float) and of > 0 for of in scales.values()):
        raise ValueError(f"{file}: scales is {brief(scales)}, not numbers by name")
    of_names = Scales(scales.get("corpus"), scales.get("components"))
    return Delta(
        path, number, fields["applies_to"], manifest, about_of(file, manifest), fields["computed"], of_names, files
    )


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
    by_number, problems = _read_deltas(folder)
    order = sorted(by_number)
    for at in order:
        if len(by_number[at]) > 1:
            one, other = (delta.path for delta in by_number[at][:2])
            problems.append(f"{one} and {other} both have number {at}; remove the one that is not wanted")
    if number is None:
        number = max((of for of in order if by_number[of][-1].gives == digest), default=None)
    if number is None:
        # An export that no delta gives is the first of its chain.
        number = min((of for of in order if by_number[of][0].applies_to == digest), default=1) - 1
    found: list[Delta] = []
    later = [of for of in order if of > number]
    for expected, at in enumerate(later, number + 1):
        delta = by_number[at][0]
        if at != expected:
            problems.append(f"{delta.path} has number {at}, but delta {expected} is missing in {folder}")
            break
        if len(by_number[at]) > 1:
            break
        if delta.applies_to != digest:
            problems.append(
                f"{delta.path}, number {at}, applies to an export with digest {delta.applies_to[:12]}, but the one "
                f"before it has {digest[:12]}; deltas of another export need a folder of their own"
            )
            break
        found.append(delta)
        digest = delta.gives
    return found, "; ".join(problems)


def _read_deltas(folder: Path) -> tuple[dict[int, list[Delta]], list[str]]:
    """The deltas of a folder by number, and why others cannot be read. Where some go while they are read, what is left
    of those that an export has may look like a chain with gaps, so they are read again."""
    for _ in range(_READINGS):
        there, by_number, problems = stamps(folder), defaultdict[int, list[Delta]](list), list[str]()
        for name, *_ in there:
            try:
                delta = read_delta(folder / name)
            except FileNotFoundError:
                # If it has neither, it has gone, or something else is there, such as an export.
                if (folder / name / ROWS).exists():
                    problems.append(f"{folder / name} has no {DELTA_MANIFEST}; copy the whole delta, or remove it")
            except (ValueError, OSError) as error:
                problems.append(" ".join(str(error).split()))
            else:
                by_number[delta.number].append(delta)
        if stamps(folder) == there:
            break
    return by_number, problems


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
    before = columns(contents, not stored)
    sizes = {ITEM: [of["tensors"][row_tensor(about)]["shape"][0] for of in _entries(entries, items_file)]}
    of_tables: dict[str, list[int]] = defaultdict(list)
    for entry in _entries(entries, tables_file):
        for name, of in entry["tensors"].items():
            of_tables[name].append(of["shape"][0])
    found: Columns = {}
    texts_there = TEXTS if "titles.data" in entries[IDS]["tensors"] else TEXTS[:1]
    for group, names, parts in (
        ("items", [*_of_shards(about, contents.shards[0], not stored), *texts_there], sizes[ITEM]),
        *(
            (f"tables/{name}", [f"tables/{name}", *([] if name == ITEM else [f"vocabularies/{name}"])], of)
            for name, of in of_tables.items()
        ),
    ):
        count = sum(parts)
        for name in names:
            is_text = name in TEXTS or name.startswith("vocabularies/")
            earlier = before.get(name, [])
            place_R = rows.get(f"{group}/places", in_order(sum(map(rows_of, earlier)), count))
            found[name] = _patched(earlier, place_R, [count] if is_text else parts, rows, name)
    tables = {name: StoredTable([of.values for of in found[f"tables/{name}"]]) for name in of_tables}
    tower = trained_tower(about.model, about.schema, weights)
    shards = []
    of_items = {name: of for name, of in found.items() if name.startswith("items/") and name not in TEXTS}
    for number in range(len(sizes[ITEM])):
        part = {name.removeprefix("items/"): of[number] for name, of in of_items.items()}
        shards.append(_shard(part, delta, tower, tables, sides))
    groups = {name: rows.get(f"tables/{name}/places") for name in of_tables} | {ITEM: rows.get("items/places")}

    def texts(name: str, earlier: Texts, table: str) -> Texts:
        (now,) = found[name]
        changed = rows.get(f"{name}/changed", torch.zeros(0, dtype=torch.int64))
        return _ordered(Texts(now.values, offsets_of(now)), earlier, groups[table], changed)

    vocabularies = {
        name: texts(f"vocabularies/{name}", earlier, name) for name, earlier in contents.vocabularies.items()
    }
    titles = None
    if "items/titles" in found:
        (of_titles,) = found["items/titles"]
        titles = Texts(of_titles.values, offsets_of(of_titles))
    result = Contents(
        about=about,
        weights=weights,
        tables=tables,
        vocabularies=vocabularies,
        shards=shards,
        raw_ids=texts("items/raw_ids", contents.raw_ids, ITEM),
        titles=titles,
        columns=contents.columns,
        projections=contents.projections,
        digest=delta.gives,
        delta=delta.number,
        files=contents.files,
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
    starts = torch.tensor([0, *map(rows_of, parts)]).cumsum(0)
    if parts[0].offsets is not None:
        part_N = torch.bucketize(index_N, starts, right=True) - 1
        used = part_N.unique()
        first_of = F.pad(torch.tensor([rows_of(parts[number]) for number in used.tolist()]).cumsum(0), (1, 0))
        place_N = index_N - starts[part_N] + first_of[torch.searchsorted(used, part_N)]
        return joined([parts[number] for number in used.tolist()] or parts[:1]).take(place_N)
    tensors = [of.values for of in parts]
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


def _patched(
    earlier: Sequence[Values], place_R: Tensor, sizes: Sequence[int], rows: Mapping[str, Tensor], name: str
) -> list[Values]:
    """A column in parts of these sizes: the earlier rows at these places, but for those that changed."""
    changed_C = rows.get(f"{name}/changed", torch.zeros(0, dtype=torch.int64))
    if len(place_R) != sum(sizes) or int(changed_C.diff().min() if len(changed_C) > 1 else 1) < 1:
        raise ValueError(f"{name} has other rows")
    new = None
    if len(changed_C):
        beside = {key.rpartition("/")[2]: of for key, of in rows.items() if key.startswith(f"{name}/beside/")}
        new = Values(rows[f"{name}/values"], rows.get(f"{name}/offsets"), beside)
        if rows_of(new) != len(changed_C):
            raise ValueError(f"{name} has other rows")
    count, start, found = sum(map(rows_of, earlier)), 0, []
    source = [*earlier, *([] if new is None else [new])]
    first_of = [0, *np.cumsum([rows_of(of) for of in earlier]).tolist()]
    for size in sizes:
        place_N = place_R[start : start + size].clone()
        within = slice(*torch.searchsorted(changed_C, torch.tensor([start, start + size])).tolist())
        at = changed_C[within] - start
        start += size
        if not len(at) and size and int(place_N[0]) in first_of:
            part = first_of.index(int(place_N[0]))
            if (
                part < len(earlier)
                and rows_of(earlier[part]) == size
                and torch.equal(place_N, torch.arange(first_of[part], first_of[part + 1]))
            ):
                found.append(earlier[part])  # still mapped
                continue
        place_N[at] = count + torch.arange(*within.indices(len(changed_C))[:2])
        if size and not 0 <= int(place_N.min()) <= int(place_N.max()) < count + len(changed_C):
            raise ValueError(f"{name} lacks rows")
        if len(source) > 1 and source[0].offsets is not None:
            source = [joined(source)]
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
    file, entry = delta.path / name, delta.files[name]
    try:
        require_file(file)
        content = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{file} is missing") from None
    if entry_of_bytes(content) != entry:
        raise ValueError(f"{file} is damaged (its SHA-256 is not that in {DELTA_MANIFEST})")
    try:
        return load(content)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file ({error})") from None


def _entries(entries: Mapping[str, Any], name: Any) -> list[Any]:
    return [entries[of] for of in numbered(name, entries)]


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


def _ordered(texts: Texts, earlier: Texts, place_R: Tensor | None, changed_C: Tensor) -> Texts:
    """Texts with their order, equal ones by rising index: that of the earlier ones, and the changed ones where they
    belong."""
    assert earlier.order is not None
    if place_R is None:
        place_R = in_order(len(earlier), len(texts))
    kept_R = place_R.clone()
    kept_R[changed_C] = -1
    now = torch.full((len(earlier),), -1)
    now[kept_R[kept_R >= 0]] = (kept_R >= 0).nonzero().flatten()
    order = now[earlier.order]
    kept = order[order >= 0].numpy()
    come = sorted(changed_C.tolist(), key=lambda index: (texts.encoded(index), index))
    at, low = list[int](), 0
    for index in come:
        low = bisect_left(kept, texts.encoded(index), low, key=texts.encoded)
        at.append(low)
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
