"""What benchmarks/ranks.py measures, and what it does when a rank dies and when a run before it was killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import ranks

pytestmark = pytest.mark.long


def test_two_ranks_beside_one(tmp_path: Path) -> None:
    found = ranks.measured(ranks.Options(ranks="2", items=500, sequences=2, steps=2), tmp_path)
    off = {(of["tables"], of["precision"]): [of[name] for name in ranks.OFF] for of in found["off"]}
    assert off.keys() == {(division, precision) for division in ranks.DIVISIONS for precision in ranks.PRECISIONS}
    for (_, precision), values in off.items():
        assert max(values) < {"fp32": 1e-5, "bf16": 1e-2, "fp8 wire": 0.3}[precision]
    # Only what is sent is rounded: each copy sends gradients alone.
    assert off["row_wise", "fp8 wire"][0] > off["row_wise", "fp32"][0]
    [speed] = found["speed"]
    assert speed["ranks"] == 2 and speed["samples_per_second"] > 0 and len(speed["table_mb"]) == 2
    assert all(of["mb"] > 0 and of["alone_ms"] > 0 for of in speed["collectives"].values())


def test_a_rank_that_dies_ends_the_others_with_what_it_said() -> None:
    dies = "rank = os.environ['RANK']; sys.exit('no memory') if rank == '1' else time.sleep(60)"
    since = time.monotonic()
    with pytest.raises(SystemExit, match=r"^rank 1 of 2: exit 1\nno memory\n$"):
        ranks.run_ranks([sys.executable, "-c", f"import os, sys, time; {dies}"], ranks.Places(2))
    assert time.monotonic() - since < 30


IP = """
import os, sys
folder = os.environ["NAMESPACES"]
if sys.argv[1] == os.environ.get("FAILS"):
    sys.exit(sys.argv[1] + " fails")
match sys.argv[2:]:
    case ["add", name]:
        open(os.path.join(folder, name), "w").close()
    case ["list"]:
        print(*sorted(os.listdir(folder)), sep="\\n")
    case ["pids", name]:
        print(open(os.path.join(folder, name)).read())
    case ["del", name]:
        os.remove(os.path.join(folder, name))
"""


@pytest.fixture
def namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the host's: a file for each, with the processes in it, that a stand-in for `ip` reads."""
    folder, programs = tmp_path / "namespaces", tmp_path / "bin"
    for made in (folder, programs):
        made.mkdir()
    for name, text in (("ip", f"#!{sys.executable} -S{IP}"), ("tc", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("NAMESPACES", str(folder))
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return folder


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_what_a_killed_benchmark_left_goes(namespaces: Path, sleeping: subprocess.Popen[bytes]) -> None:
    """Its ranks and its namespaces; not those of a benchmark that runs, nor of others."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    (namespaces / f"logitmix-{ended.pid}-0").write_text(f"{sleeping.pid}\n{ended.pid}")
    (namespaces / f"logitmix-{ended.pid}-switch").touch()
    kept = [f"logitmix-{os.getppid()}-0", "mine", f"mine-logitmix-{ended.pid}-0"]
    for name in kept:
        (namespaces / name).write_text(str(os.getpid()))
    with ranks.network(2, "1gbit"):
        assert sleeping.wait(10) == -signal.SIGKILL
    assert sorted(os.listdir(namespaces)) == sorted(kept)


@pytest.mark.parametrize("fails", ["", "-n"])
def test_an_interrupted_or_failed_benchmark_leaves_no_namespace(
    namespaces: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", fails)
    said = r"--link needs root and iproute2 \(-n fails\); leave it out for the loopback" if fails else "143"
    with pytest.raises(SystemExit, match=said), ranks.network(2, "1gbit") as places:
        assert sorted(os.listdir(namespaces)) == sorted([*places.namespaces, f"logitmix-{os.getpid()}-switch"])
        sys.exit(128 + signal.SIGTERM)  # as its handler does
    assert not os.listdir(namespaces)
