"""Stage 1 over a corpus: `hindexer_topk` compared with other ways to find the K items with the largest dot products.

    python -m benchmarks.hindexer [--items 10000000] [--width 64] [--k 100000] [--batches 1,8] [--threads 1] [--json]

Random unit vectors. The peers: FP32 products of all items and torch.topk; the same in BF16; numpy's argpartition of the
FP32 products; Algorithm 2 as the paper prints it, in plain torch on an INT8 corpus (a threshold from a sample, all
products, those that reach the threshold). Each is called in turn, `--repetitions` times, after a first call that does
not count; times are medians of wall time. Recall is the share of FP32's exact top K that is found. The floor is the
time to read the INT8 corpus once, by summing it as 64-bit words. Memory is the peak of a call, without the corpus.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import machine, spent
from logitmix.modules.stage1 import CHUNK, LARGEST, Int8Corpus, hindexer_topk

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
    json: bool = False
    """Print JSON."""


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    random = torch.Generator().manual_seed(0)
    item_XH = torch.empty(options.items, options.width)
    for part in item_XH.split(CHUNK):
        part.copy_(torch.nn.functional.normalize(torch.randn(part.shape, generator=random), dim=1))
    corpus = Int8Corpus.of(item_XH)
    allowed = torch.rand(options.items, generator=random) < options.allowed
    rows = []
    for B in map(int, options.batches.split(",")):
        query_BH = torch.nn.functional.normalize(torch.randn(B, options.width, generator=random), dim=1)
        rows += _compared(query_BH, item_XH, corpus, allowed, options)
    setting = f"{options.items:,} x {options.width}, k' = {options.k:,}, {options.threads} threads; {machine()}"
    if options.json:
        print(json.dumps({"setting": setting, "rows": rows}))
        return
    table = Table("queries", "method", "ms", "/ hindexer_topk", "items", "recall", "MB", title=setting)
    for row in rows:
        shown = (f"{row['ms']:.1f}", f"{row['ratio']:.1f}", row["found"], row["recall"], row["mb"])
        table.add_row(str(row["queries"]), str(row["method"]), *map(str, shown))
    Console(width=120).print(table)


def _compared(
    query_BH: Tensor, item_XH: Tensor, corpus: Int8Corpus, allowed: Tensor, options: Options
) -> list[dict[str, object]]:
    k, signed_XH = options.k, (corpus.blocks.transpose(1, 2).reshape(-1, corpus.width)[: len(item_XH)] ^ 128)
    signed_XH, half_XH = signed_XH.view(torch.int8), item_XH.bfloat16()
    bits = torch.from_numpy(np.packbits(allowed.numpy(), bitorder="little"))
    methods: dict[str, Callable[[], object]] = {
        "hindexer_topk": lambda: hindexer_topk(query_BH, corpus, k, threads=options.threads).items_BK,
        f"hindexer_topk, {options.allowed:.0%} allowed": lambda: (
            hindexer_topk(query_BH, corpus, k, bits, options.threads).items_BK
        ),
        "FP32, torch.topk": lambda: (query_BH @ item_XH.T).topk(k).indices,
        "BF16, torch.topk": lambda: (query_BH.bfloat16() @ half_XH.T).topk(k).indices,
        "FP32, numpy argpartition": lambda: np.argpartition(-(query_BH @ item_XH.T).numpy(), k, axis=1)[:, :k],
        "INT8, Algorithm 2 as printed": lambda: algorithm_2(query_BH, signed_XH, k),
        "read the corpus once": lambda: corpus.blocks.view(-1).view(torch.int64).sum(),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for repetition in range(options.repetitions + 1):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            if repetition:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(of) for name, of in times.items()}
    exact = torch.zeros(len(query_BH), len(item_XH), dtype=torch.bool)
    exact.scatter_(1, (query_BH @ item_XH.T).topk(k).indices, True)
    rows: list[dict[str, object]] = []
    for name, method in methods.items():
        row: dict[str, object] = {"queries": len(query_BH), "method": name, "ms": medians[name] * 1000}
        row |= {"ratio": medians[name] / medians["hindexer_topk"], "found": "", "recall": "", "mb": ""}
        if name != "read the corpus once":
            row["mb"] = f"{spent(method).peak_mb:.0f}"
            found = [torch.as_tensor(part) for part in method()]  # type: ignore[attr-defined]
            row["found"] = " to ".join(f"{count:,}" for count in sorted({len(part) for part in found})[:: len(found)])
            if "allowed" not in name:
                row["recall"] = f"{sum(float(exact[b, part].sum()) for b, part in enumerate(found)) / exact.sum():.4f}"
        rows.append(row)
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
