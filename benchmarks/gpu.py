"""Checks and measures a machine with NVIDIA GPUs: `make gpu`, in about ten minutes.

    python -m benchmarks.gpu [--out docs/gpu.md]

In turn: versions; the tests marked `gpu`; collectives over NCCL, one rank on each GPU; a short training on all GPUs
against the losses of one process on the CPU; steps of recipes beside what `logitmix plan` estimates of them; the GPU's
kernels compared with eager plain torch and with their floors.
The floor of a codec is a copy of as many bytes; that of a loss or of attention is its matrix products alone, forward
once and backward twice, at the rate of one large product in the same precision; that of stage 1 and of MoL's scores of
what it found is the time to read the INT8 corpus or the candidates' rows once. With one GPU the collectives and the
training have one rank: they show that NCCL loads and that the kernels work, not that GPUs reach each other.

If a check fails, it is named, and the exit status is 1. Only if all pass is --out written: one table, and what it was
measured on.

Axes: T positions, V items, N negatives of a sequence, D width; U, I, M components of query, item and mixture, C their
width, H hidden width of the gates; B queries, X items of a corpus, P pairs of a query and one of its candidates.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks import ranks as ranks_benchmark
from benchmarks.estimates import Size, a_pipeline, write_data
from benchmarks.measure import logitmix, machine, milliseconds
from logitmix.comm import fp8
from logitmix.comm.process_group import Ranks, process_group
from logitmix.modules.batch import Packing
from logitmix.modules.config import DotConfig, MoLConfig
from logitmix.modules.encoders.hstu_attention import TIME_BUCKETS, attend, attend_plain
from logitmix.modules.losses.blockwise import Examples, blockwise_loss, softmax
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.dot import Dot
from logitmix.modules.similarity.mol import MoL
from logitmix.modules.stage1 import Int8Corpus, hindexer_topk
from logitmix.trainer.commands.plan import USAGE, Arguments, plan_job
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.commands.step_time import GPUS
from logitmix.trainer.config import Config, load_recipe, with_settings
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.step.pipeline import Pipeline

LENGTH, NEGATIVES, DIM, ITEMS = 200, 128, 64, 3706
"""Positions of a sequence, N, D and V of the losses that are measured: MovieLens-1M's."""
CORPUS, ITEM_CACHE, STAGE_1 = 10_000_000, 1_000_000, 100_000
"""Items that stage 1 searches, items whose rows MoL reads, and candidates of a query: X and k' of the paper's order."""
TRAINED = 20
STEPS = (
    Size("ml-1m-dot", 3706, 165, {"train.batch_size": 128}),
    Size("ml-1m-mol", 3706, 165, {"train.batch_size": 128}),
    Size("ml-1m-hstu", 3706, 165, {"train.batch_size": 128}),
    Size("ml-1m-hstu-mol", 3706, 165, {"train.batch_size": 128}),
    Size("ml-1m-mol", 1_000_000, 200, {"train.batch_size": 512, "model.loss.negatives": 1024}),
)
TRAINING = {
    "FP32": (["--train.precision", "fp32", "--comm.forward", "fp32", "--comm.backward", "fp32"], 1e-4),
    "BF16, FP8 wire": (["--train.precision", "bf16", "--comm.emulate"], 3e-3),
}
"""Arms of the short training, and how far a loss may be from the CPU's, as a share of it. On CPU, two processes and one
are 3e-7 and 3e-4 apart, and the arms 8e-4 from each other."""
LOSS_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far the compiled loss and its gradients may be from plain torch, relative to the largest number, and MoL's
scores, relative to their size."""


PACKAGES = ("torchrec", "fbgemm-gpu", "triton")


class Wrong(Exception):
    """A wrong result."""


@dataclass(frozen=True)
class Options:
    out: str = "docs/gpu.md"
    nccl: bool = False
    """Run only the collectives, as a rank that torchrun started."""


@dataclass(frozen=True)
class Row:
    """A line of the table, in milliseconds."""

    what: str
    ms: float
    eager_ms: float
    """In plain torch."""
    floor_ms: float


def main(options: Options) -> None:
    if options.nccl:
        with process_group("cuda", 120) as ranks:
            report = collectives(ranks)
            if ranks.rank == 0:
                print(json.dumps(report))
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"benchmarks.gpu: torch {torch.__version__} sees no NVIDIA GPU here")
    parts = {"tests": gpu_tests, "NCCL": nccl, "training": training, "ranks": more_ranks, "steps": steps}
    parts["kernels"] = kernels
    wrong, notes, rows = prove(parts)
    text = markdown(versions(), notes, rows)
    print(text)
    if wrong:
        raise SystemExit("\n".join(f"WRONG: {name}: {what}" for name, what in wrong.items()))
    Path(options.out).write_text(text)


def prove(parts: dict[str, Callable[[], tuple[list[str], list[Row]]]]) -> tuple[dict[str, str], list[str], list[Row]]:
    """Errors by part, and notes and rows of the parts that passed. A part that fails does not stop the others."""
    wrong: dict[str, str] = {}
    notes: list[str] = []
    rows: list[Row] = []
    for name, part in parts.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            more_notes, more_rows = part()
        except (Exception, SystemExit) as error:
            wrong[name] = f"{type(error).__name__}: {error}"
            print(f"WRONG: {name}: {wrong[name]}", file=sys.stderr, flush=True)
        else:
            # At once, for a run that does not come to its end.
            print(*more_notes, *more_rows, sep="\n", file=sys.stderr, flush=True)
            notes += more_notes
            rows += more_rows
    return wrong, notes, rows


def versions() -> list[str]:
    gpus = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return [
        f"{len(gpus)} x {gpus[0].name}, {gpus[0].total_memory / 2**30:.0f} GiB, compute capability "
        f"{gpus[0].major}.{gpus[0].minor}",
        f"driver {driver[0] if driver else '?'}, CUDA {torch.version.cuda}, "
        f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {packages}",
        machine(),
    ]


def gpu_tests() -> tuple[list[str], list[Row]]:
    # Others may need what is not installed.
    files = [str(file) for file in Path("tests").rglob("test_*.py") if "@pytest.mark.gpu" in file.read_text()]
    # Most of their time, the compiler is at work.
    options = ["-q", "-m", "gpu and not slow", "--timeout", "600", "--numprocesses", "8"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not re.search(r"\d+ passed", last) or "skipped" in last:
        raise Wrong(f"{last}\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
    return [f"Tests marked `gpu`: {last.strip('= ')}."], []


def nccl() -> tuple[list[str], list[Row]]:
    ranks = torch.cuda.device_count()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([sys.executable, *launcher, "-m", "benchmarks.gpu", "--nccl"], capture_output=True, text=True)
    if done.returncode:
        raise Wrong(done.stdout[-2000:] + done.stderr[-4000:])
    report = json.loads(done.stdout.strip().splitlines()[-1])
    speeds = ", ".join(f"{name} {speed:.0f} GB/s" for name, speed in report["gb_per_second"].items())
    alone = "; one rank sends to itself alone, so this says nothing of links" if ranks == 1 else ""
    return [f"Collectives over NCCL, {ranks} rank{'s' * (ranks > 1)}: sums and parts are exact; {speeds}{alone}."], []


def more_ranks() -> tuple[list[str], list[Row]]:
    """Returns a note on training on 1, 2, 4 and 8 GPUs. Raises Wrong if an FP32 step differs from one process's."""
    counts = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()]
    with tempfile.TemporaryDirectory() as folder:
        options = ranks_benchmark.Options(",".join(map(str, counts)), "cuda", sequences=128)
        found = ranks_benchmark.measured(options, Path(folder))
    for of in found["off"]:
        off = max(of[name] for name in ranks_benchmark.OFF)
        _require(of["precision"] != "fp32" or off <= 1e-4, f"a step on {of['ranks']} ranks, {of['tables']}: {off:.1e}")
    speeds = ", ".join(f"{of['samples_per_second']:,.0f} on {of['ranks']}" for of in found["speed"])
    return [f"Samples a second of {options.recipe}, {options.sequences} sequences a GPU: {speeds}."], []


