"""What a run tells its loggers, which loggers there are, and `Sent`, for those that cannot take back a row."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from logitmix.common.files import parse_json, write_whole
from logitmix.common.plugins import Registry
from logitmix.trainer.run.metrics import RunProgress


class Logger:
    """Takes what a run measures. A subclass overrides the methods it needs; the others do nothing.

    A run calls `start`, then the others in the order of its steps, and `end`, all on rank 0 alone. The run of a section
    [start] and a refit are runs of their own: a logger that is given to `api.train` is started and ended for each. A
    logger that raises an exception is left out for the rest of the run, which goes on: stderr has a line about it.
    """

    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        """Before the first step of this process.

        run: the run directory, which exists.
        settings: all settings of the run by name: {"train.epochs": 8.0, …}
        dataset: content of its dataset.json: name, users, items, actions, schema, …
        done: the checkpoint that the run goes on from; `done.step` is 0 for a new run, or for one that has evaluated
            what it starts from. An earlier process may have logged rows of later steps: they come again.
        """

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step, by the names in metrics.jsonl.

        kind: "train" every train.log_every steps; "validation" after an evaluation (of step 0 for what a run starts
            from); "peeked", the same on the test part with evaluate.peek_test; "test" at the end, where `step` is that
            of the best checkpoint; "skipped" for a step whose loss or gradients were not finite, with the rank, or -1
            where it is not known, and the list of the batch's users; on CUDA one step late.
        """

    def text(self, name: str, text: str) -> None:
        """Lines for people: "start", what is trained and where; "test", what the results say of the model."""

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        """A diagnostic of the similarity that is many numbers."""

    def end(self, results: Mapping[str, float] | None) -> None:
        """After the last step. `results`: the content of results.json; None if the run was stopped or has failed."""


LOGGERS = Registry[Callable[[], Logger]](
    "logger",
    {
        "tensorboard": "logitmix.trainer.logs.board:Board",
        "mlflow": "logitmix.trainer.logs.mlflow:MLflow",
        "wandb": "logitmix.trainer.logs.wandb:WandB",
    },
)
"""By the names in train.loggers."""


class Sent:
    """The run of another service that holds a run's rows, and the last step of each kind that was sent there, in a file
    of the run directory: the steps that are trained again after a kill are not sent again."""

    def __init__(self, file: Path, done: RunProgress) -> None:
        """ValueError for a file that is damaged."""
        self.file = file
        self.id, self.steps = "", dict[str, int]()
        if (done.step or done.validation) and file.exists():
            found = parse_json(file.read_bytes(), str(file))
            try:
                self.id, self.steps = str(found["run"]), {kind: int(step) for kind, step in found["steps"].items()}
            except (TypeError, KeyError, AttributeError, ValueError):
                raise ValueError(f"{file} is damaged; remove it, and the rows go to a new run") from None

    def begin(self, id: str) -> None:
        """Notes the id of a new run."""
        self.id = id
        self._write()

    def is_new(self, kind: str, step: int) -> bool:
        return step > self.steps.get(kind, -1)

    def note(self, kind: str, step: int) -> None:
        self.steps[kind] = step
        self._write()

    def _write(self) -> None:
        write_whole(self.file, json.dumps({"run": self.id, "steps": self.steps}) + "\n")
