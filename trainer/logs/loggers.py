"""The loggers of a run: the file of rows, those that train.loggers names, and those that a caller gives."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from logitmix.comm.collectives import on_first_rank
from logitmix.comm.process_group import Ranks
from logitmix.common.files import from_json
from logitmix.common.mappings import nearest
from logitmix.common.messages import say
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.logs.logger import LOGGERS, Logger
from logitmix.trainer.run.metrics import RunProgress, append_row, keep_rows

EXTRAS = {"tensorboard": "logitmix[train]", "mlflow": "logitmix[mlflow]", "wandb": "logitmix[wandb]"}
"""What installs the packages that loggers need."""


class RowsFile(Logger):
    """metrics.jsonl. The run itself reads its rows: unlike other loggers, it ends the run where it cannot write."""

    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        self.run = run
        keep_rows(run, done.step, evaluated=bool(done.validation))

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        append_row(self.run, kind, step, metrics)


class Loggers:
    """Tells all loggers of a run. On ranks other than 0 there are none, and every call does nothing."""

    def __init__(
        self,
        run: Path,
        settings: Mapping[str, Any],
        dataset: Dataset,
        done: RunProgress,
        ranks: Ranks,
        callbacks: Iterable[Logger] = (),
    ) -> None:
        """Starts them. Collective. ValueError on every rank for a name in train.loggers that there is no logger of, and
        for a logger whose package is not installed."""
        self.loggers: list[Logger] = []
        self.ended = False

        def start() -> None:
            facts = from_json(dataset.description())
            self.loggers = [RowsFile(), *made(settings["train.loggers"]), *callbacks]
            self._each("start", lambda logger: logger.start(run, settings, facts, done))

        on_first_rank(start, ranks)

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.ended:
            self.end(None)

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        self._each("row", lambda logger: logger.row(kind, step, metrics))

    def text(self, name: str, text: str) -> None:
        self._each("text", lambda logger: logger.text(name, text))

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self._each("histogram", lambda logger: logger.histogram(name, values, step))

    def end(self, results: Mapping[str, float] | None) -> None:
        self.ended = True
        self._each("end", lambda logger: logger.end(results))

    def _each(self, what: str, tell: Callable[[Logger], None]) -> None:
        for logger in list(self.loggers):
            try:
                tell(logger)
            except Exception as error:
                if isinstance(logger, RowsFile):
                    raise
                self.loggers.remove(logger)
                why = " ".join(f"{type(error).__name__}: {error}".split())
                say(f"the logger {type(logger).__name__} is left out from here on, because its {what} failed: {why}")


def made(names: Sequence[str]) -> list[Logger]:
    """The loggers of these names; ValueError as of `Loggers`."""
    found = []
    for name in dict.fromkeys(names):
        if name not in LOGGERS:
            there = ", ".join(LOGGERS)
            raise ValueError(f"train.loggers names {name!r}{nearest(name, list(LOGGERS))}; there are: {there}")
        try:
            found.append(LOGGERS.find(name)())
        except ModuleNotFoundError as error:
            extra = EXTRAS.get(name, error.name)
            raise ValueError(
                f"train.loggers names {name}, which needs {error.name}: pip install '{extra}', or leave it out of "
                "--train.loggers"
            ) from None
    return found
