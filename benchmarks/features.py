"""The effect of features: test metrics of dot product and mixture of logits with ids, user and item features.

    python -m benchmarks.features [--dataset ml-100k] [--seeds 3] [--epochs 24] [--out DIR] [--json]

Every run trains for the same number of epochs and uses the checkpoint that is best on validation. The table gives the
mean over the seeds, their range, and the half width of the 95 % interval over users (for HR@10 of a single run; the
title has the number of users). `--source` (or LOGITMIX_REAL_DATA) is the folder with ml-100k.zip and ml-1m.zip. A run
whose results.json is in --out is not repeated.
"""

import json
import math
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import logitmix, machine
from logitmix.modules.schema import RECENCY, Owner
from logitmix.trainer.data.dataset import load_dataset

METRICS = ("hr@10", "hr@50", "mrr")
FEATURES: dict[str, tuple[Owner, ...]] = {
    "ids": (),
    "+ user": ("user",),
    "+ user + item": ("user", "item"),
    "+ user + item + event": ("user", "item", "event"),
    "+ user + item + recency": ("user", "item"),
}
LENGTH = {"ml-100k": "100", "ml-1m": "200"}
MOL = ["--model.similarity.query-components", "4", "--model.similarity.item-components", "4"]
MOL += ["--model.similarity.projection-hidden", "128", "--model.similarity.gate-hidden", "64"]
MODELS = {"dot": ["ml-1m-dot"], "mol 4x4x32": ["ml-1m-mol", "--no-start", *MOL],
          "mol 8x8x32": ["ml-1m-mol", "--no-start"]}  # fmt: skip


@dataclass(frozen=True)
class Options:
    dataset: str = "ml-100k"
    """ml-100k or ml-1m."""
    models: str = "dot,mol 4x4x32"
    features: str = ",".join(FEATURES)
    seeds: int = 3
    epochs: int = 24
    batch: int = 32
    """Sequences of a global batch."""
    threads: int = 1
    jobs: int = 2
    """Runs at once."""
    out: str = "runs/features"
    """Where datasets and runs are kept."""
    source: str = field(default_factory=lambda: os.environ.get("LOGITMIX_REAL_DATA", ""))
    """Folder with the raw data; downloaded when empty."""
    json: bool = False
    """Print JSON."""


def main(options: Options) -> None:
    data = Path(options.out) / "data" / options.dataset
    if not (data / "dataset.json").exists():
        given = ["--source", str(Path(options.source) / f"{options.dataset}.zip")] if options.source else []
        logitmix("prepare", options.dataset, *given, "--out", str(data))
    models, features = options.models.split(","), options.features.split(",")
    tasks = [(model, of, seed) for seed in range(options.seeds) for model in models for of in features]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda task: _train(options, data, *task), tasks)
        found = dict(zip(tasks, track(runs, "training", len(tasks), console=Console(stderr=True)), strict=True))
    results = {
        model: {of: [found[model, of, seed] for seed in range(options.seeds)] for of in features} for model in models
    }
    if options.json:
        print(json.dumps({"setting": _setting(options), "results": results}))
    else:
        _show(results, options)


def _train(options: Options, data: Path, model: str, features: str, seed: int) -> dict[str, float]:
    run = Path(options.out) / f"{options.dataset}-{model}-{features}-{options.epochs}-{seed}".replace(" ", "")
    if not (run / "results.json").exists():
        owners = FEATURES[features]
        names = [f.name for f in load_dataset(data).schema.features if f.owner in owners and f.name != "item"]
        names += [RECENCY] if RECENCY in features else []
        words = [*MODELS[model], "--data.path", str(data), "--train.seed", str(seed), "--run", str(run)]
        words += ["--train.epochs", str(options.epochs), "--train.batch-size", str(options.batch)]
        words += ["--evaluate.every-epochs", str(max(1, options.epochs // 8)), "--train.threads", str(options.threads)]
        words += ["--model.encoder.max-length", LENGTH[options.dataset]]
        words += ["--train.precision", "bf16", "--train.device", "cpu"]
        logitmix("train", *words, *(["--model.features", *names] if names else []))
    results: dict[str, float] = json.loads((run / "results.json").read_text())
    return results


def _show(results: dict[str, dict[str, list[dict[str, float]]]], options: Options) -> None:
    users = int(next(iter(next(iter(results.values())).values()))[0]["users"])
    table = Table("model", "features", *METRICS, "± over users", title=f"{_setting(options)}; {users:,} users")
    for model, arms in results.items():
        for features, runs in arms.items():
            cells = []
            for metric in METRICS:
                values = [run[metric] for run in runs]
                shown = f"{statistics.mean(values):.4f}"
                cells.append(f"{shown} ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else shown)
            share = statistics.mean(run["hr@10"] for run in runs)
            half = 1.96 * math.sqrt(share * (1 - share) / users)
            table.add_row(model, features, *cells, f"{half:.4f}")
    Console(width=140).print(table)


def _setting(options: Options) -> str:
    return f"{options.dataset}, {options.epochs} epochs, batches of {options.batch}, {options.seeds} seeds; {machine()}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
