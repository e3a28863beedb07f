"""The cost in quality and gain in speed of BF16 and the FP8 wire: trained to the end, paired over seeds.

    python -m benchmarks.quality [--arms "bf16,bf16 + fp8 wire"] [--datasets ml-100k,demo] [--seeds 5] [--out DIR]

Every run has two processes with one thread each, so that embeddings and their gradients are sent over the wire. Runs of
a seed start from the same weights and see the same batches; the table gives each arm's means over the seeds and, for
the arms after the first, the mean difference to the first with its 95 % confidence interval (Student's t over the
seeds). A CPU without BF16 arithmetic computes in FP32 in every arm. "Examples/s" is the median over runs of their
medians, and is meaningful only if nothing else ran (--jobs 1). The sets: ml-100k trains a dot product, ml-100k-mol the
mixture of logits at the paper's size. Both train until validation has leveled off, and test that last state, because
choosing among checkpoints adds noise. demo is the unchanged recipe demo-mol. A run whose results.json is in --out is
not repeated: after a change of code or recipe give another --out. `--source` (or LOGITMIX_REAL_DATA) is the folder with
ml-100k.zip; without it, ml-100k is downloaded.
"""

import json
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import logitmix, machine
from logitmix.trainer.run.metrics import read_rows

FP32_WIRE = ["--comm.forward", "fp32", "--comm.backward", "fp32"]
FP8_WIRE = ["--comm.forward", "fp8", "--comm.backward", "fp8"]
ARMS = {
    "fp32": ["--train.precision", "fp32", *FP32_WIRE],
    "bf16": ["--train.precision", "bf16", *FP32_WIRE],
    "bf16 + fp8 wire": ["--train.precision", "bf16", *FP8_WIRE],
    "bf16 + fp8 wire + bf16 dense": ["--train.precision", "bf16", *FP8_WIRE, "--comm.dense", "bf16"],
}
METRICS = ("hr@10", "mrr")
ML_100K = ["--model.encoder.max-length", "100", "--train.batch-size", "32"]
RECIPES = {
    "ml-100k": ["ml-1m-dot", *ML_100K, "--train.epochs", "24", "--evaluate.every-epochs", "24"],
    "ml-100k-mol": ["ml-1m-mol", "--no-start", *ML_100K, "--train.epochs", "16", "--evaluate.every-epochs", "16"],
    "demo": ["demo-mol"],
}
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 0.975 for 1, 2, … degrees of freedom."""

Results = dict[str, float]


@dataclass(frozen=True)
class Options:
    seeds: int = 5
    """Runs of an arm, train.seed 0, 1, …"""
    datasets: str = ",".join(RECIPES)
    arms: str = ",".join(ARMS)
    """The others are compared with the first."""
    out: str = "runs/quality"
    """Where datasets and runs are kept."""
    source: str = field(default_factory=lambda: os.environ.get("LOGITMIX_REAL_DATA", ""))
    """Folder with ml-100k.zip."""
    jobs: int = 1
    """Runs at once, two processes each."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not 2 <= self.seeds <= len(QUANTILES) + 1:
            raise SystemExit(f"--seeds is {self.seeds}; it must be from 2 to {len(QUANTILES) + 1}")
        for flag, known in (("datasets", RECIPES), ("arms", ARMS)):
            if strange := set(getattr(self, flag).split(",")) - set(known):
                raise SystemExit(f"--{flag} has {', '.join(sorted(strange))}; there are {', '.join(known)}")


def main(options: Options) -> None:
    out, datasets = Path(options.out), options.datasets.split(",")
    arms = options.arms.split(",")
    for dataset in datasets:
        prepare(out / "data" / dataset, dataset, options.source)
    tasks = [(dataset, arm, seed) for seed in range(options.seeds) for dataset in datasets for arm in arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda task: train(out, *task, ARMS[task[1]]), tasks)
        results = dict(zip(tasks, track(runs, "training", len(tasks), console=Console(stderr=True)), strict=True))
    seeds = range(options.seeds)
    rows = {
        dataset: {arm: compared([results[dataset, arm, seed] for seed in seeds],
                                [results[dataset, arms[0], seed] for seed in seeds], METRICS) for arm in arms}
        for dataset in datasets
    }  # fmt: skip
    if options.json:
        print(json.dumps({"setting": _setting(options), "results": rows}))
    else:
        _show(rows, options)


def prepare(path: Path, dataset: str, source: str) -> None:
    if (path / "dataset.json").exists():
        return
    raw = dataset.removesuffix("-mol")
    given = ["--source", str(Path(source) / f"{raw}.zip")] if source and raw != "demo" else []
    logitmix("prepare", raw, *given, "--out", str(path))


def train(out: Path, dataset: str, arm: str, seed: int, words_of_arm: Sequence[str]) -> Results:
    """Results of a run, which is trained if there is none yet."""
    run = out / f"{dataset}-{arm}-{seed}"
    if not (run / "results.json").exists():
        words = [
            *RECIPES[dataset],
            "--data.path",
            str(out / "data" / dataset),
            "--train.seed",
            str(seed),
            *words_of_arm,
        ]
        logitmix("train", *words, "--run", str(run), "--train.device", "cpu", processes=2)
    results: Results = json.loads((run / "results.json").read_text())
    speed = statistics.median(row["examples_per_second"] for row in read_rows(run, "train"))
    return results | {"examples_per_second": speed}


def compared(
    runs: Sequence[Results], reference: Sequence[Results], metrics: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Median speed, and for each metric its mean over the seeds, its mean paired difference to the reference, and the
    half width of the difference's interval."""
    found = {"examples_per_second": {"mean": statistics.median(run["examples_per_second"] for run in runs)}}
    for metric in metrics:
        differences = [run[metric] - other[metric] for run, other in zip(runs, reference, strict=True)]
        spread = statistics.stdev(differences) / math.sqrt(len(differences))
        found[metric] = {
            "mean": statistics.mean(run[metric] for run in runs),
            "difference": statistics.mean(differences),
            "half_width": QUANTILES[len(differences) - 2] * spread,
        }
    return found


def _show(rows: dict[str, dict[str, dict[str, dict[str, float]]]], options: Options) -> None:
    heads = [head for metric in METRICS for head in (metric, "difference, 95 %", "relative")]
    table = Table("dataset", "precision", "examples/s", *heads, title=_setting(options))
    for dataset, arms in rows.items():
        first = next(iter(arms))
        base = arms[first]["examples_per_second"]["mean"]
        for arm, of_arm in arms.items():
            speed = of_arm["examples_per_second"]["mean"]
            cells = [f"{speed:.0f} ({speed / base - 1:+.0%})"]
            for metric in METRICS:
                of, reference = of_arm[metric], arms[first][metric]["mean"]
                difference = f"{of['difference']:+.4f} ± {of['half_width']:.4f}"
                relative = f"{of['difference'] / reference:+.1%} ± {of['half_width'] / reference:.1%}"
                cells += [f"{of['mean']:.4f}", *(["", ""] if arm == first else [difference, relative])]
            table.add_row(dataset, arm, *cells)
    Console(width=140).print(table)


def _setting(options: Options) -> str:
    return f"{options.seeds} seeds, 2 processes x 1 thread, {options.jobs} runs at once; {machine()}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