def collectives(ranks: Ranks, megabytes: int = 256) -> dict[str, Any]:
    """Checks a sum and an uneven all-to-all, then times both: GB per second that a rank sends. Collective."""
    world, rank, device = ranks.world_size, ranks.rank, ranks.device
    total = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(total, group=ranks.group)
    _require(bool((total == world * (world + 1) / 2).all()), f"all_reduce on rank {rank} gave {total[0].item()}")
    # Rank r sends (r + 1)(s + 1) rows of the number r * world + s to rank s.
    sent = [(rank + 1) * (other + 1) for other in range(world)]
    received = [(other + 1) * (rank + 1) for other in range(world)]
    outgoing = torch.cat([torch.full((n, 3), rank * world + s, device=device) for s, n in enumerate(sent)])
    expected = torch.cat([torch.full((n, 3), s * world + rank, device=device) for s, n in enumerate(received)])
    incoming = torch.empty_like(expected)
    dist.all_to_all_single(incoming, outgoing, received, sent, group=ranks.group)
    _require(torch.equal(incoming, expected), f"all_to_all on rank {rank} gave other rows")
    numbers = megabytes * 2**20 // 4 // world * world
    large, other = torch.ones(numbers, device=device), torch.empty(numbers, device=device)
    reduce_s = seconds(partial(dist.all_reduce, large, group=ranks.group), device, 10)
    exchange_s = seconds(partial(dist.all_to_all_single, other, large, group=ranks.group), device, 10)
    # A ring's all-reduce sends each number twice, but for a rank's own share; an all-to-all once.
    share = (world - 1) / world if world > 1 else 1.0
    gigabytes = numbers * 4 * share / 1e9
    return {"gb_per_second": {"all_reduce": 2 * gigabytes / reduce_s, "all_to_all": gigabytes / exchange_s}}


