"""Checkpoints: sharded, complete or absent, checked when read, and read without running code.

A checkpoint is a directory `checkpoints/step-N`:

    part-00000-of-00002.safetensors   what rank 0 of 2 holds: its shards of the tables and of their optimizers' states;
                                      on rank 0 also the tower and its optimizer's state (trainer/run/tensor_files.py)
    checkpoint.json                   format_version, the fields of RunProgress, settings and schema (those that the
                                      tensors depend on), dataset (the SHA-256 of the run's dataset.json), files (that
                                      of each), sha256 (that of the other fields)

The tensors are tables/TABLE, table_optimizers/TABLE/STATE, tower/WEIGHT and dense_optimizer/WEIGHT/STATE; with
train.ema also average/tables/TABLE and average/tower/WEIGHT, which evaluation and exports read. A checkpoint is written
under another name and renamed when it is complete and on disk, and no directory is written twice.

No rank has more of a table in memory than its own rows: files are written in blocks, and mapped to be read.
"""

import errno
import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from logitmix.comm.collectives import (
    SIGN_OF_LIFE,
    agreed,
    broadcast_object,
    largest,
    on_all_ranks,
    on_first_rank,
    on_first_rank_at_length,
)
from logitmix.comm.process_group import Ranks
from logitmix.common.files import (
    LARGEST,
    file_digest,
    json_digest,
    naming,
    read_json,
    rename_synced,
    staging_path,
    sync,
    with_digest,
    write_hashed,
)
from logitmix.common.mappings import brief, from_mapping, require
from logitmix.common.storage import is_copy, push, say, shown
from logitmix.modules.schema import Schema, Table
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config
from logitmix.trainer.parallel.parallelize import ParallelModel, model_schema
from logitmix.trainer.parallel.sharded_rows import ShardedRows, own_range
from logitmix.trainer.run.checksums import note_rows, sync_rows
from logitmix.trainer.run.folder import (
    checkpoint_paths,
    fixed_settings,
    noted_dataset,
    read_config,
    read_schema,
    upload_run,
)
from logitmix.trainer.run.metrics import RunProgress, require_shares
from logitmix.trainer.run.tensor_files import Kind, Piece, SavedTensors, TensorFile

MANIFEST = "checkpoint.json"
FORMAT_VERSION = 4


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint for evaluation and export: the tower, on the CPU in FP32, and the tables, which are read on
    demand."""

    config: Config
    step: int
    tower: Tower
    read_rows: Callable[[str, int, int], Tensor]
    """The rows [R, D] of a table from `start` to `stop`, excluded."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Its metrics, if it was evaluated."""

    @property
    def num_items(self) -> int:
        return self.tower.schema.num_items

    def sharded_rows(self, ranks: Ranks) -> dict[str, ShardedRows]:
        """The tables in memory; each rank reads an equal share of their rows."""
        return {table.name: self._shared(table, ranks) for table in self.tower.schema.tables}

    def _shared(self, table: Table, ranks: Ranks) -> ShardedRows:
        own_RD = self.read_rows(table.name, *own_range(table.rows, ranks.rank, ranks.world_size))
        return ShardedRows.of_ranges(table.rows, own_RD.to(ranks.device), ranks)


