"""`logitmix serve` under load: throughput, latency and memory.

    python -m benchmarks.server DIR [--requests 10000] [--clients 1,8,64] [--workers 1,2]

DIR is a serving directory. The server is the real command in a process of its own; it shares the machine with the
clients. Of several numbers of workers, and several `--stage1`, each has a server; all are measured in turn. Memory is
that of all processes of a server (PSS): of pages that others map too, among them the servers that are measured beside
it, its share.

A client sends its next request when it has the answer to the last one, over a connection that stays open; requests have
20 random items of history and k = 10. The server's own CPU time for a request depends less on what else the machine
does than the other times. Requests that do not count come first.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.measure import machine, print_table
from logitmix.serving.retriever import Retriever

HISTORY, K = 20, 10
COLUMNS = {"clients": 0, "requests_per_second": 0, "p50_ms": 1, "p99_ms": 1, "cpu_ms": 1, "mb": 0}
"""With their digits."""


@dataclass(frozen=True)
class Options:
    directory: tyro.conf.Positional[str]
    """Serving directory."""
    requests: int = 10_000
    clients: str = "1,8,64"
    workers: str = "1"
    stage1: str = "100000"
    threads: int = 0
    """Of each worker; the cores divided among them when 0."""
    wait_ms: float = 10.0
    """As for logitmix serve, all of these; lists are separated by commas."""
    seed: int = 0


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        directory = options.directory
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
    cells = [(row["server"], *(f"{row[name]:.{digits}f}" for name, digits in COLUMNS.items())) for row in rows]
    print_table(("workers, stage1", "clients", "requests/s", "p50 ms", "p99 ms", "CPU ms", "MB"), cells, setting, 140)
    if problems:
        raise SystemExit("\n".join(problems))


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


def _port(server: subprocess.Popen[bytes], log: Path) -> int:
    """The port of a server that has started."""
    while server.poll() is None:
        if "http://" in (said := log.read_text()):
            return int(said.strip().rpartition(":")[2])
        time.sleep(0.1)
    raise SystemExit(log.read_text())


async def _measured(options: Options, servers: Sequence[_Server], ids: list[str]) -> list[dict[str, Any]]:
    chance, rows = random.Random(options.seed), []
    numbers = [int(number) for number in options.clients.split(",")]
    for server in servers:
        await _load(server.port, max(numbers), 5 * max(numbers), ids, chance)
    for clients in numbers:
        for server in servers:
            start, cpu = time.perf_counter(), server.cpu_seconds
            seconds = sorted(await _load(server.port, clients, options.requests, ids, chance))
            taken = time.perf_counter() - start
            row = {"server": server.name, "clients": clients, "mb": server.mb}
            row |= {"requests_per_second": options.requests / taken, "p50_ms": statistics.median(seconds) * 1000}
            row |= {"p99_ms": seconds[int(0.99 * len(seconds))] * 1000}
            rows.append(row | {"cpu_ms": (server.cpu_seconds - cpu) / options.requests * 1000})
    return rows


async def _load(port: int, clients: int, requests: int, ids: list[str], chance: random.Random) -> list[float]:
    """Seconds of each request."""
    seconds, left = list[float](), iter(range(requests))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            body = json.dumps({"history": chance.sample(ids, HISTORY), "k": K}).encode()
            head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            start = time.perf_counter()
            writer.write(head.encode() + body)
            if (status := await _status(reader)) != 200:
                raise SystemExit(f"a request was answered with status {status}")
            seconds.append(time.perf_counter() - start)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds


async def _status(reader: asyncio.StreamReader) -> int:
    """Reads an answer to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    await reader.readexactly(int(length))
    return int(head.split(b" ", 2)[1])


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _own_mb(pid: int) -> float:
    """A process's memory, with its share of what it shares with others."""
    (line,) = (line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
