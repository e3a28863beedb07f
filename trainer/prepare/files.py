"""Source files as byte streams: plain, compressed by gzip, bzip2 or xz, a member of a zip, or part of a folder.

A compressed file is recognized by its first bytes, not by its name; other compressions are refused. Text is UTF-8, or
of an encoding that is given; a byte-order mark is skipped. If none is given, UTF-16 and UTF-32 are refused. Members of
a zip are read in place: nothing is ever unpacked to the disk. Reading advances a bar in a rich `Progress`.
"""

import bz2
import codecs
import errno
import gzip
import io
import lzma
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

from rich.progress import Progress

from logitmix.common.files import file_digest, require_file

_DAMAGE = (
    zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError,
    UnicodeError,
)  # fmt: skip
"""Errors of compressed files and zips that are truncated, corrupt or encrypted, and of text of another encoding."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
"""Byte-order marks that are refused; the first two bytes of UTF-32's are those of UTF-16's."""
_Unpack = Callable[[BinaryIO], io.RawIOBase | gzip.GzipFile]
_COMPRESSIONS: dict[str, tuple[bytes, _Unpack | None]] = {
    "gzip": (rb"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    "bzip2": (rb"BZh[1-9]1AY&SY", lambda raw: _Unpacked(raw, bz2.BZ2Decompressor)),
    "xz": (rb"\xfd7zXZ", lambda raw: _Unpacked(raw, lzma.LZMADecompressor)),
    "zstd": (rb"\x28\xb5\x2f\xfd", None),
}
"""What a compressed file begins with, and what reads it; None: it is refused."""
_LONGEST_BEGIN = 10
_BLOCK = 1 << 16
_NO_TEXTS = {b"ARROW1": "Arrow (Feather)", b"Obj\x01": "Avro", b"ORC": "ORC", b"\xd0\xcf\x11\xe0": "Excel"}
"""What files of other kinds begin with."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_OF_OTHERS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi", "metadata": "Iceberg"}
"""Subfolders of tables whose files include rows that were removed or changed since."""

ENDINGS = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson", ".json")
"""Of the names of tables in a folder, in upper or lower case."""
ATOMIC = {"--source": ".inter", "--items": ".item", "--users": ".user"}
"""Endings of RecBole's files, which lie in one folder, by the flag that reads them."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Further endings, after those."""


@dataclass(frozen=True)
class InputFile:
    path: Path
    member: str = ""
    """Name inside the zip at `path`; empty for a plain file."""
    folder: Path | None = None
    """The folder that it is a part of, itself or in a subfolder."""
    encoding: str = ""
    """Of its text, which is read as UTF-8; empty if it is that already."""

    @property
    def label(self) -> str:
        """Its name in messages: the base name, or the path within the folder."""
        if self.folder:
            return plain(self.path.relative_to(self.folder).as_posix())
        return plain(Path(self.member).name if self.member else self.path.name)

    @property
    def partition(self) -> dict[str, str | None]:
        """Values of columns that all rows of the file share, from names of subfolders, KEY=VALUE, as Hive and Spark
        write them."""
        named = (part.partition("=") for part in self.label.split("/")[:-1] if "=" in part) if self.folder else ()
        return {unquote(key): None if value == _NO_VALUE else unquote(value) for key, _, value in named}

    @contextmanager
    def open(self, progress: Progress) -> Iterator[BinaryIO]:
        """The decompressed bytes of a text. ValueError for UTF-16 and for compressions other than gzip, bzip2, xz and
        zip's, and for a truncated or damaged archive, here or while reading."""
        require_file(self.path)
        with ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            task = progress.add_task(self.label, total=self.path.stat().st_size)
            # The bar counts compressed bytes: only their number is known beforehand.
            counted = progress.wrap_file(raw, task_id=task)
            plain: BinaryIO = counted
            with _intact(self.path, _DAMAGE):
                if self.member:
                    archive = stack.enter_context(zipfile.ZipFile(counted))
                    plain = cast(BinaryIO, stack.enter_context(archive.open(self.member)))
                elif unpack := _compression(magic(self.path, _LONGEST_BEGIN))[1]:
                    plain = stack.enter_context(cast(BinaryIO, unpack(counted)))
            with _intact(self.path, _DAMAGE):
                if self.encoding:
                    text = io.BufferedReader(cast(io.RawIOBase, plain))
                    for mark in (codecs.BOM_UTF8, *(mark for mark, _ in _MARKS)):
                        if text.peek(4).startswith(mark) and mark.decode(self.encoding, "ignore") == "\ufeff":
                            text.read(len(mark))
                    # Bytes that stand for nothing there are left as they are.
                    yield cast(BinaryIO, codecs.EncodedFile(text, "utf-8", self.encoding, "surrogateescape"))
                else:
                    yield self._without_mark(io.BufferedReader(cast(io.RawIOBase, plain)))
            progress.update(task, completed=self.path.stat().st_size)

    def _without_mark(self, stream: io.BufferedReader) -> BinaryIO:
        start = stream.peek(len(codecs.BOM_UTF8))
        within = f", {self.member}" if self.member else ""
        if name := _compression(start)[0]:
            raise ValueError(f"{self.path}{within}: is compressed by {name}; decompress it first ({name} -d)")
        if encoding := _foreign_encoding(start):
            raise ValueError(
                f"{self.path}{within}: is {encoding} text; for a table, give --encoding {encoding}, else convert it to "
                f"UTF-8: iconv -f {encoding} -t UTF-8"
            )
        kind = next((kind for begin, kind in _NO_TEXTS.items() if start.startswith(begin)), "")
        if kind and b"\0" in start:
            raise ValueError(f"{self.path}{within}: is a file of {kind}; write it as Parquet or CSV")
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


