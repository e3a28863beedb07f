"""The digests of a run's files: written with each file, and compared when it is read."""

import hashlib
import json
from pathlib import Path
from typing import Any

from logitmix.common.files import fits_digest, naming, read_json, require_file, sync, with_digest, write_whole
from logitmix.common.mappings import brief

DIGESTS = "digests.json"
KIND = "digests of a logitmix run's files"
CHECKSUMMED = ("config.toml", "dataset.json", "results.json", "test_ranks.json", "test_users.json")
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
    entry = content if content is None else {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = before | {path.name: entry}
    if found != before or not file.is_file():
        write_whole(file, json.dumps(with_digest({"kind": KIND, "files": found}), indent=1) + "\n")


def digests_of(run: Path) -> dict[str, Any]:
    """The entries of files by name, null for one that was being written. ValueError if the file is damaged, of another
    kind, or of another directory: then it lacks a file that is here."""
    file = run / DIGESTS
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict) or not fits_digest(content):
        raise ValueError(f"{file} is damaged (its sha256 is not that of its content); {_UNCHECKED.format(file)}")
    files = content.get("files")
    if content.get("kind") != KIND or not isinstance(files, dict):
        raise ValueError(f"{file} does not hold the {KIND} (fields kind and files); {_UNCHECKED.format(file)}")
    if wrong := [name for name, entry in files.items() if not _is_entry(name, entry)]:
        said = f"files.{wrong[0]:.80} is {brief(files[wrong[0]])}"
        raise ValueError(f"{file} does not hold the {KIND} ({said}); {_UNCHECKED.format(file)}")
    if missing := [name for name in CHECKSUMMED if name not in files and (run / name).exists()]:
        raise ValueError(f"{file} has no digest of {missing[0]}: it is of another run; {_UNCHECKED.format(file)}")
    return files


def _is_entry(name: str, entry: Any) -> bool:
    return name in (*CHECKSUMMED, ROWS) and (
        entry is None
        or (
            isinstance(entry, dict)
            and entry.keys() == {"bytes", "sha256"}
            and type(entry["bytes"]) is int
            and entry["bytes"] >= 0
        )
    )


_UNCHECKED = "restore it, or remove {} to go on without checking the run's files"


def read_checksummed(path: Path) -> bytes:
    """The content of a file of a run; ValueError if it is not what was written, except what was appended to rows."""
    entry = digests_of(path.parent).get(path.name)
    while True:
        content = _content(path) if entry is None or path.exists() else b""
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


def _content(path: Path) -> bytes:
    require_file(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    try:
        return read_checksummed(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged ({error})") from None
