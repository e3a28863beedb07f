"""Peak memory of each rank in train, evaluate, checkpoint and export, on a generated dataset.

    python -m benchmarks.memory [--items 8000000] [--feature-rows 0] [--processes 2] [--folder DIR]

The measure is anonymous memory (RssAnon and RssShmem of /proc/PID/status, sampled every 2 ms): what a process has
allocated. Pages of mapped files, such as the libraries' code and an export's items, are not counted, because the system
can drop them. The bound is 0.65 x (tables + optimizer state) + 2 GB, for two ranks: half of them plus 15 %, and memory
that does not grow with the corpus. The model is demo-mol's with row-wise Adagrad; users are few and their histories
short. With --feature-rows the items have a feature whose table has so many rows.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tyro
from rich.console import Console

from benchmarks.measure import machine, print_table, python, words_of
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.writer import DatasetContents, write_dataset

DIM = 64
SETTINGS = {
    "model.dim": DIM, "tables.optimizer": "rowwise_adagrad", "tables.sharding": "row_wise", "train.device": "cpu",
    "train.batch-size": 128, "train.precision": "bf16", "evaluate.users": 8, "evaluate.batch-size": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    items: int = 8_000_000
    feature_rows: int = 0
    """Rows of the table of an item feature; 0 for no such feature."""
    users: int = 2_000
    processes: int = 2
    folder: str = ""
    """Folder where the dataset, the run and the export are made, and removed; by default the system's folder for
    temporary files. 8 million items take 20 GB."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        rows = list(_measure(options, Path(folder)))
    limit = 0.65 * (options.items + options.feature_rows) * (DIM + 1) * 4 + 2e9
    counts = f"{options.items:,} items, {options.feature_rows:,} rows of a feature"
    title = f"GB at most, of {limit / 1e9:.2f} allowed; {counts}, {machine()}"
    cells = []
    for row in rows:
        peaks = [f"{peak / 1e9:.2f}" for peak in row["peaks"]] + [""] * (options.processes - len(row["peaks"]))
        cells.append([row["command"], row["phase"], *peaks, f"{row['s']:.0f}"])
    print_table(["command", "phase", *(f"rank {rank}" for rank in range(options.processes)), "s"], cells, title)


def _measure(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each command and phase."""
    data, run = folder / "data", folder / "run"
    write_data(data, options.items, options.users, options.feature_rows)
    train = ["train", "demo-mol", "--data.path", str(data), "--run", str(run), *words_of(SETTINGS)]
    train += ["--model.features", "all", "--train.epochs"]
    commands = {
        "train": [*train, "2"],
        "train on": [*train, "3"],
        "evaluate": ["evaluate", str(run), "--threads", "1", "--device", "cpu"],
        "export": ["export", str(run), "--out", str(folder / "export")],
        "export alone": ["export", str(run), "--out", str(folder / "export"), "--overwrite"],
        "retrieve": ["retrieve", str(folder / "export"), "--history", "0,1,2"],
    }
    for name, words in commands.items():
        Console(stderr=True).print(f"measuring {name}", highlight=False)
        processes = 1 if name in ("export alone", "retrieve") else options.processes
        peaks = _run(words, processes, folder / "peaks")
        for phase in peaks[0]:
            of_ranks = [of[phase] for of in peaks]
            seconds = max(of["s"] for of in of_ranks)
            yield {"command": name, "phase": phase, "peaks": [of["peak"] for of in of_ranks], "s": seconds}


def write_data(out: Path, items: int, users: int, feature_rows: int = 0) -> None:
    """A dataset of short random histories; with rows of a feature, the items have one."""
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(random.integers(5, 20, users))])
    actions = random.integers(0, items, offsets[-1])
    contents = DatasetContents(offsets, actions, np.arange(offsets[-1]), _names(items))
    if feature_rows:
        ids, brand = Schema.of_ids(items), Feature("brand", "item", "id", "brand")
        schema = Schema((*ids.features, brand), (*ids.tables, Table("brand", feature_rows)))
        columns = {"brand": Column(random.integers(0, feature_rows, items))}
        values = {"brand": pa.concat_arrays([pa.nulls(1, pa.string()), _names(feature_rows)[1:]])}
        contents = replace(contents, schema=schema, columns=columns, vocabularies=values)
    write_dataset(out, contents, "made")


def _names(count: int) -> pa.Array:
    return pa.array(np.arange(count)).cast(pa.string())


def _run(words: list[str], processes: int, folder: Path) -> list[dict[str, dict[str, float]]]:
    """Peaks and seconds by phase, of each rank."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = ["-m", "benchmarks.memory", "rank", str(folder), *words]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, "-m", "benchmarks.memory", "--", *command[2:]]
    python(*command)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


class Watch:
    """This process's peak in each phase: the innermost one that it is in."""

    def __init__(self, first: str) -> None:
        self.phases, self.peaks, self.seconds = [first], {first: 0}, {first: 0.0}
        self.lock, self.before = threading.Lock(), time.perf_counter()
        threading.Thread(target=self._keep_sampling, daemon=True).start()

    def sample(self) -> None:
        with self.lock:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
            phase, now = self.phases[-1], time.perf_counter()
            self.peaks[phase] = max(self.peaks.get(phase, 0), kib * 1024)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.before
            self.before = now

    def _keep_sampling(self) -> None:
        while True:
            self.sample()
            time.sleep(0.002)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.sample()
        self.phases.append(name)
        try:
            yield
        finally:
            self.sample()
            self.phases.pop()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Makes a function of a module or class a phase."""
        wrapped: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.phase(phase):
                return wrapped(*arguments, **options)

        setattr(owner, name, timed)

    def report(self) -> dict[str, dict[str, float]]:
        return {name: {"peak": peak, "s": self.seconds[name]} for name, peak in self.peaks.items()}


def run_rank(folder: Path, words: list[str]) -> None:
    """One process of a command, with its memory sampled."""
    watch = Watch(words[0])
    from logitmix.trainer import cli, loop
    from logitmix.trainer.evaluation import evaluate
    from logitmix.trainer.run import checkpoint, saving

    watch.wrap(loop, "load_dataset", "load the dataset")
    watch.wrap(loop, "parallelize", "initialize")
    watch.wrap(checkpoint, "restore", "restore")
    watch.wrap(saving.Saver, "save", "checkpoint")
    watch.wrap(checkpoint, "restore_best", "load the best")
    watch.wrap(evaluate.Evaluation, "__call__", "evaluate")
    cli.main(words)
    (folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(watch.report()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(tyro.cli(Options, description=__doc__))
