"""`logitmix serve` under load: throughput, latency, what it answers to malformed requests, and its memory.

    python -m benchmarks.server [DIR] [--requests 10000] [--clients 1,8,64] [--bad 0.1] [--workers 1,2]

DIR is a serving directory. Without one, the recipe demo-mol is trained for some seconds on random clicks on 10,000
items, and exported. The server is the real command in a process of its own; it shares the machine with the clients.
Of several numbers of workers, and several `--stage1`, each has a server; all are measured in turn, `--repetitions`
times, and the table has medians. Memory is that of all processes of a server (PSS): of pages that others map too, among
them the servers that are measured beside it, its share.

A client sends its next request when it has the answer to the last one, over a connection that stays open. Each number
of clients sends `--requests` with a share `--bad` of malformed ones among them, every kind in turn; before that, a
fifth as many well-formed ones alone. One of 20 malformed ones is a client of its own that misbehaves: a body of 50 MB,
with or without a stated length, a body that stops in the middle, a client that leaves. Times are those of well-formed
requests, with 20 random items of history and k = 10; the server's own CPU time for a request depends less on what else
the machine does. Its resident memory is read after requests of all clients that do not count, and after each line.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from benchmarks.measure import logitmix, machine, print_table
from logitmix.serving.retriever import Retriever

ITEMS, HISTORY, K = 10_000, 20, 10
HUGE = 50_000_000
"""Bytes of a huge body."""
LEFT = 0
"""Instead of a status: the client left."""


@dataclass(frozen=True)
class Options:
    directory: tyro.conf.Positional[str] = ""
    """Serving directory."""
    requests: int = 10_000
    clients: str = "1,8,64"
    bad: float = 0.1
    """Share of malformed requests."""
    workers: str = "1"
    stage1: str = "100000"
    threads: int = 0
    """Of each worker; the cores divided among them when 0."""
    wait_ms: float = 10.0
    """As for logitmix serve, all of these; lists are separated by commas."""
    repetitions: int = 1
    seed: int = 0


@dataclass
class Load:
    """What a number of clients saw."""

    seconds: list[float] = field(default_factory=list)
    """Of well-formed requests."""
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    """By kind of request."""

    def saw(self, kind: str, status: int) -> None:
        self.statuses.setdefault(kind, Counter())[status] += 1


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        directory = options.directory or _export(Path(scratch))
        retriever = Retriever.load(directory)
        ids = [
            retriever.raw_ids[place] for place in range(0, retriever.num_items, max(1, retriever.num_items // 10**5))
        ]
        setting = f"{retriever.num_items:,} items; {machine()}"
        del retriever
        servers = []
        for workers in options.workers.split(","):
            for stage1 in options.stage1.split(","):
                words = ["--workers", workers, "--stage1", stage1, "--wait-ms", str(options.wait_ms)]
                threads = ["--threads", str(options.threads)]
                servers.append(_Server.start(directory, [*words, *threads], Path(scratch, f"log{len(servers)}")))
                stack.callback(servers[-1].process.kill)
        rows = asyncio.run(_measured(options, servers, ids))
        problems = [problem for server in servers for problem in server.end()]
    wrong = [*problems, *_unexpected(rows)]
    _show(_medians(rows), setting)
    if wrong:
        raise SystemExit("\n".join(wrong))


@dataclass(frozen=True)
class _Server:
    """The command in a process of its own."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    port: int

    @classmethod
    def start(cls, directory: str, words: list[str], log: Path) -> "_Server":
        command = [sys.executable, "-m", "logitmix.trainer.cli", "serve", directory, "--port", "0", *words]
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file)
        return cls(" ".join(words[1:4:2]), process, log, _port(process, log))

    def end(self) -> list[str]:
        """What it should not have said, and its status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        return [*([f"the server ended with status {status}"] if status else []), *self.log.read_text().splitlines()[1:]]

    @property
    def processes(self) -> list[int]:
        """Itself and its workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    @property
    def cpu_seconds(self) -> float:
        return sum(map(_cpu_seconds, self.processes))

    @property
    def mb(self) -> float:
        return sum(map(_own_mb, self.processes))


