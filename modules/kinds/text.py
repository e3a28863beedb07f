"""Kind text: a linear map of the vector that an encoder makes of a text.

The encoder "ngrams" is latent semantic analysis of hashed n-grams: each word, up to its LONGEST_WORD characters, and
its runs of 3 to 5 characters, borders included, have one of BUCKETS by their CRC-32. A row of a sparse matrix has a
text's counts times ln((1 + texts) / (1 + texts that have it)) + 1, with norm 1. Of its truncated SVD (Halko et al.
2011), the right singular vectors times these weights are the *projection* [BUCKETS, W]. The sum of its rows for a
text's n-grams, with norm 1, is the text's vector, also of a text that comes later. Other encoders are those of plugins,
entries of TEXT_ENCODERS.

Axes: N texts, W width of their vectors, S n-grams of all texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate, chain
from typing import Any
from zlib import crc32

import numpy as np

from logitmix.common.mappings import first_line
from logitmix.common.plugins import Registry, require_plugins

from .base import FeatureNumbers, Reads
from .numbers import Vector

NGRAMS = "ngrams"
TEXT_ENCODERS = Registry[Callable[[list[str]], Any]]("encoder of texts", {})
"""Beside "ngrams": functions of a list of N texts that return their vectors, numbers [N, W]."""
BUCKETS, WIDTH, LENGTHS, LONGEST_WORD = 2**15, 64, (3, 4, 5), 64
FITTED_CHARACTERS = 2**23
"""Of texts that have more, every second, third, … one is fitted."""
AT_ONCE = 2**10
"""Texts given to an encoder at once."""
_ALONE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Kana and Han, which are written without spaces: each character counts as a word."""
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
_OVERSAMPLED, _ITERATIONS, _LEAST = 16, 4, 1e-4


class Text(Vector):
    of_texts = True
    reads: Reads = "text_vectors"
    in_request = "text, or its {width} numbers"

    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], Any]) -> list[float]:
        if not isinstance(value, str):
            return super().cell(feature, value, row_of)
        return super().cell(feature, row_of(value) if value.strip() else None, row_of)


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """What makes the vectors of a feature's texts."""

    name: str
    """NGRAMS or an entry of TEXT_ENCODERS."""
    version: str
    """The first digits of the projection's SHA-256, or the plugin and its version."""
    width: int = 0
    """W; 0 before the first texts of a plugin's encoder."""
    projection: np.ndarray | None = None
    """float32 [BUCKETS, W] of n-grams."""

    @classmethod
    def fit(cls, name: str, texts: Sequence[str]) -> TextEncoder:
        """Returns the encoder for the distinct texts of a dataset. ValueError if there is no encoder of this name."""
        if name == NGRAMS:
            projection = fit_projection(texts)
            return cls(name, sha256(projection.tobytes()).hexdigest()[:16], projection.shape[1], projection)
        if name not in TEXT_ENCODERS:
            there = ", ".join([NGRAMS, *TEXT_ENCODERS])
            raise ValueError(
                f"no encoder of texts named {name!r:.80}; there are: {there}, and those that --import adds"
            )
        plugin = TEXT_ENCODERS.plugins[name]
        return cls(name, f"{plugin.name} {plugin.version}")

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of texts, float32 [N, W]. ValueError if it is a plugin's that this process lacks, or
        returns anything else."""
        if self.projection is not None:
            return encode(texts, self.projection)
        found, width = list[np.ndarray](), self.width
        for start in range(0, len(texts), AT_ONCE):
            some = list(texts[start : start + AT_ONCE])
            found.append(self._checked(some, width))
            width = found[-1].shape[1]
        return np.concatenate(found) if found else np.empty((0, width), np.float32)

    @cached_property
    def _function(self) -> Callable[[list[str]], Any]:
        plugin, _, version = self.version.rpartition(" ")
        require_plugins({plugin: version}, f"the encoder of texts {self.name}")
        return TEXT_ENCODERS.find(self.name)

    def _checked(self, texts: list[str], width: int) -> np.ndarray:
        function = self._function
        try:
            given = np.asarray(function(texts))
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"the encoder of texts {self.name} failed for {len(texts)} texts: {said}") from None
        with np.errstate(over="ignore"):
            vectors = given.astype(np.float32) if given.dtype.kind in "iuf" else np.empty(0)
        if vectors.ndim != 2 or vectors.shape != (len(texts), width or max(1, vectors.shape[1])):
            raise ValueError(
                f"the encoder of texts {self.name} returned {given.dtype} of shape {list(given.shape)}; it must return "
                f"numbers of shape [{len(texts)}, {width or 'width'}]"
            )
        if len(wrong := np.flatnonzero(~np.isfinite(vectors).all(1))):
            text = texts[wrong[0]]
            raise ValueError(f"the encoder of texts {self.name} returned what is not finite for the text {text!r:.40}")
        return vectors


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, whatever their case."""
    return _WORD.findall(text.casefold())


