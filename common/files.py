"""JSON, and files and directories that are written whole or not at all."""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from logitmix.common.mappings import brief, plainly


def other_kind(path: Path) -> str:
    """What is at this path instead of a file: "folder", "pipe", or "device or socket"; "" for a file. OSError if there
    is nothing."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device or socket"


def file_stamp(file: Path) -> tuple[int, int, int] | None:
    """Differs between the files that are at this path one after the other; None if there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def require_file(path: Path) -> None:
    """ValueError if something else than a file is at this path: a pipe would be waited for, a device read for ever."""
    if kind := other_kind(path):
        raise ValueError(f"{path} is a {kind}, not a file")


HEADER_BYTES = 2**22
"""Of a safetensors file, at most: some 40,000 tensors."""


def require_tensors(path: Path) -> None:
    """ValueError if this is no safetensors file, or one whose header is beyond reason: it would be parsed whole, and
    the format allows 100 MB."""
    require_file(path)
    with path.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    if header > HEADER_BYTES:
        raise ValueError(f"{path} is not a safetensors file (its header would have {header:,} bytes)")


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file's bytes. ValueError if something else is there."""
    require_file(path)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has an OSError within name this path if it names none, as that of a full disk, in the words of the system."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from None
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


SYNC_BYTES = 2**28
"""A large file is synced to disk after so many bytes each: a single sync at its end could take minutes, in which nobody
sees that it moves on."""


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Writes a new file of these parts and syncs it to disk; returns the SHA-256 of what was to be written."""
    digest, unsynced = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            digest.update(part)
            left = memoryview(part)
            while left:
                left = left[os.write(descriptor, left) :]
            unsynced += len(part)
            if unsynced >= SYNC_BYTES:
                os.fsync(descriptor)
                unsynced = 0
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def parse_json(content: bytes, where: str) -> Any:
    """The value that JSON in UTF-8 stands for; ValueError that names its place if it is none."""
    try:
        return from_json(content.decode())
    except ValueError as error:
        raise ValueError(f"{where} is damaged ({error})") from None


DEEPEST = 100
"""Levels of lists and objects in JSON: whatever walks through it then ends before Python's limit."""


def from_json(text: str | bytes) -> Any:
    """As json.loads, but ValueError also for what is nested too deep; each has one plain line."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError as error:
        raise ValueError(plainly(str(error))) from None
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    # Most texts have too few brackets to be nested so deep.
    if opened > DEEPEST and _depth(found) > DEEPEST:
        raise ValueError("nested too deep")
    return found


def _depth(found: Any) -> int:
    """Levels of lists and objects within each other."""
    depth, level = 0, [found]
    while level := [of for of in level if isinstance(of, dict | list)]:
        depth += 1
        level = [inner for of in level for inner in (of.values() if isinstance(of, dict) else of)]
    return depth


class Fields(dict[str, Any]):
    """A JSON object. A field that it lacks is a ValueError that names its place."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        super().__init__(content)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self.where} has no field {name}")


