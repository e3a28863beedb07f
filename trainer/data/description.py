"""dataset.json: read, compared with the files beside it, and named in errors with the command that makes it again."""

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from logitmix.common.checked import Checked, check_file, entry_of, require_entry
from logitmix.common.files import from_json, other_kind, parse_json
from logitmix.common.mappings import first_line, from_mapping
from logitmix.common.plugins import require_plugins
from logitmix.modules.schema import ITEM, Schema
from logitmix.trainer.data.arrays import FOLDER
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.registry import source_of

FORMAT = Checked("logitmix dataset", 3)
APPENDED, PROJECTIONS, WAITING = "appended", "projections", "waiting.parquet"
ENTRIES = frozenset(
    [
        "dataset.json",
        "items.parquet",
        "sequences",
        "vocabularies",
        PROJECTIONS,
        "rejects.tsv",
        WAITING,
        APPENDED,
        FOLDER,
    ]
)
DIGESTS = ("kind", "files", "sha256")
"""The entries of dataset.json that other writers may leave out."""


def is_dataset(path: Path) -> bool:
    """Whether a directory may be replaced: it has a dataset.json and nothing that the format does not know."""
    # What another process is writing there has a hidden name beside that of the arrays.
    entries = {entry.name for entry in path.iterdir() if not entry.name.startswith(f".{FOLDER}.")}
    return (path / "dataset.json").is_file() and entries <= ENTRIES


def name_of(path: Path, file: Path) -> str:
    """The name of a file of the dataset at `path`, as dataset.json has it."""
    return file.relative_to(path).as_posix()


def entries_of(path: Path, files: Iterable[Path]) -> dict[str, Any]:
    """What dataset.json has of files of the dataset at `path`, by their names."""
    return {name_of(path, file): entry_of(file) for file in files if file.is_file()}


def read_description(path: Path, sequences: bool = True) -> dict[str, Any]:
    """The content of dataset.json, once all files have been compared with its digests, if it has any; of those with
    actions sizes alone without `sequences`. ValueError as `load_dataset` raises it."""
    file = path / "dataset.json"
    # A run has a copy of its dataset's.
    if (path / "config.toml").is_file():
        raise ValueError(f"{path}: this is a run; give the dataset that it was trained on")
    if not file.is_file():
        raise ValueError(f"no dataset at {path}; make it with: {_command(path)}")
    _require_files(path)
    content = file.read_bytes()
    try:
        description = parse_json(content, "dataset.json")
    except ValueError as error:
        broken(path, str(error))
    if isinstance(description, dict) and description.keys() & DIGESTS:
        _check_digests(path, content, sequences)
    version = description.get("format_version") if isinstance(description, dict) else None
    if version != FORMAT.version:
        broken(path, f"it is of format version {version}, and this logitmix reads {FORMAT.version}")
    for key, kind in (("name", str), ("users", int), ("items", int), ("actions", int)):
        if type(description.get(key)) is not kind or (kind is int and not 0 <= description[key] < 2**48):
            broken(path, f"dataset.json has no {key} that is {'text' if kind is str else 'a count'}")
    return description


def _require_files(path: Path) -> None:
    """ValueError for what has the name of a Parquet file and is none: a pipe would be waited for."""
    for file in sorted(path.rglob("*.parquet")):
        with reading(path, name_of(path, file)):
            kind = other_kind(file)
        if kind:
            broken(path, f"{name_of(path, file)} is a {kind}, not a file")


def _check_digests(path: Path, content: bytes, sequences: bool) -> None:
    """ValueError for the first file that differs from the digests of dataset.json, which itself comes first."""
    try:
        files = FORMAT.parse(content, "dataset.json").get("files")
        if not isinstance(files, dict):
            raise ValueError("dataset.json has no list of files")
        for name, entry in files.items():
            require_entry(entry, f"dataset.json: files.{name:.80}")
            try:
                of_actions = fnmatch(name, "sequences/*") or fnmatch(name, f"{APPENDED}/*/sequences.parquet")
                check_file(path / name, entry, "dataset.json", name, content=sequences or not of_actions)
            except OSError as error:
                raise ValueError(f"{name} cannot be read ({first_line(error)})") from None
        for file in sorted(path.rglob("*.parquet")):
            if (name := name_of(path, file)) not in files:
                raise ValueError(f"{name} is not in the list of files in dataset.json")
    except ValueError as error:
        broken(path, str(error))


def require_plugins_of(path: Path, description: Mapping[str, Any]) -> None:
    """ValueError that names a plugin that kinds of the dataset's features come from, if this process lacks it."""
    needed = description.get("plugins", {})
    if not isinstance(needed, dict) or not all(isinstance(version, str) for version in needed.values()):
        broken(path, "dataset.json: plugins are not versions by name")
    require_plugins(needed, str(path))


def schema_of(description: Mapping[str, Any], num_items: int) -> Schema:
    if not isinstance(description.get("schema"), Mapping):
        raise ValueError("no schema")
    schema = from_mapping(Schema, description["schema"], "schema")
    if schema.table(ITEM).rows != num_items + 1:
        raise ValueError(f"table {ITEM} has {schema.table(ITEM).rows} rows, not one more than the {num_items} items")
    return dataclasses.replace(schema, users=description["users"])


@contextmanager
def reading(path: Path, file: str) -> Iterator[None]:
    """Adds the names of the dataset and the file to errors."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        broken(path, f"{file} cannot be read ({first_line(error)})")
    except (ValueError, MemoryError) as error:
        broken(path, f"{file}: {error}")


def broken(path: Path, problem: str) -> NoReturn:
    again = f"{_command(path)} --overwrite{_and_append(path)}"
    raise ValueError(f"{path}: {problem}; make it again with: {again}") from None


def _and_append(path: Path) -> str:
    """What was appended to a dataset, as far as its dataset.json tells."""
    try:
        parts = from_json((path / "dataset.json").read_text(encoding="utf-8"))[APPENDED]
        names = [str(part["source"]["name"]) for part in parts]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f", then with --append, in this order: {', '.join(names[:3])}{more}"


def _command(path: Path) -> str:
    """The command that makes a dataset here: the same one, as far as the files tell."""
    try:
        before = from_json((path / "dataset.json").read_text(encoding="utf-8"))
        name, source, filters = before["name"], before["source"], before["filters"]
        words = [name if source_of(name) else "NAME"]
        if source:
            # Where prepare puts a download, if it is there.
            nearby = path.parent / source["name"]
            words += ["--source", str(nearby if nearby.exists() else source["name"])]
        usual = {entry.name: entry.default for entry in dataclasses.fields(PrepareOptions)}
        for several in ("where", "shown"):
            words += [f"--{several} {shlex.quote(condition)}" for condition in filters.pop(several, [])]
        filters.pop("removed", None)
        given = {f"--{key.replace('_', '-')}": value for key, value in filters.items() if usual.get(key) != value}
        words += [flag if value is True else f"{flag} {value}" for flag, value in given.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        words = [path.name if source_of(path.name) else "NAME"]
    return f"logitmix prepare {' '.join(words)} --out {path}"
