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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.measure import logitmix, machine, words_of
from logitmix.common.files import Fields, parse_json, write_whole
from logitmix.common.mappings import require
from logitmix.launch.processes import require_threads
from logitmix.trainer.config import flatten, load_recipe, with_settings
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
FREE = ("data.path", "warm_start", "train.precision", "train.threads")
"""Settings in which a result and its cell may differ."""


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
    json: bool = False
    """Print JSON."""

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
        return [Cell(dataset, method, seed) for seed in range(self.seeds)]

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
    """Means over seeds, with their deviation and the error over users: a hit rate is a mean over users of 0 and 1."""
    users = found[0]["users"]
    minutes = [60 * (each["hours"]["run"] + each["hours"].get("start", 0.0)) for each in found]
    of: dict[str, Any] = {"seeds": len(found), "minutes": statistics.mean(minutes)}
    on = [(each["users"], each["corpus"], each["machine"]) for each in found]
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
        require_threads("--threads", options.threads)
        if not options.show:
            Path(options.results).mkdir(parents=True, exist_ok=True)
        _show(options)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None


def _show(options: Options) -> None:
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
        measured: dict[tuple[int, int, str], list[str]] = {}
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
        for (users, corpus, machine_), names in measured.items():
            _say(f"{', '.join(names)}: {users:,} users ranked over {corpus:,} items; {machine_}")
        for line in (line for row in rows if row["dataset"] == dataset for line in row["differs"]):
            _say(line)


def _say(line: str) -> None:
    Console().print(line, highlight=False, soft_wrap=True)


def _shown(of: Mapping[str, Any] | None) -> str:
    if not of:
        return ""
    deviation = "" if of["deviation"] is None else f" ± {of['deviation']:.4f}"
    return f"{of['mean']:.4f}{deviation}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
