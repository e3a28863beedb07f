"""What a run shows and logs while it trains: a progress bar, lines, and rows for its loggers, all on rank 0."""

import math
import resource
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from torch import Tensor

from logitmix.comm.codec import DIRECTIONS
from logitmix.comm.collectives import all_reduce_sum
from logitmix.comm.exchange import QUALITY
from logitmix.common.mappings import counted
from logitmix.common.messages import tell
from logitmix.modules.embeddings import own_name
from logitmix.trainer.config import TrainConfig
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.logs.loggers import Loggers
from logitmix.trainer.logs.trace import StepTrace
from logitmix.trainer.parallel.parallelize import ParallelModel, autocast, computes_bf16
from logitmix.trainer.parallel.plan import with_plan
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.step.pipeline import Pipeline, Skip

SPIKE, LEAST_LOSSES = 6, 30
DEVIATIONS_A_MAD = 1.4826
"""Of a normal distribution: the standard deviation as a multiple of the median absolute deviation."""
SECONDS_BETWEEN_LINES = 15.0
"""At least, without a terminal to show a bar on."""


class Telemetry:
    """Makes rows and lines on rank 0; on other ranks it only takes part in the sums."""

    def __init__(
        self,
        run: Path,
        model: ParallelModel,
        loggers: Loggers,
        done: RunProgress,
        total_steps: int,
        minutes: float = math.inf,
    ) -> None:
        self.model, self.loggers, self.ranks = model, loggers, model.ranks
        self.main = self.ranks.rank == 0
        self.last_step, self.last_examples = done.step, done.examples
        self.console = Console(stderr=True)
        # A notebook puts what is printed into the bar's place.
        self.has_bar = self.console.is_terminal and not self.console.is_jupyter
        self.spikes = Spikes()
        self.pace = Pace(model.train, done, total_steps, minutes)
        self.shown, self.line, self.line_at = "", "", 0.0
        if self.main:
            line = TextColumn("{task.description}", table_column=Column(overflow="fold"))
            self.bar = Progress(BarColumn(20), line, console=self.console)
            profile = model.train.profile
            self.trace = StepTrace(run, profile, done.step, self.say) if profile else None
            self.task = self.bar.add_task("starting", total=total_steps, completed=done.step)
            if done.step:
                self.say(f"continuing {run} after step {done.step}")

    def __enter__(self) -> "Telemetry":
        self.line_at = time.monotonic()
        if self.main and self.has_bar:
            self.bar.start()
        if self.main and self.trace:
            self.trace.start()
        return self

    def __exit__(self, kind: object, *others: object) -> None:
        if self.main:
            if self.trace:
                self.trace.stop()
            if self.has_bar:
                self.bar.stop()
            elif kind is None:
                self._say_progress()

    def say(self, line: str) -> None:
        """A line on rank 0's standard error, above the bar."""
        if self.main:
            tell(self.console, line)

    def log_step(self, pipeline: Pipeline, epoch: float) -> None:
        """Call after each step. If the step is logged, writes a row with its losses over all ranks, and rates since the
        last row. Collective."""
        if pipeline.wire_counts is not None:
            self._log_training(pipeline, pipeline.wire_counts, epoch)
        if not self.main:
            return
        self.line = self.pace.line(pipeline.step, pipeline.clock.elapsed, epoch, self.shown)
        self.bar.update(self.task, completed=pipeline.step, description=self.line)
        is_due = time.monotonic() - self.line_at >= SECONDS_BETWEEN_LINES
        if pipeline.wire_counts is not None and is_due and not self.has_bar:
            self._say_progress()
        if self.trace:
            self.trace.step()

    def _say_progress(self) -> None:
        if self.line:
            self.say(self.line)
        self.line, self.line_at = "", time.monotonic()

    def _log_training(self, pipeline: Pipeline, wire_counts: Tensor, epoch: float) -> None:
        losses, names = pipeline.losses, sorted(pipeline.losses)
        local = torch.tensor([losses[name].item() for name in names], dtype=torch.float64)
        sums = all_reduce_sum(torch.cat([local, wire_counts.flatten()]), self.ranks)
        loss = dict(zip(names, sums[: len(names)].tolist(), strict=True))
        phases, steps = pipeline.clock.pop(), pipeline.step - self.last_step
        seconds = sum(phases.values())
        row: dict[str, Any] = {"epoch": epoch, "loss": loss.pop("loss")}
        row |= {f"loss/{name}": value for name, value in loss.items()}
        row["gradient_norm"] = float(pipeline.gradient_norm)
        if pipeline.total_norm is not None:
            row["gradient_norm/all"] = float(pipeline.total_norm)
        row |= {f"learning_rate/{name}": value for name, value in pipeline.learning_rates.items()}
        row |= {"examples_per_second": (pipeline.examples - self.last_examples) / seconds, "time/step": seconds / steps}
        row |= {f"time/{phase}": spent / steps for phase, spent in phases.items()}
        tables = [own_name(name) for name in self.model.wire.tables]
        row |= wire_metrics(tables, sums[len(names) :].view(wire_counts.shape), steps)
        # Linux counts in KiB.
        row["memory/peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if self.ranks.device.type == "cuda":
            row["memory/peak_gib"] = torch.cuda.max_memory_allocated(self.ranks.device) / 2**30
        self.last_step, self.last_examples = pipeline.step, pipeline.examples
        if self.main:
            # The last batch of an epoch has fewer sequences, and the mean over few varies more.
            if not epoch.is_integer() and (line := self.spikes.note(row["loss"])):
                self.say(f"step {pipeline.step:,}: {line}")
            self.loggers.row("train", pipeline.step, row | self._diagnostics(pipeline))
            self.shown = f"loss {row['loss']:.4f}  {row['examples_per_second']:,.0f} examples/s  "

    def log_skipped(self, skip: Skip, users: np.ndarray) -> None:
        """A step whose loss or gradients are not finite, with the users of its batch: one of them may have a value that
        nobody expects."""
        if not self.main:
            return
        self.loggers.row("skipped", skip.step, {"rank": skip.rank, "users": users.tolist()})
        first = ", ".join(map(str, users[:5].tolist()))
        more = f" and {len(users) - 5:,} more, in metrics.jsonl" if len(users) > 5 else ""
        self.say(
            f"step {skip.step:,} is skipped: its loss or gradients are not finite on "
            f"{f'rank {skip.rank}' if skip.rank >= 0 else 'a rank'} (user_index {first}{more})"
        )

    def log_evaluation(
        self, kind: Literal["validation", "peeked"], step: int, epoch: float, metrics: dict[str, float]
    ) -> None:
        """Metrics on validation, or with evaluate.peek_test on the test part."""
        if self.main:
            self.loggers.row(kind, step, metrics | {"epoch": epoch})
            shown = "  ".join(f"{name} {metrics[name]:.4f}" for name in ("hr@10", "hr@50", "mrr"))
            self.say(f"epoch {epoch:g}, step {step:,}: {kind} {shown}")

    def _diagnostics(self, pipeline: Pipeline) -> dict[str, float]:
        """The similarity's diagnostics of rank 0's first sequences; vectors become histograms."""
        with autocast(self.model.train.precision, self.ranks.device):
            values = self.model.tower.diagnostics(pipeline.rows, pipeline.batch)
        if not all(value.isfinite().all() for value in values.values()):
            return {}  # the next step's check says what is wrong
        for name, value in values.items():
            if value.ndim:
                self.loggers.histogram(name, value.cpu().numpy(), pipeline.step)
        return {name: float(value) for name, value in values.items() if not value.ndim}


class Spikes:
    """Notes the logged losses, and finds those that stand far above the last ones."""

    def __init__(self) -> None:
        self.losses = deque[float](maxlen=100)

    def note(self, loss: float) -> str:
        """What to say of a loss that is so many deviations above the median of the last ones; else nothing."""
        last = list(self.losses)
        self.losses.append(loss)
        if len(last) < LEAST_LOSSES:
            return ""
        median = statistics.median(last)
        deviation = DEVIATIONS_A_MAD * statistics.median(abs(each - median) for each in last)
        if not loss > median + SPIKE * deviation:
            return ""
        return f"the loss, {loss:.4f}, is a spike: the median of the last {len(last)} rows is {median:.4f}"


class Pace:
    """Progress and remaining time of training, as one line."""

    def __init__(self, config: TrainConfig, done: RunProgress, total_steps: int, minutes: float = math.inf) -> None:
        self.done, self.total_steps, self.minutes = done, total_steps, minutes
        self.epochs = math.ceil(config.stop_after_epochs or config.epochs)

    def line(self, step: int, spent: float, epoch: float, shown: str) -> str:
        """Call after a step of this process; `spent` are the run's wall-clock seconds so far. The remaining time
        includes evaluation and checkpoints, at their share so far."""
        elapsed = spent - self.done.seconds
        of_steps = (self.total_steps - step) * elapsed / (step - self.done.step)
        of_time = max(0.0, self.minutes * 60 - spent)
        place = f"epoch {math.ceil(epoch)}/{self.epochs}  step {step:,}/{self.total_steps:,}"
        if of_time < of_steps:
            # The minutes end the run before it comes there.
            place = f"epoch {math.ceil(epoch)}  step {step:,}"
        return f"{place}  {shown}{_clock(elapsed)} elapsed  {_clock(min(of_steps, of_time))} remaining"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def start_block(
    dataset: Dataset,
    model: ParallelModel,
    of_data: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Says what will be trained, and where.

    Args:
        dataset: What is trained on.
        model: What is trained.
        of_data: Lines about what of the dataset is used, by name; those that are empty are left out.

    Returns:
        Lines of text, one for each table among them.
    """
    train, wire, ranks, settings = model.train, model.wire.config, model.ranks, model.tower.config
    tables = sum(table.rows * table.dim for table in model.plan.values())
    tower = sum(weight.numel() for weight in model.tower.parameters())
    device, threads = ranks.device.type, train.threads
    device += f" with {counted(threads, 'thread')} each" if device == "cpu" else ""
    precision = "BF16 autocast" if train.precision == "bf16" else "FP32"
    if train.precision == "bf16" and not computes_bf16(ranks.device):
        precision = "FP32 (this CPU has no BF16 arithmetic)"
    sent = f"embeddings {wire.forward}, their gradients {wire.backward}, the tower's gradients {wire.dense}"
    if ranks.world_size == 1:
        sent = f"one rank sends nothing; rounding emulated: {sent}" if wire.emulate else "one rank sends nothing"
    block = {
        "dataset": f"{dataset.name}: {dataset.num_users:,} users, {dataset.num_items:,} items, "
        f"{len(dataset.items_flat):,} actions",
        "parameters": f"{tables:,} in tables, {tower:,} in the tower",
        "ranks": f"{ranks.world_size} on {device}",
        "precision": precision,
        "wire": sent,
    }
    block |= {name: line for name, line in of_data.items() if line}
    if line := idle_ranks(train.batch_size, ranks.world_size):
        block["batch"] = line
    if item_valued := dataset.schema.only(settings.features).item_valued:
        block["export"] = f"not possible: {', '.join(item_valued)} and the item ids share a table"
    return with_plan(block, model.plan)


def idle_ranks(batch_size: int, world_size: int) -> str:
    """A line if a step has fewer sequences than there are ranks; otherwise empty."""
    if batch_size >= world_size:
        return ""
    return (
        f"{world_size - batch_size:,} of {world_size:,} ranks have no sequence in a step of {batch_size:,} "
        f"(train.batch_size): --scale {world_size} gives each rank as many as the recipe has for one "
        f"(docs/scale.md), or use {counted(batch_size, 'rank')}"
    )


def wire_metrics(tables: Sequence[str], counts: Tensor, steps: int) -> dict[str, float]:
    """The sums of `Wire.pop_counts` over all ranks, in `steps` steps, as named numbers. By table and direction: bytes,
    the bytes in FP32, and the root mean square of the sampled values' rounding errors relative to that of the values.
    """
    total = counts.sum(0)
    metrics = {"wire/bytes_per_step": float(total[:, 0].sum()) / steps}
    metrics |= {f"wire/{name}/bytes_per_step": float(total[i, 0]) / steps for i, name in enumerate(DIRECTIONS)}
    if total[:, 1].any():
        metrics["wire/share_of_fp32"] = float(total[:, 0].sum() / total[:, 1].sum())
    for table, pair in zip(tables, counts.tolist(), strict=True):
        for direction, (sent, fp32, *sampled) in zip(DIRECTIONS, pair, strict=True):
            tag, of = f"wire/{table}/{direction}", dict(zip(QUALITY, sampled, strict=True))
            metrics |= {f"{tag}/bytes_per_step": sent / steps, f"{tag}/fp32_bytes_per_step": fp32 / steps}
            if of["squares"]:
                metrics[f"{tag}/relative_rms_error"] = math.sqrt(of["squared_error"] / of["squares"])
    return metrics
