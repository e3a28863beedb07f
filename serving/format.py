"""The serving directory: safetensors and JSON, so that reading it runs no code but ours. Format version 3.

    manifest.json        what is here; see below
    tower.safetensors    the weights of the towers
    items-00000-of-000NN.safetensors
                         consecutive items: table [R, D], the vectors from which histories are encoded (with ids alone
                         the rows of the item table), and the item cache: the items' side for the similarity
                         (similarity.0, …; for MoL the components [R, I, C] and the gating weights [R, M]) in the
                         manifest's precision. int8 stores MoL's components as I8, with their scale in
                         similarity.0.scale [1], and the weights in BF16. If item_cache is false, the inputs of all this
                         instead: own_row [R, W], the items' rows of the item table, and NAME.values of each of their
                         features. For kinds of ids, these are rows of the feature's table (I32, or I64 if a table has
                         more than 2^31 rows). Bags also have NAME.offsets (I64 [R + 1], where each item's values begin
                         and end), and a tensor for each number that a value has beside it, such as NAME.weights. With
                         an h-indexer, its vectors in INT8: corpus (U8 [R / 16, H / 4, 16, 4], see Int8Corpus in
                         modules/stage1.py) and corpus.scale [1], the same in all files
    tables-00000-of-000NN.safetensors
                         consecutive rows: TABLE [any number, W], a piece of each table that has rows in this file. A
                         table's pieces, file after file, are all of its rows; of the item table, only the row of
                         unknown items is here
    vocabularies.safetensors
                         the values of each table of features by row: TABLE.data, TABLE.bounds and TABLE.order, in the
                         format of the raw ids below
    ids.safetensors      raw_ids.data (U8, the X texts in UTF-8, by item index), raw_ids.bounds (I64 [X + 1], where the
                         texts begin and end in it), raw_ids.order (I64 [X], the indices in the order of their bytes);
                         titles.data and titles.bounds if there are titles
    README.md            the model card, for people (trainer/export/card.py)
    similarity.faiss, hindexer.faiss
                         on request, the items' vectors as faiss indexes (trainer/export/indexes.py)
    query_tower.onnx     on request, the query tower (trainer/export/programs.py)
    programs/NAME.pt2, programs/NAME.aoti.pt2
                         on request, query_tower, item_tower and cascade as programs. These run code when they are
                         loaded, so the Retriever never does; serving/programs.py loads them where they are trusted

All other tensors are FP32. The fields of the manifest:

    format, format_version    name and version of the format
    logitmix, torch           versions that wrote it
    run, step, dataset        where the weights come from: names of run and dataset, step of the checkpoint
    model                     the model's configuration
    schema                    the features that the model uses, and their tables (modules/schema.py)
    num_items                 X
    item_cache                whether the files of items hold the item cache
    precision                 fp32, bf16, fp16 or int8: how they store it
    exclude_history           whether retrieval leaves a history's own items out by default: as the model was evaluated
    signature                 inputs and outputs of a retrieval
    files                     {name: {bytes, sha256, tensors: {name: {dtype, shape}}}}; extras, which retrieval does not
                              read, have no tensors; compiled programs have cpu, a list of the architecture and of the
                              instruction sets that they need
    plugins                   where kinds of the model or its features are of plugins: {name: version}. Reading it
                              imports none of them
    sha256                    digest of the other fields, as compact JSON in ASCII with sorted keys

Several processes can write it together, each some of the shards; files are mapped into memory when read.

Axes: X items in the corpus, R items of a shard, D encoder width, W width of a table, I item components, C component
width, M mixture components, H h-indexer width.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from logitmix.common.files import (
    file_digest,
    fits_digest,
    from_json,
    other_kind,
    require_tensors,
    sync,
    with_digest,
)
from logitmix.common.mappings import brief, first_line, from_mapping, to_mapping
from logitmix.common.plugins import require_plugins
from logitmix.modules.config import ModelConfig, plugins_of
from logitmix.modules.schema import ITEM, Owner, Schema
from logitmix.serving.group import part_of
from logitmix.serving.items import ItemInputs, stored_type
from logitmix.serving.mapped import MappedFiles
from logitmix.serving.model import (
    CORPUS_SCALE,
    IDS_ALONE,
    OWN_ROW,
    STORED,
    TABLE,
    Precision,
    item_types,
    row_shapes,
    weight_shapes,
)
from logitmix.serving.pieces import Pieces
from logitmix.serving.texts import Texts
from logitmix.serving.topk import MAX_ITEMS

T = TypeVar("T")

FORMAT = "logitmix serving directory"
FORMAT_VERSION = 3
MANIFEST, WEIGHTS, IDS = "manifest.json", "tower.safetensors", "ids.safetensors"
VOCABULARIES = "vocabularies.safetensors"
CARD, ONNX, PROGRAMS = "README.md", "query_tower.onnx", "programs"
_EXTRA = re.compile(
    r"README\.md|(similarity|hindexer)\.faiss|query_tower\.onnx|programs/(query_tower|item_tower|cascade)(\.aoti)?\.pt2"
)
"""Names of the extras: `read` neither reads nor checks them."""

Entries = dict[str, dict[str, Any]]
"""The field "files" of the manifest, or a part of it."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES |= {torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}
_SOURCE = ("run", "step", "dataset")
_WRITERS = ("logitmix", "torch")
_ABOUT_ITEMS = ("num_items", "exclude_history", "item_cache", "precision")
_FIELDS = (
    "format",
    "format_version",
    *_WRITERS,
    *_SOURCE,
    "model",
    "schema",
    *_ABOUT_ITEMS,
    "signature",
    "files",
    "sha256",
)


