"""The run directory, whose files README.md lists: its lock, and its settings and dataset, which stay as they are."""

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from logitmix.comm.collectives import broadcast_object, on_all_ranks, on_first_rank, on_first_rank_at_length
from logitmix.comm.process_group import Ranks
from logitmix.comm.rendezvous import ranks_named
from logitmix.common.code import code
from logitmix.common.files import Fields, clean_up, parse_json, write_whole
from logitmix.common.mappings import counted, cut, from_mapping
from logitmix.common.storage import is_copy, push
from logitmix.modules.schema import Schema
from logitmix.trainer.config import Config, changed, dump_toml, flatten, load_toml, settings_without_import
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.run.checksums import read_text, write_checksummed

LOOKS, LOOK_SECONDS = 5, 0.05
"""How often a job tries to lock its run, and the time in between."""
CODE = "code.json"
"""The file of a run that has the code with which it was last started."""
MARK_SECONDS = 3.0
"""In which a new file is seen on all hosts that share a directory."""
MAY_CHANGE = {
    "train.epochs", "train.stop_after_epochs", "train.minutes", "train.patience", "train.threads", "train.device",
    "train.log_every", "train.checkpoint_every", "train.keep", "train.projector", "train.profile", "train.loggers",
    "comm.timeout_seconds", "data.path", "train.refit", "train.save_in_background", "train.on_damage",
    "train.on_save_failure", "train.stop_seconds", "evaluate.baselines", "evaluate.groups",
    "tables.group_size",
}  # fmt: skip
"""Settings that may differ when a run is resumed; epochs and minutes only if the schedule does not depend on them."""


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
        require_alike(lambda: _seen(mark), folder, "is not", ranks)
    finally:
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)


def require_alike(value: Callable[[], object], path: Path, unlike: str, ranks: Ranks) -> None:
    """ValueError on every rank if the value of another one is not that of rank 0; `unlike` says what the path of the
    other then is to that of rank 0. Collective."""
    found = on_all_ranks(lambda: (value(), socket.gethostname(), path.absolute()), ranks)
    (first, first_host, first_path), *_ = found
    if others := [rank for rank, (of, *_) in enumerate(found) if of != first]:
        _, host, other = found[others[0]]
        raise ValueError(
            f"{other} of {ranks_named(others)} (on {host}) {unlike} {first_path} of rank 0 (on {first_host})"
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
        raise ValueError(f"{path} is written by ranks on one host alone; with several, give a directory they share")


def upload_run(run: Path, ranks: Ranks) -> None:
    """Uploads a run, or an export, that is at a URL; OSError on every rank if that fails. Collective."""
    if is_copy(run):
        on_first_rank_at_length(lambda: push(run), ranks)


def start_run(run: Path, config: Config, dataset: Dataset, ranks: Ranks) -> str:
    """Writes the configuration, the dataset's description and the digests of the code into a run. A run with
    checkpoints must have been started with the same configuration and dataset; ValueError on every rank if not. Returns
    what is to be said of such a run if its code was another one, or nothing. Collective."""

    def start() -> str:
        said = ""
        if checkpoint_paths(run):
            require_same(run, config, dataset)
            said = said_of_code(run, "goes on with other code than before")
        write_checksummed(run / "dataset.json", dataset.description())
        write_checksummed(run / "config.toml", dump_toml(config))
        write_checksummed(run / CODE, json.dumps(code(), indent=1) + "\n")
        return said

    return on_first_rank(start, ranks)


def said_of_code(run: Path, verdict: str = "was trained by other code than this") -> str:
    """Returns a line that begins with the run and the verdict if its code was another one when it was last started, or
    if that is not known; else "". ValueError if the file is damaged."""
    if not (run / CODE).exists():
        return f"{run} has no {CODE}: whether it began with this code is not known"
    if not (differ := list(changed(read_code(run), code()).values())):
        return ""
    return f"{run} {verdict}: {cut('; '.join(differ), 400)} ({counted(len(differ), 'difference')})"


def read_config(run: Path) -> Config:
    """The configuration that a run was last started with; ValueError if there is no run."""
    return load_toml(_read(run, "config.toml"), str(run / "config.toml"))


def read_settings(run: Path) -> dict[str, Any]:
    """The settings that a run was last started with, by name, read without importing the plugins that it names
    (`settings_without_import`). ValueError if there is no run."""
    return settings_without_import(_read(run, "config.toml"), str(run / "config.toml"))


def read_code(run: Path) -> dict[str, Any]:
    """The code that a run was last started with, as `code` has it; ValueError if the file is damaged."""
    return _read_object(run, CODE)


def refit_path(run: Path) -> Path:
    """The run directory of a run's refit."""
    return run / "refit"


def start_path(run: Path) -> Path:
    """The run directory of the run that is trained first, where there is one."""
    return run / "start"


def read_schema(run: Path) -> Schema:
    """The schema of the dataset that the run was started with; ValueError if there is no run."""
    description = read_description(run)
    schema = from_mapping(Schema, description["schema"], str(run / "dataset.json"), "schema.")
    return replace(schema, users=description["users"])


def read_description(run: Path) -> Fields:
    """The content of the dataset.json of the dataset that the run was started with; ValueError if there is no run."""
    return _read_object(run, "dataset.json")


def require_same(run: Path, config: Config, dataset: Dataset) -> None:
    """ValueError if a run cannot go on with this configuration and dataset. The precision auto is the run's own."""
    if config.train.precision == "auto":
        config = replace(config, train=replace(config.train, precision=read_config(run).train.precision))
    require_same_settings(run, config)
    require_same_dataset(run, dataset)


def require_same_dataset(run: Path, dataset: Dataset) -> None:
    """ValueError if the dataset is not the one that the run was started with, or has been prepared differently
    since."""
    if recorded_dataset(run) != dataset.description():
        raise ValueError(f"{dataset.path} is not the dataset that {run} began with; restore that, or train another run")


def require_same_settings(run: Path, config: Config) -> None:
    """ValueError if a run cannot go on with this configuration, because it was started with another one."""
    before, now = flatten(read_config(run)), flatten(config)
    kept: set[str] = set() if config.train.schedule == "constant" else {"train.epochs"}
    if kept and before["train.minutes"]:
        # Rates that have fallen with the time would rise again.
        kept.add("train.minutes")
    said = [of for name, of in changed(before, now).items() if name in kept or not _may_change(name)]
    if said:
        raise ValueError(f"{run} was started with other settings: {'; '.join(said)}; use another run directory")


def recorded_dataset(run: Path) -> str:
    """The dataset.json of the dataset that the run was started with; ValueError if there is no run."""
    return _read(run, "dataset.json")


def _read(run: Path, name: str) -> str:
    if not (run / name).exists():
        raise ValueError(f"{run} is not a run directory (it has no {name}); give one that `logitmix train` made")
    return read_text(run / name)


def _read_object(run: Path, name: str) -> Fields:
    found = parse_json(_read(run, name).encode(), str(run / name))
    if not isinstance(found, dict):
        raise ValueError(f"{run / name} is not a JSON object")
    return Fields(found, str(run / name))


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


def write_plan(run: Path, plan: Mapping[str, Any]) -> None:
    write_whole(run / "plan.json", json.dumps({name: asdict(table) for name, table in plan.items()}, indent=1) + "\n")


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