class Saver:
    """Saves the checkpoints of a run: while training waits, or with `train.save_in_background` while it goes on. Then
    each rank holds a second copy of what it writes until it has written it. What is saved of a run at a URL is uploaded
    likewise.

    Use as a context manager: of a checkpoint that was not committed before the end of the block, nothing stays.
    """

    def __init__(
        self,
        run: Path,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        progressed: Callable[[], object] = lambda: None,
    ) -> None:
        """`progressed` is called on every rank, about every SIGN_OF_LIFE, while training waits for a checkpoint and any
        rank writes something of it."""
        self.run, self.model, self.optimizer, self.ranks = run, model, optimizer, model.ranks
        self.progressed = progressed
        self._pending: _Pending | None = None
        self._untidied: Path | None = None
        """The checkpoint that was committed last, until the older ones are removed and the upload has begun."""
        self._upload: Future[None] | None = None
        """On every rank, while rank 0 uploads in the background."""
        self._goes_on = True
        """Whether training goes on after the last `save`."""
        self._writer, self._uploader = ThreadPoolExecutor(1, "checkpoint"), ThreadPoolExecutor(1, "upload")

    def save(self, progress: RunProgress, wait: bool = True) -> bool:
        """Saves a new checkpoint, then removes all but the best and the newest; returns whether it is saved, so far as
        is known. Unless it is to wait, because training ends, and with `train.save_in_background`, only a copy is made,
        `poll` commits it, and the next `save` waits for that. Collective.

        If the checkpoint cannot be written, nothing of it stays, and every rank raises OSError; with
        `train.on_save_failure` continue, rank 0 says so instead. The same holds if older ones cannot be removed, or if
        the run is at a URL and cannot be uploaded, but then the checkpoint stays. An upload that is under way is waited
        for once the checkpoint is on disk, or before if there is no room until older ones are removed.
        """
        self._goes_on = not wait
        wait = wait or not self.model.config.train.save_in_background
        self._finish()
        if self._upload is None:
            self._settle(wait=False)
        # Nothing is removed during an upload: one that is too slow makes training wait.
        in_background = not wait and self._untidied is None
        begun = self._tried(lambda: self._begin_with_room(progress, in_background))
        if in_background:
            return begun
        committed = self._finish()
        return self._settle(wait) and begun and committed

    def poll(self) -> None:
        """Commits what was saved in the background, once all ranks have written it, and uploads it once the upload
        before has ended; to be called in each step. Collective; raises as `save` does, in the step after the
        failure."""
        if self._pending:
            if largest(self._pending.state, self.ranks) == WRITING:
                return
            self._finish()
        if self._upload is None or agreed(self.ranks.rank == 0 and self._upload.done(), self.ranks):
            self._settle(wait=False)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending:
            self._pending.abandoned.set()
        self._writer.shutdown()
        self._uploader.shutdown()
        if self._pending:
            self._remove(self._pending)

    def _begin_with_room(self, progress: RunProgress, in_background: bool) -> None:
        """As `_begin`; if that fails before older checkpoints could be removed, again once they are."""
        try:
            self._begin(progress, in_background)
        except OSError:
            if self._untidied is None or self._upload is None:
                raise
            # Whether the upload fails is told by `_settle`, once this step is saved.
            on_first_rank_at_length(self._upload.exception, self.ranks)
            self._tidy(self._untidied)
            self._begin(progress, in_background)

    def _begin(self, progress: RunProgress, in_background: bool) -> None:
        """Makes a hidden directory for the checkpoint, and in the background begins to write. Collective."""
        out, ranks = self.run / "checkpoints" / f"step-{progress.step}", self.ranks
        # The tower is the same on all ranks.
        state = {
            name: _pieces(of)
            for name, of in _state(self.model, self.optimizer).items()
            if isinstance(of, ShardedTensor) or ranks.rank == 0
        }
        if in_background:
            state = {name: [piece.copied() for piece in of] for name, of in state.items()}
        file = TensorFile(state)
        staging, needed = broadcast_object(staging_path(out), ranks), sum(on_all_ranks(lambda: file.bytes, ranks))
        pending = _Pending(out, staging, needed, _part(ranks.rank, ranks.world_size), _described(self.model, progress))

        def make() -> None:
            out.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(out.parent).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            staging.mkdir()

        with self._removing(pending):
            on_first_rank(make, ranks)
        self._pending = pending
        pending.written = self._writer.submit(pending.write, file)

    def _finish(self) -> bool:
        """Commits the checkpoint that was begun, if there is one; whether that was possible. Collective."""
        pending = self._pending
        if pending:
            self._wait(pending)
        self._pending = None
        return pending is None or self._tried(lambda: self._commit(pending))

    def _wait(self, pending: "_Pending") -> None:
        """Waits until all ranks have written their parts, or one has failed, however long that takes. Collective."""
        seen = 0
        while True:
            wait([pending.of_file], timeout=SIGN_OF_LIFE)
            moved, seen = pending.begun_bytes > seen, pending.begun_bytes
            if agreed(moved, self.ranks):
                self.progressed()
            state = largest(pending.state, self.ranks)
            if state == FAILED:
                pending.abandoned.set()
            if state != WRITING:
                return

    def _commit(self, pending: "_Pending") -> None:
        def publish() -> None:
            # A run that goes on from here needs the rows up to here.
            sync_rows(self.run)
            # The same step can be there, saved before it was evaluated.
            text = _manifest_text({**pending.content, "dataset": _dataset_digest(self.run), "files": digests})
            write_hashed(pending.staging / MANIFEST, [text.encode()])
            rename_synced(pending.staging, pending.out)

        def sync_name() -> None:
            with naming(pending.out.parent):
                sync(pending.out.parent)

        with self._removing(pending):
            digests = dict(on_all_ranks(lambda: (pending.part, pending.of_file.result()), self.ranks))
            on_first_rank(publish, self.ranks)
        self._untidied = pending.out
        self._once_saved(pending.out, sync_name)

    def _settle(self, wait: bool) -> bool:
        """Once the upload that was begun has ended, removes the checkpoints that are not to be kept, and uploads what
        is new, or begins to; whether this upload was possible. Collective."""
        upload, self._upload = self._upload, None
        if upload:
            self._tried(lambda: on_first_rank_at_length(upload.result, self.ranks))
        saved, self._untidied = self._untidied, None
        if saved is None:
            return True
        self._tried(lambda: self._tidy(saved))
        if wait:
            return self._tried(lambda: upload_run(self.run, self.ranks))
        if is_copy(self.run):
            self._upload = self._uploader.submit(push, self.run) if self.ranks.rank == 0 else Future()
        return True

    def _tidy(self, saved: Path) -> None:
        """Removes the checkpoints that are not to be kept now that this one is saved. Collective."""

        def tidy() -> None:
            with naming(self.run):
                _prune(self.run, self.model.config)
                note_rows(self.run)

        self._once_saved(saved, tidy)

    def _once_saved(self, out: Path, action: Callable[[], None]) -> None:
        """Rank 0 does what follows a checkpoint; an OSError says that this one stays. Collective."""
        try:
            on_first_rank(action, self.ranks)
        except OSError as error:
            said = f"{out} is saved, but {error.filename} could not be updated ({error.strerror})"
            raise OSError(said) from None

    @contextmanager
    def _removing(self, pending: "_Pending") -> Iterator[None]:
        """On an error nothing of the checkpoint stays, and an OSError says what could not be done."""
        try:
            yield
        except BaseException as error:
            self._remove(pending)
            if isinstance(error, OSError):
                raise _explained(error, pending.out, pending.needed) from None
            raise

    def _remove(self, pending: "_Pending") -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(pending.staging, ignore_errors=True)

    def _tried(self, action: Callable[[], None]) -> bool:
        return tried(action, self.model.config, self.ranks, GOES_ON if self._goes_on else "")


