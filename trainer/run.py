"""The run directory: its lock, its settings and dataset, and its rows of metrics.

config.toml       the resolved configuration
dataset.json      that of the dataset it was started with
plan.json         by table: size, sharding, and which rank holds which of its rows and columns
metrics.jsonl     one JSON object a line: kind ("train", "validation" or "peeked"), step, and the metrics of that step;
                  of kind "skipped", a step whose loss or gradients were not finite, the rank, and the batch's users
tensorboard/      the same as curves, the configuration as text; with train.projector, embeddings of items
profile/          with train.profile, a Chrome trace of some steps
digests.json      kind; bytes and SHA-256 of config.toml, dataset.json, results.json, test_ranks.json and
                  test_users.json as they were written, and of metrics.jsonl as it was at the last checkpoint: rows may
                  follow
checkpoints/step-N/
results.json      test metrics of the best checkpoint; written once, at the end
test_ranks.json   rank of each user's target in that test
test_users.json   raw ids of these users, in the same order
start/            where the settings have a section [start], the run that was trained first
refit/            with train.refit, the run that then trained on the validation actions too
logs/             under torchx, what each process of each job has said: JOB/attempt_N/RANK/stderr.log and stdout.log
.lock             held by the job that trains
"""

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from logitmix.comm.collectives import broadcast_object, on_all_ranks, on_first_rank, on_first_rank_at_length
from logitmix.comm.process_group import Ranks
from logitmix.comm.rendezvous import ranks_named
from logitmix.common.files import (
    Fields,
    clean_up,
    fits_digest,
    naming,
    parse_json,
    read_json,
    require_file,
    require_numbers,
    staging_path,
    sync,
    with_digest,
    write_whole,
)
from logitmix.common.mappings import brief, from_mapping, require
from logitmix.common.storage import fetched_run, is_copy, push, shown
from logitmix.modules.schema import Schema
from logitmix.trainer.config import BASELINES, Config, dump_toml, flatten, load_toml, with_settings, with_start
from logitmix.trainer.data.dataset import Dataset

DIGESTS = "digests.json"
KIND = "digests of a logitmix run's files"
NOTED = ("config.toml", "dataset.json", "results.json", "test_ranks.json", "test_users.json")
"""Files that have a digest from when they are written."""
ROWS = "metrics.jsonl"
LOOKS, LOOK_SECONDS = 5, 0.05
"""How often a job tries to lock its run, and the time in between."""
MARK_SECONDS = 3.0
"""In which a new file is seen on all hosts that share a directory."""
EVALUATIONS = ("validation", "peeked")
"""Kinds of rows."""
MAY_CHANGE = {
    "train.epochs", "train.minutes", "train.patience", "train.threads", "train.device", "train.log_every",
    "train.checkpoint_every", "train.keep", "train.projector", "train.profile", "comm.timeout_seconds", "data.path",
    "train.refit", "train.save_in_background", "train.on_damage", "train.on_save_failure", "train.stop_seconds",
    "evaluate.baselines",
}  # fmt: skip
"""Settings that may differ when a run is resumed; epochs and minutes only if the schedule does not depend on them."""


@dataclass(frozen=True)
class RunProgress:
    """A run's progress: steps done, seconds spent in them, examples (positions) seen, validation metrics at this step
    (if it was evaluated), and how many of the steps were skipped: no weight moved."""

    step: int = 0
    seconds: float = 0.0
    examples: int = 0
    validation: dict[str, float] = field(default_factory=dict)
    skipped: int = 0


@contextmanager
def run_lock(run: Path, ranks: Ranks) -> Iterator[None]:
    """Rank 0 makes the run directory and locks it; what it made is removed if the job fails before there is anything to
    keep. ValueError on every rank if another job trains there, if the directory cannot be made, or if it is at a URL
    and the ranks are on several hosts; or if they do not share it. Collective."""
    require_one_host(run)
    with ExitStack() as held:
        on_first_rank(lambda: held.enter_context(_locked(run)), ranks)
        require_shared(run, ranks)
        yield


