"""The FP8 wire on a throttled link: one model on two ranks, with embeddings sent as FP32, FP16 and FP8.

    python -m benchmarks.comm [--links 200mbit,1gbit,10gbit] [--arms fp32,fp16,fp8]

Each rank has one thread and a network namespace of its own; a veth pair with a token bucket (tc tbf) at both ends
joins them. That takes root and iproute2; without them the ranks use the loopback, unthrottled. The model is small, with
many negatives (dot product, D = 64, a million items), so that a step is mostly embeddings on the wire. Tables train by
Adam: FBGEMM's fused optimizers take longer on CPU.

Bytes a step are those of both ranks, as counted by the codec hook (embeddings and their gradients) and by the
interfaces, which also carry ids, dense gradients and headers. Runs stop after their last step, without checkpoint and
evaluation. "ms/step" is wall time, including logging; "CPU" is the CPU time of a rank's process in it, including the
kernel's, which bounds it from below. Rows are exchanged in 4 parts (comm.parts).
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from logitmix.launch.processes import held_port
from logitmix.trainer.config import Config, flatten
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.logs.loggers import Loggers
from logitmix.trainer.logs.telemetry import Telemetry
from logitmix.trainer.loop import parallel_model, training_batches
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.run.metrics import RunProgress, read_rows
from logitmix.trainer.step.memory import set_up_memory
from logitmix.trainer.step.pipeline import PHASES, Pipeline

ARMS = ("fp32", "fp16", "fp8")
RANKS = 2
DEVICE = "wire"
ITEMS, USERS, ACTIONS, BATCH = 1_000_000, 40, 6, 4
EPOCH = USERS // BATCH
WARM_UP, LOG_EVERY = 10, 10
CLOCKS = ("wall", "cpu")
COUNTED = ("tx_bytes",)
MODEL: dict[str, Any] = {
    "dim": 64,
    "encoder": {"blocks": 1, "heads": 1, "dropout": 0.0, "max_length": 4},
    "similarity": {"kind": "dot", "normalize": False, "temperature": 1.0},
    "loss": {"negatives": 96_000, "share": "batch"},
}


@dataclass(frozen=True)
class Options:
    links: str = "200mbit,1gbit,10gbit"
    """Rates in tc's notation."""
    arms: str = ",".join(ARMS)
    steps: int = 20
    """Steps of a run; the first 10 are warm-up."""
    repeats: int = 3
    """Runs of each arm on a link, the arms in turn; the speed is their median."""

    def __post_init__(self) -> None:
        if strange := set(self.arms.split(",")) - set(ARMS):
            raise SystemExit(f"--arms has {', '.join(sorted(strange))}; there are {', '.join(ARMS)}")
        if self.steps < 2 * WARM_UP or self.steps % EPOCH or self.repeats < 1:
            raise SystemExit(f"--steps must be at least {2 * WARM_UP} and a multiple of {EPOCH}, --repeats at least 1")


def main(options: Options) -> None:
    steps, repeats = options.steps, options.repeats
    # So that a killed run leaves no namespace behind either.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name, _wire() as wire:
        _write_dataset(Path(name, "data"))
        for link in options.links.split(",") if wire.throttled else ["loopback"]:
            wire.throttle(link)
            _show(link, _measure(Path(name), link, options.arms.split(","), steps, repeats, wire))
    print(
        f"median of {repeats} runs of {steps - WARM_UP} steps after {WARM_UP} of warm-up, 2 ranks x 1 thread, D = 64, "
        f"{MODEL['loss']['negatives']} negatives a batch, {BATCH} sequences a batch; {machine()}"
    )


