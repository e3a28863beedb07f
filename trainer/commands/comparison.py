"""`logitmix compare`: simple and learned methods on one dataset, in equal time, with intervals over the users.

Each method has a folder in the output directory, NAME, and a learned one also NAME-SEED for each seed but 0. These are
ordinary run directories. That of a simple method has results.json, test_ranks.json, test_users.json, dataset.json, and
config.toml. What is there is not done again, and is refused if it was made with other settings. All methods see the
same training actions, and all choices (checkpoints, EASE's penalty, the method itself) are made on validation: the
first two by evaluate.metric, the method by CHOICE.

Axes: U users, S seeds, M numbers of a user (of runs and metrics), R resamples.
"""

import io
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from logitmix.comm.collectives import on_first_rank, on_first_rank_at_length
from logitmix.comm.process_group import process_group
from logitmix.common.files import write_whole
from logitmix.common.mappings import counted, require
from logitmix.common.messages import say, shown
from logitmix.common.storage import fetch_run, place_of
from logitmix.launch.processes import end_lost, require_threads
from logitmix.trainer.commands.sizing import AUTO, DOT, EXPLICIT, load_sized, settled
from logitmix.trainer.config import BASELINES, Config, dump_toml, flatten, with_settings, with_start
from logitmix.trainer.data.batches import require_trained
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.limited import limited
from logitmix.trainer.data.lookups import Ints
from logitmix.trainer.evaluation.baselines import (
    EASE,
    MOST_EASE_ITEMS,
    MOST_ITEMS,
    MOST_SCORES,
    ItemKNN,
    Score,
    popularity,
    target_counts,
    users_of_both,
)
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.evaluation.intervals import FEWEST, middle, resampled
from logitmix.trainer.loop import Job, require_apart, train_run
from logitmix.trainer.metrics import METRICS, means
from logitmix.trainer.run.agreement import facts_of
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.checksums import write_checksummed
from logitmix.trainer.run.folder import (
    read_config,
    require_one_host,
    require_same,
    start_path,
    upload_run,
)
from logitmix.trainer.run.metrics import evaluations_since_best, read_rows, still_rising
from logitmix.trainer.run.results import (
    COLD,
    beside_baselines,
    cold_targets,
    read_ranks,
    read_results,
    read_test_users,
    write_ranks,
    write_results,
)
from logitmix.trainer.run.stages import chosen_run
from logitmix.trainer.step.memory import set_up_memory
from logitmix.trainer.stopping import Stopping

SASREC = {"model.encoder.kind": "sasrec"}
LEARNED: Mapping[str, dict[str, Any]] = {
    "dot": SASREC,
    "mol": {
        **SASREC,
        "model.similarity.kind": "mol",
        "model.similarity.query_components": 4,
        "model.similarity.item_components": 4,
        "model.similarity.component_dim": 64,
        "model.similarity.projection_hidden": 128,
        "model.similarity.gate_hidden": 64,
        # Pairs cost more than those of a dot product: fewer negatives for each position, those that matter.
        "model.loss.share": "group",
        "model.loss.negatives": 2048,
        "model.loss.resample": 128,
    },
    "hstu": {"model.encoder.kind": "hstu", "model.encoder.blocks": 2, "model.encoder.heads": 1},
}
"""What differs from the recipe `auto`. HSTU is as deep as SASRec: deeper, it needs more than a few minutes."""
LABELS = BASELINES | {"ease": "EASE", "dot": "dot", "mol": "MoL", "hstu": "HSTU"}
SHOWN = ("hr@10", "hr@50", "ndcg@10", "mrr")
CHOICE = "hr@10"
"""On validation, it chooses the method; on the test part, the verdict names it."""
SECTIONS = ("data.", "evaluate.")
"""Settings that may be given, for all methods alike."""
FEATURES = "model.features"
"""Likewise, for the learned ones."""
PENALTIES = (100.0, 300.0, 30.0, 1000.0)
"""Values of lambda that EASE tries, in this order, as long as there is time."""
PER_RUN = ("validation", "step", "evaluations", "still_rising")
"""What compare.json says of each run of a learned method."""
WIDER = "hr@50"
"""The verdict says where its winner is behind in this metric: what is retrieved may be ranked again."""
ENDLESS = 1_000_000
"""Epochs that no run has time for."""
WIDTH = 126
"""Columns of the table."""


