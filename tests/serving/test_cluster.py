"""Ray Serve over processes of its own: two shards and a front answer as one process does, also while one is gone and
while a new export takes over."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request as Asking
from urllib.request import urlopen

import pytest
import yaml
from small_models import every_feature, export_small, small_model
from waiting import until

from logitmix.common.files import publish
from logitmix.common.mappings import from_mapping
from logitmix.serving.cluster import Arguments
from logitmix.serving.retriever import Retriever
from logitmix.serving.workers import bound
from logitmix.trainer.export import export as export_module

EXAMPLES = Path(__file__).parents[2] / "examples/cluster"
PATIENCE = 600.0
"""Seconds for Ray to start, or to replace a process, on a machine that others keep busy."""


def config_of_manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest for KubeRay, and the configuration in it."""
    manifest = yaml.safe_load((EXAMPLES / "rayservice.yaml").read_text())
    return manifest, yaml.safe_load(manifest["spec"]["serveConfigV2"])


def test_the_configurations_are_those_of_the_application() -> None:
    """Each names `build`, with arguments that it takes; options are of deployments that there are."""
    for config in (yaml.safe_load((EXAMPLES / "serve.yaml").read_text()), config_of_manifest()[1]):
        (application,) = config["applications"]
        assert application["import_path"] == "logitmix.serving.cluster:build"
        shards = from_mapping(Arguments, application["args"], "args").shards
        names = {"front", *(f"shard-{number + 1}" for number in range(shards))}
        assert {of["name"] for of in application.get("deployments", [])} <= names
        assert config["http_options"].keys() == {"host", "port"}


def test_ray_serve_reads_the_configurations() -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed; `make install` does that")
    code = "import json, sys; from ray.serve.schema import ServeDeploySchema as S; S(**json.loads(sys.argv[1]))"
    for config in (yaml.safe_load((EXAMPLES / "serve.yaml").read_text()), config_of_manifest()[1]):
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, json.dumps(config)], check=True, timeout=PATIENCE)


@contextmanager
def cluster(folder: Path, tmp_path: Path, short: str) -> Iterator[str]:
    """The URL of the cluster that the example's command starts, with another export and port, once it is ready. In the
    folder `short` are Ray's sockets, whose names have 107 letters at most."""
    config = yaml.safe_load((EXAMPLES / "serve.yaml").read_text())
    with bound("127.0.0.1", 0) as free:
        config["http_options"]["port"] = port = free.getsockname()[1]
    config["applications"][0]["args"] |= {"directory": str(folder), "cpus": 0, "shard_seconds": 20}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    # Ray keeps its token in the home directory.
    (tmp_path / "home").mkdir()
    environment = {
        **os.environ,
        "RAY_TMPDIR": short,
        "HOME": str(tmp_path / "home"),
        "RAY_raylet_start_wait_time_s": str(int(PATIENCE)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    serve = [str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "serve.yaml")]
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(serve, env=environment, stdout=log, stderr=log, process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: running.poll() is not None or ask(f"{url}/readyz")[0] == 200, PATIENCE)
        yield url
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        running.wait(PATIENCE)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        print((tmp_path / "log").read_text()[-5000:])


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and content of an answer; 0 where nobody answers, or not in JSON."""
    try:
        with urlopen(Asking(url, json.dumps(body).encode() if body else None), timeout=PATIENCE) as found:
            return found.status, json.load(found)
    except HTTPError as error:
        text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else text
    except (URLError, ConnectionError, json.JSONDecodeError):
        return 0, None


def process_of(name: str) -> list[int]:
    """The processes of a replica, by what Ray calls them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if title.startswith(b"ray::ServeReplica:logitmix:" + name.encode()):
            found.append(int(folder.name))
    return found


@pytest.mark.timeout(3600)
def test_two_shards_of_ray_serve_answer_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed; `make install` does that")
    X = 300
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5000)
    first, second = (
        export_small(small_model("mol", X, schema=every_feature(X), seed=seed), tmp_path / f"{seed}") for seed in (0, 1)
    )
    folder = Path(shutil.copytree(first, tmp_path / "served"))
    requests: list[dict[str, Any]] = [
        {"history": ["id 7", "id 700"], "k": 20, "stage1": stage1, "where": where, "user": {"age": 7}}
        for stage1 in (None, 40)
        for where in ("", "price > 1")
    ]

    def expected(export: Path) -> list[Any]:
        retriever = Retriever.load(export)
        return [retriever.recommend([of])[0]["items"] for of in requests]  # type: ignore[list-item]

    with TemporaryDirectory(dir="/tmp", prefix="ray") as short, cluster(folder, tmp_path, short) as url:
        found = [ask(f"{url}/retrieve", of) for of in requests]
        assert [status for status, _ in found] == [200] * len(requests)
        assert [answer["items"] for _, answer in found] == expected(first)

        # A new export takes over while requests come, and none of them fails.
        done, seen = threading.Event(), list[tuple[int, Any]]()

        def client() -> None:
            while not done.is_set():
                seen.append(ask(f"{url}/retrieve", requests[1]))
                time.sleep(0.05)

        thread = threading.Thread(target=client)
        thread.start()
        try:
            publish(Path(shutil.copytree(second, tmp_path / "next")), folder)
            digest = Retriever.load(second).digest
            until(lambda: ask(f"{url}/healthz")[1]["digest"] == digest, PATIENCE)
        finally:
            done.set()
            thread.join()
        assert {status for status, _ in seen} == {200}
        assert [ask(f"{url}/retrieve", of)[1]["items"] for of in requests] == expected(second)

        # A shard that hangs is missing, and one that has ended is, until Ray Serve has started it again.
        (shard,) = process_of("shard-1")
        os.kill(shard, signal.SIGSTOP)
        until(lambda: ask(f"{url}/readyz")[0] == 503, PATIENCE)
        status, answer = ask(f"{url}/retrieve", requests[0])
        assert (status, answer["error"]) == (503, "shard 1/2 is missing: no answer within 20 s")
        os.kill(shard, signal.SIGKILL)
        until(lambda: ask(f"{url}/readyz")[0] == 200, PATIENCE)
        assert process_of("shard-1") != [shard]
        assert [ask(f"{url}/retrieve", of)[1]["items"] for of in requests] == expected(second)
    until(lambda: not any(map(process_of, ("shard", "front"))), PATIENCE)
