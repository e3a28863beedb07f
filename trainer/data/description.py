"""dataset.json: read, compared with the files beside it, and named in errors with the command that makes it again."""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from logitmix.common.checked import Checked, check_file, entry_of, require_entry
from logitmix.common.files import from_json, other_kind, parse_json
from logitmix.common.mappings import brief, first_line, from_mapping
from logitmix.common.plugins import require_plugins
from logitmix.modules.schema import ITEM, Schema
from logitmix.trainer.data.arrays import FOLDER

FORMAT = Checked("logitmix dataset", 3)
APPENDED, PROJECTIONS, WAITING = "appended", "projections", "waiting.parquet"
ENTRIES = {"dataset.json", "items.parquet", "sequences", "vocabularies", "rejects.tsv", FOLDER}
ENTRIES |= {PROJECTIONS, WAITING, APPENDED}
LATEST = 2**62
"""Times are below it, and above its negative: their differences fit into 64 bits."""
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Ticks a second."""
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
FILTERS = {"keep_duplicates": False, "min_item_actions": 0, "min_user_actions": 5}
"""What `filters` of dataset.json has without options of `prepare`."""
_NAME = re.compile("demo|demo-[a-z-]+|ml-[a-z0-9]+|amazon-[a-z0-9-]+|sequences|table")
"""Sources of `prepare`, but those of plugins."""
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
    """Returns the content of dataset.json, after comparing all files with its digests, if it has any.

    Args:
        path: The dataset directory.
        sequences: If False, only the sizes of files with actions are compared.

    Raises:
        ValueError: As `load_dataset` raises it.
    """
    content, description = parsed_description(path)
    for problem in problems_of_description(path, content, description, sequences):
        broken(path, problem)
    return description


def parsed_description(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Returns the bytes of dataset.json and what they say, of which nothing is checked.

    Raises:
        ValueError: If there is no dataset.json, if it is not a JSON object, if the directory is a run, or if something
            else than a file has the name of a Parquet file.
    """
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
        if not isinstance(description, dict):
            raise ValueError(f"dataset.json is {brief(description)}, not a JSON object")
    except ValueError as error:
        broken(path, str(error))
    return content, description


def problems_of_description(
    path: Path, content: bytes, description: Mapping[str, Any], sequences: bool = True
) -> Iterator[str]:
    """Yields what is wrong with a parsed dataset.json, and which files differ from its digests; `sequences` is as for
    `read_description`."""
    if description.keys() & DIGESTS:
        yield from _problems_of_files(path, content, sequences)
    if (version := description.get("format_version")) != FORMAT.version:
        yield f"it is of format version {brief(version)}, and this logitmix reads {FORMAT.version}"
        return
    for key, kind in (("name", str), ("users", int), ("items", int), ("actions", int)):
        if type(description.get(key)) is not kind or (kind is int and not 0 <= description[key] < 2**48):
            yield f"dataset.json has no {key} that is {'text' if kind is str else 'a count'}"
    appended = description.get(APPENDED) or []
    if not isinstance(appended, list) or not all(isinstance(part, dict) for part in appended):
        yield f"dataset.json: {APPENDED} is {brief(appended)}; it must be a list of objects"
        appended = []
    for part in (description, *appended):
        yield from _problems_of_optional_entries(part)


