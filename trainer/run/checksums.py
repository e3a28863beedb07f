"""The digests of a run's files: written with each file, and compared when it is read."""

import hashlib
from pathlib import Path
from typing import Any

from logitmix.common.checked import Checked, entry_of_bytes, fields_of, require_entry, require_fields
from logitmix.common.files import naming, require_file, sync, write_whole

DIGESTS = "digests.json"
FORMAT = Checked("digests of a logitmix run's files", 1)
CHECKSUMMED = ("code.json", "config.toml", "dataset.json", "results.json", "test_ranks.json", "test_users.json")
"""Files that have a digest from when they are written."""
ROWS = "metrics.jsonl"


def write_checksummed(path: Path, text: str) -> None:
    """Writes a file of a run whole, and its digest. If the job is killed in between, the file has none."""
    _record(path, None)
    write_whole(path, text)
    _record(path, text.encode())


def sync_rows(run: Path) -> None:
    """Waits until the rows of metrics so far are on disk, and the name of their file."""
    path = run / ROWS
    if path.exists():
        with naming(path):
            sync(path)
            sync(run)


def checksum_rows(run: Path) -> None:
    """Notes the digest of the rows of metrics so far, once they are on disk: a power loss would otherwise leave a
    digest of more rows than there are."""
    path = run / ROWS
    if path.exists():
        sync_rows(run)
        _record(path, path.read_bytes())


def _record(path: Path, content: bytes | None) -> None:
    """Notes the digest of a file, or that it has none while it is written."""
    run, file = path.parent, path.parent / DIGESTS
    # Where somebody has removed it, what is there goes unchecked.
    before = digests_of(run) if file.is_file() else {name: None for name in CHECKSUMMED if (run / name).exists()}
    found = before | {path.name: None if content is None else entry_of_bytes(content)}
    if found != before or not file.is_file():
        write_whole(file, FORMAT.text({"files": found}))


def digests_of(run: Path) -> dict[str, Any]:
    """The entries of files by name, null for one that was being written. ValueError if the file is damaged, of another
    kind, or of another directory: then it lacks a file that is here."""
    file = run / DIGESTS
    if not file.is_file():
        return {}
    try:
        found = fields_of(FORMAT.read(file))
        require_fields(found, ("files",), str(file))
        files: dict[str, Any] = found["files"]
        require_fields(files, [name for name in (*CHECKSUMMED, ROWS) if name in files], f"{file}: files")
        for name, entry in files.items():
            if entry is not None:
                require_entry(entry, f"{file}: files.{name}")
        if missing := [name for name in CHECKSUMMED if name not in files and (run / name).exists()]:
            raise ValueError(f"{file} has no digest of {missing[0]}: it is of another run")
    except ValueError as error:
        raise ValueError(f"{error}; {_UNCHECKED.format(file)}") from None
    return files


_UNCHECKED = "restore it, or remove {} to go on without checking the run's files"


def read_checksummed(path: Path) -> bytes:
    """The content of a file of a run; ValueError if it is not what was written, except what was appended to rows."""
    entry = digests_of(path.parent).get(path.name)
    while True:
        content = b""
        if entry is None or path.exists():
            require_file(path)
            content = path.read_bytes()
        if entry is None:
            return content
        whole = content[: entry["bytes"]] if path.suffix == ".jsonl" else content
        if hashlib.sha256(whole).hexdigest() == entry["sha256"]:
            return content
        # A job that trains the run may have replaced the file in between: then its digest has gone or changed.
        before, entry = entry, digests_of(path.parent).get(path.name)
        if entry == before:
            problem = f"is damaged (its SHA-256 is not that in {DIGESTS})" if path.exists() else "is missing"
            raise ValueError(f"{path} {problem}; {_UNCHECKED.format(path.parent / DIGESTS)}")


def read_text(path: Path) -> str:
    try:
        return read_checksummed(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged ({error})") from None
