"""FLOPs per (x, u) of each similarity at the settings of the paper's appendix A, beside those of its table.

    python -m benchmarks.flops

Counted from the layers' matrix products, a multiply-add is one, and K is 1024, which makes the table's row
for MLP exact. Three parts: what is computed once for a query, once for an item (which serving caches), and for each
pair. The table's column to compare with counts item and pair; for MLP, whose first layer it does not decompose, also
the query.
"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from logitmix.modules.config import DeepFMConfig, MLPConfig, MoLConfig, NeuMFConfig, SimilarityConfig
from logitmix.modules.similarity.build import build_similarity


@dataclass(frozen=True)
class Flops:
    """Multiply-adds of matrix products: once per query, once per item, and per pair."""

    query: int
    item: int
    pair: int


@dataclass(frozen=True)
class Setting:
    """A dataset of appendix A: width d, and the settings of each method there with the table's "Inference FLOPs per
    (x, u)", in thousands; for MoL also those that cannot be cached."""

    dim: int
    methods: dict[str, tuple[SimilarityConfig, float]]
    not_cacheable: float


def _setting(dim: int, mlp: int, hidden: int, mol: MoLConfig, table: list[float], not_cacheable: float) -> Setting:
    deepfm = DeepFMConfig(
        query_components=mol.query_components,
        item_components=mol.item_components,
        projection_hidden=mol.projection_hidden,
        hidden=hidden,
    )
    configs = [MLPConfig(hidden=mlp), NeuMFConfig(hidden=hidden, final_hidden=hidden), deepfm, mol]
    methods = dict(zip(("MLP", "NeuMF", "DeepFM", "MoL"), zip(configs, table, strict=True), strict=True))
    return Setting(dim, methods, not_cacheable)


_LARGE, _SMALL = MoLConfig(), MoLConfig(query_components=4, item_components=4, projection_hidden=0)
PAPER = {
    "ML-1M": _setting(50, 512, 256, _LARGE, [50.5, 49.3, 197.6, 211.7], 32.9),
    "ML-20M": _setting(256, 512, 256, _LARGE, [256.5, 152.3, 405, 445.3], 33.1),
    "Beauty": _setting(50, 128, 128, _SMALL, [12.6, 24.6, 10.7, 12.9], 4.4),
    "Books": _setting(64, 256, 256, _LARGE, [32.3, 56.3, 203.6, 227.6], 21.5),
}


def flops(dim: int, config: SimilarityConfig) -> Flops:
    """Of one query, one item and one pair, which are computed."""
    similarity = build_similarity(dim, config)
    vector_1D, row_1 = torch.zeros(1, dim), torch.zeros(1, dtype=torch.int64)
    counts = []
    with FlopCounterMode(display=False) as counter:
        query = similarity.query(vector_1D, row_1)
        counts.append(counter.get_total_flops())
        item = similarity.item(vector_1D, row_1)
        counts.append(counter.get_total_flops())
        similarity.all_pairs(query, item)
        counts.append(counter.get_total_flops())
    query_flops, item_flops, pair_flops = counts[0], counts[1] - counts[0], counts[2] - counts[1]
    return Flops(query_flops // 2, item_flops // 2, pair_flops // 2)


def main() -> None:
    table = Table("dataset", "d", "method", "query", "item", "pair", "item + pair", "paper", title="K multiply-adds")
    for name, of in PAPER.items():
        for method, (config, paper) in of.methods.items():
            row = flops(of.dim, config)
            cells = [f"{part / 1024:.1f}" for part in (row.query, row.item, row.pair, row.item + row.pair)]
            note = f" ({of.not_cacheable} not cacheable)" if method == "MoL" else ""
            table.add_row(name, str(of.dim), method, *cells, f"{paper}{note}")
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
