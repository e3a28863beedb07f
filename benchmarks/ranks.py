"""Training on several ranks beside training in one process: agreement, speed, traffic and memory.

    python -m benchmarks.ranks [--ranks 1,2,4,8] [--link 200mbit] [--wire fp8] [--device cuda] [--plot FILE.svg]

The first table has one step for each way to divide the tables and for each precision. It shows how far the loss and
the gradients are from those of one process that computes the whole batch in the same precision and with an FP32 wire: a
difference of gradients is the norm of the difference divided by the norm. The second table has training at each number
of ranks, each with `--sequences` of its own. The third has the collectives of a step: the megabytes that a rank sends,
the milliseconds that they take alone, and those that the step waits for them. What it does not wait for overlaps.

Users and items are made up. Each rank has one thread. With `--link` it also has a network namespace, on a bridge, with
a token bucket (tc tbf) at both ends; that takes root and iproute2. Without it the ranks use the loopback, and on CUDA
NCCL, with one rank on each GPU.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.estimates import Size, pipeline_of, write_data
from benchmarks.measure import machine, print_table
from logitmix.comm import exchange
from logitmix.comm.collectives import all_reduce_sum, barrier
from logitmix.comm.process_group import Ranks, process_group
from logitmix.launch.processes import held_port
from logitmix.trainer.config import Config, load_recipe, with_settings
from logitmix.trainer.parallel.flat import FlatLosses
from logitmix.trainer.parallel.ids import IdExchange
from logitmix.trainer.parallel.parallelize import ParallelModel, computes_bf16
from logitmix.trainer.step.memory import set_up_memory

LENGTH = 50
WARM_UP = 3
DEVICE = "wire"
"""The name of a rank's network interface within its namespace."""
DIVISIONS: dict[str, dict[str, Any]] = {
    "row_wise": {"tables.sharding": "row_wise"},
    "table_wise": {"tables.sharding": "table_wise"},
    "column_wise": {"tables.sharding": "column_wise"},
    "copies": {"tables.group_size": 1},
}
"""Ways to divide the tables; of `copies`, each rank has all rows."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"train.precision": "fp32", "comm.forward": "fp32", "comm.backward": "fp32"},
    "bf16": {"train.precision": "bf16", "comm.forward": "fp32", "comm.backward": "fp32"},
    "fp8 wire": {"train.precision": "fp32", "comm.forward": "fp8", "comm.backward": "fp8"},
}
GRADIENTS: dict[str, Any] = {"tables.optimizer": "sgd", "tables.lr": 1.0, "dense.optimizer": "sgd", "dense.lr": 1.0}
"""Settings by which a step moves each weight by its gradient."""
COLLECTIVES = ("counts", "ids", "rows", "row gradients", "tower gradients")


@dataclass(frozen=True)
class Options:
    ranks: str = "1,2,4"
    """Numbers of ranks to train on, one after the other."""
    device: Literal["cpu", "cuda"] = "cpu"
    link: str = ""
    """Rate of each rank's link in tc's notation, such as 200mbit or 1gbit; empty: the loopback."""
    wire: str = "fp8"
    """Precision of rows and their gradients on the wire while training."""
    recipe: str = "ml-1m-dot"
    items: int = 200_000
    sequences: int = 8
    """Users of a batch for each rank."""
    steps: int = 10
    """Measured steps, after three to warm up."""
    plot: str = ""
    """File for a plot of samples a second by ranks."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"([1-9]\d*)(,[1-9]\d*)*", self.ranks):
            raise SystemExit(f"--ranks is {self.ranks}; give numbers such as 1,2,4")
        if self.link and not re.fullmatch(r"\d+(mbit|gbit)", self.link):
            raise SystemExit(f"--link is {self.link}; give a rate such as 200mbit or 1gbit")

    @property
    def counts(self) -> list[int]:
        return sorted(map(int, self.ranks.split(",")))


