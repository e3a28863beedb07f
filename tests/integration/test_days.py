"""Days that come to a dataset, a run that goes on, and deltas that go to a server under load, all killed at random: no
action is lost, no answer is wrong, and what stands at the end is what it is in peace."""

import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from asking import ranked_rows
from folders import files_in
from small_data import small_config
from waiting import until

from logitmix.serving.directory.reader import read_manifest
from logitmix.serving.retriever import Retriever
from logitmix.trainer.config import dump_toml

MINUTES = float(os.environ.get("LOGITMIX_SOAK_MINUTES", "3"))
FIRST, ACTIONS, K, CLIENTS = 2_000, 300, 20, 2
"""Actions of the first day and of each later one; items of an answer; clients at a time."""
HISTORIES = [["i1"], ["i2", "i7", "i11"], ["i30", "i4", "i4", "i19", "i40"], ["i90", "i3", "i91", "i120"]]
"""Some of these items come later; a version that does not know them leaves them out."""
KILLED_AGAIN = 0.6
"""Probability that a command, started for the first or another time, is killed."""
SETTINGS = {"data.split": "time", "train.precision": "fp32", "train.epochs": 6, "train.checkpoint_every": 5}
SETTINGS |= {"evaluate.every_epochs": 3, "comm.timeout_seconds": 10}


