"""The paper's tables, trained by one command: this project's figures beside the published ones.

    python -m benchmarks.paper --table movielens [--datasets ml-1m] [--methods dot,mol] [--seeds 3] [--minutes 30]
    python -m benchmarks.paper --table amazon | ablation | rank | components | groups
    python -m benchmarks.paper --figure popularity --plot docs/popularity.png
    python -m benchmarks.paper --table movielens --show        # trains nothing

A cell is a dataset, a method and a seed. It trains the method's settings on top of the dataset's recipe, with the best
checkpoint chosen on validation; then its refit (train.refit), whose test figures the table shows. No test figure is
looked at to choose anything. The cells of all other similarities start from the run of the dot product, which is
trained first; their minutes count it. On ml-1m, hstu+mol is the recipe ml-1m-hstu-mol, which trains what it starts
from. A cell whose result is in --results is not trained again, an interrupted one resumes, and cells that were not
trained stay empty. The tables `rank` and `groups` and the figure need the runs themselves: a cell whose run and refit
--out lacks is trained, even if its result is known. Datasets are read from --data/NAME, as `logitmix prepare` writes
them. --minutes bounds the training time of a cell, with that of the run that it starts from, which has half of them,
and its refit takes as many epochs; without it, the recipes' epochs are trained. Results with minutes are kept
apart from those without (ml-1m-mol-0-30m).

A result is a small JSON file: settings, commit, seed, machine, hours, and the metrics on validation and test. The table
gives the mean over the seeds, their standard deviation where there are several, the standard error over users, and how
many users and items the figures are of. Its minutes are those of the run and of the one that it starts from, without
the refits, which take about as long again.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.measure import drawing, logitmix, machine, words_of
from logitmix.comm.process_group import process_group
from logitmix.common.files import Fields, parse_json, write_whole
from logitmix.common.mappings import require
from logitmix.launch.processes import require_threads
from logitmix.modules.losses.blockwise import Side
from logitmix.modules.similarity.base import Similarity
from logitmix.trainer.config import flatten, load_recipe, with_settings
from logitmix.trainer.data.batches import RankingUsers, leave_one_out, ranking_users
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.metrics import means
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import read_config, refit_path, start_path
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.results import read_ranks, read_results
from logitmix.trainer.run.stages import chosen_run, final_run, source_of

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


def _ablation(*hit_rates: float | None) -> dict[str, tuple[float, ...]]:
    """MoL, with the norm everywhere, is the cell of the other tables."""
    names = ("mol", "mol-no-l2-norm", "mol-no-gating-dropout", "mol-half", "mol-quarter-negatives")
    return {name: () if rate is None else (rate,) for name, rate in zip(names, hit_rates, strict=True)}


PAPER: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "movielens": {
        "ml-1m": {
            "bce": (0.0409, 0.2230, 0.4929, 0.8594, 0.1018),
            "dot": (0.0669, 0.2821, 0.5435, 0.8618, 0.1363),
            "mlp": (0.0576, 0.2805, 0.5419, 0.8551, 0.1290),
            "neumf": (0.0545, 0.2854, 0.5465, 0.8672, 0.1264),
            "deepfm": (0.0626, 0.2856, 0.5526, 0.8644, 0.1335),
            "mol": (0.0675, 0.3079, 0.5657, 0.8677, 0.1433),
            "hstu+dot": (),
            "hstu+mol": (),
            "hstu+mol 8x8": (),
            "fuxi+dot": (),
            "fuxi+mol": (),
        },
        "ml-100k": {
            name: ()
            for name in ("bce", "dot", "mlp", "neumf", "deepfm", "mol", "hstu+dot", "hstu+mol", "fuxi+dot", "fuxi+mol")
        },
        "ml-20m": {
            "bce": (0.0275, 0.1756, 0.4467, 0.8543, 0.0782),
            "dot": (0.0620, 0.2862, 0.5488, 0.8721, 0.1344),
            "mlp": (0.0687, 0.2936, 0.5556, 0.8756, 0.1416),
            "neumf": (0.0645, 0.2911, 0.5548, 0.8760, 0.1376),
            "deepfm": (0.0657, 0.2932, 0.5542, 0.8763, 0.1394),
            "mol": (0.0758, 0.3114, 0.5727, 0.8847, 0.1528),
        },
    },
    "amazon": {
        "beauty": {
            "bce": (0.0256, 0.0743, 0.1604, 0.2370, 0.0126),
            "dot": (0.0655, 0.1379, 0.2271, 0.2914, 0.0333),
            "mlp": (0.0393, 0.1005, 0.1864, 0.2465, 0.0189),
            "neumf": (0.0535, 0.1247, 0.2152, 0.2818, 0.0264),
            "deepfm": (0.0494, 0.1271, 0.2238, 0.2953, 0.0241),
            "mol": (0.0541, 0.1288, 0.2246, 0.2961, 0.0262),
        },
        "games": {
            "bce": (0.0794, 0.2209, 0.4217, 0.5642, 0.0383),
            "dot": (0.1246, 0.2771, 0.4505, 0.5736, 0.0600),
            "mlp": (0.1066, 0.2537, 0.4293, 0.5582, 0.0498),
            "neumf": (0.1175, 0.2722, 0.4479, 0.5755, 0.0559),
            "deepfm": (0.1216, 0.2817, 0.4690, 0.5965, 0.0576),
            "mol": (0.1221, 0.2834, 0.4713, 0.5964, 0.0586),
        },
        "books": {
            "bce": (0.0247, 0.0660, 0.1370, 0.2079, 0.0123),
            "dot": (0.0317, 0.0814, 0.1588, 0.2295, 0.0156),
            "mlp": (0.0297, 0.0759, 0.1500, 0.2190, 0.0144),
            "neumf": (0.0358, 0.0871, 0.1644, 0.2338, 0.0178),
            "deepfm": (0.0361, 0.0905, 0.1706, 0.2414, 0.0179),
            "mol": (0.0388, 0.0934, 0.1751, 0.2479, 0.0194),
        },
    },
    "ablation": {
        "ml-1m": _ablation(0.3079, 0.2894, 0.2964, 0.3041, 0.2972),
        "ml-20m": _ablation(0.3114, 0.3032, 0.3100, 0.3022, 0.2907),
        "beauty": _ablation(0.2088, 0.2246, 0.2148, 0.2076, 0.2046),
        # Of half the components, the paper has Beauty's figure here, too.
        "games": _ablation(0.4618, 0.4713, 0.4592, None, 0.4627),
        "books": _ablation(0.1751, 0.1695, 0.1674, 0.1719, 0.1808),
    },
    # On the paper's own dataset, which nobody else has: the shape is to be compared, not the figures.
    "components": {
        "demo-features": {
            "dot 64": (0.0843, 0.2563, 0.3712, 0.5026),
            "dot 128": (0.0882, 0.2676, 0.3856, 0.5204),
            "dot 256": (0.0916, 0.2761, 0.3954, 0.5305),
            "dot 512": (0.0925, 0.2754, 0.3949, 0.5299),
            "mlp": (0.0938, 0.2656, 0.3770, 0.5054),
            "neumf": (0.1087, 0.2976, 0.4148, 0.5479),
            "deepfm": (0.1199, 0.3242, 0.4465, 0.5810),
            "mol 16x2": (0.1212, 0.3221, 0.4436, 0.5768),
            "mol 8x4": (0.1221, 0.3232, 0.4440, 0.5763),
            "mol 16x4": (0.1250, 0.3283, 0.4502, 0.5834),
            "mol 32x4": (0.1304, 0.3404, 0.4628, 0.5961),
        }
    },
}
"""By table, dataset and method; the metrics are those of `columns`. Methods that the paper does not have are empty."""
RANK_OF_SCORES = {"dot": 50, "mlp": 227, "neumf": 386, "deepfm": 304, "mol": 1864}
"""The paper's table of ranks of the learned phi on ML-1M, d = 50."""
EXPLAINED = {"ml-1m": (0.1744, 0.4126, 0.8221), "beauty": (0.0496, 0.1212, 0.2654), "games": (0.1100, 0.2355, 0.4609)}
"""Its table of ranks of ln p(x|u): share of variance that 64, 256 and 1,024 dimensions explain."""
DIMENSIONS = (64, 256, 1024)
FREE = ("data.path", "warm_start", "train.precision", "train.threads")
"""Settings in which a result and its cell may differ."""
MOST_PAIRS = 2**28
"""Users x items of which a matrix is made."""
QUARTERS = 4
"""Groups of users, as many in each."""


