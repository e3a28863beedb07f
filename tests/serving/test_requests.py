"""One form of request in Python, over HTTP and in files, an error for each that is wrong, and what is popular."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import small_models
from asking import ranked_rows
from small_models import every_feature, export_small, raw_ids, small_columns, small_model
from test_server import Running, assert_alike, running

from logitmix.common.files import from_json
from logitmix.serving import request_file
from logitmix.serving.attributes import with_changes
from logitmix.serving.body import Body
from logitmix.serving.request import OPTIONS, Options, Request
from logitmix.serving.retriever import Answer, Retriever
from logitmix.trainer import cli

X = 60
IDS = raw_ids(X)
COUNTS = [None if item == 7 else (item * 37) % 23 for item in range(X)]
"""The actions of each item, some of which are equal."""
BY_COUNT = sorted(range(X), key=lambda item: (-(COUNTS[item] or 0), item))
COLUMNS = small_columns(X) | {"actions": COUNTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_models, "small_columns", lambda count: COLUMNS)
        model = small_model("mol", X, schema=every_feature(X))
        yield export_small(model, tmp_path_factory.mktemp("requests") / "served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as found:
        yield found


def everywhere(server: Running, tmp_path: Path, requests: list[Any]) -> list[list[Any]]:
    """The answers in Python, over HTTP and of a file, without what says which export answered."""
    retriever = server.export.retriever
    over_http = [
        {name: of for name, of in server.ask(of)[1].items() if name in Answer.__annotations__} for of in requests
    ]
    lines = "".join(json.dumps(of) + "\n" for of in requests)
    (tmp_path / "asked.jsonl").write_text(lines)
    asked = request_file.read_requests(tmp_path / "asked.jsonl")
    request_file.answer_file(retriever, asked, tmp_path / "out.jsonl", {})
    of_file = [from_json(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    return [retriever.recommend(requests), over_http, of_file]


def test_python_http_and_files_take_the_same_request(server: Running, tmp_path: Path) -> None:
    """Each entry is given with a value, and with none."""
    history = [IDS[3], IDS[20]]
    values: dict[str, Any] = {
        "history": [IDS[5]],
        "timestamps": [3, 4],
        "time": 9,
        "user": {"age": 7},
        "events": [{}, {"action": "1"}],
        "want": "1",
        "allowed": IDS[10:30],
        "blocked": IDS[:30],
        "where": "price > 1",
        "limit": {"category": 1},
        "k": 3,
        "unknown": "refuse",
        "exclude_history": False,
        "stage1": 12,
        "explain": True,
        "columns": True,
        "boost_new": 0.0,
    }
    assert list(values) == list(Request.__annotations__)
    assert values.keys() == Body.model_fields.keys() and set(OPTIONS) == set(asdict(Options())) < values.keys()
    requests = [{"history": history, name: value} for name, value in values.items()]
    requests += [{"history": history, name: None} for name in values if name != "history"]
    in_python, over_http, of_file = everywhere(server, tmp_path, requests)
    plain = ranked_rows(server.export.retriever.recommend([{"history": history}]))[0]
    for asked, found, *others in zip(requests, in_python, over_http, of_file, strict=True):
        assert "error" not in found, (asked, found)
        for other in others:
            assert_alike(other["items"], found["items"])
            assert [row.keys() for row in other["items"]] == [row.keys() for row in found["items"]]
        if None in asked.values():
            assert_alike(found["items"], plain)
    of_entry = dict(zip(values, in_python, strict=False))
    assert all("why" in row for row in of_entry["explain"]["items"]) and len(of_entry["k"]["items"]) == 3
    assert all("columns" in row for row in of_entry["columns"]["items"])


def test_a_bad_request_of_a_batch_has_an_error_and_the_others_have_items(server: Running) -> None:
    bad: list[tuple[Any, str]] = [
        ({"history": "id 7"}, "history is 'id 7'; it must be a list"),
        ({"history": IDS[:2], "k": 5, "stage1": 4}, "stage1 is 4; it must be at least k (5)"),
        ({"history": ["nobody"], "unknown": "refuse"}, "no item of demo has the id 'nobody'"),
        ({"history": IDS[:2], "user": {"height": 3}}, "the model has no user feature 'height'"),
        ({"history": IDS[:2], "where": "size > 3"}, "no column 'size' (did you mean since?); there are: price"),
        (["id 7"], "is ['id 7']; it must be a mapping"),
        ({"history": IDS[:3], "events": [{}]}, "the request has 1 events for 3 items"),
        ({"history": IDS[:2], "user": []}, "user or an event is []"),
        ({"history": IDS[:2], "timestamps": [5, 4]}, "its timestamps fall, from 5 to 4; they must be oldest first"),
        ({"history": IDS[:1], "timestamps": [2], "time": 1}, "the request: its time is 1; its last action"),
    ]
    retriever, good = server.export.retriever, {"history": [IDS[9]]}
    (expected,) = ranked_rows(retriever.recommend([good]))
    answers = retriever.recommend([good, *(of for of, _ in bad), good])
    for answer in (answers[0], answers[-1]):
        assert_alike(answer["items"], expected)
    for answer, (_, problem) in zip(answers[1:-1], bad, strict=True):
        assert answer.keys() == {"error"} and answer["error"].startswith("the request") and problem in answer["error"]
    for of_batch in ("id 7", {"history": IDS[:2]}, 5):
        with pytest.raises(ValueError, match=r"the requests are .*; they must be a list of mappings"):
            retriever.recommend(of_batch)  # type: ignore[arg-type]


COLD: list[dict[str, Any]] = [
    {},
    {"history": []},
    {"history": ["nobody", "nothing"], "timestamps": [1, 2]},
    {"history": None, "user": {}},
    {"history": [], "unknown": "refuse", "k": 4},
]


def test_what_is_popular_is_answered_where_nothing_is_known(server: Running, tmp_path: Path) -> None:
    warm: dict[str, Any] = {"history": IDS[:2]}
    for answers in everywhere(server, tmp_path, [*COLD, warm]):
        assert "fallback" not in answers.pop()
        for asked, answer in zip(COLD, answers, strict=True):
            assert answer["fallback"] == "popular"
            expected = BY_COUNT[: asked.get("k", 10)]
            assert [(row["rank"], row["id"], row["score"]) for row in answer["items"]] == [
                (rank, IDS[item], COUNTS[item]) for rank, item in enumerate(expected, start=1)
            ]
            assert [row["title"] for row in answer["items"]] == [f"«{IDS[item]}»" for item in expected]
    known: list[Request] = [{"user": {"age": 7}}, {"history": ["nobody"], "unknown": "unknown"}]
    assert all("fallback" not in answer for answer in server.export.retriever.recommend(known))


def test_filters_hold_for_what_is_popular(server: Running) -> None:
    retriever = server.export.retriever
    columns = small_columns(X)
    allowed, blocked = [IDS[item] for item in range(0, X, 2)], [IDS[item] for item in BY_COUNT[:3]]
    cheap = [item for item in BY_COUNT if (columns["price"][item] or 99) < 5]
    even = [item for item in BY_COUNT if item % 2 == 0]
    cases: list[tuple[Request, list[int]]] = [
        ({"where": "price < 5"}, cheap),
        ({"allowed": [*allowed, "nobody"]}, even),
        ({"blocked": [*blocked, "nobody"]}, BY_COUNT[3:]),
        (
            {"where": "price < 5", "allowed": allowed, "blocked": blocked},
            [item for item in cheap if item in even and item not in BY_COUNT[:3]],
        ),
        ({"allowed": []}, []),
    ]
    for request, expected in cases:
        (answer,) = retriever.recommend([request], X)
        assert answer["fallback"] == "popular" and [row["id"] for row in answer["items"]] == [IDS[i] for i in expected]
    (answer,) = retriever.recommend([{"limit": {"category": 1}, "explain": True}])
    categories = [columns["category"][IDS.index(row["id"])] for row in answer["items"]]
    assert len({*categories} - {None}) == len([of for of in categories if of is not None])
    assert all(row["why"] == {"components": [], "similar": []} for row in answer["items"])
    within_stock = Retriever.load(server.export._directory, where="in_stock = 1")
    stocked = [IDS[item] for item in BY_COUNT if columns["in_stock"][item] == 1]
    assert [row["id"] for row in within_stock.recommend([{}], X)[0]["items"]] == stocked


def test_what_is_popular_is_so_by_the_counts_of_this_moment(folder: Path) -> None:
    retriever = Retriever.load(folder)
    assert retriever.recommend([{}], 1)[0]["items"][0]["id"] == IDS[BY_COUNT[0]]
    columns, _ = with_changes(retriever.columns, retriever.raw_ids, {IDS[7]: {"actions": 1000.0}})
    retriever.filters.change(columns)
    row = retriever.recommend([{}], 1)[0]["items"][0]
    assert (row["id"], row["score"]) == (IDS[7], 1000.0)


@pytest.mark.parametrize("counts", [None, [str(item) + "x" for item in range(X)]], ids=["none", "texts"])
def test_an_export_without_counts_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[str] | None
) -> None:
    """A model that has features of users answers as for a user of whom all of them are unknown."""
    monkeypatch.setattr(small_models, "small_columns", lambda count: {"actions": counts} if counts else {})
    plain, featured = small_model("mol", X), small_model("mol", X, schema=every_feature(X))
    problem = "the request names no known item, and the export has no column 'actions', which says what is popular; "
    retriever = Retriever.load(export_small(plain, tmp_path / "plain"))
    assert retriever.recommend([{}]) == [{"error": f"{problem}give an item, or export with --filterable actions"}]
    retriever = Retriever.load(export_small(featured, tmp_path / "featured"))
    unknown, stated = retriever.recommend([{}, {"user": {of.name: None for of in featured.tower.schema.of("user")}}])
    assert unknown == stated and "fallback" not in unknown


def test_the_command_says_that_it_answers_what_is_popular(
    folder: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    cli.main(["retrieve", str(folder), "-k", "2", "--json"])
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["fallback"] == "popular" and [row["id"] for row in answer["items"]] == [IDS[i] for i in BY_COUNT[:2]]
    expected = "nothing is known of the user: these items have the most actions, and the score is their number\n"
    assert said.err == expected
    assert "no item of demo has the id 'nobody'" in refusal("retrieve", str(folder), "--history", "nobody")
