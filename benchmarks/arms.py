"""What a setting does to quality: arms trained to the end or for equal time, paired over seeds.

    python -m benchmarks.arms EXPERIMENT [--datasets demo] [--arms "fp32,bf16,bf16 + fp8 wire"] [--seeds 5] [--out DIR]

- precision: BF16 and the FP8 wire, of two processes with one thread each, so that rows and gradients are sent. A CPU
  without BF16 arithmetic computes in FP32 in every arm.
- hindexer: by the weight of stage 1's loss, and with that loss detached from the tables, the towers and the encoder.
- features: dot product and mixture of logits with ids alone and with features of users and items.
- own: alternatives to the recipe `auto`, each trained for --minutes in FP32, by which `auto` was chosen.
- similarity: dot product and mixture of logits for --minutes, on the demo, on a control of low rank, which a dot
  product can represent, and on `interests`: users of four of 256 topics each, which nothing joins, who go on to any
  item of another of their four.

An arm is one or several of an experiment's changes, joined by +. Runs of a seed start from the same weights and see the
same batches. The table gives the means over the seeds with HR@10's range, and the mean difference to the first arm with
its 95 % confidence interval (Student's t over the seeds); "examples/s" is the median over the seeds, and means
something only if nothing else ran (--jobs 1). A run whose results.json is in --out is not repeated: after a change of
code or recipe give another --out. `--source` (or LOGITMIX_REAL_DATA) is the folder with the raw data; without it,
MovieLens is downloaded.
"""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import tyro
from pyarrow import parquet
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import logitmix, machine, words_of
from logitmix.trainer.prepare.sources.demo import DemoParameters, generate
from logitmix.trainer.run.metrics import evaluations_since_best
from logitmix.trainer.run.stages import chosen_run

Settings = Mapping[str, Any]
"""Values by option; the recipe is that of "recipe"."""
Results = dict[str, float]

