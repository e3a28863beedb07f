"""What a shell has exported does not reach the tests."""

import os
import subprocess
import sys
from pathlib import Path

EXPORTED = {
    "OMP_NUM_THREADS": "3",
    "MKL_NUM_THREADS": "2",
    "TZ": "Asia/Kathmandu",
    "LC_ALL": "tr_TR.ISO-8859-9",
    "COLUMNS": "30",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
    "PYTHONPATH": str(Path(__file__).parent),
    "PYTHONWARNINGS": "ignore",
}
CHILD = """
import json, os, shutil, time
print(json.dumps([dict(os.environ), shutil.get_terminal_size()[0], time.tzname]))
"""
PLANTED = f"""
import json, shutil, subprocess, sys, time

import pytest

EXPORTED = {EXPORTED}

@pytest.mark.long
def test_planted():
    found = subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True, check=True).stdout
    variables, *others = json.loads(found)
    assert others == [80, ["UTC", "UTC"]] == [shutil.get_terminal_size()[0], list(time.tzname)]
    assert not EXPORTED.items() & variables.items()
"""


def test_variables_that_a_shell_has_exported_are_fixed_or_gone(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    words = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-o", "markers=long"]
    words += [f"--basetemp={tmp_path / 'base'}", "test_planted.py"]
    environment = {**os.environ, **EXPORTED}
    session = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert session.returncode == 0 and "1 passed" in session.stdout, session.stdout + session.stderr
