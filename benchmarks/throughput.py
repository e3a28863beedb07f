"""Examples (positions) a second of a recipe, on all cores: by precision, and by numbers of processes and threads.

    python -m benchmarks.throughput --data data/ml-1m [--recipe ml-1m-mol] [--minutes 1] [--repeats 3]

Each setup trains for --minutes through the command line, the setups in turn; the figure is the median over a run's rows
after the first quarter, and over the repeats. Setups with several processes have one thread each. A CPU without BF16
arithmetic computes in FP32 in every setup.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.arms import FP8_WIRE, FP32_WIRE, PRECISIONS, Settings
from benchmarks.measure import logitmix, machine, print_table, spread, words_of
from logitmix.trainer.run.metrics import read_rows

CORES = os.cpu_count() or 1
FP32, BF16 = ({**PRECISIONS[name], **FP32_WIRE} for name in ("fp32", "bf16"))
LINES: dict[str, tuple[Settings, int]] = {
    f"{CORES} processes, fp32": (FP32, CORES),
    f"{CORES} processes, bf16": (BF16, CORES),
    f"{CORES} processes, bf16 + fp8 wire": ({**BF16, **FP8_WIRE}, CORES),
    f"1 process with {CORES} threads, bf16": (BF16, 1),
}


@dataclass(frozen=True)
class Options:
    data: str
    """The recipe's dataset directory."""
    recipe: str = "ml-1m-mol"
    minutes: float = 1.0
    repeats: int = 3


def main(options: Options) -> None:
    rates: dict[str, list[float]] = {name: [] for name in LINES}
    for name in track(list(LINES) * options.repeats, "training", console=Console(stderr=True)):
        rates[name].append(_rate(options, *LINES[name]))
    base, *_ = (statistics.median(of) for of in rates.values())
    rows = ((name, spread(of, 0), f"{statistics.median(of) / base:.2f}") for name, of in rates.items())
    print_table(("", "examples/s", "of the first"), rows, f"{options.recipe}, {machine()}")


def _rate(options: Options, settings: Settings, processes: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        settings = {
            "run": str(run), "data.path": options.data, "no-start": True,
            "train.minutes": str(options.minutes), "train.log-every": "10", "train.device": "cpu",
            "train.threads": str(CORES // processes), **settings,
        }  # fmt: skip
        logitmix("train", options.recipe, *words_of(settings), processes=processes)
        rates = [row["examples_per_second"] for row in read_rows(run, "train")]
    return statistics.median(rates[len(rates) // 4 :])


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
