"""A model with every kind of feature: trained, exported, asked, and given items that it never saw."""

import errno
import itertools
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
import two_ranks
from asking import answered, ranked_rows
from rich.console import Console
from small_data import ITEMS, catalog_of, forget_digests, small_config, trained_scores, write_dataset
from torch import Tensor

from logitmix.comm.process_group import process_group
from logitmix.common import files
from logitmix.modules.features import Embedded
from logitmix.modules.kinds.date import NO_DATE
from logitmix.modules.schema import ITEM, RECENCY, Feature, Schema
from logitmix.serving import items as items_module
from logitmix.serving.directory.reader import read
from logitmix.serving.model import Precision
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Retriever, Row
from logitmix.trainer import api
from logitmix.trainer.data.batches import RankingUsers, ranking_users
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.export import catalog as catalog_module
from logitmix.trainer.export import columns as columns_module
from logitmix.trainer.export import export as export_module
from logitmix.trainer.export import recommend as recommend_module
from logitmix.trainer.export.catalog import Catalog
from logitmix.trainer.export.export import export
from logitmix.trainer.export.update import update_items
from logitmix.trainer.loop import train
from logitmix.trainer.run import checkpoint
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.tensor_files import SavedTensors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    data = write_dataset(folder / "data", weighted=True)
    settings = {"model.features": ["all", RECENCY], "model.item_id_dropout": 0.2, "tables.brand.dim": 4}
    train(small_config(data, settings | {"dense.lr": 0.02, "tables.lr": 0.05}), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def dataset(run: Path) -> Dataset:
    return load_dataset(run.parent / "data")


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """No test changes it."""
    export(run, run.parent / "served")
    return run.parent / "served"


@pytest.fixture(scope="module")
def computed(run: Path) -> Path:
    """Without an item cache; no test changes it."""
    assert not export(run, run.parent / "computed", item_cache=False)["item_cache"]
    return run.parent / "computed"


@pytest.fixture(params=["exported", "computed"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(request.getfixturevalue(request.param), tmp_path / "served"))


@cache
def vocabulary(data: Path, table: str) -> list[str]:
    return load_dataset(data).vocabulary(table)


def raw(dataset: Dataset, feature: Feature, column: Column, row: int) -> Any:
    """The value as the source had it."""
    values = vocabulary(dataset.path, feature.table) if feature.sparse else []
    match feature.kind:
        case "id":
            return values[column.values[row]] or None
        case "ids":
            assert column.offsets is not None
            return [values[of] or "?" for of in column.values[column.offsets[row] : column.offsets[row + 1]]]
        case "weighted_ids":
            assert column.offsets is not None
            of_row = slice(column.offsets[row], column.offsets[row + 1])
            ids = [values[of] or "?" for of in column.values[of_row]]
            return list(zip(ids, column.parallel["weights"][of_row].tolist(), strict=True))
        case "number":
            return float(column.values[row])
        case "date":
            days = column.values[row]
            return None if days == NO_DATE else str(np.datetime64(int(days), "D"))
        case _:
            return column.values[row].tolist()


def request_of(dataset: Dataset, users: RankingUsers, place: int) -> Request:
    asked = request_after(dataset, int(users.user[place]), range(users.first[place], users.place[place]))
    return {**asked, "time": int(dataset.timestamps_flat[users.place[place]])}


def request_after(dataset: Dataset, user: int, actions: range) -> Request:
    names, schema = vocabulary(dataset.path, ITEM), dataset.schema
    return {
        "history": [names[dataset.items_flat[action]] for action in actions],
        "timestamps": [int(dataset.timestamps_flat[action]) for action in actions],
        "user": {f.name: raw(dataset, f, dataset.user_features[f.name], user) for f in schema.of("user")},
        "events": [
            {f.name: raw(dataset, f, dataset.event_features[f.name], action) for f in schema.of("event")}
            for action in actions
        ],
    }


def item_record(dataset: Dataset, item: int) -> dict[str, Any]:
    return {f.name: raw(dataset, f, dataset.item_features[f.name], item) for f in dataset.schema.of("item")}


def test_a_query_knows_the_kind_of_the_action_that_is_wanted(dataset: Dataset, tmp_path: Path) -> None:
    """That of the target in evaluation, the request's in serving; any without one."""
    features = ["action", *(of.name for of in dataset.schema.of("user"))]
    settings = {"model.features": features, "model.wanted": "action", "train.epochs": 1, "train.precision": "fp32"}
    train(small_config(dataset.path, settings), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "served")
    retriever, users = Retriever.load(tmp_path / "served"), ranking_users(dataset, "test", 12)
    action = next(of for of in dataset.schema.of("event") if of.name == "action")
    requests: list[Request] = []
    for place in range(len(users)):
        asked = request_of(dataset, users, place)
        events = [{"action": of["action"]} for of in asked["events"]]
        want = raw(dataset, action, dataset.event_features["action"], int(users.place[place]))
        requests.append({"history": asked["history"], "events": events, "want": want, "user": asked["user"]})
    assert len({request["want"] for request in requests}) > 1
    expected = trained_scores(tmp_path / "run", dataset, users)

    names = dataset.raw_ids()

    def scores(asked: list[Request]) -> Tensor:
        found = ranked_rows(retriever.recommend(asked, k=ITEMS, exclude_history=False))
        by_name = [{row["id"]: row["score"] for row in of} for of in found]
        return torch.tensor([[of[name] for name in names] for of in by_name])

    torch.testing.assert_close(scores(requests), expected, rtol=0, atol=2e-4)
    without: list[Request] = [{**request, "want": None} for request in requests]
    assert (scores(without) - expected).abs().max() > 1e-3
    with pytest.raises(ValueError, match="request 1: want is 'type-77'; it must be one of 'type-"):
        ranked_rows(retriever.recommend([requests[0], {**requests[1], "want": "type-77"}], 3))
    asked: list[Request] = [
        {
            "history": of["history"],
            "events": [{"action": event["action"]} for event in of["events"]],
            "user": of["user"],
            "want": "type-1",
        }
        for of in whole_requests(dataset)
    ]
    api.recommend(tmp_path / "served", tmp_path / "all.parquet", dataset.path, 5, want="type-1")
    require_rows(tmp_path / "all.parquet", dataset, ranked_rows(retriever.recommend(asked, 5)))
    with pytest.raises(ValueError, match="--want is 'type-77'; it must be one of 'type-"):
        api.recommend(tmp_path / "served", tmp_path / "no.csv", dataset.path, want="type-77")
    assert not (tmp_path / "no.csv.parts").exists()
    # In evaluation, of all targets.
    every = ranked_rows(retriever.recommend([{**of, "want": "type-1"} for of in requests], ITEMS))
    found = [[row["id"] for row in of].index(names[item]) + 1 for of, item in zip(every, users.target, strict=True)]
    measured = api.evaluate(tmp_path / "run", want="type-1")
    assert measured["mrr"] == pytest.approx(np.mean([1 / of for of in found])) != api.evaluate(tmp_path / "run")["mrr"]
    with pytest.raises(ValueError, match=r"evaluate\.want is 'type-77'; it must be one of 'type-"):
        api.evaluate(tmp_path / "run", want="type-77")


def test_the_exported_model_scores_as_the_trained_one(run: Path, dataset: Dataset, served: Path) -> None:
    users = ranking_users(dataset, "test", 12)
    scores = trained_scores(run, dataset, users)
    retriever, place_of = Retriever.load(served), {name: place for place, name in enumerate(dataset.raw_ids())}
    requests = [request_of(dataset, users, place) for place in range(len(users))]
    found = ranked_rows(retriever.recommend(requests, ITEMS, exclude_history=False))
    for ranking, score_X in zip(found, scores, strict=True):
        assert len(ranking) == ITEMS
        got = torch.tensor([row["score"] for row in ranking])
        torch.testing.assert_close(got, score_X[[place_of[row["id"]] for row in ranking]], rtol=0, atol=2e-4)
    # And what is known of users and events matters.
    for left_out in ("user", "events", "timestamps"):
        bare: list[Request] = [{key: of for key, of in request.items() if key != left_out} for request in requests]  # type: ignore[misc]
        assert ranked_rows(retriever.recommend(bare, 5, exclude_history=False)) != [ranking[:5] for ranking in found]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_shards_and_ranges_do_not_change_the_sides(
    precision: Precision, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the scales of what is stored in INT8."""
    export(run, tmp_path / "whole", precision=precision)
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5_000)
    monkeypatch.setattr(items_module, "CHUNK_ITEMS", 16)
    export(run, tmp_path / "parts", precision=precision)
    (whole,), parts = (read(tmp_path / name).shards for name in ("whole", "parts"))
    assert len(parts) > 1 and sum(len(part["table"]) for part in parts) == ITEMS
    for name, of in whole.items():
        if name.endswith(".offsets"):
            assert torch.equal(torch.cat([part[name].diff() for part in parts]), of.diff())
            continue
        if name.endswith(".scale"):
            assert all(torch.equal(part[name], of) for part in parts), name
            continue
        found = torch.cat([part[name] for part in parts])
        if of.dtype == torch.int8:
            # A number that lies in the middle of two INT8 numbers may become either of them.
            assert int((found.int() - of.int()).abs().max()) <= 1
        else:
            torch.testing.assert_close(found, of)


def export_in_files(run: Path, out: Path, file_bytes: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The manifest, and the most bytes of each table that this rank read at once."""
    export_module.SHARD_BYTES = file_bytes
    read_rows, most = checkpoint._read_rows, Counter[str]()

    def counted(tensors: SavedTensors, schema: Schema, prefix: str, table: str, start: int, stop: int) -> Tensor:
        rows = read_rows(tensors, schema, prefix, table, start, stop)
        most[table] = max(most[table], rows.nbytes)
        return rows

    checkpoint._read_rows = counted
    return export(run, out), dict(most)


@pytest.mark.parametrize("served", ["exported", pytest.param("computed", marks=pytest.mark.slow)], indirect=True)
def test_tables_are_cut_over_files_and_no_rank_reads_one_whole(
    run: Path, dataset: Dataset, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_read_rows", checkpoint._read_rows)
    monkeypatch.setattr(export_module, "SHARD_BYTES", 100)
    alone, most = export_in_files(run, tmp_path / "alone", 100)
    tables = [of["tensors"] for name, of in alone["files"].items() if name.startswith("tables-")]
    assert [[(name, of["shape"][0]) for name, of in tensors.items()] for tensors in tables] == [
        [("item", 1), ("brand", 4)], [("brand", 3), ("tags", 1)], *[[("tags", 3)]] * 3, [("tags", 1), ("country", 2)],
        [("country", 2), ("type", 1)], [("type", 2), ("recency", 1)], *[[("recency", 3)]] * 21, [("recency", 2)],
    ]  # fmt: skip
    # A file of items has at least a block of the INT8 corpus.
    most_bytes = dict.fromkeys([*(table.name for table in dataset.schema.tables), RECENCY], 100)
    most_bytes["item"] = 16 * 4 * tables[0]["item"]["shape"][1]
    assert most.keys() == most_bytes.keys() and all(read <= most_bytes[name] for name, read in most.items())
    for manifest, of_rank in two_ranks.run(export_in_files, run, tmp_path / "together", 100):
        assert manifest == alone and all(read <= most_bytes[name] for name, read in of_rank.items())

    users = ranking_users(dataset, "test", 12)
    requests = [request_of(dataset, users, place) for place in range(len(users))]
    new = {f"new-{item}": item_record(dataset, item) for item in (4, 7)}
    catalog, found = catalog_of(tmp_path, csv_of(new)), []
    for path in (served, tmp_path / "together"):
        update_items(path, catalog)
        found.append(ranked_rows(Retriever.load(path).recommend(requests, ITEMS + 2, exclude_history=False)))
    for left, right in zip(*found, strict=True):
        scores = {row["id"]: row["score"] for row in right}
        assert len(scores) == ITEMS + 2
        assert {row["id"]: pytest.approx(row["score"], abs=2e-4) for row in left} == scores


def csv_of(records: dict[str, dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, list):
            return "|".join(str(part) for part in value)
        return "" if value is None else str(value)

    for record in records.values():
        pairs = record.pop("weighted_item")
        record |= {"weighted_item": [of for of, _ in pairs], "weights_item": [weight for _, weight in pairs]}
    names = list(next(iter(records.values())))
    lines = [",".join([raw_id, *(cell(record[name]) for name in names)]) for raw_id, record in records.items()]
    return "\n".join([",".join(["item", *names]), *lines]) + "\n"


def test_new_items_are_those_of_their_features_and_the_old_stay(
    run: Path, dataset: Dataset, served: Path, tmp_path: Path
) -> None:
    """A new item with an old one's features is the old one with an unknown id."""
    before = Retriever.load(served)
    request: Request = {"history": ["item-3", "item-9"], "user": {"country": "country-1"}}
    (old,) = ranked_rows(before.recommend([request], ITEMS, exclude_history=False))
    records = {f"new-{item}": item_record(dataset, item) | {"title": f"Title {item}"} for item in (4, 7, 30)}
    records["item-5"] = item_record(dataset, 5) | {"title": "Title 5"}
    # prepare would call the feature price, too.
    catalog = catalog_of(tmp_path, csv_of(records).replace("price", "price!", 1))
    assert update_items(served, catalog) == {
        "added": 3, "changed": 1, "unchanged": 0, "removed": 0, "num_items": ITEMS + 3,
    }  # fmt: skip

    after = Retriever.load(served)
    (found,) = ranked_rows(after.recommend([request], ITEMS + 3, exclude_history=False))
    scores = {row["id"]: row["score"] for row in found}
    assert {row["id"]: row["score"] for row in old} == {name: scores[name] for name in scores if name[:3] != "new"}
    assert {row["id"]: row["title"] for row in found if row["title"]} == {
        name: record["title"] for name, record in records.items()
    }
    model = load_saved(run)
    with process_group("cpu", 60) as ranks, torch.no_grad():
        embedder = Embedder(model.tower, model.sharded_rows(ranks), columns_of(dataset, model.tower.schema))
        tower, rows = model.tower, {ITEM: model.read_rows(ITEM, ITEMS, ITEMS + 1)}
        for item in (4, 7, 30):
            known = embedder.items(np.array([item]))
            own = model.read_rows(ITEM, item, item + 1)
            vector = known.vector_RD - own + rows[ITEM]
            side = tower.item_sides(Embedded(vector, known.groups))
            query = before._encoder.queries([before._reader.read(request, 0, "refuse")])
            score = tower.similarity.all_pairs(query.similarity, side.similarity)
            assert scores[f"new-{item}"] == pytest.approx(float(score), abs=2e-4)
    # New items may stand in histories, and come again.
    assert ranked_rows(after.recommend([{"history": ["new-4", "item-3"]}], 5, unknown="refuse"))[0]
    assert update_items(served, catalog) == {
        "added": 0, "changed": 0, "unchanged": 4, "removed": 0, "num_items": ITEMS + 3,
    }  # fmt: skip


@pytest.mark.parametrize("served", ["exported"], indirect=True)
def test_an_export_of_a_catalog_is_an_export_that_is_updated(
    run: Path, dataset: Dataset, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {"new": item_record(dataset, 4), "item-3": item_record(dataset, 9)}
    records |= {f"item-{n}": item_record(dataset, n) for n in range(20, ITEMS)}
    catalog = catalog_of(tmp_path, csv_of(records), only=True)
    update_items(served, catalog)
    capsys.readouterr()
    export(run, tmp_path / "again", catalog=catalog)
    assert "items: 1 added, 1 changed, 30 unchanged, 19 removed, 32 now" in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in tmp_path.iterdir()} == {"served", "again", "new.csv"}
    for file in served.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_a_broken_table_changes_nothing(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.loads((served / "manifest.json").read_text())
    with pytest.raises(ValueError, match=r"^new\.csv: feature price has the value 'much', which is no number"):
        update_items(served, catalog_of(tmp_path, "item,price,brand\nnew,much,brand-1\n"))
    monkeypatch.setattr(catalog_module, "CHUNK_ITEMS", 2)
    for name, value, said in (
        ("price", "3e38", "item 'c': a number among its features is too large"),
        ("image", "1|2", "feature image has lists of 2 numbers, not 3"),
    ):
        with pytest.raises(ValueError, match=said):
            update_items(served, catalog_of(tmp_path, f"item,{name}\na,\nb,\nc,{value}\n"))
    pq.write_table(pa.table({"item": ["new"], "title": [["a", "list"]]}), tmp_path / "new.csv")
    with pytest.raises(ValueError, match="column title of the items is of type list"):
        update_items(served, Catalog(str(tmp_path / "new.csv")))
    with pytest.raises(ValueError, match="no file or folder at nowhere"):
        update_items(served, Catalog("nowhere"))
    assert json.loads((served / "manifest.json").read_text()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "served"]


def during(monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> threading.Thread:
    """Has another command begin once an update has read the export, with time to end before the update goes on."""
    read, thread = catalog_module.read_items, threading.Thread(target=other)

    def reading(*given: Any) -> Any:
        monkeypatch.setattr(catalog_module, "read_items", read)
        thread.start()
        thread.join(1)
        return read(*given)

    monkeypatch.setattr(catalog_module, "read_items", reading)
    return thread


@pytest.mark.parametrize("served", ["exported"], indirect=True)
def test_commands_that_replace_an_export_at_once_do_so_in_turn(
    run: Path, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = (
        catalog_of(tmp_path, f"item,price\n{name},1\n", f"{name}.csv") for name in ("one", "other", "third")
    )
    thread = during(monkeypatch, lambda: update_items(served, other))
    assert update_items(served, one)["num_items"] == ITEMS + 1
    thread.join()
    assert list(Retriever.load(served).raw_ids)[ITEMS:] == ["one", "other"]

    thread = during(monkeypatch, lambda: export(run, served, overwrite=True))
    assert update_items(served, third)["num_items"] == ITEMS + 3
    thread.join()
    assert Retriever.load(served).num_items == ITEMS


@pytest.mark.parametrize("served", ["exported"], indirect=True)
def test_what_a_killed_command_left_goes(run: Path, served: Path, tmp_path: Path) -> None:
    """And what it was about to replace comes back."""
    catalog = catalog_of(tmp_path, "item,price\nnew,1\n")
    for command in (lambda: update_items(served, catalog), lambda: export(run, served, overwrite=True)):
        shutil.copytree(served, tmp_path / ".served.01234567.part")
        served.rename(tmp_path / ".served.01234567.old")
        command()
        assert {path.name for path in tmp_path.iterdir()} == {"new.csv", "served"}


@pytest.mark.parametrize(
    ("settings", "exported", "updated"),
    [
        ({"model.features": ["brand"]}, True, True),
        ({"model.features": ["brand"], "model.item_id_dropout": 0.1}, False, False),
        ({"model.features": ["country"]}, False, True),
    ],
)
def test_a_model_that_cannot_rank_new_items_says_so(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    exported: bool,
    updated: bool,
) -> None:
    quick = {"train.epochs": 1, "evaluate.every_epochs": 0}
    train(small_config(dataset.path, settings | quick), tmp_path / "run")
    capsys.readouterr()
    export(tmp_path / "run", tmp_path / "served")
    assert (" hardly be recommended" in capsys.readouterr().err) == exported
    update_items(tmp_path / "served", catalog_of(tmp_path, "item,brand\nnew,brand-1\n"), Console(stderr=True))
    assert (" hardly be recommended" in capsys.readouterr().err) == updated


def whole_requests(dataset: Dataset) -> list[Request]:
    """Each user, after all their actions."""
    bounds = pairwise(dataset.offsets.tolist())
    return [request_after(dataset, user, range(*actions)) for user, actions in enumerate(bounds)]


def require_rows(file: Path, of: list[str] | Dataset, expected: list[list[Row]]) -> None:
    """The file has these rankings of these users or items, or of all users of a dataset, up to the rounding of
    scores."""
    names = of.raw_user_ids(np.arange(60)) if isinstance(of, Dataset) else of
    if file.suffix == ".parquet":
        assert pq.read_schema(file).types == [pa.string(), pa.int32(), pa.string(), pa.float32()]
    found = pq.read_table(file).to_pylist() if file.suffix == ".parquet" else pa.csv.read_csv(file).to_pylist()
    rows = [(name, row["rank"], row["id"]) for name, ranking in zip(names, expected, strict=True) for row in ranking]
    assert [(str(of), rank, item) for of, rank, item, _ in map(dict.values, found)] == rows
    scores = [row["score"] for ranking in expected for row in ranking]
    np.testing.assert_allclose([row["score"] for row in found], scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["all.parquet", "all.csv"])
def test_recommendations_are_the_answers_to_requests(
    exported: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For every user after all their actions, with all features; in blocks and batches."""
    monkeypatch.setattr(recommend_module, "BLOCK", 16)
    monkeypatch.setattr(recommend_module, "BATCH", 7)
    assert api.recommend(exported, tmp_path / name, dataset.path, 9) == {"users": 60, "rows": 9 * 60}
    expected = ranked_rows(Retriever.load(exported).recommend(whole_requests(dataset), 9))
    require_rows(tmp_path / name, dataset, expected)
    assert not (tmp_path / f"{name}.parts").exists()


def test_new_items_are_boosted(run: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose first action is late, and those without actions."""
    monkeypatch.setattr(columns_module, "WEEK", 430 * 86_400)
    data = forget_digests(Path(shutil.copytree(run.parent / "data", tmp_path / "data")))
    description = json.loads((data / "dataset.json").read_text())
    (data / "dataset.json").write_text(json.dumps(description | {"times": {"unit": "s"}}))
    actions = list(zip(dataset.items_flat.tolist(), dataset.timestamps_flat.tolist(), strict=True))
    since = max(time for _, time in actions) - 430 * 86_400
    late = {item for item, _ in actions} - {item for item, time in actions if time <= since}
    names = {"new", *(dataset.raw_ids()[item] for item in late)}
    is_new = columns_module.filter_columns(["new"], load_dataset(data), "", print)["new"].values
    assert is_new.tolist() == [float(raw_id in names) for raw_id in dataset.raw_ids()] and 0 < len(late) < ITEMS
    stock = "".join(f"{name},{int(new)}\n" for name, new in zip(dataset.raw_ids(), is_new, strict=True))
    catalog = catalog_of(tmp_path, f"item,new\n{stock}new,\n")
    export(run, tmp_path / "served", filterable=["brand", "new"], catalog=catalog)
    retriever = Retriever.load(tmp_path / "served")
    every = ranked_rows(retriever.recommend(whole_requests(dataset), ITEMS + 1))
    for boost in (0.3, -1.0):
        expected: list[list[Row]] = []
        for ranking in every:
            scores = {row["id"]: row["score"] + boost * (row["id"] in names) for row in ranking}
            best = sorted(ranking, key=lambda row: -scores[row["id"]])[:9]
            expected.append([{**row, "rank": at + 1, "score": scores[row["id"]]} for at, row in enumerate(best)])
        api.recommend(tmp_path / "served", tmp_path / "all.parquet", data, 9, boost_new=boost)
        require_rows(tmp_path / "all.parquet", dataset, expected)
        api.recommend(tmp_path / "served", tmp_path / "all.parquet", data, 9, boost_new=boost, limit={"brand": 2})
        requests: list[Request] = [{**of, "limit": {"brand": 2}} for of in whole_requests(dataset)]
        require_rows(tmp_path / "all.parquet", dataset, answered(retriever, requests, Options(9, boost_new=boost)))


def test_recommendations_by_a_dataset_that_has_changed(
    run: Path, exported: Path, dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids and values are matched by their texts: they have other numbers, some are new, and a feature is gone."""
    shutil.copytree(run.parent / "data", tmp_path / "data")
    forget_digests(tmp_path / "data")
    items = pq.read_table(tmp_path / "data/items.parquet")
    ids = items["raw_id"].to_pylist()
    ids[3], ids[5], ids[7] = ids[5], "new", ids[3]
    at = items.schema.get_field_index("raw_id")
    pq.write_table(items.set_column(at, "raw_id", pa.array(ids)), tmp_path / "data/items.parquet")
    changed = load_dataset(tmp_path / "data")
    (tmp_path / "users.txt").write_text("3\n\nnobody\n1\n3\n")
    wanted = [changed.raw_user_ids(np.arange(60)).index(name) for name in ("3", "1")]
    api.recommend(exported, tmp_path / "some.parquet", tmp_path / "data", 5, tmp_path / "users.txt")
    said = capsys.readouterr().err
    assert f"1 of {ITEMS} items of {tmp_path / 'data'} are not in the export, such as 'new'" in said
    assert "1 of 3 users in" in said and "such as 'nobody'" in said
    requests = whole_requests(changed)
    expected = ranked_rows(Retriever.load(exported).recommend([requests[user] for user in wanted], 5))
    require_rows(tmp_path / "some.parquet", ["3", "1"], expected)


def test_stage_1_keeps_fewer_items_for_everyone(
    run: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless told otherwise, or where limits may take any number of them."""
    monkeypatch.setattr(recommend_module, "LEAST", 4)
    export(run, tmp_path / "served", filterable=["brand"])
    retriever, requests = Retriever.load(tmp_path / "served"), whole_requests(dataset)
    limited: list[Request] = [{**of, "limit": {"brand": 1}} for of in requests]
    cases: list[tuple[dict[str, Any], list[Request], int]] = [
        ({}, requests, 10), ({"stage1": ITEMS}, requests, ITEMS), ({"limit": {"brand": 1}}, limited, ITEMS)
    ]  # fmt: skip
    for given, asked, kept in cases:
        api.recommend(tmp_path / "served", tmp_path / "all.parquet", run.parent / "data", 2, **given)
        expected = ranked_rows(retriever.recommend(asked, 2, stage1=kept))
        require_rows(tmp_path / "all.parquet", dataset, expected)
        said = f"the h-indexer keeps 10 of {ITEMS} items for each answer; --stage1 {ITEMS} ranks all"
        assert (said in capsys.readouterr().err) == (kept == 10)
    assert ranked_rows(retriever.recommend(requests, 2, stage1=10)) != ranked_rows(retriever.recommend(requests, 2))


@pytest.mark.parametrize("stage1", [None, 20], ids=["one stage", "two stages"])
def test_only_items_of_a_table_are_recommended(
    run: Path, exported: Path, dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage1: int | None
) -> None:
    """Those that a request would allow; in two stages, k' of these are found."""
    rows = [f"item-{item},{item % 3},{item / 2 if item % 5 else ''}" for item in range(0, ITEMS, 2)]
    (tmp_path / "stock.csv").write_text("sku,left,price\n" + "\n".join([*rows, "other,1,1"]) + "\n")
    given: dict[str, Any] = {"items": tmp_path / "stock.csv", "where": "left = 1 and (price < 9 or price is null)"}
    allowed = [f"item-{item}" for item in range(0, ITEMS, 2) if item % 3 == 1 and (item % 5 == 0 or item / 2 < 9)]
    api.recommend(exported, tmp_path / "some.csv", run.parent / "data", 5, stage1=stage1, **given)
    said = capsys.readouterr().err
    assert f"{len(allowed)} of {ITEMS} items may be" in said and "are not in the export, such as 'other'" in said
    assert "stock.csv: the ids are the first column, sku\n" in said
    requests: list[Request] = [{**request, "allowed": allowed} for request in whole_requests(dataset)]
    expected = ranked_rows(Retriever.load(exported).recommend(requests, 5, stage1=stage1))
    require_rows(tmp_path / "some.csv", dataset, expected)
    with pytest.raises(ValueError, match="no item of the export may be recommended by --items and --where"):
        api.recommend(exported, tmp_path / "x.csv", run.parent / "data", **{**given, "where": "left = 7"})


def test_columns_of_the_dataset_or_a_table_are_kept_for_filters(
    run: Path, dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, stock = tmp_path / "served", tmp_path / "stock.csv"
    export(run, out, filterable=[])
    assert "this export can keep --filterable brand,price" in capsys.readouterr().err
    counts = np.bincount(dataset.items_flat, minlength=ITEMS)
    assert {name: of.values.tolist() for name, of in read(out).columns.items()} == {"actions": counts.tolist()}
    api.recommend(out, tmp_path / "few.csv", run.parent / "data", 5, where=f"actions > {counts.min()}")
    rare = {f"item-{item}" for item in np.flatnonzero(counts == counts.min())}
    assert not rare & set(pa.csv.read_csv(tmp_path / "few.csv")["item"].to_pylist())
    export(run, out, True, filterable=["brand", "price", "actions"])
    columns = read(out).columns
    assert columns["actions"].values.tolist() == counts.tolist()
    records = [item_record(dataset, item) for item in range(ITEMS)]
    assert columns["brand"].texts is not None and columns["price"].kind == "number"
    brands = [columns["brand"].texts[at] if at >= 0 else None for at in columns["brand"].values.tolist()]
    assert brands == [record["brand"] or None for record in records]
    assert columns["price"].values.tolist() == pytest.approx([record["price"] for record in records])
    stock.write_text("item,left,day\n" + "".join(f"item-{item},{item % 3},2024-01-31\n" for item in range(1, ITEMS)))
    with stock.open("a") as file:
        file.write("other,,\n")
    export(run, out, True, filterable=["left", "day"], catalog=Catalog(str(stock)))
    said = capsys.readouterr().err
    assert f"1 of {ITEMS} items of {dataset.path} are not in {stock}, such as 'item-0'" in said
    assert "items: 1 added, 0 changed" in said
    (tmp_path / "new.csv").write_text('item,left\nnew,7\nanother,\nitem-5,"9,00 €"\nitem-7,1\n')
    (tmp_path / "gone").write_text("item-0\nitem-8\n")
    counts = update_items(out, Catalog(str(tmp_path / "new.csv"), remove=str(tmp_path / "gone")))
    assert (counts["changed"], counts["unchanged"]) == (1, 1)
    contents = read(out)
    assert contents.about.filterable == {"left": "number", "day": "time", "actions": "number"}
    left, day = (contents.columns[name].values.nan_to_num(-1).tolist() for name in ("left", "day"))
    assert left == [9 if item == 5 else item % 3 for item in range(1, ITEMS) if item != 8] + [-1, 7, -1]
    assert day == [1706659200] * (ITEMS - 2) + [-1, -1, -1]
    requests: list[Request] = [
        {**request, "where": "left >= 1", "limit": {"left": 2}} for request in whole_requests(dataset)
    ]
    retriever = Retriever.load(out)
    api.recommend(out, tmp_path / "some.csv", run.parent / "data", 5, where="left >= 1", limit={"left": 2})
    require_rows(tmp_path / "some.csv", dataset, ranked_rows(retriever.recommend(requests, 5)))
    (rows,) = ranked_rows(retriever.recommend([{"history": ["item-3"], "where": "left = 7 or left is null"}], 5))
    assert {row["id"] for row in rows} == {"new", "another", "other"}
    with pytest.raises(ValueError, match="left of item 'new 2' is 'many'; it must be a number, or none"):
        update_items(out, catalog_of(tmp_path, "item,left\nnew 2,many\n"))
    with pytest.raises(ValueError, match=r"--filterable: no column 'colour' in .*; there are: brand, price"):
        export(run, out, True, filterable=["colour"])
    with pytest.raises(ValueError, match=r"--filterable: tags in .* has several values for an item; there are: brand"):
        export(run, out, True, filterable=["tags"])


@contextmanager
def interrupted_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Within, a job is killed when it begins the block after so many; yields a number for each block that it began."""
    best, begun = Retriever.best, list[int]()

    def some(*given: Any) -> Any:
        begun.append(1)
        if len(begun) > count:
            raise KeyboardInterrupt
        return best(*given)

    with monkeypatch.context() as patch:
        patch.setattr(recommend_module, "BLOCK", 16)
        patch.setattr(Retriever, "best", some)
        yield begun


def test_a_killed_job_goes_on(
    exported: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its parts; the bytes are the same. What is not of a job stays."""
    killed, parts = tmp_path / "killed.parquet", tmp_path / "killed.parquet.parts"
    with interrupted_after(4, monkeypatch) as begun:
        api.recommend(exported, tmp_path / "whole.parquet", dataset.path, 5)
    assert len(begun) == 4
    with pytest.raises(KeyboardInterrupt), interrupted_after(2, monkeypatch):
        api.recommend(exported, killed, dataset.path, 5)
    assert not killed.exists() and len(list(parts.glob("*.arrow"))) == 2
    (parts / "mine.txt").touch()
    with interrupted_after(2, monkeypatch):
        api.recommend(exported, killed, dataset.path, 5)
    assert killed.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert [file.name for file in parts.iterdir()] == ["mine.txt"]


def test_parts_of_another_job_are_not_taken_over(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends early and goes on with another export, dataset or option gives what that gives by itself."""
    monkeypatch.setattr(recommend_module, "BLOCK", 16)
    export(run, tmp_path / "export", filterable=["brand", "price"])
    export(run, tmp_path / "other export", filterable=["brand"])
    data = Path(shutil.copytree(run.parent / "data", tmp_path / "data"))
    items = pq.read_table(forget_digests(data) / "items.parquet")
    ids = items["raw_id"].to_pylist()
    renamed = items.set_column(items.schema.get_field_index("raw_id"), "raw_id", pa.array([*ids[1:], ids[0]]))
    pq.write_table(renamed, data / "items.parquet")
    users, rows = load_dataset(data).raw_user_ids(np.arange(60)), [f"{name},{at}" for at, name in enumerate(ids)]
    for name, lines in {
        "users": users[:40], "other users": users[20:], "items": ["item,n", *rows[:30]], "others": ["item,n", *rows]
    }.items():  # fmt: skip
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    asked = {"place": tmp_path / "export", "data": run.parent / "data", "users": tmp_path / "users.csv"}
    asked |= {"items": tmp_path / "items.csv", "where": "n < 40", "limit": {"brand": 1}, "stage1": 9, "k": 3}
    ended = tmp_path / "ended.parquet"
    with pytest.raises(KeyboardInterrupt), interrupted_after(1, monkeypatch):
        api.recommend(out=ended, **asked)
    parts = (tmp_path / "ended.parquet.parts").rename(tmp_path / "parts")
    other: dict[str, Any]
    for other in (
        {"place": tmp_path / "other export"}, {"data": data}, {"users": tmp_path / "other users.csv"},
        {"items": tmp_path / "others.csv"}, {"where": "n > 5"}, {"limit": {"brand": 2}}, {"stage1": 20}, {"k": 4},
    ):  # fmt: skip
        shutil.copytree(parts, tmp_path / "ended.parquet.parts")
        api.recommend(out=ended, **asked | other)
        api.recommend(out=tmp_path / "alone.parquet", **asked | other)
        assert ended.read_bytes() == (tmp_path / "alone.parquet").read_bytes(), other


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_full_disk_is_named_and_what_was_finished_goes_on(
    first: int, exported: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first part is written, after two of them, or when all become the file."""
    monkeypatch.setattr(recommend_module, "BLOCK", 16)
    sync, out, count = files.sync, tmp_path / "out.parquet", itertools.count()

    def full(*_: object) -> None:
        # As pyarrow says it: without a file.
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")

    def filling(file: Path) -> None:
        sync(file)
        if ".arrow." in file.name and next(count) == first:
            full()

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", filling)
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(OSError) as caught:
            api.recommend(exported, out, dataset.path, k=5)
    parts = tmp_path / "out.parquet.parts"
    assert caught.value.filename == str(out) if first == 4 else f"-{first:07}.arrow" in caught.value.filename
    assert caught.value.strerror == "No space left on device" and not out.exists()
    assert parts.exists() == (first > 0)
    finished = sorted(file.name[-13:] for file in parts.glob("*"))
    assert finished == [f"{number:07}.arrow" for number in range(first)]
    api.recommend(exported, out, dataset.path, k=5)
    api.recommend(exported, tmp_path / "whole.parquet", dataset.path, k=5)
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes() and not parts.exists()


def test_recommend_refuses_what_it_cannot_do(run: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("nobody\n")
    for said, given in (
        ("it must be a local file whose name ends with .parquet or .csv", {"out": tmp_path / "x.json"}),
        ("give the dataset with the users' histories: --data.path DIR", {"data": ""}),
        ("users.txt names no user of .*; --users needs the id of one in each line", {"users": tmp_path / "users.txt"}),
        ("no file at missing; --users must name one", {"users": "missing"}),
        ("--users has no place beside --similar-items", {"users": "x", "similar_items": True}),
        ("no column 'a'; there are: actions", {"where": "a = 1"}),
        ("boost_new needs an export that says what is new", {"boost_new": 1.0}),
        ("k is 0; it must be at least 1", {"k": 0}),
    ):
        with pytest.raises(ValueError, match=said):
            api.recommend(exported, **{"out": tmp_path / "x.csv", "data": run.parent / "data", **given})
    assert not list(tmp_path.glob("x.csv*"))
