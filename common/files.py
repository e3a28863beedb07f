"""Digests, and files and directories that are written whole or not at all."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def json_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a mapping as compact JSON in ASCII with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Writes UTF-8 text atomically: the file always has either its old or its new content."""
    with writing_whole(path) as file:
        file.write(text)


@contextmanager
def writing_whole(path: Path) -> Iterator[TextIO]:
    """Yields a file for UTF-8 text. At the end it replaces what is at `path`; on an error it is removed. ValueError if
    something other than a file is there."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file; write to another")
    staging = path.with_name(f".{path.name}.part")
    try:
        with staging.open("w", encoding="utf-8") as file:
            yield file
        sync(staging)
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Yields an empty hidden directory beside `out` to be filled. At the end it replaces `out` and its content; on an
    error it is removed, and `out` is unchanged."""
    staging = staging_path(out)
    try:
        staging.mkdir(parents=True)
        yield staging
        publish(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def staging_path(out: Path) -> Path:
    """A new hidden name beside `out`, where several processes write together before one of them publishes it."""
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")


def publish(staging: Path, out: Path) -> None:
    """Syncs all of `staging` to disk and gives it the name `out`, in place of what is there."""
    for path in (*staging.rglob("*"), staging):
        sync(path)
    if out.exists():
        # For a moment `out` does not exist: a directory cannot be renamed over another that has files.
        old = staging.with_suffix(".old")
        out.rename(old)
        try:
            staging.rename(out)
        except BaseException:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(out)
    sync(out.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
