"""The reader of a serving directory; format.py describes it, and checks.py says what does not fit."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from logitmix.common.checked import check_file, fields_of, require_fields
from logitmix.common.files import file_stamp, require_tensors
from logitmix.common.mappings import brief
from logitmix.common.messages import prefixed
from logitmix.common.plugins import require_plugins
from logitmix.modules.schema import ITEM
from logitmix.serving.columns import read_columns
from logitmix.serving.directory.checks import FIELDS, about_of, data_files, require_model_tensors
from logitmix.serving.directory.format import (
    COLUMNS,
    DTYPES,
    FORMAT,
    IDS,
    MANIFEST,
    PROJECTIONS,
    VOCABULARIES,
    WEIGHTS,
    Contents,
    Entries,
    described,
    is_extra,
    items_file,
    numbered,
    tables_file,
)
from logitmix.serving.group import part_of
from logitmix.serving.items import ItemInputs
from logitmix.serving.mapped import MappedFiles
from logitmix.serving.model import CORPUS_SCALE
from logitmix.serving.stored_table import StoredTable
from logitmix.serving.texts import Texts


def read(path: Path, part: int = 0, parts: int = 1) -> Contents:
    """Reads and checks a serving directory, whose tensors are mapped from its files. Of several processes that share
    the items, each checks the digests of the files of its part, and of all that have no items. If another export takes
    its place meanwhile, that one is read.

    Raises ValueError that names the path and what to do, if there is no serving directory, if it has another format
    version, or if a file is missing, damaged, or does not fit the manifest.
    """
    while True:
        before = stamp(path)
        try:
            manifest = read_manifest(path)
            require_plugins(manifest.get("plugins", {}), str(path))
            with _advising(path):
                contents = _read(path, manifest, part, parts)
        except (ValueError, OSError):
            if stamp(path) == before:
                raise
        else:
            # Otherwise some files may have been opened in the other directory.
            if stamp(path) == before:
                return contents


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs between the exports that are at this path one after the other; None if there is none."""
    return file_stamp(path / MANIFEST)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a serving directory, its digest checked; the files are not read."""
    with _advising(path):
        return _manifest(path)


def read_ids(path: Path) -> tuple[Texts, int]:
    """The raw ids of a serving directory's items, those of removed ones behind the others, of which so many are; no
    other file is read."""
    with _advising(path):
        manifest = _manifest(path)
        about = about_of(path / MANIFEST, manifest)
        check_file(path / IDS, manifest["files"][IDS], MANIFEST)
        ids = _texts(path / IDS, _read_tensors(path / IDS, manifest["files"][IDS]["tensors"]), "raw_ids")
    return ids, about.num_items


def checked_extra(path: Path, name: str) -> Path:
    """The file of an extra that a serving directory has. ValueError if it is not there or not that of the manifest."""
    files = read_manifest(path)["files"]
    if name not in files or not is_extra(name):
        there = ", ".join(filter(is_extra, files)) or "none"
        raise ValueError(f"{path} has no {name}; extras that are there: {there}")
    with _advising(path):
        check_file(path / name, files[name], MANIFEST)
    return path / name


def read_tables(path: Path, entries: Entries) -> dict[str, StoredTable]:
    """Tables from files that were all just written: mapped, and not checked."""
    return _tables([_read_tensors(path / name, entries[name]["tensors"]) for name in numbered(tables_file, entries)])


@contextmanager
def _advising(path: Path) -> Iterator[None]:
    """A ValueError within also says what to do."""
    try:
        yield
    except ValueError as error:
        replacing = " --overwrite" if (path / MANIFEST).is_file() else ""
        raise ValueError(f"{error}; make it with: logitmix export RUN --out {path}{replacing}") from None


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"no serving directory at {path} (it has no {MANIFEST})")
    manifest = FORMAT.read(file)
    require_fields(fields_of(manifest), (*FIELDS, *({"filterable", "plugins"} & manifest.keys())), str(file))
    plugins = manifest.get("plugins", {})
    if not isinstance(plugins, dict) or not all(isinstance(version_of, str) for version_of in plugins.values()):
        raise ValueError(f"{file}: plugins is {brief(plugins)}, not versions by name")
    return manifest


def _read(path: Path, manifest: Mapping[str, Any], part: int, parts: int) -> Contents:
    file, entries = path / MANIFEST, manifest["files"]
    about = about_of(file, manifest)
    data = data_files(file, entries, about)
    of_items = numbered(items_file, data)
    ranked = of_items[: len(of_items) - bool(about.removed)]
    own = {ranked[number] for number in part_of(range(len(ranked)), part, parts)}
    for name in data:
        check_file(path / name, entries[name], MANIFEST, content=name in own or name not in ranked)
    files = MappedFiles(path / name for name in data)
    found = {name: _read_tensors(path / name, entries[name]["tensors"]) for name in data}
    require_model_tensors(file, {name: described(tensors) for name, tensors in found.items()}, about)
    ids, vocabularies = found.pop(IDS), found.pop(VOCABULARIES)
    names = [table.name for table in about.schema.tables if table.name != ITEM]
    shards = {name: found[name] for name in of_items}
    if len({float(shard[CORPUS_SCALE]) for shard in shards.values() if CORPUS_SCALE in shard}) > 1:
        raise ValueError(f"{file}: its files have several {CORPUS_SCALE}")
    for name, shard in shards.items() if about.holds_inputs else ():
        if name in own and (problem := ItemInputs.of_tensors(shard, about.schema).problem(about.schema)):
            raise ValueError(f"{path / name}: its {problem}")
    with prefixed(f"{path / COLUMNS}: its "):
        columns = read_columns(about.filterable, found.get(COLUMNS, {}))
    return Contents(
        about=about,
        weights=found[WEIGHTS],
        tables=_tables([found[name] for name in numbered(tables_file, found)]),
        vocabularies={name: _texts(path / VOCABULARIES, vocabularies, name) for name in names},
        shards=list(shards.values()),
        raw_ids=_texts(path / IDS, ids, "raw_ids"),
        titles=_texts(path / IDS, ids, "titles") if "titles.data" in ids else None,
        columns=columns,
        projections=found.get(PROJECTIONS, {}),
        digest=manifest["sha256"],
        files=files,
    )


def _read_tensors(file: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory."""
    require_tensors(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
            found = {name: {"dtype": of.get_dtype(), "shape": of.get_shape()} for name, of in slices.items()}
            if found != expected or not {of["dtype"] for of in found.values()} <= {*DTYPES.values()}:
                raise ValueError(f"{file}: its tensors are not those of the manifest")
            return {name: tensors.get_tensor(name) for name in found}
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file ({error})") from None


def _tables(files: Sequence[Mapping[str, Tensor]]) -> dict[str, StoredTable]:
    """The tables that have rows in the files, in order."""
    names = {name: None for of_file in files for name in of_file}
    return {name: StoredTable([of_file[name] for of_file in files if name in of_file]) for name in names}


def _texts(file: Path, tensors: Mapping[str, Tensor], name: str) -> Texts:
    texts = Texts(tensors[f"{name}.data"], tensors[f"{name}.bounds"], tensors.get(f"{name}.order"))
    if problem := texts.problem():
        raise ValueError(f"{file}: its {name}.{problem}")
    return texts
