"""A warm start compared with training anew, on a dataset that has grown.

    python -m benchmarks.warm_start [--epochs 12] [--warm-epochs 4] [--recipe ml-1m-dot]

The first 90 % of MovieLens-1M's actions by time are one dataset, all of them another. A run on the first gives its
weights to a run on the second, which is compared with a run on the second from random weights. Each is tested on its
own dataset's targets (leave-one-out); the first run was trained on none of the second's. `--source` (or
LOGITMIX_REAL_DATA) is the folder with ml-1m.zip; without it, it is downloaded.
"""

import csv
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.measure import logitmix, machine
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.run.metrics import read_rows

SHARE = 0.9
METRICS = ("hr@10", "hr@50", "mrr")


@dataclass(frozen=True)
class Options:
    recipe: str = "ml-1m-dot"
    epochs: int = 12
    """Epochs of the runs that start from random weights."""
    warm_epochs: int = 4
    batch_size: int = 32
    source: str = field(default_factory=lambda: os.environ.get("LOGITMIX_REAL_DATA", ""))
    """Folder with ml-1m.zip."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counts = _datasets(folder, options)
        before, anew, warm = (str(folder / name) for name in ("run-before", "run-anew", "run-warm"))
        results = {"first 90 %": _train(folder / "before", before, options.epochs, options)}
        results["all, anew"] = _train(folder / "after", anew, options.epochs, options)
        words = ["--warm-start", before]
        results["all, warm start"] = _train(folder / "after", warm, options.warm_epochs, options, words)
    setting = f"{options.recipe}, batches of {options.batch_size}, {counts}; {machine()}"
    table = Table("run", "epochs", "seconds", *METRICS, "validation HR@10 by epoch", title=setting)
    for method, result in results.items():
        curve = " ".join(f"{value:.3f}" for value in result["curve"])
        shown = [f"{result[metric]:.4f}" for metric in METRICS]
        table.add_row(method, str(len(result["curve"])), f"{result['seconds']:.0f}", *shown, curve)
    Console(width=160).print(table)


def _datasets(folder: Path, options: Options) -> str:
    """Prepares both datasets; returns a description of their sizes."""
    given = ["--source", str(Path(options.source) / "ml-1m.zip")] if options.source else []
    logitmix("prepare", "ml-1m", *given, "--out", str(folder / "ml-1m"))
    whole = load_dataset(folder / "ml-1m")
    users = np.repeat(np.arange(whole.num_users), np.diff(whole.offsets))
    end = np.quantile(whole.timestamps_flat, SHARE)
    with open(folder / "actions.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item", "timestamp"])
        rows.writerows(zip(users, whole.items_flat, whole.timestamps_flat, strict=True))
    said = []
    for name, words in (("before", ["--where", f"timestamp < {int(end)}"]), ("after", [])):
        source = ["--source", str(folder / "actions.csv"), "--out", str(folder / name)]
        described = json.loads(logitmix("prepare", "table", *source, *words, "--json"))
        said.append(f"{described['users']:,} users, {described['items']:,} items, {described['actions']:,} actions")
    return " and then ".join(said)


def _train(data: Path, run: str, epochs: int, options: Options, words: list[str] | None = None) -> dict[str, object]:
    given = ["--data.path", str(data), "--run", run, "--train.epochs", str(epochs), *(words or [])]
    given += ["--train.batch-size", str(options.batch_size), "--train.precision", "fp32", "--train.device", "cpu"]
    results = json.loads(logitmix("train", options.recipe, *given, "--json"))
    return results | {"curve": [row["hr@10"] for row in read_rows(Path(run), "validation")]}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