def require_shared(folder: Path, ranks: Ranks) -> None:
    """ValueError on every rank if a directory that rank 0 has made is not that of all ranks. Collective."""
    if ranks.world_size == 1:
        return
    mark = folder / broadcast_object(f".{secrets.token_hex(8)}.mark", ranks)
    on_first_rank(mark.touch, ranks)
    try:
        seen = on_all_ranks(lambda: (_seen(mark), f"(on {socket.gethostname()})", folder.absolute()), ranks)
    finally:
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)
    blind = [rank for rank, (found, *_) in enumerate(seen) if not found]
    if blind:
        (_, first, of_first), (_, other, of_other) = seen[0], seen[blind[0]]
        raise ValueError(
            f"{of_other} of {ranks_named(blind)} {other} is not {of_first} of rank 0 {first}; give a directory on "
            "storage that all hosts share"
        )


def _seen(mark: Path) -> bool:
    """Whether a file that another host has made is there; it may take NFS some time to show it."""
    until = time.monotonic() + MARK_SECONDS
    while not mark.exists():
        if time.monotonic() > until:
            return False
        for folder in mark.parents[:3]:
            # Makes NFS ask the server again.
            with suppress(OSError):
                os.listdir(folder)
        time.sleep(LOOK_SECONDS)
    return True


def require_one_host(path: Path) -> None:
    """ValueError if the ranks are on several hosts, whose copies of a URL are their own, and are to write to one."""
    if is_copy(path) and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise ValueError(
            f"{path} is written by ranks on one host alone; with several hosts, give a directory that all of them share"
        )


def upload_run(run: Path, ranks: Ranks) -> None:
    """Uploads a run, or an export, that is at a URL; OSError on every rank if that fails. Collective."""
    if is_copy(run):
        on_first_rank_at_length(lambda: push(run), ranks)


def remove_run(run: Path) -> None:
    """Removes a run directory, on one rank, and in the store if it is at a URL; ValueError if a job trains there."""
    clean_up(run)
    with _locked(run):
        # Another name first: what is removed by half must not look like a run.
        shutil.rmtree(run.rename(staging_path(run)))
    push(run)


def start_run(run: Path, config: Config, dataset: Dataset, ranks: Ranks) -> None:
    """Writes the configuration and the dataset's description into a new run, or checks that a run with checkpoints was
    started with the same ones; ValueError on every rank if not. Collective."""

    def start() -> None:
        if checkpoint_paths(run):
            require_same(run, config, dataset)
        write_noted(run / "dataset.json", dataset.description())
        write_noted(run / "config.toml", dump_toml(config))

    on_first_rank(start, ranks)


def read_config(run: Path) -> Config:
    """The configuration that a run was last started with; ValueError if there is no run."""
    path = run / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run directory (it has no config.toml); give one that `logitmix train` made")
    return load_toml(_read_text(path), str(path))


def refit_path(run: Path) -> Path:
    """The run directory of a run's refit."""
    return run / "refit"


def start_path(run: Path) -> Path:
    """The run directory of the run that is trained first, where there is one."""
    return run / "start"


def final_run(run: Path) -> Path:
    """The run whose model is to be used: the refit of a run, if there is one. ValueError if it is not finished, or if
    the run has been trained on and another epoch is the best since."""
    refit = refit_path(run)
    if not (refit / "config.toml").is_file():
        return run
    epochs_of_refit(run)
    if not (refit / "results.json").is_file():
        raise ValueError(f"{refit} is not finished: go on with `logitmix train --refit {run}`, or remove it")
    return refit


