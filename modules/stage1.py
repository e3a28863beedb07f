"""Stage 1 over a whole corpus (section 4.1): the K items with the largest dot products, found in INT8 in one pass.

    corpus = Int8Corpus.of(item_XH)
    found = hindexer_topk(query_BH, corpus, k=100_000)
    found.items_BK  # the K best items of each query

As in Algorithm 2, a threshold is estimated on a random sample, and one pass keeps the items that reach it. Unlike
there, exactly K items are returned: a full buffer is trimmed to its K best, and for a query that finds fewer, the
corpus is scanned again without a threshold. So the result is the exact top K of the INT8 products, whatever the sample
was. The scores of the whole corpus are never in memory. CPUs run compiled C (stage1.c), CUDA runs Triton
(stage1_triton.py); without these, plain torch gives the same items, far more slowly.

Axes: X items in the corpus, H width, B queries, K items found, R items of a part, G groups of 4 dimensions, S blocks of
a sample.
"""

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from logitmix.common.compiled import has_triton, in_threads, lazy_library

LANES, GROUP = 16, 4
"""Items of a block, and dimensions that one instruction multiplies: the corpus's layout in memory."""
LARGEST = 127
ZERO = 128
"""The byte that stands for the value 0."""
CLAMPED = 1e-4
"""Share of the numbers, the largest ones, that the corpus's scale may clamp: the others are then stored more precisely,
which raises the recall of FP32's top 1 % from 0.985 to 0.988 on unit vectors of width 64."""
NUMBERS = 2**24
"""Numbers that the scale is estimated on, at most, roughly."""
SAMPLE, SMALLEST_SAMPLE = 2**13, 2**6
"""Blocks of the sample that the threshold is estimated on: one in SAMPLED of all, within these."""
SAMPLED = 32
BLOCKS_OF_A_THREAD = 2**12
"""Fewer than this are not worth another thread."""
DEVIATIONS = 4.0
"""The threshold lets this many standard deviations more than K items pass, estimated from the sample."""
LOWERED = 4
"""How many times as many items a second threshold lets pass, on CUDA."""
PLAIN_QUERIES = 16
"""Most that CUDA scores in plain torch at once, whose arrays are large."""
PAGE, HUGE, MADV_HUGEPAGE = 2**12, 2**23, 14
CHUNK = 2**20
"""Items that are quantized, or scored in plain torch, at once."""


def rows_of_blocks(blocks: Tensor, count: int) -> Tensor:
    """Returns the first items' numbers in blocks of an Int8Corpus, uint8 [count, groups, GROUP]."""
    return blocks.transpose(1, 2).reshape(-1, blocks.shape[1], GROUP)[:count]


