"""Shards of an export answer as one process does, bit for bit."""

import asyncio
import pickle
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import ranked_rows
from small_models import LENGTH, every_feature, export_small, random_histories, raw_ids, small_model
from test_server import running
from waiting import until

from logitmix.common.files import publish
from logitmix.serving.cluster import Arguments, Shard, Shards, build
from logitmix.serving.directory.reader import read
from logitmix.serving.group import Group, ShardsLost
from logitmix.serving.live import LiveExport
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.export import export as export_module
from logitmix.trainer.export.catalog import Catalog
from logitmix.trainer.export.update import update_items

X = 300
HISTORIES = random_histories(X, [1, 2, LENGTH - 1, LENGTH, 40, *[3, 5] * 14])
"""More than are ranked at once."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With many shards and with two, which are fewer than three processes."""
    folder, found = tmp_path_factory.mktemp("exports"), {}
    with pytest.MonkeyPatch.context() as patch:
        for name, kind, size, options in (
            ("cached", "mol", 5000, {}),
            ("two shards", "mol", 60_000, {}),
            ("computed", "mol", 12_000, {"item_cache": False}),
            ("one stage", "dot", 2000, {}),
            ("int8", "mol", 5000, {"precision": "int8"}),
        ):
            patch.setattr(export_module, "SHARD_BYTES", size)
            model = small_model(kind, X, hindexer=name != "one stage", schema=every_feature(X))
            found[name] = export_small(model, folder / name, **options)  # type: ignore[arg-type]
        patch.setattr(export_module, "SHARD_BYTES", 5000)
        found["removed"] = export_small(small_model("mol", X + 20, schema=every_feature(X + 20)), folder / "removed")
    (folder / "gone").write_text("\n".join(raw_ids(X + 20)[X:]))
    assert update_items(found["removed"], Catalog(remove=str(folder / "gone")))["num_items"] == X
    assert len(list(found["two shards"].glob("items-*"))) == 2
    assert all(len(list(path.glob("items-*"))) > 3 for name, path in found.items() if name != "two shards")
    return found


def answers(retriever: Retriever) -> list[Any]:
    """Every way to ask: both modes, filters, histories left in, batches, more items than a part has."""
    found: list[Any] = []
    for k, stage1, exclude_history in ((10, 40, True), (10, 10, False), (200, X - 1, True), (X + 5, None, True)):
        of = retriever.retrieve(HISTORIES, k, exclude_history, stage1)
        found.append((of.items.tolist(), of.scores.tolist()))
    ids = raw_ids(X)
    requests: list[Request] = [
        {"history": ids[5:9]},
        {"history": ids[5:9], "allowed": ids[::7], "blocked": ids[:140]},
        {"history": ids[290:], "allowed": ids[:12], "user": {"age": 60}},
        {"history": [ids[299], "new"], "allowed": ids[100:], "blocked": [*ids[200:], "none"]},
        {"history": ids[:1], "allowed": []},
        {"history": ids[2:4], "where": "in_stock = 1 and price > 1", "limit": {"category": 2}},
        {"history": ids[:3], "where": "category is not null", "allowed": ids[50:]},
        {"history": [], "user": {"age": 20}},
    ]
    for stage1 in (None, 40, 20):
        found += [
            ranked_rows(retriever.recommend(requests, 20, stage1=stage1)),
            retriever.rows(ids[3:5], 7, stage1=stage1),
        ]
    return found


class Call:
    """What Ray Serve's handle returns for a call."""

    def __init__(self, found: "Future[Any]") -> None:
        self._found = found

    def result(self, timeout_s: float) -> Any:
        return self._found.result(timeout_s)

    def cancel(self) -> None:
        self._found.cancel()


class Handle:
    """A handle of Ray Serve to a shard in this process, which gets and returns copies."""

    def __init__(self, shard: Shard) -> None:
        self.shard: Shard | None = shard
        self.pool = ThreadPoolExecutor(2)
        self.hangs = False

    def __getattr__(self, method: str) -> Any:
        def call(given: bytes) -> Any:
            if self.hangs:
                raise TimeoutError
            if self.shard is None:
                raise RuntimeError("the actor died")
            return pickle.loads(pickle.dumps(asyncio.run(getattr(self.shard, method)(*pickle.loads(given)))))

        return SimpleNamespace(remote=lambda *given: Call(self.pool.submit(call, pickle.dumps(given))))


