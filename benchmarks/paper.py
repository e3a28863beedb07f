"""The paper's tables, trained by one command: this project's figures beside the published ones.

    python -m benchmarks.paper --table movielens [--datasets ml-1m] [--methods dot,mol] [--seeds 3]
    python -m benchmarks.paper --table amazon | ablation | components
    python -m benchmarks.paper --table movielens --show        # trains nothing

A cell is a dataset, a method and a seed. It trains the method's settings on top of the dataset's recipe, with the best
checkpoint chosen on validation; then its refit (train.refit), whose test figures the table shows. No test figure is
looked at to choose anything. The cells of all other similarities start from the run of the dot product, which is
trained first; their minutes count it. On ml-1m, hstu+mol is the recipe ml-1m-hstu-mol, which trains what it starts
from. A cell whose result is in --results is not trained again, an interrupted one resumes, and cells that were not
trained stay empty. Datasets are read from --data/NAME, as `logitmix prepare` writes them.

A result is a small JSON file: settings, commit, seed, machine, hours, and the metrics on validation and test. The table
gives the mean over the seeds, their standard deviation where there are several, the standard error over users, and how
many users and items the figures are of. Its minutes are those of the run and of the one that it starts from, without
the refits, which take about as long again.
"""

import json
import math
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.measure import logitmix, machine, words_of
from logitmix.common.files import write_whole
from logitmix.trainer.config import flatten, load_recipe
from logitmix.trainer.run.folder import read_config, refit_path, start_path
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.results import read_results
from logitmix.trainer.run.stages import chosen_run, source_of

Settings = Mapping[str, Any]
MOVIELENS = ("hr@1", "hr@10", "hr@50", "hr@500", "mrr")
AMAZON = ("hr@10", "hr@50", "hr@200", "hr@500", "mrr")
COMPONENTS = ("hr@10", "hr@50", "hr@100", "hr@200")
SPARSE_MOL = {"projection_hidden": 0, "projection_dropout": 0.5, "gate_dropout": 0.5, "gate_input_dropout": 0.5,
              "temperature": 0.1}  # fmt: skip
"""With the norm and more dropout than the paper: they lose less of the dot product's HR@200
(benchmarks/notes/sparse-data.md)."""
DENSE_MOL = {"gate_dropout": 0.2}
DENSE = {"mol": DENSE_MOL, "mlp": (512, 0.1), "hidden": 256, "k": 8, "fm": (256, 0.2), "neumf": 0.1}
SPARSE = {"mol": SPARSE_MOL, "mlp": (128, 0.2), "hidden": 128, "k": 4, "fm": (128, 0.3), "neumf": 0.2}
FROM_DOT = {"train.epochs": 16, "train.patience": 0, "train.schedule": "cosine", "model.loss.negatives": 128,
            "evaluate.every_epochs": 2}  # fmt: skip
"""Settings of a run that starts from that of the dot product."""
SPARSE_FROM_DOT = FROM_DOT | {"train.epochs": 2, "model.loss.negatives": 512, "evaluate.every_epochs": 1,
                              "tables.lr": 1e-5, "dense.lr": 3e-4}  # fmt: skip
"""Those of MoL, which begins as the dot product. The tables hardly change: rare items, which it would fit too well,
keep their rows."""


@dataclass(frozen=True)
class Data:
    """A dataset of the paper: the recipe of its runs (`hstu`: of those with that encoder or FuXi-alpha, where they have
    their own), the metric that chooses, appendix A's sizes of methods, what differs from the recipe in all runs, and in
    those of MoL, which start from the dot product's. `hstu_mol` is a recipe of MoL with HSTU that is trained as it
    is."""

    recipe: str
    metric: str
    sizes: Mapping[str, Any]
    settings: Settings
    hstu: str = ""
    hstu_mol: str = ""
    from_dot: Settings = field(default_factory=lambda: FROM_DOT)


BOOKS = {"model.encoder.blocks": 4, "model.encoder.heads": 4}
FEATURES = {"model.encoder.kind": "pooled", "model.features": ("all",), "model.hindexer.weight": 0.0,
            "tables.lr": 0.003, "dense.lr": 0.003, "train.epochs": 20, "train.schedule": "cosine",
            "evaluate.every_epochs": 4}  # fmt: skip
