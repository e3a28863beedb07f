"""The training loop: restore; for each step: loss, backward, apply, log, evaluate, save."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from logitmix.comm.collectives import on_all_ranks, on_first_rank, on_first_rank_at_length
from logitmix.comm.process_group import Ranks, process_group
from logitmix.common.mappings import counted
from logitmix.common.messages import say
from logitmix.common.storage import fetch_run, place_of
from logitmix.launch.processes import Stopped, end_lost, require_threads
from logitmix.modules.config import sees_times
from logitmix.serving.directory.format import MANIFEST
from logitmix.trainer.config import Config, model_schema
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.limited import held_out, limited, said_of_limit, within
from logitmix.trainer.data.negatives import ExplicitNegatives
from logitmix.trainer.data.targets import target_weights
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.evaluation.seen import Seen
from logitmix.trainer.logs.logger import Logger
from logitmix.trainer.logs.loggers import Loggers
from logitmix.trainer.logs.projector import write_projector
from logitmix.trainer.logs.telemetry import Telemetry, doubtful_settings, start_block
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.parallelize import ParallelModel, parallelize
from logitmix.trainer.run import checkpoint
from logitmix.trainer.run.agreement import facts_of
from logitmix.trainer.run.folder import (
    checkpoint_paths,
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
from logitmix.trainer.run.saving import GOES_ON, Saver, or_continue, prune
from logitmix.trainer.run.stages import ONE_STEP, better_start, epochs_of_refit, own_minutes, refit_config, source_of
from logitmix.trainer.run.warm_start import require_fit, warm_start
from logitmix.trainer.step.memory import give_back, set_up_memory
from logitmix.trainer.step.pipeline import Pipeline
from logitmix.trainer.step.precision import choose_precision
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
        dataset = limited(config, job.dataset)
        seen = _seen(run, config, job.dataset, ranks)
        batches = training_batches(config, dataset, ranks, seen)
        of_negatives = on_first_rank_at_length(batches.said_of_explicit, ranks)
        config, why = choose_precision(config, run, batches, ranks)
        if line := start_run(run, config, dataset, ranks):
            job.say(line)
        model = parallelize(dataset.schema, config, ranks, restored=begun)
        of_items = said_of_limit(config, dataset) if ranks.rank == 0 else ""
        said = start_block(dataset, model, why, batches.left_out, batches.places, of_negatives, of_items)
        said = "\n".join([said, *doubtful_settings(config, len(batches.user_S), dataset.num_items)])
        job.say(said)
        if ranks.rank == 0:
            write_plan(run, model.plan)
        optimizer = dense_optimizer(model.tower, config.dense)
        done = checkpoint.restore(run, model, optimizer)
        prune(run, model)
        or_continue(lambda: upload_run(run, ranks), config, ranks, GOES_ON)
        if not begun and (source := source_of(run, config)):
            if seen:
                job.say(on_first_rank_at_length(partial(_said_of_seen, seen, config, batches), ranks))
            job.say(
                warm_start(source, dataset, model, optimizer, seen.earlier)
                if seen
                else warm_start(source, dataset, model)
            )
        # It holds the earlier dataset.
        del seen
        evaluation = Evaluation(config, dataset, ranks, job.stopping.check) if config.evaluate.every_epochs else None
        # Before hours of training, too.
        foreseen = evaluation.cold_targets("test") if evaluation and config.data.split == "time" else 0.0
        if line := cold_targets({"targets/cold": foreseen}):
            job.say(f"test part: {line}")
        give_back()
        with Loggers(run, config, dataset, done, ranks, job.callbacks) as loggers:
            loggers.text("start", said)
            done = _steps(run, batches, model, optimizer, done, evaluation, job.stopping, loggers)
            # A checkpoint that somebody has edited may say that it took no time.
            speed = {"examples_per_second": done.examples / max(done.step_seconds, 1e-6), "seconds": done.seconds}
            results = (_test(run, model, evaluation, loggers) if evaluation else {"step": done.step}) | speed
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


def _seen(run: Path, config: Config, dataset: Dataset, ranks: Ranks) -> Seen | None:
    """What the run was trained on from which this one goes on, if it does. Collective."""
    if not config.continues or not (source := source_of(run, config)):
        return None
    found: list[Seen] = []
    on_all_ranks(lambda: found.append(Seen(source, dataset)), ranks)
    return found[0]


def _said_of_seen(seen: Seen, config: Config, batches: TrainingBatches) -> str:
    """ValueError if the earlier run was trained on what is held out now."""
    unseen = seen.require_unseen(held_out(config, seen.dataset))
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


def _steps(
    run: Path,
    batches: TrainingBatches,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    done: RunProgress,
    evaluation: Evaluation | None,
    stopping: Stopping,
    loggers: Loggers,
) -> RunProgress:
    """Trains all steps from `done` to the end of the run. Raises Stopped after a step that is saved."""
    config = model.config
    total, last, evaluate_every = (
        max(1, round(epochs * batches.steps_per_epoch))
        for epochs in (
            config.train.epochs,
            config.train.stop_after_epochs or config.train.epochs,
            config.evaluate.every_epochs or 1,
        )
    )
    save_every = config.train.checkpoint_every or evaluate_every
    minutes = on_first_rank(lambda: own_minutes(run, config), model.ranks)
    with (
        Telemetry(run, model, loggers, done, last, minutes) as telemetry,
        Pipeline(model, optimizer, batches.at, total, done, minutes) as pipeline,
        Saver(run, model, optimizer, stopping.progressed) as saver,
    ):
        finished = pipeline.step >= last or pipeline.out_of_time()
        # What a run starts from may be better than all that it trains. A later step is due if a signal ended the job
        # before it was evaluated; without a validation part, it may have been.
        due = (finished or done.step % evaluate_every == 0) if done.step else bool(config.warm_start or config.first)
        if due and evaluation and not done.validation and (config.data.validation or config.evaluate.peek_test):
            done = _evaluated(pipeline, evaluation, telemetry, done.step / batches.steps_per_epoch)
            if done.validation:
                saver.save(done)
            finished = finished or pipeline.out_of_time()
        # There is a checkpoint to test.
        finished = finished and bool(done.step or done.validation)
        if finished:
            over = "" if done.step >= last else ", and train.minutes are over"
            telemetry.say(f"nothing is left to train: {done.step:,} of {last:,} steps are done{over}")
        finished = finished or _out_of_patience(run, model, telemetry)
        while not finished:
            pipeline.receive_rows()
            pipeline.loss()
            pipeline.backward()
            pipeline.check_gradients()
            saver.poll()
            stopped = stopping.agreed()
            finished = pipeline.step == last or pipeline.out_of_time()
            step, epoch = pipeline.step, pipeline.step / batches.steps_per_epoch
            evaluating, saving = (finished or step % every == 0 for every in (evaluate_every, save_every))
            due = evaluating or saving or stopped
            pipeline.apply_gradients(prefetch=not (finished or stopped), settle=due)

            for skip in pipeline.skips:
                telemetry.log_skipped(skip, batches.users_of(skip.step - 1))
            telemetry.log_step(pipeline, epoch)
            if due:
                done = pipeline.progress
                if evaluation and evaluating and not stopped:
                    with suppress(Stopped):
                        done = _evaluated(pipeline, evaluation, telemetry, epoch)
                        finished = finished or pipeline.out_of_time() or _out_of_patience(run, model, telemetry)
                    stopped = stopping.agreed()
                if saving or done.validation or stopped:
                    saved = saver.save(done, wait=finished or stopped)
            if stopped:
                said = "is saved" if saved else "could not be saved"
                raise Stopped(f"stopped by {stopping.why} after step {step:,}, which {said} in {place_of(run)}")
        if telemetry.main and (line := still_rising(run, config.evaluate.metric)):
            telemetry.say(line)
    return done


def _evaluated(pipeline: Pipeline, evaluation: Evaluation, telemetry: Telemetry, epoch: float) -> RunProgress:
    """The progress after this step, with its metrics on validation, if there is a validation part. Collective."""
    model, config, began = pipeline.model, pipeline.model.config, pipeline.clock.elapsed
    validation: dict[str, float] = {}
    if config.evaluate.peek_test:
        peeked = evaluation("test", *model.evaluated())
        telemetry.log_evaluation("peeked", pipeline.step, epoch, peeked)
    if config.data.validation:
        validation = evaluation("validation", *model.evaluated())
        telemetry.log_evaluation("validation", pipeline.step, epoch, validation)
    pipeline.reserve(pipeline.clock.elapsed - began)
    # The progress then has the time of the slowest rank.
    pipeline.out_of_time()
    return replace(pipeline.progress, validation=validation)


def _out_of_patience(run: Path, model: ParallelModel, telemetry: Telemetry) -> bool:
    """Whether none of the last train.patience evaluations was better than the best before them. Rank 0 reads this from
    the run's rows, so a resumed run decides as an uninterrupted one. Collective."""
    patience, metric = model.config.train.patience, model.config.evaluate.metric
    if patience == 0:
        return False
    since, best = on_first_rank(lambda: evaluations_since_best(run, metric), model.ranks)
    if since < patience:
        return False
    telemetry.say(
        f"training ends: {since} evaluations without a better validation {metric} than {best[metric]:.4f} at step "
        f"{best['step']} (train.patience {patience})"
    )
    return True


