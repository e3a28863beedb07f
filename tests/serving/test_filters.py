"""Requests with conditions on columns are answered as brute force answers them."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import small_models
import torch
from asking import answered, ranked_rows
from hypothesis import given
from hypothesis import strategies as st
from small_models import SmallModel, brute_force, export_small, raw_ids, small_columns, small_model
from test_server import running

from logitmix.serving.attributes import read_changes
from logitmix.serving.live import LiveExport
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Retriever
from logitmix.serving.server import load_app
from logitmix.serving.settings import ServerSettings
from logitmix.trainer import cli
from logitmix.trainer.export import export as export_module
from logitmix.trainer.export.columns import column_of

X, STAGE_1 = 400, 40
IDS = raw_ids(X)
HISTORIES = [[3, 7, 200], [11], [399, 0, 5, 5]]


class Served:
    """A small model, with a column of X numbers at random from 0 to X - 1 besides the usual ones."""

    def __init__(self, folder: Path, kind: str, hindexer: bool) -> None:
        self.model: SmallModel = small_model(kind, X, hindexer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export_module, "SHARD_BYTES", 5000)
            self.path = export_small(self.model, folder / f"{kind} {hindexer}")
        self.columns = small_columns(X) | {"place": np.random.default_rng(0).permutation(X).tolist()}
        self.one = Retriever.load(self.path)
        self.give(self.one)

    def give(self, retriever: Retriever) -> None:
        retriever.filters.change({name: column_of(name, pa.array(of)) for name, of in self.columns.items()})

    def ranking(self, history: list[int], may: Sequence[bool], exclude: bool, stage1: int | None) -> list[str]:
        """All that may be found, best first; of two stages, that of the h-indexer's best of these."""
        scores = brute_force(self.model, [history], exclude)
        scores.leave_out(~torch.tensor(may))
        (score_X,) = scores.of(stage1)
        order = score_X.sort(descending=True, stable=True).indices.tolist()
        return [IDS[item] for item in order if score_X[item] > -torch.inf]


@pytest.fixture(
    scope="module", params=[("mol", True), pytest.param(("dot", True), marks=pytest.mark.slow), ("dot", False)], ids=str
)
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Served:
    return Served(tmp_path_factory.mktemp("filters"), *request.param)


@given(data=st.data())
def test_what_is_allowed_is_ranked_as_by_brute_force(served: Served, data: st.DataObject) -> None:
    """At any selectivity, beside lists of ids, in one and two stages."""
    share = data.draw(st.sampled_from([0, 1, 2, STAGE_1 - 1, STAGE_1, STAGE_1 + 1, 100, 200, X]))
    least = data.draw(st.sampled_from([0, 1]))
    may = [
        place < share and of >= least
        for place, of in zip(served.columns["place"], served.columns["in_stock"], strict=True)
    ]
    history, items = data.draw(st.sampled_from(HISTORIES)), st.lists(st.integers(0, X - 1), max_size=90)
    request: Request = {"history": [IDS[item] for item in history], "where": f"place < {share} and in_stock >= {least}"}
    if data.draw(st.booleans()):
        allowed = data.draw(items)
        request["allowed"] = [IDS[item] for item in allowed]
        may = [of and item in allowed for item, of in enumerate(may)]
    if data.draw(st.booleans()):
        blocked = data.draw(items)
        request["blocked"] = [IDS[item] for item in blocked]
        may = [of and item not in blocked for item, of in enumerate(may)]
    exclude, stage1 = data.draw(st.booleans()), data.draw(st.sampled_from([None, STAGE_1]))
    k = data.draw(st.sampled_from([1, 10, STAGE_1]))
    options = Options(k, exclude_history=exclude, stage1=stage1)
    other: Request = {"history": [IDS[1]], "where": "category is null"}
    found, _ = answered(served.one, [request, other], options)
    assert [row["id"] for row in found] == served.ranking(history, may, exclude, stage1)[:k]