def epochs_of_refit(run: Path) -> float:
    """The epochs after which the run was best on validation. ValueError if it was not evaluated there, and if there is
    a refit of other epochs."""
    refit, (_, best) = refit_path(run), evaluations_since_best(run, read_config(run).evaluate.metric)
    if not best:
        raise ValueError(f"{run} was never evaluated on validation; train it first, with evaluate.every_epochs")
    epochs = float(best["epoch"])
    if (refit / "config.toml").is_file() and (was := read_config(refit).train.stop_after_epochs) != epochs:
        raise ValueError(
            f"{refit} is a refit of {was:g} epochs, but {run} is now best after {epochs:g}; remove {refit}, then "
            f"`logitmix train --refit {run}` trains it anew"
        )
    return epochs


def refit_config(run: Path, epochs: float) -> Config:
    """The settings of the refit of a run whose best checkpoint was that after these epochs: the learning rates of the
    run, without its limits of time and patience. If another run is trained first, the refit of that one is trained
    first, too. A warm start is taken from the refit of the run that it names, if there is one. ValueError if that refit
    is not finished."""
    config = read_config(run)
    refit = _without_validation(config, run, epochs)
    if first := config.first:
        # As it was trained, but for what may have changed since.
        path, noted = start_path(run), read_config(start_path(run)).train
        train = replace(first.train, epochs=noted.epochs, minutes=noted.minutes, precision=noted.precision)
        first = _without_validation(replace(first, train=train), path, epochs_of_refit(path))
        # Said even where they are those of the run itself, which may be trained on.
        return with_settings(with_start(refit, first), {"start.train.epochs": first.train.epochs})
    return replace(refit, warm_start=shown(final_run(fetched_run(config.warm_start))) if config.warm_start else "")


def _without_validation(config: Config, run: Path, epochs: float) -> Config:
    train = replace(config.train, refit=False, minutes=0.0, patience=0, stop_after_epochs=epochs)
    train = replace(train, epochs=_epochs_of_schedule(run, config))
    return replace(config, data=replace(config.data, validation=False), train=train, start={})


def source_of(run: Path, config: Config) -> Path | None:
    """The run whose weights a run with these settings starts from; None if it starts from random ones."""
    if config.warm_start:
        return fetched_run(config.warm_start)
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


def _epochs_of_schedule(run: Path, config: Config) -> int:
    """The epochs over which a run's learning rates fell: all, or those that there was time for."""
    epochs, minutes = config.train.epochs, own_minutes(run, config)
    if minutes == math.inf or not (run / "results.json").exists():
        return epochs
    done, seconds = read_rows(run)[-1]["epoch"], read_results(run)["seconds"]
    return min(epochs, math.ceil(done * max(1.0, minutes * 60 / seconds)))


def read_schema(run: Path) -> Schema:
    """The schema of the dataset that the run was started with; ValueError if there is no run."""
    noted = read_description(run)
    if not isinstance(noted["schema"], dict):
        raise ValueError(f"{run / 'dataset.json'}: schema is not a JSON object")
    schema = from_mapping(Schema, noted["schema"], str(run / "dataset.json"), "schema.")
    return replace(schema, users=noted["users"])


def read_description(run: Path) -> Fields:
    """The content of the dataset.json of the dataset that the run was started with; ValueError if there is no run, or
    if it lacks the name or a count."""
    file = run / "dataset.json"
    noted = parse_json(noted_dataset(run).encode(), str(file))
    if not isinstance(noted, dict):
        raise ValueError(f"{file} is not a JSON object")
    for name in ("users", "items", "actions"):
        value = noted.get(name)
        require(type(value) is int and value >= 0, f"{file}: {name}", value, "a count")
    require(isinstance(noted.get("name"), str), f"{file}: name", noted.get("name"), "a text")
    return Fields(noted, str(file))


def require_same(run: Path, config: Config, dataset: Dataset) -> None:
    """ValueError if a run cannot go on with this configuration and dataset. The precision auto is the run's own."""
    if config.train.precision == "auto":
        config = replace(config, train=replace(config.train, precision=read_config(run).train.precision))
    require_same_settings(run, config)
    require_same_dataset(run, dataset)