WRITTEN, WRITING, FAILED = range(3)
"""States of what is written in the background: the ranks' largest is that of all."""


@dataclass
class _Pending:
    """A checkpoint that is not committed yet: what this rank writes of it, at once or in a thread."""

    out: Path
    staging: Path
    needed: int
    part: str
    content: Mapping[str, Any]
    written: Future[str] | None = None
    """The SHA-256 of this rank's part, once it is on disk."""
    begun_bytes: int = 0
    """Those of this rank's part that are written, or being written."""
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def of_file(self) -> Future[str]:
        assert self.written is not None
        return self.written

    @property
    def state(self) -> int:
        if not self.of_file.done():
            return WRITING
        return FAILED if self.of_file.exception() else WRITTEN

    def write(self, file: TensorFile) -> str:
        """Writes this rank's part, unless it is abandoned: then the rank that is the cause has an error to raise."""

        def goes_on(part: bytes | memoryview) -> bool:
            self.begun_bytes += len(part)
            return not self.abandoned.is_set()

        return write_hashed(self.staging / self.part, takewhile(goes_on, file.parts()))


def restore(run: Path, model: ParallelModel, optimizer: torch.optim.Optimizer) -> RunProgress:
    """Loads the newest intact checkpoint in place, whatever number of ranks wrote it. Collective.

    Damaged ones that are newer are renamed to damaged-step-N, and a line on stderr says so; with `train.on_damage` stop
    they raise ValueError. A run without checkpoints starts from step 0. Raises ValueError if there are checkpoints but
    none is intact.
    """
    ranks = model.ranks
    paths = broadcast_object(checkpoint_paths(run)[::-1], ranks)
    if not paths:
        return RunProgress()
    state = _state(model, optimizer)
    # A rank without shards of a table does not know its optimizer's state.
    expected = {name: kind for kinds in on_all_ranks(lambda: _kinds(state), ranks) for name, kind in kinds.items()}
    opened, problems = _open_first(paths, model.config, model.tower.schema, expected, ranks)
    _fill(state, opened.tensors)
    steps = opened.progress.step - opened.progress.skipped
    model.table_optimizers.restore(model.table_optimizers.state_dict(), steps)
    for path, problem in problems.items():
        aside = on_first_rank(partial(_set_aside, path), ranks)
        lost, goes_on = path.name.removeprefix("step-"), opened.progress.step
        said = f"{problem}: step {lost} is lost (kept in {aside}), and training continues from step {goes_on}"
        _say(shown(said), ranks)
    return opened.progress


