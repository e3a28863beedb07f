"""One training step after the other, with the prefetch of the next batch's rows.

The order of a step is that of Pipeline's methods. While batch t is trained on, the ids of batch t + 1 are in flight,
and a thread makes batch t + 2. The rows of batch t + 1 are sent part by part, each part as soon as its rows in the
table are updated, so no row is stale.

A step whose loss or gradients are not finite is skipped. On a CPU the ranks agree to before they send the rows'
gradients. A GPU would have to be waited for: there all is sent, and the device leaves out what would move a weight or a
moment. The host is told in the next step, when the device has that one's forward and backward to do, and goes on as if
the step had not been.

Axes: V unique ids of a table that a batch names, D width of its rows.
"""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from logitmix.comm.collectives import all_reduce_sum, largest
from logitmix.modules.batch import Batch
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.parallel.clipping import clip_scale
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.parallel.rows import RowExchange
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.schedule import learning_rate_factor

PHASES = ("data", "all_to_all", "forward", "backward", "optimizer")
"""Phases of a step. data is waiting for the next batch, and its copy to the device. all_to_all is the exchange of rows
in both directions: counts, ids and rows out, gradients back, codec, waiting for other ranks, and the tables' lookup and
update. forward includes most of the loss's backward, which runs there block by block; backward is the rest: the towers,
the encoder and the sum of gradients over ranks."""