"""The paper's industrial model: non-sequential, with many features."""
ML_20M = {"model.dim": 256, "model.encoder.blocks": 4, "model.encoder.heads": 8}
DATASETS = {
    "ml-1m": Data("ml-1m-dot", "hr@10", DENSE, {}, hstu="ml-1m-hstu", hstu_mol="ml-1m-hstu-mol"),
    "ml-100k": Data("ml-1m-dot", "hr@10", DENSE, {}),
    "ml-20m": Data("ml-1m-dot", "hr@10", DENSE, ML_20M),
    "beauty": Data("amazon-dot", "hr@200", SPARSE, {}, from_dot=SPARSE_FROM_DOT),
    "games": Data("amazon-dot", "hr@200", SPARSE, {}, from_dot=SPARSE_FROM_DOT),
    "books": Data("amazon-dot", "hr@200", DENSE | {"mol": DENSE_MOL | {"temperature": 0.1}, "mlp": (256, 0.2)}, BOOKS,
                  from_dot=SPARSE_FROM_DOT | {"model.loss.negatives": 128}),
    "demo-features": Data("demo-mol", "hr@10", DENSE, FEATURES),
}  # fmt: skip


def settings_of(method: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings on top of a dataset's recipe."""
    encoder, _, name = method.rpartition("+")
    of: dict[str, Any] = {"model.encoder.kind": encoder} if encoder else {}
    name, _, size = name.partition(" ")
    k = sizes["k"]
    mol = {"query_components": k, "item_components": k, **sizes["mol"]}
    kinds: dict[str, dict[str, Any]] = {
        "bce": {"kind": "dot", "normalize": False, "temperature": 1.0},
        "dot": {"kind": "dot"},
        "mlp": {"kind": "mlp", "hidden": sizes["mlp"][0], "dropout": sizes["mlp"][1]},
        "neumf": {"kind": "neumf", "hidden": sizes["hidden"], "final_hidden": sizes["hidden"],
                  "dropout": sizes["neumf"]},
        "deepfm": {"kind": "deepfm", "query_components": k, "item_components": k, "hidden": sizes["fm"][0],
                   "dropout": sizes["fm"][1]},
        "mol": {"kind": "mol", **mol},
        "mol-no-l2-norm": {"kind": "mol", **mol, "normalize": False},
        "mol-no-gating-dropout": {"kind": "mol", **mol, "gate_dropout": 0.0, "gate_input_dropout": 0.0},
        "mol-half": {"kind": "mol", **mol, "query_components": k // 2, "item_components": k // 2},
        "mol-quarter-negatives": {"kind": "mol", **mol},
    }  # fmt: skip
    of |= {f"model.similarity.{setting}": value for setting, value in kinds[name].items()}
    if name == "bce":
        of |= {"model.loss.kind": "bce", "model.loss.share": "position", "model.loss.negatives": 1}
        of["model.loss.in_batch"] = 0
    if size and name == "dot":
        of["model.dim"] = int(size)
    if size and name == "mol":
        of |= dict(zip(("model.similarity.query_components", "model.similarity.item_components"),
                       map(int, size.split("x")), strict=True))  # fmt: skip
    return of


PAPER: dict[str, dict[str, dict[str, list[float]]]] = tomllib.loads(
    Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
)
"""The published figures by table, dataset and method; the metrics are those of `columns`. Methods that the paper does
not have are empty. MoL of the ablation, with the norm everywhere, is the cell of the other tables."""


@dataclass(frozen=True)
class Options:
    table: Literal["movielens", "amazon", "ablation", "components"] = "movielens"
    datasets: str = ""
    """Those of the table that are in --data when left empty."""
    methods: str = ""
    """All of the table when left empty; hstu+dot, hstu+mol, fuxi+dot and fuxi+mol take other encoders."""
    seeds: int = 1
    """train.seed 0, 1, …"""
    threads: int = 1
    data: str = "data"
    out: str = "runs/paper"
    """Where runs are kept."""
    results: str = "benchmarks/results"
    """Where the small JSON files are kept."""
    show: bool = False
    """Train nothing: show what there is."""

    def chosen(self) -> list[tuple[str, list[str]]]:
        """The datasets with their methods."""
        table = PAPER[self.table]
        wanted = self.datasets.split(",") if self.datasets else [name for name in table if self._has(name)]
        if not wanted:
            names = [self.path(name).name for name in table]
            raise SystemExit(
                f"--data {self.data} has none of {', '.join(names)}; make one with: logitmix prepare {names[0]} --out "
                f"{self.path(next(iter(table)))}"
            )
        named = self.methods.split(",") if self.methods else []
        if unknown := {*wanted} - {*table} | {*named} - {name for methods in table.values() for name in methods}:
            raise SystemExit(f"--table {self.table} has no {', '.join(sorted(unknown))}")
        return [(dataset, [name for name in named or table[dataset] if name in table[dataset]]) for dataset in wanted]

    def _has(self, dataset: str) -> bool:
        return self.show or (self.path(dataset) / "dataset.json").is_file()

    def path(self, dataset: str) -> Path:
        """Where it is, or else where `logitmix prepare` would write it: as amazon-beauty, what is beauty here."""
        path = Path(self.data) / dataset
        of_amazon = dataset in PAPER["amazon"] and not (path / "dataset.json").is_file()
        return path.with_name(f"amazon-{dataset}") if of_amazon else path


@dataclass(frozen=True)
class Cell:
    dataset: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.method.replace(' ', '-')}-{self.seed}"

    @property
    def recipe(self) -> str:
        data = DATASETS[self.dataset]
        if self.is_recipe:
            return data.hstu_mol
        return data.hstu if data.hstu and self.method.startswith(("hstu+", "fuxi+")) else data.recipe

    @property
    def is_recipe(self) -> bool:
        """Whether the cell is a recipe as it is, with what it starts from."""
        return self.method == "hstu+mol" and bool(DATASETS[self.dataset].hstu_mol)

    @property
    def start(self) -> "Cell | None":
        """The cell whose run gives the first weights: that of the dot product with the same encoder, because the other
        similarities learn slowly from random ones. The two baselines themselves have none, nor has a recipe as it is,
        which trains what it starts from."""
        encoder, plus, name = self.method.rpartition("+")
        if self.dataset == "demo-features" or name in ("bce", "dot") or self.is_recipe:
            return None
        return replace(self, method=f"{encoder}{plus}dot")

    def run(self, options: Options) -> Path:
        return Path(options.out) / self.name

    def settings(self, options: Options) -> dict[str, Any]:
        data = DATASETS[self.dataset]
        settings = {"data.path": str(options.path(self.dataset)), "evaluate.metric": data.metric}
        settings |= {"evaluate.baselines": False, **data.settings}
        settings |= {} if self.is_recipe else settings_of(self.method, data.sizes)
        if start := self.start:
            settings |= FROM_DOT | {"model.loss.negatives": data.from_dot["model.loss.negatives"]}
            settings |= data.from_dot if "mol" in self.method else {}
            if self.recipe == data.hstu:
                # As that recipe trains MoL.
                before, then = (flatten(replace(load_recipe(name), start={})) for name in (data.hstu, data.hstu_mol))
                own = {name: value for name, value in then.items() if value != before.get(name)}
                settings |= {name: value for name, value in own.items() if not name.startswith("model.similarity.")}
            settings["warm_start"] = str(start.run(options))
        if self.method.endswith("mol-quarter-negatives"):
            settings["model.loss.negatives"] = data.from_dot["model.loss.negatives"] // 4
            settings["model.loss.in_batch"] = load_recipe(self.recipe).model.loss.in_batch // 4
        return settings | {"train.seed": self.seed, "train.threads": options.threads, "train.refit": True}


def result(cell: Cell, options: Options) -> dict[str, Any] | None:
    """The cell's result; trained first if there is none and it may be."""
    path = Path(options.results) / f"{cell.name}.json"
    if not path.exists():
        if options.show:
            return None
        trained = train(cell, options)
        write_whole(path, json.dumps(trained, indent=1) + "\n")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def train(cell: Cell, options: Options) -> dict[str, Any]:
    if (start := cell.start) and not (refit_path(start.run(options)) / "results.json").exists():
        first = train(start, options)
        if not (path := Path(options.results) / f"{start.name}.json").exists():
            write_whole(path, json.dumps(first, indent=1) + "\n")
    run, words = cell.run(options), words_of(cell.settings(options))
    Console(stderr=True).print(f"{cell.name}: {cell.recipe} {' '.join(words)}", soft_wrap=True, highlight=False)
    try:
        logitmix("train", cell.recipe, *words, "--run", str(run))
    except KeyboardInterrupt:
        raise SystemExit(f"{cell.name} is stopped; the same command goes on with it") from None
    return collected(run, cell.recipe)


def collected(run: Path, recipe: str) -> dict[str, Any]:
    """The result of a run that is finished, with its settings that differ from the recipe."""
    config = read_config(run)
    before, now = flatten(load_recipe(recipe)), flatten(config)
    settings = {name: value for name, value in now.items() if before.get(name) != value and name != "data.path"}
    first, refit = (read_results(path) for path in (run, refit_path(run)))
    hours = {"run": first["seconds"] / 3600, "refit": refit["seconds"] / 3600}
    if start := source_of(run, config):
        hours["start"] = read_results(start)["seconds"] / 3600
    if config.first and chosen_run(run) == run:  # the refit's own
        hours["refit"] += read_results(start_path(refit_path(run)))["seconds"] / 3600
    best = next(row for row in read_rows(run, "validation") if row["step"] == first["step"])
    return {
        "recipe": recipe,
        "settings": settings,
        "seed": now["train.seed"],
        "metric": now["evaluate.metric"],
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "epochs": best["epoch"],
        "hours": hours,
        "validation": _metrics(best),
        "test": _metrics(first),
        "refit": _metrics(refit),
        "users": refit["users"],
        "corpus": refit["corpus"],
    }


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name in (*MOVIELENS, *AMAZON, *COMPONENTS, "ndcg@10")}