def prune(run: Path, model: ParallelModel) -> None:
    """Removes what a save would have removed before the job was killed: all checkpoints but the best and the newest.
    To be called after `restore`, which sets damaged ones aside. Collective; if it fails, every rank raises OSError, or
    with `train.on_save_failure` continue, rank 0 says so."""

    def remove() -> None:
        try:
            _prune(run, model.config)
        except OSError as error:
            raise OSError(f"{error.filename} could not be removed ({error.strerror})") from None

    tried(lambda: on_first_rank(remove, model.ranks), model.config, model.ranks)


def restore_best(run: Path, model: ParallelModel) -> int:
    """Loads the weights of the best checkpoint in place, and returns its step. The optimizers keep their state, so
    training must not go on. Collective; raises ValueError as `load_saved` does."""
    state = _evaluated(model)
    opened = _choose(run, "best", model.config, model.tower.schema, _kinds(state), model.ranks)
    _fill(state, opened.tensors)
    return opened.progress.step


def load_saved(run: Path, which: Literal["best", "last"] = "best", ranks: Ranks | None = None) -> SavedModel:
    """The best checkpoint of a run by its validation metric (or the last one); the tables are not read yet.

    With ranks, collective: each checks a part of the files. Where a damaged checkpoint is or may be a better choice, a
    line on stderr says so; with `train.on_damage` stop it raises ValueError. Raises ValueError also if `run` is not a
    run directory, or has no intact checkpoint.
    """
    config = read_config(run)
    schema = model_schema(read_schema(run), config)
    tower = Tower(config.model, schema)
    prefix = _AVERAGE if config.train.ema else ""
    weights = _weights(tower, {}, prefix)
    tables = {f"{prefix}tables/{table.name}": _kind_of(table, config) for table in schema.tables}
    opened = _choose(run, which, config, schema, _kinds(weights) | tables, ranks)
    _fill(weights, opened.tensors)
    progress = opened.progress
    read_rows = partial(_read_rows, opened.tensors, schema, prefix)
    return SavedModel(config, progress.step, tower, read_rows, progress.validation)


def _read_rows(tensors: SavedTensors, schema: Schema, prefix: str, table: str, start: int, stop: int) -> Tensor:
    row_RD = torch.empty(stop - start, schema.table(table).dim)
    tensors.read(f"{prefix}tables/{table}", (start, 0), row_RD)
    return row_RD


State: TypeAlias = dict[str, ShardedTensor | Tensor]
"""Tensors of a checkpoint by name and by reference: loading into them in place restores the model."""


def _state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> State:
    """The content of a checkpoint."""
    of_tables = model.table_optimizers.state_dict()
    of_tower = {name: optimizer.state[parameter] for name, parameter in model.tower.named_parameters()}
    return {
        **_weights(model.tower, model.shards()),
        **{f"table_optimizers/{name}/{key}": of for name, states in of_tables.items() for key, of in states.items()},
        **{f"dense_optimizer/{name}/{key}": of for name, states in of_tower.items() for key, of in states.items()},
        **_evaluated(model),
    }


