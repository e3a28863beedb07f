"""TensorBoard as a logger, and its names.

TensorBoard sorts groups of charts by name, and the names here put the most wanted ones on top: loss, metrics
(validation), metrics_groups, metrics_hindexer, metrics_test, optimizer, similarity, speed, wire, wire_by_table. If a
value has a unit, its name says so. Values that do not change during a run are text, never a curve.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from logitmix.common.files import naming
from logitmix.trainer.config import COMPARED_WITH
from logitmix.trainer.logs.logger import Logger
from logitmix.trainer.run.metrics import RunProgress

CONSTANT = ("epoch", "users", "corpus", "repeated_targets")
"""Metrics that are the same in every row, or rise with the step."""
TRAINING_TAGS = {
    "loss": "loss",
    "gradient_norm": "optimizer/gradient_norm",
    "learning_rate": "optimizer/learning_rate",
    "examples_per_second": "speed/examples_per_second",
    "time": "speed/seconds_per_step",
    "memory": "speed",
}
"""By the first part of a metric's name; the similarity's diagnostics have other names."""
SIDE_BY_SIDE = {
    "quality": {"hit rates on validation": ["Multiline", ["^metrics/hr@"]]},
    "loss": {"losses": ["Multiline", ["^loss/"]]},
    "speed": {"seconds per step, by part": ["Multiline", ["^speed/seconds_per_step/"]]},
    "wire": {"bytes per step, by table": ["Multiline", ["^wire_by_table/.*/bytes_per_step$"]]},
}
"""Charts with several curves: patterns of tags."""


class Board(Logger):
    """The event file of a run."""

    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        """What a killed process wrote after `done` is hidden."""
        self.settings, self.folder, self.first_step = settings, run / "tensorboard", done.step + 1
        self.writer = SummaryWriter(str(self.folder), purge_step=self.first_step)
        self.text("configuration", (run / "config.toml").read_text(encoding="utf-8"))
        self.writer.add_custom_scalars(SIDE_BY_SIDE)

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Draws the metrics as curves; `end` those of the test, beside the settings."""
        if kind == "test":
            return
        with naming(self.folder):
            if kind == "skipped":
                users = ", ".join(map(str, metrics["users"]))
                self.writer.add_text("skipped", f"rank {metrics['rank']}, users {users}", step)
            else:
                for name, value in metrics.items():
                    if tag := self._tag(kind, name, metrics):
                        self.writer.add_scalar(tag, value, step)
            self.writer.flush()

    def text(self, name: str, text: str) -> None:
        self.writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), self.first_step)

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self.writer.add_histogram(f"similarity/{name}", values, step)

    def end(self, results: Mapping[str, float] | None) -> None:
        """Writes test metrics and examples per second, with the configuration as hyperparameters, but not the
        baselines, which do not depend on it."""
        with naming(self.folder):
            if results is not None:
                self._add_results(results)
            self.writer.close()

    def _add_results(self, results: Mapping[str, float]) -> None:
        left_out = (*CONSTANT, "step", "start", "seconds", *COMPARED_WITH)
        found = {name: float(value) for name, value in results.items() if name.partition("/")[0] not in left_out}
        tags = {f"metrics_test/{name}": value for name, value in found.items()}
        for tag, value in tags.items():
            self.writer.add_scalar(tag, value, int(results["step"]))
        # TensorBoard would show a bool as 0.0 or 1.0, and takes no list.
        settings = {name: value if type(value) in (int, float) else str(value) for name, value in self.settings.items()}
        # SummaryWriter.add_hparams would make a separate run.
        for summary in hparams(settings, {tag: of for tag, of in tags.items() if "/groups/" not in tag}):
            self.writer._get_file_writer().add_summary(summary)

    def _tag(self, kind: str, name: str, row: Mapping[str, float]) -> str | None:
        """The tag of a metric's curve; None if it is not drawn."""
        first, _, rest = name.partition("/")
        if first in CONSTANT or rest.endswith("/users"):
            return None
        if kind != "train":
            measured = "metrics_peeked" if kind == "peeked" else "metrics"
            return f"{measured}_{first}/{rest}" if first in ("hindexer", "groups") else f"{measured}/{name}"
        if first == "wire":
            # FP32's bytes of single tables follow from their shares.
            drawn = row["wire/bytes_per_step"] and not rest.endswith("fp32_bytes_per_step")
            return (f"wire_by_table/{rest}" if "/" in rest.partition("/")[2] else name) if drawn else None
        constant = self.settings["train.schedule"] == "constant" and not self.settings["train.warmup_steps"]
        if first == "learning_rate" and constant:
            return None
        group = TRAINING_TAGS.get(first)
        if group is None:
            return f"similarity/{name}"
        rest = rest or ("total" if first == "loss" else "")
        return f"{group}/{rest}" if rest else group
