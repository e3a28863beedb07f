"""MLflow as a logger: at MLFLOW_TRACKING_URI, or else in RUN/mlflow.db, which
`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows."""

import logging
import os
import posixpath
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from logitmix.trainer.logs.logger import Logger, Sent
from logitmix.trainer.run.metrics import RunProgress

EXPERIMENT = "logitmix"
"""Where MLFLOW_EXPERIMENT_NAME names no other."""
LONGEST = 500
"""Characters of a parameter that all servers take."""
AT_ONCE = 1000
"""Metrics that all servers take in one call."""
# Else MLflow tries for minutes to reach a server, for which all ranks would wait.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
# It says how it makes the tables of its database.
logging.getLogger("mlflow").setLevel(logging.WARNING)


class MLflow(Logger):
    """A run of its own in MLflow: metrics as KIND/NAME, settings as parameters, texts as artifacts."""

    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        local = f"sqlite:///{(run / 'mlflow.db').absolute()}"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        self.sent = Sent(run / "mlflow.json", done)
        if not self.sent.id:
            tags = {f"dataset.{name}": str(dataset[name]) for name in ("name", "users", "items", "actions")}
            experiment = self._experiment(run if self.client.tracking_uri == local else None)
            self.sent.begin(self.client.create_run(experiment, run_name=str(run), tags=tags).info.run_id)
        # What a resumed run has changed keeps the value it began with: MLflow takes no second one.
        noted = self.client.get_run(self.sent.id).data.params
        new = {name: str(value)[:LONGEST] for name, value in settings.items() if name not in noted}
        self.client.log_batch(self.sent.id, params=[Param(name, value) for name, value in new.items()])
        self.client.update_run(self.sent.id, "RUNNING")

    def _experiment(self, run: Path | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        if found := self.client.get_experiment_by_name(name):
            return str(found.experiment_id)
        # A database has its artifacts in the working directory unless it is told where else.
        return str(self.client.create_experiment(name, str((run / "mlflow").absolute()) if run else None))

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        if not self.sent.is_new(kind, step):
            return
        now = int(time.time() * 1000)
        # A skipped row has a list.
        numbers = {_named(name): float(of) for name, of in metrics.items() if not isinstance(of, list)}
        found = [Metric(f"{kind}/{name}", value, now, step) for name, value in numbers.items()]
        for start in range(0, len(found), AT_ONCE):
            self.client.log_batch(self.sent.id, metrics=found[start : start + AT_ONCE])
        self.sent.note(kind, step)

    def text(self, name: str, text: str) -> None:
        self.client.log_text(self.sent.id, text + "\n", f"{name}.txt")

    def end(self, results: Mapping[str, float] | None) -> None:
        self.client.set_terminated(self.sent.id, "FINISHED" if results is not None else "KILLED")


def _named(metric: str) -> str:
    """MLflow takes paths of these characters alone."""
    return posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", metric.replace("@", "_at_")))
