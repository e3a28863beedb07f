"""Files that stay mapped while an export is in use: whoever writes into one of them changes what is read, and whoever
truncates it lets the next access to what is gone end the process (SIGBUS)."""

import os
import weakref
from collections.abc import Iterable
from pathlib import Path


class WrittenInPlace(OSError):
    """A mapped file is no longer what it was."""


class MappedFiles:
    """Mapped files, each held open: at its path there may be another one by now, which does no harm."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._open = {path: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths}
        for file in self._open.values():
            weakref.finalize(self, os.close, file)
        self._seen = {path: _stamp(file) for path, file in self._open.items()}

    def check(self) -> None:
        """Raises WrittenInPlace if a file has been written to since. Takes a microsecond a file."""
        for path, file in self._open.items():
            if _stamp(file) != self._seen[path]:
                raise WrittenInPlace(
                    f"{path} was written to while it was in use, and is not used any more: publish a whole export in "
                    "place of the directory, by renaming it"
                )


def _stamp(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns
