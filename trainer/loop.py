"""The training loop: restore, for batch, step, log, evaluate, save."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from logitmix.comm.collectives import agreed, largest
from logitmix.comm.process_group import Ranks, process_group
from logitmix.modules.batch import Batch
from logitmix.trainer import checkpoint
from logitmix.trainer.checkpoint import Progress
from logitmix.trainer.config import Config
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.evaluate import Evaluation
from logitmix.trainer.memory import set_up_memory
from logitmix.trainer.optimizer import dense_optimizer
from logitmix.trainer.parallelize import ParallelModel, parallelize
from logitmix.trainer.rows import RowExchange
from logitmix.trainer.run import run_lock, start_run, write_results
from logitmix.trainer.telemetry import Telemetry


def train(config: Config, run: Path) -> dict[str, float]:
    """Trains, or continues, the run; returns the test metrics of its best checkpoint. Collective.

    Raises ValueError for what the user can mend: no dataset, another run's directory, a loss that is not finite.
    """
    torch.set_num_threads(config.train.threads)
    set_up_memory()
    dataset = load_dataset(config.data.path)
    with process_group(config.train.device, config.comm.timeout_seconds) as ranks, run_lock(run, ranks):
        start_run(run, config, dataset, ranks)
        model = parallelize(dataset.num_items, config, ranks)
        optimizer = dense_optimizer(model.tower, config.dense)
        done = checkpoint.restore(run, model, optimizer)
        evaluation = Evaluation(config, dataset, ranks) if config.evaluate.every_epochs else None
        done = _steps(config, run, dataset, model, optimizer, done, evaluation)
        speed = {"examples_per_second": done.examples / done.seconds, "seconds": done.seconds}
        results = (_test(run, ranks, evaluation) if evaluation else {"step": done.step}) | speed
        if ranks.rank == 0:
            write_results(run, results)
    return results


def _steps(
    config: Config,
    run: Path,
    dataset: Dataset,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    done: Progress,
    evaluation: Evaluation | None,
) -> Progress:
    """Every step from `done` to the end of the run."""
    ranks, batches, finite = model.ranks, training_batches(config, dataset, model.ranks), _Finite(model)
    total = config.train.epochs * batches.steps_per_epoch
    evaluate_every = (config.evaluate.every_epochs or 1) * batches.steps_per_epoch
    save_every = config.train.checkpoint_every or evaluate_every
    with Telemetry(run, model, done, total) as telemetry, closing(_ahead(batches, model, done.step, total)) as ahead:
        clock, step = telemetry.clock, done.step
        finished = step >= total or _out_of_time(config, done.seconds, ranks)
        with clock("data"):
            upcoming = None if finished else next(ahead)
        model.wire.begin_step(step + 1, sampling=_logged(config, step + 1, total))
        if upcoming:
            with clock("all_to_all"):
                upcoming[1].send_rows()
        while upcoming and not finished:
            step += 1
            log = clock.exact = _logged(config, step, total)
            batch, rows = upcoming
            with clock("data"):
                upcoming = next(ahead, None)
            with clock("all_to_all"):
                row_VD = rows.wait()
                if upcoming and not model.stream:
                    # Its ids are in flight while this batch is trained on.
                    upcoming[1].send_ids()
            with clock("forward"):
                losses = model.loss(row_VD, batch)
                if upcoming:
                    # A CUDA device is busy by now, and sending ids waits for it until these rows are there.
                    upcoming[1].send_ids()
            with clock("backward"):
                model.backward(losses["loss"])
                norm = finite.norm(losses["loss"], row_VD, step)
                if log or ranks.device.type == "cpu":
                    finite.check()
            _set_rates(config, step, model, optimizer)
            finished = step == total or _out_of_time(config, clock.total, ranks)
            with clock("all_to_all"):
                rows.send_gradients()
                sent = model.wire.pop_counts() if log else None
                model.wire.begin_step(step + 1, sampling=_logged(config, step + 1, total))
                rows.apply_gradients(following=upcoming[1] if upcoming and not finished else None)
            with clock("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

            telemetry.advance(step, batch)
            epoch = step / batches.steps_per_epoch
            if sent is not None:
                telemetry.log_training(step, epoch, losses, norm, batch, row_VD.detach(), sent)
            done = Progress(step, clock.total, telemetry.examples)
            evaluating, saving = (finished or step % every == 0 for every in (evaluate_every, save_every))
            if evaluating or saving:
                finite.check()
            if evaluation and evaluating:
                done = replace(done, validation=evaluation("validation", model.tower, model.gather_table()))
                telemetry.log_validation(step, epoch, done.validation)
            if saving or done.validation:
                checkpoint.save(run, model, optimizer, done, config.train.keep)
    return done


def _ahead(
    batches: TrainingBatches, model: ParallelModel, first: int, total: int
) -> Generator[tuple[Batch, RowExchange], None, None]:
    """Batches from number `first` on, with their rows. While one is trained on, a thread makes the next. Closed before
    the last, it ends what the ranks have begun for the batch that it gave."""
    with ThreadPoolExecutor(1, "batches") as thread:
        coming = thread.submit(batches.at, first)
        for step in range(first, total):
            batch = coming.result()
            if step + 1 < total:
                coming = thread.submit(batches.at, step + 1)
            rows = model.row_exchange(batch.id_V)
            try:
                yield model.to_device(batch), rows
            except GeneratorExit:
                with suppress(RuntimeError):
                    rows.abandon()
                raise


def _logged(config: Config, step: int, total: int) -> bool:
    return step % config.train.log_every == 0 or step == total


def _set_rates(config: Config, step: int, model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    rate = min(1.0, step / max(1, config.train.warmup_steps))
    for group in optimizer.param_groups:
        group["lr"] = rate * config.dense.lr
    model.table_optimizer.begin_step(rate)


class _Finite:
    """Stops all ranks where a rank's loss or a gradient is not finite, before anything is saved.

    On CPU, before any weight moves. A CUDA device would have to be waited for, so it is asked only where it is waited
    for anyway: weights may be spoilt by then, and are not saved.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.first = torch.zeros((), dtype=torch.int64, device=model.ranks.device)

    def norm(self, loss: Tensor, rows_VD: Tensor, step: int) -> Tensor:
        """Norm of the dense gradients; takes note of what is not finite."""
        assert rows_VD.grad is not None
        gradients = [parameter.grad for parameter in self.model.tower.parameters() if parameter.grad is not None]
        norm = get_total_norm(gradients)
        spoilt = ~(loss.detach() + norm + rows_VD.grad.sum()).isfinite()
        self.first = torch.where((self.first == 0) & spoilt, step, self.first)
        return norm

    def check(self) -> None:
        """Collective."""
        if step := largest(int(self.first), self.model.ranks):
            raise ValueError(
                f"the loss or a gradient is not finite at step {step}; train another --run with lower --dense.lr and "
                "--tables.lr, or with --train.warmup-steps (what this run has saved is sound)"
            )


def _out_of_time(config: Config, seconds: float, ranks: Ranks) -> bool:
    if config.train.minutes == 0:
        return False
    return agreed(seconds >= config.train.minutes * 60, ranks)


def _test(run: Path, ranks: Ranks, evaluation: Evaluation) -> dict[str, float]:
    """Metrics of the best checkpoint on the test items: computed once, at the end."""
    best = checkpoint.load_offline(run, ranks=ranks)
    return evaluation("test", best.tower.to(ranks.device), best.item_XD) | {"step": best.step}


def training_batches(config: Config, dataset: Dataset, ranks: Ranks) -> TrainingBatches:
    """This rank's part of the batches that the configuration asks for."""
    return TrainingBatches(
        dataset,
        batch_size=config.train.batch_size,
        max_length=config.model.encoder.max_length,
        negatives=config.model.loss.negatives,
        share=config.model.loss.share,
        seed=config.train.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
