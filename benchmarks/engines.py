"""Candidates of other engines instead of stage 1's own scan: how many of the exact ones they find, and in what time.

    logitmix export RUN --out DIR --faiss --faiss-hnsw --faiss-ivfpq
    python -m benchmarks.engines DIR [--kept 1000] [--queries 200]

Exact are the `--kept` largest products of FP32 vectors of the h-indexer. Recall is the share of them that an engine
finds; of the best 10, the share that stage 2 then still answers with, of what it makes of the exact candidates.
Queries are histories of 20 random items. CPU time is that of a query, of one thread, 8 queries at once. Qdrant is its
client's local mode, which scans FP32 vectors with numpy: all items, and with a filter those of even index, of which the
exact ones are the largest products of these.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import faiss
import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.measure import machine, print_table
from logitmix.modules.stage1 import hindexer_topk
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.export.indexes import to_qdrant

AT_ONCE, HISTORY, K = 8, 20, 10
PROBES, VIEWS = (8, 32, 128), (1000, 2000, 4000)
"""Lists of an IVF that are searched, and items that a search in an HNSW graph keeps in view."""

Search = Callable[[Tensor], np.ndarray]


@dataclass(frozen=True)
class Options:
    directory: tyro.conf.Positional[str]
    """Serving directory with indexes of faiss."""
    kept: int = 1000
    queries: int = 200


def main(options: Options) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    retriever, random = Retriever.load(options.directory), Random(0)
    ids = retriever.raw_ids
    asked: list[Request] = [
        {"history": [ids[random.randrange(len(ids))] for _ in range(HISTORY)]} for _ in range(options.queries)
    ]
    query_BH = retriever.query_sides(asked)["hindexer.0"]
    rows: list[tuple[str, ...]] = []
    exact: dict[bool, tuple[np.ndarray, list[set[str]]]] = {}
    for name, megabytes, search, is_filtered in _engines(Path(options.directory), retriever, options.kept):
        start, found = time.process_time(), []
        for part_BH in query_BH.split(AT_ONCE):
            found.append(search(part_BH))
        taken, items = time.process_time() - start, np.concatenate(found)
        requests = [
            {**of, "allowed": [ids[int(i)] for i in row if i >= 0]} for of, row in zip(asked, items, strict=True)
        ]
        ranked = [{row["id"] for row in answer["items"]} for answer in retriever.recommend(requests, K)]
        every, best = exact.setdefault(is_filtered, (items, ranked))
        shared = [len(set(a) & set(b)) for a, b in zip(items.tolist(), every.tolist(), strict=True)]
        of_best = sum(len(a & b) for a, b in zip(ranked, best, strict=True)) / sum(map(len, best))
        times = f"{megabytes:.1f}", f"{taken / options.queries * 1000:.2f}"
        rows.append((name, *times, f"{sum(shared) / every.size:.4f}", f"{of_best:.4f}"))
    setting = f"{len(ids):,} items, {options.kept:,} kept; {machine()}"
    print_table(("engine", "MB", "CPU ms", f"recall@{options.kept}", f"of the best {K}"), rows, setting)


def _engines(directory: Path, retriever: Retriever, kept: int) -> list[tuple[str, float, Search, bool]]:
    """Names, sizes, searches, and whether these are for items of even index alone; the exact ones first."""

    def of_faiss(index: Any, **given: Any) -> Search:
        return lambda query_BH: index.search(query_BH.numpy(), kept, **given)[1]

    def read(end: str) -> tuple[Any, float]:
        file = directory / f"hindexer{end}.faiss"
        return faiss.read_index(str(file)), file.stat().st_size / 1e6

    flat, size = read("")
    found: list[tuple[str, float, Search, bool]] = [("faiss flat", size, of_faiss(flat), False)]
    ((_, corpus),) = retriever._ranker.corpora
    scan: Search = lambda query_BH: hindexer_topk(query_BH, corpus, kept).items_BK.numpy()  # noqa: E731
    found.append(("hindexer_topk, INT8", corpus.blocks.numel() / 1e6, scan, False))
    for view in VIEWS:
        graph, size = read("-hnsw")
        graph.hnsw.efSearch = view
        found.append((f"faiss HNSW32, ef {view}", size, of_faiss(graph), False))
    for probes in PROBES:
        lists, size = read("-ivfpq")
        lists.nprobe = min(probes, lists.nlist)
        found.append((f"faiss IVF{lists.nlist},PQ{lists.pq.M}, {lists.nprobe} lists", size, of_faiss(lists), False))
    return found + _of_qdrant(directory, flat, kept, of_faiss)


def _of_qdrant(
    directory: Path, flat: Any, kept: int, of_faiss: Callable[..., Search]
) -> list[tuple[str, float, Search, bool]]:
    """With and without a filter; none where its client is not installed."""
    try:
        from qdrant_client import QdrantClient, models
    except ModuleNotFoundError:
        return []
    client, size = QdrantClient(":memory:"), flat.ntotal * flat.d * 4 / 1e6
    to_qdrant(directory, client, "items", ({"even": item % 2 == 0} for item in range(flat.ntotal)))
    even = models.Filter(must=[models.FieldCondition(key="even", match=models.MatchValue(value=True))])

    def search(condition: Any) -> Search:
        def of(query_BH: Tensor) -> np.ndarray:
            points = (
                client.query_points("items", query=query, query_filter=condition, limit=kept, with_payload=False).points
                for query in query_BH.tolist()
            )
            return np.array([[point.id for point in of_query] for of_query in points])

        return of

    sel = faiss.SearchParameters(sel=faiss.IDSelectorBatch(np.arange(0, flat.ntotal, 2)))
    return [
        ("Qdrant, local", size, search(None), False),
        ("faiss flat, half of the items", size, of_faiss(flat, params=sel), True),
        ("Qdrant, local, half of the items", size, search(even), True),
    ]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
