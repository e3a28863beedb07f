"""The check that ends every session of tests."""

import os
import subprocess
import sys
from pathlib import Path

PLANTED = """
import socket, subprocess, sys, tempfile

import pytest

pytestmark = pytest.mark.long

LISTENER = socket.socket()

def test_leaves_an_orphan():
    waiting = [sys.executable, "-c", "import time; time.sleep(60)  # planted"]
    starting = f"import subprocess; subprocess.Popen({waiting}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", starting], check=True)

def test_leaves_a_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(61)  # planted"])

def test_leaves_a_port():
    LISTENER.bind(("127.0.0.1", 0))
    LISTENER.listen()

def test_leaves_a_folder():
    tempfile.mkdtemp(prefix="planted-")
"""


def test_a_session_fails_for_what_outlives_its_tests(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    here = Path(__file__).parent
    words = ["-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-o", "markers=long", "test_planted.py"]
    session = subprocess.run(
        [sys.executable, *words, f"--basetemp={tmp_path / 'base'}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
    )
    assert session.returncode == 1 and "4 passed, 1 error" in session.stdout
    said = session.stdout.partition("outlived the tests:")[2].partition("=====")[0]
    found = [line for line in said.splitlines() if line]
    assert [line for line in found if "process" in line and "sleep(60)  # planted" in line]
    assert [line for line in found if "process" in line and "sleep(61)  # planted" in line]
    assert [line for line in found if line.startswith("port 0100007F:")]
    assert [line for line in found if "planted-" in line and "temporary files" in line]
    assert len(found) == 4