def _evaluated(model: ParallelModel) -> State:
    """The weights that are evaluated."""
    if model.average is None:
        return _weights(model.tower, model.shards())
    return _weights(model.average.tower, model.average.tables, _AVERAGE)


def _weights(tower: Tower, tables: Mapping[str, ShardedTensor], prefix: str = "") -> State:
    of_tables: State = {f"{prefix}tables/{name}": table for name, table in tables.items()}
    return of_tables | {f"{prefix}tower/{name}": weight for name, weight in tower.state_dict().items()}


def _kinds(state: Mapping[str, ShardedTensor | Tensor]) -> dict[str, Kind]:
    """Dtypes and whole shapes."""
    return {
        name: Kind(of.dtype, tuple(of.size() if isinstance(of, ShardedTensor) else of.shape))
        for name, of in state.items()
    }


def _kind_of(table: Table, config: Config) -> Kind:
    fp16 = config.tables.of(table.name).precision == "fp16" and not config.train.ema
    return Kind(torch.float16 if fp16 else torch.float32, (table.rows, table.dim))


def _pieces(of: ShardedTensor | Tensor) -> list[Piece]:
    """What this rank holds of a tensor."""
    if not isinstance(of, ShardedTensor):
        return [Piece((0,) * of.ndim, of.detach())]
    held = [Piece(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in of.local_shards()]
    return [piece for piece in held if piece.values.numel()]


def _fill(state: Mapping[str, ShardedTensor | Tensor], tensors: SavedTensors) -> None:
    for name, of in state.items():
        for piece in _pieces(of):
            tensors.read(name, piece.place, piece.values)


def _explained(error: OSError, out: Path, needed: int) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(out.parent).free
        return OSError(f"no room for {out}: it needs {needed:,} bytes, and {free:,} are free; nothing of it was kept")
    return OSError(f"{out} could not be written ({error.strerror or error}); nothing of it was kept")


def _part(number: int, count: int) -> str:
    return f"part-{number:05}-of-{count:05}.safetensors"


GOES_ON = "training goes on"


def tried(action: Callable[[], None], config: Config, ranks: Ranks, however: str = "") -> bool:
    """Whether an action of all ranks succeeds. Its OSError is raised; with `train.on_save_failure` continue, rank 0
    says it instead, and what holds `however`."""
    try:
        action()
    except OSError as error:
        if config.train.on_save_failure == "stop":
            raise
        _say("; ".join(filter(None, [str(error), however])), ranks)
        return False
    return True


def _prune(run: Path, config: Config) -> None:
    found = {path: manifest for path, (manifest, _) in _manifests(run).items() if manifest}
    kept = {*list(found)[: config.train.keep], *_by_merit(found, config.evaluate.metric)[:1]}
    for path in found:
        if path not in kept:
            # A name that does not count first: what is removed by half must not look like a damaged checkpoint.
            hidden = path.rename(staging_path(path))
            shutil.rmtree(hidden)


def _set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it counts no more; returns its new path."""
    aside, number = path.with_name(f"damaged-{path.name}"), 2
    while aside.exists():
        aside, number = path.with_name(f"damaged-{path.name}.{number}"), number + 1
    return path.rename(aside)


@dataclass(frozen=True)
class _Manifest:
    """The fields of checkpoint.json, besides its own digest."""

    format_version: int
    step: int
    seconds: float
    examples: int
    skipped: int
    validation: dict[str, float]
    settings: dict[str, Any]
    schema: dict[str, Any]
    dataset: str
    files: dict[str, str]

    def __post_init__(self) -> None:
        require(self.step >= 0, "step", self.step, "0 or more")
        require(0 <= self.seconds <= LARGEST, "seconds", self.seconds, "0 or more and finite")
        require(self.examples >= 0, "examples", self.examples, "0 or more")
        require(0 <= self.skipped <= self.step, "skipped", self.skipped, f"from 0 to the step, {self.step}")
        for name, value in self.validation.items():
            require(abs(value) <= LARGEST, f"validation.{name}", value, "finite")
        require_shares(self.validation, "validation")
        count = len(self.files)
        names = [_part(number, count) for number in range(count)]
        require(count > 0 and list(self.files) == names, "files", list(self.files), "all parts, in order")

    @property
    def progress(self) -> RunProgress:
        return RunProgress(self.step, self.seconds, self.examples, self.validation, self.skipped)


def _described(model: ParallelModel, progress: RunProgress) -> dict[str, Any]:
    """The fields of the manifest but `dataset` and `files`."""
    settings, schema = fixed_settings(model.config), model.tower.schema.to_mapping()
    return {"format_version": FORMAT_VERSION} | asdict(progress) | {"settings": settings, "schema": schema}


def _dataset_digest(run: Path) -> str:
    """SHA-256 of a run's dataset.json, which has the digests of the dataset's files."""
    return hashlib.sha256(noted_dataset(run).encode()).hexdigest()


def _manifest_text(content: Mapping[str, Any]) -> str:
    return json.dumps(with_digest(content), indent=1) + "\n"


def _read_manifest(path: Path) -> _Manifest:
    """checkpoint.json of a checkpoint; ValueError if it is missing, damaged, or says what cannot be."""
    file = path / MANIFEST
    if not file.exists():
        raise ValueError(f"{file} is missing")
    tree = read_json(file)
    content = {name: of for name, of in tree.items() if name != "sha256"} if isinstance(tree, dict) else {}
    if isinstance(tree, dict) and type(version := content.get("format_version")) is int and version != FORMAT_VERSION:
        raise ValueError(f"{file}: format_version is {version}, and this logitmix reads {FORMAT_VERSION}")
    try:
        # Compared as a text, because some flipped bits leave the same numbers.
        intact = file.read_bytes() == _manifest_text(content).encode()
    except RecursionError:
        intact = False
    if not intact:
        raise ValueError(f"{file} is damaged (its sha256 is not that of its content)")
    manifest = from_mapping(_Manifest, content, str(file))
    if path.name != f"step-{manifest.step}":
        raise ValueError(f"{file}: step is {manifest.step}, but the folder is {path.name}")
    return manifest


def _manifests(run: Path) -> dict[Path, tuple[_Manifest | None, str]]:
    """The run's checkpoints, newest first: each one's manifest, or what is wrong with it."""
    found: dict[Path, tuple[_Manifest | None, str]] = {}
    for path in reversed(checkpoint_paths(run)):
        try:
            found[path] = _read_manifest(path), ""
        except (ValueError, OSError) as error:
            found[path] = None, str(error)
    return found


def _by_merit(found: Mapping[Path, _Manifest], metric: str) -> list[Path]:
    """The best by the validation metric first, the earliest of equals; then those that were not evaluated."""

    def key(path: Path) -> tuple[bool, float, int]:
        manifest = found[path]
        value = manifest.validation.get(metric)
        return (True, 0.0, -manifest.step) if value is None else (False, -value, manifest.step)

    return sorted(found, key=key)


@dataclass(frozen=True)
class _Opened:
    """An intact checkpoint that fits the model."""

    progress: RunProgress
    tensors: SavedTensors
    files: Mapping[str, str]
    """The SHA-256 of each file."""


def _choose(
    run: Path,
    which: Literal["best", "last"],
    config: Config,
    schema: Schema,
    expected: Mapping[str, Kind],
    ranks: Ranks | None,
) -> _Opened:
    """The requested checkpoint; if it is damaged, the next one. What only training needs is not checked."""

    def candidates() -> list[Path]:
        found = _manifests(run)
        if not found:
            raise ValueError(f"{run} has no complete checkpoint yet; train it first: logitmix train RECIPE --run {run}")
        known = {path: manifest for path, (manifest, _) in found.items() if manifest}
        # The others cannot be read, so each may be the best: they are tried first, and a message names them.
        unknown = [path for path in found if path not in known]
        return [*unknown, *_by_merit(known, config.evaluate.metric)] if which == "best" else list(found)

    paths = on_first_rank(candidates, ranks) if ranks else candidates()
    opened, problems = _open_first(paths, config, schema, expected, ranks, beside=_beside(config))
    for path, problem in problems.items():
        _say(shown(f"{problem}: instead of {path.name}, step {opened.progress.step} of {run} is taken"), ranks)
    return opened


_AVERAGE = "average/"


def _beside(config: Config) -> tuple[str, ...]:
    """How the names of tensors begin that only training needs."""
    return "table_optimizers/", "dense_optimizer/", *(("tables/", "tower/") if config.train.ema else ())


def _open_first(
    paths: Sequence[Path],
    config: Config,
    schema: Schema,
    expected: Mapping[str, Kind],
    ranks: Ranks | None,
    beside: tuple[str, ...] = (),
) -> tuple[_Opened, dict[Path, str]]:
    """The first of the checkpoints that is intact and fits, and what is wrong with those before it. Collective.
    ValueError on every rank if none is, and with `train.on_damage` stop if the first is not."""
    problems: dict[Path, str] = {}
    for path in paths:
        try:
            opened, problem = _open(path, config, schema, expected, ranks, beside), ""
        except (ValueError, OSError) as error:
            opened, problem = None, str(error)
        said = [problem] if ranks is None else on_all_ranks(partial(str, problem), ranks)
        if not any(said):
            assert opened is not None
            if ranks:
                _require_same(path, opened, ranks)
            return opened, problems
        problems[path] = next(filter(None, said))
        if config.train.on_damage == "stop":
            raise ValueError(
                f"{problems[path]}; remove {path} to use another checkpoint, or set train.on_damage to continue"
            )
    first = next(iter(problems.values()))
    raise ValueError(
        f"{first}, and no other checkpoint in {paths[0].parent} is intact; restore it, or use another run directory"
    )


def _require_same(path: Path, opened: _Opened, ranks: Ranks) -> None:
    """ValueError on every rank if the checkpoint of another host is another one. Collective."""
    own = (json_digest(opened.files), f"(on {socket.gethostname()})", path.absolute())
    (first, *of_first), *others = on_all_ranks(lambda: own, ranks)
    for rank, (digest, host, of_other) in enumerate(others, start=1):
        if digest != first:
            raise ValueError(
                f"{of_other} of rank {rank} {host} is another checkpoint than {of_first[1]} of rank 0 {of_first[0]}; "
                "give a run directory on storage that all hosts share"
            )


def _open(
    path: Path,
    config: Config,
    schema: Schema,
    expected: Mapping[str, Kind],
    ranks: Ranks | None,
    beside: tuple[str, ...],
) -> _Opened:
    """A checkpoint whose files are mapped. Of several ranks, each checks the digests of its share of the files.
    ValueError if the checkpoint is damaged or does not fit."""
    manifest = _read_manifest(path)
    _require_same_model(path / MANIFEST, manifest, config, schema)
    files = [path / name for name in manifest.files]
    rank, world_size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
    for file in files[slice(*own_range(len(files), rank, world_size))]:
        if not file.exists():
            raise ValueError(f"{file} is missing")
        if file_digest(file) != manifest.files[file.name]:
            raise ValueError(f"{file} is damaged (its SHA-256 is not that in {MANIFEST})")
    tensors = SavedTensors(files)
    try:
        tensors.check(expected, beside)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _Opened(manifest.progress, tensors, manifest.files)


def _require_same_model(file: Path, manifest: _Manifest, config: Config, schema: Schema) -> None:
    now = fixed_settings(config)
    for key in sorted(now | manifest.settings):
        if (then := manifest.settings.get(key)) != now.get(key):
            raise ValueError(f"{file}: settings.{key:.80} is {brief(then)}, but the run's is {brief(now.get(key))}")
    if manifest.schema != schema.to_mapping():
        raise ValueError(f"{file}: schema is not that of the run's dataset.json and model.features")
    if manifest.dataset != _dataset_digest(run := file.parents[2]):
        raise ValueError(f"{file}: dataset is not the SHA-256 of {run / 'dataset.json'}: it is of another run")


def _say(line: str, ranks: Ranks | None) -> None:
    if ranks is None or ranks.rank == 0:
        say(line)