def _export(scratch: Path) -> str:
    chance = random.Random(0)
    actions = (f"{user},item {chance.randrange(ITEMS)},{time}" for user in range(2_000) for time in range(50))
    everything = (f"0,item {item},0" for item in range(ITEMS))
    Path(scratch, "clicks.csv").write_text("\n".join(["user,item,timestamp", *everything, *actions]) + "\n")
    data, run, out = (str(scratch / name) for name in ("data", "run", "export"))
    logitmix("prepare", "table", "--source", f"{scratch}/clicks.csv", "--out", data)
    logitmix(
        "train", "demo-mol", "--data.path", data, "--run", run, "--train.minutes", "0.05", "--evaluate.users", "10"
    )
    logitmix("export", run, "--out", out)
    return out


def _port(server: subprocess.Popen[bytes], log: Path) -> int:
    """The port of a server that has started."""
    while server.poll() is None:
        if "http://" in (said := log.read_text()):
            return int(said.strip().rpartition(":")[2])
        time.sleep(0.1)
    raise SystemExit(log.read_text())


async def _measured(options: Options, servers: Sequence[_Server], ids: list[str]) -> list[dict[str, Any]]:
    chance, numbers = random.Random(options.seed), [int(number) for number in options.clients.split(",")]
    rows: list[dict[str, Any]] = []
    for server in servers:
        await _load(server.port, max(numbers), 5 * max(numbers), 0.0, ids, chance)
        rows.append({"server": server.name, "clients": None, "mb": server.mb})
    shares = [(0.0, max(1, options.requests // 5)), *([(options.bad, options.requests)] if options.bad else [])]
    for clients in numbers:
        for bad, requests in shares:
            for _ in range(options.repetitions):
                for server in servers:
                    rows.append(await _row(server, clients, requests, bad, ids, chance))
    return rows


async def _row(
    server: _Server, clients: int, requests: int, bad: float, ids: list[str], chance: random.Random
) -> dict[str, Any]:
    start, cpu = time.perf_counter(), server.cpu_seconds
    load = await _load(server.port, clients, requests, bad, ids, chance)
    seconds, taken = sorted(load.seconds), time.perf_counter() - start
    return {
        "server": server.name,
        "clients": clients,
        "bad": bad,
        "requests_per_second": requests / taken,
        "p50_ms": statistics.median(seconds) * 1000,
        "p99_ms": seconds[int(0.99 * len(seconds))] * 1000,
        "cpu_ms": (server.cpu_seconds - cpu) / requests * 1000,
        "mb": server.mb,
        "statuses": {kind: dict(counts) for kind, counts in load.statuses.items()},
    }


def _medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the rows of each server, number of clients and share of malformed requests; of the statuses, the sums."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["server"], row["clients"], row.get("bad")), []).append(row)
    found = []
    for of in groups.values():
        median = {
            name: statistics.median(row[name] for row in of)
            for name in of[0]
            if name not in ("server", "clients", "statuses")
        }
        statuses: Counter[int] = Counter()
        for row in of:
            for counts in row.get("statuses", {}).values():
                statuses.update(counts)
        found.append(of[0] | median | {"statuses": statuses})
    return found


async def _load(port: int, clients: int, requests: int, bad: float, ids: list[str], chance: random.Random) -> Load:
    load, malformed = Load(), _malformed(ids)
    kinds = itertools.cycle(MISDEEDS.items())
    left = iter([chance.random() < bad for _ in range(requests)])
    background: list[tuple[str, asyncio.Task[int]]] = []

    async def client() -> None:
        stream = await asyncio.open_connection("127.0.0.1", port)
        for is_bad in left:
            if is_bad and chance.random() < 0.05:
                kind, misdeed = next(kinds)
                task = asyncio.create_task(misdeed(port))
                background.append((kind, task))
                if kind != "stops":
                    await task
                continue
            kind, request = next(malformed) if is_bad else ("well-formed", _request(_body(chance.sample(ids, HISTORY))))
            start = time.perf_counter()
            stream[1].write(request)
            status = await _status(stream[0])
            if not is_bad:
                load.seconds.append(time.perf_counter() - start)
            load.saw(kind, status)
        stream[1].close()

    await asyncio.gather(*(client() for _ in range(clients)))
    for kind, task in background:
        load.saw(kind, await task)
    return load


async def _status(reader: asyncio.StreamReader) -> int:
    """Reads an answer to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    await reader.readexactly(int(length))
    return int(head.split(b" ", 2)[1])


def _body(history: list[str], **others: object) -> bytes:
    return json.dumps({"history": history, "k": K} | others).encode()


def _request(body: bytes, method: str = "POST", path: str = "/retrieve") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


STOPPED = _request(b" " * 100)[:-50]
"""It ends in the middle of its body."""


def _malformed(ids: list[str]) -> Iterator[tuple[str, bytes]]:
    """Kinds and requests, without an end; all for an answer of status 4xx."""
    history = ids[:3]
    bodies = {
        "no JSON": b'{"history": ["1"',
        "no text": b'{"history": ["\xff"]}',
        "nested": b"[" * 100_000,
        "NaN": _body(history, k=float("nan")),
        "no object": b"[1, 2]",
        "entry": _body(history, histroy=[]),
        "type": _body(history, timestamps="yesterday"),
        "no item": _body(["no such item"]),
        "unknown id": _body([*history, "no such item"], unknown="refuse"),
        "huge k": _body(history, k=10**9),
        "long history": _body(history * 10_000),
    }
    requests = {kind: _request(body) for kind, body in bodies.items()}
    requests |= {"method": _request(b"", "PUT"), "path": _request(b"", path="/nothing")}
    return itertools.cycle(requests.items())


async def _huge(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {HUGE}\r\n\r\n".encode())
    for _ in range(HUGE // 2**16):
        writer.write(b" " * 2**16)
        await writer.drain()
    writer.write(b" " * (HUGE % 2**16))
    return await _answered(reader, writer)


async def _chunked(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(HUGE // 2**16):
        writer.write(b"10000\r\n" + b" " * 2**16 + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    return await _answered(reader, writer)


async def _stops(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(STOPPED)
    return await _answered(reader, writer)


async def _leaves(request: bytes, port: int) -> int:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    writer.transport.abort()
    return LEFT


async def _answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    status = await _status(reader)
    writer.close()
    return status


MISDEEDS: dict[str, Callable[[int], Coroutine[Any, Any, int]]] = {
    "50 MB": _huge,
    "50 MB in chunks": _chunked,
    "stops": _stops,
    "leaves in the body": partial(_leaves, STOPPED),
    "leaves": partial(_leaves, _request(_body(["item 1"]))),
}


def _unexpected(rows: list[dict[str, Any]]) -> list[str]:
    """What should have been answered with another status."""
    expected = {"well-formed": 200, "method": 405, "path": 404, "50 MB": 413, "50 MB in chunks": 413, "stops": 408}
    expected |= {"leaves": LEFT, "leaves in the body": LEFT}
    found: Counter[tuple[str, int]] = Counter()
    for row in rows:
        for kind, counts in row.get("statuses", {}).items():
            found.update({(kind, status): count for status, count in counts.items()})
    return [
        f"{kind}: status {status}, {count} times"
        for (kind, status), count in found.items()
        if status != expected.get(kind, 400)
    ]


def _show(rows: list[dict[str, Any]], setting: str) -> None:
    heads = ("workers, stage1", "clients", "malformed", "requests/s", "p50 ms", "p99 ms", "CPU ms", "MB")
    cells = []
    for row in rows:
        if row["clients"] is None:
            cells.append([row["server"], *[""] * 6, f"{row['mb']:.0f}", "before"])
            continue
        shown = ", ".join(f"{status or 'left'}: {count:,}" for status, count in sorted(row["statuses"].items()))
        times = (f"{row['requests_per_second']:.0f}", *(f"{row[name]:.1f}" for name in ("p50_ms", "p99_ms", "cpu_ms")))
        cells.append([row["server"], row["clients"], f"{row['bad']:.0%}", *times, f"{row['mb']:.0f}", shown])
    print_table([*heads, "answers by status"], cells, setting, 140)


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _own_mb(pid: int) -> float:
    """A process's memory, with its share of what it shares with others."""
    (line,) = (line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
