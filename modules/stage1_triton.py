"""Stage 1's top K for CUDA: what stage1.py describes, as two Triton kernels.

Axes: X items in the corpus, W width, G groups of 4 dimensions, B queries, K items found, R places of a buffer, S blocks
of 16 items (LANES), N tiles.

A program scores a tile of blocks for all queries, at most 64, in one product of bytes on tensor cores. The tile lies in
one piece and is read once, 16 bytes a thread, then permuted to [items, W] on chip. With 10 million items of width 64
these are 640 MB, beside which all other bytes are few. Items that reach the threshold go into the query's buffer, where
a program reserves places by one atomic addition for each query. So the tiles come in any order, and each notes where
its items begin and how many they are. A second kernel puts the tiles into order, which costs the bytes of the
candidates alone, and torch keeps the K best. A candidate is a key: its score above, its index below, so that no two are
equal. The result is the same at each call, to the last bit.

The threshold comes from a sample of blocks, scored by the same kernel. The caller is told where it was too high or a
buffer too small. A buffer has twice as many places as are expected to be needed; large numbers of equal scores, above
all, can need more.

Its tests have passed on an H100 (benchmarks/notes/h100.md); for A100 and B200 it has only been compiled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-(2**31))
"""The threshold that all items reach, and the score of a sampled item that may not be found."""
QUERIES, LEAST_QUERIES = 64, 8
"""Queries of a product; they are padded to a power of two."""
SCORES, WARPS = 4096, 8
"""Of a tile: items times padded queries."""
GROUPS, LEAST_GROUPS = 16, 8
"""Groups that are multiplied at once."""
ROOM = 2
"""Places of a buffer for each item that is expected at most."""
TILES, SLOTS = 64, 16
"""Tiles that a program puts into order, and items of each that it moves at once."""
BUDGET = {"_scan": (2, 0), "_order": (2, 0)}
"""Programs that share a multiprocessor, at least, and bytes that a thread spills, at most: benchmarks/kernels.py."""


def top(
    query: Tensor, blocks: Tensor, X: int, K: int, bits: Tensor | None, sample_S: Tensor, wanted: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Items of the K largest products, int64 [B, K], in the order of their index, with -1 after the last; the products,
    int64 [B, K]; for which queries [B] these are right.

    query: int8 [B, W], B at most QUERIES. blocks: those of an Int8Corpus of X items, K or more. bits: which ones may be
    found, uint8 [1 or B, X / 8], the lowest bit first, or None for all. The threshold lets the `wanted` best items of
    the blocks sample_S pass, and is expected to let no more than `most` of the corpus pass.
    """
    B, device = len(query), query.device
    scan = _Scan(query, blocks, X, bits)
    R = max(K, min(X, ROOM * most))
    least_B = torch.full((B,), LOWEST.value, dtype=torch.int32, device=device)
    if wanted < len(sample_S) * blocks.shape[2]:
        least_B = _last(scan.of_sample(sample_S), wanted).squeeze(1)
    count_B, key_BR, start_BN, count_BN = scan.of_corpus(least_B, R)
    whole_B = ((count_B >= K) | (least_B == LOWEST.value)) & (count_B <= R)

    places, N = max(K, min(R, int(count_B.max()))), count_BN.shape[1]
    # Places without an item have the lowest keys, and the later ones the lower.
    nothing = torch.iinfo(torch.int64).min
    ordered = (nothing + torch.arange(places - 1, -1, -1, device=device)).repeat(B, 1)
    first_BN = count_BN.cumsum(1, dtype=torch.int32) - count_BN
    with torch.cuda.device_of(query):
        _order[(triton.cdiv(N, TILES), B)](
            key_BR, start_BN, count_BN, first_BN, ordered, N, R, places, TILES=TILES, SLOTS=SLOTS
        )
    key_BK = ordered[ordered >= _last(ordered, K)].view(B, K)
    item_BK = (~key_BK & 0xFFFFFFFF).masked_fill(key_BK < nothing + places, -1)
    return item_BK, key_BK >> 32, whole_B


