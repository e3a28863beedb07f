"""Finished and unfinished runs for `logitmix report`: seeds of the same settings as groups, and which group is best.

Axes: U users, M runs, R resamples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from logitmix.trainer.config import conditions_of
from logitmix.trainer.evaluation.intervals import FEWEST, middle, resampled
from logitmix.trainer.metrics import METRICS
from logitmix.trainer.run.folder import MAY_CHANGE, read_description, read_settings, start_path
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.results import read_ranks, read_results, read_test_users

DECISIVE = {"train.epochs", "train.minutes", "train.patience", "train.threads"}
NO_MATTER = MAY_CHANGE - DECISIVE | {"train.seed", "evaluate.batch_size"}
"""Settings in which the runs of a group may differ. With train.minutes, threads are steps."""
RULES = ("data.split", "data.held_out", "data.targets", "evaluate.exclude_history", "evaluate.users")
"""Settings without which test metrics do not compare."""


@dataclass(frozen=True)
class Run:
    """The parts of a run directory that the report shows."""

    path: Path
    settings: Mapping[str, Any]
    """By name."""
    dataset: Mapping[str, Any]
    training: Sequence[Mapping[str, float]]
    validation: Sequence[Mapping[str, float]]
    results: Mapping[str, float]
    """Empty if the run has not finished."""
    before: float
    """Minutes of the run that was trained first; 0 without one."""
    ranks: np.ndarray | None
    """The rank of each test user's target [U]; None where there are none."""
    users: Sequence[str]

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Reads a run directory, without importing the plugins that it names; ValueError if there is none, or a file is
        damaged."""
        settings = read_settings(path)
        has_first = any(name.startswith("start.") for name in settings) and not settings.get("warm_start")
        rows, start = read_rows(path), start_path(path) / "results.json"
        ranked = all((path / name).exists() for name in ("results.json", "test_ranks.json", "test_users.json"))
        ranks, users = (read_ranks(path), read_test_users(path)) if ranked else (None, [])
        if ranks is not None and len(ranks) != len(users):
            raise ValueError(
                f"{path / 'test_ranks.json'} has {len(ranks)} ranks, but test_users.json {len(users)} users; restore "
                "both, or remove one"
            )
        description = read_description(path)
        if not all(type(description.get(name)) is int for name in ("users", "items", "actions")):
            raise ValueError(f"{path / 'dataset.json'}: users, items and actions must be whole numbers")
        return cls(
            path,
            settings,
            {"name": "no name"} | description,
            [row for row in rows if row["kind"] == "train"],
            [row for row in rows if row["kind"] == "validation"],
            read_results(path) if (path / "results.json").exists() else {},
            read_results(start.parent)["seconds"] / 60 if has_first and start.exists() else 0.0,
            ranks,
            users,
        )

    def minutes_at(self, step: int) -> float:
        """Training time until a step, from the rows' seconds per step, without evaluation; that of the run that was
        trained first counts."""
        return self.before + float(np.interp(step, *self._timeline))

    @cached_property
    def _timeline(self) -> tuple[list[float], list[float]]:
        """Steps and minutes; steps after the last row are assumed to be as fast."""
        steps, minutes, seconds = [0.0], [0.0], 0.0
        for row in self.training:
            seconds = row["time/step"]
            minutes.append(minutes[-1] + (row["step"] - steps[-1]) * seconds / 60)
            steps.append(row["step"])
        beyond = 1e9
        return [*steps, steps[-1] + beyond], [*minutes, minutes[-1] + beyond * seconds / 60]

    @property
    def last_step(self) -> int:
        rows = [*self.training, *self.validation, *([self.results] if self.results else [])]
        return max((int(row["step"]) for row in rows), default=0)

    @property
    def minutes(self) -> float:
        return self.before + self.results["seconds"] / 60 if self.results else self.minutes_at(self.last_step)


@dataclass(frozen=True)
class Group:
    """Runs of the same dataset and settings, but for the seed and what does not matter to the results."""

    runs: Sequence[Run]

    @cached_property
    def settings(self) -> dict[str, Any]:
        return {name: of for name, of in self.runs[0].settings.items() if name not in NO_MATTER}

    def values(self, metric: str) -> list[float]:
        """The test metric of each run that has it."""
        return [run.results[metric] for run in self.runs if metric in run.results]

    def mean(self, metric: str) -> float:
        return mean_of(self.values(metric))

    def spread(self, metric: str) -> float:
        """Standard deviation over the runs; 0 of one run."""
        values, mean = self.values(metric), self.mean(metric)
        # A product, because a power of a number that somebody has edited may raise OverflowError.
        return math.sqrt(sum((value - mean) * (value - mean) for value in values) / max(1, len(values) - 1))

    @property
    def seeds(self) -> str:
        return ", ".join(str(run.settings["train.seed"]) for run in self.runs)

    @property
    def ranked(self) -> list[Run]:
        return [run for run in self.runs if run.ranks is not None and len(run.ranks)]


def mean_of(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """In the order of their first runs."""
    groups: list[Group] = []
    for run in runs:
        own = Group([run])
        for at, group in enumerate(groups):
            if group.settings == own.settings and group.runs[0].dataset == run.dataset:
                groups[at] = Group([*group.runs, run])
                break
        else:
            groups.append(own)
    return groups


def differing(groups: Sequence[Group]) -> list[str]:
    """Names of the settings that are not the same in all groups. Those that a group does not have, as it has another
    kind of similarity, are left out unless there are no others."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    values = {name: [group.settings[name] for group in groups if name in group.settings] for name in names}
    found = [name for name in names if any(value != values[name][0] for value in values[name])]
    return found or [name for name in names if len(values[name]) < len(groups)]


