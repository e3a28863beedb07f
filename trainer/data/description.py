"""dataset.json: read, compared with the files beside it, and named in errors with the command that makes it again."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from logitmix.common.checked import Checked, check_file, entry_of, require_entry
from logitmix.common.files import other_kind, parse_json
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
    for parquet in sorted(path.rglob("*.parquet")):
        # A pipe would be waited for.
        with reading(path, name_of(path, parquet)):
            if kind := other_kind(parquet):
                broken(path, f"{name_of(path, parquet)} is a {kind}, not a file")
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
    objects = {name: part.get(name) or {} for name in ("repeated_targets", "times", "source", "filters")}
    for name, entry in objects.items():
        if not isinstance(entry, dict):
            yield f"dataset.json: {name} is {brief(entry)}; it must be an object"
            objects[name] = {}
    shares, times = objects["repeated_targets"], objects["times"]
    digests, shown = objects["source"].get("sha256", {}), objects["filters"].get("shown", [])
    wrong = {
        "repeated_targets": (shares, any(type(share) not in (int, float) for share in shares.values())),
        "times.unit": (times.get("unit"), times.get("unit") not in (None, *UNITS)),
        **{f"times.{edge}": (times.get(edge), type(times.get(edge, 0)) is not int) for edge in ("first", "last")},
        "source.sha256": (
            digests,
            not isinstance(digests, dict) or any(type(of) is not str for of in digests.values()),
        ),
        "filters.shown": (shown, not isinstance(shown, list)),
    }
    for name, (value, is_wrong) in wrong.items():
        if is_wrong:
            yield f"dataset.json: {name} is {brief(value)}, which is not as docs/dataset.md says"


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
        super().__init__(f"{path}: {problem}; make it again with: {_command(path)} --overwrite")
        self.problem = problem
        """What is wrong alone."""


def broken(path: Path, problem: str) -> NoReturn:
    raise BrokenDataset(path, problem) from None


def _command(path: Path) -> str:
    """The command that makes a dataset here, as far as its name tells."""
    return f"logitmix prepare {path.name if _NAME.fullmatch(path.name) else 'NAME'} --out {path}"
