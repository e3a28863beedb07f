"""Stage 1 over a corpus: `hindexer_topk` compared with other ways to find the K items with the largest dot products.

    python -m benchmarks.hindexer [--items 10000000] [--width 64] [--k 100000] [--batches 1,8] [--threads 1]
        [--faiss] [--alone]

Random unit vectors. The peers: FP32 products of all items and torch.topk; the same in BF16; numpy's argpartition of the
FP32 products; Algorithm 2 as the paper prints it, in plain torch on an INT8 corpus (a threshold from a sample, all
products, those that reach the threshold); with `--faiss`, its indexes. Each is called in turn, `--repetitions` times,
after a first call that does not count; times are medians of wall time. Recall is the share of FP32's exact top K that
is found. The floor is the time to read the INT8 corpus once, by summing it as 64-bit words. Memory is the peak of a
call, without the corpus.
"""

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.measure import machine, milliseconds, print_table, spent
from logitmix.modules.stage1 import CHUNK, LARGEST, Int8Corpus, hindexer_topk, scale_of

HNSW_ITEMS, IVF_LISTS = 200_000, 2**12
"""More take long to build."""
SAMPLE = 2**17
"""Items that the plain Algorithm 2 estimates its threshold on."""


@dataclass(frozen=True)
class Options:
    items: int = 10_000_000
    width: int = 64
    k: int = 100_000
    batches: str = "1,8"
    """Queries at once."""
    threads: int = 1
    repetitions: int = 5
    allowed: float = 0.5
    """Share of the items that the filter keeps."""
    faiss: bool = False
    """Compare with faiss too: flat, SQ8, IVF and, up to 200,000 items, HNSW indexes. It must be installed."""
    alone: bool = False
    """No peers, and the items in INT8 alone: 100,000,000 of them take 6.4 GB."""


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    random, X, H = torch.Generator().manual_seed(0), options.items, options.width
    parts = (
        torch.nn.functional.normalize(torch.randn(min(CHUNK, X - start), H, generator=random), dim=1)
        for start in range(0, X, CHUNK)
    )
    item_XH = None
    if options.alone:
        first = next(parts)
        corpus = Int8Corpus.empty(X, H, scale_of(first))
        for number, part_RH in enumerate(chain([first], parts)):
            corpus.fill(number * CHUNK, part_RH)
    else:
        item_XH = torch.empty(X, H)
        for start, part_RH in zip(range(0, X, CHUNK), parts, strict=True):
            item_XH[start : start + CHUNK] = part_RH
        corpus = Int8Corpus.of(item_XH)
    allowed = torch.rand(X, generator=random) < options.allowed
    peers = faiss_peers(item_XH, options) if options.faiss and item_XH is not None else {}
    rows = []
    for B in map(int, options.batches.split(",")):
        query_BH = torch.nn.functional.normalize(torch.randn(B, H, generator=random), dim=1)
        rows += _compared(query_BH, item_XH, corpus, allowed, peers, options)
    setting = f"{options.items:,} x {options.width}, k' = {options.k:,}, {options.threads} threads; {machine()}"
    print_table(("queries", "method", "ms", "/ hindexer_topk", "items", "recall", "MB"), rows, setting)


Search = Callable[[Tensor], Any]
"""Queries -> the indices that each finds."""


def faiss_peers(item_XH: Tensor, options: Options) -> dict[str, Search]:
    import faiss

    faiss.omp_set_num_threads(options.threads)
    (X, H), vectors = item_XH.shape, item_XH.numpy()
    lists = min(IVF_LISTS, int(4 * X**0.5))
    made = {"faiss flat": "Flat", "faiss SQ8": "SQ8", f"faiss IVF{lists}, 1 list in 8": f"IVF{lists},Flat"}
    if X <= HNSW_ITEMS:
        made["faiss HNSW32, ef = k'"] = "HNSW32,Flat"
    peers: dict[str, Search] = {}
    for name, kind in made.items():
        index = faiss.index_factory(H, kind, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors[: 40 * lists])
        index.add(vectors)
        if "IVF" in kind:
            index.nprobe = lists // 8
        elif "HNSW" in kind:
            index.hnsw.efSearch = options.k
        peers[name] = lambda query_BH, index=index: index.search(query_BH.numpy(), options.k)[1]  # type: ignore[misc]
    return peers


