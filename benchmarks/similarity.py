"""Dot product and mixture of logits at equal training time, on the demo and on its low-rank control.

    python -m benchmarks.similarity [--minutes 1] [--seeds 3] [--json]

In the demo, users and items match in hundreds of narrow regions (high rank); the control's log-odds are one inner
product (rank 16), which a dot product can represent. Each model trains for the same time on one process with one
thread, its best checkpoint is chosen on validation, and the table gives the median and the range of the test metrics
over the seeds. `dot` is shown at the widths 48, 128 and 256; the best of them on validation is the one to compare `mol`
with. `mol` is shown alone and co-trained with an h-indexer, as the paper has it. All else is the recipe demo-mol's.
"""

import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import logitmix, machine, spread
from logitmix.trainer.run.metrics import read_rows

DATASETS = ("demo", "demo-low-rank")
METRICS = ("hr@10", "hr@50", "mrr")
COMMON = ["--evaluate.every-epochs", "5", "--train.epochs", "100000", "--train.precision", "fp32"]
MOL = ["--model.similarity.kind", "mol", "--model.dim", "64", "--model.hindexer.weight"]
MODELS = {
    **{
        f"dot {dim}": ["--model.similarity.kind", "dot", "--model.dim", str(dim), "--model.hindexer.weight", "0"]
        for dim in (48, 128, 256)
    },
    "mol 4x4x32": [*MOL, "0"],
    "mol 4x4x32 + h-indexer": [*MOL, "1"],
}


@dataclass(frozen=True)
class Options:
    minutes: float = 1.0
    """Training time of each run, evaluation not counted."""
    seeds: int = 3
    only: str = ""
    """Models whose names begin with this."""
    jobs: int = 2
    """Runs at once, one thread each."""
    json: bool = False
    """Print JSON."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dataset in DATASETS:
            logitmix("prepare", dataset, "--out", str(folder / dataset))
        models = [model for model in MODELS if model.startswith(options.only)]
        tasks = [(dataset, model, seed) for seed in range(options.seeds) for dataset in DATASETS for model in models]
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = pool.map(lambda task: _train(folder, options.minutes, *task), tasks)
            results = list(track(runs, "training", len(tasks), console=Console(stderr=True)))
    table: dict[str, dict[str, list[dict[str, float]]]] = {
        dataset: {model: [] for model in models} for dataset in DATASETS
    }
    for (dataset, model, _), result in zip(tasks, results, strict=True):
        table[dataset][model].append(result)
    if options.json:
        print(json.dumps({"setting": _setting(options), "results": table}))
    else:
        _show(table, options)


def _train(folder: Path, minutes: float, dataset: str, model: str, seed: int) -> dict[str, float]:
    run = folder / f"{dataset}-{model}-{seed}".replace(" ", "-")
    words = ["--data.path", str(folder / dataset), "--train.seed", str(seed), "--train.minutes", str(minutes)]
    out = logitmix("train", "demo-mol", *words, *COMMON, *MODELS[model], "--run", str(run), "--json")
    results: dict[str, float] = json.loads(out)
    results["validation"] = max(row["hr@10"] for row in read_rows(run, "validation"))
    results["last_step"] = read_rows(run, "train")[-1]["step"]
    return results


def _show(table: dict[str, dict[str, list[dict[str, float]]]], options: Options) -> None:
    shown = Table(
        "dataset", "model", *METRICS, "hr@10, validation", "steps", "HR@10 / best dot's", title=_setting(options)
    )
    for dataset, models in table.items():
        chosen_by = {model: statistics.median(run["validation"] for run in runs) for model, runs in models.items()}
        dots = [model for model in models if model.startswith("dot")]
        best = max(dots or models, key=chosen_by.__getitem__)
        reference = statistics.median(run["hr@10"] for run in models[best])
        for model, runs in models.items():
            cells = [spread([run[metric] for run in runs], 4) for metric in (*METRICS, "validation")]
            ratio = statistics.median(run["hr@10"] for run in runs) / reference
            steps = f"{statistics.median(run['last_step'] for run in runs):.0f}"
            shown.add_row(dataset, model + (" *" if model == best else ""), *cells, steps, f"{ratio:.2f}")
    console = Console(width=140)
    console.print(shown)
    console.print("* the width that is best on validation")


def _setting(options: Options) -> str:
    return (
        f"{options.minutes:g} min of training a run, {options.seeds} seeds, 1 process x 1 thread, {options.jobs} runs "
        f"at once; {machine()}"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
