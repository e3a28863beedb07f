"""The h-indexer's quality, and its cost to the similarity that it is trained with: by the weight of its loss, and with
that loss detached from the tables, the towers and the encoder (`hindexer.detach`).

    python -m benchmarks.stage1 [--arms "0,0.1,0.3,1,detach"] [--datasets ml-100k-mol,demo] [--seeds 3] [--out DIR]

Runs are as in benchmarks.quality, in BF16 with the FP8 wire. The table gives means over the seeds and, for hr@10 and
mrr of the similarity, the mean difference to the first arm with its 95 % confidence interval. A run whose results.json
is in --out is not repeated.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import machine
from benchmarks.quality import compared, prepare, train

ARMS = {weight: ["--model.hindexer.weight", weight] for weight in ("0", "0.1", "0.3", "1")}
ARMS |= {"detach": ["--model.hindexer.weight", "1", "--model.hindexer.detach"]}
METRICS = ("hr@10", "mrr")
STAGE_1 = ("hindexer/hr@10", "hindexer/hr@100", "hindexer/recall_of_top10@100", "hindexer/recall_of_top100@500")


@dataclass(frozen=True)
class Options:
    seeds: int = 3
    datasets: str = "ml-100k-mol,demo"
    arms: str = ",".join(ARMS)
    """The others are compared with the first."""
    out: str = "runs/stage1"
    """Where datasets and runs are kept."""
    source: str = field(default_factory=lambda: os.environ.get("LOGITMIX_REAL_DATA", ""))
    """Folder with ml-100k.zip."""
    jobs: int = 1
    """Runs at once, two processes each."""
    json: bool = False


def main(options: Options) -> None:
    out, datasets, arms = Path(options.out), options.datasets.split(","), options.arms.split(",")
    for dataset in datasets:
        prepare(out / "data" / dataset, dataset, options.source)
    seeds = range(options.seeds)
    tasks = [(dataset, arm, seed) for seed in seeds for dataset in datasets for arm in arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda task: train(out, *task, ARMS[task[1]]), tasks)
        results = dict(zip(tasks, track(runs, "training", len(tasks), console=Console(stderr=True)), strict=True))
    rows = {}
    for dataset in datasets:
        reference = [results[dataset, arms[0], seed] for seed in seeds]
        for arm in arms:
            of_arm = [results[dataset, arm, seed] for seed in seeds]
            means = {name: sum(run.get(name, 0.0) for run in of_arm) / len(of_arm) for name in STAGE_1}
            rows[f"{dataset}, {arm}"] = {"similarity": compared(of_arm, reference, METRICS), "hindexer": means}
    setting = f"{options.seeds} seeds, {options.jobs} runs at once; {machine()}"
    if options.json:
        print(json.dumps({"setting": setting, "results": rows}))
        return
    heads = [head for metric in METRICS for head in (metric, "difference, 95 %")]
    heads += [name.removeprefix("hindexer/") for name in STAGE_1]
    table = Table("dataset, weight", *heads, title=setting)
    for name, row in rows.items():
        cells = []
        for metric in METRICS:
            of = row["similarity"][metric]
            cells += [f"{of['mean']:.4f}", f"{of['difference']:+.4f} ± {of['half_width']:.4f}"]
        table.add_row(name, *cells, *(f"{row['hindexer'][metric]:.4f}" for metric in STAGE_1))
    Console(width=160).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
