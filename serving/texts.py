"""Many texts in a few tensors, which can stay mapped from their file.

Axes: X texts.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

FEW = 64
"""Texts below which finding each takes less time than finding all together."""
ABSENT = -1


@dataclass(frozen=True, eq=False)
class Texts(Sequence[str]):
    """X texts. Unpaired surrogates are preserved."""

    data: Tensor
    """uint8: the texts in UTF-8, one after the other."""
    bounds: Tensor
    """int64 [X + 1]: text i is data[bounds[i] : bounds[i + 1]]."""
    order: Tensor | None = None
    """int64 [X]: the texts' indices in the order of their bytes; required by `find`."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Texts":
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        data = torch.frombuffer(bytearray(b"".join(encoded)) or bytearray(1), dtype=torch.uint8)
        lengths = torch.tensor([0, *map(len, encoded)])
        return cls(data[: int(lengths.sum())], lengths.cumsum(0))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return self.encoded(range(len(self))[index]).decode("utf-8", "surrogatepass")

    def encoded(self, index: int) -> bytes:
        data, bounds, _ = self._views
        return bytes(data[bounds[index] : bounds[index + 1]])

    def find(self, text: str) -> int | None:
        """The index of a text; None if it is not there. It is found by its hash where `places` has computed these, in a
        fraction of the time."""
        order, wanted = self._views[2], text.encode("utf-8", "surrogatepass")
        assert order is not None
        if "_hashed" in vars(self):
            hashes, places = self._hashed
            wanted_hash = hash(wanted)
            place = bisect_left(hashes, wanted_hash)
            if place == len(self) or hashes[place] != wanted_hash:
                return None
            # Other texts may have the same hash.
            if self.encoded(index := places[place]) == wanted:
                return index
        place = bisect_left(range(len(self)), wanted, key=lambda place: self.encoded(order[place]))
        index = order[place] if place < len(self) else -1
        return index if index >= 0 and self.encoded(index) == wanted else None

    def places(self, texts: Sequence[str]) -> list[int]:
        """The indices of many texts, ABSENT for those that are not there, by their hashes, which are computed once."""
        _ = self._hashed
        return [ABSENT if (index := self.find(text)) is None else index for text in texts]

    @cached_property
    def _hashed(self) -> tuple[memoryview, memoryview]:
        """int64 [X], the texts' hashes in their order, and [X], the indices of their texts."""
        hashes = np.fromiter((hash(self.encoded(index)) for index in range(len(self))), np.int64, len(self))
        places = hashes.argsort().astype(np.int32 if len(self) < 2**31 else np.int64)
        return hashes[places].data, places.data

    def containing(self, part: str, start: int, stop: int) -> Iterator[int]:
        """Which of the texts start, …, stop - 1 contain `part`, which is not empty: their rising indices. Lower and
        upper case are alike."""
        assert part
        forms = [sorted({letter, letter.lower(), letter.upper()}) for letter in part]
        either = "".join(f"(?:{'|'.join(map(re.escape, of))})" for of in forms)
        wanted = re.compile(either.encode("utf-8", "surrogatepass"))
        data, bounds, _ = self._views
        place, end = bounds[start], bounds[stop]
        while found := wanted.search(data, place, end):
            index = bisect_right(bounds, found.start()) - 1
            inside = found.end() <= bounds[index + 1]
            # Where one text ends and the next begins, the data may hold what neither of them does.
            place = bounds[index + 1] if inside else found.start() + 1
            if inside:
                yield index

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview | None]:
        """data, bounds and order, of which an element is read in a tenth of the time that a tensor's takes."""
        order = None if self.order is None else self.order.numpy().data
        return self.data.numpy().data, self.bounds.numpy().data, order

    def problem(self) -> str | None:
        """What is wrong with the tensors' values, given that types and shapes are right."""
        lengths = self.bounds.diff()
        if int(self.bounds[0]) != 0 or int(self.bounds[-1]) != len(self.data) or bool((lengths < 0).any()):
            return "bounds do not divide their data"
        if self.order is not None and len(self) and not 0 <= int(self.order.min()) <= int(self.order.max()) < len(self):
            return "order names texts that are not there"
        return None
