"""The training loop: restore; for each step: loss, backward, apply, log, evaluate, save."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from logitmix.comm.collectives import agreed, on_first_rank, on_first_rank_at_length, own_result
from logitmix.comm.process_group import Ranks, process_group
from logitmix.common.mappings import counted
from logitmix.common.messages import say
from logitmix.common.storage import fetch_run, place_of
from logitmix.launch.processes import Stopped, end_lost, require_threads
from logitmix.modules.schema import Schema
from logitmix.serving.directory.format import MANIFEST
from logitmix.trainer.config import Config, flatten, model_schema
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.limited import held_out, limited, said_of_limit, within
from logitmix.trainer.data.negatives import ExplicitNegatives
from logitmix.trainer.data.targets import said_of_targets, target_weights
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.evaluation.seen import Seen
from logitmix.trainer.logs.logger import Logger
from logitmix.trainer.logs.loggers import Loggers
from logitmix.trainer.logs.projector import write_projector
from logitmix.trainer.logs.telemetry import Telemetry, start_block
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.parallelize import ParallelModel, automatic_precision, computes_bf16, parallelize
from logitmix.trainer.run import checkpoint
from logitmix.trainer.run.agreement import facts_of
from logitmix.trainer.run.folder import (
    checkpoint_paths,
    read_config,
    refit_path,
    require_same,
    run_lock,
    start_path,
    start_run,
    upload_run,
    write_plan,
)
from logitmix.trainer.run.metrics import RunProgress, evaluations_since_best, peeked_best, still_rising
from logitmix.trainer.run.results import beside_baselines, cold_targets, take_results, write_ranks, write_results
from logitmix.trainer.run.saving import GOES_ON, Saver, or_continue, remove_others
from logitmix.trainer.run.stages import ONE_STEP, better_start, epochs_of_refit, own_minutes, refit_config, source_of
from logitmix.trainer.run.warm_start import require_fit, warm_start
from logitmix.trainer.step.memory import give_back, set_up_memory
from logitmix.trainer.step.pipeline import Pipeline
from logitmix.trainer.stopping import Stopping


class Job(NamedTuple):
    """What the runs of a job have in common: the one that is trained first, the run itself and its refit."""

    dataset: Dataset
    ranks: Ranks
    stopping: Stopping
    callbacks: Sequence[Logger] = ()
    """Loggers in addition to those of train.loggers."""

    def say(self, line: str) -> None:
        if self.ranks.rank == 0:
            say(line)


def train(config: Config, run: Path, callbacks: Sequence[Logger] = ()) -> dict[str, float]:
    """Trains or resumes the run, and with train.refit its refit; returns the test metrics of the best checkpoint, or of
    the refit. `callbacks` as in Job. Collective. Raises ValueError for a user's mistake (no dataset, another run's
    directory) and for a loss that is not finite; Stopped once a signal has ended it, and what was done is saved.
    """
    require_threads("train.threads", config.train.threads)
    torch.set_num_threads(config.train.threads)
    set_up_memory()
    fetch_run(run)
    dataset = load_dataset(config.data.path)
    require_apart(run, dataset, "run")
    facts = facts_of("train", config, dataset)
    seconds = config.comm.timeout_seconds
    with (
        process_group(config.train.device, seconds, facts, end_lost) as ranks,
        Stopping(ranks, config.train.stop_seconds) as stopping,
    ):
        job = Job(dataset, ranks, stopping, callbacks)
        results = train_run(config, run, job)
        return _refit(run, job) if config.train.refit else results


def require_apart(path: Path, dataset: Dataset, flag: str) -> None:
    """ValueError for what would be written into the dataset's directory, or into an export."""
    if (path / MANIFEST).is_file():
        raise ValueError(f"{path} is an export; give another --{flag}")
    if dataset.path.resolve() in (path.resolve(), *path.resolve().parents):
        raise ValueError(
            f"{path} is in the dataset directory {dataset.path}, which may be replaced; give another --{flag}"
        )


def _refit(run: Path, job: Job) -> dict[str, float]:
    """Trains or resumes the refit of a run. Collective. ValueError as of `epochs_of_refit`."""
    # The run may have ended while a signal was on its way.
    job.stopping.check()

    def begin() -> Config:
        epochs = epochs_of_refit(run)
        of = "one step, as no later one was better than the start" if epochs == ONE_STEP else counted(epochs, "epoch")
        say(f"refit of {of}, on the validation actions too: {refit_path(run)}")
        return refit_config(run, epochs)

    return train_run(on_first_rank_at_length(begin, job.ranks), refit_path(run), job)