METRICS = ("hr@10", "hr@50", "mrr")
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 0.975 for 1, 2, … degrees of freedom."""


@dataclass(frozen=True)
class Experiment:
    datasets: Mapping[str, Settings]
    changes: Mapping[str, Settings]
    arms: str
    base: Settings = field(default_factory=dict)
    metrics: tuple[str, ...] = METRICS
    processes: int = 1
    seeds: int = 3

    def settings(self, dataset: str, arm: str) -> Settings:
        merged = {**self.base, **self.datasets[dataset]}
        for change in arm.split(" + "):
            # `auto` chooses for the dataset.
            merged = (self.base if change == "auto" else merged) | self.changes[change]
        return merged


FP32_WIRE = {"comm.forward": "fp32", "comm.backward": "fp32"}
FP8_WIRE = {"comm.forward": "fp8", "comm.backward": "fp8"}
PRECISIONS: dict[str, Settings] = {
    "fp32": {"train.precision": "fp32"},
    "bf16": {"train.precision": "bf16"},
    "fp8 wire": FP8_WIRE,
    "bf16 dense": {"comm.dense": "bf16"},
}
SHORT = {"model.encoder.max-length": "100", "train.batch-size": "32"}
TO_THE_END: dict[str, Settings] = {
    # Until validation has leveled off, and the last state is tested: choosing among checkpoints adds noise.
    "ml-100k": {"recipe": "ml-1m-dot", **SHORT, "train.epochs": "24", "evaluate.every-epochs": "24"},
    "ml-100k-mol": {
        "recipe": "ml-1m-mol", "no-start": True, **SHORT, "train.epochs": "16", "evaluate.every-epochs": "16",
    },
    "demo": {"recipe": "demo-mol"},
}  # fmt: skip
MOL_4X4 = {
    "model.similarity.query-components": "4", "model.similarity.item-components": "4",
    "model.similarity.projection-hidden": "128", "model.similarity.gate-hidden": "64",
}  # fmt: skip
WEIGHT = "model.hindexer.weight"
OF_USERS, OF_ITEMS = ("gender", "age", "occupation", "zip"), ("genres", "year")

EXPERIMENTS = {
    "precision": Experiment(
        TO_THE_END, PRECISIONS, "fp32,bf16,bf16 + fp8 wire,bf16 + fp8 wire + bf16 dense", FP32_WIRE,
        processes=2, seeds=5,
    ),
    "hindexer": Experiment(
        {name: TO_THE_END[name] for name in ("ml-100k-mol", "demo")},
        {**{of: {WEIGHT: of} for of in ("0", "0.1", "0.3", "1")},
         "detach": {WEIGHT: "1", "model.hindexer.detach": True}},
        "0,0.1,0.3,1,detach",
        {**PRECISIONS["bf16"], **FP8_WIRE},
        ("hr@10", "mrr", "hindexer/hr@10", "hindexer/recall_of_top10@100", "hindexer/recall_of_top100@500"),
        processes=2,
    ),
    "features": Experiment(
        {"ml-100k": {**SHORT, "train.epochs": "16", "evaluate.every-epochs": "2"},
         "ml-1m": {"train.batch-size": "32", "train.epochs": "6", "evaluate.every-epochs": "1"}},
        {"dot": {"recipe": "ml-1m-dot"},
         "mol": {"recipe": "ml-1m-mol", "no-start": True, **MOL_4X4},
         "user": {"model.features": OF_USERS},
         "user and item": {"model.features": (*OF_USERS, *OF_ITEMS)},
         "recency": {"model.features": "recency"}},
        "dot,dot + user,dot + user and item,mol,mol + user,mol + user and item",
        PRECISIONS["bf16"],
    ),
    "own": Experiment(
        {"ml-100k": {"model.encoder.max-length": "100", "evaluate.every-epochs": "4"},
         "demo": {"model.encoder.max-length": "50", "evaluate.every-epochs": "2"},
         "beauty": {"model.encoder.max-length": "50"}},
        {"auto": {"recipe": "auto"},
         "start": {"recipe": "ml-1m-dot", "train.batch-size": "32", "train.epochs": "1000",
                   "model.loss.negatives": "128"},
         "mol": {"model.similarity.kind": "mol", **MOL_4X4, WEIGHT: "0.3"},
         "D 128": {"model.dim": "128"},
         "batch 128": {"train.batch-size": "128"},
         "128 positions": {"model.loss.negatives": "512", "model.loss.share": "group",
                           "model.loss.group-positions": "128"},
         "512 shared": {"model.loss.share": "batch", "model.loss.negatives": "512"},
         "2048 shared": {"model.loss.share": "batch", "model.loss.negatives": "2048"},
         "dropout 0.5": {"model.encoder.dropout": "0.5"},
         "lr 0.003": {"dense.lr": "0.003", "tables.lr": "0.003"},
         "1 block": {"model.encoder.blocks": "1"},
         "item features": {"model.features": OF_ITEMS},
         "wsd": {"train.schedule": "wsd"}},
        "auto,start,start + mol,start + 2048 shared + lr 0.003",
        {**PRECISIONS["fp32"], "train.minutes": "1", "evaluate.users": "5000"},
        ("hr@10", "hr@50", "ndcg@10", "mrr"),
        seeds=1,
    ),
    "similarity": Experiment(
        {"demo": {}, "demo-low-rank": {}, "interests": {}},
        {**{f"dot {of}": {"model.similarity.kind": "dot", "model.dim": of, WEIGHT: "0"} for of in ("48", "128", "256")},
         "mol": {"model.similarity.kind": "mol", "model.dim": "64", WEIGHT: "0"},
         "h-indexer": {WEIGHT: "1"}},
        "dot 48,dot 128,dot 256,mol,mol + h-indexer",
        {"recipe": "demo-mol", **PRECISIONS["fp32"], "train.minutes": "1", "train.epochs": "100000",
         "evaluate.every-epochs": "5"},
    ),
}  # fmt: skip
RAW = {"ml-100k": "ml-100k.zip", "ml-1m": "ml-1m.zip", "beauty": "amazon-beauty/beauty.txt.gz"}
"""Files in --source; the last one's lines are `user item`."""
INTERESTS = DemoParameters(
    users=4_000, items=4_096, shortest=24, longest=48, popularity_exponent=0, topics=256, fewest_interests=4,
    most_interests=4, switch=1, focus=0,
)  # fmt: skip
"""Of 16 items of each topic, all are equally likely."""


@dataclass(frozen=True)
class Options:
    experiment: Annotated[Literal["precision", "hindexer", "features", "own", "similarity"], tyro.conf.Positional]
    datasets: str = ""
    """Of the experiment; all if none are named."""
    arms: str = ""
    """The others are compared with the first."""
    seeds: int = 0
    """Runs of an arm, train.seed 0, 1, …; 0: as many as the experiment has."""
    minutes: float = 0
    """Time that a run trains, evaluations on validation included, where it is to be another one."""
    epochs: int = 0
    """Epochs of a run, where it is to have others."""
    out: str = ""
    """Where datasets and runs are kept; runs/EXPERIMENT if none is given."""
    source: str = field(default_factory=lambda: os.environ.get("LOGITMIX_REAL_DATA", ""))
    """Folder with the raw data."""
    jobs: int = 1
    """Runs at once."""


