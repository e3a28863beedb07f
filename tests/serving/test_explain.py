"""Why an item is in an answer."""

import json
from pathlib import Path

import pytest
import torch
from asking import answered
from small_models import export_small, small_model
from torch.nn import functional as F

from logitmix.serving.explain import SHOWN
from logitmix.serving.request import Options
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli

X = 60


@pytest.mark.parametrize(
    ("kind", "item_cache", "precision"),
    [("mol", True, "fp32"), ("mol, joint", True, "fp32"), ("mol", False, "fp32"), ("mol", True, "int8")],
)
def test_the_products_are_those_of_the_score(tmp_path: Path, kind: str, item_cache: bool, precision: str) -> None:
    model = small_model(kind, X)
    retriever = Retriever.load(export_small(model, tmp_path / "served", item_cache=item_cache, precision=precision))
    (rows,) = answered(retriever, [{"history": ["id 7", "id 14"]}], Options(20, explain=True))
    query = retriever._encoder.queries([retriever._reader.checked([1, 2], 0)]).similarity
    items = retriever.indices_of([row["id"] for row in rows])
    similarity = model.tower.similarity
    with torch.no_grad():
        for row, item in zip(rows, items, strict=True):
            side = retriever._ranker.items.sides([item])
            part_UI = similarity.parts(query, side)[0]
            # The score of items in INT8 is of a query in INT8, too, on some processors.
            assert float(part_UI.sum()) == pytest.approx(row["score"], rel=0.1 if precision == "int8" else 1e-4)
            products = row["why"]["components"]
            largest = part_UI.flatten().sort(descending=True).values[:SHOWN].tolist()
            assert [of["score"] for of in products] == pytest.approx(largest, rel=1e-4, abs=1e-4)
            named = [float(part_UI[of["query"], of["item"]]) for of in products]
            assert named == pytest.approx(largest, rel=1e-4, abs=1e-4)


def test_the_items_of_the_history_that_are_most_like_it(tmp_path: Path) -> None:
    model = small_model("dot", X)
    retriever = Retriever.load(export_small(model, tmp_path / "served"))
    history = [1, 2, 3, 4, 2]
    request = {"history": ["no such item", *(f"id {7 * item}" for item in history)]}
    (rows,) = answered(retriever, [request], Options(10, "unknown", explain=True))
    vector_XD = F.normalize(retriever._ranker.items.rows(torch.arange(X)), dim=1)
    for row, item in zip(rows, retriever.indices_of([row["id"] for row in rows]), strict=True):
        assert row["why"]["components"] == []
        cosines = {of: float(vector_XD[item] @ vector_XD[of]) for of in set(history)}
        best = sorted(cosines, key=lambda of: -cosines[of])[:SHOWN]
        for found, of in zip(row["why"]["similar"], best, strict=True):
            assert (found["id"], found["title"]) == (f"id {7 * of}", f"«id {7 * of}»")
            assert found["cosine"] == pytest.approx(cosines[of], abs=1e-5)


def test_who_does_not_ask_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = export_small(small_model("mol", X), tmp_path / "served")
    request = [str(folder), "--history", "id 7", "-k", "3"]
    for words, told in (([], False), (["--explain"], True)):
        cli.main(["retrieve", *request, "--json", *words])
        assert ["why" in row for row in json.loads(capsys.readouterr().out)["items"]] == [told] * 3
        cli.main(["retrieve", *request, *words])
        assert ("most like" in capsys.readouterr().out) == told
    with pytest.raises(ValueError, match="explain is for at most 100 items, and k is 101"):
        Options(101, explain=True)