@dataclass(frozen=True)
class Source:
    """Where a model comes from: name of the run, step of the checkpoint, name of the dataset."""

    run: str
    step: int
    dataset: str


@dataclass(frozen=True)
class About:
    """What the manifest says of an export, besides its files."""

    model: ModelConfig
    source: Source
    num_items: int
    """X."""
    exclude_history: bool
    """Whether retrieval leaves a history's own items out by default."""
    schema: Schema = IDS_ALONE
    """The dataset's features that the model uses."""
    item_cache: bool = True
    """Whether the shards hold the item tower's outputs, or its inputs."""
    precision: Precision = "fp32"
    """How they store the outputs."""


@dataclass(frozen=True, eq=False)
class Contents:
    """The content of a serving directory."""

    about: About
    weights: Mapping[str, Tensor]
    """Weights of the towers."""
    tables: Mapping[str, Pieces]
    """[rows, W] for each table of features; [1, W] for the item table, the unknown item's row."""
    vocabularies: Mapping[str, Texts]
    """For each table of features, the values by row, with their order."""
    shards: Sequence[Mapping[str, Tensor]]
    """Consecutive items, by the names of `stored_items` and, without the item cache, of `ItemInputs.tensors`."""
    raw_ids: Texts
    """[X], distinct, with their order."""
    titles: Texts | None
    """[X], for people to read."""
    digest: str = ""
    """The manifest's."""
    files: MappedFiles = field(default_factory=lambda: MappedFiles({}))
    """From which the tensors are mapped."""


def write_weights(staging: Path, about: About, weights: Mapping[str, Tensor]) -> Entries:
    """Writes the towers' weights; returns the manifest's entry of the file.

    All functions write_* here raise ValueError for numbers that are not finite, and OSError if the disk is full or
    forbids it.
    """
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
    assert _described(items) == _items(_described(items), about)
    return _write_tensors(staging / items_file(number, count), items)


def write_ids(staging: Path, about: About, raw_ids: Texts, titles: Texts | None) -> Entries:
    """Writes the items' raw ids and titles."""
    tensors = _tensors_of(raw_ids, "raw_ids")
    if titles is not None:
        tensors |= {"titles.data": titles.data, "titles.bounds": titles.bounds}
    for texts in (raw_ids, titles or raw_ids):
        assert len(texts) == about.num_items and texts.problem() is None
    return _write_tensors(staging / IDS, tensors)