def _test(run: Path, model: ParallelModel, evaluation: Evaluation, loggers: Loggers) -> dict[str, float]:
    """Metrics of the best checkpoint on the test items, and those beside them: computed once, at the end, and logged.
    The run's best checkpoint is loaded into the model, also where that of its start is better and tested."""
    config, ranks = model.config, model.ranks
    step = checkpoint.restore_best(run, model)
    line = on_first_rank(lambda: better_start(run, config), ranks)
    if line:
        step, metrics = 0, on_first_rank(lambda: take_results(start_path(run), run), ranks)
    else:
        metrics, rank_U = evaluation.with_ranks("test", *model.evaluated())
        if ranks.rank == 0:
            write_ranks(run, rank_U, evaluation.raw_users("test"))
        if step == 0:
            line = (
                f"no step of training is better in validation {config.evaluate.metric} than the start: the model as it "
                "began (step 0) is tested, exported and refitted"
            )
    if line and ranks.rank == 0:
        say(line)
        loggers.text("test", line)
    beside = evaluation.baselines("test")
    if config.evaluate.peek_test:
        beside |= on_first_rank(lambda: peeked_best(run, config.evaluate.metric), ranks)
    loggers.row("test", step, metrics | beside)
    return metrics | beside | {"step": step}


def training_batches(config: Config, dataset: Dataset, ranks: Ranks, seen: Seen | None = None) -> TrainingBatches:
    """This rank's part of the configured batches, which begin with what is new besides the `seen`."""
    schema, of_whole = model_schema(dataset.schema, config), held_out(config, dataset.whole or dataset)
    held = within(of_whole, dataset)
    return TrainingBatches(
        dataset,
        schema,
        batch_size=config.train.batch_size,
        max_length=config.model.encoder.max_length,
        stride=config.train.stride,
        negatives=config.model.loss.negatives,
        share=config.model.loss.share,
        group_positions=config.model.loss.group_positions,
        in_batch=config.model.loss.in_batch,
        held_out=held,
        explicit=ExplicitNegatives(dataset, names, held.places) if (names := config.data.negatives) else None,
        weights=target_weights(dataset, config.data.weight, held.places),
        first_U=seen.users_with_new(of_whole) if seen else None,
        seed=config.train.seed,
        item_id_dropout=config.model.item_id_dropout,
        user_id_dropout=config.model.user_id_dropout,
        wanted=config.model.wanted,
        wanted_dropout=config.model.wanted_dropout,
        pooled=[table.name for table in schema.tables if config.tables.of(table.name).pooled],
        times=sees_times(config.model.encoder, schema),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
