"""The time of both stages over a large corpus: the h-indexer's k' items, MoL's scores of these and the best k, compared
with a dot product and top-k over the same corpus.

    python -m benchmarks.two_stage [--sizes 100000,1000000,10000000] [--queries 8] [--threads 1]

Queries have been encoded. The items' MoL sides, in BF16, are those of a million random items, repeated; the vectors of
the h-indexer and of the dot product, both of width 64, are as many random unit vectors as there are items. All are
called in turn, `--repetitions` times, after a first call that does not count.
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
from logitmix.modules.stage1 import CHUNK, Int8Corpus, hindexer_topk
from logitmix.serving.topk import rank_keys

D, DISTINCT = 64, 1_000_000
CASCADE, STAGE_1, STAGE_2 = "both stages", "stage 1", "stage 2"
DOT, DOT_BF16 = "dot product in FP32, torch.topk", "dot product in BF16, torch.topk"
DOT_INT8 = "dot product in INT8, hindexer_topk"


@dataclass(frozen=True)
class Options:
    sizes: str = "100000,1000000,10000000"
    """Items of the corpus."""
    queries: int = 8
    kept: int = 100_000
    """k' of the largest corpus; others keep the same share, at least 1,000."""
    k: int = 100
    threads: int = 1
    repetitions: int = 20


@torch.no_grad()
def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = []
    for X in sizes:
        kept = min(X, max(1000, options.kept * X // max(sizes)))
        rows += [{"items": X, "kept": kept} | row for row in compared(X, kept, options)]
    setting = f"{options.queries} queries at once, k = {options.k}, {options.threads} threads; {machine()}"
    heads = ("items", "k'", "method", "p50 ms", "p99 ms", "/ both stages", "queries / s", "MB")
    forms = {"items": ",", "kept": ",", "method": "", "p50": ".1f", "p99": ".1f", "ratio": ".2f", "throughput": ".1f"}
    cells = [[f"{row[name]:{form}}" for name, form in (forms | {"mb": ".0f"}).items()] for row in rows]
    print_table(heads, cells, setting)


def random_mol(random: torch.Generator) -> MoL:
    """Returns MoL 8x8x32 with a cross gate that heeds the logits, as a trained one does."""
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


def compared(X: int, kept: int, options: Options) -> list[dict[str, float | str]]:
    random, B = torch.Generator().manual_seed(0), options.queries
    mol = random_mol(random)
    query = mol.query(torch.randn(B, D, generator=random), torch.arange(B))
    item = tuple(part.bfloat16() for part in random_items(mol, min(X, DISTINCT), random))
    item = tuple(part.repeat(-(-X // len(part)), *[1] * (part.ndim - 1))[:X] for part in item)
    vector_XH = torch.empty(X, D)
    for part in vector_XH.split(CHUNK):
        part.copy_(torch.nn.functional.normalize(torch.randn(part.shape, generator=random), dim=1))
    query_BH = torch.nn.functional.normalize(torch.randn(B, D, generator=random), dim=1)
    corpus, half_XH = Int8Corpus.of(vector_XH), vector_XH.bfloat16()
    bounds = list(range(0, B * kept + 1, kept))
    candidates_BK = hindexer_topk(query_BH, corpus, kept).items_BK

    def best_of(index_BK: Tensor) -> Tensor:
        score_P = mol.candidates(query, item, index_BK.flatten(), bounds)
        return rank_keys(score_P.view(B, kept), index_BK).topk(options.k).values

    methods: dict[str, Callable[[], object]] = {
        CASCADE: lambda: best_of(hindexer_topk(query_BH, corpus, kept).items_BK),
        STAGE_1: lambda: hindexer_topk(query_BH, corpus, kept),
        STAGE_2: lambda: best_of(candidates_BK),
        DOT: lambda: (query_BH @ vector_XH.T).topk(options.k),
        DOT_BF16: lambda: (query_BH.bfloat16() @ half_XH.T).topk(options.k),
        DOT_INT8: lambda: hindexer_topk(query_BH, corpus, options.k),
    }
    times = milliseconds(methods, options.repetitions)
    medians = {name: statistics.median(of) for name, of in times.items()}
    return [
        {
            "method": name,
            "p50": medians[name],
            "p99": sorted(times[name])[-1 - len(times[name]) // 100],
            "ratio": medians[name] / medians[CASCADE],
            "throughput": B * 1000 / medians[name],
            "mb": spent(method).peak_mb,
        }
        for name, method in methods.items()
    ]


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main(tyro.cli(Options, description=__doc__))