@given(data=st.data())
def test_limits_are_those_of_a_walk_through_the_ranking(served: Served, data: st.DataObject) -> None:
    numbers = st.integers(1, 4)
    limit = data.draw(st.fixed_dictionaries({"category": numbers}, optional={"price": numbers, "place": numbers}))
    history, stage1 = data.draw(st.sampled_from(HISTORIES)), data.draw(st.sampled_from([None, STAGE_1]))
    share, k = data.draw(st.sampled_from([3, STAGE_1 + 1, X])), data.draw(st.sampled_from([1, 5, STAGE_1]))
    request: Request = {"history": [IDS[item] for item in history], "where": f"place < {share}", "limit": limit}
    other: Request = {"history": [IDS[1]]}
    seen, expected = Counter[tuple[str, Any]](), []
    for raw_id in served.ranking(history, [place < share for place in served.columns["place"]], True, stage1):
        of = [(name, value) for name in limit if (value := served.columns[name][IDS.index(raw_id)]) is not None]
        if all(seen[at] < limit[at[0]] for at in of):
            expected.append(raw_id)
            seen.update(of)
    options = Options(k, exclude_history=True, stage1=stage1)
    found, alone = answered(served.one, [request, other], options)
    assert [row["id"] for row in found] == expected[:k]
    assert [row["id"] for row in alone] == served.ranking([1], [True] * X, True, stage1)[:k]


@given(data=st.data())
def test_boosted_items_are_ranked_as_by_brute_force(served: Served, data: st.DataObject) -> None:
    """Each part has its stage 1, so the boost brings items that the h-indexer has below all those that are not new."""
    share = data.draw(st.sampled_from([0, 5, STAGE_1 + 5, X - 5, X]))
    new = [place < share for place in served.columns["place"]]
    history, stage1 = data.draw(st.sampled_from(HISTORIES)), data.draw(st.sampled_from([None, STAGE_1]))
    k, boost = data.draw(st.sampled_from([1, 10, STAGE_1])), data.draw(st.sampled_from([-30.0, -0.5, 2.0, 30.0]))
    least = data.draw(st.sampled_from([0, 1]))
    stated = [(place % 3 or None) if of else 0 for of, place in zip(new, served.columns["place"], strict=True)]
    columns = {"new": stated, "in_stock": served.columns["in_stock"]}
    served.one.filters.change({name: column_of(name, pa.array(of, pa.int64())) for name, of in columns.items()})
    try:
        expected: list[tuple[float, int]] = []
        for part in (False, True):
            scores = brute_force(served.model, [history], True)
            may = [of == part and there >= least for of, there in zip(new, columns["in_stock"], strict=True)]
            scores.leave_out(~torch.tensor(may))
            score_X = scores.of(stage1)[0] + (boost if part else 0.0)
            expected += [(-score, item) for item, score in enumerate(score_X.tolist()) if score > -torch.inf]
        options = Options(k, exclude_history=True, stage1=stage1, boost_new=boost)
        requests: list[Request] = [{"history": [IDS[of] for of in history], "where": f"in_stock >= {least}"}]
        (found,) = answered(served.one, requests, options)
        assert [row["id"] for row in found] == [IDS[item] for _, item in sorted(expected)[:k]]
        assert [row["score"] for row in found] == pytest.approx([-score for score, _ in sorted(expected)[:k]], abs=1e-4)
    finally:
        served.give(served.one)


def test_a_boost_needs_to_know_what_is_new(served: Served) -> None:
    said = "boost_new needs an export that says what is new: logitmix export --filterable new"
    with pytest.raises(ValueError, match=said):
        answered(served.one, [{"history": [IDS[3]]}], Options(boost_new=1.0))
    request: Request = {"history": [IDS[3]], "boost_new": 1.0}
    assert served.one.recommend([request, {"history": [IDS[3]]}, request])[::2] == [{"error": said}] * 2
    for wrong in (float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match=r"boost_new is .*; it must be a finite number"):
            Options(boost_new=wrong)  # type: ignore[arg-type]
    with running(served.path) as server:
        assert server.ask({"history": [IDS[3]], "boost_new": 1}) == (400, {"error": said})
        assert server.ask({"history": [IDS[3]], "boost_new": 0})[0] == 200
        assert server.ask(b'{"boost_new": NaN}')[0] == server.ask({"boost_new": "1"})[0] == 400
    with pytest.raises(ValueError, match=said):
        load_app(served.path, ServerSettings(boost_new=1.0), print)


