"""logitmix from Python: the commands as functions, each in this process alone.

    from logitmix.trainer import api

    api.prepare("table", source="clicks.csv", out="data/clicks")
    api.train("auto", "runs/clicks", {"data.path": "data/clicks", "train.minutes": 10})
    api.export("runs/clicks", "exports/clicks")
    print(api.compare("data/clicks", "runs/compare", minutes=10)["verdict"])
    api.Retriever.load("exports/clicks").rows(["1193", "661"], k=10)

What prepare, train, evaluate and compare return is a dict that shows itself as a table, in notebooks, too; what export
returns is one line.

All raise ValueError for the caller's mistakes, with one line that says what is wrong and what to do. To train with
several processes, start them with `logitmix train --processes N`, torchrun or torchx.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from logitmix.comm.process_group import process_group
from logitmix.common.mappings import from_mapping, require
from logitmix.common.messages import naming_urls, say, shown
from logitmix.common.plugins import load_plugins
from logitmix.common.storage import fetch_run, path_of
from logitmix.serving.model import Precision
from logitmix.serving.request import Options
from logitmix.serving.retriever import Retriever
from logitmix.trainer import loop
from logitmix.trainer.commands import comparison
from logitmix.trainer.commands.sizing import load_sized, settled
from logitmix.trainer.commands.tables import Shown, shown_metrics
from logitmix.trainer.config import with_settings
from logitmix.trainer.evaluation import evaluate as evaluation
from logitmix.trainer.export import export as exporting
from logitmix.trainer.export import recommend as recommending
from logitmix.trainer.export.catalog import Catalog
from logitmix.trainer.logs.logger import Logger
from logitmix.trainer.prepare import prepare as preparing
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.summary import summarize
from logitmix.trainer.quiet import quietly
from logitmix.trainer.run.folder import refit_path
from logitmix.trainer.run.results import START_STEP
from logitmix.trainer.run.stages import chosen_run

__all__ = ["Exported", "Logger", "Retriever", "compare", "evaluate", "export", "prepare", "recommend", "train"]

load_plugins()


@dataclass(frozen=True)
class Exported:
    """A serving directory that was written; its manifest.json says all of it."""

    path: str
    run: str
    """Name of the run."""
    step: int
    """Step of the checkpoint that was exported."""
    items: int
    bytes: int
    """Size of all files but the manifest."""


@naming_urls()
def prepare(name: str, **options: Any) -> dict[str, Any]:
    """Writes a dataset directory and returns the content of its dataset.json. The options are those of
    `PrepareOptions`: source, out, items, users, …"""
    tree = {option: str(value) if isinstance(value, Path) else value for option, value in options.items()}
    chosen = from_mapping(PrepareOptions, {"name": name, **tree}, "prepare")
    description = preparing.prepare(chosen)
    return Shown(description, shown(summarize(description, chosen.directory)))


@quietly()
@naming_urls()
def train(
    recipe: str,
    run: str | Path,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Logger] = (),
    scale: int = 1,
) -> dict[str, float]:
    """Trains a recipe (its name, or the path of a TOML file) into a run directory, or resumes the run; returns the test
    metrics of its best checkpoint, or with train.refit of its refit. `settings` are those of the command line by name:
    {"train.epochs": 8}; another kind of similarity or encoder begins with the defaults of that kind. `callbacks` are
    told all rows of metrics, in addition to the loggers that train.loggers names; see `Logger`. `scale` is that of the
    command line: so many times the recipe's batch."""
    settings = settings or {}
    config, found = load_sized(recipe, str(settings.get("data.path", "")), scale, settings, str(run))
    config, sizes = settled(with_settings(config, settings), found)
    if sizes:
        say(sizes)
    path = path_of(run)
    results = loop.train(config, path, callbacks)
    tested = refit_path(path) if config.train.refit else chosen_run(path)
    return shown_metrics(results, f"{tested}: {_of_step('test', results)}")


