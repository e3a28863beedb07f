"""Weights & Biases as a logger: online after `wandb login`, or else in RUN/wandb, which `wandb sync` uploads."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import wandb

from logitmix.trainer.logs.logger import Logger, Sent
from logitmix.trainer.run.metrics import RunProgress


class WandB(Logger):
    """A run of its own in W&B: metrics as KIND/NAME over `step`, settings as its config, texts in its summary. The
    variables WANDB_MODE, WANDB_PROJECT and the others that wandb reads choose the rest."""

    def start(self, run: Path, settings: Mapping[str, Any], dataset: Mapping[str, Any], done: RunProgress) -> None:
        self.sent = Sent(run / "wandb.json", done)
        if not self.sent.id:
            self.sent.begin(secrets.token_hex(4))
        online = "WANDB_MODE" in os.environ or wandb.login(prompt=False)
        self.run = wandb.init(
            id=self.sent.id,
            resume="allow",
            mode=None if online else "offline",
            dir=run,
            name=str(run),
            settings=wandb.Settings(silent=True),
        )
        facts = {f"dataset.{name}": dataset[name] for name in ("name", "users", "items", "actions")}
        # A resumed run may have changed some.
        self.run.config.update({**settings, **facts}, allow_val_change=True)
        # W&B's own count of steps never falls, but the test is that of the best checkpoint.
        self.run.define_metric("*", step_metric="step")

    def row(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        if self.sent.is_new(kind, step):
            self.run.log({f"{kind}/{name}": value for name, value in metrics.items()} | {"step": step})
            self.sent.note(kind, step)

    def text(self, name: str, text: str) -> None:
        self.run.summary[name] = text

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        if self.sent.is_new("train", step):
            self.run.log({f"train/{name}": wandb.Histogram(values.tolist()), "step": step})

    def end(self, results: Mapping[str, float] | None) -> None:
        self.run.finish(exit_code=0 if results is not None else 1)