def _last(score: Tensor, count: int) -> Tensor:
    """The lowest of each row's largest numbers, [B, 1]."""
    return score.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)


class _Scan:
    """Some queries over a corpus."""

    def __init__(self, query: Tensor, blocks: Tensor, X: int, bits: Tensor | None) -> None:
        self.query, self.blocks, self.X, self.bits = query, blocks, X, bits
        self.padded = max(LEAST_QUERIES, triton.next_power_of_2(len(query)))
        self.blocks_of_tile = SCORES // self.padded // blocks.shape[2]

    def of_sample(self, sample_S: Tensor) -> Tensor:
        """Scores of the sampled items, int32 [B, S * 16]; LOWEST for those that may not be found."""
        score = self.query.new_empty(len(self.query), len(sample_S) * self.blocks.shape[2], dtype=torch.int32)
        self._launch(sample_S, len(sample_S), score.shape[1], score, *[score] * 5)
        return score

    def of_corpus(self, least_B: Tensor, R: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """How many items reach the threshold, int32 [B]; the keys of R of them, tile by tile, int64 [B, R]; where a
        tile's begin and how many they are, int32 [B, N]."""
        B, S = len(self.query), len(self.blocks)
        count_B, key_BR = torch.zeros_like(least_B), least_B.new_empty(B, R, dtype=torch.int64)
        start_BN, count_BN = (least_B.new_empty(B, triton.cdiv(S, self.blocks_of_tile)) for _ in range(2))
        self._launch(None, S, R, least_B, least_B, count_B, key_BR, start_BN, count_BN)
        return count_B, key_BR, start_BN, count_BN

    def _launch(self, sample_S: Tensor | None, S: int, R: int, *buffers: Tensor) -> None:
        blocks, bits, sampled = self.blocks, self.bits, sample_S is not None
        _, G, lanes, group = blocks.shape
        stride = 0 if bits is None or len(bits) == 1 else bits.stride(0)
        with torch.cuda.device_of(blocks):
            _scan[(triton.cdiv(S, self.blocks_of_tile),)](
                blocks, self.query, blocks if sample_S is None else sample_S, blocks if bits is None else bits, stride,
                *buffers, self.X, S, len(self.query), R, LANES=lanes, GROUP=group, G=G,
                GROUPS=min(GROUPS, max(LEAST_GROUPS, triton.next_power_of_2(G))), QUERIES=self.padded,
                BLOCKS=self.blocks_of_tile, SAMPLED=sampled, FILTERED=bits is not None, ASSEMBLY=blocks.is_cuda,
                num_warps=WARPS, maxnreg=65536 // 2 // 32 // WARPS,  # two programs of a multiprocessor
            )  # fmt: skip


@triton.jit
def _signed(values, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    if ASSEMBLY:  # four in one instruction
        return tl.inline_asm_elementwise("xor.b32 $0, $1, 0x80808080;", "=r,r", [values], tl.int8, True, 4)
    else:
        return (values ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def _ones(bits, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the low 16 bits."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], tl.int32, True, 1)
    else:
        bits = (bits & 0x5555) + ((bits >> 1) & 0x5555)
        bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
        bits = (bits & 0x0F0F) + ((bits >> 4) & 0x0F0F)
        return (bits & 0xFF) + (bits >> 8)


@triton.jit(do_not_specialize=["X", "S", "B", "R", "allowed_stride"])
def _scan(  # type: ignore[no-untyped-def]
    blocks, query, sample, allowed, allowed_stride, score, least, count, key, tile_start, tile_count, X, S, B, R,
    LANES: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr, SAMPLED: tl.constexpr, FILTERED: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Scores of a sample [B, R]; or keys of what reaches the threshold, of whole tiles while there are places."""
    P: tl.constexpr = BLOCKS * LANES
    WIDTH: tl.constexpr = GROUPS * GROUP
    s = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    block = tl.load(sample + s, mask=s < S, other=0) if SAMPLED else s.to(tl.int64)
    b, h = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    g, byte = tl.arange(0, GROUPS), tl.arange(0, LANES * GROUP)
    product = tl.zeros((P, QUERIES), tl.int32)
    for first in range(0, G, GROUPS):
        at = blocks + ((block[:, None] * G + first + g[None, :]) * (LANES * GROUP))[:, :, None] + byte[None, None, :]
        values = tl.load(at, mask=((s < S)[:, None] & (first + g < G)[None, :])[:, :, None], other=0)
        values = _signed(values, ASSEMBLY).reshape(BLOCKS, GROUPS, LANES, GROUP)
        item_PW = tl.permute(values, (0, 2, 1, 3)).reshape(P, WIDTH)
        w = first * GROUP + h
        query_WB = tl.load(
            query + b[None, :] * (G * GROUP) + w[:, None], mask=(b < B)[None, :] & (w < G * GROUP)[:, None], other=0
        )
        product = tl.dot(item_PW, query_WB, product, out_dtype=tl.int32)

    product = product.reshape(BLOCKS, LANES, QUERIES)
    lane = tl.arange(0, LANES)
    x = block.to(tl.int32)[:, None] * LANES + lane[None, :]
    row_B = b.to(tl.int64)
    passes = (x < X)[:, :, None] & (b < B)[None, None, :]
    if not SAMPLED:
        passes &= product >= tl.load(least + b, mask=b < B, other=0)[None, None, :]
    if FILTERED:
        bits = tl.load(allowed + (row_B * allowed_stride)[None, None, :] + (x // 8)[:, :, None], mask=passes, other=0)
        passes &= ((bits >> (x % 8).to(tl.uint8)[:, :, None]) & 1) != 0
    if SAMPLED:
        place = (s[:, None] * LANES + lane[None, :])[:, :, None]
        at = score + (row_B * R)[None, None, :] + place
        tl.store(at, tl.where(passes, product, LOWEST), mask=(place < R) & (b < B)[None, None, :])
    else:
        # A block's items as bits, and above them their number.
        ONE: tl.constexpr = 2**LANES
        taken = tl.sum(tl.where(passes, ((1 << lane) + ONE)[None, :, None], 0), 1)
        number_SB = taken // ONE
        number = tl.sum(number_SB, 0)
        start = tl.atomic_add(count + b, number, mask=b < B, sem="relaxed")
        fits = start + number <= R
        before_SB = start[None, :] + tl.cumsum(number_SB, 0) - number_SB
        before = _ones(taken[:, None, :] & ((1 << lane) - 1)[None, :, None], ASSEMBLY)
        at = key + (row_B * R)[None, None, :] + (before_SB[:, None, :] + before)
        # Of equal scores the lower index is the larger key.
        keys = (product.to(tl.int64) << 32) | (-1 - x).to(tl.uint32).to(tl.int64)[:, :, None]
        tl.store(at, keys, mask=passes & fits[None, None, :])
        at = row_B * tl.num_programs(0) + tl.program_id(0)
        tl.store(tile_start + at, start, mask=b < B)
        tl.store(tile_count + at, tl.where(fits, number, 0), mask=b < B)


@triton.jit(do_not_specialize=["N", "R", "places"])
def _order(  # type: ignore[no-untyped-def]
    key, start, count, first, ordered, N, R, places, TILES: tl.constexpr, SLOTS: tl.constexpr
):
    """Copies each tile's items to their place among all."""
    n = tl.program_id(0) * TILES + tl.arange(0, TILES)
    b = tl.program_id(1).to(tl.int64)
    start_N = tl.load(start + b * N + n, mask=n < N, other=0)[:, None]
    count_N = tl.load(count + b * N + n, mask=n < N, other=0)
    first_N = tl.load(first + b * N + n, mask=n < N, other=0)[:, None]
    for slots in range(0, tl.max(count_N, 0), SLOTS):
        slot = (slots + tl.arange(0, SLOTS))[None, :]
        moved = slot < count_N[:, None]
        tl.store(ordered + b * places + first_N + slot, tl.load(key + b * R + start_N + slot, mask=moved), mask=moved)
