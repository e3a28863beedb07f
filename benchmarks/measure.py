"""Shared by the measurements: CPU time and peak memory of a fresh process, and what a figure was measured on."""

import ctypes
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from logitmix.common.compiled import missing_parts
from logitmix.trainer.parallel.parallelize import computes_bf16

K, T = TypeVar("K"), TypeVar("T")


@dataclass(frozen=True)
class Spent:
    cpu_s: float
    peak_mb: float
    """Peak memory of the process, above what it held when the measurement began."""


def spent(work: Callable[[], object]) -> Spent:
    """CPU time and peak memory of a call in this process; Linux only."""
    ctypes.CDLL(None).malloc_trim(0)
    # This resets Linux's peak; getrusage's peak would include the set-up.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.process_time()
    work()
    return Spent(time.process_time() - start, (_status("VmHWM") - before) / 1024)


def in_turn(tasks: dict[str, partial[T]], repetitions: int) -> dict[str, list[T]]:
    """Runs each task that many times, every time in a fresh process; interleaved, so that load on the machine affects
    all."""
    results: dict[str, list[T]] = {name: [] for name in tasks}
    names = list(tasks) * repetitions
    if not names:
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for name in track(names, "measuring", console=Console(stderr=True)):
            results[name].append(pool.submit(tasks[name]).result())
    return results


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of a call, and of the processes that it starts and waits for."""

    def used() -> float:
        of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + of_children.ru_utime + of_children.ru_stime

    before = used()
    work()
    return used() - before


def milliseconds(
    methods: dict[K, Callable[[], object]],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
) -> dict[K, list[float]]:
    """Time of calls in this process, wall time by default: each in turn, that many times, after a first call that does
    not count. `wait` waits for the device."""
    times: dict[K, list[float]] = {name: [] for name in methods}
    for repetition in range(repetitions + 1):
        for name, method in methods.items():
            wait()
            start = clock()
            method()
            wait()
            if repetition:
                times[name].append((clock() - start) * 1000)
    return times


def median(runs: list[Spent]) -> Spent:
    return Spent(statistics.median(run.cpu_s for run in runs), statistics.median(run.peak_mb for run in runs))


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    shown = f"{statistics.median(values):.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def print_table(heads: Iterable[str], rows: Iterable[Sequence[object]], title: str, width: int = 120) -> None:
    table = Table(*heads, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """The arguments of a command that has these settings."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            section, _, last = flag.rpartition(".")
            words.append(flag if value else f"{section}.no-{last}")
        else:
            words += [flag, *(value if isinstance(value, tuple) else [str(value)])]
    return words


def machine() -> str:
    """The machine, versions and missing compiled parts that figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    missing = "".join(f", WITHOUT COMPILED {part}" for part in missing_parts())
    return f"torch {torch.__version__}, {_processor()}, commit {commit}{missing}"


def logitmix(*words: str, processes: int = 1) -> str:
    """Output of the command line, with one thread for each process unless the words say otherwise. Ends the benchmark
    with all output if it fails. Ctrl-C ends both, this one when that has saved its step."""
    command = ["-m", "logitmix.trainer.cli", *words, *(["--processes", str(processes)] if processes > 1 else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], env=environment, **pipes) as child:
        try:
            output, errors = child.communicate()
        except KeyboardInterrupt:  # which the child has got, too
            child.communicate()
            raise
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}\n{output}{errors}")
    return output


def _status(field: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if not names:
        return platform.machine()
    bf16 = "with" if computes_bf16(torch.device("cpu")) else "without"
    return f"{len(names)} cores of {names[0]} ({torch.backends.cpu.get_cpu_capability()}, {bf16} BF16)"
