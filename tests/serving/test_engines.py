"""The items' vectors in other engines, which find candidates: stage 2 ranks exactly those."""

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from asking import ranked_rows
from small_models import export_small, small_model

from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.export.indexes import INDEXES

X = 300


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of dot products and an h-indexer with all kinds of indexes."""
    return export_small(small_model("dot", X), tmp_path_factory.mktemp("indexed") / "served", extras=list(INDEXES))


@pytest.fixture(scope="module")
def vectors(indexed: Path) -> torch.Tensor:
    """Those of stage 1."""
    items = Retriever.load(indexed)._ranker.items
    return torch.cat([side for _, (side,) in items.all("hindexer", X)])


def assert_ranked(retriever: Retriever, ids: list[str], without: list[str]) -> None:
    """Stage 2 ranks an engine's candidates, exactly these, as it ranks them among all items."""
    request: Request = {"history": [retriever.raw_ids[7]], "blocked": without}
    (everything,) = ranked_rows(retriever.recommend([request], X, stage1=X))
    (found,) = ranked_rows(retriever.recommend([{**request, "allowed": ids}], X))
    assert [row["id"] for row in found] == [row["id"] for row in everything if row["id"] in ids]
    expected = [row["score"] for row in everything if row["id"] in ids]
    # A product's rounding error is that of its terms, also where these cancel.
    assert [row["score"] for row in found] == pytest.approx(expected, abs=1e-6 * max(map(abs, expected)))


def test_the_retriever_ranks_the_candidates_of_faiss(indexed: Path) -> None:
    retriever = Retriever.load(indexed)
    queries = retriever.query_sides([{"history": [retriever.raw_ids[7]]}])["hindexer.0"].numpy()
    index, fits = faiss.read_index(str(indexed / "hindexer.faiss")), np.arange(0, X, 3)
    search = faiss.SearchParameters(sel=faiss.IDSelectorBatch(fits))
    _, (items,) = index.search(queries, 40, params=search)
    assert len(set(items)) == 40 and set(items) <= set(fits)
    assert_ranked(retriever, [retriever.raw_ids[int(item)] for item in items], [retriever.raw_ids[int(items[0])]])