@dataclass(frozen=True)
class Options:
    table: Literal["movielens", "amazon", "ablation", "rank", "components", "groups"] = "movielens"
    figure: Literal["", "popularity"] = ""
    """Draw this figure, of the runs of --table, in place of the table."""
    datasets: str = ""
    """Those of the table that are in --data when left empty."""
    methods: str = ""
    """All of the table when left empty; hstu+dot, hstu+mol, fuxi+dot and fuxi+mol take other encoders."""
    seeds: int = 1
    """train.seed 0, 1, …"""
    minutes: Annotated[float, tyro.conf.arg(aliases=("--budget",))] = 0.0
    """Training time of a cell, the run that it starts from included; 0 trains the recipe's epochs."""
    threads: int = 1
    data: str = "data"
    out: str = "runs/paper"
    """Where runs are kept."""
    results: str = "benchmarks/results"
    """Where the small JSON files are kept."""
    show: bool = False
    """Train nothing: show what there is."""
    plot: str = "popularity.png"
    json: bool = False
    """Print JSON."""

    def chosen(self) -> list[tuple[str, list[str]]]:
        """The datasets with their methods."""
        table = PAPER.get(self.table, PAPER["movielens"] | (PAPER["amazon"] if self.table == "rank" else {}))
        wanted = self.datasets.split(",") if self.datasets else [name for name in table if self._has(name)]
        if not wanted:
            names = [self.path(name).name for name in table]
            raise SystemExit(
                f"--data {self.data} has none of {', '.join(names)}; make one with: logitmix prepare {names[0]} --out "
                f"{self.path(next(iter(table)))}"
            )
        if strange := set(wanted) - set(table):
            raise SystemExit(
                f"--datasets has {', '.join(sorted(strange))}; --table {self.table} has {', '.join(table)}"
            )
        named = self.methods.split(",") if self.methods else []
        there = list(dict.fromkeys(name for dataset in wanted for name in table[dataset]))
        if strange := set(named) - set(there):
            raise SystemExit(f"--methods has {', '.join(sorted(strange))}; there are {', '.join(there)}")
        return [(dataset, [name for name in named or table[dataset] if name in table[dataset]]) for dataset in wanted]

    def cells(self, dataset: str, method: str) -> list["Cell"]:
        return [Cell(dataset, method, seed, self.minutes) for seed in range(self.seeds)]

    def _has(self, dataset: str) -> bool:
        # What the other tables show of a result needs no dataset.
        return (self.show and self.table in PAPER) or (self.path(dataset) / "dataset.json").is_file()

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
    minutes: float = 0.0

    @property
    def name(self) -> str:
        within = f"-{self.minutes:g}m" if self.minutes else ""
        return f"{self.dataset}-{self.method.replace(' ', '-')}-{self.seed}{within}"

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
        if not self.has_start:
            return None
        encoder, plus, _ = self.method.rpartition("+")
        return replace(self, method=f"{encoder}{plus}dot", minutes=self.own_minutes)

    @property
    def has_start(self) -> bool:
        name = self.method.rpartition("+")[2]
        return self.dataset != "demo-features" and name not in ("bce", "dot") and not self.is_recipe

    @property
    def own_minutes(self) -> float:
        """Without those of the cell that it starts from, which has as many."""
        return self.minutes / 2 if self.has_start else self.minutes

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
        settings |= {"train.seed": self.seed, "train.minutes": self.own_minutes, "train.threads": options.threads}
        return settings | {"train.refit": True}