def train_run(config: Config, run: Path, job: Job) -> dict[str, float]:
    """Trains or resumes a run, without its refit, after the run that it starts from; returns the test metrics of its
    best checkpoint. Collective; raises Stopped as `train` does."""
    ranks = job.ranks
    with run_lock(run, ranks):
        begun = on_first_rank(lambda: bool(checkpoint_paths(run)), ranks)
        if not begun and (run / "results.json").is_file():
            job.say(f"{run} has results, but no checkpoint: it is trained anew")
        if (first := config.first) and not begun:
            _train_first(first, config, run, job)
        dataset = limited(config.data, job.dataset)
        seen = None
        if config.continues and (earlier := source_of(run, config)):
            seen = own_result(partial(Seen, earlier, job.dataset), ranks)
        batches = training_batches(config, dataset, ranks, seen)
        of_data = {
            "targets": said_of_targets(dataset, batches.places, config.data, config.model.features),
            "items": said_of_limit(config.data, dataset) if ranks.rank == 0 else "",
            "negatives": on_first_rank_at_length(batches.said_of_explicit, ranks),
            "histories": batches.said_of_left_out,
        }
        if config.train.precision == "auto":
            has_bf16 = not agreed(not computes_bf16(ranks.device), ranks)
            precision: Literal["auto", "bf16", "fp32"]
            precision = automatic_precision(config.model, ranks.device.type, has_bf16)
            if begun:
                precision = on_first_rank(lambda: read_config(run).train.precision, ranks)
            config = replace(config, train=replace(config.train, precision=precision))
        if line := start_run(run, config, dataset, ranks):
            job.say(line)
        model = parallel_model(config, dataset.schema, ranks, restored=begun)
        said = start_block(dataset, model, of_data)
        job.say(said)
        if ranks.rank == 0:
            write_plan(run, model.plan)
        optimizer = dense_optimizer(model.tower, config.dense)
        done = checkpoint.restore(run, config, model, optimizer)
        # A job that was killed may not have done it. Damaged ones are set aside by now.
        or_continue(lambda: on_first_rank(lambda: remove_others(run, config), ranks), config, ranks)
        or_continue(lambda: upload_run(run, ranks), config, ranks, GOES_ON)
        if not begun and (source := source_of(run, config)):
            if seen:
                job.say(on_first_rank_at_length(partial(_said_of_seen, seen, config, batches), ranks))
            goes_on = (optimizer, seen.earlier) if seen else ()
            job.say(warm_start(source, config, dataset, model, *goes_on))
        # It holds the earlier dataset.
        del seen
        evaluation = None
        if config.evaluate.every_epochs:
            evaluation = Evaluation(config.evaluate, config.data, config.model, dataset, ranks, job.stopping.check)
        # Before hours of training, too.
        foreseen = evaluation.cold_targets("test") if evaluation and config.data.split == "time" else 0.0
        if line := cold_targets({"targets/cold": foreseen}):
            job.say(f"test part: {line}")
        give_back()
        with Loggers(run, flatten(config), dataset, done, ranks, job.callbacks) as loggers:
            loggers.text("start", said)
            training = _Training(run, config, job, batches, model, optimizer, evaluation, loggers)
            done = training.steps(done)
            results = training.tested() if evaluation else {"step": done.step}
            # A checkpoint that somebody has edited may say that it took no time.
            speed = {"examples_per_second": done.examples / max(done.step_seconds, 1e-6), "seconds": done.seconds}
            results |= speed
            if config.train.projector:
                write_projector(run, dataset, model)
            for line in filter(None, (beside_baselines(results), cold_targets(results))):
                job.say(f"test: {line}")
                loggers.text("test", line)
            if ranks.rank == 0:
                write_results(run, results)
            loggers.end(results)
        finished = "the run is finished there, and the same command uploads it"
        or_continue(lambda: upload_run(run, ranks), config, ranks, finished)
    return results


def _said_of_seen(seen: Seen, config: Config, batches: TrainingBatches) -> str:
    """ValueError if the earlier run was trained on what is held out now."""
    unseen = seen.require_unseen(held_out(config.data, seen.dataset))
    epochs = batches.steps_of_first / batches.steps_per_epoch
    if not epochs:
        return f"{seen.said}; {unseen}\nno user has new actions: --data.path gives a dataset that has grown"
    return (
        f"{seen.said}; {unseen}\nthe first {batches.steps_of_first:,} of an epoch's {batches.steps_per_epoch:,} steps "
        f"have all users with new actions: --train.epochs {epochs:.3g} trains on no others"
    )


