"""The reader of a serving directory; format.py describes it, and checks.py says what does not fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from logitmix.common.files import fits_digest, from_json, require_tensors
from logitmix.common.mappings import from_mapping
from logitmix.modules.config import ModelConfig
from logitmix.modules.schema import ITEM, Schema
from logitmix.serving.directory.checks import FIELDS, advice, broken, check_about, check_file, check_files, check_keys
from logitmix.serving.directory.format import (
    FORMAT,
    FORMAT_VERSION,
    IDS,
    MANIFEST,
    SOURCE,
    VOCABULARIES,
    WEIGHTS,
    About,
    Contents,
    Entries,
    Source,
    is_extra,
    items_file,
    numbered,
    tables_file,
)
from logitmix.serving.group import part_of
from logitmix.serving.items import ItemInputs
from logitmix.serving.mapped import MappedFiles
from logitmix.serving.model import CORPUS_SCALE
from logitmix.serving.pieces import Pieces
from logitmix.serving.texts import Texts

T = TypeVar("T")


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


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a serving directory, its digest checked; the files are not read."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"no serving directory at {path} (it has no {MANIFEST}); {advice(path)}")
    manifest = _read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        broken(file, f"it is not the manifest of a {FORMAT}")
    if manifest.get("format_version") != FORMAT_VERSION:
        broken(file, f"it has format version {manifest.get('format_version')}, this logitmix reads {FORMAT_VERSION}")
    check_keys(file, manifest, FIELDS, "")
    if not fits_digest(manifest):
        broken(file, "it is damaged (its sha256 differs)")
    return manifest


def checked_extra(path: Path, name: str) -> Path:
    """The file of an extra that a serving directory has. ValueError if it is not there or not that of the manifest."""
    files = read_manifest(path)["files"]
    if name not in files or not is_extra(name):
        there = ", ".join(filter(is_extra, files)) or "none"
        raise ValueError(f"{path} has no {name}; extras that are there: {there}")
    check_file(path / name, files[name])
    return path / name


def read_tables(path: Path, entries: Entries) -> dict[str, Pieces]:
    """Tables from files that were all just written: mapped, and not checked."""
    files = [_read_tensors(path / name, entries[name]["tensors"]) for name in numbered(tables_file, entries)]
    return _pieces(files)


def _read(path: Path, part: int, parts: int) -> Contents:
    manifest = read_manifest(path)
    about = About(
        model=_parse(ModelConfig, manifest["model"], path / MANIFEST, "model."),
        source=_parse(Source, {name: manifest[name] for name in SOURCE}, path / MANIFEST, ""),
        num_items=manifest["num_items"],
        exclude_history=manifest["exclude_history"],
        schema=_parse(Schema, manifest["schema"], path / MANIFEST, "schema."),
        item_cache=manifest["item_cache"],
        precision=manifest["precision"],
    )
    check_about(path / MANIFEST, manifest, about)
    tensors = check_files(path / MANIFEST, manifest["files"], about)
    of_items = numbered(items_file, tensors)
    own = {of_items[number] for number in part_of(range(len(of_items)), part, parts)}
    own.update([name for name in tensors if name not in of_items][part::parts])
    for name in tensors:
        check_file(path / name, manifest["files"][name], content=name in own)
    files = MappedFiles({path / name: manifest["files"][name]["sha256"] for name in tensors})
    found = {name: _read_tensors(path / name, of_file) for name, of_file in tensors.items()}
    ids, vocabularies = found.pop(IDS), found.pop(VOCABULARIES)
    names = [table.name for table in about.schema.tables if table.name != ITEM]
    shards = {name: found[name] for name in of_items}
    if len({float(shard[CORPUS_SCALE]) for shard in shards.values() if CORPUS_SCALE in shard}) > 1:
        broken(path / MANIFEST, f"its files have several {CORPUS_SCALE}")
    for name, shard in {} if about.item_cache else shards.items():
        if name in own and (problem := ItemInputs.of_tensors(shard, about.schema).problem(about.schema)):
            broken(path / name, f"its {problem}")
    return Contents(
        about=about,
        weights=found[WEIGHTS],
        tables=_pieces([found[name] for name in numbered(tables_file, found)]),
        vocabularies={name: _texts(path / VOCABULARIES, vocabularies, name) for name in names},
        shards=list(shards.values()),
        raw_ids=_texts(path / IDS, ids, "raw_ids"),
        titles=_texts(path / IDS, ids, "titles") if "titles.data" in ids else None,
        digest=manifest["sha256"],
        files=files,
    )


def _read_tensors(file: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory."""
    try:
        require_tensors(file)
    except ValueError as error:
        raise ValueError(f"{error}; {advice(file.parent)} --overwrite") from None
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
            if {name: {"dtype": t.get_dtype(), "shape": t.get_shape()} for name, t in found.items()} != expected:
                broken(file, "its tensors are not those of the manifest")
            return {name: tensors.get_tensor(name) for name in found}
    except SafetensorError as error:
        broken(file, f"it is not a safetensors file ({error})")


def _pieces(files: Sequence[Mapping[str, Tensor]]) -> dict[str, Pieces]:
    """The tables that have pieces in the files, in order."""
    names = {name: None for of_file in files for name in of_file}
    return {name: Pieces([of_file[name] for of_file in files if name in of_file]) for name in names}


def _texts(file: Path, tensors: Mapping[str, Tensor], name: str) -> Texts:
    texts = Texts(tensors[f"{name}.data"], tensors[f"{name}.bounds"], tensors.get(f"{name}.order"))
    if problem := texts.problem():
        broken(file, f"its {name}.{problem}")
    return texts


def _parse(cls: type[T], tree: Any, file: Path, prefix: str) -> T:
    """A missing field takes its default, so a field that a newer logitmix adds must default to the earlier behavior."""
    if not isinstance(tree, dict):
        broken(file, f"{prefix.rstrip('.')} is not a mapping")
    try:
        return from_mapping(cls, tree, str(file), prefix)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; {advice(file.parent)}") from None


def _read_json(file: Path) -> Any:
    try:
        return from_json(file.read_bytes().decode())
    except ValueError as error:
        broken(file, f"it is damaged ({error})")