def result(cell: Cell, options: Options) -> dict[str, Any] | None:
    """The cell's result; trained first if there is none and it may be."""
    path = Path(options.results) / f"{cell.name}.json"
    if not path.exists():
        if options.show:
            return None
        trained = train(cell, options)
        write_whole(path, json.dumps(trained, indent=1) + "\n")
    return read_result(path)


def differences(cell: Cell, found: Mapping[str, Any], options: Options) -> list[str]:
    """Settings with which a result was trained, and which its cell has otherwise by now. Settings that did not exist
    then are not known to differ, nor are those that the recipe had otherwise; what depends on the machine and on where
    runs lie may."""
    recipe = load_recipe(cell.recipe)
    before, now = flatten(recipe), flatten(with_settings(recipe, cell.settings(options)))
    then = {name: found["settings"].get(name, before.get(name, value)) for name, value in now.items()}
    path = f"{options.results}/{cell.name}.json"
    return [
        f"{cell.name} was trained with {name} {then[name]}, and its cell has {value}; to train it again, remove {path} "
        f"and {cell.run(options)}"
        for name, value in now.items()
        if name not in FREE and then[name] != (list(value) if isinstance(value, tuple) else value)
    ]


def read_result(path: Path) -> Fields:
    """ValueError that names the file if it is no result, here or where a field that it lacks is read."""
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    parts = {name: Fields(of, f"{path}: {name}") if isinstance(of, dict) else of for name, of in content.items()}
    return Fields(parts, str(path))


