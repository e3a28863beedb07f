"""Stage 2 of retrieval, MoL's scores of queries with candidates of their own: the compiled pass beside plain torch.

    python -m benchmarks.mol_scoring [--items 1000000] [--queries 8] [--candidates 100000] [--threads 1]

MoL 8x8x32 with random weights; each query has other candidates, in ascending order. The peer is `MoL.all_pairs` in
plain torch, query after query, on gathered rows, in chunks, in FP32 and under BF16 autocast. Each is called in turn,
`--repetitions` times, after a first call that does not count; times are medians of wall time. Memory is the peak of a
call beside the items' cache. The error is that of the scores to plain torch's in FP32, by its standard deviation over
the candidates; recall is the share of plain torch's best 100 candidates that are among the best 100.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor

from benchmarks.measure import machine, milliseconds, print_table, spent
from logitmix.modules.config import MoLConfig
from logitmix.modules.losses.blockwise import Side
from logitmix.modules.similarity.mol import MoL

D, BEST = 64, 100
CHUNK = 2**14
REFERENCE = "plain torch, FP32"


@dataclass(frozen=True)
class Options:
    items: int = 1_000_000
    queries: int = 8
    candidates: int = 100_000
    threads: int = 1
    repetitions: int = 5


@torch.no_grad()
def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    random = torch.Generator().manual_seed(0)
    mol, K = random_mol(random), options.candidates
    query = mol.query(torch.randn(options.queries, D, generator=random), torch.arange(options.queries))
    item = random_items(mol, options.items, random)
    index_BK = torch.stack(
        [torch.randperm(options.items, generator=random)[:K].sort().values for _ in range(options.queries)]
    )
    item_P, bounds = index_BK.flatten(), list(range(0, index_BK.numel() + 1, K))
    methods: dict[str, Callable[[], Tensor]] = {}
    for name, stored in caches(item).items():
        of_query, of_item = stored(query)
        methods[f"compiled, {name} cache"] = lambda q=of_query, i=of_item: mol.candidates(q, i, item_P, bounds)  # type: ignore[misc]
    methods[REFERENCE] = lambda: plain(mol, query, item, index_BK)
    methods["plain torch, BF16 autocast"] = lambda: plain(mol, query, item, index_BK, torch.bfloat16)
    times = milliseconds(methods, options.repetitions)
    medians = {name: statistics.median(of) for name, of in times.items()}
    expected = methods[REFERENCE]().view(options.queries, K)
    rows = []
    for name, method in methods.items():
        found, peak = method().view(options.queries, K), spent(method).peak_mb
        best = found.topk(min(BEST, K)).indices[:, :, None] == expected.topk(min(BEST, K)).indices[:, None]
        error, recall = float((found - expected).std() / expected.std()), float(best.any(1).float().mean())
        ratio = medians[REFERENCE] / medians[name]
        rows.append((name, f"{medians[name]:.0f}", f"{ratio:.1f}", f"{peak:.0f}", f"{error:.1e}", f"{recall:.3f}"))
    setting = f"{options.queries} x {K:,} of {options.items:,} items, {options.threads} threads; {machine()}"
    print_table(("method", "ms", f"{REFERENCE} / method", "MB", "error", "recall@100"), rows, setting)


def random_mol(random: torch.Generator) -> MoL:
    """With a cross gate that heeds the logits, as a trained one does."""
    mol = MoL(D, MoLConfig(query_components=8, item_components=8, component_dim=32, gate_hidden=128)).eval()
    mol.reset_parameters(random)
    for parameter in mol.cross_gate.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return mol


def random_items(mol: MoL, count: int, random: torch.Generator) -> Side:
    sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
    parts = [mol.item(torch.randn(size, D, generator=random), torch.arange(size)) for size in sizes]
    components, weights = zip(*parts, strict=True)
    return torch.cat(components), torch.cat(weights)


def caches(item: Side) -> dict[str, Callable[[Side], tuple[Side, Side]]]:
    """By precision, what an export stores: from the query's side, both sides as `MoL.candidates` takes them."""
    components, weights = item
    scale = float(components.abs().max()) / 127
    stored: dict[str, Side] = {
        "FP32": item,
        "BF16": (components.bfloat16(), weights.bfloat16()),
        "FP16": (components.half(), weights.half()),
        "INT8": ((components / scale).round().to(torch.int8), weights.bfloat16()),
    }
    return {
        name: lambda query, of=of, by=scale if name == "INT8" else 1.0: ((query[0] * by, *query[1:]), of)  # type: ignore[misc]
        for name, of in stored.items()
    }


def plain(mol: MoL, query: Side, item: Side, index_BK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    parts = []
    # With gradients on, `all_pairs` is in plain torch; nothing here requires any.
    with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        for b, index_K in enumerate(index_BK):
            one = tuple(part[b : b + 1] for part in query)
            for index_N in index_K.split(CHUNK):
                parts.append(mol.all_pairs(one, tuple(part[index_N] for part in item))[0].detach())
    return torch.cat(parts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main(tyro.cli(Options, description=__doc__))