def handles(folders: Sequence[Path], **given: Any) -> list[Handle]:
    count = len(folders)
    return [
        Handle(Shard(Arguments(directory=str(folder), shards=count, **given), number))
        for number, folder in enumerate(folders)
    ]


def front(shards: list[Handle], said: list[str], seconds: float = 60, allow_partial: bool = False) -> Shards:
    return Shards(shards, said.append, seconds, allow_partial)


@pytest.fixture(autouse=True)
def _shards_look_when_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "_watch", lambda of: None)


@pytest.mark.parametrize("name", ["cached", "two shards", "computed", "one stage", "int8", "removed"])
def test_shards_answer_as_one_process_does(exports: dict[str, Path], name: str) -> None:
    """Also where there are fewer files of items than shards."""
    said: list[str] = []
    export = LiveExport(exports[name], said.append, front(handles([exports[name]] * 3), said))
    assert answers(export.retriever) == answers(Retriever.load(exports[name]))
    with pytest.raises(ValueError, match="request 0: feature age is 'old'"):
        ranked_rows(export.retriever.recommend([{"user": {"age": "old"}}], 3))
    assert export.retriever.rows(["id 7"], 9) == Retriever.load(exports[name]).rows(["id 7"], 9)
    assert said == []


@pytest.mark.parametrize("stage1", [None, 40])
def test_shards_filter_by_what_their_front_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage1: int | None
) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5000)
    folder = export_small(small_model("mol", X), tmp_path / "served")
    (tmp_path / "attributes.csv").write_text("item,price\n" + "".join(f"{each},1e6\n" for each in raw_ids(X)[:200:2]))
    said: list[str] = []
    asked: list[Request] = [
        {"history": ["id 7"], **given}
        for given in ({}, {"where": "price >= 1e6"}, {"where": "price < 1e6"}, {"allowed": raw_ids(X)[:90:3]})
    ]
    for request in asked[1:3]:
        request["limit"] = {"category": 2}
    with ExitStack() as stack:
        export, alone = (
            LiveExport(folder, said.append, group, where="price > 0", attributes=tmp_path / "attributes.csv")
            for group in (front(handles([folder] * 2), said), None)
        )
        stack.callback(alone.release)
        stack.callback(export.release)
        found = ranked_rows(export.retriever.recommend(asked, 30, stage1=stage1))
        assert found == ranked_rows(alone.retriever.recommend(asked, 30, stage1=stage1)) and all(found)


@pytest.mark.parametrize("allow_partial", [True, False])
def test_a_shard_that_is_gone_is_missing_until_it_is_back(exports: dict[str, Path], allow_partial: bool) -> None:
    folder, said, asked = exports["cached"], list[str](), {"history": ["id 7", "id 14"], "k": X}
    shards = handles([folder] * 3)
    export = LiveExport(folder, said.append, front(shards, said, allow_partial=allow_partial))
    with running(export) as server:
        expected = server.ask(asked)
        assert expected[0] == 200 and expected[1]["missing_shards"] == []
        of_second, shards[1].shard = shards[1].shard, None
        # The first answer finds it gone, and the second knows.
        for _ in range(2):
            status, answer = server.ask(asked)
            if allow_partial:
                lacking = 1 - len(answer["items"]) / len(expected[1]["items"])
                assert (status, answer["missing_shards"]) == (200, [2]) and 0 < lacking < 1
                assert answer["missing_share"] == pytest.approx(lacking, abs=0.02)
                assert [row for row in scored(expected[1]) if row in scored(answer)] == scored(answer)
            else:
                assert (status, answer) == (503, {"error": "shard 2/3 is missing: the actor died"})
        assert (server.status("/readyz"), server.status("/healthz")) == (200 if allow_partial else 503, 200)
        assert server.ask(b"", "GET", "/healthz")[1]["missing_shards"] == [2]
        shards[1].shard = of_second
        until(lambda: not server.ask(b"", "GET", "/healthz")[1]["missing_shards"])
        assert server.ask(asked) == expected and server.status("/readyz") == 200
    assert said == ["shard 2/3 is missing: the actor died", "shard 2/3 answers"]


