"""MoL beside the dot product that it begins from, trained on for as long, by the width of the embeddings.

    python -m benchmarks.equal_time --source FOLDER [--datasets half,ml-100k] [--widths 16,64] [--seeds 3]
        [--out runs/equal-time]

For each dataset, width and seed: the recipe `auto`, "start", which scores all items (full softmax); from its weights,
`auto-mol`; and, from the same weights, the dot product for as many epochs as take MoL's CPU time, both with rates that
fall from 0.001. One thread, FP32, no refits; each run is tested after its best epoch on validation. The table has the
means over the seeds, and MoL less the dot product over the same users, with the standard error over the users or the
seeds, whichever is larger. FOLDER has `ml-1m.zip`, `ml-100k.zip` and `half/`, which holds the lines of users 1 to 2,999
of MovieLens-1M's `ratings.dat`. A run that is complete in --out is not repeated, and is refused if its settings would
be others now.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.measure import cpu_seconds, logitmix, machine, print_table, words_of
from logitmix.common.mappings import counted
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.commands.train import Arguments
from logitmix.trainer.run.folder import require_same_settings
from logitmix.trainer.run.results import read_ranks, read_results

METRICS = ("hr@10", "hr@50", "hr@200")


@dataclass(frozen=True)
class Dataset:
    name: str
    start: int
    """Epochs of the first dot product."""
    mol: int
    """Epochs of MoL."""
    settings: Mapping[str, Any] = field(default_factory=dict)


DATASETS = {
    "ml-1m": Dataset("MovieLens-1M", 14, 4),
    "half": Dataset("MovieLens-1M, half, times", 14, 4, {"model.encoder.times": True}),
    "ml-100k": Dataset("MovieLens-100K", 20, 8),
    "demo-features": Dataset("20 features", 30, 15, {"model.encoder.kind": "pooled", "model.features": ("all",)}),
}
SOURCES = {"ml-1m": "ml-1m.zip", "half": "half", "ml-100k": "ml-100k.zip"}
"""In --source; the others are generated."""
ARMS = ("start", "dot", "mol")


@dataclass(frozen=True)
class Options:
    source: str
    datasets: str = ",".join(DATASETS)
    widths: str = "64"
    seeds: int = 1
    out: str = "runs/equal-time"


def main(options: Options) -> None:
    out, heads = Path(options.out), ("", "CPU s", "epochs", *METRICS)
    for name in options.datasets.split(","):
        if not (data := out / "data" / name / "dataset.json").exists():
            given = ["--source", str(Path(options.source, SOURCES[name]))] if name in SOURCES else []
            logitmix("prepare", "ml-1m" if name == "half" else name, *given, "--out", str(data.parent))
        for width in map(int, options.widths.split(",")):
            found = [trained(out, name, width, seed) for seed in range(options.seeds)]
            title = f"{DATASETS[name].name}, D = {width}, {counted(options.seeds, 'seed')}, 1 thread; {machine()}"
            print_table(heads, table_rows(found), title, 150)


def trained(out: Path, name: str, width: int, seed: int) -> dict[str, Path]:
    """The runs of a seed."""
    dataset, runs = DATASETS[name], {of: out / f"{name}-{width}-{of}-{seed}" for of in ARMS}
    base = {"data.path": out / "data" / name, "train.seed": seed, "model.dim": width}
    base |= {"train.threads": 1, "train.precision": "fp32", "train.patience": 0, "evaluate.baselines": False}
    base |= dataset.settings

    def train(of: str, epochs: int, settings: dict[str, Any], recipe: tuple[str, ...] = ("auto",)) -> float:
        """CPU seconds of an epoch."""
        run, every = runs[of], max(1, epochs // 5)
        settings = base | {"train.epochs": epochs, "evaluate.every-epochs": every, "run": run} | settings
        words = [*recipe, *words_of(settings)]
        if spent_file(run).exists():
            require_same_settings(run, of_recipe(Arguments, "train", words, "")[1])
        else:
            # Of a run that goes on, the time before would not count.
            shutil.rmtree(run, ignore_errors=True)
            if of == "start":
                for other in runs.values():
                    spent_file(other).unlink(missing_ok=True)
            seconds = cpu_seconds(lambda: logitmix("train", *words))
            spent_file(run).write_text(json.dumps({"cpu_s": seconds, "epochs": epochs}))
        return spent(run)["cpu_s"] / epochs

    of_start = train("start", dataset.start, {"train.schedule": "wsd"})
    of_mol = train("mol", dataset.mol, {"warm-start": runs["start"]}, ("auto-mol", "--no-start"))
    then = {"warm-start": runs["start"], "train.schedule": "linear", "tables.lr": 0.001, "dense.lr": 0.001}
    train("dot", max(1, round(dataset.mol * of_mol / of_start)), then)
    return runs


def spent_file(run: Path) -> Path:
    return run.with_suffix(".json")


def spent(run: Path) -> dict[str, float]:
    """CPU seconds and epochs of a run that is complete."""
    found: dict[str, float] = json.loads(spent_file(run).read_text())
    return found


def table_rows(found: list[dict[str, Path]]) -> list[tuple[str, ...]]:
    """The means of the runs, and MoL's differences."""
    rows, ranks = [], {}
    for of in ARMS:
        ranks[of] = np.stack([read_ranks(runs[of]) for runs in found])
        all_of = [read_results(runs[of]) | spent(runs[of]) for runs in found]
        means = {name: np.mean([of_run[name] for of_run in all_of]) for name in ("cpu_s", "epochs", *METRICS)}
        rows.append((of, *(f"{mean:.4f}" if name in METRICS else f"{mean:.0f}" for name, mean in means.items())))
    less = [difference(ranks["mol"], ranks["dot"], int(metric.removeprefix("hr@"))) for metric in METRICS]
    rows.append(("mol - dot", "", "", *less))
    return rows


def difference(rank_SU: np.ndarray, other_SU: np.ndarray, k: int) -> str:
    """Of the hit rates of some seeds' runs, with its standard error."""
    less_SU = (rank_SU <= k).astype(float) - (other_SU <= k)
    S, U = less_SU.shape
    of_seeds = less_SU.mean(1).std(ddof=1) / np.sqrt(S) if S > 1 else 0.0
    return f"{less_SU.mean():+.4f} ± {max(of_seeds, less_SU.mean(0).std(ddof=1) / np.sqrt(U)):.4f}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
