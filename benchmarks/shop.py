"""The weekly job of a shop beside `implicit` and RecTools: CPU minutes, lines of own code, and hit rates of known and
of new items.

    python -m venv peers && peers/bin/pip install "rectools[torch]==0.19.0" pyarrow==19.0.1
    python -m benchmarks.shop runs/shop --peers peers/bin/python

`demo-shop` is written as a shop's files, events.csv and catalog.csv. From these, each job makes a file of everyone's
100 best items in stock: ours is examples/weekly_shop.sh, the others are shop_implicit.py and shop_rectools.py, whose
lines of code are counted (`implicit` comes with RecTools, as pm-implicit). CPU minutes are those of the whole job, on
one thread.

Hit rates of ours are those of its run. The peers do their jobs once more without the test targets and all that comes
after them, for 500 items, in stock or not; they may learn from validation targets, which our run does not. BM25, ALS
and EASE do not tell kinds of actions apart, so they have all of them or purchases alone, in which case they leave out
only what was bought; SASRec sees all actions in their order, without features, and has purchases as targets. New items
are those that came in the last four weeks.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro
from pyarrow import csv

from benchmarks.measure import cpu_seconds, logitmix, machine, print_table
from logitmix.comm.process_group import process_group
from logitmix.trainer.data.batches import RankingUsers
from logitmix.trainer.data.columns import ranges
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.evaluation.baselines import ItemKNN, Score, popularity, rank_targets, target_counts
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.metrics import NOT_SERVED
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.results import read_ranks

CUTOFFS = (10, 100, 500)
NEW = 28 * 86_400
BEST = 100
PARTS = ("job", "rehearsal")
JOB = Path(__file__).parents[1] / "examples/weekly_shop.sh"
IMPLICIT, RECTOOLS = (Path(__file__).with_name(f"shop_{name}.py") for name in ("implicit", "rectools"))
PEERS = {
    "implicit ALS": (IMPLICIT, "als"),
    "implicit BM25": (IMPLICIT, "bm25"),
    "RecTools EASE": (RECTOOLS, "ease"),
    "RecTools SASRec": (RECTOOLS, "sasrec", "sampled_softmax"),
}


@dataclass(frozen=True)
class Options:
    folder: tyro.conf.Positional[Path]
    """Where the files, the run and the recommendations are written; must be new."""
    peers: str
    """Python of an environment that has RecTools and pyarrow."""
    epochs: int = 12
    """Of our job."""
    only: tuple[str, ...] = ()
    """Names of peers; all if none is given."""


@dataclass(frozen=True)
class Table:
    """Rows of the table, as methods are measured."""

    users: RankingUsers
    is_new: np.ndarray
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, method: str, rank_U: np.ndarray, seconds: float | None = None, own: tuple[int, int] | None = None
    ) -> None:
        """`own`: commands and lines of code."""
        parts = {"all": rank_U, "known": rank_U[~self.is_new], "new": rank_U[self.is_new]}
        rates = {f"{name} hr@{k}": f"{(of <= k).mean():.4f}" for name, of in parts.items() for k in CUTOFFS}
        commands, lines = own or ("", "")
        minutes = "" if seconds is None else f"{seconds / 60:.2f}"
        self.rows.append({"method": method, "CPU minutes": minutes, "commands": commands, "lines": lines, **rates})


def main(options: Options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options.folder.mkdir(parents=True)
    generated = options.folder / "generated"
    logitmix("prepare", "demo-shop", "--out", str(generated), "--min-user-actions", "1")
    shop = load_dataset(generated)
    write_files(options.folder, shop, np.arange(len(shop.items_flat)))

    words = ("--train.threads", "1", "--train.epochs", str(options.epochs))
    seconds = _spent("sh", str(JOB), str(options.folder), *words)
    config, dataset = read_config(options.folder / "run"), load_dataset(options.folder / "data")
    with process_group("cpu", 60) as ranks:
        evaluation = Evaluation(config, dataset, ranks)
    users = evaluation.users("test")
    table = Table(users, dataset.first_times()[users.target] > dataset.timestamps_flat.max() - NEW)
    commands = {line.split()[1] for line in JOB.read_text().splitlines() if line.strip().startswith("logitmix ")}
    table.add("logitmix", read_ranks(options.folder / "run"), seconds, (len(commands), 0))

    def rank(score: Score) -> np.ndarray:
        return rank_targets(score, users, dataset.num_items, evaluation.exclude_history)

    table.add("item-kNN", rank(ItemKNN.fit(dataset, evaluation.held_out)))
    table.add("popularity", rank(popularity(target_counts(dataset, evaluation.held_out))))
    before = ranges(users.first, users.seen_lengths)
    for name, (script, *words) in PEERS.items():
        if options.only and name not in options.only:
            continue
        for what in ("all actions",) if "sasrec" in words else ("purchases", "all actions"):
            only, folders = {"purchases": what == "purchases"}, [options.folder / name / what / of for of in PARTS]
            write_files(folders[0], dataset, np.arange(len(dataset.items_flat)), **only)
            spent = _spent(options.peers, "-P", str(script), str(folders[0]), str(BEST), *words)
            write_files(folders[1], dataset, before, all_in_stock=True, **only)
            _spent(options.peers, "-P", str(script), str(folders[1]), str(max(CUTOFFS)), *words)
            rank_U = ranks_in(folders[1] / "recommended.parquet", dataset, users)
            table.add(f"{name}, {what}", rank_U, spent, (1, lines_of_code(script.read_text())))
    about = {"users": len(users), "of new items": int(table.is_new.sum()), "machine": machine()}
    (options.folder / "shop.json").write_text(json.dumps(table.rows, indent=1) + "\n")
    title = ", ".join(f"{name}: {value}" for name, value in about.items())
    print_table(table.rows[0], (list(row.values()) for row in table.rows), title, 200)


def _spent(*command: str) -> float:
    return cpu_seconds(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL))


def lines_of_code(text: str) -> int:
    """Those that are neither blank nor comments."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def write_files(
    folder: Path, dataset: Dataset, places_A: np.ndarray, purchases: bool = False, all_in_stock: bool = False
) -> None:
    """events.csv, of the actions in these places, and catalog.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    user_A = np.searchsorted(dataset.offsets, places_A, side="right") - 1
    features = {of.name: of for of in dataset.schema.features}
    columns = {
        "user": dataset.raw_user_id_column().take(user_A),
        "item": dataset.raw_id_column().take(dataset.items_flat[places_A]),
        "timestamp": dataset.timestamps_flat[places_A],
        "event": dataset.single_values(features["event"]).take(places_A),
    }
    events = pa.table(columns)
    csv.write_csv(events.filter(pc.field("event") == "purchase") if purchases else events, folder / "events.csv")
    names = ("category", "price", "week", "in_stock")
    values = {name: dataset.single_values(features[name]) for name in names}
    if all_in_stock:
        values["in_stock"] = np.full(dataset.num_items, "yes")
    titles = dataset.title_column()
    csv.write_csv(pa.table({"item": dataset.raw_id_column(), "title": titles, **values}), folder / "catalog.csv")


def ranks_in(file: Path, dataset: Dataset, users: RankingUsers) -> np.ndarray:
    """Of each user's target, among the items that a peer found; one that it did not find ranks behind all."""
    found = pq.read_table(file)
    ids = {"user": dataset.raw_user_id_column(), "item": dataset.raw_id_column()}
    user_F, item_F = (pc.index_in(found[name].cast(of.type), of).to_numpy() for name, of in ids.items())
    order_F = np.lexsort((-found["score"].to_numpy(), user_F))
    user_F, item_F = user_F[order_F], item_F[order_F]
    place_F = np.arange(len(user_F)) - np.searchsorted(user_F, user_F)
    target_U, rank_U = np.full(dataset.num_users, -1), np.full(dataset.num_users, NOT_SERVED)
    target_U[users.user] = users.target
    hits_H = np.flatnonzero(item_F == target_U[user_F])
    rank_U[user_F[hits_H]] = place_F[hits_H] + 1
    return rank_U[users.user]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