def scored(answer: dict[str, Any]) -> list[tuple[str, float]]:
    return [(row["id"], row["score"]) for row in answer["items"]]


def test_a_new_export_takes_over_once_all_shards_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the former one answers, on shards that have read the new one, too."""
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5000)
    first, second = (export_small(small_model("mol", X, seed=seed), tmp_path / f"{seed}") for seed in range(2))
    folders = [Path(shutil.copytree(first, tmp_path / f"of {who}")) for who in ("front", "shard 1", "shard 2")]
    said: list[str] = []
    of_first, of_second = (Retriever.load(path).rows(["id 7"], 9, stage1=40) for path in (first, second))
    shards = handles(folders[1:])
    export = LiveExport(folders[0], said.append, front(shards, said))

    def published(folder: Path, shard: Handle | None) -> None:
        publish(Path(shutil.copytree(second, tmp_path / "next")), folder)
        if shard and shard.shard:
            shard.shard.look()

    for folder, shard in ((folders[0], None), (folders[1], shards[0])):
        published(folder, shard)
        for _ in range(3):
            assert not export.refresh()
            assert export.retriever.rows(["id 7"], 9, stage1=40) == of_first
    published(folders[2], shards[1])
    assert export.refresh()
    assert export.retriever.rows(["id 7"], 9, stage1=40) == of_second
    assert said == [f"new export: {X} items of demo, step 12 of run small"]
    stale = Handle(Shard(Arguments(directory=str(first), shards=2), 1))
    of_stale = LiveExport(folders[0], said.append, front([shards[0], stale], said))
    with pytest.raises(ShardsLost, match="shard 2/2 is missing: it has another export"):
        of_stale.retriever.rows(["id 7"], 9)


def test_a_shard_that_does_not_answer_is_not_waited_for(exports: dict[str, Path]) -> None:
    said: list[str] = []
    (shard,) = handles([exports["cached"]])
    export = LiveExport(exports["cached"], said.append, front([shard], said, seconds=5))
    shard.hangs = True
    with pytest.raises(ShardsLost, match=r"^shard 1/1 is missing: no answer within 5 s$"):
        export.retriever.rows(["id 7"], 3)
    assert said == ["shard 1/1 is missing: no answer within 5 s"]


def test_a_shard_whose_files_are_written_to_is_missing(exports: dict[str, Path], tmp_path: Path) -> None:
    folder, said = Path(shutil.copytree(exports["cached"], tmp_path / "served")), list[str]()
    export = LiveExport(exports["cached"], said.append, front(handles([folder] * 2), said))
    items = sorted(folder.glob("items-*"))[0]
    items.write_bytes(b"")
    export.refresh()
    assert export.refusal.startswith(f"shard 1/2 is missing: {items} was written to while it was in use")


def test_what_the_configuration_of_a_cluster_gets_wrong(exports: dict[str, Path], tmp_path: Path) -> None:
    given: dict[str, Any] = {"directory": str(exports["cached"]), "shards": 2}
    for wrong, problem in (
        ({"shard": 2}, r"args: unknown key shard \(did you mean shards\?\)"),
        ({"shards": 0}, "args: shards is 0; it must be at least 1"),
        ({"shard_seconds": 0.0}, "args: shard_seconds is 0.0; it must be above 0"),
        ({"wait_ms": 2000}, "args: --wait-ms is 2000"),
        ({"threads": 1}, "args: unknown key threads"),
    ):
        with pytest.raises(ValueError, match=problem):
            build(given | wrong)
    with pytest.raises(ValueError, match="--token-file nowhere cannot be read"):
        _ = Arguments(**given, token_file="nowhere").allowed
    with pytest.raises(ValueError, match="no serving directory at "):
        Shard(Arguments(directory=str(tmp_path), shards=2), 0)


def test_a_shard_without_items_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more shards than files of items."""
    folder = export_small(small_model("mol", X), tmp_path / "served")
    monkeypatch.setattr(Options, "kept", lambda options, items: 40)
    for number in range(2):
        Retriever(read(folder), group=Group(number, 2)).warm_up()