@lru_cache(2**16)
def _ngrams_of_word(word: str) -> list[int]:
    padded = f"<{word}>"
    runs = (padded[at : at + size] for size in LENGTHS for at in range(len(padded) - size + 1) if size < len(padded))
    return [crc32(run.encode("utf-8", "surrogatepass")) % BUCKETS for run in chain([padded], runs)]


def ngrams_of(text: str) -> list[int]:
    """Returns the buckets of a text's n-grams."""
    return [bucket for word in words_of(text) for bucket in _ngrams_of_word(word[:LONGEST_WORD])]


def fit_projection(texts: Sequence[str]) -> np.ndarray:
    """Returns the projection of distinct texts, float32 [BUCKETS, W]: the same for the same texts, up to rounding on
    another processor. W is WIDTH, or less where the texts differ in fewer directions. Memory is that of a sparse matrix
    of at most FITTED_CHARACTERS."""
    import torch

    texts = texts[:: 1 + sum(map(len, texts)) // FITTED_CHARACTERS]
    parts = [np.unique(np.array(ngrams_of(text), np.int64), return_counts=True) for text in texts]
    rows = np.repeat(np.arange(len(parts)), [len(buckets) for buckets, _ in parts])
    if not len(rows):
        return np.zeros((BUCKETS, 1), np.float32)
    buckets, counts = (np.concatenate(of) for of in zip(*parts, strict=True))
    weight = np.log((1 + len(texts)) / (1 + np.bincount(buckets, minlength=BUCKETS))) + 1
    values = counts * weight[buckets]
    values /= np.sqrt(np.bincount(rows, values**2, len(texts)))[rows]
    indices = torch.from_numpy(np.stack([rows, buckets]))
    matrix = torch.sparse_coo_tensor(
        indices, torch.from_numpy(values.astype(np.float32)), (len(texts), BUCKETS),
        is_coalesced=True, check_invariants=True,
    )  # fmt: skip
    threads = torch.get_num_threads()
    try:
        # The order of sums, and so the bits, depend on their number.
        torch.set_num_threads(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            count = min(WIDTH + _OVERSAMPLED, len(texts))
            _, singular, right = torch.svd_lowrank(matrix, count, _ITERATIONS)
    finally:
        torch.set_num_threads(threads)
    kept = (singular > _LEAST * singular[0])[:WIDTH]
    return (right[:, :WIDTH][:, kept].numpy() * weight[:, None]).astype(np.float32)


def encode(texts: Sequence[str], projection: np.ndarray) -> np.ndarray:
    """Returns the vectors of texts, float32 [N, W]: of norm 1, or zero for one without a known n-gram."""
    import torch
    from torch.nn import functional as F

    table, found = torch.from_numpy(projection), [np.empty((0, projection.shape[1]), np.float32)]
    for start in range(0, len(texts), AT_ONCE):
        lists = [ngrams_of(text) for text in texts[start : start + AT_ONCE]]
        offsets = torch.tensor([0, *accumulate(map(len, lists))])
        bucket_S = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int64)
        sums = F.embedding_bag(bucket_S, table, offsets, mode="sum", include_last_offset=True)
        found.append(F.normalize(sums).numpy())
    return np.concatenate(found)
