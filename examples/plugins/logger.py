"""A logger: the loss of each row as a line of RUN/train.csv.

logitmix train demo-mol --import logger.py --train.loggers csv
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logitmix.trainer.logs.logger import LOGGERS, Logger
from logitmix.trainer.run.metrics import RunProgress


class Csv(Logger):
    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        self.file = run / "train.csv"
        lines = self.file.read_text().splitlines()[1:] if done.step else []
        # Later steps are trained again.
        kept = [line for line in lines if int(line.partition(",")[0]) <= done.step]
        self.file.write_text("\n".join(["step,loss", *kept]) + "\n")

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        if kind == "train":
            with self.file.open("a") as file:
                file.write(f"{step},{metrics['loss']}\n")


LOGGERS["csv"] = Csv
