"""Loss spikes that runs would have announced, from their rows.

    python -m benchmarks.spikes RUN [RUN ...] [--json]

In clean runs, each is a false alarm. Thresholds are in raw median absolute deviations (MAD) and in deviations, which
training uses; these are also counted with the last batch of each epoch, which training leaves out.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from logitmix.trainer.logs.telemetry import DEVIATIONS_A_MAD, SPIKE, Spikes
from logitmix.trainer.run.metrics import read_rows


@dataclass(frozen=True)
class Options:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    json: bool = False


def spikes_of(run: Path) -> dict[str, int]:
    """Counts of a run's logged losses, and of spikes among them by threshold."""
    rows = read_rows(run, "train")
    if not rows:
        raise SystemExit(f"{run} has no logged losses")
    thresholds = {f"{SPIKE} MAD": SPIKE / DEVIATIONS_A_MAD, f"{SPIKE} deviations": SPIKE}
    counts = {"rows": len(rows)}
    for name, deviations in thresholds.items():
        spikes, of_all = Spikes(deviations), Spikes(deviations)
        counts[name] = sum(spikes.note(row["loss"], row["epoch"].is_integer()) != "" for row in rows)
        counts[f"{name}, with last batches"] = sum(of_all.note(row["loss"]) != "" for row in rows)
    return counts


def main(options: Options) -> None:
    found = {str(run): spikes_of(run) for run in options.runs}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    table = Table("run", *next(iter(found.values())))
    for run, counts in found.items():
        table.add_row(run, *map(str, counts.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