def _problems_of_optional_entries(part: Mapping[str, Any]) -> Iterator[str]:
    """Yields which of the optional entries that are read later, of the dataset or of what was appended, are not as
    documented. An entry that is null counts as left out."""
    names = ("repeated_targets", "times", "source", "filters")
    objects = {name: part[name] for name in names if part.get(name) is not None}
    for name, entry in objects.items():
        if not isinstance(entry, dict):
            yield f"dataset.json: {name} is {brief(entry)}; it must be an object"
            objects[name] = {}
    shares = objects.get("repeated_targets", {})
    if not all(type(share) in (int, float) for share in shares.values()):
        yield f"dataset.json: repeated_targets is {brief(shares)}; it must have a number for each part"
    times = objects.get("times", {})
    if times.get("unit") not in (None, *UNITS):
        yield f"dataset.json: times.unit is {brief(times['unit'])}; it must be null or one of {', '.join(UNITS)}"
    for edge in ("first", "last"):
        if type(times.get(edge, 0)) is not int:
            yield f"dataset.json: times.{edge} is {brief(times[edge])}; it must be a whole number"
    digests = objects.get("source", {}).get("sha256", {})
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        yield f"dataset.json: source.sha256 is {brief(digests)}; it must have a text for each file"
    if not isinstance(shown := objects.get("filters", {}).get("shown", []), list):
        yield f"dataset.json: filters.shown is {brief(shown)}; it must be a list"


def _require_files(path: Path) -> None:
    """ValueError for what has the name of a Parquet file and is none: a pipe would be waited for."""
    for file in sorted(path.rglob("*.parquet")):
        with reading(path, name_of(path, file)):
            kind = other_kind(file)
        if kind:
            broken(path, f"{name_of(path, file)} is a {kind}, not a file")


def _problems_of_files(path: Path, content: bytes, sequences: bool) -> Iterator[str]:
    """Yields which files differ from the digests of dataset.json, which itself comes first."""
    try:
        files = FORMAT.parse(content, "dataset.json").get("files")
        if not isinstance(files, dict):
            raise ValueError("dataset.json has no list of files")
    except ValueError as error:
        yield str(error)
        return
    for name, entry in files.items():
        try:
            require_entry(entry, f"dataset.json: files.{name:.80}")
            of_actions = fnmatch(name, "sequences/*") or fnmatch(name, f"{APPENDED}/*/sequences.parquet")
            check_file(path / name, entry, "dataset.json", name, content=sequences or not of_actions)
        except OSError as error:
            yield f"{name} cannot be read ({first_line(error)})"
        except ValueError as error:
            yield str(error)
    for file in sorted(path.rglob("*.parquet")):
        if (name := name_of(path, file)) not in files:
            yield f"{name} is not in the list of files in dataset.json"


def require_plugins_of(path: Path, description: Mapping[str, Any]) -> None:
    """ValueError that names a plugin that kinds of the dataset's features come from, if this process lacks it."""
    needed = description.get("plugins") or {}
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
    except BrokenDataset:
        raise
    except FileNotFoundError:
        broken(path, f"{file} is missing")
    except (pa.ArrowException, OSError) as error:
        broken(path, f"{file} cannot be read ({first_line(error)})")
    except (ValueError, MemoryError) as error:
        broken(path, f"{file}: {error}")


class BrokenDataset(ValueError):
    """Says what is wrong with a dataset directory, and the command that makes it again."""

    def __init__(self, path: Path, problem: str) -> None:
        again = f"{_command(path)} --overwrite{_and_append(path)}"
        super().__init__(f"{path}: {problem}; make it again with: {again}")
        self.problem = problem
        """What is wrong alone."""


def broken(path: Path, problem: str) -> NoReturn:
    raise BrokenDataset(path, problem) from None


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
        words = [name if _NAME.fullmatch(name) else "NAME"]
        if source:
            # Where prepare puts a download, if it is there.
            nearby = path.parent / source["name"]
            words += ["--source", str(nearby if nearby.exists() else source["name"])]
        for several in ("where", "shown"):
            words += [f"--{several} {shlex.quote(condition)}" for condition in filters.pop(several, [])]
        filters.pop("removed", None)
        given = {f"--{key.replace('_', '-')}": value for key, value in filters.items() if FILTERS.get(key) != value}
        words += [flag if value is True else f"{flag} {value}" for flag, value in given.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        words = [path.name if _NAME.fullmatch(path.name) else "NAME"]
    return f"logitmix prepare {' '.join(words)} --out {path}"
