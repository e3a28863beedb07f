"""The FP8 wire on a throttled link: one model on two ranks, with embeddings sent as FP32, FP16 and FP8.

    python -m benchmarks.comm [--links 200mbit,1gbit,10gbit] [--arms fp32,fp16,fp8]

Each rank has one thread and a network namespace of its own; a veth pair with a token bucket (tc tbf) at both ends
joins them, which takes root and iproute2. The model is small, with many negatives (dot product, D = 64, a million
items), so that a step is mostly embeddings on the wire. Tables train by Adam: FBGEMM's fused optimizers take longer on
CPU.

Bytes a step are those of both ranks, as counted by the codec hook (embeddings and their gradients) and by the
interfaces, which also carry ids, dense gradients and headers. Runs have no checkpoint and no evaluation. "ms/step" is
wall time; "CPU" is the CPU time of a rank's process in it, including the kernel's, which bounds it from below. Rows are
exchanged in 4 parts (comm.parts).
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import tyro

from benchmarks.measure import machine, print_table
from logitmix.comm.process_group import process_group
from logitmix.common.mappings import from_mapping
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.loop import parallel_model, training_batches
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.quiet import quietly
from logitmix.trainer.step.memory import set_up_memory
from logitmix.trainer.step.pipeline import Pipeline

RANKS = 2
DEVICE, PORT = "wire", 29500
ITEMS, USERS, ACTIONS, BATCH = 1_000_000, 40, 6, 4
EPOCH = USERS // BATCH
WARM_UP = 10
MODEL: dict[str, Any] = {
    "dim": 64,
    "encoder": {"blocks": 1, "heads": 1, "dropout": 0.0, "max_length": 4},
    "similarity": {"kind": "dot", "normalize": False, "temperature": 1.0},
    "loss": {"negatives": 96_000, "share": "batch"},
}


@dataclass(frozen=True)
class Options:
    links: str = "200mbit,1gbit,10gbit"
    """Rates in tc's notation, mbit or gbit."""
    arms: str = "fp32,fp16,fp8"
    steps: int = 20
    """Steps of a run, a multiple of 10; the first 10 are warm-up."""
    repeats: int = 3
    """Runs of each arm on a link, the arms in turn; the speed is their median."""


