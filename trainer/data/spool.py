"""The columns of the actions while a dataset is prepared: in memory as long as they fit into --memory, otherwise in
files beside the output.

A job opens its spool with `spooling`, and `current` finds it: sources need not pass it on. A column is kept in pieces,
each of which is written once and read whole.
"""

import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.files import held_alone, staging_path
from logitmix.trainer.data.arrow import is_text

PROGRAM = 200 << 20
"""Bytes of the program and its libraries."""
PIECE = 1 << 20
"""Rows of a piece."""
LARGEST = 2**31
"""Bytes of the distinct texts of a column: Arrow holds no more."""
HELD = 4
"""To sort and filter columns in memory takes so many times their bytes."""


class Spool:
    """What a job keeps, and where."""

    def __init__(self, folder: Path | None = None, memory: int = 2**62) -> None:
        """`memory`: bytes for the whole process. Without a folder all is kept in memory."""
        self.folder, self.memory = folder, memory
        self.reserved = 0
        """Bytes that distinct ids and texts take."""
        self.in_files = self.settled = False
        """Whether arrays go to files; whether that is final."""
        self._held = WeakSet[Kept]()
        self._files = 0
        self._stack = ExitStack()

    @property
    def budget(self) -> int:
        """Bytes for the actions. ValueError if distinct ids and texts leave too few."""
        left = max(self.memory - PROGRAM, self.memory // 4) - self.reserved
        if self.reserved > 1 << 20 and left < self.memory // 8:
            need = 1.5 * (self.reserved + PROGRAM) / 2**30
            raise ValueError(
                f"the distinct ids and texts alone take {self.reserved / 2**30:.1f} GiB; give --memory {need:.1f}GiB "
                "or more"
            )
        return max(left, 1)

    def keep(self, array: pa.Array, file: "File") -> "Kept":
        kept = Kept(array, file)
        if self.in_files:
            kept.move()
        elif self.folder is not None and not self.settled:
            self._held.add(kept)
            if HELD * sum(each.size for each in self._held) > self.budget:
                self.in_files = True
                for each in self._held:
                    each.move()
                self._held.clear()
        return kept

    def place(self) -> Path:
        """The folder, made if need be."""
        assert self.folder is not None
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self._stack.enter_context(held_alone(self.folder))
        return self.folder

    def open(self) -> io.FileIO:
        """A new file."""
        self._files += 1
        return self._stack.enter_context(io.FileIO(self.place() / str(self._files), "x+"))

    def close(self) -> None:
        """Removes the files."""
        self._stack.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


_CURRENT: ContextVar[Spool | None] = ContextVar("spool", default=None)


def current() -> Spool:
    """That of the job, or one in memory."""
    return _CURRENT.get() or Spool()


@contextmanager
def spooling(out: Path, memory: int) -> Iterator[Spool]:
    """The spool of a job with this output; its files, beside it, are removed at the end, or by the next job if the
    process is killed."""
    spool = Spool(staging_path(out), memory)
    token = _CURRENT.set(spool)
    try:
        yield spool
    finally:
        _CURRENT.reset(token)
        spool.close()


class File:
    """Arrays of a spool, one after the other."""

    def __init__(self, spool: Spool) -> None:
        self.spool, self.size = spool, 0
        self._file: io.FileIO | None = None

    def write(self, data: pa.Buffer) -> int:
        """Returns where it is. ValueError if the disk is full."""
        self._file = self._file or self.spool.open()
        place, view = self.size, memoryview(data)
        try:
            while view:
                done = os.pwrite(self._file.fileno(), view, self.size)
                self.size, view = self.size + done, view[done:]
        except OSError as error:
            folder = Path(self._file.name).parent.parent
            raise ValueError(
                f"{folder}: the actions do not fit into --memory, nor on this disk, of which "
                f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free ({error.strerror}); free some of it, or "
                "give more --memory"
            ) from None
        return place

    def read(self, place: int, size: int) -> pa.Buffer:
        assert self._file is not None
        data = np.empty(size, np.uint8)
        view = data.data
        while view:
            done = os.preadv(self._file.fileno(), [view], place + size - len(view))
            assert done, "the file ends early"
            view = view[done:]
        return pa.py_buffer(data)

    def close(self) -> None:
        """Removes it."""
        if self._file is not None:
            self._file.close()
            os.unlink(self._file.name)
        self._file = None


class Kept:
    """An array, in memory or in a file."""

    def __init__(self, array: pa.Array, file: File) -> None:
        self.kind, self.size, self.file = array.type, array.nbytes, file
        self._array: pa.Array | None = array
        self._place = 0, 0

    def move(self) -> None:
        """To the file."""
        data = pa.record_batch([self._array], ["values"]).serialize()
        self._place, self._array = (self.file.write(data), len(data)), None

    def load(self) -> pa.Array:
        if self._array is not None:
            return self._array
        batch = pa.ipc.read_record_batch(self.file.read(*self._place), pa.schema([("values", self.kind)]))
        return batch.column(0)


class TextCodes:
    """Numbers texts in the order of their first appearance."""

    def __init__(self, what: str, spool: Spool) -> None:
        self.what, self.spool = what, spool
        self._texts: pa.StringArray = pa.array([], pa.string())
        self._numbers: list[np.ndarray] | None = []
        """As long as all texts are small numbers: these, of which `_code_of` has the codes."""
        self._code_of = np.empty(0, np.int32)
        self._count = self._reserved = 0

    @property
    def texts(self) -> pa.StringArray:
        if self._numbers:
            self._texts = pa.concat_arrays([self._texts, pa.array(np.concatenate(self._numbers)).cast(pa.string())])
            self._numbers.clear()
        return self._texts

    @property
    def searched(self) -> int:
        """Texts that each call of `encode` takes time for."""
        return len(self._texts) if self._numbers is None else 0

    def encode(self, texts: pa.Array) -> pa.Int32Array:
        """null for a missing text. Takes time for all texts that are known already: give it many at once.

        ValueError if they are more than Arrow holds, or than --memory."""
        if self._numbers is not None:
            numbers = _small_numbers(texts, 16 * (self._count + len(texts)))
            if numbers is not None:
                return self._encode_numbers(self._numbers, numbers)
            self._texts, self._numbers, self._code_of = self.texts, None, self._code_of[:0]
        encoded = texts if pa.types.is_dictionary(texts.type) else texts.dictionary_encode()
        found = pc.index_in(encoded.dictionary, value_set=self._texts)
        if not found.null_count:
            return found.take(encoded.indices)
        new = encoded.dictionary.filter(found.is_null())
        codes = found.fill_null(-1).to_numpy().copy()
        codes[codes < 0] = np.arange(len(self._texts), len(self._texts) + len(new))
        if self._texts.nbytes + new.nbytes > LARGEST:
            raise ValueError(f"{self.what} has more than 2 GiB of different texts; leave it out")
        self._texts = pa.concat_arrays([self._texts, new])
        # With the copy and Arrow's hash table, of which one is there while texts are added.
        self._reserve(2 * self._texts.nbytes + 32 * len(self._texts))
        return pa.array(codes).take(encoded.indices)

    def _encode_numbers(self, known: list[np.ndarray], numbers: np.ndarray) -> pa.Int32Array:
        if numbers.max() >= len(self._code_of):
            more = max(int(numbers.max()) + 1, 2 * len(self._code_of)) - len(self._code_of)
            self._code_of = np.append(self._code_of, np.full(more, -1, np.int32))
        codes = self._code_of[numbers]
        missing = codes < 0
        if missing.any():
            new = pa.array(numbers[missing]).unique().to_numpy()
            self._code_of[new] = np.arange(self._count, self._count + len(new))
            self._count += len(new)
            known.append(new)
            self._reserve(8 * len(self._code_of) + 32 * self._count)
            codes = self._code_of[numbers]
        return pa.array(codes)

    def forget(self) -> None:
        """The texts are not needed any more."""
        self._texts, self._numbers, self._code_of = self._texts[:0], None, self._code_of[:0]
        self._reserve(0)

    def _reserve(self, size: int) -> None:
        self.spool.reserved += size - self._reserved
        self._reserved = size


def _small_numbers(texts: pa.Array, limit: int) -> np.ndarray | None:
    """Texts as the whole numbers that they are the usual digits of; None if some are none or not below the limit."""
    if not pa.types.is_string(texts.type) or texts.null_count or not len(texts):
        return None
    _, ends, characters = texts.buffers()
    bounds = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    lengths = np.diff(bounds)
    if lengths.min() < 1 or lengths.max() > len(str(limit)) or lengths.max() > 9:
        return None
    codes = np.frombuffer(characters, np.uint8)
    every = codes[bounds[0] : bounds[-1]] - np.uint8(ord("0"))
    if every.max() > 9 or ((codes[bounds[:-1]] == ord("0")) & (lengths > 1)).any():
        return None
    numbers = texts.cast(pa.int32()).to_numpy()
    return numbers if numbers.max() < limit else None


class Pieces:
    """A column in pieces, one after the other; of numbers, slices are read as those of an array."""

    def __init__(self, file: File | None = None, texts: pa.StringArray | None = None) -> None:
        """`texts`: of a column of texts, whose pieces are codes."""
        self.file = file or File(current())
        self.texts = texts
        self.kept: list[Kept] = []
        self.ends = [0]
        """Of the pieces, behind the start."""
        self._change: Callable[[np.ndarray], np.ndarray] | None = None
        self._last: tuple[int, np.ndarray] | None = None

    @classmethod
    def of(cls, arrays: Iterable[Any], file: File | None = None) -> "Pieces":
        """A new column. Texts are coded."""
        made, codes = cls(file), TextCodes("a column", current())
        for array in arrays:
            if isinstance(array, pa.Array) and is_text(array.type):
                array = codes.encode(array)
                made.texts = codes.texts
            made.append(array)
        return made

    def append(self, array: Any) -> None:
        """An array of Arrow or numpy; of texts, their codes."""
        array = array if isinstance(array, pa.Array) else pa.array(array)
        self.add(self.file.spool.keep(array, self.file), len(array))

    def extend(self, numbers: np.ndarray) -> None:
        """Numbers, or rows of as many, in pieces that need little memory when they are read."""
        for start in range(0, len(numbers), PIECE):
            part = numbers[start : start + PIECE]
            flat = pa.array(part.ravel())
            self.append(flat if part.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, part.shape[1]))

    def add(self, kept: Kept, rows: int) -> None:
        """One that is kept already."""
        self.kept.append(kept)
        self.ends.append(self.ends[-1] + rows)

    def __len__(self) -> int:
        return self.ends[-1]

    def __iter__(self) -> Iterator[pa.Array]:
        for kept in self.kept:
            yield self._decoded(kept.load())

    def _decoded(self, array: pa.Array) -> pa.Array:
        return array if self.texts is None else pa.DictionaryArray.from_arrays(array, self.texts)

    def whole(self) -> pa.Array:
        """All pieces as one array."""
        arrays = [kept.load() for kept in self.kept]
        return self._decoded(arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)) if arrays else pa.nulls(0)

    def head(self, rows: int) -> pa.Array:
        """The first rows."""
        parts: list[pa.Array] = []
        for piece in self:
            parts.append(piece[: rows - sum(map(len, parts))])
            if sum(map(len, parts)) == rows:
                break
        return pa.concat_arrays(parts) if parts else pa.nulls(0)

    def numbers(self) -> Iterator[np.ndarray]:
        """Of numbers, each piece."""
        return map(self._numbers, range(len(self.kept)))

    def __getitem__(self, which: slice | np.ndarray) -> np.ndarray:
        """Of numbers: consecutive rows, or those at these places, which rise."""
        found = []
        if isinstance(which, np.ndarray):
            cuts = np.searchsorted(which, self.ends)
            for number, (first, stop) in enumerate(pairwise(cuts)):
                if first < stop:
                    found.append(self._numbers(number)[which[first:stop] - self.ends[number]])
        else:
            first, stop, _ = which.indices(len(self))
            for number, (start, end) in enumerate(pairwise(self.ends)):
                if first < end and start < stop:
                    found.append(self._numbers(number)[max(first - start, 0) : stop - start])
        if not found:
            return self._numbers(0)[:0] if self.kept else np.empty(0, np.int64)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _numbers(self, number: int) -> np.ndarray:
        # Neighboring slices are mostly of one piece.
        if self._last is None or self._last[0] != number:
            self._last = None
            array = self.kept[number].load()
            if pa.types.is_fixed_size_list(array.type):
                numbers = array.flatten().to_numpy().reshape(len(array), -1)
            else:
                numbers = array.to_numpy(zero_copy_only=False)
            self._last = number, numbers if self._change is None else self._change(numbers)
        return self._last[1]

    def changed(self, change: Callable[[np.ndarray], np.ndarray]) -> "Pieces":
        """Numbers as `change` makes them of these when they are read."""
        made = self.with_texts(None)
        made._change = change
        return made

    def with_texts(self, texts: pa.StringArray | None) -> "Pieces":
        """These codes, as those of other texts."""
        made = Pieces(self.file, texts)
        made.kept, made.ends = self.kept, self.ends
        return made

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return sum(kept.size for kept in self.kept) // max(1, len(self)) + 1

    def drop(self) -> None:
        """Frees what is in memory."""
        self.kept.clear()
        self._last = None


def whole(column: Pieces | pa.Array) -> pa.Array:
    return column.whole() if isinstance(column, Pieces) else column


def head(column: Pieces | pa.Array, rows: int) -> pa.Array:
    return column.head(rows) if isinstance(column, Pieces) else column[:rows]