def _train_first(first: Config, config: Config, run: Path, job: Job) -> None:
    """Trains or resumes the run that gives another one its initial weights. Collective. ValueError before anything is
    trained if they would not fit."""
    dataset, ranks, path = job.dataset, job.ranks, start_path(run)
    require_fit(first, config, dataset.schema)
    if on_first_rank(lambda: bool(checkpoint_paths(path)), ranks):
        if "precision" not in config.start.get("train", {}):
            # The run itself may have chosen another precision since; auto keeps that which the first run began with.
            first = replace(first, train=replace(first.train, precision="auto"))
        # Before the run's own files are replaced.
        on_first_rank(partial(require_same, path, first, dataset), ranks)
    # Until it is finished, these files show that there is a run.
    start_run(run, config, dataset, ranks)
    or_continue(lambda: upload_run(run, ranks), config, ranks, GOES_ON)
    job.say(f"first, the run that gives the initial weights: {path}")
    train_run(first, path, job)
    job.stopping.check()


@dataclass(frozen=True)
class _Training:
    """A run that is ready to train."""

    run: Path
    config: Config
    job: Job
    batches: TrainingBatches
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    evaluation: Evaluation | None
    loggers: Loggers

    def steps(self, done: RunProgress) -> RunProgress:
        """Trains all steps from `done` to the end of the run. Raises Stopped after a step that is saved. Collective."""
        run, config, batches, evaluation, stopping = (
            self.run,
            self.config,
            self.batches,
            self.evaluation,
            self.job.stopping,
        )
        total, last, evaluate_every = (
            max(1, round(epochs * batches.steps_per_epoch))
            for epochs in (
                config.train.epochs,
                config.train.stop_after_epochs or config.train.epochs,
                config.evaluate.every_epochs or 1,
            )
        )
        save_every = config.train.checkpoint_every or evaluate_every
        minutes = on_first_rank(lambda: own_minutes(run, config), self.job.ranks)
        with (
            Telemetry(run, self.model, self.loggers, done, last, minutes) as telemetry,
            Pipeline(self.model, self.optimizer, batches, total, done, minutes) as pipeline,
            Saver(run, config, self.model, self.optimizer, stopping.progressed) as saver,
        ):
            finished = pipeline.step >= last or pipeline.out_of_time()
            # What a run starts from may be better than all that it trains. A later step is due if a signal ended the
            # job before it was evaluated; without a validation part, it may have been.
            due = (
                (finished or done.step % evaluate_every == 0) if done.step else bool(config.warm_start or config.first)
            )
            if due and evaluation and not done.validation and (config.data.validation or config.evaluate.peek_test):
                done = self._evaluated(evaluation, pipeline, telemetry)
                if done.validation:
                    saver.save(done)
                finished = finished or pipeline.out_of_time()
            # There is a checkpoint to test.
            finished = finished and bool(done.step or done.validation)
            if finished:
                over = "" if done.step >= last else ", and train.minutes are over"
                telemetry.say(f"nothing is left to train: {done.step:,} of {last:,} steps are done{over}")
            finished = finished or self._out_of_patience(telemetry)
            while not finished:
                pipeline.receive_rows()
                pipeline.loss()
                pipeline.backward()
                pipeline.check_gradients()
                saver.poll()
                stopped = stopping.agreed()
                finished = pipeline.step == last or pipeline.out_of_time()
                evaluating, saving = (finished or pipeline.step % every == 0 for every in (evaluate_every, save_every))
                due = evaluating or saving or stopped
                pipeline.apply_gradients(prefetch=not (finished or stopped), settle=due)

                for skip in pipeline.skips:
                    telemetry.log_skipped(skip, batches.users_of(skip.step - 1))
                telemetry.log_step(pipeline, pipeline.step / batches.steps_per_epoch)
                if due:
                    done = pipeline.progress
                    if evaluation and evaluating and not stopped:
                        with suppress(Stopped):
                            done = self._evaluated(evaluation, pipeline, telemetry)
                            finished = finished or pipeline.out_of_time() or self._out_of_patience(telemetry)
                        stopped = stopping.agreed()
                    if saving or done.validation or stopped:
                        saved = saver.save(done, wait=finished or stopped)
                if stopped:
                    said = f"after step {done.step:,}, which {'is saved' if saved else 'could not be saved'}"
                    raise Stopped(f"stopped by {stopping.why} {said} in {place_of(run)}")
            if telemetry.main and (line := still_rising(run, config.evaluate.metric)):
                telemetry.say(line)
        return done

    def _evaluated(self, evaluation: Evaluation, pipeline: Pipeline, telemetry: Telemetry) -> RunProgress:
        """Returns the progress after this step, with its metrics on validation, if there is a validation part.
        Collective."""
        epoch, began = pipeline.step / self.batches.steps_per_epoch, pipeline.clock.elapsed
        validation: dict[str, float] = {}
        if self.config.evaluate.peek_test:
            peeked = evaluation("test", *self.model.evaluated())
            telemetry.log_evaluation("peeked", pipeline.step, epoch, peeked)
        if self.config.data.validation:
            validation = evaluation("validation", *self.model.evaluated())
            telemetry.log_evaluation("validation", pipeline.step, epoch, validation)
        pipeline.reserve(pipeline.clock.elapsed - began)
        # The progress then has the time of the slowest rank.
        pipeline.out_of_time()
        return replace(pipeline.progress, validation=validation)

    def _out_of_patience(self, telemetry: Telemetry) -> bool:
        """Returns whether none of the last train.patience evaluations was better than the best before them. Rank 0
        reads this from the run's rows, so a resumed run decides as an uninterrupted one. Collective."""
        patience, metric = self.config.train.patience, self.config.evaluate.metric
        if patience == 0:
            return False
        since, best = on_first_rank(lambda: evaluations_since_best(self.run, metric), self.job.ranks)
        if since < patience:
            return False
        telemetry.say(
            f"training ends: {since} evaluations without a better validation {metric} than {best[metric]:.4f} at step "
            f"{best['step']} (train.patience {patience})"
        )
        return True

    def tested(self) -> dict[str, float]:
        """Returns the metrics of the best checkpoint on the test items, and those beside them: computed once, at the
        end, and logged. The run's best checkpoint is loaded into the model, even if that of its start is better and
        tested. Collective."""
        run, config, ranks, evaluation = self.run, self.config, self.job.ranks, self.evaluation
        assert evaluation
        step = checkpoint.restore_best(run, config, self.model)
        line = on_first_rank(lambda: better_start(run, config), ranks)
        if line:
            step, metrics = 0, on_first_rank(lambda: take_results(start_path(run), run), ranks)
        else:
            metrics, rank_U = evaluation.with_ranks("test", *self.model.evaluated())
            if ranks.rank == 0:
                write_ranks(run, rank_U, evaluation.raw_users("test"))
            if step == 0:
                line = (
                    f"no step of training is better in validation {config.evaluate.metric} than the start: the model "
                    "as it began (step 0) is tested, exported and refitted"
                )
        if line:
            self.job.say(line)
            self.loggers.text("test", line)
        metrics |= evaluation.baselines("test")
        if config.evaluate.peek_test:
            metrics |= on_first_rank(lambda: peeked_best(run, config.evaluate.metric), ranks)
        self.loggers.row("test", step, metrics)
        return metrics | {"step": step}


def parallel_model(config: Config, schema: Schema, ranks: Ranks, restored: bool = False) -> ParallelModel:
    """Returns the configured model of a dataset with this schema, divided among the ranks, as `parallelize` makes
    it."""
    used = model_schema(schema, config)
    return parallelize(used, config.model, config.tables, config.comm, config.train, ranks, restored)


def training_batches(config: Config, dataset: Dataset, ranks: Ranks, seen: Seen | None = None) -> TrainingBatches:
    """This rank's part of the configured batches, which begin with what is new besides the `seen`."""
    schema, of_whole = model_schema(dataset.schema, config), held_out(config.data, dataset.whole or dataset)
    held = within(of_whole, dataset)
    names = config.data.negatives
    return TrainingBatches(
        dataset,
        schema,
        config.model,
        config.train,
        held,
        explicit=ExplicitNegatives(dataset, names, held.places) if names else None,
        weights=target_weights(dataset, config.data.weight, held.places),
        first_U=seen.users_with_new(of_whole) if seen else None,
        pooled=[table.name for table in schema.tables if config.tables.of(table.name).pooled],
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
