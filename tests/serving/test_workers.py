"""`logitmix serve --workers N`: all answer from the newest export, and one that dies is replaced."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from small_models import export_small, small_model
from test_server import X, head, read_all
from waiting import until

from logitmix.common.files import publish

PATIENCE = 120.0


@contextmanager
def serving(folder: Path, log: Path, *words: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The command with two workers, and its port."""
    command = [sys.executable, "-m", "logitmix.trainer", "serve", str(folder), "--port", "0", "--workers", "2", *words]
    with log.open("wb") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)}
        server = subprocess.Popen(command, stderr=file, env=environment)
    try:
        until(lambda: b"http://" in log.read_bytes() or server.poll() is not None, PATIENCE)
        started = re.fullmatch(
            rf"logitmix: serving {folder} with 2 workers on http://127.0.0.1:(\d+)\n", log.read_text()
        )
        assert started, log.read_text()
        yield server, int(started[1])
    finally:
        server.kill()
        server.wait()


def get(port: int, path: str) -> str:
    """The content of an answer; empty if there is none."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
            text: str = answer.read().decode()
            return text
    except HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def by_worker(port: int, name: str) -> dict[int, float]:
    """A metric's values by the process of the worker."""
    return {
        int(worker): float(value)
        for worker, value in re.findall(rf'^{name}{{worker="(\d+)"}} (\S+)$', get(port, "/metrics"), re.MULTILINE)
    }


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return True
    return False


def test_workers_answer_take_over_exports_are_replaced_and_end(tmp_path: Path) -> None:
    folder, log = export_small(small_model("mol", X), tmp_path / "served"), tmp_path / "log"
    with serving(folder, log) as (server, port):
        # One of them has the metrics of both.
        with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as one:

            def of_one() -> str:
                one.request("GET", "/metrics")
                return one.getresponse().read().decode()

            until(lambda: len(re.findall("logitmix_export_items{", of_one())) == 2)
        publish(export_small(small_model("mol", X + 1), tmp_path / "next"), folder)
        until(lambda: [*by_worker(port, "logitmix_export_items").values()] == [X + 1, X + 1])
        killed = next(iter(by_worker(port, "logitmix_reloads_total")))
        os.kill(killed, signal.SIGKILL)
        until(lambda: f"worker {killed} ended with status -9; worker " in log.read_text())
        until(lambda: len(workers := by_worker(port, "logitmix_export_items")) == 2 and killed not in workers, PATIENCE)
        # After SIGTERM it answers what is in flight.
        body = b'{"history": ["id 7"], "k": 3}'
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
            client.sendall(head(len(body)).replace(b"here", b"localhost") + body[:5])
            server.send_signal(signal.SIGTERM)
            until(lambda: is_refused(port))
            client.sendall(body[5:])
            assert len(json.loads(read_all(client).partition(b"\r\n\r\n")[2])["items"]) == 3
        assert server.wait(PATIENCE) == 0
    said = re.sub(r"worker \d+:", "worker:", log.read_text()).splitlines()[1:]
    assert sorted(said)[1:] == [f"logitmix: worker: new export: {X + 1} items of demo, step 12 of run small"] * 2


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    with serving(export_small(small_model("mol", X), tmp_path / "served"), tmp_path / "log") as (server, port):
        server.kill()
        until(lambda: is_refused(port))


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    folder = export_small(small_model("mol", X), tmp_path / "served")
    (folder / "tower.safetensors").write_bytes(b"")
    command = [sys.executable, "-m", "logitmix.trainer", "serve", str(folder), "--port", "0", "--workers", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"logitmix: {folder / 'tower.safetensors'} is damaged")
