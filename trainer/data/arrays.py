"""The arrays of a large dataset in files that all processes of a host map: one copy in memory, however many ranks.

The first process that reads the dataset makes them, beside its Parquet files; the others wait:

    .arrays/arrays.json   of: SHA-256 of dataset.json; read: {file: [bytes, mtime_ns]} of the Parquet files as they were
                          read; arrays: {name: file}, and the digests of these (common/checked.py)
    .arrays/N.npy         an array in NumPy's format
    .arrays/items-…/      the same of what a run with fewer items sees (limited.py)

They are of no use elsewhere: a copy of the dataset may leave them out, and they may be removed.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from logitmix.common.checked import Checked, check_file, entry_of, require_entry
from logitmix.common.files import clean_up, file_digest, in_turn, whole_directory
from logitmix.common.mappings import first_line
from logitmix.common.messages import say

FOLDER = ".arrays"
LARGE = 2**26
"""Bytes from which on arrays are mapped: below, each process may hold them itself."""
FORMAT = Checked("logitmix arrays of a dataset", 1)

Arrays = dict[str, np.ndarray]


def stored(path: Path, part: str = "") -> Arrays | None:
    """The arrays that are kept of what the dataset at `path` is now, or of a part of it, by the sizes and times of its
    files; None if there are none. They are mapped copy-on-write, so that torch takes them as its own.

    One process of a host, torchrun's first, compares them with their digests: ValueError if one is damaged.
    """
    folder = path / FOLDER / part
    file = folder / "arrays.json"
    if not file.is_file() or not (path / "dataset.json").is_file():
        return None
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        found = FORMAT.read(file)
        if not found.items() >= _source(path).items():
            return None
        for name, entry in found["files"].items():
            require_entry(entry, f"arrays.json: files.{name:.80}")
            check_file(folder / name, entry, "arrays.json", content=first)
    except ValueError as error:
        raise ValueError(f"{error}; remove {folder}, which is made again from the dataset") from None
    return {name: np.asarray(np.load(folder / of, mmap_mode="c")) for name, of in found["arrays"].items()}


def kept(path: Path, size: int, read: Callable[[], Arrays], part: str = "") -> Arrays:
    """The arrays that `read` returns of the dataset at `path`, or of a part of it, of about `size` bytes in all; if
    they are large, from files that have their content, as `stored`."""
    if size < LARGE:
        return read()
    with in_turn(path):
        # Another process may have made them meanwhile.
        if (found := stored(path, part)) is not None:
            return found
        # Before it is read: what changes meanwhile makes them those of another dataset.
        source = _source(path)
        arrays = read()
        try:
            _write(path, path / FOLDER / part, arrays, source)
        except OSError as error:
            say(
                f"{path}: its arrays cannot be kept there ({first_line(error)}), so each process holds "
                f"{size / 2**30:.1f} GiB of its own"
            )
            return arrays
        return arrays if (found := stored(path, part)) is None else found


def _write(path: Path, folder: Path, arrays: Mapping[str, np.ndarray], source: Mapping[str, Any]) -> None:
    clean_up(folder)
    with whole_directory(folder) as staging:
        files = {name: f"{number}.npy" for number, name in enumerate(arrays)}
        for name, file in files.items():
            np.save(staging / file, arrays[name])
        entries = {file: entry_of(staging / file) for file in files.values()}
        FORMAT.write(staging / "arrays.json", {**source, "arrays": files, "files": entries})
    size = sum(entry["bytes"] for entry in entries.values())
    say(f"{path}: its arrays are in {folder} now ({size / 2**30:.1f} GiB), where all processes map them")


def _source(path: Path) -> dict[str, Any]:
    """What tells the dataset from what it may become."""
    files = {file.relative_to(path).as_posix(): file.stat() for file in sorted(path.rglob("*.parquet"))}
    return {
        "of": file_digest(path / "dataset.json"),
        "read": {name: [of.st_size, of.st_mtime_ns] for name, of in files.items()},
    }
