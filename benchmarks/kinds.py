"""What the kinds of actions tell: runs that are trained on all actions or on some, ranked for the same targets.

    python -m benchmarks.kinds [--out runs/kinds] [--seeds 3]
    python -m benchmarks.kinds --runs RUN ... --targets "event = purchase"

Without --runs it trains on planted data, in which views mislead. Items of a category are in two styles; a user buys
in two categories and in one style, but four of five views are of the other style, in the same categories. With each
purchase, four items of its category in the other style were shown, and two of any kind. An arm finds the plant if its
best ten items are in the style that the user buys. The runs have `data.split time`, so that no target of one is trained
on by another.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import mean

import numpy as np
import tyro

from benchmarks.measure import machine, print_table
from logitmix.comm.process_group import process_group
from logitmix.trainer import cli
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.evaluation.ranking import rank_corpus
from logitmix.trainer.metrics import means
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import read_config

USERS, CATEGORIES, STYLE = 1500, 20, 10
"""STYLE: items of a category in a style; item i is of category i // 20 and of style i // 10 % 2."""
PURCHASE = "event = purchase"
ARMS = {
    "all actions": [],
    "purchases weigh 10": ["--data.weight", "weight"],
    "all actions, shown": ["--data.negatives", "shown"],
    "purchases": ["--data.targets", PURCHASE],
    "purchases, shown": ["--data.targets", PURCHASE, "--data.negatives", "shown"],
}
SETTINGS = {
    "--data.split": "time",
    "--data.held-out": "0.1",
    "--model.features": "event",
    "--model.loss.share": "group",
    "--model.loss.negatives": "128",
    "--train.batch-size": "64",
    "--tables.lr": "0.003",
    "--dense.lr": "0.003",
    "--train.epochs": "12",
    "--train.threads": "1",
}


@dataclass(frozen=True)
class Options:
    runs: tuple[Path, ...] = ()
    """Runs of one dataset, to be ranked."""
    targets: tuple[str, ...] = (PURCHASE,)
    """Their common targets."""
    out: Path = Path("runs/kinds")
    seeds: int = 3


def main(options: Options) -> None:
    rows: dict[str, list[dict[str, float]]] = {str(run): [ranked(run, options.targets)] for run in options.runs}
    if not options.runs:
        data = options.out / "data"
        if not data.exists():
            options.out.mkdir(parents=True, exist_ok=True)
            write_actions(options.out / "actions.jsonl")
            cli.main(["prepare", "table", "--source", str(options.out / "actions.jsonl"), "--out", str(data)])
        for seed in range(options.seeds):
            for arm, words in ARMS.items():
                run = options.out / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
                if not (run / "results.json").exists():
                    of_seed = ["--train.seed", str(seed), "--run", str(run)]
                    cli.main(["train", "auto", "--data.path", str(data), *chain(*SETTINGS.items()), *words, *of_seed])
                rows.setdefault(arm, []).append(ranked(run, options.targets))
    names = next(iter(rows.values()))[0]
    cells = ([arm, *(f"{mean(one[name] for one in of):.4f}" for name in names)] for arm, of in rows.items())
    print_table(("trained on", *names), cells, machine(), 200)


def ranked(run: Path, targets: Sequence[str]) -> dict[str, float]:
    """Hit rates of a run for the test part's targets; on planted data also the share of its best ten items in the style
    that the target has."""
    config = read_config(run)
    if config.data.split != "time":
        raise ValueError(f"{run} has data.split {config.data.split}: it may have been trained on these targets")
    config = replace(config, data=replace(config.data, targets=tuple(targets)))
    dataset = load_dataset(config.data.path)
    with process_group("cpu", 60) as ranks:
        evaluation, model = Evaluation(config, dataset, ranks), load_saved(run, ranks=ranks)
        users, columns = evaluation.users("test"), columns_of(dataset, model.tower.schema)
        embedder = Embedder(model.tower, model.sharded_rows(ranks), columns)
        found = rank_corpus(embedder, dataset.num_items, users, 64, evaluation.exclude_history, best=10)
    rates = means(found.similarity_U.numpy())
    rates = {name: rates[name] for name in ("hr@10", "hr@100", "hr@500", "mrr")}
    if "shown" not in dataset.event_features or found.best_UK is None:
        return rates
    style_X = np.array(dataset.raw_ids(), np.int64) // STYLE % 2
    same = style_X[found.best_UK.numpy()] == style_X[users.target][:, None]
    return rates | {"in the style": float(same.mean())}


def write_actions(path: Path) -> None:
    """Six sessions of a user, at the same times for all: four views and a purchase."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for user in range(USERS):
            tastes, style = random.choice(CATEGORIES, 2, replace=False), int(random.integers(2))

            def item(category: int, style: int) -> int:
                return int(category * 2 * STYLE + style * STYLE + random.integers(STYLE))

            for session in range(6):
                for view in range(4):
                    other = style if random.random() < 0.2 else 1 - style
                    _write(file, user, item(random.choice(tastes), other), 1000 * session + view, "view", 1, [])
                category = int(random.choice(tastes))
                shown = [item(category, 1 - style) for _ in range(4)]
                shown += [int(of) for of in random.integers(0, CATEGORIES * 2 * STYLE, 2)]
                _write(file, user, item(category, style), 1000 * session + 10, "purchase", 10, shown)


def _write(file, user: int, item: int, time: int, event: str, weight: int, shown: list[int]) -> None:  # type: ignore[no-untyped-def]
    row = {"user": str(user), "item": str(item), "timestamp": 10**9 + time, "event": event, "weight": weight}
    file.write(json.dumps(row | {"shown": [str(of) for of in shown]}) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
