"""The runs of a run: the one that is trained first (`[start]`), the run itself, and its refit."""

import math
from dataclasses import replace
from pathlib import Path

from logitmix.common.storage import fetch_run, place_of
from logitmix.trainer.config import Config, with_settings, with_start
from logitmix.trainer.run.folder import read_config, recorded_dataset, refit_path, start_path
from logitmix.trainer.run.metrics import evaluations_since_best, read_rows
from logitmix.trainer.run.results import START_STEP, read_results

ONE_STEP = 1e-6
"""Epochs of a refit of a run whose best checkpoint is that before its first step: a run has at least one step."""


def chosen_run(run: Path) -> Path:
    """Returns the run that has the checkpoint which was chosen on validation for a finished run: the run itself, or the
    run that was trained first, if none of the run's own checkpoints is as good.

    Raises:
        ValueError: The run that was trained first is gone, but its checkpoint was chosen.
    """
    start = start_path(run)
    if not (run / "results.json").is_file() or not read_config(run).first or START_STEP not in read_results(run):
        return run
    if not (start / "config.toml").is_file():
        raise ValueError(f"{start} is gone, whose checkpoint is better on validation than those of {run}; restore it")
    return start


def better_start(run: Path, config: Config) -> str:
    """Returns one line if the run that was trained first is better on validation than every checkpoint of a run, and
    else nothing. Figures of other users, or by other rules, are not compared.

    Raises:
        ValueError: As `chosen_run` does.
    """
    start, metric = start_path(run), config.evaluate.metric
    if not config.first or (chosen_run(run) == run and not (start / "config.toml").is_file()):
        return ""
    rules = read_config(start).evaluate
    if any(getattr(rules, name) != getattr(config.evaluate, name) for name in ("exclude_history", "users", "want")):
        return ""
    _, own = evaluations_since_best(run, metric)
    _, first = evaluations_since_best(start, rules.metric)
    if not own or not first or own[metric] >= first[metric]:
        return ""
    return (
        f"the start is better: validation {metric} is {first[metric]:.4f} in {start}, and at best {own[metric]:.4f} "
        f"here (step {own['step']:,}); its checkpoint, of step {first['step']:,}, is tested, exported and refitted"
    )


def final_run(run: Path) -> Path:
    """The run whose model is to be used: the refit of a run, if there is one, or else that of `chosen_run`. ValueError
    if the refit is not finished, or if the run has been trained on and another epoch is the best since."""
    refit = refit_path(run)
    if not (refit / "config.toml").is_file():
        return chosen_run(run)
    epochs_of_refit(run)
    if not (refit / "results.json").is_file():
        raise ValueError(f"{refit} is not finished: go on with `logitmix train --refit {run}`, or remove it")
    return refit


def epochs_of_refit(run: Path) -> float:
    """The epochs after which the run that `chosen_run` returns was best on validation, ONE_STEP if that was before its
    first step. ValueError if it was not evaluated there, and if there is a refit of other epochs, of another model or
    dataset."""
    chosen, refit = chosen_run(run), refit_path(run)
    config = read_config(chosen)
    _, best = evaluations_since_best(chosen, config.evaluate.metric)
    if not best:
        raise ValueError(f"{run} was never evaluated on validation; train it first, with evaluate.every_epochs")
    epochs = float(best["epoch"]) or ONE_STEP
    if (refit / "config.toml").is_file():
        before = read_config(refit)
        anew = f"remove {refit}, then `logitmix train --refit {run}` trains it anew"
        if (was := before.train.stop_after_epochs) != epochs:
            raise ValueError(f"{refit} is a refit of {was:g} epochs, but {run} is now best after {epochs:g}; {anew}")
        if (before.model, recorded_dataset(refit)) != (config.model, recorded_dataset(run)):
            raise ValueError(f"{refit} is a refit of what {run} was before, of another model or dataset; {anew}")
    return epochs


def refit_config(run: Path, epochs: float) -> Config:
    """The settings of the refit of a run whose best checkpoint was that after these epochs: the learning rates of the
    run that `chosen_run` returns, without its limits of time and patience. If another run is trained first, the refit
    of that one is trained first, too. A warm start is taken from the refit of the run that it names, if there is one.
    ValueError if that refit is not finished."""
    run = chosen_run(run)
    config = read_config(run)
    refit = _without_validation(config, run, epochs)
    if first := config.first:
        # As it was trained, but for what may have changed since.
        path, trained = start_path(run), read_config(start_path(run)).train
        train = replace(first.train, epochs=trained.epochs, minutes=trained.minutes, precision=trained.precision)
        first = _without_validation(replace(first, train=train), path, epochs_of_refit(path))
        # Said even where they are those of the run itself, which may be trained on.
        return with_settings(with_start(refit, first), {"start.train.epochs": first.train.epochs})
    return replace(refit, warm_start=place_of(final_run(fetch_run(config.warm_start))) if config.warm_start else "")


def _without_validation(config: Config, run: Path, epochs: float) -> Config:
    # With constant rates, train.epochs may be fewer by now.
    most = max(epochs, _epochs_of_schedule(run, config))
    train = replace(config.train, refit=False, minutes=0.0, patience=0, stop_after_epochs=epochs, epochs=most)
    return replace(config, data=replace(config.data, validation=False), train=train, start={})


def source_of(run: Path, config: Config) -> Path | None:
    """The run whose weights a run with these settings starts from; None if it starts from random ones."""
    if config.warm_start:
        return chosen_run(fetch_run(config.warm_start))
    return start_path(run) if config.first else None


def own_minutes(run: Path, config: Config) -> float:
    """What is left of train.minutes by the run that is trained first; infinity without a limit. ValueError if that run
    is gone."""
    start = start_path(run)
    if not config.train.minutes:
        return math.inf
    if not config.first:
        return config.train.minutes
    if not (start / "results.json").is_file():
        raise ValueError(f"{start} is gone, whose results say how much of train.minutes is left for {run}; restore it")
    return max(0.0, config.train.minutes - read_results(start)["seconds"] / 60)


def _epochs_of_schedule(run: Path, config: Config) -> float:
    """The epochs over which a run's learning rates fell: all, or those that there was time for."""
    epochs, minutes = config.train.epochs, own_minutes(run, config)
    if minutes == math.inf or not (run / "results.json").exists():
        return epochs
    done, seconds = max(row["epoch"] for row in read_rows(run) if "epoch" in row), read_results(run)["seconds"]
    return min(epochs, math.ceil(done * max(1.0, minutes * 60 / seconds)))