def require_same_dataset(run: Path, dataset: Dataset) -> None:
    """ValueError if the dataset is not the one that the run was started with, or has been prepared differently
    since."""
    if noted_dataset(run) != dataset.description():
        raise ValueError(
            f"{dataset.path} is not the dataset that {run} began with: compare its dataset.json with that of the run"
        )


def require_same_settings(run: Path, config: Config) -> None:
    """ValueError if a run cannot go on with this configuration, because it was started with another one."""
    before, now = flatten(read_config(run)), flatten(config)
    kept: set[str] = set() if config.train.schedule == "constant" else {"train.epochs"}
    if kept and before["train.minutes"]:
        # Rates that have fallen with the time would rise again.
        kept.add("train.minutes")
    differ = [key for key in before | now if before.get(key) != now.get(key)]
    changed = [key for key in differ if key in kept or not _may_change(key)]
    if changed:
        said = "; ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed)
        raise ValueError(
            f"{run} was started with other settings: {said}; use another run directory, or the same settings"
        )


def noted_dataset(run: Path) -> str:
    """The dataset.json of the dataset that the run was started with; ValueError if there is no run."""
    noted = run / "dataset.json"
    if not noted.exists():
        raise ValueError(f"{run} is not a run directory (it has no dataset.json); give one that `logitmix train` made")
    return _read_text(noted)


def write_noted(path: Path, text: str) -> None:
    """Writes a file of a run whole, and its digest. If the job is killed in between, the file has none."""
    _note(path, None)
    write_whole(path, text)
    _note(path, text.encode())


def sync_rows(run: Path) -> None:
    """Waits until the rows of metrics so far are on disk, and the name of their file."""
    path = run / ROWS
    if path.exists():
        with naming(path):
            sync(path)
            sync(run)


def note_rows(run: Path) -> None:
    """Notes the digest of the rows of metrics so far, once they are on disk: a power loss would otherwise leave a
    digest of more rows than there are."""
    path = run / ROWS
    if path.exists():
        sync_rows(run)
        _note(path, path.read_bytes())


def _note(path: Path, content: bytes | None) -> None:
    """Notes the digest of a file, or that it has none while it is written."""
    run, file = path.parent, path.parent / DIGESTS
    # Where somebody has removed it, what is there goes unchecked.
    before = _digests(run) if file.is_file() else {name: None for name in NOTED if (run / name).exists()}
    noted = content if content is None else {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = before | {path.name: noted}
    if found != before or not file.is_file():
        write_whole(file, json.dumps(with_digest({"kind": KIND, "files": found}), indent=1) + "\n")


def _digests(run: Path) -> dict[str, Any]:
    """The entries of files by name, null for one that was being written. ValueError if the file is damaged, of another
    kind, or of another directory: then it lacks a file that is here."""
    file = run / DIGESTS
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict) or not fits_digest(content):
        raise ValueError(f"{file} is damaged (its sha256 is not that of its content); {_UNCHECKED.format(file)}")
    files = content.get("files")
    if content.get("kind") != KIND or not isinstance(files, dict):
        raise ValueError(f"{file} does not hold the {KIND} (fields kind and files); {_UNCHECKED.format(file)}")
    if wrong := [name for name, noted in files.items() if not _is_noted(name, noted)]:
        said = f"files.{wrong[0]:.80} is {brief(files[wrong[0]])}"
        raise ValueError(f"{file} does not hold the {KIND} ({said}); {_UNCHECKED.format(file)}")
    if missing := [name for name in NOTED if name not in files and (run / name).exists()]:
        raise ValueError(f"{file} has no digest of {missing[0]}: it is of another run; {_UNCHECKED.format(file)}")
    return files


def _is_noted(name: str, noted: Any) -> bool:
    return name in (*NOTED, ROWS) and (
        noted is None
        or (
            isinstance(noted, dict)
            and noted.keys() == {"bytes", "sha256"}
            and type(noted["bytes"]) is int
            and noted["bytes"] >= 0
        )
    )