def _compared(
    query_BH: Tensor,
    item_XH: Tensor | None,
    corpus: Int8Corpus,
    allowed: Tensor,
    peers: dict[str, Search],
    options: Options,
) -> list[tuple[object, ...]]:
    k = options.k
    bits = torch.from_numpy(np.packbits(allowed.numpy(), bitorder="little"))
    methods: dict[str, Callable[[], Any]] = {
        "hindexer_topk": lambda: hindexer_topk(query_BH, corpus, k, threads=options.threads).items_BK,
        f"hindexer_topk, {options.allowed:.0%} allowed": lambda: (
            hindexer_topk(query_BH, corpus, k, bits, options.threads).items_BK
        ),
    }
    exact = None
    if item_XH is not None:
        signed_XH = (corpus.blocks.transpose(1, 2).reshape(-1, corpus.width)[: len(item_XH)] ^ 128).view(torch.int8)
        half_XH = item_XH.bfloat16()
        methods |= {
            "FP32, torch.topk": lambda: (query_BH @ item_XH.T).topk(k).indices,
            "BF16, torch.topk": lambda: (query_BH.bfloat16() @ half_XH.T).topk(k).indices,
            "FP32, numpy argpartition": lambda: np.argpartition(-(query_BH @ item_XH.T).numpy(), k, axis=1)[:, :k],
            "INT8, Algorithm 2 as printed": lambda: algorithm_2(query_BH, signed_XH, k),
        }
        methods |= {name: lambda search=search: search(query_BH) for name, search in peers.items()}  # type: ignore[misc]
        exact = torch.zeros(len(query_BH), len(item_XH), dtype=torch.bool)
        exact.scatter_(1, (query_BH @ item_XH.T).topk(k).indices, True)
    methods["read the corpus once"] = lambda: corpus.blocks.view(-1).view(torch.int64).sum()
    times = milliseconds(methods, options.repetitions)
    medians = {name: statistics.median(of) for name, of in times.items()}
    rows: list[tuple[object, ...]] = []
    for name, method in methods.items():
        times_of = len(query_BH), name, f"{medians[name]:.1f}", f"{medians[name] / medians['hindexer_topk']:.1f}"
        count = recall = mb = ""
        if name != "read the corpus once":
            mb = f"{spent(method).peak_mb:.0f}"
            found = [torch.as_tensor(part) for part in method()]
            found = [part[part >= 0] for part in found]
            count = " to ".join(f"{number:,}" for number in sorted({len(part) for part in found})[:: len(found)])
            if exact is not None and "allowed" not in name:
                recall = f"{sum(float(exact[b, part].sum()) for b, part in enumerate(found)) / exact.sum():.4f}"
        rows.append((*times_of, count, recall, mb))
    return rows


def algorithm_2(query_BH: Tensor, signed_XH: Tensor, k: int) -> list[Tensor]:
    """A straightforward form of the paper's Algorithm 2: the items of each query, around k of them."""
    scale_B = query_BH.abs().amax(1, keepdim=True) / LARGEST
    query = (query_BH / scale_B).round()
    X = len(signed_XH)
    sample = torch.randint(0, X, (SAMPLE,), generator=torch.Generator().manual_seed(0))
    wanted = max(1, math.ceil(k * SAMPLE / X))
    least_B = (query @ signed_XH[sample].float().T).topk(wanted).values[:, -1]
    found: list[list[Tensor]] = [[] for _ in query]
    for start in range(0, X, CHUNK):
        score_BR = query @ signed_XH[start : start + CHUNK].float().T
        for b, least in enumerate(least_B):
            found[b].append((score_BR[b] >= least).nonzero().flatten() + start)
    return [torch.cat(parts) for parts in found]


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main(tyro.cli(Options, description=__doc__))