def main(options: Options) -> None:
    # So that a killed run leaves no namespace behind either.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name:
        found = measured(options, Path(name))
    if options.json:
        print(json.dumps(found))
        return
    if options.plot:
        plot(found["speed"], options.plot)
    where = f"{options.recipe}, {options.link or 'loopback'}, {options.wire} wire"
    heads: tuple[str, ...] = ("ranks", "tables", "precision", "loss", "tables' gradients", "tower's gradients")
    rows = [[of["ranks"], of["tables"], of["precision"], *(f"{of[what]:.1e}" for what in OFF)] for of in found["off"]]
    print_table(heads, rows, "One step, relative difference to one process")
    heads = ("ranks", "samples/s", "ms a step", "of the collectives overlap", "tables and their optimizer, MB a rank")
    print_table(heads, map(_speed_cells, found["speed"]), where)
    heads = ("ranks", "collective", "MB a rank", "ms alone", "ms waited for")
    rows = [
        [of["ranks"], name, *(f"{value:.2f}" for value in each.values())]
        for of in found["speed"]
        for name, each in of["collectives"].items()
    ]
    print_table(heads, rows, where)
    print(
        f"{options.sequences} sequences of about {LENGTH} positions a rank, {options.items:,} items, {options.steps} "
        f"steps after {WARM_UP}; {machine()}"
    )


OFF = ("loss", "table_gradients", "tower_gradients")


def _speed_cells(of: Mapping[str, Any]) -> list[str]:
    smallest, largest = min(of["table_mb"]), max(of["table_mb"])
    cells = [f"{of['samples_per_second']:,.0f}", f"{of['step_ms']:.1f}", f"{of['overlap']:.0%}"]
    return [str(of["ranks"]), *cells, f"{smallest:.0f} to {largest:.0f}"]


def plot(speed: Sequence[Mapping[str, Any]], file: str) -> None:
    """Draws samples a second by ranks, beside as many times those of the first number."""
    count_N = [of["ranks"] for of in speed]
    samples_N = [of["samples_per_second"] for of in speed]
    axes = Figure(figsize=(5, 3.2), layout="constrained").subplots()
    axes.plot(count_N, samples_N, marker="o", label="measured")
    axes.plot(count_N, [samples_N[0] * count / count_N[0] for count in count_N], linestyle=":", label="in proportion")
    axes.set(xlabel="ranks", ylabel="samples a second", xticks=count_N, ylim=(0, None))
    axes.legend(frameon=False)
    axes.figure.savefig(file)


