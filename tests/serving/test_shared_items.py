"""Processes that share an export's items answer as one process does, bit for bit."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_ranks
from small_models import LENGTH, every_feature, export_small, random_histories, raw_ids, small_model

from logitmix.comm.process_group import process_group
from logitmix.common.files import publish
from logitmix.common.storage import path_of
from logitmix.serving import live
from logitmix.serving.directory.reader import read_manifest
from logitmix.serving.group import Group, part_of
from logitmix.serving.items import Items
from logitmix.serving.live import LiveExport
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Retriever, Row
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
        found += [retriever.recommend(requests, 20, stage1=stage1), retriever.rows(ids[3:5], 7, stage1=stage1)]
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
            lambda: shared.answer([{"user": {"age": 3e38}}] * 40, Options(3), first=4),
            lambda: shared.recommend([{"history": ["id 7"]}, {"history": ["id 7"], "user": {"age": "old"}}], 3),
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
            shared.recommend([{"user": {"age": 3e38}}], 3)
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
    assert said.startswith("logitmix: request 0: no item of demo has the id 'new'; ") and said.count("\n") == 1
    said = two_ranks.command(["serve", "nowhere", "--port", "0"], tmp_path, world_size=2, status=2)
    assert said.startswith("logitmix: no serving directory at nowhere") and said.count("\n") == 1


def taken_over(store: Path, next_there: Path, folder: Path, second: Path, damaged: Path) -> Any:
    """The answers of rank 0: of the first export; of the first and the second when that has taken over; of the second
    after a damaged one. Before that, of an export in a store, each rank with a cache of its own, as on two hosts."""
    said: list[str] = []
    with process_group("cpu", 60) as ranks:
        os.environ["XDG_CACHE_HOME"] = f"{store}-{ranks.rank}"
        live.STORE_SECONDS = 0.01
        export = LiveExport(path_of(f"file://{store}"), lambda line: None, Group(ranks.group))
        if ranks.rank:
            export.follow()
        else:
            publish(next_there, store)
            until = time.monotonic() + 30
            while not export.refresh():
                assert time.monotonic() < until
            assert export.retriever.digest == read_manifest(store)["sha256"]
            export.release()
        export = LiveExport(folder, said.append, Group(ranks.group))
        if ranks.rank:
            return export.follow()
        first = export.retriever

        def asked(retriever: Retriever) -> list[Row]:
            return retriever.rows(["id 7", "id 14"], 9, stage1=40)

        found = [asked(first)]
        assert not export.refresh()
        publish(second, folder)
        assert export.refresh()
        # As a batch does that began before.
        found += [asked(first), asked(export.retriever)]
        publish(damaged, folder)
        assert not export.refresh() and not export.refresh()
        found.append(asked(export.retriever))
        export.release()
        return found, said


def test_a_new_export_takes_over_on_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5000)
    paths = [export_small(small_model("mol", X, seed=seed), tmp_path / f"{seed}") for seed in range(3)]
    of_first, of_second = (Retriever.load(path).rows(["id 7", "id 14"], 9, stage1=40) for path in paths[:2])
    shard = max(paths[2].glob("items-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    there = [Path(shutil.copytree(paths[seed], tmp_path / f"store {seed}")) for seed in (1, 0)]
    (found, said), _ = two_ranks.run(taken_over, *there, *paths)
    assert found == [of_first, of_first, of_second, of_second] and of_first != of_second
    assert said[0] == f"new export: {X} items of demo, step 12 of run small" and len(said) == 2
    assert said[1].startswith(f"the new export is not used: {paths[0] / shard.name} is damaged")


@contextmanager
def serving(folder: Path, processes: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    words = ["serve", str(folder), "--port", "0", "--processes", str(processes)]
    command = [sys.executable, "-m", "logitmix.trainer.cli", *words]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert server.stderr is not None
        started = re.search(r" on http://127.0.0.1:(\d+)\n$", server.stderr.readline())
        assert started
        yield server, int(started[1])
    finally:
        server.kill()
        server.communicate()


def processes_of(server: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]


def ask(port: int, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/retrieve", json.dumps(body))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_server_of_several_processes(exports: dict[str, Path], tmp_path: Path, number: int) -> None:
    folder = Path(shutil.copytree(exports["cached"], tmp_path / "served"))
    question = {"history": ["id 7", "id 14"], "k": 9, "stage1": 40}
    with serving(folder, 2) as (server, port):
        for path in (exports["cached"], exports["int8"]):
            if path != exports["cached"]:
                publish(Path(shutil.copytree(path, tmp_path / "next")), folder)
            expected = Retriever.load(path).recommend([{"history": ["id 7", "id 14"]}], 9, stage1=40)[0]
            until = time.monotonic() + 30
            while ask(port, question)["items"] != expected:
                assert path != exports["cached"] and time.monotonic() < until
            assert ask(port, {"history": [], "user": {"age": "old"}})["error"].startswith("the request: feature age")
        if number == signal.SIGTERM:
            # As service managers do, which end all processes of a service.
            for child in processes_of(server):
                os.kill(child, number)
        server.send_signal(number)
        said = server.communicate(timeout=30)[1]
    assert (server.returncode, said) == (0, f"logitmix: new export: {X} items of demo, step 12 of run small\n")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_server(exports: dict[str, Path], rank: int) -> None:
    with serving(exports["cached"], 2) as (server, _):
        children = processes_of(server)
        assert len(children) == 2
        os.kill(children[rank], signal.SIGKILL)
        assert server.communicate(timeout=5)[1] == f"logitmix: rank {rank} was ended by SIGKILL\n"
        assert server.returncode == 128 + signal.SIGKILL
        assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.slow
def test_what_the_server_refuses_is_told_once(exports: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        words = ["serve", str(exports["cached"]), "--port", port, "--processes", "2"]
        result = subprocess.run([sys.executable, "-m", "logitmix.trainer.cli", *words], capture_output=True, text=True)
    said = f"logitmix: port {port} of 127.0.0.1 is in use; give another --port\n"
    assert (result.returncode, result.stderr) == (1, said)


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
