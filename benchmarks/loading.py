"""Reading a prepared dataset: time and memory of one process and of several, with arrays that they share (arrays.py).

    python -m benchmarks.loading [--actions 50000000] [--users 500000] [--items 200000] [--ranks 4] [--folder DIR]

Writes a dataset of random actions to --folder (a temporary one), if there is none yet, and reads it: at first, when its
arrays are made, and again, in one process and in `ranks` at once, each of which also makes a batch. Memory is PSS, in
which a page that n processes map counts as 1/n of a page in each, beyond that of the same process before.
"""

import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pyarrow as pa
import tyro

from benchmarks.measure import machine
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents, write_dataset


@dataclass(frozen=True)
class Options:
    actions: int = 50_000_000
    users: int = 500_000
    items: int = 200_000
    ranks: int = 4
    folder: str = ""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(options.folder or temporary) / "data"
        if not (path / "dataset.json").is_file():
            make(path, options)
        found = {"machine": machine(), "actions": options.actions}
        for name, ranks in (("first", 1), ("again", 1), (f"{options.ranks} ranks", options.ranks)):
            found[name] = at_once(path, ranks)
        print(json.dumps(found, indent=1))


def make(path: Path, options: Options) -> None:
    random = np.random.default_rng(0)
    bounds = np.sort(random.integers(0, options.actions + 1, options.users - 1))
    offsets = np.concatenate([[0], bounds, [options.actions]])
    items = random.integers(0, options.items, options.actions, dtype=np.int32)
    times = np.arange(options.actions, dtype=np.int32)
    write_dataset(path, DatasetContents(offsets, items, times, pa.array(map(str, range(options.items)))), "random")


def at_once(path: Path, ranks: int) -> dict[str, float]:
    """The slowest process' seconds to read the dataset and to make the first batch, and the MiB of all together."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=read, args=(path, rank, ranks, barrier, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    seconds, batch, mib = zip(*(results.get() for _ in processes), strict=True)
    for process in processes:
        process.join()
    return {"seconds": max(seconds), "seconds of a batch": max(batch), "MiB": sum(mib)}


def read(path: Path, rank: int, ranks: int, barrier: Barrier, results: "multiprocessing.Queue[object]") -> None:
    before = pss()
    barrier.wait()
    begun = time.perf_counter()
    dataset = load_dataset(path)
    loaded = time.perf_counter()
    settings = {"batch_size": 128, "max_length": 200, "negatives": 128, "seed": 0}
    batches = TrainingBatches(dataset, dataset.schema, share="sequence", rank=rank, world_size=ranks, **settings)
    batches.at(0)
    made = time.perf_counter()
    # All pages are in memory, as after an epoch.
    int(dataset.items_flat.sum()) + int(dataset.timestamps_flat.sum())
    barrier.wait()
    results.put((loaded - begun, made - loaded, pss() - before))
    barrier.wait()


def pss() -> float:
    """MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


if __name__ == "__main__":
    main(tyro.cli(Options))
