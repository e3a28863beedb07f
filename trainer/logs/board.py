"""TensorBoard as a logger: metrics by their names in metrics.jsonl, those of evaluations after their kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from logitmix.common.files import naming
from logitmix.trainer.logs.logger import Logger
from logitmix.trainer.run.metrics import RunProgress


class Board(Logger):
    """The event file of a run."""

    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        """What a killed process wrote after `done` is hidden."""
        self.folder, self.first_step = run / "tensorboard", done.step + 1
        self.writer = SummaryWriter(str(self.folder), purge_step=self.first_step)
        self.text("configuration", (run / "config.toml").read_text(encoding="utf-8"))

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        with naming(self.folder):
            for name, value in metrics.items():
                # A skipped row has a list.
                if not isinstance(value, list):
                    self.writer.add_scalar(name if kind == "train" else f"{kind}/{name}", value, step)
            self.writer.flush()

    def text(self, name: str, text: str) -> None:
        self.writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), self.first_step)

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self.writer.add_histogram(name, values, step)

    def end(self, results: Mapping[str, float] | None) -> None:
        with naming(self.folder):
            self.writer.close()
