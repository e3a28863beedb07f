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
from logitmix.trainer.export.indexes import INDEXES, to_qdrant

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


def test_the_retriever_ranks_the_candidates_of_qdrant(indexed: Path, vectors: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("qdrant_client", exc_type=ImportError)
    from qdrant_client import QdrantClient, models

    retriever, client = Retriever.load(indexed), QdrantClient(":memory:")
    (query,) = retriever.query_sides([{"history": [retriever.raw_ids[7]]}])["hindexer.0"].tolist()
    to_qdrant(indexed, client, "items", ({"even": item % 2 == 0} for item in range(X)))
    even = models.Filter(must=[models.FieldCondition(key="even", match=models.MatchValue(value=True))])
    found = client.query_points("items", query=query, query_filter=even, limit=40).points
    expected = (vectors[::2] @ torch.tensor(query)).topk(40).indices * 2
    assert {point.id for point in found} == set(expected.tolist())
    ids = [point.payload["id"] for point in found if point.payload]
    assert_ranked(retriever, ids, ids[:2])
    # Another export takes its place under the same name, and so does the same one.
    other = export_small(small_model("dot", 20, seed=3), tmp_path / "other")
    for directory, count in ((other, 20), (other, 20), (other, 20), (indexed, X)):
        to_qdrant(directory, client, "items", stage="similarity")
        assert client.count("items").count == count and len(client.get_collections().collections) == 1
    with pytest.raises(ValueError, match=r"there are 1 payloads for 20 items of .*; give one for each"):
        to_qdrant(other, client, "items", [{}])
    with pytest.raises(ValueError, match="has no vectors of the stage similarity; there are: hindexer"):
        to_qdrant(export_small(small_model("mol", 20), tmp_path / "mol"), client, "items", stage="similarity")
    assert client.count("items").count == X
    client.close()
