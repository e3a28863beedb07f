"""Source files as byte streams: plain, gzip, a member of a zip, or part of a folder.

A compressed file is recognized by its first bytes, not by its name; other compressions are refused. Text is UTF-8; a
byte-order mark is skipped, and UTF-16 and UTF-32 are refused. Members of a zip are read in place: nothing is ever
unpacked to the disk. Reading advances a bar in a rich `Progress`.
"""

import codecs
import errno
import gzip
import io
import lzma
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from rich.progress import Progress

from logitmix.common.files import file_digest

_DAMAGE = (
    zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError
)  # fmt: skip
"""Errors of gzip and zipfile for a truncated, corrupt or encrypted archive."""
_DAMAGED_DIRECTORY = (*_DAMAGE, UnicodeDecodeError)
"""Those of zipfile for a directory of members that makes no sense."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
"""Byte-order marks that are refused; the first two bytes of UTF-32's are those of UTF-16's."""
_COMPRESSIONS = {"zstd": rb"\x28\xb5\x2f\xfd", "bzip2": rb"BZh[1-9]1AY&SY", "xz": rb"\xfd7zXZ"}
"""Those that are refused, by what their files begin with."""


@dataclass(frozen=True)
class InputFile:
    path: Path
    member: str = ""
    """Name inside the zip at `path`; empty for a plain file."""

    @property
    def label(self) -> str:
        """Its name in messages: the base name."""
        return plain(Path(self.member).name if self.member else self.path.name)

    @contextmanager
    def open(self, progress: Progress) -> Iterator[BinaryIO]:
        """The decompressed bytes of a text. ValueError for UTF-16 and for compressions other than gzip and zip's, and
        for a truncated or damaged archive, here or while reading."""
        with ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            task = progress.add_task(self.label, total=self.path.stat().st_size)
            # The bar counts compressed bytes: only their number is known beforehand.
            counted = progress.wrap_file(raw, task_id=task)
            plain: BinaryIO = counted
            with _intact(self.path, _DAMAGED_DIRECTORY):
                if self.member:
                    archive = stack.enter_context(zipfile.ZipFile(counted))
                    plain = cast(BinaryIO, stack.enter_context(archive.open(self.member)))
                elif magic(self.path).startswith(b"\x1f\x8b"):
                    plain = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=counted)))
            with _intact(self.path, _DAMAGE):
                yield self._without_mark(io.BufferedReader(cast(io.RawIOBase, plain)))
            progress.update(task, completed=self.path.stat().st_size)

    def _without_mark(self, stream: io.BufferedReader) -> BinaryIO:
        start = stream.peek(len(codecs.BOM_UTF8))
        within = f", {self.member}" if self.member else ""
        for name, begin in _COMPRESSIONS.items():
            if re.match(begin, start):
                raise ValueError(f"{self.path}{within}: is compressed by {name}; decompress it first ({name} -d)")
        if encoding := _foreign_encoding(start):
            raise ValueError(
                f"{self.path}{within}: is {encoding} text; convert it to UTF-8: iconv -f {encoding} -t UTF-8"
            )
        if start.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        return stream


@contextmanager
def _intact(path: Path, damage: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turns the errors of a damaged archive into ValueError."""
    try:
        yield
    except damage as error:
        raise ValueError(f"{path}: truncated or damaged ({error}); fetch it again") from None
    except OSError as error:
        # bzip2's errors have no number, and a place outside the file, where a zip may send a reader, is invalid.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(f"{path}: truncated or damaged ({error}); fetch it again") from None


def _foreign_encoding(start: bytes) -> str:
    """UTF-16 or UTF-32 by the mark, or by every other byte of most characters; "" if it is neither."""
    marked = [encoding for mark, encoding in _MARKS if start.startswith(mark)]
    if marked:
        return marked[0]
    pairs = len(start) // 2
    first, second = start[: 2 * pairs : 2].count(0), start[1 : 2 * pairs : 2].count(0)
    if not first and 2 * second > pairs:
        return "UTF-16LE"
    return "UTF-16BE" if not second and 2 * first > pairs else ""


def magic(path: Path) -> bytes:
    """The first 4 bytes; fewer if the file is shorter."""
    with path.open("rb") as stream:
        return stream.read(4)


def is_zip(path: Path) -> bool:
    return magic(path) in (b"PK\3\4", b"PK\5\6")


def find_files(source: Path, names: tuple[str, ...]) -> dict[str, InputFile]:
    """Those of `names` that exist in a zip, a folder or its immediate subfolders, by name.

    ValueError if the zip is truncated, if a name exists twice, or if the member of that name is a link or leads out of
    the archive: nothing is unpacked, but such an archive was not made to be read.
    """
    if source.is_dir():
        places = [*sorted(source.glob("*")), *sorted(source.glob("*/*"))]
        candidates = [InputFile(path) for path in places if path.is_file()]
    else:
        with _intact(source, _DAMAGED_DIRECTORY), zipfile.ZipFile(source) as archive:
            members = [member for member in archive.infolist() if not member.filename.endswith("/")]
        candidates = [InputFile(source, member.filename) for member in members]
        strange = {member.filename for member in members if _is_strange(member)}
    found: dict[str, InputFile] = {}
    for file in candidates:
        if file.label in names:
            if file.label in found:
                raise ValueError(f"{source}: holds two files named {file.label}; give the folder of one of them")
            if file.member and file.member in strange:
                raise ValueError(f"{source}: its member {file.member} is a link or leads out of the archive")
            found[file.label] = file
    return found


def _is_strange(member: zipfile.ZipInfo) -> bool:
    path = PurePosixPath(member.filename.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or stat.S_ISLNK(member.external_attr >> 16)


def single_file(source: Path) -> InputFile:
    """The file of a format of one file. ValueError if it is a folder or a zip."""
    if source.is_dir() or is_zip(source):
        raise ValueError(f"{source}: this format is one text file, plain or .gz; give that file with --source")
    return InputFile(source)


def digests(source: Path, files: Sequence[InputFile] = ()) -> dict[str, str]:
    """sha256 of the source file, or of the files of a source folder that were read (all if none is named), by name
    relative to it."""
    if not source.is_dir():
        return {plain(source.name): file_digest(source)}
    files = files or [InputFile(path) for path in sorted(source.iterdir()) if path.is_file()]
    return {plain(file.path.relative_to(source).as_posix()): file_digest(file.path) for file in files}


def plain(name: str) -> str:
    """The name of a file with its bytes that are not UTF-8 escaped, because no UTF-8 file can hold them."""
    return name.encode("utf-8", "backslashreplace").decode()