@quietly()
@naming_urls()
def evaluate(
    run: str | Path,
    split: Literal["test", "validation"] = "test",
    threads: int = 1,
    groups: Sequence[str] | None = None,
    want: str | None = None,
) -> dict[str, float]:
    """Metrics of a run's best checkpoint over the whole corpus, with the run's settings, but for `groups`
    (evaluate.groups) and `want` (evaluate.want) where they are given; on the test part, of its refit if there is
    one."""
    require(split in ("test", "validation"), "split", f"{split!r:.40}", "test or validation")
    chosen = None if groups is None else tuple(groups)
    results = evaluation.evaluate_run(fetch_run(run), split, "auto", threads, groups=chosen, want=want)
    return shown_metrics(results, f"{run}: {_of_step(split, results)}")


def _of_step(split: str, results: Mapping[str, float]) -> str:
    return f"{split}, checkpoint of step {results.get(START_STEP, results['step'])}"


@quietly()
@naming_urls()
def compare(
    dataset: str | Path,
    out: str | Path,
    minutes: float,
    methods: Sequence[str] = tuple(comparison.LEARNED),
    threads: int = 1,
    settings: Mapping[str, Any] | None = None,
    seeds: int = 1,
) -> dict[str, Any]:
    """Simple and learned methods on a dataset directory, each with so many minutes, the learned ones with each of so
    many seeds; returns the content of the folder's compare.json. The settings are by name, of the sections data and
    evaluate, or model.features: {"data.split": "time"}."""
    found = comparison.compare(str(dataset), path_of(out), minutes, methods, threads, settings or {}, seeds)
    return Shown(found, shown(comparison.as_text(found)))


@quietly()
@naming_urls()
def export(
    run: str | Path,
    out: str | Path,
    overwrite: bool = False,
    precision: Precision = "fp32",
    extras: Collection[exporting.Extra] = (),
    filterable: Collection[str] = (),
    items: str | Path = "",
    only: bool = False,
) -> Exported:
    """Writes the best checkpoint of a run, or that of its refit, as a serving directory.

    Args:
        run: The run directory.
        out: The serving directory, which `Retriever.load` reads.
        overwrite: Replaces a serving directory that is there.
        precision: Of the item cache.
        extras: Files for other servers (docs/export.md).
        filterable: Columns of the dataset, or of the table `items`, to filter by.
        items: A table whose items are added and changed.
        only: Leaves out the items that the table does not have.

    Returns:
        Where the serving directory is, its counts and the checkpoint's step.
    """
    require(precision in get_args(Precision), "precision", f"{precision!r:.40}", f"among {get_args(Precision)}")
    for name in extras:
        require(name in exporting.EXTRAS, "extras", f"{name!r:.40}", f"among {tuple(exporting.EXTRAS)}")
    manifest = exporting.export(
        fetch_run(run),
        path_of(out),
        overwrite,
        precision=precision,
        extras=extras,
        filterable=filterable or None,
        catalog=Catalog(str(items), only=only) if items or only else None,
    )
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    return Exported(str(out), manifest["run"], manifest["step"], manifest["num_items"], size)


@quietly()
@naming_urls()
def recommend(
    place: str | Path,
    out: str | Path,
    data: str | Path = "",
    k: int = 100,
    users: str | Path = "",
    similar_items: bool = False,
    items: str | Path = "",
    where: str = "",
    exclude_history: bool | None = None,
    stage1: int | None = None,
    threads: int = 1,
    limit: Mapping[str, int] = MappingProxyType({}),
    boost_new: float = 0.0,
    want: str = "",
) -> dict[str, int]:
    """Writes an export's k best items for each user of a dataset as Parquet or CSV; returns counts. The arguments are
    those of the command line."""
    options = Options(k, exclude_history=exclude_history, stage1=stage1, boost_new=boost_new)
    asked = recommending.Asked(
        Path(out), str(data), options, str(users), similar_items, str(items), where, dict(limit), want
    )
    with process_group("cpu", 60) as ranks:
        return recommending.recommend(str(place), asked, ranks, threads)
