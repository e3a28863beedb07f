"""Source files as byte streams: plain, gzip, a member of a zip, or part of a folder.

A compressed file is recognized by its first bytes, not by its name; a byte-order mark is skipped. Reading advances a
bar in a rich `Progress`.
"""

import codecs
import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from rich.progress import Progress

from logitmix.common.files import file_digest

_DAMAGE = (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
"""Errors of gzip and zipfile for a truncated, corrupt or encrypted archive."""


@dataclass(frozen=True)
class InputFile:
    path: Path
    member: str = ""
    """Name inside the zip at `path`; empty for a plain file."""

    @property
    def label(self) -> str:
        """Its name in messages: the base name."""
        return Path(self.member).name if self.member else self.path.name

    @contextmanager
    def open(self, progress: Progress) -> Iterator[BinaryIO]:
        """The decompressed bytes of a text. ValueError for UTF-16, and for a truncated or damaged archive, here or
        while reading."""
        with ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            task = progress.add_task(self.label, total=self.path.stat().st_size)
            # The bar counts compressed bytes: only their number is known beforehand.
            counted = progress.wrap_file(raw, task_id=task)
            try:
                plain: BinaryIO = counted
                if self.member:
                    archive = stack.enter_context(zipfile.ZipFile(counted))
                    plain = cast(BinaryIO, stack.enter_context(archive.open(self.member)))
                elif magic(self.path).startswith(b"\x1f\x8b"):
                    plain = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=counted)))
                yield self._without_mark(io.BufferedReader(cast(io.RawIOBase, plain)))
            except _DAMAGE as error:
                raise ValueError(f"{self.path}: truncated or damaged ({error}); fetch it again") from None
            progress.update(task, completed=self.path.stat().st_size)

    def _without_mark(self, stream: io.BufferedReader) -> BinaryIO:
        start = stream.peek(len(codecs.BOM_UTF8))
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"{self.path}: is UTF-16 text; save it as UTF-8")
        if start.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        return stream


def magic(path: Path) -> bytes:
    """The first 4 bytes; fewer if the file is shorter."""
    with path.open("rb") as stream:
        return stream.read(4)


def find_files(source: Path, names: tuple[str, ...]) -> dict[str, InputFile]:
    """Those of `names` that exist in a zip, a folder or its immediate subfolders, by name.

    ValueError if the zip is truncated, or if a name exists twice.
    """
    if source.is_dir():
        candidates = [InputFile(path) for path in [*sorted(source.glob("*")), *sorted(source.glob("*/*"))]]
    else:
        try:
            with zipfile.ZipFile(source) as archive:
                candidates = [InputFile(source, member) for member in archive.namelist()]
        except _DAMAGE as error:
            raise ValueError(f"{source}: truncated or damaged zip ({error}); fetch it again") from None
    found: dict[str, InputFile] = {}
    for file in candidates:
        if file.label in names:
            if file.label in found:
                raise ValueError(f"{source}: holds two files named {file.label}; give the folder of one of them")
            found[file.label] = file
    return found


def single_file(source: Path) -> InputFile:
    """The file of a format of one file. ValueError if it is a folder or a zip."""
    if source.is_dir() or magic(source)[:2] == b"PK":
        raise ValueError(f"{source}: this format is one text file, plain or .gz; give that file with --source")
    return InputFile(source)


def digests(source: Path, files: Sequence[InputFile] = ()) -> dict[str, str]:
    """sha256 of the source file, or of the files of a source folder that were read (all if none is named), by name
    relative to it."""
    if not source.is_dir():
        return {source.name: file_digest(source)}
    files = files or [InputFile(path) for path in sorted(source.iterdir()) if path.is_file()]
    return {file.path.relative_to(source).as_posix(): file_digest(file.path) for file in files}