def finished(cell: Cell, options: Options) -> Path | None:
    """The cell's run, with its refit; trained first, even if its result is known, where --out lacks it and it may
    be."""
    result(cell, options)
    if not (refit_path(cell.run(options)) / "results.json").exists():
        if options.show:
            return None
        train(cell, options)
    return cell.run(options)


def train(cell: Cell, options: Options) -> dict[str, Any]:
    if cell.start:
        finished(cell.start, options)
    run, words = cell.run(options), words_of(cell.settings(options))
    Console(stderr=True).print(f"{cell.name}: {cell.recipe} {' '.join(words)}", soft_wrap=True, highlight=False)
    try:
        logitmix("train", cell.recipe, *words, "--run", str(run))
    except KeyboardInterrupt:
        raise SystemExit(f"{cell.name} is stopped; the same command goes on with it") from None
    return collected(run, cell.recipe) | ({"minutes": cell.minutes} if cell.minutes else {})


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
        case "movielens" | "rank":
            return MOVIELENS
        case "amazon":
            return AMAZON
        case "components":
            return COMPONENTS
        case _:
            return (DATASETS[dataset].metric,)


def summary(found: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """Means over seeds, with their deviation and the error over users: a hit rate is a mean over users of 0 and 1."""
    users = found[0]["users"]
    minutes = [60 * (each["hours"]["run"] + each["hours"].get("start", 0.0)) for each in found]
    of: dict[str, Any] = {"seeds": len(found), "minutes": statistics.mean(minutes)}
    on = [(each["users"], each["corpus"], each.get("minutes", 0), each["machine"]) for each in found]
    of["measured"] = list(dict.fromkeys(on))
    for metric in metrics:
        values = [each["refit"][metric] for each in found]
        mean = statistics.mean(values)
        of[metric] = {"mean": mean, "deviation": statistics.stdev(values) if len(values) > 1 else None}
        if metric.startswith("hr@"):
            of[metric]["error"] = math.sqrt(mean * (1 - mean) / users)
    return of | {"validation": statistics.mean(each["validation"][each["metric"]] for each in found)}


def main(options: Options) -> None:
    try:
        require(options.seeds > 0, "--seeds", options.seeds, "1 or more")
        require(0 <= options.minutes < math.inf, "--minutes", options.minutes, "0 or more, and finite")
        require_threads("--threads", options.threads)
        torch.set_num_threads(options.threads)
        # Before anything is trained.
        if options.figure and not Path(options.plot).parent.is_dir():
            raise ValueError(f"--plot {options.plot}: there is no folder {Path(options.plot).parent}")
        if not options.show:
            Path(options.results).mkdir(parents=True, exist_ok=True)
        _show_or_draw(options)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None


def _show_or_draw(options: Options) -> None:
    if options.figure:
        popularity(options)
        return
    analyses = {"rank": (ranks, show_ranks), "groups": (groups, show_groups)}
    if options.table in analyses:
        analyze, show_one = analyses[options.table]
        found_of = []
        for of in analyze(options):
            found_of.append(of)
            if not options.json:
                show_one(of)
        if options.json:
            print(json.dumps({"rows": found_of}))
        return
    rows = []
    for dataset, methods in options.chosen():
        metrics = columns(options.table, dataset)
        for method in methods:
            cells = {cell: result(cell, options) for cell in options.cells(dataset, method)}
            found = [of for of in cells.values() if of is not None]
            paper = PAPER[options.table][dataset][method]
            rows.append({"dataset": dataset, "method": method, "paper": dict(zip(metrics, paper, strict=False)),
                         "ours": summary(found, metrics) if found else None,
                         "differs": [line for cell, of in cells.items() if of
                                     for line in differences(cell, of, options)]})  # fmt: skip
    if options.json:
        print(json.dumps({"rows": rows}))
    else:
        show(rows, options)


def show(rows: list[dict[str, Any]], options: Options) -> None:
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        metrics, of_paper = columns(options.table, dataset), any(PAPER[options.table][dataset].values())
        heads = [head for metric in metrics for head in ((metric, "paper") if of_paper else (metric,))]
        table = Table("method", *heads, "validation", "seeds", "minutes", title=f"{dataset}, refit")
        measured: dict[tuple[int, int, float, str], list[str]] = {}
        for row in (row for row in rows if row["dataset"] == dataset):
            ours, cells = row["ours"], []
            for of in ours["measured"] if ours else ():
                measured.setdefault(of, []).append(row["method"])
            for metric in metrics:
                cells.append(_shown(ours and ours[metric]))
                if of_paper:
                    cells.append(f"{row['paper'][metric]:.4f}" if row["paper"] else "")
            about = ["", "", ""]
            if ours:
                about = [f"{ours['validation']:.4f}", str(ours["seeds"]), f"{ours['minutes']:.0f}"]
            table.add_row(row["method"], *cells, *about)
        Console(width=180).print(table)
        metric = DATASETS[dataset].metric
        if errors := [row["ours"][metric]["error"] for row in rows if row["dataset"] == dataset and row["ours"]]:
            _say(f"standard error of {metric} over users: at most {max(errors):.4f}")
        for (users, corpus, limit, machine_), names in measured.items():
            most = f"; at most {limit:g} minutes" if limit else ""
            _say(f"{', '.join(names)}: {users:,} users ranked over {corpus:,} items{most}; {machine_}")
        for line in (line for row in rows if row["dataset"] == dataset for line in row["differs"]):
            _say(line)


def _say(line: str) -> None:
    Console().print(line, highlight=False, soft_wrap=True)


def _shown(of: Mapping[str, Any] | None) -> str:
    if not of:
        return ""
    deviation = "" if of["deviation"] is None else f" ± {of['deviation']:.4f}"
    return f"{of['mean']:.4f}{deviation}"


def ranks(options: Options) -> Iterator[dict[str, Any]]:
    """By dataset, what explains the variance of ln p(x|u), from the actions alone, and of each method's phi, with phi's
    numerical rank; without phi for more than MOST_PAIRS."""
    for dataset, methods in options.chosen():
        data = load_dataset(str(options.path(dataset)))
        runs = {}
        if data.num_users * data.num_items <= MOST_PAIRS:
            runs = {method: finished(Cell(dataset, method, 0, options.minutes), options) for method in methods}
        yield {
            "dataset": dataset,
            "users": data.num_users,
            "items": data.num_items,
            "explained": explained(data),
            "methods": {method: rank_of_scores(run) for method, run in runs.items() if run},
        }


def show_ranks(of: Mapping[str, Any]) -> None:
    dataset, size = of["dataset"], f"{of['users']:,} users, {of['items']:,} items"
    heads = [f"d = {d}" for d in DIMENSIONS]
    table = Table("", *heads, "rank", "paper: rank", title=f"{dataset}, {size}: share of variance within users")
    table.add_row("ln p(x|u)", *(f"{share:.4f}" for share in of["explained"].values()))
    if dataset in EXPLAINED:
        table.add_row("paper: ln p(x|u)", *(f"{share:.4f}" for share in EXPLAINED[dataset]))
    for method, found in of["methods"].items():
        paper = RANK_OF_SCORES.get(method, "") if dataset == "ml-1m" else ""
        shares = (f"{share:.4f}" for share in found["explained"].values())
        table.add_row(f"phi, {method}", *shares, f"{found['rank']:,}", f"{paper}")
    Console().print(table)
    if of["users"] * of["items"] > MOST_PAIRS:
        _say(f"{dataset} has more than {MOST_PAIRS:,} pairs of users and items: phi is left out")


def groups(options: Options) -> Iterator[dict[str, Any]]:
    """By dataset, HR@10 of rare and frequent items and users, and MoL's use of its components, of the refits."""
    for dataset, methods in options.chosen():
        data = load_dataset(str(options.path(dataset)))
        held_out = leave_one_out(data, validation=False)
        users = ranking_users(data, "test", 1, held_out)
        by = {
            "training actions of the target": held_out.training_counts(data)[users.target],
            "earlier actions of the user": users.seen_lengths,
        }
        runs = {
            method: [refit_path(run) for cell in options.cells(dataset, method) if (run := finished(cell, options))]
            for method in methods
        }
        found: dict[str, Any] = {"dataset": dataset, "users": len(users), "items": data.num_items, "by": {}}
        for name, value_U in by.items():
            quarters = np.array_split(np.argsort(value_U, kind="stable"), QUARTERS)
            rates = {
                method: np.mean([hit_rates(read_ranks(run), quarters) for run in of], axis=0).tolist()
                for method, of in runs.items()
                if of
            }
            bounds = [[int(value_U[of].min()), int(value_U[of].max())] for of in quarters]
            found["by"][name] = {"bounds": bounds, "hr@10": rates}
        found["seeds"] = {method: len(of) for method, of in runs.items()}
        found["components"] = {}
        for run in (run for method, of in runs.items() if "mol" in method for run in of):
            entropy, use_M = use_of_components(run)
            least, most = float(use_M.min()), float(use_M.max())
            found["components"][run.parent.name] = {"entropy": entropy, "least": least, "most": most}
        yield found


def show_groups(found: Mapping[str, Any]) -> None:
    title = f"{found['dataset']}, {found['users']:,} users ranked over {found['items']:,} items"
    for name, of in found["by"].items():
        heads = [f"{least:,} to {most:,}" for least, most in of["bounds"]]
        table = Table("method", "seeds", *heads, title=f"{title}: HR@10 of the refits, by {name}")
        for method, rates in of["hr@10"].items():
            table.add_row(method, str(found["seeds"][method]), *(f"{rate:.4f}" for rate in rates))
        Console().print(table)
    table = Table("run", "entropy / of even use", "least", "most", title=f"{title}: weights of MoL's components")
    for run, of in found["components"].items():
        table.add_row(run, f"{of['entropy']:.3f}", f"{of['least']:.4f}", f"{of['most']:.4f}")
    if table.row_count:
        Console().print(table)


def hit_rates(rank_U: np.ndarray, groups: Sequence[np.ndarray]) -> list[float]:
    """HR@10 of each group of users."""
    return [means(rank_U[group])["hr@10"] for group in groups]


@torch.no_grad()
def use_of_components(run: Path) -> tuple[float, torch.Tensor]:
    """Of the test part's users with their targets: the mean entropy of MoL's gates, by that of even use, and the mean
    of each gate [M]."""
    parts = []
    for similarity, query, item, users in sides(run):
        target_U = torch.from_numpy(users.target)
        parts.append(similarity.diagnostics(query, tuple(part[target_U] for part in item)) | {"users": len(target_U)})
    weights = torch.tensor([part["users"] for part in parts]).float()
    weights /= weights.sum()
    entropy, use = (
        torch.stack([part[name] for part in parts]) for name in ("gates/entropy", "gates/use_of_components")
    )
    return float(weights @ entropy), weights @ use


def explained(data: Dataset) -> dict[int, float]:
    """Share of the variance of ln p(x|u) within users that the first singular vectors explain, where p(x|u) is
    proportional to the user's count of the item plus 1 / X: the paper does not say how it smooths unseen pairs, nor
    what it centers. Numbers that are the same for all items of a user change no ranking, so they are left out.

    What remains of ln p is a sparse matrix less a number for each user, and is never made whole. Its singular values
    come from subspace iteration with twice as many vectors; where many are nearly equal, the last share is a little
    low.
    """
    X, user = data.num_items, np.repeat(np.arange(data.num_users), np.diff(data.offsets))
    keys, counts = np.unique(user * X + data.items_flat, return_counts=True)
    place = torch.from_numpy(np.stack(np.divmod(keys, X)))
    above = torch.from_numpy(counts * X + 1.0).log()  # what a pair has above an unseen one of its user
    mean_U = torch.zeros(data.num_users, dtype=torch.double).index_add_(0, place[0], above) / X
    shape = (data.num_users, X)
    sparse = torch.sparse_coo_tensor(place, above.float(), shape, check_invariants=True).coalesce()
    values = _squared_singular_values(sparse, -mean_U.float(), 2 * max(DIMENSIONS))
    return _shares(values, above.square().sum() - X * mean_U.square().sum())


def _squared_singular_values(sparse_UX: torch.Tensor, add_U: torch.Tensor, most: int) -> torch.Tensor:
    """The largest, at most `most`, of sparse_UX plus add_U in every column."""
    draws = torch.Generator().manual_seed(0)
    basis_XQ = torch.randn(sparse_UX.shape[1], min(most, *sparse_UX.shape), generator=draws)
    for _ in range(4):
        basis_XQ = torch.linalg.qr(basis_XQ).Q
        image_UQ = torch.linalg.qr(sparse_UX @ basis_XQ + add_U[:, None] * basis_XQ.sum(0)).Q
        basis_XQ = sparse_UX.t() @ image_UQ + add_U @ image_UQ
    return torch.linalg.svdvals(basis_XQ.T @ basis_XQ).double()


def _shares(values: torch.Tensor, total: torch.Tensor) -> dict[int, float]:
    return {d: float(values[:d].sum() / total) for d in DIMENSIONS}


def rank_of_scores(run: Path) -> dict[str, Any]:
    """Numerical rank of phi(x, u) of all users and items, numpy's at FP32's precision, and the share of its variance
    within users that the first singular vectors explain."""
    score_UX = scores(final_run(run))
    rank = int(torch.linalg.matrix_rank(score_UX))
    score_UX -= score_UX.mean(1, keepdim=True)
    gram = score_UX.T @ score_UX if len(score_UX) > score_UX.shape[1] else score_UX @ score_UX.T
    values = torch.linalg.eigvalsh(gram.double()).clamp(min=0).flip(0)
    return {"rank": rank, "explained": _shares(values, values.sum())}


@torch.no_grad()
def scores(run: Path) -> torch.Tensor:
    """phi of every user of the test part with every item, FP32 [U, X]."""
    return torch.cat([similarity.all_pairs(query, item) for similarity, query, item, _ in sides(run)])


@torch.no_grad()
def recommended(run: Path) -> np.ndarray:
    """How often each item is among the best 10 of a user of the test part, whose own history is left out [X]."""
    best = []
    for similarity, query, item, users in sides(run):
        score = similarity.all_pairs(query, item)
        row = np.repeat(np.arange(len(users)), users.seen_lengths)
        score[torch.from_numpy(row), torch.from_numpy(users.seen)] = -math.inf
        best.append(score.topk(10).indices.flatten().numpy())
    return np.bincount(np.concatenate(best), minlength=score.shape[1])


def sides(run: Path) -> Iterator[tuple[Similarity, Side, Side, RankingUsers]]:
    """The similarity of a run, the queries' sides of some users of the test part, that of all items, and the users."""
    model = load_saved(run)
    data = load_dataset(model.config.data.path)
    users = ranking_users(data, "test", model.config.model.encoder.max_length, leave_one_out(data))
    similarity = model.tower.similarity
    with process_group("cpu", 60) as ranks_:
        embedder = Embedder(model.tower, model.sharded_rows(ranks_), columns_of(data, model.tower.schema))
        items = model.tower.item_sides(embedder.items(np.arange(data.num_items))).similarity
        for part in users.batches(256):
            queries = model.tower.query_sides(embedder.queries(part)).similarity
            yield similarity, queries, items, part


def popularity(options: Options) -> None:
    """Draws how often items are among the best 10 of the test part's users: items by buckets of that number."""
    edges = np.concatenate([[0, 1], 2 ** np.arange(1, 13)])
    pairs = [(dataset, method) for dataset, methods in options.chosen() for method in methods]
    cells = [Cell(*pair, 0, options.minutes) for pair in pairs]
    drawn = {cell: run for cell in cells if (run := finished(cell, options))}
    if not drawn:
        raise SystemExit(f"{options.out} has no finished run of {', '.join(cell.name for cell in cells)}")
    with drawing(options.plot, figsize=(8, 4.5), dpi=150) as (_, axes):
        for number, (cell, run) in enumerate(drawn.items()):
            share, _ = np.histogram(recommended(final_run(run)), [*edges, np.inf])
            place = np.arange(len(share)) + (number + 0.5) / len(drawn) - 0.5
            axes.bar(place, share, 1 / len(drawn), label=f"{cell.dataset} {cell.method}")
        axes.set(xlabel="times recommended, at least", ylabel="items", yscale="log")
        axes.set_xticks(range(len(edges)), [str(edge) for edge in edges])
        axes.legend(frameon=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