def write_day(folder: Path, day: int) -> None:
    """A CSV of the actions of a day; users and items come and go."""
    chance, count = np.random.default_rng(day), ACTIONS if day else FIRST
    users = chance.integers(5 * day, 5 * day + 80, count)
    items = (users // 3 + chance.integers(0, 12, count)) % (60 + 4 * day)
    times = np.sort(chance.integers(86_400 * day, 86_400 * (day + 1), count))
    rows = (f"u{user},i{item},{time}\n" for user, item, time in zip(users, items, times, strict=True))
    (folder / f"{name(day)}.csv").write_text("user,item,timestamp\n" + "".join(rows))


def name(day: int) -> str:
    return f"day-{day:04d}"


def preparing(day: int) -> list[str]:
    earlier = ["--append", f"data/{name(day - 1)}"] if day else ["--min-user-actions", "0", "--keep-duplicates"]
    return ["prepare", "table", "--source", f"{name(day)}.csv", "--out", f"data/{name(day)}", *earlier]


def training(day: int) -> list[str]:
    """Half of the day's actions are held out, so that the next run is evaluated on none that this one is trained on."""
    share = 0.25 * ACTIONS / (FIRST + day * ACTIONS)
    words = ["train", "recipe.toml", "--run", f"runs/{name(day)}", "--data.path", f"data/{name(day)}"]
    earlier = ["--continue", f"runs/{name(day - 1)}"] if day else []
    return [*words, *earlier, "--data.held-out", f"{share:.4f}"]


def exporting(day: int, *words: str) -> list[str]:
    return ["export", f"runs/{name(day)}", *words]


FOLDING = ["fold", "exports/live", "--deltas", "deltas", "--out", "exports/live", "--overwrite"]


class Peace:
    """All days without a kill, each with a whole export."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: dict[tuple[str, int], list[Any]] = {}
        """By run and step, those to each history."""

    def day(self, day: int) -> None:
        write_day(self.folder, day)
        for words, processes in ((preparing(day), 1), (training(day), 2)):
            jobs.run(words, self.folder, processes)
        jobs.run(exporting(day, "--out", f"exports/{name(day)}"), self.folder)
        retriever = Retriever.load(self.export(day))
        version = retriever.source.run, retriever.source.step
        self.answers[version] = ranked_rows(retriever.recommend([{"history": of} for of in HISTORIES], K))

    def export(self, day: int) -> Path:
        return self.folder / "exports" / name(day)

    def require_right(self, history: int, answer: dict[str, Any]) -> None:
        """AssertionError for an answer that is not that of the version that it names."""
        expected = self.answers[answer["run"], answer["step"]][history]
        assert [row["score"] for row in answer["items"]] == pytest.approx([row["score"] for row in expected], abs=1e-4)
        scores = {row["id"]: row["score"] for row in expected}
        for row in answer["items"]:
            # Of equal scores, the last one may be another.
            assert scores.get(row["id"], expected[-1]["score"]) == pytest.approx(row["score"], abs=1e-4)


class Server:
    """`logitmix serve`, which is killed and started again, and its clients, who check every answer."""

    def __init__(self, folder: Path, peace: Peace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.folder, self.peace = folder, peace
        self.process: subprocess.Popen[str] | None = None
        self.kills, self.up = 0, False
        self.ended, self.wrong = threading.Event(), list[BaseException]()
        self.first: dict[str, float] = {}
        """By run, when it first answered."""
        self.answers = 0

    def start(self) -> None:
        words = ["serve", "exports/live", "--deltas", "deltas", "--port", str(self.port), "--threads", "1"]
        self.process = jobs.start(words, self.folder)
        until(lambda: self.health() is not None or self.process.poll() is not None, 600)
        assert self.process.poll() is None, jobs.finish(self.process)
        self.up = True

    def kill(self) -> None:
        if not self.process:
            return
        assert self.process.poll() is None
        self.kills, self.up = self.kills + 1, False
        process, self.process = self.process, None
        jobs.kill(process.pid)
        _, said = jobs.finish(process)
        assert "Traceback" not in said and "not all deltas" not in said and "not used" not in said, said

    def health(self) -> dict[str, Any] | None:
        try:
            return self.ask("/healthz")
        except OSError:
            return None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def client(self, number: int) -> None:
        """Versions of its answers only rise, over all kills."""
        chance, last = random.Random(number), ""
        try:
            while not self.ended.is_set():
                kills, up, history = self.kills, self.up, chance.randrange(len(HISTORIES))
                try:
                    answer = self.ask("/retrieve", {"history": HISTORIES[history], "k": K})
                except (OSError, HTTPException):
                    assert not up or kills != self.kills, "an answer was lost"
                    time.sleep(0.1)
                    continue
                self.first.setdefault(answer["run"], time.monotonic())
                self.peace.require_right(history, answer)
                assert answer["run"] >= last
                last = answer["run"]
                self.answers += 1
                time.sleep(0.05)
        except BaseException as error:
            self.wrong.append(error)

    @contextmanager
    def under_load(self) -> Iterator[None]:
        clients = [threading.Thread(target=self.client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self.ended.set()
            for client in clients:
                client.join()
            self.kill()


class Operator:
    """Starts a killed command again until its work is done."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.kills = Counter[str]()
        self.seconds: dict[str, float] = {}
        """How long a command takes that is not killed."""

    def run(self, words: list[str], done: Callable[[], bool] = lambda: False, processes: int = 1) -> None:
        """The command is started again until its work is `done`, or it ends by itself."""
        what = words[0] + " a delta" * ("--delta-from" in words)
        while True:
            job, started = jobs.start(words, self.folder, processes), time.monotonic()
            if killed := self.chance.random() < KILLED_AGAIN:
                time.sleep(self.chance.uniform(0.0, 1.1 * self.seconds.get(what, 4.0)))
                if job.poll() is None:
                    self.kill(job, what)
            _, said = jobs.finish(job, 900)
            if job.returncode == 0:
                if not killed:
                    self.seconds[what] = time.monotonic() - started
                return
            assert killed and not jobs.traces(said) and "Traceback" not in said, f"{words}: {said}"
            if done():
                return

    def kill(self, job: subprocess.Popen[str], what: str) -> None:
        """The command with its ranks; or of a training a rank, or the parent alone."""
        ranks = jobs.children(job.pid)
        how = self.chance.choice(["all", "a rank", "the parent"]) if what == "train" and ranks else "all"
        self.kills[what if how == "all" else f"{what}: {how}"] += 1
        if how == "all":
            jobs.kill(job.pid)
        else:
            os.kill(self.chance.choice(ranks) if how == "a rank" else job.pid, signal.SIGKILL)
        for rank in ranks:
            until(lambda rank=rank: not living(rank), 600)


def living(pid: int) -> bool:
    """A process that is dead and not reaped yet has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 1200)
def test_killed_days_end_as_in_peace(tmp_path: Path) -> None:
    """LOGITMIX_SOAK_MINUTES is how long days are appended. The deltas of every other day come without a kill, for the
    time from the end of training to the first answer."""
    chance, latencies, day = random.Random(0), list[float](), 0
    peace, folder = Peace(tmp_path / "peace"), tmp_path / "killed"
    for world in (peace.folder, folder):
        world.mkdir()
        (world / "deltas").mkdir()
        (world / "recipe.toml").write_text(dump_toml(small_config(Path("data"), SETTINGS)))
    operator, server, limit = Operator(folder, chance), Server(folder, peace), time.monotonic() + 60 * MINUTES

    def come(day: int) -> float:
        """A day comes and is trained on, while the next one comes in peace; when this has ended."""
        write_day(folder, day)
        quiet[day].result()
        quiet.append(pool.submit(peace.day, day + 1))
        operator.run(preparing(day), (folder / "data" / name(day)).exists)
        operator.run(training(day), processes=2)
        return time.monotonic()

    live, deltas = folder / "exports" / "live", folder / "deltas"
    with ThreadPoolExecutor(1) as pool, server.under_load():
        quiet = [pool.submit(peace.day, 0)]
        come(0)
        operator.run(exporting(0, "--out", "exports/live"), live.exists)
        server.start()
        while time.monotonic() < limit or day < 2:
            day += 1
            trained = come(day)
            words = exporting(day, "--delta-from", "exports/live", "--out", f"deltas/{name(day)}")
            if day % 2:
                jobs.run(words, folder)
            else:
                operator.run(words, (deltas / name(day)).exists)
                # While it loads the delta, perhaps.
                time.sleep(chance.uniform(0, 2))
                server.kill()
                server.start()
            digest = read_manifest(peace.export(day))["sha256"]
            until(lambda digest=digest: server.wrong or (server.health() or {}).get("digest") == digest, 600)
            until(lambda day=day: server.wrong or name(day) in server.first, 600)
            assert not server.wrong, server.wrong
            if day % 2:
                latencies.append(server.first[name(day)] - trained)
            else:
                operator.run(FOLDING, lambda digest=digest: live.exists() and read_manifest(live)["sha256"] == digest)
                if chance.random() < 0.5:
                    for delta in sorted(deltas.glob("[!.]*")):
                        shutil.rmtree(delta)
                if chance.random() < 0.5:
                    time.sleep(chance.uniform(0, 2))
                    server.kill()
                    server.start()
            assert not list((folder / "data").glob(".*"))
    assert not server.wrong, server.wrong
    print(f"{day} days, kills: {dict(operator.kills)}, of the server {server.kills}; {server.answers} answers")
    print(f"train to serve: median {statistics.median(latencies or [0]):.1f} s of {len(latencies)}: {latencies}")
    assert files_in(folder / "data" / name(day)) == files_in(peace.folder / "data" / name(day))
    if day % 2:
        jobs.run(FOLDING, folder)
    assert files_in(live) == files_in(peace.export(day))
