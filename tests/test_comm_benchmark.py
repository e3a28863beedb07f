"""What benchmarks/comm.py does when a rank dies, and after it was interrupted itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import comm

pytestmark = pytest.mark.long

DIES = "rank = os.environ['RANK']; sys.exit('no memory') if rank == '1' else time.sleep(60)"


def test_a_rank_that_dies_before_the_others_meet_it_ends_them_with_what_it_said() -> None:
    since = time.monotonic()
    with (
        pytest.raises(SystemExit, match=r"^rank 1 on 1gbit: exit 1\nno memory\n$"),
        comm.Wire([]).ranks([sys.executable, "-c", f"import os, sys, time; {DIES}"]) as processes,
    ):
        comm._wait(processes, "1gbit")
    assert time.monotonic() - since < 10
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 1]


def test_ranks_that_say_much_are_waited_for() -> None:
    """More than a pipe holds, and they end one after the other."""
    says = "import os, time; print('x' * 1_000_000); time.sleep(0.2 * int(os.environ['RANK']))"
    with comm.Wire([]).ranks([sys.executable, "-c", says]) as processes:
        comm._wait(processes, "1gbit")
    assert [process.returncode for process in processes] == [0, 0]


IP = """
import os, sys
folder = os.environ["NAMESPACES"]
if sys.argv[1] == os.environ.get("FAILS"):
    sys.exit(sys.argv[1] + " fails")
match sys.argv[2:]:
    case ["add", name]:
        open(os.path.join(folder, name), "w").close()
    case ["list"]:
        print(*(name + (" (id: 0)" if "-0" in name else "") for name in sorted(os.listdir(folder))), sep="\\n")
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
    (namespaces / f"logitmix-{ended.pid}-1").touch()
    kept = [f"logitmix-{os.getpid()}-0", "mine", f"mine-logitmix-{ended.pid}-0"]
    for name in kept:
        (namespaces / name).write_text(str(os.getpid()))
    comm._remove_left_behind()
    assert sleeping.wait(10) == -signal.SIGKILL
    assert sorted(os.listdir(namespaces)) == sorted(kept)


@pytest.mark.parametrize("fails", ["", "link"])
def test_an_interrupted_or_failed_benchmark_leaves_no_namespace(
    namespaces: Path, fails: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", fails)
    with pytest.raises(SystemExit), comm._wire() as wire:
        assert len(os.listdir(namespaces)) == (0 if fails else 2) and wire.throttled == (not fails)
        sys.exit(128 + signal.SIGTERM)  # as its handler does
    assert not os.listdir(namespaces)
    assert capsys.readouterr().err == (
        "no throttled link without root and iproute2 (link fails); on the loopback instead\n" if fails else ""
    )