class Clock:
    """Seconds of this rank: in each phase since `pop`, in the phases of all steps (`in_steps`), and of wall time."""

    def __init__(self, device: torch.device, elapsed: float = 0.0, in_steps: float = 0.0) -> None:
        """`elapsed` and `in_steps`: what an earlier process has spent on the run."""
        self.device, self.in_steps, self.exact = device, in_steps, False
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.began = time.perf_counter() - elapsed

    @property
    def elapsed(self) -> float:
        """Wall-clock seconds of the run's training so far, whatever they were spent on."""
        return time.perf_counter() - self.began

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        # Waiting for the device costs time, so only logged steps do it; the device's earlier work then counts as their
        # data phase.
        if self.exact and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spent = time.perf_counter() - start
        self.seconds[phase] += spent
        self.in_steps += spent

    def pop(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


SKIPPED_IN_A_ROW = 5
"""Steps without a finite loss and gradients that end a run."""


class Skip(NamedTuple):
    """A step that moves no weight, because its loss or gradients are not finite."""

    step: int
    rank: int
    """Whose loss or rows' gradients they are; -1 for those of the tower, which are a sum over the ranks."""


def _broken_rank(checks: Sequence[float]) -> int | None:
    """Returns which rank has broken a step, as `Skip` has it, from `FlatLosses.checks`; None for a step that is
    finite."""
    _, *of_ranks, total = checks
    broken = [rank for rank, number in enumerate(of_ranks) if not math.isfinite(number)]
    return None if math.isfinite(total) else (-1, *broken)[-1]


class _ReadLater:
    """Numbers that a CUDA device tells the host, who waits only to read them."""

    def __init__(self, like: Tensor) -> None:
        self.host, self.event = torch.empty(like.shape).pin_memory(), torch.cuda.Event()

    def send(self, numbers: Tensor) -> None:
        self.host.copy_(numbers, non_blocking=True)
        self.event.record()

    def read(self) -> list[float]:
        self.event.synchronize()
        return self.host.tolist()


class Pipeline:
    """Trains a model step by step, on all ranks together.

    Each step calls `receive_rows`, `loss`, `backward`, `check_gradients` and `apply_gradients`, in this order;
    `train_step` calls all five. The attributes hold a step's results until the next `receive_rows`.

    Use as a context manager: on exit, the ranks together finish the transfers that they began for the next batch.
    """

    batch: Batch
    rows: dict[str, Tensor]
    """The batch's rows [V, D] of each table, leaves: the graph is cut where model parallelism ends."""
    losses: dict[str, Tensor]
    """By name; "loss" is minimized."""
    gradient_norm: Tensor
    """Norm of the dense gradients."""
    skips: Sequence[Skip]
    """The steps that were found to be skipped since this one began. On CUDA that is the one before, and this one if
    `apply_gradients` has settled it."""
    total_norm: Tensor | None
    """Norm of all gradients, including the rows', before clipping; None without clipping."""
    reserved: float
    """Seconds of the run's minutes that are kept for the evaluation at the end."""
    time_passed: float
    """The share of the run's minutes, but for what is reserved, that had passed when `out_of_time` was last asked; 0
    without a limit."""
    learning_rates: dict[str, float]
    wire_counts: Tensor | None
    """The result of `Wire.pop_counts`, if the step is logged."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        batches: TrainingBatches,
        total: int,
        done: RunProgress | None = None,
        minutes: float = inf,
    ) -> None:
        """A thread asks `batches` for this rank's part of batch 0 to `total` - 1, on the CPU. `done` is the run's
        progress so far, and `minutes` what it has for training in all, evaluations included."""
        done = done or RunProgress()
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.total, self.step, self.skipped, self.examples = total, done.step, done.skipped, done.examples
        self.clock = Clock(model.ranks.device, done.seconds, done.step_seconds)
        self.minutes, self.reserved, self.time_passed = minutes, 0.0, 0.0
        self._rows_sent = False
        self.skips, self._in_a_row = [], 0
        cached = any(table.cache_load_factor < 1 for table in model.plan.values())
        on_device = model.ranks.device.type == "cuda" and not cached
        self._checks = _ReadLater(model.replicated.checks) if on_device else None
        """Where the device skips steps."""
        self._left_out = torch.zeros((), device=model.ranks.device)
        self._finite: Tensor | None = None
        self._unsettled: tuple[int, int] | None = None
        """On CUDA, the latest step and its targets, if the host does not know yet whether it is skipped."""
        self._thread = ThreadPoolExecutor(1, "batches")
        self._making: Future[Batch] | None = None
        self._rows: RowExchange | None = None
        self.total_norm = None
        self._next: tuple[Batch, RowExchange] | None = None
        """The next batch, whose rows are in flight."""

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Without the other ranks, what is in flight never arrives; and no later error may hide the first.
        if self._next and not isinstance(error, RuntimeError):
            with nullcontext() if error is None else suppress(Exception):
                self._next[1].abandon()
        self._thread.shutdown()

    @property
    def progress(self) -> RunProgress:
        """The run's progress, after a step that is settled."""
        assert not self._unsettled
        return RunProgress(
            self.step, self.clock.elapsed, self.examples, skipped=self.skipped, step_seconds=self.clock.in_steps
        )

    @property
    def logged(self) -> bool:
        """Whether this step's metrics are logged."""
        return self._is_logged(self.step)

    def train_step(self) -> dict[str, Tensor]:
        """Trains a whole step; returns its losses."""
        self.receive_rows()
        self.loss()
        self.backward()
        self.check_gradients()
        self.apply_gradients()
        return self.losses

    def receive_rows(self) -> None:
        """Begins the next step: waits for its rows and sends the ids of the batch after it."""
        assert self.step < self.total, f"all {self.total} steps are done"
        if self._next is None:
            self._next = self._prefetch(self.step)
            self.model.wire.begin_step(self.step + 1, sampling=self._is_logged(self.step + 1))
        assert self._next
        if not self._rows_sent:
            with self.clock("all_to_all"):
                self._next[1].send_rows()
        self.step += 1
        self.skips = []
        self.clock.exact = self.logged
        self.batch, rows = self._next
        self._next = self._prefetch(self.step)
        with self.clock("all_to_all"):
            self.rows = rows.wait()
            if self._next and not self.model.stream:
                self._next[1].send_ids()
        self._rows = rows

    def loss(self) -> None:
        with self.clock("forward"):
            self.losses = self.model.loss(self.rows, self.batch)
            if self._next:
                # On CUDA only now: while the host waits for the ranks' counts, the device has the forward pass to do.
                self._next[1].send_ids()

    def backward(self) -> None:
        """Computes the gradients of the dense part, whose sum over the ranks begins, and of this rank's rows."""
        assert self._rows
        with self.clock("backward"):
            self.model.backward(self.losses["loss"], self.rows)
        if self._checks:
            # At once, beside the sum of the dense part's gradients.
            with self.clock("all_to_all"):
                self._rows.send_gradients()

    def check_gradients(self) -> None:
        """Has all ranks skip this step if the loss or a gradient is not finite on one of them; ValueError if so many
        steps in a row were skipped. On CUDA the device finds and skips it, and the host is told whether the step before
        was skipped."""
        with self.clock("backward"):
            self._settle()
            checks, finite = self.model.replicated.checks, self.model.replicated.check()
            if self._checks:
                self._finite, self.gradient_norm = finite, checks[0]
                self._checks.send(checks)
                self._unsettled = self.step, self.batch.total_targets
            else:
                self.gradient_norm = get_total_norm(self.model.tower_gradients())
                self._note(self.step, _broken_rank(checks.tolist()))

    def _settle(self) -> None:
        """Notes on CUDA what the device has found of the latest step. It is waited for that long, but no longer."""
        if not self._unsettled:
            return
        assert self._checks
        (step, targets), self._unsettled = self._unsettled, None
        self._note(step, broken := _broken_rank(self._checks.read()))
        if broken is not None:
            self.examples -= targets
            self.model.table_optimizers.steps -= 1
        elif self.model.average:
            self.model.average.update(step - self.skipped)

    def _note(self, step: int, broken_rank: int | None) -> None:
        """Notes whether a step is skipped."""
        if broken_rank is None:
            self._in_a_row = 0
            return
        self.skips = [*self.skips, Skip(step, broken_rank)]
        self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
        if self._in_a_row == SKIPPED_IN_A_ROW:
            raise ValueError(
                f"the loss or a gradient is not finite at step {step}, nor in the {SKIPPED_IN_A_ROW - 1} before it; "
                "train another --run with lower --dense.lr and --tables.lr, or with --train.warmup-steps (what this "
                "run has saved is sound)"
            )

    def reserve(self, seconds: float) -> None:
        """Keeps time for the evaluation at the end: as much as the longest one so far took on any rank. Collective."""
        if self.minutes < inf:
            self.reserved = max(self.reserved, largest(round(seconds * 1000), self.model.ranks) / 1000)

    def out_of_time(self) -> bool:
        """Returns whether the run has used up its minutes on any rank, with evaluations and checkpoints, but for what
        is reserved. The time of the slowest rank becomes that of all, which the learning rates follow. Collective."""
        if (limit := (self.minutes * 60 - self.reserved) * 1000) < inf:
            milliseconds = largest(round(self.clock.elapsed * 1000), self.model.ranks)
            # A checkpoint has rank 0's time: if it were less, a run whose minutes are used up could be trained on.
            self.clock.began = time.perf_counter() - milliseconds / 1000
            self.time_passed = milliseconds / max(1.0, limit)
        return self.time_passed >= 1

    def apply_gradients(self, prefetch: bool = True, settle: bool = False) -> None:
        """Updates the tables and the dense part; with `prefetch`, sends the rows of the next batch, if there is one,
        each part as soon as it is updated. With `settle`, and in a logged step, the host waits to know whether the step
        was skipped."""
        assert self._rows
        next_batch = self._next[1] if self._next and prefetch else None
        self._rows_sent = next_batch is not None
        skipped = not self._checks and self.skips
        with self.clock("all_to_all"):
            if not self._checks and not skipped:
                self._rows.send_gradients()
            counted = self.logged and (_broken_rank(self._checks.read()) is None if self._checks else not skipped)
            self.wire_counts = self.model.wire.pop_counts() if counted else None
            self.model.wire.begin_step(self.step + 1, sampling=self._is_logged(self.step + 1))
            if skipped:
                self.optimizer.zero_grad()
                if next_batch:
                    next_batch.send_rows()
                return
            self._set_learning_rates()
            scale = self._clip_gradients(self._rows) if self.model.train.clip else None
            self._rows.apply_gradients(next_batch, scale)
        with self.clock("optimizer"):
            if self._finite is not None:
                # What torch's fused optimizers take from a gradient scaler, to move nothing where it is 1.
                cast(Any, self.optimizer).found_inf = torch.logical_not(self._finite, out=self._left_out)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.model.average and not self._checks:
                self.model.average.update(self.step - self.skipped)
        self.examples += self.batch.total_targets
        if settle or self.logged:
            self._settle()

    def _clip_gradients(self, rows: RowExchange) -> Tensor:
        """Waits for the rows' gradients at their owners and scales the dense gradients; returns the scale for the
        rows'."""
        squares = all_reduce_sum(rows.receive_gradients(), self.model.ranks)
        self.total_norm = (squares + self.gradient_norm.double().square()).sqrt().float()
        scale = clip_scale(self.total_norm, self.model.train.clip)
        torch._foreach_mul_(self.model.tower_gradients(), scale)
        return scale

    def _prefetch(self, number: int) -> tuple[Batch, RowExchange] | None:
        """Returns batch `number`; begins the exchange of its row counts, and has a thread make the batch after it."""
        if number >= self.total:
            return None
        with self.clock("data"):
            making = self._making or self._thread.submit(self.batches.at, number)
            batch = making.result()
            self._making = self._thread.submit(self.batches.at, number + 1) if number + 1 < self.total else None
        with self.clock("all_to_all"):
            batch = self.model.placed(batch, number + 1)
            rows = self.model.row_exchange(batch.ids)
        with self.clock("data"):
            return self.model.to_device(batch), rows

    def _set_learning_rates(self) -> None:
        train, tables = self.model.train, self.model.table_optimizers
        factor = learning_rate_factor(train.schedule, train.warmup_steps, self.step, self.total, self.time_passed)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.optimizer.defaults["lr"]
        tables.begin_step(factor, self._finite)
        rates = {"dense": self.optimizer.defaults["lr"], "tables": tables.config.lr}
        rates |= {f"tables/{name}": of["lr"] for name, of in tables.config.by_name.items() if "lr" in of}
        self.learning_rates = {name: factor * rate for name, rate in rates.items()}

    def _is_logged(self, step: int) -> bool:
        return step % self.model.train.log_every == 0 or step == self.total
