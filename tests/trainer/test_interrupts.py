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
IN_A_DESTRUCTOR = f"""
class Dying:
    def __del__(self):
        {INTERRUPT}
import logitmix.trainer.cli as cli
def run(command, words):
    while True:
        Dying()
cli.run = run
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
        (IN_A_DESTRUCTOR, 130, ""),
        (TWICE, -signal.SIGINT, ""),
        (AT_THE_END, -signal.SIGINT, ""),
        (SWALLOWED, 130, "logitmix: stopped\n"),
    ],
    ids=["while modules load", "in a destructor", "twice", "while the interpreter ends", "where a library swallows it"],
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


@pytest.mark.parametrize(
    "works",
    ["atexit.register(later)", "threading.Thread(target=lambda: (threading.main_thread().join(), later())).start()"],
)
def test_what_is_left_to_do_at_the_end_is_done(works: str) -> None:
    """By functions for the end, and by threads, for whose end the interpreter waits."""
    program = f"import atexit, sys, threading\nlater = lambda: sys.stdout.write('later')\n{works}\n"
    program += "from logitmix.trainer.__main__ import main\nsys.argv[1:] = ['--version']\nmain()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.endswith("later")
