"""What checkpoints cost a training run: none, with training waiting for them, and in the background.

    python -m benchmarks.saving [--items 2000000] [--saves 4] [--steps 100] [--repetitions 3] [--folder DIR]

One rank trains demo-mol's model on a generated dataset, with Adam, and saves every --steps steps. `pause` is the
longest time from one step to the next, `cost` the time from the first step to the last, beyond that of the run without
saves, for each save; `memory` is the peak of allocated memory. Medians and ranges of the repetitions, in turn.
"""

import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.measure import machine, print_table, python, spread, words_of
from benchmarks.memory import SETTINGS, Watch, write_data

ARMS = {"none": [], "waiting": ["--train.no-save-in-background"], "in the background": ["--train.save-in-background"]}
BATCH = 32


@dataclass(frozen=True)
class Options:
    items: int = 2_000_000
    saves: int = 4
    steps: int = 100
    """Steps between two saves, and before the first."""
    repetitions: int = 3
    folder: str = ""
    """Folder for the dataset and the runs, which are removed; by default the system's folder for temporary files."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder or None) as name:
        folder = Path(name)
        # A save comes after each epoch but the last, whose save at the end of the run is not counted.
        write_data(folder / "data", options.items, users=BATCH * options.steps)
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for arm in track([*ARMS] * options.repetitions, "measuring", console=Console(stderr=True)):
            found[arm].append(_measure(options, folder, arm))
    without = statistics.median(run["total"] for run in found["none"])
    rows = []
    for arm, runs in found.items():
        step, pause = ([1000 * run[name] for run in runs] for name in ("step", "pause"))
        memory = [run["memory"] / 1e9 for run in runs]
        cost = spread([(run["total"] - without) / options.saves for run in runs], 2) if arm != "none" else ""
        rows.append((arm, spread(step, 1), spread(pause, 0), cost, spread(memory, 2)))
    size = found["waiting"][0]["bytes"] / 1e9
    title = f"{options.saves} checkpoints of {size:.2f} GB, one every {options.steps} steps; {machine()}"
    print_table(("saves", "step, ms", "pause, ms", "cost of a save, s", "memory, GB"), rows, title, 140)


def _measure(options: Options, folder: Path, arm: str) -> dict[str, float]:
    run, out = folder / "run", folder / "times.json"
    settings = SETTINGS | {"tables.optimizer": "adam", "train.batch-size": BATCH, "evaluate.every-epochs": 0}
    settings |= {"train.epochs": options.saves + 1, "train.keep": 1, "data.path": folder / "data"}
    settings["train.checkpoint-every"] = 0 if arm != "none" else (options.saves + 1) * options.steps
    words = ["train", "demo-mol", "--run", str(run), *ARMS[arm], *words_of(settings)]
    python("-m", "benchmarks.saving", "rank", str(out), str(options.steps), *words)
    written = sum(file.stat().st_size for file in next((run / "checkpoints").iterdir()).iterdir())
    shutil.rmtree(run)
    found: dict[str, float] = json.loads(out.read_text())
    return found | {"bytes": written}


def run_rank(out: Path, steps: int, words: list[str]) -> None:
    """One run, in which the beginning of each step is noted."""
    watch, began = Watch("train"), []
    from logitmix.trainer import cli
    from logitmix.trainer.step.pipeline import Pipeline

    receive_rows = Pipeline.receive_rows

    def noted(self: Pipeline) -> Any:
        began.append(time.perf_counter())
        return receive_rows(self)

    Pipeline.receive_rows = noted  # type: ignore[method-assign]
    cli.main(words)
    # The last save is at the end of the run: it counts in no run.
    began = began[steps // 2 :]
    between = [after - before for before, after in itertools.pairwise(began)]
    found = {"total": began[-1] - began[0], "step": statistics.median(between), "pause": max(between)}
    out.write_text(json.dumps(found | {"memory": max(watch.peaks.values())}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        main(tyro.cli(Options, description=__doc__))