def compare(
    dataset_path: str,
    out: Path,
    minutes: float,
    methods: Sequence[str],
    threads: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    seeds: int = 1,
) -> dict[str, Any]:
    """Trains what is not there yet, and returns and writes the content of compare.json, and the same as text in
    compare.txt. `settings` of the sections data and evaluate, {"data.split": "time"}, hold for all methods, and
    model.features for the learned ones, of which each is trained with `seeds` seeds from 0 on. Collective.

    Raises ValueError for no dataset or one that nothing can be trained on, no minutes or seeds, an unknown method,
    settings of other sections or with which methods cannot be compared, and a method whose folder has a run of other
    settings, minutes or threads, or of another dataset.
    """
    require(0 < minutes < inf, "minutes", minutes, "above 0 and finite")
    for name in methods:
        require(name in LEARNED, "methods", name, f"among {', '.join(LEARNED)}")
    require_threads("threads", threads)
    require(seeds > 0, "seeds", seeds, "1 or more")
    torch.set_num_threads(threads)
    set_up_memory()
    require_one_host(out)
    fetch_run(out)
    dataset = load_dataset(dataset_path)
    require_apart(out, dataset, "out")
    if (out / "config.toml").is_file():
        raise ValueError(f"{out} is a run directory, and compare makes a folder of several; give another --out")

    learned = {name: [out / (f"{name}-{seed}" if seed else name) for seed in range(seeds)] for name in methods}
    # One seed after the other, so that all methods have as many where it is interrupted.
    configs = {
        learned[name][seed]: config_of(name, dataset, minutes, threads, settings, seed)
        for seed in range(seeds)
        for name in methods
    }
    config = config_of("dot", dataset, minutes, threads, settings)
    dataset.schema.only(config.model.features)
    facts = facts_of("compare", config, dataset, methods=methods, seeds=seeds)
    with process_group("auto", config.comm.timeout_seconds, facts, end_lost) as ranks:
        evaluation = Evaluation(config.evaluate, config.data, config.model, limited(config.data, dataset), ranks)
        # Before anything is fitted.
        require_trained(evaluation.dataset, evaluation.held_out)
        to_train = on_first_rank(lambda: [run for run in configs if not _is_done(run, configs[run], dataset)], ranks)
        left = len(to_train)
        if ranks.rank == 0 and left:
            say(
                f"{left} of {len(configs)} runs are to be trained: {counted(left * minutes, 'minute')}, "
                "evaluations on validation included"
            )
        simple, left_out = on_first_rank_at_length(lambda: _simple_methods(out, config, evaluation), ranks)
        with Stopping(ranks, config.train.stop_seconds) as stopping:
            job = Job(dataset, ranks, stopping)
            for number, run in enumerate(configs, start=1):
                doing = f"trains for {counted(minutes, 'minute')}" if run in to_train else "is done"
                name, _, seed = run.name.partition("-")
                label = LABELS[name] + (f", seed {seed}," if seed else "")
                job.say(f"[{number}/{len(configs)}] {label} {doing}, run directory {run}")
                if run in to_train:
                    train_run(configs[run], run, job)
                    stopping.check()
        found = on_first_rank_at_length(
            lambda: _finish(out, config, evaluation, minutes, simple, learned, left_out), ranks
        )
        upload_run(out, ranks)
    return found