def test_a_default_joins_what_requests_say(served: Served) -> None:
    retriever = Retriever.load(served.path, where="in_stock = 1")
    served.give(retriever)
    stock = [of == 1 for of in served.columns["in_stock"]]
    cheap = [of and place < 50 for of, place in zip(stock, served.columns["place"], strict=True)]
    requests: list[Request] = [{"history": [IDS[3]]}, {"history": [IDS[3]], "where": "place < 50 or place < 0"}]
    for rows, may in zip(ranked_rows(retriever.recommend(requests, X, stage1=X)), (stock, cheap), strict=True):
        assert [row["id"] for row in rows] == served.ranking([3], may, True, None)
    found = retriever.retrieve([[3]], X, stage1=X).items
    assert [IDS[item] for item in found[0].tolist() if item >= 0] == served.ranking([3], stock, True, None)
    with pytest.raises(ValueError, match="no column 'weight'; there are: price, in_stock, category, since"):
        Retriever.load(served.path, where="weight = 1")


def test_values_are_shown_to_who_asks(tmp_path: Path) -> None:
    folder = export_small(small_model("mol", X), tmp_path / "served")
    columns, retriever = small_columns(X), Retriever.load(folder)
    (rows,) = answered(retriever, [{"history": [IDS[3]]}], Options(50, columns=True))
    for row in rows:
        of = {name: values[IDS.index(row["id"])] for name, values in columns.items()}
        expected = {name: str(value) if name == "since" else value for name, value in of.items() if value is not None}
        assert row["columns"] == expected
    assert all("columns" not in row for row in retriever.rows([IDS[3]], 5))
    column = column_of("of", pa.array([-86_400, 2**61, 36_000, None], pa.timestamp("s")))
    assert [column.shown(item) for item in range(4)] == ["1969-12-31", 2.0**61, "1970-01-01T10:00:00", None]


def test_mistakes_are_those_of_a_request(tmp_path: Path) -> None:
    folder = export_small(small_model("mol", X), tmp_path / "served")
    with running(folder) as server:
        asked = {"history": [IDS[3]], "k": 3}
        status, answer = server.ask(asked | {"where": "prise < 5"})
        assert (status, answer["error"]) == (
            400,
            "the request: where 'prise < 5', at character 1: no column 'prise' (did you mean price?); there are: "
            "price, in_stock, category, since",
        )
        for wrong in ({"limit": {"kind": 3}}, {"limit": {"category": 0}}, {"where": 5}, {"where": "x" * 10_001}):
            assert server.ask(asked | wrong)[0] == 400
        status, answer = server.ask(asked | {"where": "category = 'b b'"})
        assert status == 200 and {small_columns(X)["category"][IDS.index(row["id"])] for row in answer["items"]} == {
            "b b"
        }


def test_the_command_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(export_small(small_model("mol", X), tmp_path / "served"))
    words = ["retrieve", folder, "--history", IDS[3], "--json", "--request"]
    cli.main([*words, '{"where": "price > 5 and category != a", "limit": {"category": 3}}'])
    rows = json.loads(capsys.readouterr().out)["items"]
    columns, items = small_columns(X), [IDS.index(row["id"]) for row in rows]
    assert all(columns["price"][item] > 5 for item in items)
    assert Counter(columns["category"][item] for item in items) == {"b b": 3, "c's": 3, "d": 3}
    cli.main([*words, '{"where": "category = none"}'])
    said = "no item is left by the request's conditions and the history\n"
    assert capsys.readouterr() == ('{"items": []}\n', said)