@dataclass(frozen=True)
class Difference:
    """A group's metric less that of the best group, the bounds of its 95 % interval, and in how many users the two
    differ."""

    mean: float
    low: float
    high: float
    users: int

    @property
    def is_clear(self) -> bool:
        return self.users >= FEWEST and not self.low <= 0 <= self.high


def best_of(groups: Sequence[Group], metric: str) -> int | None:
    """The place of the group with the highest mean of the test metric; None if no run has it."""
    have = [at for at, group in enumerate(groups) if group.values(metric)]
    return max(have, key=lambda at: groups[at].mean(metric)) if have else None


def differences(groups: Sequence[Group], metric: str) -> list[Difference | None]:
    """Of each group to the best one, over resamples of the users, the same ones for all groups, and of the runs of each
    group. None for the best one itself, and for those that are not ranked by the same rules for the same users of the
    same dataset, or where the metric is of a plugin that this process lacks."""
    found: list[Difference | None] = [None] * len(groups)
    at = best_of(groups, metric)
    if at is None or metric not in METRICS or not (best := groups[at]).ranked:
        return found
    comparable = [group for group in groups if _comparable(group, best)]
    metric_of = METRICS.find(metric)
    of_runs = [
        np.stack([metric_of(run.ranks).astype(float) for run in group.ranked if run.ranks is not None], axis=1)
        for group in comparable
    ]
    values = dict(zip(map(id, comparable), resampled(of_runs), strict=True))
    best_U, best_R = values[id(best)]
    for place, group in enumerate(groups):
        if group is not best and id(group) in values:
            own_U, own_R = values[id(group)]
            low, high = middle(own_R - best_R)
            users = int((own_U != best_U).sum())
            found[place] = Difference(float((own_U - best_U).mean()), float(low), float(high), users)
    return found


def _comparable(group: Group, best: Group) -> bool:
    one = best.ranked[0]
    return (
        bool(group.ranked)
        and group.runs[0].dataset == one.dataset
        and all(run.users == one.users for run in (*group.ranked, *best.ranked))
        and all(group.settings.get(name) == best.settings.get(name) for name in RULES)
        # Lists of negatives leave the targets as they are.
        and conditions_of(group.settings["data.negatives"]) == conditions_of(best.settings["data.negatives"])
    )


def verdict(groups: Sequence[Group], metric: str, found: Sequence[Difference | None]) -> str:
    """One sentence: which group is best at the test metric, by how much, or that it cannot be told. `found`: the
    `differences` to it."""
    at = best_of(groups, metric)
    if at is None:
        return "No run has finished yet." if not any(of.results for group in groups for of in group.runs) else ""
    best, figure = groups[at], f"{metric} {_figure(groups[at], metric)}"
    own = name_of(best, groups)
    others = {place: group for place, group in enumerate(groups) if place != at and group.values(metric)}
    if not others:
        alone = " No other run has it yet." if len(groups) > 1 else ""
        return f"{own} has {figure} on the test part.{alone}"
    second = max(others, key=lambda place: others[place].mean(metric))
    next_one = f"{name_of(others[second], groups)} ({_figure(others[second], metric)})"
    if (to_second := found[second]) is None:
        differ = f"{own} ({_figure(best, metric)}) and {next_one} are not ranked for the same users by the same rules"
        lacking = f"{metric} is of a plugin that was not imported (--import)"
        return f"It cannot be told which is best at {metric}: {differ if metric in METRICS else lacking}."
    size = f"{-to_second.mean:+.4f}, 95 % interval {-to_second.high:+.4f} to {-to_second.low:+.4f}"
    unclear = [name_of(groups[place], groups) for place in others if (d := found[place]) and not d.is_clear]
    apart = sum(found[place] is None for place in others)
    left = f" {apart} more cannot be compared with it: other users or rules." if apart else ""
    if not unclear:
        return f"{own} is best at {metric}: {_figure(best, metric)}, ahead of {next_one} by {size}.{left}"
    many = f"{len(unclear) + 1} are too close: " if len(unclear) > 1 else ""
    return (
        f"It cannot be told which is best at {metric}: {many}{own} ({_figure(best, metric)}) is ahead of {next_one} by "
        f"{size}.{left}"
    )


def name_of(group: Group, groups: Sequence[Group]) -> str:
    """What tells a group from the others in a sentence: its values of up to two settings that differ, or the path of
    its first run; and how many seeds it has."""
    names = differing(groups)
    name = str(group.runs[0].path)
    if 1 <= len(names) <= 2 and all(setting in group.settings for setting in names):
        name = ", ".join(f"{short} {group.settings[setting]}" for setting, short in short_names(names).items())
    seeds = len(group.runs)
    return f"{name} ({seeds} seeds)" if seeds > 1 else name


def short_names(settings: Sequence[str]) -> dict[str, str]:
    """The settings without their first section, where that leaves them different."""
    short = [name.split(".", 1)[-1] for name in settings]
    return {name: name if short.count(of) > 1 else of for name, of in zip(settings, short, strict=True)}


def _figure(group: Group, metric: str) -> str:
    spread = f" ± {group.spread(metric):.4f}" if len(group.values(metric)) > 1 else ""
    return f"{group.mean(metric):.4f}{spread}"