@dataclass(frozen=True)
class Int8Corpus:
    """Vectors of all items, quantized with one scale, so that INT32 scores have the order of the products."""

    blocks: Tensor
    """uint8 [X / 16, G, 16, 4]: blocks of 16 items, in each 4 dimensions of an item side by side; values are 128 above
    the signed ones. Zeros fill up the last block and the last group."""
    scale: float
    """A value is (byte - 128) * scale."""
    num_items: int

    @classmethod
    def of(cls, item_XH: Tensor) -> "Int8Corpus":
        """Returns the corpus of finite vectors [X, H] of any floating type. ValueError for others."""
        X, H = item_XH.shape
        if not all(part.isfinite().all() for part in item_XH.split(CHUNK)):
            raise ValueError("the items' vectors have values that are not finite")
        corpus = cls.empty(X, H, scale_of(item_XH), item_XH.device)
        for start in range(0, X, CHUNK):
            corpus.fill(start, item_XH[start : start + CHUNK])
        return corpus

    @classmethod
    def joined(cls, parts: Sequence[tuple[Tensor, int]], scale: float) -> "Int8Corpus":
        """Returns one corpus of consecutive parts, each with its blocks and number of items. A copy, if there are
        several."""
        num_items, (first, _) = sum(count for _, count in parts), parts[0]
        if len(parts) == 1:
            return cls(first, scale, num_items)
        corpus, start = cls.empty(num_items, first.shape[1] * GROUP, scale, first.device), 0
        for blocks, count in parts:
            if start % LANES == 0:
                corpus.blocks[start // LANES : start // LANES + len(blocks)] = blocks
            else:
                item_R = torch.arange(start, start + count, device=blocks.device)
                corpus.blocks[item_R // LANES, :, item_R % LANES] = rows_of_blocks(blocks, count)
            start += count
        return corpus

    @classmethod
    def empty(cls, num_items: int, width: int, scale: float, device: torch.device | str = "cpu") -> "Int8Corpus":
        """Returns a corpus of zeros, to be filled."""
        shape = (-(-num_items // LANES), -(-width // GROUP), LANES, GROUP)
        return cls(_huge(torch.empty(shape, dtype=torch.uint8, device=device)).fill_(ZERO), scale, num_items)

    def fill(self, start: int, item_RH: Tensor) -> None:
        """Quantizes items from index `start` on, a multiple of 16; values that the scale cannot hold are clamped."""
        assert start % LANES == 0
        R, H = item_RH.shape
        blocks, groups = -(-R // LANES), self.blocks.shape[1]
        padded = item_RH.new_zeros(blocks * LANES, groups * GROUP, dtype=torch.float32)
        padded[:R, :H] = item_RH
        values = _divided(padded, self.scale).round_().clamp_(-LARGEST, LARGEST).add_(ZERO).to(torch.uint8)
        values = values.view(blocks, LANES, groups, GROUP).transpose(1, 2)
        self.blocks[start // LANES : start // LANES + blocks] = values

    @property
    def width(self) -> int:
        """H, rounded up to whole groups."""
        return self.blocks.shape[1] * GROUP

    def values(self, start: int, stop: int) -> Tensor:
        """Returns the signed values of items [start, stop), FP32 [R, width]; `start` is a multiple of 16."""
        assert start % LANES == 0
        part = rows_of_blocks(self.blocks[start // LANES : -(-stop // LANES)], stop - start)
        return part.reshape(-1, self.width).float() - ZERO


def scale_of(item_XH: Tensor) -> float:
    """Returns the scale of a corpus with these vectors, or with many like them."""
    X, H = item_XH.shape
    some = item_XH[:: max(1, X * H // NUMBERS)].abs().float().flatten()
    held = float(some.kthvalue(math.ceil(len(some) * (1 - CLAMPED))).values) if len(some) else 0.0
    return (held or (float(some.max()) if len(some) else 0.0)) / LARGEST or 1.0


def _huge(memory: Tensor) -> Tensor:
    """Asks for the memory to be in pages of 2 MiB where the system has them: reading from many small ones is slower."""
    size = memory.numel() * memory.element_size()
    if sys.platform == "linux" and memory.device.type == "cpu" and size >= HUGE:
        first = -(-memory.data_ptr() // PAGE) * PAGE
        # If it fails, small pages do.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(memory.data_ptr() + size - first), MADV_HUGEPAGE
        )
    return memory


@dataclass(frozen=True)
class Found:
    """The best items of each query, by the INT8 products."""

    items_BK: Tensor
    """int64, in the order of their index; -1 after the last if fewer items are allowed."""
    scores_BK: Tensor
    """FP32, parallel to the items: the products of the quantized vectors; -inf where there is no item."""

    def ordered(self) -> "Found":
        """Returns these items with the highest scores first, the lower index first of equal ones."""
        order_BK = self.scores_BK.sort(dim=1, descending=True, stable=True).indices
        return Found(self.items_BK.gather(1, order_BK), self.scores_BK.gather(1, order_BK))


def hindexer_topk(
    query_BH: Tensor,
    corpus: Int8Corpus,
    k: int,
    allowed: Tensor | None = None,
) -> Found:
    """Returns the items [B, K] with the largest dot products; K is k, or the size of a smaller corpus.

    Each query is quantized with its own scale. `allowed` says which items may be found: bool [X] for all queries or [B,
    X], or the same as bits, uint8 [..., X / 8], the lowest bit first; k of the allowed items are found, or all if there
    are fewer. Of equal scores the item with the lower index is taken. The result does not depend on torch's number of
    threads.

    Raises ValueError for a width or a mask that does not fit, queries that are not finite, k below 1 and tensors on
    different devices.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    device = corpus.blocks.device
    if query_BH.device != device or (allowed is not None and allowed.device != device):
        raise ValueError(f"the queries and the mask must be on {device}, where the corpus is")
    K = min(k, corpus.num_items)
    query, scale_B = _quantized(query_BH, corpus)
    bits = None if allowed is None else _bits(allowed, len(query), corpus.num_items)
    if K == 0 or len(query) == 0:
        return Found(query.new_empty(len(query), K, dtype=torch.int64), scale_B.new_empty(len(query), K))
    if device.type == "cuda" and has_triton():
        return _in_triton(query, scale_B, corpus, K, bits)
    if device.type != "cpu" or _library() is None:
        return _plain(query, scale_B, corpus, K, bits)
    return _compiled(query, scale_B, corpus, K, bits)


def _quantized(query_BH: Tensor, corpus: Int8Corpus) -> tuple[Tensor, Tensor]:
    """Returns int8 [B, width], and the factor of an integer score, FP32 [B]."""
    B, H = query_BH.shape
    if not corpus.width - GROUP < H <= corpus.width:
        raise ValueError(f"the queries are {H} wide, the corpus {corpus.width}")
    if not query_BH.isfinite().all():
        raise ValueError("the queries have values that are not finite")
    largest_B = query_BH.float().abs().amax(1) if H else query_BH.new_zeros(B, dtype=torch.float32)
    scale_B = torch.where(largest_B > 0, _divided(largest_B, LARGEST), 1.0)
    values = query_BH.new_zeros(B, corpus.width, dtype=torch.int8)
    values[:, :H] = (query_BH.float() / scale_B[:, None]).round().to(torch.int8)
    return values, scale_B * corpus.scale


def _divided(x: Tensor, number: float) -> Tensor:
    """Returns x / number, rounded alike on all devices: on CUDA, torch multiplies by the reciprocal of a Python
    number."""
    return x / x.new_full((), number)


def _bits(allowed: Tensor, B: int, X: int) -> Tensor:
    """Returns the mask as bits, uint8 [1 or B, bytes]."""
    width = X if allowed.dtype == torch.bool else -(-X // 8)
    if allowed.dtype not in (torch.bool, torch.uint8) or allowed.shape not in ((width,), (B, width)):
        raise ValueError(
            f"allowed is {allowed.dtype} {list(allowed.shape)}; it must be bool, or bits as uint8, [{X} items] or "
            f"[{B} queries, {X} items]"
        )
    rows = allowed.view(-1, width)
    if allowed.dtype == torch.bool and rows.is_cpu:
        rows = torch.from_numpy(np.packbits(rows.numpy(), axis=1, bitorder="little"))
    elif allowed.dtype == torch.bool:
        bits = F.pad(rows, (0, -width % 8)).view(len(rows), -1, 8).byte()
        rows = (bits << torch.arange(8, dtype=torch.uint8, device=rows.device)).sum(2, dtype=torch.uint8)
    return rows.contiguous()


def _plain(query: Tensor, scale_B: Tensor, corpus: Int8Corpus, K: int, bits: Tensor | None) -> Found:
    """Defines the result. Sums of products of bytes are whole numbers below 2^24: exact in FP32, up to a width of
    1,040."""
    least = torch.iinfo(torch.int64).min
    key_BK = query.new_full((len(query), 0), least, dtype=torch.int64)
    for start in range(0, corpus.num_items, CHUNK):
        stop = min(start + CHUNK, corpus.num_items)
        score_BR = (query.double() @ corpus.values(start, stop).double().T).long()
        item_R = torch.arange(start, stop, device=query.device)
        # Of equal scores the lower index is the larger key.
        key_BR = (score_BR << 32) + (2**32 - 1 - item_R)
        if bits is not None:
            key_BR = key_BR.masked_fill((bits[:, item_R // 8] >> (item_R % 8) & 1) == 0, least)
        keys = torch.cat([key_BK, key_BR], dim=1)
        key_BK = keys.topk(min(K, keys.shape[1]), dim=1).values
    nothing = key_BK == least
    item_BK = (2**32 - 1 - (key_BK & 0xFFFFFFFF)).masked_fill(nothing, 2**32)
    score_BK = (key_BK >> 32) * scale_B[:, None]
    item_BK, order_BK = item_BK.sort(dim=1)
    nothing = item_BK == 2**32
    return Found(item_BK.masked_fill(nothing, -1), score_BK.gather(1, order_BK).masked_fill(nothing, -math.inf))


def _in_triton(query: Tensor, scale_B: Tensor, corpus: Int8Corpus, K: int, bits: Tensor | None) -> Found:
    # Imported only when used: it loads slowly, and a machine without a GPU may have no Triton.
    from . import stage1_triton

    blocks, left_B = corpus.blocks, torch.arange(len(query), device=query.device)
    sample_S = _sample(len(blocks), query.device)
    found = Found(query.new_empty(len(query), K, dtype=torch.int64), scale_B.new_empty(len(query), K))
    # Once more with a lower threshold for queries that it was too high for, and what is left then in plain torch.
    for aim, most in ((K, stage1_triton.QUERIES), (LOWERED * K, stage1_triton.QUERIES), (None, PLAIN_QUERIES)):
        missed = [left_B[:0]]
        for row_B in left_B.split(most) if len(left_B) else ():
            of_row = bits if bits is None or len(bits) == 1 else bits[row_B]
            if aim is None:
                part = _plain(query[row_B], scale_B[row_B], corpus, K, of_row)
            else:
                expected = _expected(aim, len(sample_S) / len(blocks))
                inputs = query[row_B], blocks, corpus.num_items, K, of_row, sample_S, *expected
                item_BK, score_BK, whole_B = stage1_triton.top(*inputs)
                part = Found(item_BK, (score_BK * scale_B[row_B, None]).masked_fill(item_BK < 0, -math.inf))
                missed.append(row_B[~whole_B])
            found.items_BK[row_B], found.scores_BK[row_B] = part.items_BK, part.scores_BK
        left_B = torch.cat(missed)
    return found


class _Scan(ctypes.Structure):
    """stage1.c's."""

    _fields_ = (
        ("corpus", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("X", "G", "B", "K", "R")),
        ("query_BH", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("allowed_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("least_B", "count_B", "score_BR", "item_BR")),
    )


class _Buffers:
    """The items that a thread has found for some queries."""

    def __init__(self, query: Tensor, corpus: Int8Corpus, K: int, bits: Tensor | None, room: int) -> None:
        B = len(query)
        self.inputs = query, corpus.blocks, bits
        self.least_B = torch.empty(B, dtype=torch.int32)
        self.count_B = torch.zeros(B, dtype=torch.int64)
        self.score_BR = torch.empty(B, room, dtype=torch.int32)
        self.item_BR = torch.empty(B, room, dtype=torch.int32)
        shape = corpus.num_items, corpus.blocks.shape[1], B, K, room
        mask = (0, 0) if bits is None else (bits.data_ptr(), bits.stride(0) if len(bits) > 1 else 0)
        found = (self.least_B, self.count_B, self.score_BR, self.item_BR)
        self.scan = _Scan(
            corpus.blocks.data_ptr(), *shape, query.data_ptr(), *mask, *(tensor.data_ptr() for tensor in found)
        )

    def result(self, scale_B: Tensor) -> Found:
        """Returns the K best of these items."""
        B, K = len(self.count_B), self.scan.K
        found = Found(torch.empty(B, K, dtype=torch.int64), torch.empty(B, K))
        _library().stage1_result(
            ctypes.byref(self.scan), scale_B.data_ptr(), found.items_BK.data_ptr(), found.scores_BK.data_ptr()
        )
        return found


def _compiled(
    query: Tensor,
    scale_B: Tensor,
    corpus: Int8Corpus,
    K: int,
    bits: Tensor | None,
    estimate: bool = True,
) -> Found:
    """Finds the items in compiled C. If `estimate` is False, no threshold is estimated first: every item is taken until
    the buffers are full."""
    blocks, library = len(corpus.blocks), _library()
    level, sample_S = min(library.stage1_level(), _BEST), _sample(blocks, query.device)
    wanted, most = _expected(K, len(sample_S) / blocks)
    workers = max(1, min(torch.get_num_threads(), blocks // BLOCKS_OF_A_THREAD))
    room = max(K, min(corpus.num_items, most)) + LANES
    parts = [_Buffers(query, corpus, K, bits, room) for _ in range(workers)]
    parts[0].least_B.fill_(torch.iinfo(torch.int32).min)
    if estimate and library.stage1_threshold(
        ctypes.byref(parts[0].scan), sample_S.data_ptr(), len(sample_S), wanted, level
    ):
        raise MemoryError("no memory for the scores of stage 1's sample")
    for part in parts[1:]:
        part.least_B.copy_(parts[0].least_B)

    def work(worker: int) -> None:
        first, last = blocks * worker // workers, blocks * (worker + 1) // workers
        library.stage1_scan(ctypes.byref(parts[worker].scan), first, last, level)

    in_threads(work, workers)
    found = _joined(parts, query, corpus, K, bits)
    result = found.result(scale_B)
    if estimate and len(missed := (found.count_B < K).nonzero().flatten()):
        of_missed = None if bits is None else bits[missed] if len(bits) > 1 else bits
        again = _compiled(query[missed], scale_B[missed], corpus, K, of_missed, estimate=False)
        result.items_BK[missed], result.scores_BK[missed] = again.items_BK, again.scores_BK
    return result


def _expected(K: int, share: float) -> tuple[int, int]:
    """Returns how many of the sampled items the threshold lets pass, and at most about how many of the corpus."""
    wanted = math.ceil(K * share + DEVIATIONS * math.sqrt(K * share)) + 1
    return wanted, math.ceil((wanted + DEVIATIONS * math.sqrt(wanted)) / share)


@functools.lru_cache(maxsize=16)
def _sample(blocks: int, device: torch.device) -> Tensor:
    """Indices [S] of blocks: one, at random, of each of S parts of the corpus; the same at each call. Cached, because
    every copy to a GPU waits for it."""
    size = min(blocks, SAMPLE, max(blocks // SAMPLED, SMALLEST_SAMPLE))
    bounds = torch.arange(size + 1) * blocks // size
    place = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (bounds[:-1] + (place * bounds.diff()).long()).to(device)


def _joined(parts: Sequence[_Buffers], query: Tensor, corpus: Int8Corpus, K: int, bits: Tensor | None) -> _Buffers:
    """Returns the items that all threads have found, in the order of the corpus."""
    if len(parts) == 1:
        return parts[0]
    counts = torch.stack([part.count_B for part in parts])
    joined = _Buffers(query, corpus, K, bits, int(counts.sum(0).max()))
    joined.least_B.zero_()
    for b, of_parts in enumerate(counts.T.tolist()):
        joined.count_B[b] = total = sum(of_parts)
        for name in ("score_BR", "item_BR"):
            pieces = [getattr(part, name)[b, :count] for part, count in zip(parts, of_parts, strict=True)]
            torch.cat(pieces, out=getattr(joined, name)[b, :total])
    return joined


_library = lazy_library(
    "logitmix.modules._stage1",
    stage1_scan=(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    stage1_result=(None, *[ctypes.c_void_p] * 4),
    stage1_threshold=(ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_int),
)


_BEST = 2
"""The best of stage1.c's levels to use, if the machine has it."""