def _tensors_of(texts: Texts, name: str) -> dict[str, Tensor]:
    assert texts.order is not None
    return {f"{name}.data": texts.data, f"{name}.bounds": texts.bounds, f"{name}.order": texts.order}


def write_manifest(staging: Path, about: About, entries: Entries) -> dict[str, Any]:
    """Writes the last file, with the entries of all others; returns its content."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "logitmix": version("logitmix"),
        "torch": str(torch.__version__),
        **dataclasses.asdict(about.source),
        "model": to_mapping(about.model),
        "schema": about.schema.to_mapping(),
        "num_items": about.num_items,
        "exclude_history": about.exclude_history,
        "item_cache": about.item_cache,
        "precision": about.precision,
        "signature": signature(about.model, about.schema),
        "files": dict(sorted(entries.items())),
    }
    if needed := plugins_of(about.model, about.schema):
        manifest["plugins"] = needed
    manifest = with_digest(manifest)
    # ASCII with escapes preserves every text, even unpaired surrogates.
    text = json.dumps(manifest, indent=2, allow_nan=False) + "\n"
    (staging / MANIFEST).write_text(text, encoding="ascii")
    return manifest


def extra_entry(staging: Path, name: str, cpu: Sequence[str] = ()) -> Entries:
    """The manifest's entry of an extra that was written there; `cpu` of a compiled program alone."""
    assert is_extra(name) and bool(cpu) == _is_compiled(name)
    file = staging / name
    entry = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    return {name: entry | ({"cpu": list(cpu)} if cpu else {})}


def _is_compiled(name: str) -> bool:
    return name.endswith(".aoti.pt2")


def is_extra(name: str) -> bool:
    return _EXTRA.fullmatch(name) is not None


def checked_extra(path: Path, name: str) -> Path:
    """The file of an extra that a serving directory has. ValueError if it is not there or not that of the manifest."""
    files = read_manifest(path)["files"]
    if name not in files or not is_extra(name):
        there = ", ".join(filter(is_extra, files)) or "none"
        raise ValueError(f"{path} has no {name}; extras that are there: {there}")
    _check_file(path / name, files[name])
    return path / name


def items_file(number: int, count: int) -> str:
    return f"items-{number:05}-of-{count:05}.safetensors"


def tables_file(number: int, count: int) -> str:
    return f"tables-{number:05}-of-{count:05}.safetensors"


def read_tables(path: Path, entries: Entries) -> dict[str, Pieces]:
    """Tables from files that were all just written: mapped, and not checked."""
    files = [_read_tensors(path / name, entries[name]["tensors"]) for name in _numbered(tables_file, entries)]
    return _pieces(files)