def main(options: Options) -> None:
    # So that a run that is ended leaves no namespace behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    steps, repeats, arms = options.steps, options.repeats, options.arms.split(",")
    with tempfile.TemporaryDirectory() as name, namespaces() as names:
        folder = Path(name)
        _write_dataset(folder / "data")
        for link in options.links.split(","):
            throttle(names, link)
            runs = [(f"{link}-{arm}-{repeat}", arm) for repeat in range(repeats) for arm in arms]
            job = json.dumps({"folder": name, "runs": runs, "steps": steps})
            run_ranks(names, [sys.executable, "-m", "benchmarks.comm", "--worker", job])
            _show(link, {arm: [_read(folder, run, steps) for run, of in runs if of == arm] for arm in arms})
    print(
        f"median of {repeats} runs of {steps - WARM_UP} steps after {WARM_UP} of warm-up, 2 ranks x 1 thread, D = 64, "
        f"{MODEL['loss']['negatives']} negatives a batch, {BATCH} sequences a batch; {machine()}"
    )


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces that a link joins; none of them is left on exit."""
    names = [f"logitmix-{os.getpid()}-{rank}" for rank in range(RANKS)]
    with ExitStack() as stack:
        for name in names:
            # First, so that a kill in between leaves nothing either.
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
            _run("ip", "netns", "add", name)
        ends = [f"{DEVICE} netns {name}" for name in names]
        _run(*f"ip link add {ends[0]} type veth peer name {ends[1]}".split())
        for rank, name in enumerate(names):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"10.0.0.{rank + 1}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
        yield names


def throttle(names: Sequence[str], rate: str) -> None:
    megabits = float(rate[:-4]) * {"mbit": 1, "gbit": 1000}[rate[-4:]]
    # A bucket of half a millisecond, but never less than a 64 KiB frame of TCP segmentation offload: a smaller one has
    # the CPU cut each into packets, which is a network card's work.
    burst = max(70_000, int(megabits * 1e6 / 8 * 0.0005))
    for name in names:
        bucket = ["tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
        _run("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *bucket)


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise SystemExit(f"a throttled link takes root and iproute2: {said.strip()}") from None


def run_ranks(names: Sequence[str], words: Sequence[str]) -> None:
    """Runs `words` on both ranks; ends both, and this process, with what a rank said that fails."""
    with ExitStack() as stack:
        processes = []
        for rank, name in enumerate(names):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "10.0.0.1"}
            place |= {"MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": 1}
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *words], env=os.environ | {key: str(of) for key, of in place.items()}
            )
            # It is killed and waited for.
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            time.sleep(0.2)
        if any(statuses):
            raise SystemExit("a rank has failed")


def _write_dataset(path: Path) -> None:
    random = np.random.default_rng(0)
    offsets = np.arange(USERS + 1) * ACTIONS
    ids = pa.array([str(index) for index in range(ITEMS)])
    actions = random.integers(0, ITEMS, offsets[-1])
    write_dataset(path, DatasetContents(offsets, actions, np.arange(offsets[-1]), ids), "sequences")


def _read(folder: Path, run: str, steps: int) -> dict[str, float]:
    """Means of a step over the ranks, of bytes and losses their sums."""
    ranks = [json.loads((folder / f"{run}-{rank}.json").read_text()) for rank in range(RANKS)]
    sums = {name: sum(of[name] for of in ranks) for name in ranks[0]}
    found = {name: sums[name] / RANKS / (steps - WARM_UP) for name in ("wall", "cpu")}
    found |= {name: sums[name] / steps for name in ("hook", "interface")}
    return found | {"loss": sums["loss"], "examples_per_second": sums["examples"] / sums["wall"]}


def _show(link: str, arms: dict[str, list[dict[str, float]]]) -> None:
    heads = ("wire", "hook, MB/step", "interface, MB/step", "examples/s (range)", "ms/step", "CPU ms/step", "loss")
    rows = []
    for arm, runs in arms.items():
        of = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        speeds = [run["examples_per_second"] for run in runs]
        rows.append(
            (
                arm,
                *(f"{of[name] / 1e6:.3f}" for name in ("hook", "interface")),
                f"{of['examples_per_second']:.1f} ({min(speeds):.1f} to {max(speeds):.1f})",
                *(f"{of[clock] * 1000:.0f}" for clock in ("wall", "cpu")),
                f"{of['loss']:.4f}",
            )
        )
    print_table(heads, rows, link, 140)


def work(job: dict[str, Any]) -> None:
    """One rank: every run, without checkpoint and evaluation."""
    folder, steps, rank = Path(job["folder"]), job["steps"], os.environ["RANK"]
    torch.set_num_threads(1)
    set_up_memory()
    for name, arm in job["runs"]:
        # The previous group's store may still listen: an early rank would connect to it, and lose it.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        tree = {
            "data": {"path": str(folder / "data")},
            "model": MODEL,
            "comm": {"forward": arm, "backward": arm, "parts": 4},
            "train": {"batch_size": BATCH, "epochs": steps // EPOCH, "precision": "bf16", "log_every": steps},
        }
        config = from_mapping(Config, tree, "benchmark")
        with quietly():
            found = _trained(config, steps)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))


def _trained(config: Config, steps: int) -> dict[str, float]:
    """What a run takes on this rank: bytes of all steps, for between two of them the next one's rows are in flight;
    seconds and examples after the warm-up."""
    dataset = load_dataset(config.data.path)
    with process_group("cpu", config.comm.timeout_seconds) as ranks:
        model = parallel_model(config, dataset.schema, ranks)
        optimizer, batches = dense_optimizer(model.tower, config.dense), training_batches(config, dataset, ranks)
        with Pipeline(model, optimizer, batches, steps) as pipeline:
            sent = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
            before = int(sent.read_text())
            for step in range(steps):
                if step == WARM_UP:
                    examples, wall, cpu = pipeline.examples, time.perf_counter(), time.process_time()
                losses = pipeline.train_step()
            found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            found |= {"interface": int(sent.read_text()) - before, "examples": pipeline.examples - examples}
            assert pipeline.wire_counts is not None
            found |= {"hook": float(pipeline.wire_counts[..., 0].sum()), "loss": losses["loss"].item()}
        # The other rank may still be reading what this one sent.
        time.sleep(0.5)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main(tyro.cli(Options, description=__doc__))
