"""Saving checkpoints: complete or absent, while training waits or goes on, and uploaded where the run is at a URL."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

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
from logitmix.common.files import naming, rename_synced, staging_path, sync, write_hashed
from logitmix.common.messages import say_of_disk
from logitmix.common.storage import is_copy, push
from logitmix.trainer.config import Config
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.run.checksums import checksum_rows, sync_rows
from logitmix.trainer.run.folder import upload_run
from logitmix.trainer.run.manifest import (
    FORMAT,
    MANIFEST,
    by_merit,
    dataset_digest,
    described,
    manifests,
    part_name,
)
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.run.state import Part, pieces_of, state_of
from logitmix.trainer.run.tensor_files import TensorFile


class Saver:
    """Saves the checkpoints of a run: while training waits, or with `train.save_in_background` while it goes on. Then
    each rank holds a second copy of what it writes until it has written it. What is saved of a run at a URL is uploaded
    likewise.

    Use as a context manager: of a checkpoint that was not committed before the end of the block, nothing stays.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        progressed: Callable[[], object] = lambda: None,
    ) -> None:
        """`progressed` is called on every rank, about every SIGN_OF_LIFE, while training waits for a checkpoint and any
        rank writes something of it."""
        self.run, self.config, self.progressed = run, config, progressed
        self.model, self.optimizer, self.ranks = model, optimizer, model.ranks
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
        wait = wait or not self.config.train.save_in_background
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

    def __exit__(self, *exception: object) -> None:
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
        # The tower is the same on all ranks, and the tables in all groups of ranks.
        state = {
            name: pieces_of(of)
            for name, of in state_of(self.model, self.optimizer).items()
            if ranks.rank == 0
            or isinstance(of, Part)
            or (isinstance(of, ShardedTensor) and self.model.replicas.number == 0)
        }
        if in_background:
            state = {name: [piece.copied() for piece in of] for name, of in state.items()}
        file = TensorFile(state)
        staging, needed = broadcast_object(staging_path(out), ranks), sum(on_all_ranks(lambda: file.bytes, ranks))
        pending = _Pending(
            out,
            staging,
            needed,
            part_name(ranks.rank, ranks.world_size),
            described(self.config, self.model.tower.schema, progress),
        )

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
            wait([pending.written], timeout=SIGN_OF_LIFE)
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
            text = FORMAT.text({**pending.content, "dataset": dataset_digest(self.run), "files": entries})
            write_hashed(pending.staging / MANIFEST, [text.encode()])
            rename_synced(pending.staging, pending.out)

        with self._removing(pending):
            entries = dict(on_all_ranks(lambda: (pending.part, pending.written.result()), self.ranks))
            on_first_rank(publish, self.ranks)
        self._untidied = pending.out
        self._once_saved(pending.out, pending.out.parent, lambda: sync(pending.out.parent))

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
            remove_others(self.run, self.config)
            checksum_rows(self.run)

        self._once_saved(saved, self.run, tidy)

    def _once_saved(self, out: Path, changed: Path, action: Callable[[], None]) -> None:
        """Rank 0 does what follows a checkpoint, and changes a folder; an OSError says that the checkpoint stays.
        Collective."""
        try:
            with naming(changed):
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
        return or_continue(action, self.config, self.ranks, GOES_ON if self._goes_on else "")


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
    written: Future[dict[str, Any]] = field(init=False)
    """The entry of this rank's part in the manifest, once it is on disk."""
    begun_bytes: int = 0
    """Those of this rank's part that are written, or being written."""
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def state(self) -> int:
        if not self.written.done():
            return WRITING
        return FAILED if self.written.exception() else WRITTEN

    def write(self, file: TensorFile) -> dict[str, Any]:
        """Writes this rank's part, unless it is abandoned: then the rank that is the cause has an error to raise."""

        def goes_on(part: bytes | memoryview) -> bool:
            self.begun_bytes += len(part)
            return not self.abandoned.is_set()

        return {"bytes": file.bytes, "sha256": write_hashed(self.staging / self.part, takewhile(goes_on, file.parts()))}


def prune(run: Path, config: Config, ranks: Ranks) -> None:
    """Removes what a save would have removed before the job was killed: all checkpoints but the best and the newest.
    To be called after `restore`, which sets damaged ones aside. Collective; if it fails, every rank raises OSError, or
    with `train.on_save_failure` continue, rank 0 says so."""

    def remove() -> None:
        try:
            remove_others(run, config)
        except OSError as error:
            raise OSError(f"{error.filename} could not be removed ({error.strerror})") from None

    or_continue(lambda: on_first_rank(remove, ranks), config, ranks)


def _explained(error: OSError, out: Path, needed: int) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(out.parent).free
        return OSError(f"no room for {out}: it needs {needed:,} bytes, and {free:,} are free; nothing of it was kept")
    return OSError(f"{out} could not be written ({error.strerror or error}); nothing of it was kept")


GOES_ON = "training goes on"


def or_continue(action: Callable[[], None], config: Config, ranks: Ranks, note: str = "") -> bool:
    """Whether an action of all ranks succeeds. Its OSError is raised; with `train.on_save_failure` continue, rank 0
    says it instead, with the note."""
    try:
        action()
    except OSError as error:
        if config.train.on_save_failure == "stop":
            raise
        if ranks.rank == 0:
            say_of_disk("; ".join(filter(None, [str(error), note])))
        return False
    return True


def remove_others(run: Path, config: Config) -> None:
    found = {path: manifest for path, manifest in manifests(run).items() if manifest}
    kept = {*list(found)[: config.train.keep], *by_merit(found, config.evaluate.metric)[:1]}
    for path in found:
        if path not in kept:
            # A name that does not count first: what is removed by half must not look like a damaged checkpoint.
            hidden = path.rename(staging_path(path))
            shutil.rmtree(hidden)