_UNCHECKED = "restore it, or remove {} to go on without checking the run's files"


def _read_noted(path: Path) -> bytes:
    """The content of a file of a run; ValueError if it is not what was written, except what was appended to rows."""
    noted = _digests(path.parent).get(path.name)
    while True:
        content = _content(path) if noted is None or path.exists() else b""
        if noted is None:
            return content
        whole = content[: noted["bytes"]] if path.suffix == ".jsonl" else content
        if hashlib.sha256(whole).hexdigest() == noted["sha256"]:
            return content
        # A job that trains the run may have replaced the file in between: then its digest has gone or changed.
        before, noted = noted, _digests(path.parent).get(path.name)
        if noted == before:
            problem = f"is damaged (its SHA-256 is not that in {DIGESTS})" if path.exists() else "is missing"
            raise ValueError(f"{path} {problem}; {_UNCHECKED.format(path.parent / DIGESTS)}")


def _content(path: Path) -> bytes:
    require_file(path)
    return path.read_bytes()


def _read_text(path: Path) -> str:
    try:
        return _read_noted(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged ({error})") from None


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings that the content of a checkpoint depends on, by name. How it is evaluated is not among them."""
    return {
        name: value
        for name, value in flatten(config).items()
        if not _may_change(name) and not name.startswith("evaluate.")
    }


def _may_change(name: str) -> bool:
    """Whether a setting may differ when a run is resumed."""
    # A checkpoint loads into any sharding.
    return name in MAY_CHANGE or name.endswith(".sharding")


def checkpoint_paths(run: Path) -> list[Path]:
    """The run's checkpoints, intact or not, in the order of their steps."""
    found = (run / "checkpoints").glob("step-*")
    steps = {path: path.name.removeprefix("step-") for path in found if path.is_dir()}
    return sorted((path for path in steps if re.fullmatch("0|[1-9][0-9]*", steps[path])), key=lambda of: int(steps[of]))


def keep_rows(run: Path, last_step: int, evaluated: bool = True) -> None:
    """Removes the rows of metrics of steps later than that of a checkpoint, and what a power loss has left of them:
    those up to a checkpoint are on disk before it. Of a checkpoint that was saved before it was evaluated, those of its
    evaluation go too, because it will be evaluated again. ValueError as of `read_rows` if a line that is no row has a
    row to keep after it."""
    path = run / ROWS
    if not path.exists():
        return
    kept, problem = [], None
    for line, where in _lines(run):
        try:
            row = _row(line, where)
        except ValueError as error:
            problem = problem or error
            continue
        if row["step"] < last_step or (row["step"] == last_step and (evaluated or row["kind"] not in EVALUATIONS)):
            if problem:
                raise problem
            kept.append(row)
    write_noted(path, "".join(json.dumps(row) + "\n" for row in kept))


def append_row(run: Path, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
    path = run / ROWS
    with naming(path), path.open("a") as file:
        file.write(json.dumps({"kind": kind, "step": step, **metrics}) + "\n")


def read_rows(run: Path, kind: str = "") -> list[Fields]:
    """The rows of metrics in the order of writing, or those of a kind. A last line that a killed job left incomplete is
    skipped. ValueError that names the file, the line and the field if another is no row."""
    rows = [_row(line, where) for line, where in _lines(run)]
    return [row for row in rows if kind in ("", row["kind"])]


def _lines(run: Path) -> list[tuple[bytes, str]]:
    """The complete lines of the rows of metrics, and the file and number of each."""
    path = run / ROWS
    lines = _read_noted(path).split(b"\n")[:-1] if path.exists() or path.name in _digests(run) else []
    return [(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _row(line: bytes, where: str) -> Fields:
    content = parse_json(line, where)
    kind = content.pop("kind", None) if isinstance(content, dict) else ""
    row = require_numbers(content, where, lists=("users",) if kind == "skipped" else ())
    require(isinstance(kind, str), f"{where}: kind", kind, "a text")
    _require_counts({"step": row["step"]}, where, "step")
    for name in row:
        if name.startswith("time/"):
            require(0 <= row[name] < math.inf, f"{where}: {name}", row[name], "0 or more and finite")
    if kind in EVALUATIONS:
        require_shares(row, where)
    return Fields({"kind": kind, **row}, where)


def evaluations_since_best(run: Path, metric: str) -> tuple[int, Mapping[str, Any]]:
    """The number of evaluations on validation since the best one (the earliest of equals), and the best one's row; 0
    and no row if there were none."""
    rows = read_rows(run, "validation")
    if not rows:
        return 0, {}
    best = max(range(len(rows)), key=lambda at: rows[at][metric])
    return len(rows) - 1 - best, rows[best]


def peeked_best(run: Path, metric: str) -> dict[str, float]:
    """The metrics of the epoch that was best on the test part, as peeked/hr@10, and which it was."""
    rows = read_rows(run, "peeked")
    best = max(rows, key=lambda row: row[metric])
    return {f"peeked/{name}": value for name, value in best.items() if name not in ("kind", "step")}


def still_rising(run: Path, metric: str) -> str:
    """One line where the last evaluations on validation, a tenth of all, have the best one and are better than as many
    before them in the mean; else nothing."""
    values = [row[metric] for row in read_rows(run, "validation")]
    last = max(1, len(values) // 10)
    if len(values) < 2 or max(values) not in values[-last:] or sum(values[-last:]) <= sum(values[-2 * last : -last]):
        return ""
    return (
        f"validation {metric} was still rising at the end ({values[-last - 1]:.4f} -> {values[-1]:.4f} over the last "
        f"{last + 1} of {len(values)} evaluations): longer training (--train.epochs, --train.minutes) may give better "
        "results"
    )


def beside_baselines(results: Mapping[str, float], labels: Mapping[str, str] = BASELINES) -> str:
    """One line that says at which k, below the corpus, a model's hit rate is above that of the better baseline, and at
    which below; empty where there are no baselines. `results` has hr@10 and, for the baselines that `labels` names,
    item_knn/hr@10."""
    said: dict[str, list[str]] = {}
    for metric, own in results.items():
        there = {name: results[f"{name}/{metric}"] for name in labels if f"{name}/{metric}" in results}
        if not metric.startswith("hr@") or not there or int(metric[3:]) >= results.get("corpus", math.inf):
            continue
        best = max(there, key=lambda name: there[name])
        how = "ahead of" if own > there[best] else "behind" if own < there[best] else "level with"
        figures = f" ({own:.4f} < {there[best]:.4f})" if how == "behind" else ""
        said.setdefault(f"{how} {labels[best]}", []).append(metric + figures)
    return "; ".join(f"{how} at {', '.join(metrics)}" for how, metrics in sorted(said.items()))


COLD = 0.1
"""Share of the targets without a training action from which on it is said."""


def cold_targets(results: Mapping[str, float]) -> str:
    """One line where much of the test part cannot be ranked from what was trained; else empty. `results` has
    targets/cold."""
    if (share := results.get("targets/cold", 0.0)) < COLD:
        return ""
    return (
        f"{share:.0%} of the targets are items that training has no action of (targets/cold): without features of "
        f"items they cannot be hit but by chance, and no hit rate is to be expected above {1 - share:.2f}"
    )


def write_plan(run: Path, plan: Mapping[str, Any]) -> None:
    write_whole(run / "plan.json", json.dumps({name: asdict(table) for name, table in plan.items()}, indent=1) + "\n")


def write_results(run: Path, results: Mapping[str, Any]) -> None:
    note_rows(run)
    write_noted(run / "results.json", json.dumps(results, indent=1) + "\n")


def read_results(run: Path) -> Fields:
    """ValueError that names the file and the field if it is damaged."""
    path = run / "results.json"
    where = str(path)
    found = require_numbers(parse_json(_read_noted(path), where), where, ("penalties_tried",), ("validation",))
    if not found:
        raise ValueError(f"{path} has no numbers")
    _require_counts(found, where, "step", "users", "corpus", "parameters", "fitted_users", "of_users")
    require_shares(found, where)
    require_shares(found.get("validation", {}), f"{where}: validation")
    for name in ("seconds", "examples_per_second"):
        require(0 <= found.get(name, 0) < math.inf, f"{where}: {name}", found.get(name), "0 or more and finite")
    return found


_SHARES = re.compile(r"(.*/)?((hr|ndcg|coverage|recall_of_top\d+)@\d+|mrr|repeated_targets|top_\d+_percent)")
"""Metrics from 0 to 1."""


def require_shares(metrics: Mapping[str, Any], where: str) -> None:
    """ValueError that names the place for a metric that cannot be."""
    for name, value in metrics.items():
        if _SHARES.fullmatch(name):
            require(0 <= value <= 1, f"{where}: {name}", value, "from 0 to 1")


def _require_counts(metrics: Mapping[str, Any], where: str, *names: str) -> None:
    for name in filter(metrics.__contains__, names):
        value = metrics[name]
        require(type(value) is int and 0 <= value < 2**63, f"{where}: {name}", value, "a count")


def write_ranks(run: Path, rank_U: np.ndarray, user_U: Sequence[str]) -> None:
    """Keeps the rank of each user's target in the test part, and the users' raw ids in the same order."""
    write_noted(run / "test_ranks.json", json.dumps(rank_U.tolist()) + "\n")
    write_noted(run / "test_users.json", json.dumps(list(user_U)) + "\n")


def read_ranks(run: Path) -> np.ndarray:
    """The rank of each user's target [U] in the test part, from 1 (int64)."""
    path = run / "test_ranks.json"
    ranks = parse_json(_read_noted(path), str(path))
    if not isinstance(ranks, list) or not all(type(rank) is int and 0 < rank < 2**63 for rank in ranks):
        raise ValueError(f"{path} is not a list of ranks from 1")
    return np.array(ranks, np.int64)


def read_test_users(run: Path) -> list[str]:
    """The raw ids of the users [U] that `read_ranks` has the ranks of."""
    path = run / "test_users.json"
    users = parse_json(_read_noted(path), str(path))
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise ValueError(f"{path} is not a list of raw ids of users")
    return users


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    # torchx's logs exist before the run.
    before = set(os.listdir(run)) if run.is_dir() else set()
    try:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = open(run / ".lock", "w")  # noqa: SIM115 (held as long as the run)
    except OSError as error:
        raise ValueError(f"{run} cannot be a run directory ({error.strerror}); use another run directory") from None
    with lock:
        if not _locks_soon(lock):
            raise ValueError(f"another job is training {run}; wait for it, or use another run directory")
        # What a job that was killed had not finished would keep a full disk full.
        for name in {path.name[1:].rsplit(".", 2)[0] for path in (run / "checkpoints").glob(".step-*")}:
            clean_up(run / "checkpoints" / name)
        try:
            yield
        except BaseException:
            if not any((of / "metrics.jsonl").exists() or checkpoint_paths(of) for of in (run, start_path(run))):
                with suppress(OSError):
                    _remove_all_but(before, run)
                    push(run)
            raise


def _locks_soon(lock: IO[str]) -> bool:
    """Whether no job holds the lock: a command that looks whether one does holds it for a moment itself."""
    for _ in range(LOOKS):
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A job that has failed at its start meanwhile has removed the file: the lock would keep nobody out.
            return os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name))
        time.sleep(LOOK_SECONDS)
    return False


def _remove_all_but(names: set[str], folder: Path) -> None:
    for path in [path for path in folder.iterdir() if path.name not in names]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not names:
        folder.rmdir()
