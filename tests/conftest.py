import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from leftovers import listening, living

TO_END = 5.0
"""Seconds for the last test's processes to end."""
OTHERS = ("torchelastic_*", "torchx_*", "torchinductor_*", "pymp-*", ".ses")
"""What torchrun, torchx, torch, Python's multiprocessing and onnxruntime keep among temporary files."""


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session for a process, a listening port or a temporary directory that outlives the tests."""
    name, folder = "LOGITMIX_TESTS", tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, str(folder))
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
        mark = f"{name}={folder}"
    gc.collect()
    until = time.monotonic() + TO_END
    while (processes := living(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    found = [f"process {pid}: {command}" for pid, command in processes.items()]
    found += [f"port {address} of process {pid}" for pid in (os.getpid(), *processes) for address in listening(pid)]
    found += [
        f"in the folder of temporary files: {path.name}" for path in sorted(set(folder.iterdir()) - _of_others(folder))
    ]
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if found:
        pytest.fail("outlived the tests:\n" + "\n".join(found), pytrace=False)


def _of_others(folder: Path) -> set[Path]:
    return {path for pattern in OTHERS for path in folder.glob(pattern)}


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