def magic(path: Path, count: int = 4) -> bytes:
    """The first bytes; fewer if the file is shorter. ValueError if it is no file."""
    require_file(path)
    with path.open("rb") as stream:
        return stream.read(count)


def _compression(start: bytes) -> tuple[str, _Unpack | None]:
    """The name of the compression of a file that begins so, "" for none, and what reads it."""
    found = ((name, unpack) for name, (begin, unpack) in _COMPRESSIONS.items() if re.match(begin, start))
    return next(found, ("", None))


class _Unpacked(io.RawIOBase):
    """One compressed stream after the other. bz2.BZ2File and lzma.LZMAFile take a damaged one for the end."""

    def __init__(self, raw: BinaryIO, make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> None:
        self.raw, self.make, self.unpacker = raw, make, make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        place = memoryview(buffer)
        while True:
            more = b""
            if self.unpacker.eof:
                more = self.unpacker.unused_data or self.raw.read(_BLOCK)
                if not more:
                    return 0
                self.unpacker = self.make()
            elif self.unpacker.needs_input:
                more = self.raw.read(_BLOCK)
                if not more:
                    raise EOFError("it ends within a compressed stream")
            data = self.unpacker.decompress(more, len(place))
            if data:
                place[: len(data)] = data
                return len(data)


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
        require_file(source)
        with _intact(source, _DAMAGE), zipfile.ZipFile(source) as archive:
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


def find_parts(source: Path, endings: tuple[str, ...] = ENDINGS) -> tuple[list[InputFile], list[str], list[str]]:
    """The tables in a folder and its subfolders, by the endings of their names, in the order of their paths with
    numbers as numbers (day-2 before day-10); the paths of all other files; and those of empty ones. A path with a part
    that begins with "." or "_" is in none. ValueError if the folder is a table of another program, or a link leads back
    to it.
    """
    parts, others, empty = [], [], []
    for path in _walk(source, (source.resolve(),)):
        if not path.is_file():
            others.append(plain(path.relative_to(source).as_posix()))
        elif not path.stat().st_size:
            empty.append(plain(path.relative_to(source).as_posix()))
        elif path.name.lower().removesuffix(_ending(path)).endswith(endings) or magic(path) == b"PAR1":
            parts.append(InputFile(path, folder=source))
        else:
            others.append(plain(path.relative_to(source).as_posix()))
    return parts, others, empty


def _ending(path: Path) -> str:
    return next((ending for ending in COMPRESSED if path.name.lower().endswith(ending)), "")


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """All but folders, in natural order."""
    for path in sorted(folder.iterdir(), key=lambda path: natural(path.name)):
        program = _OF_OTHERS.get(path.name)
        if program and path.is_dir() and (program != "Iceberg" or any(path.glob("*.metadata.json"))):
            raise ValueError(
                f"{folder}: is a table of {program}, whose files include rows that were removed since; "
                "export it to Parquet and give that"
            )
        if path.name.startswith((".", "_")):
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() in above:
            raise ValueError(f"{path}: is a link to a folder that it lies in; remove it")
        else:
            yield from _walk(path, (*above, path.resolve()))


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sorts names with numbers as numbers."""
    pieces = re.split(r"([0-9]+)", name)
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces if piece], name


def digests(source: Path, files: Sequence[InputFile] = ()) -> dict[str, str]:
    """sha256 of the source file, or of the files of a source folder that were read (all its tables if none is named),
    by name relative to it."""
    if not source.is_dir():
        return {plain(source.name): file_digest(source)}
    files = files or find_parts(source, (*ENDINGS, *ATOMIC.values()))[0]
    return {plain(file.path.relative_to(source).as_posix()): file_digest(file.path) for file in files}


def plain(name: str) -> str:
    """The name of a file with its bytes that are not UTF-8 escaped, because no UTF-8 file can hold them."""
    return name.encode("utf-8", "backslashreplace").decode()