def measured(options: Options, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of both tables: `off` and `speed`."""
    counts = options.counts
    users = options.sequences * max(counts) * (WARM_UP + options.steps)
    write_data(folder / "data", Size(options.recipe, options.items, LENGTH, {"train.batch_size": users}))
    off, speed, whole = list[dict[str, Any]](), list[dict[str, Any]](), options.sequences * max(counts)
    for count in sorted({1, *counts}):
        job = {"options": asdict(options), "folder": str(folder), "whole": whole, "speed": count in counts}
        with network(count, options.link) as places:
            run_ranks([sys.executable, "-m", "benchmarks.ranks", "--worker", json.dumps(job)], places)
        if count in counts:
            speed.append(json.loads((folder / f"speed-{count}.json").read_text()))
        if count > 1:
            off += [differences(folder, count, *arm) for arm in _arms(count)]
    return {"off": off, "speed": speed}


def differences(folder: Path, count: int, division: str, precision: str) -> dict[str, Any]:
    """Returns how far a step on `count` ranks is from that of one process."""
    own = "bf16" if precision == "bf16" else "fp32"
    found, expected = (
        torch.load(folder / f"step-{name}.pt") for name in (f"{count}-{division}-{precision}", f"1-{own}")
    )
    off = {name: float((found[name] - of).norm() / of.norm()) for name, of in expected.items()}
    return {"ranks": count, "tables": division, "precision": precision, **off}


def _arms(count: int) -> list[tuple[str, str]]:
    return [(division, precision) for division in DIVISIONS for precision in PRECISIONS]


def work(job: Mapping[str, Any]) -> None:
    """Does the work of one rank: a step of each arm, then training."""
    options, folder = Options(**job["options"]), Path(job["folder"])
    torch.set_num_threads(1)
    set_up_memory()
    common = {"data.path": str(folder / "data"), "train.device": options.device, "train.log_every": 1_000_000}
    config = with_settings(load_recipe(options.recipe), common | {"train.epochs": 1_000})
    with process_group(options.device, 120) as ranks:
        count = ranks.world_size
        if count == 1:
            steps = {f"1-{name}": PRECISIONS[name] for name in ("fp32", "bf16")}
        else:
            steps = {f"{count}-{d}-{p}": DIVISIONS[d] | PRECISIONS[p] for d, p in _arms(count)}
        for name, settings in steps.items():
            of_step = GRADIENTS | {"train.batch_size": job["whole"], "train.schedule": "constant"} | settings
            found = one_step(with_settings(config, of_step), ranks)
            if ranks.rank == 0:
                torch.save(found, folder / f"step-{name}.pt")
        if job["speed"]:
            precision = "bf16" if computes_bf16(ranks.device) else "fp32"
            settings = {"train.batch_size": options.sequences * count, "train.precision": precision}
            settings |= {"comm.forward": options.wire, "comm.backward": options.wire}
            row = train(with_settings(config, settings), ranks, options.steps)
            if ranks.rank == 0:
                (folder / f"speed-{count}.json").write_text(json.dumps(row))
        # Another rank may still be reading what this one sent.
        time.sleep(0.5)


def one_step(config: Config, ranks: Ranks) -> dict[str, Tensor]:
    """Returns the first batch's loss, and its gradients of all tables and of the tower. Collective."""
    with pipeline_of(config, ranks, 1) as pipeline:
        before = rows_of(pipeline.model)
        pipeline.train_step()
        loss = all_reduce_sum(pipeline.losses["loss"].detach().double(), ranks)
        gradients = before - rows_of(pipeline.model)
        found = dict(zip(OFF, (loss, gradients, pipeline.model.replicated.gradient_P), strict=True))
        return {name: of.detach().cpu().clone() for name, of in found.items()}


def rows_of(model: ParallelModel) -> Tensor:
    """Returns the numbers of all tables, flat, on every rank. Collective."""
    tables = model.evaluated()[1]
    return torch.cat([tables[name].fetch(torch.arange(model.plan[name].rows)).flatten() for name in sorted(tables)])


def train(config: Config, ranks: Ranks, steps: int) -> dict[str, Any]:
    """Trains for some steps, and returns their row of the second and third table. Collective."""
    waits = Waits(ranks.device)
    # The last step is logged, and waits for the device.
    with pipeline_of(config, ranks, WARM_UP + steps + 1) as pipeline, waits.noted():
        model = pipeline.model
        for _ in range(WARM_UP):
            pipeline.train_step()
        waits.clear()
        began, examples = _now(ranks), pipeline.examples
        for _ in range(steps):
            pipeline.train_step()
        seconds, examples = _now(ranks) - began, pipeline.examples - examples
        waited, sent, calls = waits.seconds(), Counter(waits.sent), Counter(waits.calls)
        pipeline.train_step()
    collectives, saved = {}, 0.0
    for name in COLLECTIVES:
        size, number = sent[name] / steps, calls[name] / steps
        alone_ms = _alone_ms(name, size, number, model, ranks)
        waited_ms = waited[name] * 1e3 / steps
        collectives[name] = {"mb": size / 1e6, "alone_ms": alone_ms, "waited_ms": waited_ms}
        saved += max(0.0, alone_ms - waited_ms)
    total = sum(of["alone_ms"] for of in collectives.values())
    held = [shard.tensor for table in model.shards().values() for shard in table.local_shards()]
    states = [of for states in model.table_optimizers.state_dict().values() for of in states.values()]
    held += [shard.tensor for of in states if hasattr(of, "local_shards") for shard in of.local_shards()]
    bytes_W = torch.zeros(ranks.world_size, dtype=torch.float64)
    bytes_W[ranks.rank] = sum(of.numel() * of.element_size() for of in held)
    return {
        "ranks": ranks.world_size,
        "samples_per_second": examples / seconds,
        "step_ms": seconds * 1e3 / steps,
        "collectives": collectives,
        "overlap": saved / total if total else 0.0,
        "table_mb": (all_reduce_sum(bytes_W, ranks) / 1e6).tolist(),
    }


def _now(ranks: Ranks) -> float:
    """Seconds on the clock once all ranks, and the device, are here. Collective."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    barrier(ranks)
    return time.perf_counter()


def _alone_ms(name: str, size: float, number: float, model: ParallelModel, ranks: Ranks) -> float:
    """Returns the median time of a step's collectives of one kind while nothing else runs: `number` of them, which send
    `size` bytes together. Collective."""
    # The ranks' numbers may differ by the rows that they ask for, but all must call the same collectives.
    mean = all_reduce_sum(torch.tensor([size, number], dtype=torch.float64), ranks) / ranks.world_size
    size, calls, count = float(mean[0]), round(float(mean[1])), ranks.world_size
    if count == 1 or not calls:
        return 0.0
    each = max(1, round(size / calls / (count - 1)))
    device = torch.device("cpu") if name == "counts" else ranks.device
    sent = torch.zeros(each * count, dtype=torch.uint8, device=device)
    times = []
    for _ in range(5):
        began = _now(ranks)
        for _ in range(calls):
            if name == "tower gradients":
                dist.all_reduce(torch.empty_like(model.replicated.gradient_P), group=model.replicated.group)
            else:
                exchange._all_to_all(sent, [each] * count, [each] * count, model.replicas.group).wait()
        times.append((_now(ranks) - began) * 1e3)
    return statistics.median(times)


class Waits:
    """Bytes that this rank sends by each collective, and how long the computation waits for it: a CPU's thread, or a
    GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.clear()

    def clear(self) -> None:
        self.sent, self.calls, self.spans = Counter[str](), Counter[str](), list[tuple[str, Any, Any]]()

    def seconds(self) -> Counter[str]:
        """Returns the seconds that were waited for each collective. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        waited = Counter[str]()
        for name, began, ended in self.spans:
            waited[name] += began.elapsed_time(ended) / 1e3 if self.cuda else ended - began
        return waited

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes all collectives of training steps."""
        names = {"forward": "rows", "backward": "row gradients"}

        def send(original: Callable[..., None], of: Any, direction: Any, encoded: Tensor, sender: Any, to: Any) -> None:
            original(of, direction, encoded, sender, to)
            of._in_flight.name = name = names[direction]
            group = of.group
            own = sum(of.wire.codecs[direction].row_bytes(span.layout) * span.rows for span in sender[0][group.rank()])
            self._note(name, encoded.numel() - own)

        def arrive(original: Callable[..., Tensor], in_flight: Any) -> Tensor:
            return self._timed(getattr(in_flight, "name", ""), original, in_flight)

        def send_ids(original: Callable[..., None], ids: Any) -> None:
            if ids._ids is None:
                others = [of for rank, of in enumerate(ids.counts_sent) if rank != ids.group.rank()]
                self._note("counts", 8 * sum(map(len, others)))
                self._note("ids", 8 * sum(map(sum, others)))
            self._timed("counts", original, ids)

        def wait_ids(original: Callable[..., None], ids: Any) -> None:
            self._timed("ids", original, ids)

        def share(original: Callable[..., None], losses: Any, *arguments: Any) -> None:
            self._note("tower gradients", losses._summed.numel() * losses.wire.itemsize)
            original(losses, *arguments)

        def gradient(original: Callable[..., Tensor], losses: Any) -> Tensor:
            return self._timed("tower gradients", original, losses)

        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (exchange.Exchange, "_send", send),
            (exchange._InFlight, "wait", arrive),
            (IdExchange, "send", send_ids),
            (IdExchange, "wait", wait_ids),
            (FlatLosses, "share", share),
            (FlatLosses, "gradient", gradient),
        ]
        with ExitStack() as stack:
            for owner, name, by in replaced:
                original = getattr(owner, name)
                stack.enter_context(patch.object(owner, name, _method(by, original)))
            yield

    def _note(self, name: str, size: int) -> None:
        self.sent[name] += size
        self.calls[name] += 1

    def _timed(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        began = self._mark()
        result = function(*arguments)
        self.spans.append((name, began, self._mark()))
        return result

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _method(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(original, *arguments)


@dataclass(frozen=True)
class Places:
    """Where ranks run: their network namespaces, if they have some, and where they meet."""

    count: int
    namespaces: Sequence[str] = ()

    def command(self, rank: int, words: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespaces[rank], *words] if self.namespaces else [*words]


@contextmanager
def network(count: int, rate: str) -> Iterator[Places]:
    """Makes the network of so many ranks: the loopback, or links of this rate to one bridge. SystemExit if there can
    be no such links."""
    if not rate or count == 1:
        yield Places(count)
        return
    names = [f"logitmix-{os.getpid()}-{rank}" for rank in range(count)]
    switch = f"logitmix-{os.getpid()}-switch"
    with ExitStack() as stack:
        try:
            _remove_left_behind()
            for name in (switch, *names):
                # First, so that a kill in between leaves nothing either.
                stack.callback(_remove, name)
                _run("ip", "netns", "add", name)
            _run(*f"ip -n {switch} link add bridge type bridge".split())
            _run(*f"ip -n {switch} link set bridge up".split())
            for rank, name in enumerate(names):
                _run(*f"ip link add {DEVICE} netns {name} type veth peer name end{rank} netns {switch}".split())
                _run(*f"ip -n {switch} link set end{rank} master bridge".split())
                _run(*f"ip -n {name} addr add 10.0.0.{rank + 1}/24 dev {DEVICE}".split())
                for where, what in ((switch, f"end{rank}"), (name, DEVICE), (name, "lo")):
                    _run(*f"ip -n {where} link set {what} up".split())
                for where, what in ((switch, f"end{rank}"), (name, DEVICE)):
                    _throttle(where, what, rate)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
            raise SystemExit(f"--link needs root and iproute2 ({reason}); leave it out for the loopback") from None
        yield Places(count, names)


def _throttle(namespace: str, device: str, rate: str) -> None:
    megabits = float(rate[:-4]) * (1000 if rate.endswith("gbit") else 1)
    # A bucket of half a millisecond, but never less than a 64 KiB frame of TCP segmentation offload: a smaller one has
    # the CPU cut each into packets, which is a network card's work.
    burst = max(70_000, int(megabits * 1e6 / 8 * 0.0005))
    bucket = ["tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _remove_left_behind() -> None:
    """Removes the namespaces of runs that were killed, with their ranks."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name, owner in re.findall(r"^(logitmix-(\d+)-\w+)", listed, re.MULTILINE):
        if not Path("/proc", owner).exists():
            inside = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True).stdout
            for process in map(int, inside.split()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            _remove(name)


def _remove(namespace: str) -> None:
    with suppress(OSError):
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def run_ranks(words: Sequence[str], places: Places) -> None:
    """Runs `words` on all ranks until they have ended; none of them still runs on exit. SystemExit with the output of
    the first that fails: the others would wait for it."""
    with held_port() as free, ExitStack() as stack:
        address, interface, port = ("10.0.0.1", DEVICE, 29500) if places.namespaces else ("127.0.0.1", "lo", free)
        running = {}
        for rank in range(places.count):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": places.count, "MASTER_ADDR": address}
            place |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": 1}
            process = subprocess.Popen(
                places.command(rank, words),
                env=os.environ | {key: str(value) for key, value in place.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            # It is killed, its pipe closed, and waited for.
            stack.enter_context(process)
            stack.callback(process.kill)
            running[rank] = process
        while running:
            for rank, process in list(running.items()):
                with suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(timeout=0.5)
                    if process.returncode:
                        raise SystemExit(f"rank {rank} of {places.count}: exit {process.returncode}\n{said}")
                    del running[rank]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main(tyro.cli(Options, description=__doc__))