def main(options: Options) -> None:
    experiment, out = EXPERIMENTS[options.experiment], Path(options.out or f"runs/{options.experiment}")
    datasets = options.datasets.split(",") if options.datasets else list(experiment.datasets)
    arms, seeds = (options.arms or experiment.arms).split(","), range(options.seeds or experiment.seeds)
    named = {change for arm in arms for change in arm.split(" + ")}
    for flag, names, known in (("datasets", set(datasets), experiment.datasets), ("arms", named, experiment.changes)):
        if strange := names - set(known):
            raise SystemExit(f"--{flag} has {', '.join(sorted(strange))}; there are {', '.join(known)}")
    if len(seeds) > len(QUANTILES) + 1:
        raise SystemExit(f"--seeds is {len(seeds)}; it must be at most {len(QUANTILES) + 1}")
    for dataset in datasets:
        prepare(out / "data" / dataset, dataset, options.source)
    limits = {"train.minutes": f"{options.minutes:g}"} if options.minutes else {}
    limits |= {"train.epochs": str(options.epochs)} if options.epochs else {}
    tasks = list(product(seeds, datasets, arms))

    def trained(task: tuple[int, str, str]) -> Results:
        seed, dataset, arm = task
        run = out / "-".join([dataset, arm, *limits.values(), str(seed)]).replace(" ", "")
        return train(
            run, out / "data" / dataset, seed, experiment.settings(dataset, arm) | limits, experiment.processes
        )

    with ThreadPoolExecutor(options.jobs) as pool:
        found = track(pool.map(trained, tasks), "training", len(tasks), console=Console(stderr=True))
        results = dict(zip(tasks, found, strict=True))
    rows = {
        dataset: {arm: [results[seed, dataset, arm] for seed in seeds] for arm in arms}
        | baselines(results[seeds[0], dataset, arms[0]])
        for dataset in datasets
    }
    title = f"{len(seeds)} seeds, {experiment.processes} processes x 1 thread, {options.jobs} runs at once; {machine()}"
    show(rows, experiment.metrics, title)


def prepare(path: Path, dataset: str, source: str) -> None:
    if dataset == "interests" and not path.exists():
        made = generate(INTERESTS, seed=0)
        table = pa.table({"user": made.users, "item": made.items, "timestamp": made.timestamps})
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, actions := path.with_suffix(".parquet"))
        logitmix("prepare", "table", "--source", str(actions), "--out", str(path))
    elif not (path / "dataset.json").exists():
        raw = dataset.removesuffix("-mol")
        given = ["--source", str(Path(source) / RAW[raw])] if source and raw in RAW else []
        logitmix("prepare", "sequences" if raw == "beauty" else raw, *given, "--out", str(path))


def train(run: Path, data: Path, seed: int, settings: Settings, processes: int) -> Results:
    """Results of a run, which is trained if there is none yet, with its best validation HR@10."""
    if not (run / "results.json").exists():
        places = {"data.path": str(data), "run": str(run), "train.seed": str(seed), "train.device": "cpu"}
        options = {name: value for name, value in settings.items() if name != "recipe"}
        logitmix("train", settings["recipe"], *words_of(options | places), processes=processes)
    results: Results = json.loads((run / "results.json").read_text())
    _, best = evaluations_since_best(chosen_run(run), "hr@10")
    return results | {"validation": best["hr@10"]}


def baselines(results: Results) -> dict[str, list[Results]]:
    """Those of a run, where it has them: if not all users are ranked, they are for its seed's sample of them."""
    found: dict[str, list[Results]] = {}
    for name in ("popularity", "item_knn"):
        if metrics := {of.removeprefix(f"{name}/"): value for of, value in results.items() if of.startswith(name)}:
            found[name] = [metrics]
    return found


def compared(runs: Sequence[Results], reference: Sequence[Results], metric: str) -> str:
    """The mean paired difference to the reference, and with several runs the half width of its interval."""
    differences = [run[metric] - other[metric] for run, other in zip(runs, reference, strict=True)]
    shown = f"{statistics.mean(differences):+.4f}"
    if len(differences) == 1:
        return shown
    half = QUANTILES[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{shown} ± {half:.4f}"


def show(rows: Mapping[str, Mapping[str, Sequence[Results]]], metrics: Sequence[str], title: str) -> None:
    heads = [head for metric in metrics for head in (metric, "difference")]
    table = Table("dataset", "arm", "examples/s", "step", "validation", *heads, title=title)
    for dataset, arms in rows.items():
        first = next(iter(arms.values()))
        for arm, runs in arms.items():
            learned = "step" in runs[0]
            cells = [
                f"{statistics.median(run[name] for run in runs):.0f}" if learned else ""
                for name in ("examples_per_second", "step")
            ]
            cells.append(f"{statistics.mean(run['validation'] for run in runs):.4f}" if learned else "")
            for metric in metrics:
                values = [run[metric] for run in runs if metric in run]
                ranged = f" ({min(values):.4f} to {max(values):.4f})" if metric == "hr@10" and len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.4f}{ranged}" if values else "")
                is_compared = learned and runs is not first and len(values) == len(first)
                cells.append(compared(runs, first, metric) if is_compared else "")
            table.add_row(dataset, arm, *cells)
    Console(width=200).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