def columns(table: str, dataset: str) -> tuple[str, ...]:
    match table:
        case "movielens":
            return MOVIELENS
        case "amazon":
            return AMAZON
        case "components":
            return COMPONENTS
        case _:
            return (DATASETS[dataset].metric,)


def summary(found: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """Cells of the table: means over seeds, with their deviation; and of the metric that chooses the error over users,
    for a hit rate is a mean over users of 0 and 1."""
    chosen = found[0]["metric"]
    cells: dict[str, Any] = {}
    for metric in metrics:
        values = [each["refit"][metric] for each in found]
        deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        cells[metric] = f"{statistics.mean(values):.4f}{deviation}"
    rate = statistics.mean(each["refit"][chosen] for each in found)
    minutes = statistics.mean(60 * (each["hours"]["run"] + each["hours"].get("start", 0.0)) for each in found)
    return cells | {
        "error": math.sqrt(rate * (1 - rate) / found[0]["users"]),
        "validation": f"{statistics.mean(each['validation'][chosen] for each in found):.4f}",
        "seeds": f"{len(found)}",
        "minutes": f"{minutes:.0f}",
    }


def main(options: Options) -> None:
    if not options.show:
        Path(options.results).mkdir(parents=True, exist_ok=True)
    for dataset, methods in options.chosen():
        show(dataset, methods, options)


def show(dataset: str, methods: Sequence[str], options: Options) -> None:
    """Prints the table of a dataset, whose cells are trained first where that is asked for."""
    metrics, published = columns(options.table, dataset), PAPER[options.table][dataset]
    of_paper, error = any(published.values()), 0.0
    heads = [head for metric in metrics for head in ((metric, "paper") if of_paper else (metric,))]
    table = Table("method", *heads, "validation", "seeds", "minutes", title=f"{dataset}, refit")
    measured: dict[str, list[str]] = {}
    for method in methods:
        results = [result(Cell(dataset, method, seed), options) for seed in range(options.seeds)]
        found = [of for of in results if of is not None]
        ours = summary(found, metrics) if found else {}
        cells = []
        figures = [f"{figure:.4f}" for figure in published[method]] or [""] * len(metrics)
        for metric, figure in zip(metrics, figures, strict=True):
            cells += [ours.get(metric, ""), *([figure] if of_paper else [])]
        table.add_row(method, *cells, *(ours.get(name, "") for name in ("validation", "seeds", "minutes")))
        error = max(error, ours.get("error", 0.0))
        for of in found:
            line = f"{of['users']:,} users ranked over {of['corpus']:,} items; {of['machine']}"
            if method not in (names := measured.setdefault(line, [])):
                names.append(method)
    console = Console(width=200)
    console.print(table)
    lines = [f"{', '.join(names)}: {line}" for line, names in measured.items()]
    if error:
        lines.insert(0, f"standard error of {DATASETS[dataset].metric} over users: at most {error:.4f}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
