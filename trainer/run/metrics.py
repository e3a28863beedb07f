"""The rows of a run's metrics.jsonl."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logitmix.common.files import Fields, naming, parse_json, require_numbers
from logitmix.common.mappings import require
from logitmix.trainer.run.checksums import ROWS, digests_of, read_checksummed, write_checksummed

EVALUATIONS = ("validation", "peeked")
"""Kinds of rows that have metrics of all users, at steps of training."""


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come."""

    step: int = 0
    """Steps that are done."""
    seconds: float = 0.0
    """Wall-clock seconds of training, with its evaluations and checkpoints: those that train.minutes limit."""
    examples: int = 0
    """Examples (positions) seen."""
    validation: dict[str, float] = field(default_factory=dict)
    """Metrics on validation at this step, if it was evaluated."""
    skipped: int = 0
    """How many of the steps were skipped: no weight moved."""
    step_seconds: float = 0.0
    """Seconds in the steps alone."""


def keep_rows(run: Path, last_step: int, evaluated: bool = True) -> None:
    """Removes the rows of metrics of steps later than that of a checkpoint. Of a checkpoint that was saved before it
    was evaluated, those of its evaluation go too, because it will be evaluated again; so do those of the test.
    ValueError if the rows up to the last checkpoint are not those that were written."""
    path = run / ROWS
    if not path.exists():
        return
    kept, problem = [], None
    for line, where in _lines(run):
        try:
            row = _row(line, where)
        except ValueError as error:
            # A power loss may have left it, after the rows up to the checkpoint.
            problem = problem or error
            continue
        again = row["kind"] == "test" or (row["step"] == last_step and row["kind"] in EVALUATIONS and not evaluated)
        if row["step"] <= last_step and not again:
            if problem:
                raise problem
            kept.append(row)
    write_checksummed(path, "".join(json.dumps(row) + "\n" for row in kept))


def append_row(run: Path, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
    path = run / ROWS
    with naming(path), path.open("a") as file:
        file.write(json.dumps({"kind": kind, "step": step, **metrics}) + "\n")


def read_rows(run: Path, kind: str = "") -> list[Fields]:
    """The rows of metrics in the order of writing, or those of a kind. A last line that a killed job left incomplete is
    skipped. ValueError that names the file, the line and the field if another is no row."""
    rows = [_row(line, where) for line, where in _lines(run)]
    return [row for row in rows if kind in ("", row["kind"])]


def _lines(run: Path) -> list[tuple[bytes, str]]:
    """The complete lines of the rows of metrics, and the file and number of each."""
    path = run / ROWS
    lines = read_checksummed(path).split(b"\n")[:-1] if path.exists() or path.name in digests_of(run) else []
    return [(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _row(line: bytes, where: str) -> Fields:
    content = parse_json(line, where)
    kind = content.pop("kind", None) if isinstance(content, dict) else ""
    row = require_numbers(content, where, ("users",))
    require(isinstance(kind, str), f"{where}: kind", kind, "a text")
    require(type(row["step"]) is int, f"{where}: step", row["step"], "a count")
    return Fields({"kind": kind, **row}, where)


def evaluations_since_best(run: Path, metric: str) -> tuple[int, Mapping[str, Any]]:
    """The number of evaluations on validation since the best one (the earliest of equals), and the best one's row; 0
    and no row if there were none."""
    rows = read_rows(run, "validation")
    if not rows:
        return 0, {}
    best = max(range(len(rows)), key=lambda at: rows[at][metric])
    return len(rows) - 1 - best, rows[best]


def peeked_best(run: Path, metric: str) -> dict[str, float]:
    """The metrics of the epoch that was best on the test part, as peeked/hr@10, and which it was."""
    rows = read_rows(run, "peeked")
    best = max(rows, key=lambda row: row[metric])
    return {f"peeked/{name}": value for name, value in best.items() if name not in ("kind", "step")}


def still_rising(run: Path, metric: str) -> str:
    """One line where the last evaluations on validation, a tenth of all, have the best one and are better than as many
    before them in the mean; else nothing."""
    values = [row[metric] for row in read_rows(run, "validation")]
    last = max(1, len(values) // 10)
    if len(values) < 2 or max(values) not in values[-last:] or sum(values[-last:]) <= sum(values[-2 * last : -last]):
        return ""
    return (
        f"validation {metric} was still rising at the end ({values[-last - 1]:.4f} -> {values[-1]:.4f} over the last "
        f"{last + 1} of {len(values)} evaluations): longer training (--train.epochs, --train.minutes) may give better "
        "results"
    )
