"""Tensors in pieces, in safetensors files: every rank writes the pieces that it holds, and ranks of any number read the
parts that they need.

A piece is a rectangle of a tensor. Its name in a file is NAME@ROW,COLUMN, where it begins in the tensor; NAME@ is that
of a single number.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from logitmix.common.files import require_tensors

BLOCK_BYTES = 2**25
"""Bytes of a tensor that are copied at once, from another device or to another layout."""
ALIGNMENT = 64
"""Of the first tensor in a file: torch maps tensors where they lie."""

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}
"""Those of tables, weights and optimizers, and of ids."""


class Rectangle(NamedTuple):
    """A rectangle of a tensor: the place of its first element, and its values."""

    place: tuple[int, ...]
    values: Tensor

    def copied(self) -> "Rectangle":
        """The rectangle with its values in memory of their own, on the CPU."""
        return Rectangle(self.place, self.values.to("cpu", copy=True))


class Kind(NamedTuple):
    """Dtype and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile:
    """A file of pieces that is to be written; it holds them by reference."""

    def __init__(self, pieces: Mapping[str, Sequence[Rectangle]]) -> None:
        named = {
            f"{name}@{','.join(map(str, piece.place))}": piece.values.detach()
            for name, of in pieces.items()
            for piece in of
        }
        # Numbers of several sizes stay aligned where the widest come first.
        self.tensors = dict(sorted(named.items(), key=lambda entry: -entry[1].itemsize))
        entries, end = {}, 0
        for name, tensor in self.tensors.items():
            start, end = end, end + tensor.nbytes
            shape = list(tensor.shape)
            entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        header = json.dumps(entries).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        self.header = len(header).to_bytes(8, "little") + header
        self.bytes = len(self.header) + end

    def parts(self) -> Iterator[memoryview]:
        """The file's content, some at a time."""
        yield memoryview(self.header)
        for tensor in self.tensors.values():
            rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
            row_bytes = max(1, rows.itemsize * rows.shape[1:].numel())
            for block in rows.split(max(1, BLOCK_BYTES // row_bytes)):
                flat = block.cpu().contiguous().view(-1).view(torch.uint8)
                yield memoryview(flat.numpy())


class SavedTensors:
    """The tensors of some files by name, mapped into memory. ValueError if a file is not one of pieces."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.pieces: dict[str, list[Rectangle]] = {}
        for path in files:
            for key, values in _mapped(path):
                name, _, place = key.rpartition("@")
                if not name or not re.fullmatch(r"(\d{1,18}(,\d{1,18})*)?", place, re.ASCII):
                    raise ValueError(f"{path}: {key!r} does not name a piece of a tensor")
                at = tuple(map(int, filter(None, place.split(","))))
                self.pieces.setdefault(name, []).append(Rectangle(at, values))

    def check(self, expected: Mapping[str, Kind], beside: tuple[str, ...] = ()) -> None:
        """ValueError that names the first tensor that is missing, not known, or of another dtype or shape. Tensors
        whose names begin as in `beside` are not checked."""
        for name, kind in expected.items():
            if name not in self.pieces:
                raise ValueError(f"it has no tensor {name}")
            if problem := _misfit(self.pieces[name], kind):
                raise ValueError(f"its tensor {name} {problem}")
        for name in self.pieces:
            if name not in expected and not name.startswith(beside):
                raise ValueError(f"it has a tensor {name}, which the model does not have")

    def read(self, name: str, place: Sequence[int], out: Tensor) -> None:
        """Fills `out` with the rectangle of a checked tensor that begins at `place`."""
        for saved, values in self.pieces[name]:
            starts = [max(a, b) for a, b in zip(saved, place, strict=True)]
            stops = [min(a + n, b + m) for a, n, b, m in zip(saved, values.shape, place, out.shape, strict=True)]
            if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                out[_slices(starts, stops, place)].copy_(values[_slices(starts, stops, saved)])


def _mapped(path: Path) -> list[tuple[str, Tensor]]:
    require_tensors(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118 (it is no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from None


def _misfit(pieces: Sequence[Rectangle], kind: Kind) -> str:
    """What is wrong with the pieces of a tensor; empty if they fill it."""
    shape = list(kind.shape)
    for piece in pieces:
        if piece.values.dtype != kind.dtype:
            return f"is {piece.values.dtype}, but the model's is {kind.dtype}"
        if not len(piece.place) == piece.values.ndim == len(shape):
            return f"has pieces with another number of dimensions than the model's, which is {shape}"
    ends = [[a + n for a, n in zip(piece.place, piece.values.shape, strict=True)] for piece in pieces]
    if (found := [max(of) for of in zip(*ends, strict=True)]) != shape:
        return f"is {found}, but the model's is {shape}"
    if sum(piece.values.numel() for piece in pieces) != math.prod(shape):
        return "has pieces that overlap or leave a gap"
    return ""


def _slices(starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for start, stop, at in zip(starts, stops, origin, strict=True))
