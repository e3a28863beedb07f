"""Alternatives for your own dataset, each trained for the same time: the basis of `logitmix train auto`.

    python -m benchmarks.own_data [--datasets ml-100k,demo,beauty] [--arms "auto,start,2048 shared + lr 0.003"]

An arm is the recipe `auto`, the arm `start`, or changes to one of them, joined by + (to `start` if neither is named).
Every run has one process with one thread, FP32, and `--minutes` of training, evaluation not counted, and uses the
checkpoint that is best on validation. The table gives validation HR@10, by which to choose, and test metrics, each as
the mean over the seeds (with several, HR@10 with its range), and popularity and item-kNN for the same users. A run
whose results.json is in --out is not repeated.
`--source` (or LOGITMIX_REAL_DATA) is the folder with ml-100k.zip and amazon-beauty/beauty.txt.gz, lines of `user item`.
"""

import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.measure import logitmix, machine
from logitmix.trainer.run.metrics import evaluations_since_best

METRICS = ("hr@10", "hr@50", "ndcg@10", "mrr")
START = ["ml-1m-dot", "--train.batch-size", "32", "--train.epochs", "1000", "--model.loss.negatives", "128"]
MOL = ["--model.similarity.kind", "mol", "--model.similarity.query-components", "4",
       "--model.similarity.item-components", "4", "--model.similarity.projection-hidden", "128",
       "--model.similarity.gate-hidden", "64", "--model.hindexer.weight", "0.3"]  # fmt: skip
SHARED = ["--model.loss.share", "batch", "--model.loss.negatives"]
GROUP = ["--model.loss.negatives", "512", "--model.loss.share", "group", "--model.loss.group-positions"]
CHANGES: dict[str, list[str]] = {
    "auto": [],
    "start": [],
    "mol 4x4": MOL,
    "D 128": ["--model.dim", "128"],
    "batch 128": ["--train.batch-size", "128"],
    "512": ["--model.loss.negatives", "512"],
    "32 positions": [*GROUP, "32"],
    "128 positions": [*GROUP, "128"],
    "512 positions": [*GROUP, "512"],
    "512 shared": [*SHARED, "512"],
    "2048 shared": [*SHARED, "2048"],
    "128 in-batch": ["--model.loss.in-batch", "128"],
    "dropout 0.5": ["--model.encoder.dropout", "0.5"],
    "lr 0.003": ["--dense.lr", "0.003", "--tables.lr", "0.003"],
    "pooled": ["--model.encoder.kind", "pooled"],
    "1 block": ["--model.encoder.blocks", "1"],
    "item features": ["--model.features", "genres", "year"],
    "linear": ["--train.schedule", "linear"],
    "cosine": ["--train.schedule", "cosine"],
    "wsd": ["--train.schedule", "wsd"],
}
"""Arguments by an arm's name; "N shared" stands for N negatives shared by the batch, "N positions" for 512 shared by
groups of so many positions."""
DATASETS = {
    "ml-100k": ("ml-100k", "ml-100k.zip", ["--model.encoder.max-length", "100", "--evaluate.every-epochs", "4"]),
    "demo": ("demo", "", ["--model.encoder.max-length", "50", "--evaluate.every-epochs", "2"]),
    "beauty": ("sequences", "amazon-beauty/beauty.txt.gz", ["--model.encoder.max-length", "50"]),
}
"""For each dataset its name for prepare, the file under --source, and the arguments of the arm `start`."""


@dataclass(frozen=True)
class Options:
    datasets: str = ",".join(DATASETS)
    arms: str = "auto,start"
    seeds: int = 1
    minutes: float = 1.0
    """Training time of a run."""
    users: int = 5000
    """Most users ranked."""
    out: str = "runs/own_data"
    """Where datasets and runs are kept."""
    source: str = field(default_factory=lambda: os.environ.get("LOGITMIX_REAL_DATA", ""))
    """Folder with the raw data."""
    json: bool = False
    """Print JSON."""


def main(options: Options) -> None:
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    arms = options.arms.split(",")
    for dataset in options.datasets.split(","):
        prepare(Path(options.out) / "data" / dataset, dataset, options.source)
        runs = {arm: [train(options, dataset, arm, seed) for seed in range(options.seeds)] for arm in arms}
        found[dataset] = runs | {name: [_baseline(runs, name)] for name in ("popularity", "item_knn")}
    setting = f"{options.minutes:g} minutes a run, 1 thread, {options.seeds} seeds; {machine()}"
    if options.json:
        print(json.dumps({"setting": setting, "results": found}))
    else:
        show(found, setting)


def prepare(path: Path, dataset: str, source: str) -> None:
    if not (path / "dataset.json").exists():
        name, file, _ = DATASETS[dataset]
        logitmix("prepare", name, *(["--source", str(Path(source) / file)] if file else []), "--out", str(path))


def train(options: Options, dataset: str, arm: str, seed: int) -> dict[str, float]:
    """Test metrics of a run, which is trained if there is none yet, and its best validation metric."""
    run = Path(options.out) / f"{dataset}-{arm}-{options.minutes:g}-{seed}".replace(" ", "")
    if not (run / "results.json").exists():
        parts = arm.split(" + ")
        words = ["auto"] if "auto" in parts else [*START, *DATASETS[dataset][2]]
        words += [word for part in parts for word in CHANGES[part]]
        words += ["--data.path", str(Path(options.out) / "data" / dataset), "--run", str(run)]
        words += ["--train.minutes", str(options.minutes), "--train.seed", str(seed), "--train.precision", "fp32"]
        logitmix("train", *words, "--evaluate.users", str(options.users), "--train.device", "cpu")
    results: dict[str, float] = json.loads((run / "results.json").read_text())
    since, best = evaluations_since_best(run, "hr@10")
    return results | {"validation": best["hr@10"], "since": since, "best": best["step"]}


def _baseline(runs: dict[str, list[dict[str, float]]], name: str) -> dict[str, float]:
    """Baselines of the first run: if not all users are ranked, for its seed's sample of them."""
    results = next(iter(runs.values()))[0]
    return {metric: results[f"{name}/{metric}"] for metric in METRICS}


def show(found: dict[str, dict[str, list[dict[str, float]]]], setting: str) -> None:
    table = Table("dataset", "arm", "validation hr@10", *METRICS, "best step", title=setting)
    for dataset, arms in found.items():
        for arm, runs in arms.items():
            table.add_row(dataset, arm, *(_mean(runs, name) for name in ("validation", *METRICS, "best")))
    Console(width=140).print(table)


def _mean(runs: list[dict[str, float]], name: str) -> str:
    values = [run[name] for run in runs if name in run]
    if not values or name == "best":
        return f"{statistics.mean(values):,.0f}" if values else ""
    shown = f"{statistics.mean(values):.4f}"
    return f"{shown} ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 and name == "hr@10" else shown


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