def check_target(out: Path, overwrite: bool) -> None:
    """ValueError if `out` must not be written: it exists, and it is not a serving directory that may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not _is_ours(out):
        raise ValueError(f"{out} exists and is not a serving directory; give another --out, or remove it first")
    if not overwrite:
        raise ValueError(f"{out} exists already; give --overwrite to replace it, or another --out")


def read(path: Path, part: int = 0, parts: int = 1) -> Contents:
    """Reads and checks a serving directory, whose tensors are mapped from its files. Of several processes that share
    the items, each checks the digests of its part of the files: that of its items, and every `parts`-th of the others.
    If another export takes its place meanwhile, that one is read.

    Raises ValueError that names the path and what to do, if there is no serving directory, if it has another format
    version, or if a file is missing, damaged, or does not fit the manifest.
    """
    while True:
        before = stamp(path)
        try:
            contents = _read(path, part, parts)
        except (ValueError, OSError):
            if stamp(path) == before:
                raise
        else:
            # Otherwise some files may have been opened in the other directory.
            if stamp(path) == before:
                return contents


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs between the exports that are at this path one after the other; None if there is none."""
    try:
        status = (path / MANIFEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path, part: int, parts: int) -> Contents:
    manifest = read_manifest(path)
    plugins = manifest.get("plugins", {})
    if not isinstance(plugins, dict) or not all(isinstance(version_of, str) for version_of in plugins.values()):
        _broken(path / MANIFEST, f"plugins is {brief(plugins)}, not versions by name")
    require_plugins(plugins, str(path))
    about = About(
        model=_parse(ModelConfig, manifest["model"], path / MANIFEST, "model."),
        source=_parse(Source, {name: manifest[name] for name in _SOURCE}, path / MANIFEST, ""),
        num_items=manifest["num_items"],
        exclude_history=manifest["exclude_history"],
        schema=_parse(Schema, manifest["schema"], path / MANIFEST, "schema."),
        item_cache=manifest["item_cache"],
        precision=manifest["precision"],
    )
    _check_about(path / MANIFEST, manifest, about)
    tensors = _check_files(path / MANIFEST, manifest["files"], about)
    of_items = _numbered(items_file, tensors)
    own = {of_items[number] for number in part_of(range(len(of_items)), part, parts)}
    own.update([name for name in tensors if name not in of_items][part::parts])
    for name in tensors:
        _check_file(path / name, manifest["files"][name], content=name in own)
    files = MappedFiles({path / name: manifest["files"][name]["sha256"] for name in tensors})
    found = {name: _read_tensors(path / name, of_file) for name, of_file in tensors.items()}
    ids, vocabularies = found.pop(IDS), found.pop(VOCABULARIES)
    names = [table.name for table in about.schema.tables if table.name != ITEM]
    shards = {name: found[name] for name in of_items}
    if len({float(shard[CORPUS_SCALE]) for shard in shards.values() if CORPUS_SCALE in shard}) > 1:
        _broken(path / MANIFEST, f"its files have several {CORPUS_SCALE}")
    for name, shard in {} if about.item_cache else shards.items():
        if name in own and (problem := ItemInputs.of_tensors(shard, about.schema).problem(about.schema)):
            _broken(path / name, f"its {problem}")
    return Contents(
        about=about,
        weights=found[WEIGHTS],
        tables=_pieces([found[name] for name in _numbered(tables_file, found)]),
        vocabularies={name: _texts(path / VOCABULARIES, vocabularies, name) for name in names},
        shards=list(shards.values()),
        raw_ids=_texts(path / IDS, ids, "raw_ids"),
        titles=_texts(path / IDS, ids, "titles") if "titles.data" in ids else None,
        digest=manifest["sha256"],
        files=files,
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a serving directory, its digest checked; the files are not read."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"no serving directory at {path} (it has no {MANIFEST}); {_advice(path)}")
    manifest = _read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        _broken(file, f"it is not the manifest of a {FORMAT}")
    if manifest.get("format_version") != FORMAT_VERSION:
        _broken(file, f"it has format version {manifest.get('format_version')}, this logitmix reads {FORMAT_VERSION}")
    _check_keys(file, manifest, (*_FIELDS, *{"plugins"} & set(manifest)), "")
    if not fits_digest(manifest):
        _broken(file, "it is damaged (its sha256 differs)")
    return manifest


def signature(model: ModelConfig, schema: Schema = IDS_ALONE) -> dict[str, Any]:
    """Inputs and outputs of a retrieval, for readers of the manifest."""

    def features(owner: Owner) -> dict[str, str]:
        return {of.name: of.form.in_request(of) for of in schema.of(owner)}

    return {
        "inputs": {
            "history": {
                "items": "raw ids, or item indices from 0 to num_items - 1",
                "order": "oldest first",
                "min_length": 0 if schema.of("user") else 1,
                "max_length": model.encoder.max_length,
                "longer": "the last max_length are encoded",
            },
            "timestamps": "whole numbers, one a history item, oldest first; used by models with recency or times alone",
            "time": "whole number, when the request is made; used by models with times alone; else the last timestamp",
            "user": features("user"),
            "events": {"one a history item, oldest first": features("event")},
            "allowed": "raw ids; only these items are ranked where it is given",
            "blocked": "raw ids of items that are left out",
            "k": "number of items to retrieve",
        },
        "new_items": features("item"),
        "outputs": {
            "items": "item indices, highest score first, equal scores by rising index; -1 where none is left",
            "scores": "F32, the similarity; -inf where no item is left",
        },
    }


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> Entries:
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinity: the training diverged; export another checkpoint")
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from None
    # safetensors makes files that only their owner can read; give them the umask's permissions, like the directory's.
    file.chmod(file.parent.stat().st_mode & 0o666)
    sync(file)
    described = _described(tensors)
    return {file.name: {"bytes": file.stat().st_size, "sha256": file_digest(file), "tensors": described}}


def _described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: {"dtype": _DTYPES[value.dtype], "shape": list(value.shape)} for name, value in tensors.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    assert all(value.dtype == torch.float32 for value in tensors.values())
    return {name: list(value.shape) for name, value in tensors.items()}


def _is_ours(path: Path) -> bool:
    """Whether this is a serving directory, intact or damaged, that holds nothing else."""
    if not (path / MANIFEST).is_file() or FORMAT.encode() not in (path / MANIFEST).read_bytes():
        return False
    names = {entry.relative_to(path).as_posix() for entry in path.rglob("*")}
    names -= {MANIFEST, WEIGHTS, VOCABULARIES, IDS, PROGRAMS}
    return all(is_extra(name) or re.fullmatch(r"(items|tables)-\d{5,}-of-\d{5,}\.safetensors", name) for name in names)


def _check_about(file: Path, manifest: Mapping[str, Any], about: About) -> None:
    if type(about.num_items) is not int or not 1 <= about.num_items <= MAX_ITEMS:
        _broken(file, f"num_items is {brief(about.num_items)}, not a number from 1 to {MAX_ITEMS}")
    for name in ("exclude_history", "item_cache"):
        if type(value := getattr(about, name)) is not bool:
            _broken(file, f"{name} is {brief(value)}, not true or false")
    if not isinstance(about.precision, str) or about.precision not in STORED:
        _broken(file, f"precision is {brief(about.precision)}, not {' or '.join(STORED)}")
    if manifest["signature"] != signature(about.model, about.schema):
        _broken(file, "its signature is not that of its model and schema")


def _check_files(file: Path, files: Any, about: About) -> dict[str, dict[str, Any]]:
    """The tensors of all files, as in the manifest: those that follow from the model and the number of items."""
    if not isinstance(files, dict):
        _broken(file, "files is not a mapping")
    extras = {name: entry for name, entry in files.items() if is_extra(name)}
    for name, entry in extras.items():
        _check_keys(file, entry, ("bytes", "sha256", *(["cpu"] if _is_compiled(name) else [])), f"files.{name}.")
        _check_digest(file, entry, f"files.{name}.")
        cpu = entry.get("cpu", ["any"])
        if not isinstance(cpu, list) or not cpu or not all(isinstance(of, str) for of in cpu):
            _broken(file, f"files.{name}.cpu is not a list of names")
    files = {name: entry for name, entry in files.items() if name not in extras}
    shards, tables = _numbered(items_file, files), _numbered(tables_file, files)
    _check_keys(file, files, (WEIGHTS, VOCABULARIES, IDS, *tables, *shards), "files.")
    for name in files:
        _check_keys(file, files[name], ("bytes", "sha256", "tensors"), f"files.{name}.")
        _check_tensors(file, files[name], f"files.{name}.")
    tensors = {name: entry["tensors"] for name, entry in files.items()}
    try:
        rows = [tensors[name][_table(about)]["shape"][0] for name in shards]
        expected = {name: _items(tensors[name], about) for name in shards}
        expected |= {
            WEIGHTS: _float32(weight_shapes(about.model, about.schema)),
            IDS: _ids(tensors[IDS], about.num_items),
            VOCABULARIES: _vocabularies(tensors[VOCABULARIES], about.schema),
        }
        expected |= {name: _tables(tensors[name], about) for name in tables}
        table_rows = _row_counts([tensors[name] for name in tables])
    except (LookupError, ValueError, RuntimeError) as error:
        _broken(file, f"the tensors of its files are not those of its model ({first_line(error)})")
    if sum(rows) != about.num_items:
        _broken(file, f"its files have {sum(rows)} items, and num_items is {about.num_items}")
    for name in files:
        if tensors[name] != expected[name]:
            wrong = next(of for of in tensors[name] | expected[name] if tensors[name].get(of) != expected[name].get(of))
            said = f"{wrong:.80} is {brief(tensors[name].get(wrong))}, of its model {expected[name].get(wrong)}"
            _broken(file, f"its tensors of {name} are not those of its model (files.{name}.tensors.{said})")
    for name, (count, _) in row_shapes(about.model, about.schema).items():
        if table_rows[name] != count:
            _broken(file, f"its files have {table_rows[name]} rows of table {name}, and its model has {count}")
    return tensors


def _check_tensors(file: Path, entry: Mapping[str, Any], prefix: str) -> None:
    _check_digest(file, entry, prefix)
    if not isinstance(entry["tensors"], dict):
        _broken(file, f"{prefix}tensors is not a mapping")
    for name, of in entry["tensors"].items():
        within = f"{prefix}tensors.{name:.80}."
        _check_keys(file, of, ("dtype", "shape"), within)
        if not isinstance(of["dtype"], str):
            _broken(file, f"{within}dtype is {brief(of['dtype'])}, not a text")
        if not isinstance(of["shape"], list) or not all(map(_is_size, of["shape"])):
            _broken(file, f"{within}shape is {brief(of['shape'])}, not a list of sizes")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_digest(file: Path, entry: Mapping[str, Any], prefix: str) -> None:
    if not _is_size(entry["bytes"]):
        _broken(file, f"{prefix}bytes is {brief(entry['bytes'])}, not a number of bytes")
    if not isinstance(entry["sha256"], str):
        _broken(file, f"{prefix}sha256 is {brief(entry['sha256'])}, not a text")


def _numbered(name: Callable[[int, int], str], names: Collection[str]) -> list[str]:
    """The names of the files of a kind, in order: as many as there are names with the same beginning."""
    kind = name(0, 0).partition("-")[0]
    count = sum(of.startswith(f"{kind}-") for of in names)
    return [name(number, count) for number in range(count)]


def _float32(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    return {name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}


def _table(about: About) -> str:
    return TABLE if about.item_cache else OWN_ROW


def _items(found: Mapping[str, Any], about: About) -> dict[str, Any]:
    """The tensors of a shard, with as many items and ids in bags as found."""
    R = found[_table(about)]["shape"][0]
    types = item_types(about.model, about.schema, R, about.precision, about.item_cache)
    expected = {name: {"dtype": _DTYPES[dtype], "shape": shape} for name, (dtype, shape) in types.items()}
    if about.item_cache:
        return expected
    expected |= _float32({OWN_ROW: [R, about.schema.dims(about.model.dim)[ITEM]]})
    for feature in about.schema.of("item"):
        name, dtype = f"{feature.name}.values", _DTYPES[stored_type(feature, about.schema)]
        form = feature.form
        count = found[name]["shape"][0] if form.bag else R
        expected[name] = {"dtype": dtype, "shape": [count, feature.width] if form.wide else [count]}
        if form.bag:
            expected[f"{feature.name}.offsets"] = {"dtype": "I64", "shape": [R + 1]}
        expected |= _float32({f"{feature.name}.{beside}": [count] for beside in form.parallel})
    return expected


def _ids(found: Mapping[str, Any], X: int) -> dict[str, Any]:
    """The tensors of the ids file, with the data as long as found."""
    expected = _texts_of(found, "raw_ids", X) | _order_of("raw_ids", X)
    return expected | (_texts_of(found, "titles", X) if "titles.data" in found else {})


def _vocabularies(found: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """The tensors of the vocabularies' file, with the data as long as found."""
    expected: dict[str, Any] = {}
    for table in schema.tables:
        if table.name != ITEM:
            expected |= _texts_of(found, table.name, table.rows) | _order_of(table.name, table.rows)
    return expected


def _tables(found: Mapping[str, Any], about: About) -> dict[str, Any]:
    """The tensors of a file of tables: pieces with as many rows as found."""
    shapes = row_shapes(about.model, about.schema)
    return _float32({name: [found[name]["shape"][0], W] for name, (_, W) in shapes.items() if name in found})


def _row_counts(files: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Rows of each table's pieces, all together."""
    counts: Counter[str] = Counter()
    for found in files:
        counts.update({name: piece["shape"][0] for name, piece in found.items()})
    return counts


def _texts_of(found: Mapping[str, Any], name: str, count: int) -> dict[str, Any]:
    return {
        f"{name}.bounds": {"dtype": "I64", "shape": [count + 1]},
        f"{name}.data": {"dtype": "U8", "shape": [int(found[f"{name}.data"]["shape"][0])]},
    }


def _order_of(name: str, count: int) -> dict[str, Any]:
    return {f"{name}.order": {"dtype": "I64", "shape": [count]}}


def _check_file(file: Path, entry: Mapping[str, Any], content: bool = True) -> None:
    if not file.exists():
        _broken(file, "it is missing")
    if kind := other_kind(file):
        _broken(file, f"it is a {kind}, not a file")
    size = file.stat().st_size
    if size != entry["bytes"]:
        _broken(file, f"it is damaged ({size} bytes, {entry['bytes']} in the manifest)")
    if content and file_digest(file) != entry["sha256"]:
        _broken(file, "it is damaged (its sha256 is not the manifest's)")


def _read_tensors(file: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory."""
    try:
        require_tensors(file)
    except ValueError as error:
        raise ValueError(f"{error}; {_advice(file.parent)} --overwrite") from None
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
            if {name: {"dtype": t.get_dtype(), "shape": t.get_shape()} for name, t in found.items()} != expected:
                _broken(file, "its tensors are not those of the manifest")
            return {name: tensors.get_tensor(name) for name in found}
    except SafetensorError as error:
        _broken(file, f"it is not a safetensors file ({error})")


def _pieces(files: Sequence[Mapping[str, Tensor]]) -> dict[str, Pieces]:
    """The tables that have pieces in the files, in order."""
    names = {name: None for of_file in files for name in of_file}
    return {name: Pieces([of_file[name] for of_file in files if name in of_file]) for name in names}


def _texts(file: Path, tensors: Mapping[str, Tensor], name: str) -> Texts:
    texts = Texts(tensors[f"{name}.data"], tensors[f"{name}.bounds"], tensors.get(f"{name}.order"))
    if problem := texts.problem():
        _broken(file, f"its {name}.{problem}")
    return texts


def _parse(cls: type[T], tree: Any, file: Path, prefix: str) -> T:
    """A missing field takes its default, so a field that a newer logitmix adds must default to the earlier behavior."""
    if not isinstance(tree, dict):
        _broken(file, f"{prefix.rstrip('.')} is not a mapping")
    try:
        return from_mapping(cls, tree, str(file), prefix)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; {_advice(file.parent)}") from None


def _check_keys(file: Path, tree: Any, keys: tuple[str, ...], prefix: str) -> None:
    if not isinstance(tree, dict):
        _broken(file, f"{prefix.rstrip('.') or 'its content'} is not a mapping")
    for key in keys:
        if key not in tree:
            _broken(file, f"it has no field {prefix}{key}")
    for key in tree:
        if key not in keys:
            _broken(file, f"it has a field {prefix}{key:.80} that this logitmix does not know")


def _read_json(file: Path) -> Any:
    try:
        return from_json(file.read_bytes().decode())
    except ValueError as error:
        _broken(file, f"it is damaged ({error})")


def _broken(file: Path, problem: str) -> NoReturn:
    raise ValueError(f"{file}: {problem}; {_advice(file.parent)} --overwrite")


def _advice(path: Path) -> str:
    return f"make it with: logitmix export RUN --out {path}"