def config_of(
    name: str,
    dataset: Dataset,
    minutes: float,
    threads: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
) -> Config:
    """The settings that a learned method is trained with, `settings` among them; ValueError as of `compare`."""
    path, learned = place_of(dataset.path), LEARNED[name]
    if settings.get(EXPLICIT):
        # What is sized has a loss that takes them.
        learned = {of: value for of, value in learned.items() if not of.startswith("model.loss.")}
    config, found = load_sized(AUTO, path, given=DOT | learned | dict(settings))
    users = config.evaluate.users or dataset.num_users
    # All methods are ranked for the same users, so for no more than the simple ones can be.
    most = max(1, MOST_SCORES // dataset.num_items)
    common = {
        "data.path": path,
        "train.minutes": float(minutes),
        "train.threads": threads,
        "train.seed": seed,
        # All of the time is used, and the rates have fallen at its end.
        "train.epochs": ENDLESS,
        "train.schedule": "wsd",
        "train.patience": 0,
        # All methods see the same actions.
        "train.stride": 0,
        "evaluate.baselines": False,
        "evaluate.users": config.evaluate.users if users <= most else most,
    }
    _require_comparable(settings)
    config, _ = settled(with_settings(config, common | learned | dict(settings)), found)
    if (config.evaluate.users or dataset.num_users) > most:
        raise ValueError(
            f"evaluate.users is {config.evaluate.users}, but of {dataset.num_users:,} users the simple methods rank "
            f"{most:,} at most, with {dataset.num_items:,} items, and all methods rank the same; give "
            f"--evaluate.users {most} or less"
        )
    # MoL learns slowly from random weights.
    if name != "mol":
        return config
    return with_start(config, config_of("dot", dataset, minutes / 2, threads, settings, seed))


def _require_comparable(settings: Mapping[str, Any]) -> None:
    """ValueError for settings of other sections, and for those without which nothing can be chosen on validation."""
    for name in settings:
        if not (name.startswith(SECTIONS) or name == FEATURES) or name == "data.path":
            raise ValueError(
                f"compare has no setting {name}; it takes {FEATURES} and those of data and evaluate, but not data.path"
            )
    needed = {"data.validation": settings.get("data.validation", True)}
    needed["evaluate.every_epochs"] = settings.get("evaluate.every_epochs", 1)
    for name, value in needed.items():
        if not value:
            raise ValueError(f"{name} is {str(value).lower()}, but compare chooses on validation; leave it out")


def _is_done(run: Path, config: Config, dataset: Dataset) -> bool:
    """Whether the run has its results. ValueError if it is of another dataset, or of other settings, minutes or
    threads."""
    if not (run / "config.toml").is_file():
        return False
    require_same(run, config, dataset)
    if (before := read_config(run).train.threads) != config.train.threads:
        raise ValueError(
            f"{run} was trained with --threads {before}; give the same, or another --out: with {config.train.threads}, "
            "equal minutes would not be equal"
        )
    return (run / "results.json").is_file()


def _simple_methods(out: Path, config: Config, evaluation: Evaluation) -> tuple[list[str], list[str]]:
    """Fits and ranks the simple methods that are not there yet; returns the names of all that there are, and what is to
    be said of those that the corpus is too large for."""
    items = evaluation.dataset.num_items
    names, left_out = ["popularity"], []
    for name, most in (("item_knn", MOST_ITEMS), ("ease", MOST_EASE_ITEMS)):
        if items <= most:
            names.append(name)
        else:
            left_out.append(f"{LABELS[name]} is left out: the corpus has more than {most:,} items")
            say(left_out[-1])
    for name in names:
        folder = out / name
        if (folder / "results.json").is_file():
            require_same(folder, config, evaluation.dataset)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        results, rank_U = _fit_and_rank(name, evaluation, config.train.minutes)
        write_checksummed(folder / "dataset.json", evaluation.dataset.description())
        write_checksummed(folder / "config.toml", dump_toml(config))
        write_ranks(folder, rank_U, evaluation.raw_users("test"))
        write_results(folder, results)
        say(f"{LABELS[name]}: validation {CHOICE} {results['validation'][CHOICE]:.4f}")
    return names, left_out


def _fit_and_rank(name: str, evaluation: Evaluation, minutes: float) -> tuple[dict[str, Any], Ints]:
    """Content of results.json, and the ranks in the test part."""
    began = time.monotonic()
    dataset, held_out = evaluation.dataset, evaluation.held_out
    about: dict[str, Any] = {}
    score: Score
    if name == "ease":
        score, about = _chosen_ease(evaluation, began + minutes * 60)
        size = dataset.num_items**2
    elif name == "item_knn":
        score = item_knn = ItemKNN.fit(dataset, held_out)
        about = {"fitted_users": item_knn.users, "of_users": item_knn.of_users}
        size = item_knn.similarity_XX._nnz()
    else:
        score, size = popularity(target_counts(dataset, held_out)), dataset.num_items
    about |= {"seconds": time.monotonic() - began, "parameters": size}
    about["validation"] = means(evaluation.ranks_by(score, evaluation.users("validation"), "validation"))
    return about, evaluation.ranks_by(score, evaluation.users("test"), "test")


def _chosen_ease(evaluation: Evaluation, until: float) -> tuple[EASE, dict[str, Any]]:
    """EASE with the penalty that is best on validation, of those that there was time for; at least one."""
    both_XX = users_of_both(evaluation.dataset, evaluation.held_out)
    best: tuple[float, EASE, float] | None = None
    tried = []
    for penalty in PENALTIES:
        began = time.monotonic()
        ease = EASE.fit(both_XX, penalty)
        rank_U = evaluation.ranks_by(ease, evaluation.users("validation"), "validation")
        value = means(rank_U)[evaluation.options.metric]
        tried.append(penalty)
        if best is None or value > best[0]:
            best = value, ease, penalty
        del ease  # matrices of gigabytes
        if time.monotonic() + (time.monotonic() - began) > until:
            break
    assert best is not None
    return best[1], {"penalty": best[2], "penalties_tried": tried}


def _finish(
    out: Path,
    config: Config,
    evaluation: Evaluation,
    minutes: float,
    simple: Sequence[str],
    learned: Mapping[str, Sequence[Path]],
    left_out: Sequence[str],
) -> dict[str, Any]:
    """`learned`: the runs of each method."""
    dataset, rules = evaluation.dataset, flatten(config)
    rows = []
    for name in simple:
        of = read_results(out / name)
        more = ("penalty", "penalties_tried", "fitted_users", "of_users")
        rows.append(_row(name, False, of, of["validation"]) | {key: of[key] for key in more if key in of})
    rows += [_learned_row(name, [_of_run(run) for run in runs]) for name, runs in learned.items()]
    reference = max((row for row in rows if not row["learned"]), key=lambda row: row["validation"][CHOICE])["method"]
    users, ranks = read_test_users(out / reference), dict[str, Ints]()
    folders: dict[str, Sequence[Path]] = {name: [out / name] for name in simple} | dict(learned)
    for name, runs in folders.items():
        rank_SU = [read_ranks(run) for run in runs]
        for run, rank_U in zip(runs, rank_SU, strict=True):
            if users != read_test_users(run) or len(users) != len(rank_U):
                raise ValueError(f"{run} has ranks of other users than {out / reference}; remove it, and compare again")
        ranks[name] = np.stack(rank_SU)
    tested = with_intervals(ranks, reference)
    rows = [row | tested[row["method"]] for row in rows]
    rows.sort(key=lambda row: -row["validation"][CHOICE])
    value = {name: means(rank_SU.ravel()) for name, rank_SU in ranks.items()}
    others = {f"{name}/{metric}": of for name in simple for metric, of in value[name].items()}
    beside = {
        LABELS[name]: beside_baselines(value[name] | others, {of: LABELS[of] for of in simple}) for name in learned
    }
    unused = len(dataset.schema.features) > 1 and not any(read_config(out / of).model.features for of in learned)
    over = _over_seeds([row for row in rows if row["learned"]])
    found = {
        "dataset": place_of(dataset.path),
        "minutes": minutes,
        "users": len(users),
        "items": dataset.num_items,
        "settings": {name: value for name, value in rules.items() if name.startswith(SECTIONS)},
        "cold_targets": (cold := evaluation.cold_targets("test")),
        "reference": reference,
        "left_out": list(left_out),
        "beside": [
            *([over] if over else []),
            *(f"{name} on the test part: {line}" for name, line in beside.items()),
            *(f"test part: {line}" for line in filter(None, [cold_targets({"targets/cold": cold})])),
        ],
        "verdict": verdict(rows, reference),
        "next": next_step(rows, reference, out, minutes, cold, unused),
        "methods": rows,
    }
    write_whole(out / "compare.json", json.dumps(found, indent=1) + "\n")
    write_whole(out / "compare.txt", shown(as_text(found)))
    return found


def _of_run(run: Path) -> dict[str, Any]:
    """What there is to say of one run."""
    config, chosen = read_config(run), chosen_run(run)
    results, saved = read_results(run), load_saved(chosen)
    metric, evaluations = config.evaluate.metric, len(read_rows(run, "validation"))
    if config.first:
        if not (start_path(run) / "results.json").is_file():
            raise ValueError(f"{start_path(run)} is gone, whose minutes count; remove {run}, and compare again")
        results["seconds"] += read_results(start_path(run))["seconds"]
    results["parameters"] = sum(table.rows * table.dim for table in saved.tower.schema.tables)
    results["parameters"] += sum(weight.numel() for weight in saved.tower.parameters())
    # A single evaluation does not tell.
    rising = bool(still_rising(run, metric)) if evaluations > 1 else None
    return _row(run.name, True, results, evaluations_since_best(chosen, metric)[1]) | {
        "step": results["step"],
        "evaluations": evaluations,
        "still_rising": rising,
    }


def _learned_row(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A method by its runs: means over the seeds. It is still rising if most of them are."""
    rising = [run["still_rising"] for run in runs]
    return {
        "method": name,
        "learned": True,
        "validation": {metric: float(np.mean([run["validation"][metric] for run in runs])) for metric in SHOWN},
        "minutes": float(np.mean([run["minutes"] for run in runs])),
        "parameters": runs[0]["parameters"],
        "still_rising": None if None in rising else 2 * sum(rising) > len(rising),
        "best_run": max(runs, key=lambda run: run["validation"][CHOICE])["method"],
        "runs": {run["method"]: {key: run[key] for key in PER_RUN} for run in runs},
    }


def _over_seeds(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line, where there are several."""
    count = max((len(row["runs"]) for row in rows), default=0)
    if count < 2:
        return ""
    figures = (f"{LABELS[row['method']]} {row['test'][CHOICE][0]:.4f} ± {row['standard_error']:.4f}" for row in rows)
    return f"HR@10 over {count} seeds, ± the standard error of their mean: {', '.join(figures)}"


def _row(name: str, learned: bool, results: Mapping[str, Any], validation: Mapping[str, float]) -> dict[str, Any]:
    return {
        "method": name,
        "learned": learned,
        "validation": {metric: validation[metric] for metric in SHOWN},
        "minutes": results["seconds"] / 60,
        "parameters": results["parameters"],
    }


def with_intervals(ranks: Mapping[str, Ints], reference: str) -> dict[str, dict[str, Any]]:
    """By method, of its ranks [S, U], `test`: each metric's mean over the seeds as [mean, low, high], `difference`: the
    same of its difference to the reference, and of CHOICE `users_that_differ` and the `standard_error` over the seeds,
    0 for one. The intervals are the middle 95 % of the resamples of the users, the same ones for all methods, and of
    each method's seeds."""
    found: dict[str, dict[str, Any]] = {name: {"test": {}, "difference": {}} for name in ranks}
    for metric in SHOWN:
        value_of = {
            name: np.stack([METRICS[metric](rank_U).astype(float) for rank_U in rank_SU], axis=1)
            for name, rank_SU in ranks.items()
        }
        # The same resamples of users and seeds for all metrics.
        means_of = dict(zip(ranks, resampled(list(value_of.values())), strict=True))
        base_U, base_R = means_of[reference]
        for name, (own_U, own_R) in means_of.items():
            of, mean = found[name], float(own_U.mean())
            of["test"][metric] = [mean, *map(float, middle(own_R))]
            of["difference"][metric] = [mean - float(base_U.mean()), *map(float, middle(own_R - base_R))]
            if metric == CHOICE:
                mean_S = value_of[name].mean(0)
                of["users_that_differ"] = int((own_U != base_U).sum())
                of["standard_error"] = float(mean_S.std(ddof=1) / len(mean_S) ** 0.5) if len(mean_S) > 1 else 0.0
    return found


def verdict(rows: Sequence[Mapping[str, Any]], reference: str) -> str:
    """One sentence about the learned method that is best on validation and the simple one that is, the reference."""
    simple = next(row for row in rows if row["method"] == reference)
    other = LABELS[reference]
    if not any(row["learned"] for row in rows):
        return f"{other} is best on validation; nothing was trained to compare it with"
    learned = max((row for row in rows if row["learned"]), key=lambda row: row["validation"][CHOICE])
    name = LABELS[learned["method"]]
    own, others = learned["test"][CHOICE][0], simple["test"][CHOICE][0]
    if len({(row["validation"][CHOICE], row["test"][CHOICE][0]) for row in rows}) == 1:
        return f"all methods have the same HR@10, {own:.3f}: it does not tell them apart here; see their MRR"
    difference, low, high = learned["difference"][CHOICE]
    over = f" over users and {seeds} seeds" if (seeds := len(learned["runs"])) > 1 else ""
    interval = f"95 % interval {low:+.3f} to {high:+.3f}{over}"
    figures = f"HR@10 {own:.3f} against {other}'s {others:.3f} ({difference:+.3f}, {interval})"
    clear = learned["users_that_differ"] >= FEWEST
    better, worse = clear and low > 0, clear and high < 0
    if learned["validation"][CHOICE] > simple["validation"][CHOICE]:
        if better:
            said = f"{name} is best on validation, and {other} of the simple methods; on the test part {name} beats it"
        elif worse:
            said = f"{name} is best on validation, but on the test part {other} is better"
        else:
            said = f"{name} is best on validation, but not clearly better than {other} on the test part"
    else:
        said = f"no learned model is ahead of {other} on validation, {'but' if better else 'and'} on the test part "
        said += f"{name}, the best of them, is {'better' if better else 'behind' if worse else 'not clearly better'}"
    said += f": {figures}"
    if better and learned["difference"][WIDER][2] < 0:
        said += f"; in HR@50 it is behind, {learned['test'][WIDER][0]:.3f} against {simple['test'][WIDER][0]:.3f}"
    return said


def next_step(
    rows: Sequence[Mapping[str, Any]], reference: str, out: Path, minutes: float, cold: float, unused: bool
) -> str:
    """What to do next; empty where nothing was trained. `cold`: the share of targets that training has no action of;
    `unused`: whether the dataset has features and the learned methods use none."""
    trained = [row for row in rows if row["learned"]]
    if not trained:
        return ""
    best = max(trained, key=lambda row: row["validation"][CHOICE])
    more, name = f"--minutes {4 * minutes:g} and another --out", LABELS[best["method"]]
    if best["still_rising"] is None:
        return f"{more}, because there was time for only one evaluation of {name}"
    if best["still_rising"]:
        return f"{more}, because {name}'s validation was still rising at the end"
    simple = next(row for row in rows if row["method"] == reference)
    ahead = best["validation"][CHOICE] > simple["validation"][CHOICE]
    if ahead and best["difference"][CHOICE][1] > 0 and best["users_that_differ"] >= FEWEST:
        return (
            f"`logitmix train --refit {place_of(out / best['best_run'])}`, which trains on the validation actions too"
        )
    if unused:
        return "--features all and another --out, because no method used what the dataset knows beside the ids"
    if cold >= COLD:
        return "features of the items (prepare --items), because ids alone cannot rank items without training actions"
    return f"more actions: with these, {LABELS[reference]}, which needs no training, does as well"


def as_text(found: Mapping[str, Any]) -> str:
    """The table, best on validation first, what is left out, where the learned methods are ahead of the best simple one
    and where behind, the verdict, and what to do next."""
    title = (
        f"{found['dataset']}: {found['users']:,} users ranked over {found['items']:,} items, "
        f"{counted(found['minutes'], 'minute')} a method"
    )
    reference = LABELS[found["reference"]]
    heads = ("", "validation\nHR@10", "HR@10", "HR@50", "NDCG@10", "MRR", f"HR@10 less\n{reference}'s", "minutes")
    table = Table(*heads, "parameters", "still\nrising", title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in found["methods"]:
        rising = {True: "yes", False: "no", None: "?"}[row["still_rising"]] if row["learned"] else ""
        difference = "" if row["method"] == found["reference"] else _cell(row["difference"][CHOICE], "+", " to ")
        table.add_row(
            LABELS[row["method"]],
            f"{row['validation'][CHOICE]:.4f}",
            *(_cell(row["test"][metric]) for metric in SHOWN),
            difference,
            f"{row['minutes']:.2f}",
            f"{row['parameters']:,}",
            rising,
        )
    text = io.StringIO()
    Console(width=WIDTH, file=text).print(table)
    said = [*found["left_out"], *found["beside"], found["verdict"]]
    said += [f"next: {found['next']}"] if found["next"] else []
    lines = [textwrap.fill(line, WIDTH, break_on_hyphens=False) for line in said]
    return text.getvalue() + "\n".join(lines) + "\n"


def _cell(numbers: Sequence[float], sign: str = "", to: str = "-") -> str:
    mean, low, high = numbers
    return f"{mean:{sign}.4f}\n{low:{sign}.3f}{to}{high:{sign}.3f}"