def test_the_command_answers_a_file_and_says_what_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = export_small(small_model("mol", X), tmp_path / "served")
    file = tmp_path / "asked.jsonl"
    file.write_text(f'\n["nobody"]\n\n["{IDS[3]}"]\n{{"history": ["{IDS[3]}"], "k": 0}}\n')
    out = tmp_path / "out.jsonl"
    cli.main(["retrieve", str(served), "--histories", str(file), "--out", str(out)])
    problem = f"the request: no item of demo has the id 'nobody'; give raw ids of its {X} items, such as 'id 0'"
    assert capsys.readouterr() == (
        f"{out}: 1 request answered\n",
        f"2 requests cannot be answered, such as {file}, line 2: {problem}\n",
    )
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [*answers[0].items()] == [("error", problem)] and len(answers[1]["items"]) == 10
    assert answers[2] == {"error": "the request: k is 0; it must be at least 1"}


def test_attributes_change_without_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file says holds for as long as it says so, also for a new export; with a mistake, nothing changes, and
    where an export has other columns, the values in those that it has too."""
    folder, file, said = export_small(small_model("mol", X), tmp_path / "served"), tmp_path / "stock.csv", list[str]()
    stock = {raw_id: of == 1 for raw_id, of in zip(IDS, small_columns(X)["in_stock"], strict=True)}
    first, *_, last = (raw_id for raw_id in IDS if not stock[raw_id])
    with pytest.raises(ValueError, match=r"there is no file .*stock.csv; make it, or give another --attributes"):
        LiveExport(folder, said.append, attributes=file)

    def give(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    give(f"in_stock,item\n1,{first}\n1,other\n")
    export = LiveExport(folder, said.append, where="in_stock = 1", attributes=file)

    def require(*more: str) -> None:
        (rows,) = ranked_rows(export.retriever.recommend([{"history": [IDS[3]]}], X, exclude_history=False))
        assert {row["id"] for row in rows} == {raw_id for raw_id in IDS if stock[raw_id]} | {*more}

    require(first)
    assert said == ["attributes: values of 1 item; 1 id that no item has, such as 'other'"]
    give(f"item,in_stock\n{first},1\n{last},much\n")
    export.look_at_attributes()
    export.look_at_attributes()
    require(first)
    assert said[1:] == [
        f"the attributes stay as they were: {file}, line 3: in_stock is 'much'; it must be a number, or none"
    ]
    give(f"item,in_stock\n{last},1\n")
    export.look_at_attributes()
    require(last)
    export_small(small_model("mol", X, seed=1), folder, overwrite=True)
    assert export.refresh() and export.refused_attributes == ""
    require(last)
    give(f"item,in_stock,category\n{last},1,d\n")
    export.look_at_attributes()
    columns = {name: of for name, of in small_columns(X).items() if name != "category"}
    monkeypatch.setattr(small_models, "small_columns", lambda _: columns)
    export_small(small_model("mol", X, seed=2), folder, overwrite=True)
    assert export.refresh() and "no filterable column 'category'" in export.refused_attributes
    require(last)
    export.release()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "price,item\n5,7\n", ""),
        ("a.csv", "", ""),
        ("a.csv", "item,price\n7,5", "its last line has no end; write the whole beside it, and then rename that"),
        ("a.csv", "item,price\n7,5,1\n", "line 2: it has 3 fields, and the header 2"),
        ("a.csv", "item,prize\n7,5\n", r"line 2: no filterable column 'prize' \(did you mean price\?\); there are"),
        ("a.csv", "\udcff\n", "cannot be read"),
    ],
)
def test_files_of_attributes_are_read_whole_or_not_at_all(tmp_path: Path, name: str, text: str, said: str) -> None:
    columns = {of: column_of(of, pa.array(values)) for of, values in small_columns(X).items()}
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    if not said:
        assert read_changes(tmp_path / name, columns) == ({"7": {"price": 5.0}} if text else {})
        return
    with pytest.raises(ValueError, match=said) as error:
        read_changes(tmp_path / name, columns)
    assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)
