"""Saving checkpoints: complete or absent, while training waits or goes on, and uploaded where the run is at a URL."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
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
        self._upload: Future[None] | None = None
        """On every rank, while rank 0 uploads."""
        self._goes_on = True
        """Whether training goes on after the last `save`."""
        self._writer, self._uploader = ThreadPoolExecutor(1, "checkpoint"), ThreadPoolExecutor(1, "upload")

    def save(self, progress: RunProgress, wait: bool = True) -> bool:
        """Saves a new checkpoint, then removes all but the best and the newest; returns whether it is saved, so far as
        is known. Unless it is to wait, because training ends, and with `train.save_in_background`, only a copy is made,
        `poll` commits and uploads it, and the next `save` waits for that. Collective.

        If the checkpoint cannot be written, nothing of it stays, and every rank raises OSError; with
        `train.on_save_failure` continue, rank 0 says so instead. The same holds if older ones cannot be removed, or if
        the run is at a URL and cannot be uploaded, but then the checkpoint stays.
        """
        self._goes_on = not wait
        wait = wait or not self.config.train.save_in_background
        self._finish()
        begun = self._tried(lambda: self._begin(progress, in_background=not wait))
        if not wait:
            return begun
        committed = self._finish()
        return self._end_upload() and begun and committed

    def poll(self) -> None:
        """Commits what was saved in the background, once all ranks have written it and the upload before has ended,
        and begins to upload it; to be called in each step. Collective; raises as `save` does, in the step after the
        failure."""
        if self._upload and agreed(self.ranks.rank == 0 and self._upload.done(), self.ranks):
            self._end_upload()
        if self._pending:
            state = largest(self._pending.state, self.ranks)
            if state == FAILED or (state == WRITTEN and not self._upload):
                self._finish()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.shutdown()
        self._uploader.shutdown()
        if self._pending:
            self._remove(self._pending)

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
        content = described(self.config, self.model.tower.schema, progress)
        pending = _Pending(out, staging, needed, part_name(ranks.rank, ranks.world_size), content)

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
        """Commits the checkpoint that was begun, if there is one, removes the older ones and begins to upload the run;
        returns whether the checkpoint could be committed. Collective."""
        pending = self._pending
        if pending is None:
            return True
        self._wait(pending)
        self._pending = None
        committed = self._tried(lambda: self._commit(pending))
        # Nothing is removed during an upload.
        self._end_upload()
        if committed:
            self._tried(lambda: self._tidy(pending.out))
            if is_copy(self.run):
                self._upload = self._uploader.submit(push, self.run) if self.ranks.rank == 0 else Future()
        return committed

    def _end_upload(self) -> bool:
        """Waits for the upload that was begun, if there is one; returns whether it was possible. Collective."""
        upload, self._upload = self._upload, None
        return upload is None or self._tried(lambda: on_first_rank_at_length(upload.result, self.ranks))

    def _wait(self, pending: "_Pending") -> None:
        """Waits until each rank has written its part, or failed, however long that takes. Collective."""
        seen = 0
        while True:
            wait([pending.written], timeout=SIGN_OF_LIFE)
            moved, seen = pending.begun_bytes > seen, pending.begun_bytes
            if agreed(moved, self.ranks):
                self.progressed()
            if not agreed(not pending.written.done(), self.ranks):
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

    def _tidy(self, saved: Path) -> None:
        """Syncs the name of a checkpoint that is saved, and removes those that are not to be kept then. An OSError says
        that the checkpoint stays. Collective."""

        def tidy() -> None:
            sync(saved.parent)
            remove_others(self.run, self.config)
            checksum_rows(self.run)

        try:
            with naming(self.run):
                on_first_rank(tidy, self.ranks)
        except OSError as error:
            said = f"{saved} is saved, but {error.filename} could not be updated ({error.strerror})"
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

    @property
    def state(self) -> int:
        """One of WRITTEN, WRITING and FAILED."""
        if not self.written.done():
            return WRITING
        return FAILED if self.written.exception() else WRITTEN

    def write(self, file: TensorFile) -> dict[str, Any]:
        """Writes this rank's part."""

        def counted() -> Iterator[memoryview]:
            for part in file.parts():
                self.begun_bytes += len(part)
                yield part

        return {"bytes": file.bytes, "sha256": write_hashed(self.staging / self.part, counted())}


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
    """Removes all checkpoints of a run but the best and the newest."""
    found = {path: manifest for path, manifest in manifests(run).items() if manifest}
    kept = {*list(found)[: config.train.keep], *by_merit(found, config.evaluate.metric)[:1]}
    for path in found:
        if path not in kept:
            # A name that does not count first: what is removed by half must not look like a damaged checkpoint.
            hidden = path.rename(staging_path(path))
            shutil.rmtree(hidden)
