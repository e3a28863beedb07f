import gc
import inspect
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import settings
from leftovers import listening, living

ROOT = Path(__file__).parents[1]
HERE = str(ROOT / "tests")
LONG = {"--processes", "fork", "forkserver", "jobs", "run_ranks", "subprocess", "two_ranks"}
LONG |= {"compiled", "export", "export_small", "onnx", "programs", "report", "train"}
"""Names and words in the code of tests that start processes, compile, train, export or show runs."""
TO_END = 5.0
"""Seconds for the last test's processes to end."""
OTHERS = ("torchelastic_*", "torchx_*", "torchinductor_*", "pymp-*", ".ses")
"""What torchrun, torchx, torch, Python's multiprocessing and onnxruntime keep among temporary files."""

ENVIRONMENT = {"TZ": "UTC", "LANG": "C.UTF-8", "TERM": "xterm", "COLUMNS": "80"}
KEPT = re.compile(
    "PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|CC|CXX|JAVA_HOME|PYTHONDONTWRITEBYTECODE|(?i:.*_proxy)|"
    "(SSL|REQUESTS|CURL)_.*|(PIP|PYTEST|LOGITMIX|CUDA|NVIDIA)_.*"
)
"""Variables that tests and what they start have: those that find programs, files, the network and GPUs stay. No other
that a shell has exported, such as OMP_NUM_THREADS, may decide whether a test passes."""
kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
os.environ.clear()
os.environ.update(kept | ENVIRONMENT)
time.tzset()

with pytest.MonkeyPatch.context() as patch:
    # Only this package of the repository is imported under its bare name.
    patch.syspath_prepend(ROOT)
    import benchmarks  # noqa: F401

settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("few", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=500, deadline=None)
settings.load_profile("few")
# What collecting the tests imports and makes stays: looking through it for garbage is an eighth of `make quick`.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as quick one case of each test that is not long. Files with long tests come first, so that workers that are
    given files end at the same time."""
    seen, long = set(), set()
    for item in items:
        if _is_long(item):
            long.add(item.path)
        elif item.function not in seen:
            seen.add(item.function)
            item.add_marker("quick")
    items.sort(key=lambda item: item.path not in long)


def _is_long(item: pytest.Item) -> bool:
    """Whether the test, its fixtures or the tests' own functions that they call name something LONG."""
    if not isinstance(item, pytest.Function) or any(map(item.get_closest_marker, ("gpu", "long", "slow"))):
        return True
    known = item._fixtureinfo.name2fixturedefs
    fixtures = [fixture.func for name in item.fixturenames for fixture in known.get(name, ())]
    return bool(_names((item.function, *fixtures)) & LONG)


@cache
def _names(functions: tuple[Callable[..., Any], ...]) -> set[str]:
    names, seen, left = set[str](), set[Any](), list[Any](functions)
    while left:
        function = left.pop()
        if isinstance(function, Hashable) and function not in seen:
            seen.add(function)
            found, others = _named_by(function)
            names |= found
            left += others
    return names


@cache
def _named_by(function: Any) -> tuple[frozenset[str], list[Any]]:
    """What a function of the tests names, and what that is; nothing for all else."""
    function = inspect.unwrap(function.hypothesis.inner_test if hasattr(function, "hypothesis") else function)
    if not isinstance(function, FunctionType) or not function.__code__.co_filename.startswith(HERE):
        return frozenset(), []
    found = frozenset(_names_in(function.__code__))
    of = (function.__globals__.get(name) for name in found)
    return found, [other for other in of if callable(other)]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    left = [*code.co_consts]
    while left:
        constant = left.pop()
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, tuple):
            left += constant
        elif isinstance(constant, str):
            yield constant


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage is looked for in what tests make. Torch has one thread, as its idle ones keep a core that another process
    of the tests could use. CUDA looks once which GPUs a process may see: where tests need some, before it is hidden
    from others."""
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    if any(item.get_closest_marker("gpu") for item in session.items):
        import torch

        torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not item.get_closest_marker("gpu"):
            _hide_gpus(patch)
        return (yield)


def _hide_gpus(patch: pytest.MonkeyPatch) -> None:
    """From the test and from what it starts, which may be more processes than there are GPUs."""
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    if torch := sys.modules.get("torch"):
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session for a process, a listening port or a temporary directory that outlives the tests."""
    name, folder = "LOGITMIX_TESTS", tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, str(folder))
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
        mark = f"{name}={folder}"
    # pytest still holds what the fixtures of the last test gave it, such as a process group with its port.
    for item in request.session.items:
        (getattr(item, "funcargs", None) or {}).clear()
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
def _the_disk_is_not_waited_for() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heeded() -> None:
    """What the tests start ignores what they ignore: SIGINT in the background of a shell, SIGHUP under nohup."""
    for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, action)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset that no test changes."""
    from small_data import write_dataset

    return write_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="session")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset with features of every owner and kind, that no test changes."""
    from small_data import write_dataset

    return write_dataset(tmp_path_factory.mktemp("featured") / "small", weighted=True)


@pytest.fixture
def ranks() -> Iterator[Any]:
    """This process alone."""
    from logitmix.comm.process_group import process_group

    with process_group("cpu", 60) as ranks:
        yield ranks


@pytest.fixture
def threads() -> Iterator[None]:
    """For tests that set torch's number of threads."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def to_train(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that training is started with; nothing is trained."""
    configs: list[Any] = []
    start = "logitmix.trainer.loop.train"
    monkeypatch.setattr(start, lambda config, run, callbacks=(): configs.append(config) or {"step": 0})
    return configs


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `logitmix WORDS`, which must end as on a user's mistake; returns what it says on standard error."""

    def refusal(*words: str) -> str:
        from logitmix.trainer import cli

        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main(list(words))
        assert stop.value.code == 2
        return capsys.readouterr().err

    return refusal


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with ml-1m.zip, ml-100k.zip and amazon-beauty/beauty.txt.gz, which may not be distributed."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LOGITMIX_REAL_DATA", beside))
    if not (folder / "ml-1m.zip").is_file():
        pytest.skip(f"no ml-1m.zip in {folder}; LOGITMIX_REAL_DATA names the folder of the real data sets")
    return folder