def require_numbers(content: Any, where: str, several: Collection[str] = ()) -> Fields:
    """Returns a JSON object whose values are numbers, of `several` fields lists or objects of numbers: any float, and
    whole ones of 64 bits. ValueError that names the place and the field."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} is not a JSON object")
    for name, value in content.items():
        numbers = [value]
        if name in several and isinstance(value, dict | list):
            numbers = [*value.values()] if isinstance(value, dict) else value
        if not all(type(of) is float or (type(of) is int and -(2**63) <= of < 2**63) for of in numbers):
            raise ValueError(f"{where}: {name} is {brief(value)}; it must be a number")
    return Fields(content, where)


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
    staging = staging_path(path)
    try:
        with naming(path):
            with staging.open("w", encoding="utf-8") as file:
                yield file
            sync(staging)
            staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def whole_directory(out: Path, keep: int = 0) -> Iterator[Path]:
    """Yields an empty hidden directory beside `out` to be filled. At the end it replaces `out` and its content, as
    `publish` does; on an error it is removed, and `out` is unchanged. If the process is killed it stays, until
    `clean_up` removes it."""
    staging = staging_path(out)
    try:
        with naming(out):
            staging.mkdir(parents=True)
            with held_alone(staging):
                yield staging
                publish(staging, out, keep)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def clean_up(out: Path) -> None:
    """Removes what processes that were killed before `publish` left beside `out`; if one was about to replace
    `out`, that gets its name back. What a living process writes stays."""
    ours = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.(part|old|kept)")
    # Those that were to be replaced come last, because their processes may still be at work.
    found = [path for path in out.parent.glob(".*") if ours.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: path.suffix != ".part"):
        if path.suffix == ".part":
            with suppress(FileNotFoundError), held_alone(path) as alone:
                if alone:
                    shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == ".kept" and out.exists() and not path.with_suffix(".part").exists():
            _keep(path, out, len(former(out)) + 1)
        elif path.suffix == ".old" and out.exists():
            shutil.rmtree(path, ignore_errors=True)
        elif not path.with_suffix(".part").exists():
            path.rename(out)


@contextmanager
def in_turn(directory: Path) -> Iterator[None]:
    """Processes that replace a directory with one made from it wait here for each other, so that each begins with what
    the one before has made. Does nothing if there is no directory, or if the file system has no locks."""
    with ExitStack() as held:
        while directory.is_dir():
            descriptor = os.open(directory, os.O_RDONLY)
            held.callback(os.close, descriptor)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if directory.exists() and os.path.samestat(os.fstat(descriptor), directory.stat()):
                break
        yield


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Holds the right to write `out`, a directory or a file, which the process loses when it is killed.

    A hidden file beside `out` is locked. It is removed at the end, or by the next writer. If the file system has no
    locks, two writers are not noticed.

    Raises:
        ValueError: If another process, or another thread of this one, writes `out`.
    """
    path = out.resolve()
    lock = path.with_name(f".{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process writes {out}; wait for it, or give another --out") from None
            except OSError:
                pass  # The file system has no locks.
            # The writer before may have removed the file since it was opened.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), lock.stat()):
                    break
        held.callback(lock.unlink, missing_ok=True)
        yield


@contextmanager
def held_alone(path: Path) -> Iterator[bool]:
    """Holds a directory for this process; False if another one does, or if the file system has no locks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(descriptor)


def staging_path(out: Path) -> Path:
    """A new hidden name beside `out`, where several processes write together before one of them publishes it."""
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")


def former(out: Path) -> dict[int, Path]:
    """What was published as `out` before and is kept, with 1 for the last, 2 for the one before it, and so on."""
    ours = re.compile(rf"{re.escape(out.name)}\.former-([1-9]\d*)")
    found = ((ours.fullmatch(path.name), path) for path in out.parent.glob("*.former-*"))
    return dict(sorted((int(name[1]), path) for name, path in found if name))


def restore(out: Path, number: int) -> None:
    """Exchanges `out` and a former one, which must be there; the one that was `out` becomes the last former one."""
    staging = staging_path(out)
    staging.mkdir()
    with held_alone(staging):
        try:
            there, kept = former(out), staging.with_suffix(".kept")
            out.rename(kept)
            try:
                there[number].rename(out)
            except BaseException:
                kept.rename(out)
                raise
            _keep(kept, out, len(there))
        finally:
            staging.rmdir()
    sync(out.parent)


def _keep(kept: Path, out: Path, most: int) -> None:
    """Makes it the last of at most so many former ones. Those up to the first number that is free get the next one."""
    there = former(out)
    free = next(number for number in count(1) if number not in there)
    with suppress(FileNotFoundError):  # another process has cleaned up
        for number in range(free, 1, -1):
            _former(out, number - 1).rename(_former(out, number))
        kept.rename(_former(out, 1))
    for number, path in former(out).items():
        if number > most:
            shutil.rmtree(path, ignore_errors=True)


def _former(out: Path, number: int) -> Path:
    return out.with_name(f"{out.name}.former-{number}")


def publish(staging: Path, out: Path, keep: int = 0) -> None:
    """Syncs all of `staging` to disk and gives it the name `out`, in place of what is there, which becomes the last of
    `keep` former ones; then syncs the name."""
    rename_synced(staging, out, keep)
    sync(out.parent)


def rename_synced(staging: Path, out: Path, keep: int = 0) -> None:
    """As `publish`, but does not sync the name. After an OSError `out` is what it was."""
    for path in (*staging.rglob("*"), staging):
        sync(path)
    if out.exists():
        # For a moment `out` does not exist: a directory cannot be renamed over another that has files.
        old = staging.with_suffix(".kept" if keep else ".old")
        out.rename(old)
        try:
            staging.rename(out)
        except BaseException:
            old.rename(out)
            raise
        if keep:
            _keep(old, out, keep)
        else:
            shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(out)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
