"""Processes that share an export's items, and shards of them, answer as one process does, bit for bit."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request as Asking
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist
import two_ranks
from asking import answered, ranked_rows
from small_models import LENGTH, every_feature, export_small, random_histories, raw_ids, small_model
from test_server import read_all, running
from waiting import until

from logitmix.comm.process_group import process_group
from logitmix.common.files import publish
from logitmix.serving import shards
from logitmix.serving.group import Group, part_of
from logitmix.serving.items import Items
from logitmix.serving.live import LiveExport
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Retriever
from logitmix.serving.shards import Front, Shard, ShardServer, ShardsLost
from logitmix.serving.workers import bound
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


@pytest.fixture(scope="module")
def of_one(exports: dict[str, Path]) -> dict[str, list[Any]]:
    """The answers of one process."""
    return two_ranks.run(answers_of, exports, world_size=1)[0]


def answers_of(paths: dict[str, Path]) -> dict[str, list[Any]]:
    return {name: answers(Retriever.load(path)) for name, path in paths.items()}


def same_calls_on_all(paths: dict[str, Path], of_one: dict[str, list[Any]]) -> dict[str, Any]:
    """Whether each process has the answers of one alone, which items it ranks, and the most keys that cross."""
    sent: list[int] = []
    gather = dist.all_gather

    def counted(parts: list[torch.Tensor], own: torch.Tensor, **options: Any) -> Any:
        sent.append(own.shape[1])
        return gather(parts, own, **options)

    found = {}
    with process_group("cpu", 60) as ranks:
        for name, path in paths.items():
            rows, shared = Items.rows, Retriever.load(path, group=ranks.group)
            if ranks.rank:
                Items.rows = None  # type: ignore[assignment, method-assign]
            dist.all_gather = counted
            sent.clear()
            equal = answers(shared) == of_one[name]
            dist.all_gather, Items.rows = gather, rows  # type: ignore[method-assign]
            shared.retrieve([[3]], 5, stage1=17)
            items = shared._ranker.items.own
            if shared.tower.hindexer is not None:
                assert sum(corpus.num_items for _, corpus in shared._ranker.corpora) == len(items)
            found[name] = equal, (items.start, items.stop), max(sent)
        # Two devices of each process.
        several = Retriever.load(paths["cached"], ["cpu", "cpu"], group=ranks.group)
        found["devices"] = answers(several) == of_one["cached"], (0, X), 0
    return found


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_shared_items_are_ranked_as_by_one_process(
    exports: dict[str, Path], of_one: dict[str, list[Any]], processes: int
) -> None:
    of_ranks = two_ranks.run(same_calls_on_all, exports, of_one, world_size=processes)
    for name in exports:
        assert [found[name][0] for found in of_ranks] == [True] * processes, name
        # Each holds its own part, and no more than k' or k keys of a request cross.
        bounds = [found[name][1] for found in of_ranks]
        assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), X]
        assert max(found[name][2] for found in of_ranks) <= X
        if name != "two shards":
            assert max(stop - start for start, stop in bounds) < X * 0.7
    assert all(found["devices"][0] for found in of_ranks)
    parts = {stop - start for start, stop in (found["two shards"][1] for found in of_ranks)}
    assert (0 in parts) == (processes == 3)


def errors(paths: dict[str, Path], damaged: Path) -> list[Any]:
    with process_group("cpu", 60) as ranks:
        found, shared = [], Retriever.load(paths["cached"], group=ranks.group)
        calls: list[Callable[[], object]] = [
            lambda: answered(shared, [*[{"history": ["id 7"]}] * 4, *[{"user": {"age": 3e38}}] * 40], Options(3)),
            lambda: ranked_rows(
                shared.recommend([{"history": ["id 7"]}, {"history": ["id 7"], "user": {"age": "old"}}], 3)
            ),
            lambda: shared.retrieve([[X]], 3),
            lambda: Retriever.load(damaged, group=ranks.group),
            lambda: Retriever.load(paths["cached" if ranks.rank else "computed"], group=ranks.group),
            lambda: Retriever.load(paths["cached"], "tpu" if ranks.rank else "cpu", group=ranks.group),
            lambda: Retriever.load("nowhere", group=ranks.group),
        ]
        for call in calls:
            try:
                call()
                found.append(None)
            except ValueError as error:
                found.append(str(error))
        # None of this has put the processes out of step.
        return [*found, shared.retrieve([[3]], 5, stage1=40).items.tolist()]


def test_what_one_process_finds_wrong_all_raise(exports: dict[str, Path], tmp_path: Path) -> None:
    damaged = export_small(small_model("dot", 40), tmp_path / "damaged")
    # That of the second process alone: the only shard is its part.
    shard = next(damaged.glob("items-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    first, second = two_ranks.run(errors, exports, damaged)
    messages = zip(
        first[:-1],
        second[:-1],
        (
            "request 4: a number among its features is too large",
            "request 1: feature age is 'old'",
            f"history 0 holds {X}; item indices go from 0 to {X - 1}",
            f"{shard} is damaged (its SHA-256 is not that in manifest.json)",
            "the processes find different exports at ",
            "there is no device tpu to retrieve on",
            "no serving directory at nowhere",
        ),
        strict=True,
    )
    for *said, expected in messages:
        assert all(of.startswith(expected) and "\n" not in of for of in said)
    assert first[-1] == second[-1] == Retriever.load(exports["cached"]).retrieve([[3]], 5, stage1=40).items.tolist()


def followed(path: Path) -> Any:
    with process_group("cpu", 60) as ranks:
        shared = Retriever.load(path, group=ranks.group)
        if ranks.rank:
            return shared.follow()
        found = shared.rows(["id 7"], 5, stage1=40)
        with pytest.raises(ValueError, match="request 0: a number among its features is too large"):
            ranked_rows(shared.recommend([{"user": {"age": 3e38}}], 3))
        found += shared.rows(["id 14"], 5, stage1=40)
        shared.release()
        return found


def test_processes_may_follow_the_first(exports: dict[str, Path]) -> None:
    found, *others = two_ranks.run(followed, exports["cached"], world_size=3)
    alone = Retriever.load(exports["cached"])
    assert found == [row for raw_id in ("id 7", "id 14") for row in alone.rows([raw_id], 5, stage1=40)]
    assert others == [None, None]


def test_the_command_answers_on_several_processes(exports: dict[str, Path], tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"history": [f"id {item * 7}" for item in of]}) + "\n" for of in HISTORIES))
    path, files = str(exports["cached"]), [tmp_path / f"{count}.jsonl" for count in (1, 2)]
    for count, out in enumerate(files, 1):
        words = ["retrieve", path, "--histories", str(asked), "--stage1", "40", "-k", "7", "--out", str(out)]
        assert two_ranks.command(words, tmp_path, count) == f"{out}: {len(HISTORIES)} requests answered\n"
    assert len({file.read_text() for file in files}) == 1
    said = two_ranks.command(["retrieve", path, "--json", "--history", "new"], tmp_path, world_size=2, status=2)
    assert said.startswith("logitmix: the request: no item of demo has the id 'new'; ") and said.count("\n") == 1


@pytest.fixture(autouse=True)
def _no_front_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LAST_SECONDS", 0.0)


@contextmanager
def shard(folder: Path, number: int, count: int, port: int = 0, token: str = "") -> Iterator[int]:
    """The port of a shard, which is gone on exit."""
    place = Shard(number, count)
    server = ShardServer(LiveExport(folder, print, place), place, token)
    with bound("127.0.0.1", port) as listening:
        listening.listen()
        thread = threading.Thread(target=server.run, args=[listening])
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.ended.set()
            thread.join(10)
    assert not thread.is_alive()


@contextmanager
def front(
    folder: Path, ports: list[int], said: list[str], allow_partial: bool = False, **given: Any
) -> Iterator[LiveExport]:
    of = Front([f"127.0.0.1:{port}" for port in ports], said.append, allow_partial, **{"seconds": 60, **given})
    export = LiveExport(folder, said.append, of)
    yield export
    export.release()


@pytest.mark.parametrize("name", ["cached", "two shards", "computed", "one stage", "int8"])
def test_shards_answer_as_one_process_does(exports: dict[str, Path], of_one: dict[str, list[Any]], name: str) -> None:
    said: list[str] = []
    with ExitStack() as stack:
        ports = [stack.enter_context(shard(exports[name], number, 3)) for number in range(3)]
        export = stack.enter_context(front(exports[name], ports, said))
        assert answers(export.retriever) == of_one[name]
        assert export.retriever.missing == {"missing_shards": [], "missing_share": 0.0}
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
        ports = [stack.enter_context(shard(folder, number, 2)) for number in range(2)]
        of = Front([f"127.0.0.1:{port}" for port in ports], said.append, seconds=60)
        export, alone = (
            LiveExport(folder, said.append, group, where="price > 0", attributes=tmp_path / "attributes.csv")
            for group in (of, None)
        )
        stack.callback(alone.release)
        stack.callback(export.release)
        found = ranked_rows(export.retriever.recommend(asked, 30, stage1=stage1))
        assert found == ranked_rows(alone.retriever.recommend(asked, 30, stage1=stage1)) and all(found)


@pytest.mark.parametrize("allow_partial", [True, False])
def test_a_shard_that_is_gone_is_missing_until_it_is_back(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch, allow_partial: bool
) -> None:
    monkeypatch.setattr(shards, "PAUSE", 0.0)
    folder, said, asked = exports["cached"], list[str](), ["id 7", "id 14"]
    everything = Retriever.load(folder).rows(asked, X, stage1=X)
    with ExitStack() as stack:
        ports = [stack.enter_context(shard(folder, number, 3)) for number in (0, 2)]
        with shard(folder, 1, 3) as port:
            export = stack.enter_context(front(folder, [ports[0], port, ports[1]], said, allow_partial))
            assert export.retriever.rows(asked, X, stage1=X) == everything
        begin, size = sum(export.retriever._ranker.sizes[:1]), export.retriever._ranker.sizes[1]
        left = [row for row in everything if not begin <= int(row["id"].split()[1]) / 7 < begin + size]
        missing = {"missing_shards": [2], "missing_share": round(size / X, 6)}
        with running(export) as server:
            # The first answer finds it gone, and the second knows.
            for _ in range(2):
                status, found = server.ask({"history": asked, "k": X, "stage1": X})
                if allow_partial:
                    assert [row["score"] for row in found["items"]] == [row["score"] for row in left]
                    assert (status, missing) == (200, {name: found[name] for name in missing})
                else:
                    assert status == 503 and f"shard 2/3 at 127.0.0.1:{port} is missing: " in found["error"]
            assert server.status("/readyz") == (200 if allow_partial else 503)
            assert server.ask(b"", "GET", "/healthz")[1]["missing_shards"] == [2]
            assert server.metric("logitmix_items_missing_share") == missing["missing_share"]
            with shard(folder, 1, 3, port):
                until(lambda: server.status("/readyz") == 200 and server.metric("logitmix_shards_missing") == 0)
                status, found = server.ask({"history": asked, "k": X, "stage1": X})
                assert (status, found["missing_shards"], len(found["items"])) == (200, [], len(everything))
        assert said[-1] == f"shard 2/3 at 127.0.0.1:{port} answers"


def test_a_new_export_takes_over_once_all_shards_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5000)
    first, second = (export_small(small_model("mol", X, seed=seed), tmp_path / f"{seed}") for seed in range(2))
    folders = [Path(shutil.copytree(first, tmp_path / f"of {who}")) for who in ("front", "shard 1", "shard 2")]
    said: list[str] = []
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.02)
    of_first, of_second = (Retriever.load(path).rows(["id 7"], 9, stage1=40) for path in (first, second))
    with ExitStack() as stack:
        ports = [stack.enter_context(shard(folder, number, 2)) for number, folder in enumerate(folders[1:])]
        export = stack.enter_context(front(folders[0], ports, said, True))
        for folder in folders[:2]:
            publish(Path(shutil.copytree(second, tmp_path / "next")), folder)
            for _ in range(3):
                assert not export.refresh()
                assert export.retriever.rows(["id 7"], 9, stage1=40) == of_first
                assert export.missing["missing_shards"] == []
        publish(Path(shutil.copytree(second, tmp_path / "next")), folders[2])
        until(export.refresh)
        assert export.retriever.rows(["id 7"], 9, stage1=40) == of_second
        other = stack.enter_context(shard(first, 1, 2))
        with front(folders[0], [ports[0], other], said) as of, pytest.raises(ShardsLost, match="has another export"):
            of.retriever.rows(["id 7"], 9)
    assert f"new export: {X} items of demo, step 12 of run small" in said


def test_a_shard_that_does_not_answer_is_not_waited_for(exports: dict[str, Path]) -> None:
    """It greets, as one does that is stopped later."""
    said: list[str] = []
    with bound("127.0.0.1", 0) as listening, ExitStack() as stack:
        listening.listen()

        def greet() -> None:
            line = shards.Line(stack.enter_context(listening.accept()[0]))
            line.receive(60)
            line.send({"shard": [0, 1]}, 60)

        thread = threading.Thread(target=greet)
        thread.start()
        port = listening.getsockname()[1]
        export = stack.enter_context(front(exports["cached"], [port], said, seconds=0.2))
        thread.join()
        with pytest.raises(ShardsLost, match=r"^shard 1/1 at 127.0.0.1:\d+ is missing: no answer within 0.2 s$"):
            export.retriever.rows(["id 7"], 3)
    assert len(said) == 1


def test_who_is_no_shard_of_the_front_is_refused(exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = exports["cached"], list[str]()
    with shard(folder, 0, 2, token="secret" * 4) as one, shard(folder, 1, 3) as two:
        for part in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\2\0\0\0\0{}"):
            with socket.create_connection(("127.0.0.1", one), timeout=10) as client:
                client.sendall(part)
                assert b"shard" not in read_all(client)
        with front(folder, [one, two], said):
            pass
        assert [line.partition(": ")[2] for line in said] == [
            "it has another token; give both the same --token-file",
            "it is shard 2/3; give --shards in their order, and all of them",
        ]
        said.clear()
        monkeypatch.setattr(shards, "VERSION", "0.0")
        with front(folder, [one, one], said, token="secret" * 4) as export, pytest.raises(ShardsLost):
            export.retriever.rows(["id 7"], 3)
        assert len(said) == 1 and said[0].endswith("it is shard 1/2; give --shards in their order, and all of them")


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that serves, and its port."""
    command = [sys.executable, "-m", "logitmix.trainer.cli", "serve", str(folder), "--threads", "1", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            started = re.search(r" on (?:http|tcp)://127.0.0.1:(\d+)\n$", server.stderr.readline())
            assert started
            yield server, started[1]
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_shard_of_the_command_is_lost_and_comes_back(exports: dict[str, Path], tmp_path: Path, number: int) -> None:
    (tmp_path / "token").write_text("secret" * 4)
    (tmp_path / "token").chmod(0o600)
    secret = ["--token-file", str(tmp_path / "token")]
    expected = Retriever.load(exports["cached"]).rows(["id 7"], 9, stage1=40)
    body = json.dumps({"history": ["id 7"], "k": 9, "stage1": 40}).encode()

    def ask() -> Any:
        request = Asking(f"http://127.0.0.1:{port}/retrieve", body, {"Authorization": "Bearer " + "secret" * 4})
        with urlopen(request, timeout=30) as answer:
            return json.load(answer)

    with ExitStack() as stack:
        first, second = (
            stack.enter_context(serving(exports["cached"], "--shard", f"{part}/2", "--port", "0", *secret))
            for part in (1, 2)
        )
        addresses = f"127.0.0.1:{first[1]},127.0.0.1:{second[1]}"
        words = ["--shards", addresses, "--allow-partial", "--shard-seconds", "2", "--port", "0", *secret]
        server, port = stack.enter_context(serving(exports["cached"], *words))
        assert ask()["items"] == expected
        second[0].send_signal(number)
        until(lambda: ask()["missing_shards"] == [2], 30)
        if number == signal.SIGSTOP:
            second[0].send_signal(signal.SIGCONT)
        else:
            assert second[0].wait(10) == (0 if number == signal.SIGTERM else -number)
            stack.enter_context(serving(exports["cached"], "--shard", "2/2", "--port", second[1], *secret))
        until(lambda: ask()["missing_shards"] == [], 90)
        assert ask()["items"] == expected
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=30)[1].splitlines()
    assert server.returncode == 0 and said[-1].endswith(f":{second[1]} answers")


def test_processes_that_are_out_of_step_answer_nothing_more() -> None:
    group = Group()
    group.size = 2
    with pytest.raises(MemoryError), group.in_step():
        raise MemoryError
    assert group.lost
    with pytest.raises(ConnectionError, match="have lost each other"):
        group.first(lambda: 1)


def test_parts_are_all_and_nearly_equal() -> None:
    for length in range(9):
        for parts in range(1, 6):
            found = [part_of(range(length), part, parts) for part in range(parts)]
            assert [at for part in found for at in part] == list(range(length))
            assert max(map(len, found)) - min(map(len, found)) <= 1
