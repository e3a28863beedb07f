import os
import signal
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heeded() -> None:
    """What the tests start ignores what they ignore: SIGINT in the background of a shell, SIGHUP under nohup."""
    for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, action)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with ml-1m.zip, ml-100k.zip and amazon-beauty/beauty.txt.gz, which may not be distributed."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LOGITMIX_REAL_DATA", beside))
    if not (folder / "ml-1m.zip").is_file():
        pytest.skip(f"no ml-1m.zip in {folder}; LOGITMIX_REAL_DATA names the folder of the real data sets")
    return folder
