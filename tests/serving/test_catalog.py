"""Items that change, go and come back in an export, beside an export of the changed catalog, and of all items."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_models
from asking import ranked_rows
from rich.console import Console
from small_models import SmallModel, every_feature, export_small, raw_ids, small_model

from logitmix.modules.kinds.date import NO_DATE
from logitmix.serving.directory import reader
from logitmix.serving.live import search
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.export import catalog as catalog_module
from logitmix.trainer.export import export as export_module
from logitmix.trainer.export.catalog import Catalog
from logitmix.trainer.export.delta import fold, write_delta
from logitmix.trainer.export.update import update_items

X = 70
IDS = raw_ids(X)
GONE = [*range(30, 52), 0, 3, 69]
"""A whole shard of 16 items, parts of two more, the first and the last item."""


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 1)
    monkeypatch.setattr(catalog_module, "CHUNK_ITEMS", 5)
    # The price to filter by is another one than the feature.
    columns = small_models.small_columns
    without = {name: of for name, of in columns(X).items() if name != "price"}
    monkeypatch.setattr(small_models, "small_columns", lambda count: without)


def with_features(model: SmallModel, items: Sequence[int], others: Sequence[int], names: Sequence[str]) -> SmallModel:
    """The model whose items have some features of others."""
    index = np.arange(X)
    index[list(items)] = others
    return replace(model, features=model.features | {name: model.features[name].take(index) for name in names})


def table_of(model: SmallModel, file: Path, items: Sequence[int], names: Sequence[str] = (), **more: Any) -> Catalog:
    columns: dict[str, Any] = {"item": [IDS[item] for item in items], **more}
    for feature in model.tower.schema.of("item"):
        if names and feature.name not in names:
            continue
        column, cells = model.features[feature.name], []
        for item in items:
            of = slice(None) if column.offsets is None else slice(column.offsets[item], column.offsets[item + 1])
            of_item = column.values[item] if column.offsets is None else column.values[of]
            # Row 0 has no value.
            cells.append(
                [str(row) if row else "?" for row in of_item] if feature.kind == "ids"
                else (str(of_item) if of_item else None) if feature.kind == "id"
                else (None if of_item == NO_DATE else str(np.datetime64(int(of_item), "D"))) if feature.kind == "date"
                else of_item.tolist()
            )  # fmt: skip
        columns[feature.name] = cells
    pq.write_table(pa.table(columns), file)
    return Catalog(str(file))


def removing(file: Path, items: Sequence[int]) -> Catalog:
    file.write_text("".join(f"{IDS[item]}\n" for item in items))
    return Catalog(remove=str(file))


REQUESTS: list[Request] = [
    {"history": [IDS[3], IDS[8]]},
    {"history": [IDS[40], IDS[69], IDS[12]], "user": {"age": 7}},
    {"history": IDS[20:45], "time": 5_000_000},
    {"history": [IDS[1]], "allowed": IDS[25:60]},
]


def scores(retriever: Retriever, stage1: int | None = None, blocked: Sequence[int] = ()) -> list[dict[str, float]]:
    some = REQUESTS if retriever.tower.schema.of("user") else REQUESTS[2:]
    requests: list[Request] = [{**request, "blocked": [IDS[item] for item in blocked]} for request in some]
    found = ranked_rows(
        retriever.recommend(requests, stage1 or X, unknown="refuse", exclude_history=False, stage1=stage1)
    )
    return [{row["id"]: pytest.approx(row["score"], abs=2e-5) for row in rows} for rows in found]


@pytest.mark.parametrize(("kind", "cached"), [("mol", True), ("dot", True), ("mol", False)])
def test_changed_features_are_those_of_an_export_of_the_changed_catalog(
    tmp_path: Path, kind: str, cached: bool
) -> None:
    model = small_model(kind, X, schema=every_feature(X))
    served = export_small(model, tmp_path / "served", item_cache=cached)
    before, names = scores(Retriever.load(served)), list(model.features)
    changed = with_features(model, [5, 17, 60], [6, 20, 2], names)
    table = table_of(changed, tmp_path / "t.parquet", [60, 5, 9, 17])
    expected = {"added": 0, "changed": 3, "unchanged": 1, "removed": 0, "num_items": X}
    assert update_items(served, table) == expected
    again = export_small(changed, tmp_path / "changed", item_cache=cached)
    assert scores(Retriever.load(served)) == scores(Retriever.load(again)) != before
    # What the table has no column for stays.
    repriced = with_features(changed, [5, 9], [10, 11], ["price"])
    assert update_items(served, table_of(repriced, tmp_path / "t.parquet", [5, 9], ["price"]))["changed"] == 2
    again = export_small(repriced, tmp_path / "changed", overwrite=True, item_cache=cached)
    assert scores(Retriever.load(served)) == scores(Retriever.load(again))


@pytest.mark.parametrize(
    "options", [{}, {"item_cache": False}, {"precision": "int8"}], ids=["cached", "computed", "int8"]
)
def test_removed_items_are_in_no_answer_and_histories_hold_them(tmp_path: Path, options: dict[str, Any]) -> None:
    model = small_model("mol", X, schema=every_feature(X))
    served = export_small(model, tmp_path / "served", **options)
    before, columns = Retriever.load(served), reader.read(served).columns
    counts = update_items(served, removing(tmp_path / "gone", GONE))
    assert counts == {"added": 0, "changed": 0, "unchanged": 0, "removed": len(GONE), "num_items": X - len(GONE)}
    after = Retriever.load(served)
    for stage1 in (None, 12):
        found = scores(after, stage1)
        assert found == scores(before, stage1, GONE) and all(found)
    assert not {IDS[item] for item in GONE} & {name for of_request in scores(after) for name in of_request}
    assert not search(after, IDS[40], 5)["items"] and search(before, IDS[40], 5)["items"]
    assert len(search(after, "", X)["items"]) == X - len(GONE)
    kept = [item for item in range(X) if item not in GONE]
    category, was = reader.read(served).columns["category"], columns["category"]
    assert category.values.tolist() == was.values[kept].tolist()
    # They come back with what was learned of them, and what is removed stays so.
    back = table_of(model, tmp_path / "t.parquet", [69, 35, 40, 9])
    assert update_items(served, back)["added"] == 3
    left = [item for item in GONE if item not in (69, 35, 40)]
    assert scores(Retriever.load(served)) == scores(before, None, left)
    assert reader.read(served).about.removed == len(left)


def test_the_items_of_a_table_alone_are_left(tmp_path: Path) -> None:
    model = small_model("mol", X, schema=every_feature(X))
    served = export_small(model, tmp_path / "served")
    catalog = replace(table_of(model, tmp_path / "t.parquet", range(9, 20)), only=True)
    new = pa.table({"item": [f"new {number}" for number in range(7)]})
    both = pa.concat_tables([pq.read_table(catalog.items), new], promote_options="default")
    pq.write_table(both, catalog.items)
    assert update_items(served, catalog) == {
        "added": 7, "changed": 0, "unchanged": 11, "removed": X - 11, "num_items": 18,
    }  # fmt: skip
    retriever = Retriever.load(served)
    (rows,) = ranked_rows(
        retriever.recommend([{"history": [IDS[0], "new 1"]}], X, unknown="refuse", exclude_history=False)
    )
    assert {row["id"] for row in rows} == {*IDS[9:20], *(f"new {n}" for n in range(7))}
    # Then nothing changes, and nothing is written.
    before = (served / "manifest.json").stat()
    assert update_items(served, catalog)["unchanged"] == 18
    assert (served / "manifest.json").stat() == before


def test_a_model_of_ids_alone_has_other_titles_and_fewer_items(tmp_path: Path) -> None:
    served = export_small(small_model("dot", X, hindexer=False), tmp_path / "served")
    before = Retriever.load(served)
    (tmp_path / "gone").write_text(f"{IDS[2]}\n\n{IDS[2]}\nnone\n")
    (tmp_path / "t.csv").write_text(f"sku,title\n{IDS[5]},Five\n{IDS[6]},«{IDS[6]}»\n")
    said = StringIO()
    counts = update_items(served, Catalog(str(tmp_path / "t.csv"), remove=str(tmp_path / "gone")), Console(file=said))
    assert counts == {"added": 0, "changed": 1, "unchanged": 1, "removed": 1, "num_items": X - 1}
    words = " ".join(said.getvalue().split())
    assert "1 of 2 items in" in words and "are not in the export, such as 'none'" in words
    assert "t.csv: the ids are the first column, sku" in words
    assert f"removes 1 item, such as '{IDS[2]}'" in words
    assert "t.csv has no column in_stock, category, since: items keep the values that they had" in words
    after = Retriever.load(served)
    titles = {row["id"]: row["title"] for row in after.rows([IDS[2], IDS[3]], X, exclude_history=False)}
    assert titles == {name: "Five" if name == IDS[5] else f"«{name}»" for name in IDS if name != IDS[2]}
    assert scores(after) == scores(before, None, [2])


def test_a_delta_follows_an_export_with_another_catalog(tmp_path: Path) -> None:
    model = small_model("mol", X, schema=every_feature(X))
    served, whole = (export_small(model, tmp_path / name) for name in ("served", "whole"))
    update_items(served, removing(tmp_path / "gone", GONE))
    (tmp_path / "deltas").mkdir()
    one, other = reader.read(served), reader.read(whole)
    for first, before, after in ((served, one, whole), (whole, other, served)):
        write_delta(before, after, tmp_path / "deltas" / "1", 1)
        fold(first, tmp_path / "deltas", tmp_path / "folded", overwrite=True)
        for file in after.iterdir():
            assert file.read_bytes() == (tmp_path / "folded" / file.name).read_bytes(), file.name
        shutil.rmtree(tmp_path / "deltas" / "1")


def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = small_model("mol", X, schema=every_feature(X))
    served = export_small(model, tmp_path / "served")
    before = (served / "manifest.json").read_bytes()
    table, every = table_of(model, tmp_path / "t.parquet", [4]), removing(tmp_path / "gone", range(X))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "t.csv").write_text("name,price\nFour,4\n")
    others = Catalog(str(tmp_path / "t.csv"))
    for catalog, said in (
        (replace(every, items=table.items), f"'{IDS[4]}' is in .*t.parquet and in .*gone"),
        (every, f"no item of {X} would be left"),
        (Catalog(remove="nowhere"), "no file at nowhere; --remove must name one"),
        (replace(others, only=True), rf"none of the 1 items in .*t\.csv is in the export \(ids Four / {IDS[0]}\)"),
        (Catalog(remove=str(tmp_path / "bytes")), "is not text in UTF-8"),
    ):
        with pytest.raises(ValueError, match=said):
            update_items(served, catalog)
    assert (served / "manifest.json").read_bytes() == before
    with pytest.raises(ValueError, match="nothing to do"):
        Catalog()
    with pytest.raises(ValueError, match="--only leaves the items of a table"):
        Catalog(remove="gone", only=True)