class Wire:
    """The network between the two ranks: the loopback, or a link between two namespaces."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self.namespaces, self.throttled = namespaces, bool(namespaces)

    def throttle(self, rate: str) -> None:
        for namespace in self.namespaces:
            # A bucket of half a millisecond, but never less than a 64 KiB frame of TCP segmentation offload: a smaller
            # one has the CPU cut each into packets, which is a network card's work.
            burst = max(70_000, int(_megabits(rate) * 1e6 / 8 * 0.0005))
            bucket = ["tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", DEVICE, "root", *bucket)

    @contextmanager
    def ranks(self, words: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
        """Runs `words` on both ranks; none of them still runs on exit."""
        processes: list[subprocess.Popen[str]] = []
        with held_port() as free, ExitStack() as stack:
            address, interface, port = ("10.0.0.1", DEVICE, 29500) if self.throttled else ("127.0.0.1", "lo", free)
            for rank in range(RANKS):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": address}
                place |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": 1}
                inside = ["ip", "netns", "exec", self.namespaces[rank]] if self.throttled else []
                process = subprocess.Popen(
                    [*inside, *words],
                    env=os.environ | {key: str(value) for key, value in place.items()},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                # It is killed, its pipe closed, and waited for.
                stack.enter_context(process)
                stack.callback(process.kill)
                processes.append(process)
            yield processes


@contextmanager
def _wire() -> Iterator[Wire]:
    names = [f"logitmix-{os.getpid()}-{rank}" for rank in range(RANKS)]
    with ExitStack() as stack:
        try:
            _remove_left_behind()
            for name in names:
                # First, so that a kill in between leaves nothing either.
                stack.callback(_remove, name)
                _run("ip", "netns", "add", name)
            ends = [f"{DEVICE} netns {name}" for name in names]
            _run(*f"ip link add {ends[0]} type veth peer name {ends[1]}".split())
            for rank, name in enumerate(names):
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "addr", "add", f"10.0.0.{rank + 1}/24", "dev", DEVICE)
                _run("ip", "-n", name, "link", "set", DEVICE, "up")
            wire = Wire(names)
            wire.throttle("1gbit")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
            print(f"no throttled link without root and iproute2 ({reason}); on the loopback instead", file=sys.stderr)
            stack.close()
            wire = Wire([])
        yield wire


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _remove_left_behind() -> None:
    """The namespaces of runs that were killed, with their ranks."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name, owner in re.findall(r"^(logitmix-(\d+)-\d+)", listed, re.MULTILINE):
        if not Path("/proc", owner).exists():
            inside = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True).stdout
            for process in map(int, inside.split()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            _remove(name)


def _remove(namespace: str) -> None:
    with suppress(OSError):
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _megabits(rate: str) -> float:
    for unit, factor in (("gbit", 1000.0), ("mbit", 1.0)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(f"--links has {rate}; write it like 200mbit or 1gbit")


def _write_dataset(path: Path) -> None:
    random = np.random.default_rng(0)
    offsets = np.arange(USERS + 1) * ACTIONS
    ids = pa.array([str(index) for index in range(ITEMS)])
    actions = random.integers(0, ITEMS, offsets[-1])
    write_dataset(path, DatasetContents(offsets, actions, np.arange(offsets[-1]), ids), "sequences")


def _config(data: Path, arm: str, steps: int) -> Config:
    epochs = steps // EPOCH
    tree = {
        "data": {"path": str(data)},
        "model": MODEL,
        "comm": {"forward": arm, "backward": arm, "parts": 4},
        "train": {
            "batch_size": BATCH,
            "epochs": epochs,
            "precision": "bf16",
            "device": "cpu",
            "log_every": LOG_EVERY,
        },
        "evaluate": {"every_epochs": epochs},
    }
    return from_mapping(Config, tree, "benchmark")


def _measure(folder: Path, link: str, arms: list[str], steps: int, repeats: int, wire: Wire) -> dict[str, Any]:
    runs = [(f"{link}-{arm}-{repeat}", arm) for repeat in range(repeats) for arm in arms]
    job = {"folder": str(folder), "runs": runs, "steps": steps}
    with wire.ranks([sys.executable, "-m", "benchmarks.comm", "--worker", json.dumps(job)]) as processes:
        _wait(processes, link)
    measured = {arm: [_read(folder / run) for run, of in runs if of == arm] for arm in arms}
    return {arm: _summary(repeated) for arm, repeated in measured.items()}


def _wait(processes: Sequence[subprocess.Popen[str]], link: str) -> None:
    """Waits until all ranks have ended. SystemExit with the output of the first that fails: the others would wait for
    it."""
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            with suppress(subprocess.TimeoutExpired):
                said, _ = process.communicate(timeout=0.5)
                if process.returncode:
                    raise SystemExit(f"rank {rank} on {link}: exit {process.returncode}\n{said}")
                del running[rank]


def _read(run: Path) -> dict[str, float]:
    """Means per step: times over the rows after the warm-up, bytes over all rows."""
    rows = read_rows(run, "train")
    warm = [row for row in rows if row["step"] > WARM_UP]
    found = {"loss": rows[-1]["loss"]}
    found |= {name: statistics.mean(row[name] for row in warm) for part in PHASES if (name := f"time/{part}")}
    found["wire/bytes_per_step"] = statistics.mean(row["wire/bytes_per_step"] for row in rows)
    sent = [_counted_per_step(run / f"counts-{rank}.jsonl") for rank in range(RANKS)]
    found |= {name: sum(rank[name] for rank in sent) / (RANKS if name in CLOCKS else 1) for name in sent[0]}
    return found | {"examples_per_second": found["examples"] / RANKS / found["wall"]}


def _counted_per_step(path: Path) -> dict[str, float]:
    """A rank's counts per step: seconds and examples after the warm-up and, except on the loopback, bytes and frames
    sent."""
    first, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    warm, last = next(row for row in rows if row["step"] == WARM_UP), rows[-1]
    # Between two steps the next step's rows are in flight: only before the first and after the last none are.
    since = {name: first if name in COUNTED else warm for name in last if name != "step"}
    return {name: (last[name] - of[name]) / (last["step"] - of["step"]) for name, of in since.items()}


def _summary(repeated: list[dict[str, float]]) -> dict[str, float]:
    summary = {name: statistics.median(run[name] for run in repeated) for name in repeated[0]}
    speeds = [run["examples_per_second"] for run in repeated]
    return summary | {"slowest": min(speeds), "fastest": max(speeds)}


def _show(link: str, arms: dict[str, dict[str, float]]) -> None:
    heads = ("wire", "hook, MB/step", "interface, MB/step", "examples/s (range)", "ms/step", "CPU ms/step", "loss")
    rows = [
        (
            arm,
            f"{of['wire/bytes_per_step'] / 1e6:.3f}",
            f"{of['tx_bytes'] / 1e6:.3f}" if "tx_bytes" in of else "-",
            f"{of['examples_per_second']:.1f} ({of['slowest']:.1f} to {of['fastest']:.1f})",
            *(f"{of[clock] * 1000:.0f}" for clock in CLOCKS),
            f"{of['loss']:.4f}",
        )
        for arm, of in arms.items()
    ]
    print_table(heads, rows, link, 140)
    for arm, of in arms.items():
        parts = (f"{part} {of[f'time/{part}'] * 1000:.1f}" for part in PHASES)
        print(f"ms of a step of {arm}: {', '.join(parts)}")


def _work(job: dict[str, Any]) -> None:
    """One rank: every run."""
    folder = Path(job["folder"])
    torch.set_num_threads(1)
    set_up_memory()
    for name, arm in job["runs"]:
        # The previous group's store may still listen: an early rank would connect to it, and lose it.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        _train(_config(folder / "data", arm, job["steps"]), folder / name, job["steps"])


def _train(config: Config, run: Path, steps: int) -> None:
    """Trains without evaluation and checkpoints; adds this rank's CPU time and its interface's bytes to each row of
    metrics."""
    run.mkdir(exist_ok=True)
    counts, dataset = run / f"counts-{os.environ['RANK']}.jsonl", load_dataset(config.data.path)
    with process_group("cpu", config.comm.timeout_seconds) as ranks:
        model = parallel_model(config, dataset.schema, ranks)
        optimizer, batches = dense_optimizer(model.tower, config.dense), training_batches(config, dataset, ranks)
        with (
            Loggers(run, flatten(config), dataset, RunProgress(), ranks) as loggers,
            Telemetry(run, model, loggers, RunProgress(), steps) as telemetry,
            Pipeline(model, optimizer, batches, steps) as pipeline,
        ):
            _note(counts, pipeline)
            for step in range(1, steps + 1):
                pipeline.train_step()
                telemetry.log_step(pipeline, step / batches.steps_per_epoch)
                if pipeline.logged:
                    _note(counts, pipeline)
        # The other rank may still be reading what this one sent.
        time.sleep(0.5)


def _note(path: Path, pipeline: Pipeline) -> None:
    counters = Path(f"/sys/class/net/{DEVICE}/statistics")
    sent = {name: int((counters / name).read_text()) for name in COUNTED if counters.exists()}
    clocks = dict(zip(CLOCKS, (time.perf_counter(), time.process_time()), strict=True))
    with open(path, "a") as file:
        file.write(json.dumps({"step": pipeline.step, "examples": pipeline.examples, **clocks, **sent}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(json.loads(sys.argv[2]))
    else:
        main(tyro.cli(Options, description=__doc__))
