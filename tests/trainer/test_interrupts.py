"""Ctrl-C where no code of the command runs: no traceback, whenever it comes. And how a process ends otherwise."""

import signal
import subprocess
import sys

import pytest

INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
WHILE_LOADING = f"""
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "logitmix.trainer.quiet":
            {INTERRUPT}
sys.meta_path.insert(0, Finder())
"""
TWICE = f"""
import logitmix.trainer.cli as cli
def run(command, words):
    try:
        {INTERRUPT}
        sum(iter(int, 1))
    finally:
        {INTERRUPT}
        sum(iter(int, 1))
cli.run = run
"""
SWALLOWED = f"""
import logitmix.trainer.cli as cli
def run(command, words):
    try:
        {INTERRUPT}
        sum(iter(int, 1))
    except BaseException:
        pass
    from logitmix.trainer.stopping import Stopping
    with Stopping(None, 1.0):
        print("trained", file=sys.stderr)
cli.run = run
"""
AT_THE_END = f"""
import atexit
def end():
    {INTERRUPT}
    sum(iter(int, 1))
atexit.register(end)
"""


@pytest.mark.parametrize(
    ("when", "status", "said"),
    [
        (WHILE_LOADING, -signal.SIGINT, ""),
        (TWICE, -signal.SIGINT, ""),
        (AT_THE_END, -signal.SIGINT, ""),
        (SWALLOWED, 130, "logitmix: stopped\n"),
    ],
    ids=["while modules load", "twice", "while the interpreter ends", "where a library swallows it"],
)
def test_an_interrupt_prints_no_traceback(when: str, status: int, said: str) -> None:
    program = f"import sys\n{when}\nfrom logitmix.trainer.__main__ import main\nsys.argv[1:] = ['--version']\nmain()"
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (status, said)


@pytest.mark.parametrize("words", ["trainer --help", "trainer train demo-mol --help", "trainer.cli plan --help"])
def test_who_has_seen_enough_of_the_output_is_told_nothing(words: str) -> None:
    module, *others = words.split()
    with subprocess.Popen(
        [sys.executable, "-m", f"logitmix.{module}", *others], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == (b"", 128 + signal.SIGPIPE)
