"""A run's results.json, and the ranks of its test."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from logitmix.common.files import Fields, parse_json, require_numbers
from logitmix.trainer.config import BASELINES
from logitmix.trainer.run.checksums import checksum_rows, read_checksummed, write_checksummed


def beside_baselines(results: Mapping[str, float], labels: Mapping[str, str] = BASELINES) -> str:
    """One line that says at which k, below the corpus, a model's hit rate is above that of the better baseline, and at
    which below; empty where there are no baselines. `results` has hr@10 and, for the baselines that `labels` names,
    item_knn/hr@10."""
    said: dict[str, list[str]] = {}
    for metric, own in results.items():
        there = {name: results[f"{name}/{metric}"] for name in labels if f"{name}/{metric}" in results}
        if not metric.startswith("hr@") or not there or int(metric[3:]) >= results.get("corpus", math.inf):
            continue
        best = max(there, key=lambda name: there[name])
        how = "ahead of" if own > there[best] else "behind" if own < there[best] else "level with"
        figures = f" ({own:.4f} < {there[best]:.4f})" if how == "behind" else ""
        said.setdefault(f"{how} {labels[best]}", []).append(metric + figures)
    return "; ".join(f"{how} at {', '.join(metrics)}" for how, metrics in sorted(said.items()))


START_STEP = "start/step"
"""In the results of a run whose start is better on validation: the step of the start's checkpoint, which these results
are of. Their own step is 0."""
COLD = 0.1
"""Share of the targets without a training action from which on it is said."""


def cold_targets(results: Mapping[str, float]) -> str:
    """One line where much of the test part cannot be ranked from what was trained; else empty. `results` has
    targets/cold."""
    if (share := results.get("targets/cold", 0.0)) < COLD:
        return ""
    return (
        f"{share:.0%} of the targets are items that training has no action of (targets/cold): without features of "
        f"items they cannot be hit but by chance, and no hit rate is to be expected above {1 - share:.2f}"
    )


def write_results(run: Path, results: Mapping[str, Any]) -> None:
    checksum_rows(run)
    write_checksummed(run / "results.json", json.dumps(results, indent=1) + "\n")


def read_results(run: Path) -> Fields:
    """ValueError that names the file and the field if it is damaged."""
    path = run / "results.json"
    return require_numbers(parse_json(read_checksummed(path), str(path)), str(path), ("penalties_tried", "validation"))


def take_results(start: Path, run: Path) -> dict[str, float]:
    """Copies the ranks of a run's test to the run that started from it, whose results are to be these.

    Returns:
        The metrics of the test, and the step of the checkpoint that was tested as START_STEP.
    """
    write_ranks(run, read_ranks(start), read_test_users(start))
    results = read_results(start)
    others = ("step", "seconds", "examples_per_second")
    metrics = {name: value for name, value in results.items() if name not in others}
    return metrics | {START_STEP: results["step"]}


def write_ranks(run: Path, rank_U: np.ndarray, user_U: Sequence[str]) -> None:
    """Keeps the rank of each user's target in the test part, and the users' raw ids in the same order."""
    write_checksummed(run / "test_ranks.json", json.dumps(rank_U.tolist()) + "\n")
    write_checksummed(run / "test_users.json", json.dumps(list(user_U)) + "\n")


def read_ranks(run: Path) -> np.ndarray:
    """The rank of each user's target [U] in the test part, from 1 (int64)."""
    ranks = _read_list(run / "test_ranks.json", int)
    if not all(0 < rank < 2**63 for rank in ranks):
        raise ValueError(f"{run / 'test_ranks.json'} is not a list of ranks from 1")
    return np.array(ranks, np.int64)


def read_test_users(run: Path) -> list[str]:
    """The raw ids of the users [U] that `read_ranks` has the ranks of."""
    return _read_list(run / "test_users.json", str)


def _read_list(path: Path, kind: type) -> list[Any]:
    found = parse_json(read_checksummed(path), str(path))
    if not isinstance(found, list) or set(map(type, found)) - {kind}:
        raise ValueError(f"{path} is not a list of values of type {kind.__name__}")
    return found