def training() -> tuple[list[str], list[Row]]:
    gpus, notes = torch.cuda.device_count(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logitmix("prepare", "demo", "--out", str(folder / "demo"))
        for arm, (words, bound) in TRAINING.items():
            on_cpu = losses(folder, f"{arm} cpu", [*words, "--train.device", "cpu"], 1)
            on_gpu = losses(folder, f"{arm} gpu", [*words, "--train.device", "cuda"], gpus)
            off = apart(on_gpu, on_cpu, bound)
            notes.append(
                f"Training demo-mol, {arm}, on {gpus} GPU{'s' * (gpus > 1)}: the losses of {TRAINED} steps are within "
                f"{off:.1e} of the CPU's (allowed: {bound:.0e})."
            )
    return notes, []


def losses(folder: Path, name: str, words: Sequence[str], processes: int) -> list[float]:
    """Losses of the first steps of the recipe demo-mol."""
    run = folder / name.replace(" ", "-")
    common = ["--data.path", str(folder / "demo"), "--train.log-every", "1", "--evaluate.every-epochs", "0"]
    logitmix("train", "demo-mol", *common, "--train.epochs", "0.4", *words, "--run", str(run), processes=processes)
    return [row["loss"] for row in read_rows(run, "train")][:TRAINED]


def apart(found: Sequence[float], expected: Sequence[float], bound: float) -> float:
    """Largest relative difference; raises Wrong if it is beyond the bound, or if a loss is not a number."""
    _require(len(found) == len(expected) > 0, f"{len(found)} losses beside {len(expected)}")
    off = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    for step, (ratio, a, b) in enumerate(zip(off, found, expected, strict=True), start=1):
        _require(ratio <= bound, f"loss of step {step} is {a}, the CPU's is {b}")
    return max(off)


def steps() -> tuple[list[str], list[Row]]:
    """A note on a step of each size of STEPS. Wrong if one waits for the GPU."""
    name = torch.cuda.get_device_name().lower()
    gpu = next((of for of in GPUS if of in name), "h100")
    lines = [
        f"Steps in BF16, and what `logitmix plan --gpu {gpu}` estimates of them:",
        "",
        "| sequences x positions, items | ms | estimated | of it the GPU | kernels | estimated | GiB | estimated |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in STEPS:
        settings = {"train.precision": "bf16", "train.device": "cuda", "train.log_every": 1_000_000} | size.settings
        with tempfile.TemporaryDirectory() as folder:
            config = with_settings(load_recipe(size.recipe), settings | {"data.path": folder, "train.epochs": 100})
            write_data(Path(folder), size)
            ms, gpu_ms, launches, gib = step(config)
        batch, negatives = config.train.batch_size, config.model.loss.negatives
        line = f"{size.recipe} --world-size 1 --gpu {gpu} --train.precision bf16 --history {size.length} "
        line += f"--items {size.items} --train.batch-size {batch} --model.loss.negatives {negatives}"
        arguments, planned, _ = of_recipe(Arguments, "plan", line.split(), USAGE)
        plan = plan_job(planned, arguments.devices(), arguments.imagined(), gpu)
        of = plan.step_time
        assert of is not None
        what = f"{size.recipe}, {batch} x {size.length}, {size.items:,}, {negatives} negatives"
        cells = [f"{ms:.1f}", f"{of.total * 1e3:.1f}", f"{gpu_ms:.1f}", f"{launches:.0f}", f"{of.kernels}"]
        lines.append(f"| {what} | {' | '.join(cells)} | {gib:.1f} | {plan.rank_bytes / 2**30:.1f} |")
    return ["\n".join(lines)], []


def step(config: Config) -> tuple[float, float, float, float]:
    """Milliseconds of a training step, those in which the GPU's kernels ran, their number, and GiB at the peak."""
    warm_up, timed, traced, checked = 10, 30, 4, 3
    torch.set_num_threads(1)
    torch.cuda.reset_peak_memory_stats()
    # One more: the last step is logged, and waits.
    with a_pipeline(config, warm_up + timed + traced + checked + 1) as pipeline:
        run = partial(_steps, pipeline)
        run(warm_up)
        start = time.perf_counter()
        run(timed)
        ms = (time.perf_counter() - start) * 1e3 / timed
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(checked):
                pipeline.train_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            run(traced)
    events = [of for of in trace.events() if of.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [of for of in events if not of.name.startswith(("Memcpy", "Memset", "Optimizer"))]
    pageable = [of.name for of in events if "Pageable" in of.name]
    _require(not pageable, f"a step copies by way of memory that is not pinned: {pageable[:1]}")
    gib = torch.cuda.max_memory_allocated() / 2**30
    return ms, sum(of.device_time for of in kernels) / 1e3 / traced, len(kernels) / traced, gib


def _steps(pipeline: Pipeline, count: int) -> None:
    for _ in range(count):
        pipeline.train_step()
    torch.cuda.synchronize()


def kernels() -> tuple[list[str], list[Row]]:
    device, rows = torch.device("cuda"), []
    for dim, dtype in product((64, 128), (torch.float8_e4m3fn, torch.float8_e5m2)):
        rows += codec_rows(dim, dtype, device)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        rows.append(loss_row(MoL(DIM, MoLConfig()), dtype, device, 25_600))
    # Dot products are FP32 under autocast, too.
    rows.append(loss_row(Dot(DIM, DotConfig()), torch.float32, device, 25_600))
    for dtype in (torch.float32, torch.bfloat16):
        rows.append(attention_row(dtype, 128, device))
    for B, allowed in ((1, None), (8, None), (8, 0.5), (32, None)):
        rows.append(stage1_row(B, CORPUS, STAGE_1, allowed, device))
    for dtype in (torch.float32, torch.bfloat16):
        rows.append(scores_row(MoL(DIM, MoLConfig()), dtype, 8, ITEM_CACHE, STAGE_1, device))
    return [], rows


def codec_rows(dim: int, dtype: torch.dtype, device: torch.device, megabytes: int = 1024) -> list[Row]:
    """The FP8 codec both ways beside the row-wise cast in eager torch, and a copy of as many bytes."""
    x = torch.randn(megabytes * 2**18 // dim, dim, device=device)

    def cast() -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(dim=1, keepdim=True) / torch.finfo(dtype).max
        return (x / scale).to(dtype), scale

    sent, (payload, scale) = fp8.quantize_rowwise(x, dtype), cast()
    # A copy reads and writes each byte.
    copied = torch.empty((4 * x.numel() + sent.numel()) // 2, dtype=torch.uint8, device=device)
    floor_s = seconds(partial(torch.empty_like(copied).copy_, copied), device, 10)
    what = f"{str(dtype).removeprefix('torch.')}, {megabytes} MiB of FP32 rows of {dim}"
    decode = partial(fp8.dequantize_rowwise, sent, dtype, [dim])
    return [
        timed_row(f"encode {what}", partial(fp8.quantize_rowwise, x, dtype), cast, floor_s, device, 10),
        timed_row(f"decode {what}", decode, lambda: payload.float() * scale, floor_s, device, 10),
    ]


def timed_row(
    what: str,
    compiled: Callable[[], object],
    eager: Callable[[], object],
    floor_s: float,
    device: torch.device,
    repetitions: int,
) -> Row:
    times = seconds(compiled, device, repetitions), seconds(eager, device, max(1, repetitions // 3)), floor_s
    return Row(what, *(time * 1e3 for time in times))


def loss_row(
    similarity: Similarity, dtype: torch.dtype, device: torch.device, positions: int, repetitions: int = 10
) -> Row:
    """Loss and gradients of the two sides, compiled and block by block in plain torch, which must agree."""
    case = loss_case(similarity.to(device), dtype, positions, device)
    compiled, eager = (partial(case, fused) for fused in (True, False))
    for name, got, should in zip(case.names, compiled(), eager(), strict=True):
        off = float((got.double() - should.double()).abs().max() / should.double().abs().max())
        _require(off <= LOSS_BOUND[dtype], f"{case.what}: {name} is off by {off:.1e} of its largest number")
    floor_s = 3 * case.flops / matmul_rate(dtype, device, 8192 if device.type == "cuda" else 256)
    return timed_row(case.what, compiled, eager, floor_s, device, repetitions)


def attention_row(dtype: torch.dtype, sequences: int, device: torch.device, repetitions: int = 10) -> Row:
    """HSTU's attention and its gradients, 2 heads, with both biases, compiled and in plain torch, which must agree."""
    generator, heads = torch.Generator().manual_seed(0), 2
    lengths_B = torch.randint(20, LENGTH + 1, (sequences,), generator=generator)
    T = int(lengths_B.sum())
    time_T = (2 ** torch.randint(25, (T + 1,), generator=generator)).cumsum(0)
    packing = Packing(lengths_B, 0, time_T[:-1].contiguous(), time_T[1:].contiguous()).to(device)
    shapes = ((T, 3, heads, DIM // heads), (LENGTH,), (TIME_BUCKETS,))
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]

    def run(of: Callable[..., Tensor]) -> list[Tensor]:
        packed_T3Gd = inputs[0].to(dtype)
        out_TGd = of(packed_T3Gd, inputs[1], inputs[2], packing)
        return [out_TGd.detach(), *torch.autograd.grad(out_TGd.square().sum(), inputs)]

    what = f"HSTU's attention and gradients, {str(dtype).removeprefix('torch.')}, {T:,} positions"
    compiled, eager = partial(run, attend), partial(run, attend_plain)
    for name, got, should in zip(("output", "inputs", "positions", "times"), compiled(), eager(), strict=True):
        off = float((got - should).norm() / should.norm())
        _require(off <= LOSS_BOUND[dtype], f"{what}: {name} are off by {off:.1e} of their size")
    pairs = int((lengths_B * (lengths_B + 1) // 2).sum())
    floor_s = 3 * 4.0 * DIM * pairs / matmul_rate(dtype, device, 8192 if device.type == "cuda" else 256)
    return timed_row(what, compiled, eager, floor_s, device, repetitions)


def stage1_row(B: int, X: int, k: int, allowed: float | None, device: torch.device, repetitions: int = 10) -> Row:
    """hindexer_topk, which must find what it finds on the CPU, beside all products in BF16 and torch.topk. `allowed`:
    the share of the items that a filter keeps."""
    item_XD, query_BD = (F.normalize(torch.randn(n, DIM, device=device), dim=1) for n in (X, B))
    mask_X = None if allowed is None else torch.rand(X, device=device) < allowed
    corpus, half_XD = Int8Corpus.of(item_XD), item_XD.bfloat16()
    del item_XD
    on_cpu = Int8Corpus(corpus.blocks.cpu(), corpus.scale, X)

    def eager() -> object:
        score_BX = query_BD.bfloat16() @ half_XD.T
        return (score_BX if mask_X is None else score_BX.masked_fill_(~mask_X, -torch.inf)).topk(k)

    search = partial(hindexer_topk, query_BD, corpus, k, mask_X)
    found, expected = search(), hindexer_topk(query_BD.cpu(), on_cpu, k, None if mask_X is None else mask_X.cpu())
    what = f"top {k:,} of {X:,} x {DIM} in INT8, {B} queries" + ("" if allowed is None else f", {allowed:.0%} allowed")
    for again in range(2):
        same = torch.equal(found.items_BK.cpu(), expected.items_BK)
        _require(same, f"{what}: other items than on the CPU" + " the second time" * again)
        found = search()
    floor_s = read_s(corpus.blocks, repetitions)
    return timed_row(what, search, eager, floor_s, device, repetitions)


@torch.no_grad()
def scores_row(
    mol: MoL, dtype: torch.dtype, B: int, X: int, k: int, device: torch.device, repetitions: int = 10
) -> Row:
    """MoL of B queries with k candidates each, compiled and in plain torch on a copy of the candidates' rows, which
    must agree."""
    mol = mol.to(device).requires_grad_(False).eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        query = mol.query(torch.randn(B, DIM, device=device), torch.arange(B, device=device))
        parts = [mol.item(torch.randn(n, DIM, device=device), torch.arange(n, device=device)) for n in _cut(X, 2**17)]
        item = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        index_P, bounds = torch.randint(X, (B * k,), device=device), range(0, B * k + 1, k)
        compiled = partial(mol.candidates, query, item, index_P, bounds)

        def eager() -> Tensor:
            with torch.enable_grad():  # or all pairs of a query with its candidates are compiled, too
                return Similarity.candidates(mol, query, item, index_P, bounds)

        found, expected = compiled(), eager()
        off = float((found - expected).norm() / expected.norm())
        what = f"MoL, {str(dtype).removeprefix('torch.')}, {B} queries x {k:,} of {X:,} items"
        _require(off <= LOSS_BOUND[dtype], f"{what}: scores are off by {off:.1e} of their size")
        row_bytes = sum(part[0].numel() * part.element_size() for part in item)
        floor_s = read_s(torch.ones(B * k * row_bytes // 8 * 8, dtype=torch.uint8, device=device), repetitions)
        return timed_row(what, compiled, eager, floor_s, device, repetitions)


def read_s(contiguous: Tensor, repetitions: int) -> float:
    """To read a tensor once."""
    return seconds(contiguous.view(-1).view(torch.int64).sum, contiguous.device, repetitions)


def _cut(count: int, most: int) -> list[int]:
    return [min(most, count - start) for start in range(0, count, most)]


@dataclass(frozen=True, eq=False)
class LossCase:
    what: str
    similarity: Similarity
    dtype: torch.dtype
    query_TD: Tensor
    item_VD: Tensor
    examples: Examples
    flops: float
    """FLOPs of the products of the pairs in a forward pass, two for each multiply-add."""
    names = ("loss", "gradient of the queries", "gradient of the items")

    def __call__(self, fused: bool) -> list[Tensor]:
        similarity, examples = self.similarity, self.examples
        query_TD, item_VD = self.query_TD.detach().requires_grad_(), self.item_VD.detach().requires_grad_()
        rows_V = torch.arange(len(item_VD), device=item_VD.device)
        with torch.autocast(item_VD.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            query = similarity.query(query_TD, examples.row_T, Noise(1))
            item = similarity.item(item_VD, rows_V, Noise(1))
            if fused:
                loss = similarity.sampled_softmax(query, item, examples, Noise(1))
            else:
                rate = similarity.pair_dropout
                loss = blockwise_loss(softmax, similarity, query, item, examples, Noise(1), rate)
        loss.backward()
        assert query_TD.grad is not None and item_VD.grad is not None
        return [loss.detach(), query_TD.grad, item_VD.grad]


def loss_case(similarity: Similarity, dtype: torch.dtype, positions: int, device: torch.device) -> LossCase:
    generator = torch.Generator().manual_seed(0)
    bounds = [*range(0, positions, LENGTH), positions]
    target_T = torch.randint(ITEMS, (positions,), generator=generator)
    negatives_GN = torch.randint(ITEMS, (len(bounds) - 1, NEGATIVES), generator=generator)
    examples = Examples(torch.arange(positions, device=device), target_T.to(device), bounds, negatives_GN.to(device))
    query_TD = torch.randn(positions, DIM, generator=generator).to(device)
    item_VD = torch.randn(ITEMS, DIM, generator=generator).to(device)
    kind, precision = type(similarity).__name__, str(dtype).removeprefix("torch.")
    what = f"loss and gradients, {kind}, {precision}, {positions} positions x {NEGATIVES} negatives"
    flops = positions * (NEGATIVES + 1) * pair_flops(similarity)
    return LossCase(what, similarity, dtype, query_TD, item_VD, examples, flops)


def pair_flops(similarity: Similarity) -> float:
    if not isinstance(similarity, MoL):
        return 2.0 * DIM
    config = similarity.config
    M = config.query_components * config.item_components
    return 2.0 * M * config.component_dim + 4.0 * M * config.gate_hidden


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """FLOP/s of one large product."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds(lambda: a @ a, device, 10)


def seconds(work: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median, after two calls to warm up; a GPU is waited for."""
    work()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    return statistics.median(milliseconds({"": work}, repetitions, wait=wait)[""]) / 1000


def markdown(versions: Sequence[str], notes: Sequence[str], rows: Sequence[Row]) -> str:
    lines = ["# On GPUs", "", "Written by `make gpu`, measured on:", ""]
    lines += [f"- {line}" for line in versions]
    lines += ["", *(line if "\n" in line else f"- {line}" for line in notes), ""]
    lines += [
        "Eager is the same in plain torch; for the top of a corpus, all products in BF16 and `torch.topk`. The floor",
        "is a copy of as many bytes for the codec, for a loss or attention its matrix products alone at the rate of",
        "one large product, and for the top of a corpus and MoL of candidates reading the INT8 corpus or the",
        "candidates' rows once.",
        "",
        "| | ms | eager, ms | faster than eager | floor, ms | time / floor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = f"{row.eager_ms / row.ms:.2f}", f"{row.floor_ms:.3f}", f"{row.ms / row.floor_ms:.2f}"
        lines.append(f"| {row.what} | {row.ms:.3f} | {row.eager_ms:.3f} | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
