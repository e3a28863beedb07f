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
_ODD = 0x9E3779B97F4A7C15
"""The base of the hash, modulo 2^64; its powers differ, and each has an inverse."""
_HASHED = 2**20
"""Texts hashed at once."""
_SHORT = 256
"""Most bytes of a text that are hashed one by one."""


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
        if "_hashed" in vars(self) and len(wanted) <= _SHORT:
            hashes, places = self._hash_views
            wanted_hash = _hash(wanted)
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
        """The indices of many texts, ABSENT for those that are not there. Equal to `find`, but by their hashes, which
        are computed once."""
        hashes, places = self._hashed
        if not texts:
            return []
        wanted = Texts.of(texts)
        hash_N = _hashes(wanted.data.numpy(), wanted.bounds.numpy())
        at_N = np.searchsorted(hashes, hash_N).clip(max=len(hashes) - 1)
        place_N = np.where(hashes[at_N] == hash_N, places[at_N], ABSENT)
        # Other texts may have the same hash.
        for at in ((place_N != ABSENT) & ~self._equal(place_N, wanted)).nonzero()[0].tolist():
            found = self.find(texts[at])
            place_N[at] = ABSENT if found is None else found
        return place_N.tolist()

    def _equal(self, place_N: np.ndarray, wanted: "Texts") -> np.ndarray:
        """Which of the texts at these indices are those of `wanted`; any for index ABSENT."""
        bounds, others = self.bounds.numpy(), wanted.bounds.numpy()
        length_N, start_N = np.diff(others), bounds[place_N.clip(min=0)]
        same_N = (place_N != ABSENT) & (bounds[place_N.clip(min=0) + 1] - start_N == length_N)
        letters = np.repeat(same_N, length_N)
        from_start = np.arange(int(others[-1])) - np.repeat(others[:-1], length_N)
        there = (np.repeat(start_N, length_N) + from_start)[letters]
        differs = np.zeros(len(letters) + 1, np.int64)
        differs[1:][letters] = self.data.numpy()[there] != wanted.data.numpy()[letters]
        differs = differs.cumsum()
        return same_N & (differs[others[1:]] == differs[others[:-1]])

    @cached_property
    def _hashed(self) -> tuple[np.ndarray, np.ndarray]:
        """uint64 [X], the texts' hashes in their order, and [X], the indices of their texts."""
        bounds, data = self.bounds.numpy(), self.data.numpy()
        parts = [slice(start, min(start + _HASHED, len(self)) + 1) for start in range(0, len(self), _HASHED)]
        hashes = [_hashes(data[bounds[part][0] : bounds[part][-1]], bounds[part] - bounds[part][0]) for part in parts]
        found = np.concatenate(hashes)
        places = found.argsort().astype(np.int32 if len(self) < 2**31 else np.int64)
        return found[places], places

    @cached_property
    def _hash_views(self) -> tuple[memoryview, memoryview]:
        hashes, places = self._hashed
        return hashes.data, places.data

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


def _hashes(data: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """uint64, of the texts that these bounds divide the data into: sums of their bytes, each times a power of _ODD that
    its place within the text gives."""
    longest = int(np.diff(bounds).max(initial=0))
    power = np.full(longest + 1, _ODD, np.uint64).cumprod()
    place = np.arange(len(data)) - np.repeat(bounds[:-1], np.diff(bounds))
    sums = np.zeros(len(data) + 1, np.uint64)
    # An empty text and one of zero bytes differ.
    np.cumsum((data.astype(np.uint64) + 1) * power[place], out=sums[1:])
    return sums[bounds[1:]] - sums[bounds[:-1]]


def _hash(text: bytes) -> int:
    """Of one text, what `_hashes` computes of many."""
    found = 0
    for byte in reversed(text):
        found = (found + byte + 1) * _ODD & 2**64 - 1
    return found
