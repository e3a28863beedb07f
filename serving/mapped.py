"""Files that stay mapped while an export is in use: whoever writes into one of them changes what is read, and whoever
truncates it lets the next access to what is gone end the process (SIGBUS)."""

import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from logitmix.common.files import in_turn
from logitmix.modules.stage1 import Int8Corpus


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


def shared_corpus(file: Path, parts: Sequence[tuple[Tensor, int]], scale: float) -> Int8Corpus:
    """Returns `Int8Corpus.joined` in a file that several processes map. The first process makes it, in place of those
    of other exports; if there is no room for it, each process has its own."""
    with in_turn(file.parent):
        if not file.exists():
            made, part = Int8Corpus.joined(parts, scale), file.with_suffix(".part")
            try:
                with part.open("wb") as content:
                    np.save(content, made.blocks.numpy())
                for other in file.parent.glob("*.npy"):
                    other.unlink()
                part.rename(file)
            except OSError:
                part.unlink(missing_ok=True)
                return made
        blocks = np.load(file, mmap_mode="c")
    return Int8Corpus(torch.from_numpy(np.asarray(blocks)), scale, sum(count for _, count in parts))


def _stamp(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns
