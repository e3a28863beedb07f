"""The faiss indexes of an export, read by faiss and numpy alone."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import two_ranks
from asking import ranked_rows
from small_data import ITEMS, catalog_of, small_config, write_dataset

from logitmix.modules.config import HIndexerConfig, ModelConfig, MoLConfig
from logitmix.modules.schema import RECENCY
from logitmix.serving.directory.reader import read_manifest
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.cli import main
from logitmix.trainer.export import export as export_module
from logitmix.trainer.export import indexes
from logitmix.trainer.export.export import export
from logitmix.trainer.export.indexes import INDEXES, check_index
from logitmix.trainer.export.update import update_items
from logitmix.trainer.loop import train

REQUESTS: list[Request] = [
    {"history": ["item-3", "item-9", "item-4"], "timestamps": [1, 5, 90], "user": {"country": "country-1", "age": 2}},
    {"history": ["item-0"], "events": [{"rating": 5, "query": ["tags-1", "tags-2"]}]},
    {"user": {"favorites": ["brand-2"]}},
]
PLAIN = """
import sys
import faiss, numpy
index = faiss.read_index(sys.argv[1])
scores, ids = index.search(numpy.load(sys.argv[2]), index.ntotal)
numpy.savez(sys.argv[3], scores=scores, ids=ids)
assert not [name for name in sys.modules if name.partition(".")[0] in ("logitmix", "torch")]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of dot products, with an h-indexer and all kinds of features."""
    folder = tmp_path_factory.mktemp("indexes")
    data = write_dataset(folder / "data", features=True)
    train(small_config(data, {"model.similarity.kind": "dot", "model.features": ["all", RECENCY]}), folder / "run")
    return folder / "run"


def search(served: Path, stage: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and items of all requests, by a process that knows neither logitmix nor torch."""
    np.save(folder / "queries.npy", Retriever.load(served).query_sides(REQUESTS)[f"{stage}.0"].numpy())
    files = (served / f"{stage}.faiss", folder / "queries.npy", folder / "found.npz")
    subprocess.run([sys.executable, "-c", PLAIN, *map(str, files)], check=True)
    found = np.load(folder / "found.npz")
    return torch.from_numpy(found["scores"]), torch.from_numpy(found["ids"])


def assert_found(retriever: Retriever, scores: torch.Tensor, items: torch.Tensor) -> None:
    """As the Retriever ranks."""
    rankings = ranked_rows(retriever.recommend(REQUESTS, retriever.num_items, exclude_history=False))
    for ranking, score_X, item_X in zip(rankings, scores, items, strict=True):
        of = {row["id"]: row["score"] for row in ranking}
        expected = torch.tensor([of[retriever.raw_ids[item]] for item in item_X.tolist()])
        assert len(of) == len(set(item_X.tolist())) == retriever.num_items
        torch.testing.assert_close(score_X, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("item_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_faiss_alone_finds_what_the_model_ranks(
    run: Path, tmp_path: Path, item_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards, and in parts of shards."""
    monkeypatch.setattr(export_module, "SHARD_BYTES", 2**11)
    monkeypatch.setattr(indexes, "CHUNK_ITEMS", 7)
    manifest = export(run, tmp_path / "served", item_cache=item_cache, extras=["faiss"])
    assert "items-00001-of" in " ".join(manifest["files"])
    retriever = Retriever.load(tmp_path / "served")
    assert_found(retriever, *search(tmp_path / "served", "similarity", tmp_path))
    scores, items = search(tmp_path / "served", "hindexer", tmp_path)
    hindexer, queries = retriever.tower.hindexer, retriever.query_sides(REQUESTS)
    assert hindexer is not None
    sides = [side for _, (side,) in retriever._ranker.items.all("hindexer", ITEMS)]
    expected = hindexer.all_pairs((queries["hindexer.0"],), (torch.cat(sides),))
    torch.testing.assert_close(scores, expected.gather(1, items), rtol=1e-5, atol=1e-5)
    assert (
        "For other servers: `hindexer.faiss`, `similarity.faiss`.\n" in (tmp_path / "served" / "README.md").read_text()
    )


def test_added_items_are_in_the_indexes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tmp_path / "served"
    export(run, served, extras=["faiss", "vectors"])
    catalog = catalog_of(tmp_path, "item,price,brand\nnew-1,2,brand-1\nnew-2,3,brand-2\n")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "faiss", None)
        with pytest.raises(ValueError, match="pip install faiss-cpu"):
            update_items(served, catalog)
    assert Retriever.load(served).num_items == ITEMS
    update_items(served, catalog)
    assert faiss.read_index(str(served / "similarity.faiss")).ntotal == ITEMS + 2
    assert pq.read_table(served / "similarity.parquet")["id"].to_pylist()[-1] == "new-2"
    assert_found(Retriever.load(served), *search(served, "similarity", tmp_path))
    assert_entries_fit(served)
    export(run, served, overwrite=True)
    assert not list(served.glob("*.faiss"))
    update_items(served, catalog)
    assert not list(served.glob("*.faiss"))


def assert_entries_fit(served: Path) -> None:
    files = read_manifest(served)["files"]
    assert {path.name for path in served.iterdir()} == {"manifest.json", *files}
    for name, entry in files.items():
        assert entry["bytes"] == (served / name).stat().st_size


def full(index: object, path: str) -> None:
    Path(path).write_bytes(b"half")
    raise RuntimeError("write error: No space left on device")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("found", "error", "said"),
    [
        (None, ValueError, "not installed: pip install faiss-cpu"),
        (SimpleNamespace(**vars(faiss) | {"write_index": full}), OSError, "faiss cannot be written: write er"),
    ],
)
def test_without_indexes_nothing_is_written(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: Any,
    error: type[Exception],
    said: str,
    overwrite: bool,
) -> None:
    before = export(run, tmp_path / "served") if overwrite else None
    monkeypatch.setitem(sys.modules, "faiss", found)
    with pytest.raises(error, match=said):
        export(run, tmp_path / "served", overwrite, extras=["faiss"])
    assert [path.name for path in tmp_path.iterdir()] == (["served"] if before else [])
    assert not before or read_manifest(tmp_path / "served") == before


def test_a_model_without_vectors_is_refused() -> None:
    for kind in INDEXES:
        check_index(kind, ModelConfig(hindexer=HIndexerConfig(weight=0.1)))
        with pytest.raises(ValueError, match="a similarity of kind mol without an h-indexer has none; train with"):
            check_index(kind, ModelConfig(similarity=MoLConfig(), hindexer=HIndexerConfig(weight=0.0)))


def export_with_indexes(run: Path, out: Path) -> dict[str, Any]:
    return export(run, out, extras=["faiss"])


def test_of_several_ranks_the_first_makes_the_indexes(run: Path, tmp_path: Path) -> None:
    alone = export_with_indexes(run, tmp_path / "alone")
    assert {"similarity.faiss", "hindexer.faiss"} < alone["files"].keys()
    assert two_ranks.run(export_with_indexes, run, tmp_path / "together") == [alone, alone]
    assert_entries_fit(tmp_path / "together")


def test_the_command_makes_what_it_is_told_to(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", str(run), "--out", str(tmp_path / "served"), "--vectors"])
    assert "faiss" not in capsys.readouterr().err
    assert {path.name for path in tmp_path.glob("served/*.parquet")} == {"similarity.parquet", "hindexer.parquet"}
