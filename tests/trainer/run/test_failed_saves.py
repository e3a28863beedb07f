"""Checkpoints that cannot be written, and jobs that are killed while they write."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import two_ranks
from damages import PART, newest, replace_train, steps
from small_data import a_model

from logitmix.comm.process_group import process_group
from logitmix.trainer.config import dump_toml
from logitmix.trainer.loop import train
from logitmix.trainer.run import checkpoint, checksums, manifest
from logitmix.trainer.run.folder import read_config, run_lock
from logitmix.trainer.run.metrics import RunProgress, append_row, read_rows
from logitmix.trainer.run.saving import Saver


class Failure:
    """Lets the n-th write, sync or rename fail, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.count = 0

        def failing(name: str) -> None:
            real = getattr(os, name)

            def call(*arguments: Any) -> Any:
                self.count += 1
                if self.count == number:
                    raise OSError(code, os.strerror(code))
                # A short write now and then, and no waiting for the disk.
                if name == "write" and self.count % 3 == 0:
                    return real(arguments[0], arguments[1][: len(arguments[1]) // 2 + 1])
                return None if name == "fsync" else real(*arguments)

            monkeypatch.setattr(os, name, call)

        for name in ("write", "fsync", "rename"):
            failing(name)


@pytest.mark.parametrize(("step", "in_background"), [pytest.param(12, False, marks=pytest.mark.slow), (16, True)])
def test_whatever_fails_the_checkpoint_before_stays(
    run: Path, savers: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch, step: int, in_background: bool
) -> None:
    """Also where it is saved again, as a step is that was saved before it was evaluated."""
    before, number, messages = steps(run), 0, set()
    out = run / "checkpoints" / f"step-{step}"
    while True:
        number += 1
        append_row(run, "train", step, {"loss": 0.5})
        with monkeypatch.context() as patch:
            failure = Failure(patch, number, errno.EIO if number % 2 else errno.ENOSPC)
            try:
                with savers(save_in_background=in_background) as saver:
                    saver.save(RunProgress(step, number), wait=False)
                    while saver._pending:
                        saver.poll()
                assert failure.count < number
                break
            except OSError as error:
                said = str(error)
        messages.add(re.split(r" \(|, and ", said)[0])
        kept = out in steps(run) and manifest.read_manifest(out).seconds == number
        assert said.startswith(f"{out} is saved, but ") if kept else said.endswith("; nothing of it was kept")
        assert steps(run) == sorted({*before, out} if kept else before)
        assert checkpoint.load_saved(run, "last").step == (step if kept else 12)
        if out not in before:
            shutil.rmtree(out, ignore_errors=True)
    needed = (newest(run) / PART).stat().st_size
    assert messages == {f"{out} could not be written", f"no room for {out}: it needs {needed:,} bytes"} | {
        f"{out} is saved, but {path} could not be updated"
        for path in (run, run / "digests.json", run / "metrics.jsonl")
    }
    assert failure.count > 40 and checkpoint.load_saved(run, "last").step == step


def test_a_power_loss_at_any_moment_of_a_save(
    run: Path, savers: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can take the rows that were not synced: the others pass for whole, and are all up to the newest checkpoint."""
    after, rows, out, checks = tmp_path / "after", run / "metrics.jsonl", run / "checkpoints" / "step-16", 0
    on_disk = rows.stat().st_size
    append_row(run, "train", 16, {"loss": 0.5})
    after.mkdir()

    def checked(name: str) -> None:
        real = getattr(os, name)

        def call(first: Any, *others: Any) -> None:
            nonlocal on_disk, checks
            real(first, *others)
            if name == "fsync" and os.path.samestat(os.fstat(first), rows.stat()):
                on_disk = rows.stat().st_size
            shutil.copy(run / "digests.json", after)
            (after / "metrics.jsonl").write_bytes(rows.read_bytes()[:on_disk])
            assert 16 in [row["step"] for row in read_rows(after)] or not out.exists()
            checks += 1

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace"):
        checked(name)
    savers().save(RunProgress(16))
    assert checks > 6 and on_disk == rows.stat().st_size


def test_training_is_the_same_with_saves_in_the_background(finished: Path, tmp_path: Path) -> None:
    config = replace_train(read_config(finished), save_in_background=True, checkpoint_every=2)
    train(config, tmp_path / "run")
    for step in ("step-4", "step-12"):
        ours, expected = (
            json.loads((of / "checkpoints" / step / manifest.MANIFEST).read_text())["files"]
            for of in (tmp_path / "run", finished)
        )
        assert ours == expected
    assert [path.name for path in steps(tmp_path / "run")] == ["step-10", "step-12", "step-4", "step-8"]


def test_a_full_disk_is_noticed_before_anything_is_written(
    run: Path, savers: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, needed = steps(run), (newest(run) / PART).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9**9, 9**9, needed - 1))
    said = (
        f"no room for {run}/checkpoints/step-16: it needs {needed:,} bytes, and {needed - 1:,} are free; nothing of it"
    )
    with pytest.raises(OSError, match=said):
        savers().save(RunProgress(16))
    for wait in (False, True):
        savers(on_save_failure="continue").save(RunProgress(16), wait)
        assert capsys.readouterr().err == f"{said} was kept{'' if wait else '; training goes on'}\n"
    assert steps(run) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9**9, 9**9, needed))
    savers().save(RunProgress(16))


def test_what_a_killed_job_left_is_removed_before_anything_is_written(run: Path) -> None:
    folder = run / "checkpoints"
    for name in (".step-16.0123abcd.part", ".step-8.0123abcd.old"):
        shutil.copytree(newest(run), folder / name)
    # Killed between the two renames of a step that is saved again.
    newest(run).rename(folder / ".step-12.0123abcd.old")
    before = {path: path.stat().st_mtime_ns for path in run.iterdir() if path.name != ".lock"}
    with process_group("cpu", 60) as ranks, run_lock(run, ranks):
        assert [path.name for path in steps(run)] == ["step-12", "step-4", "step-8"]
        assert {path: path.stat().st_mtime_ns for path in before if path != folder} == {
            path: time for path, time in before.items() if path != folder
        }
    assert checkpoint.load_saved(run, "last").step == 12


def save_until_killed(saver: Saver, first: int, told: int, chance: random.Random) -> None:
    for step in itertools.count(first):
        saver.save(RunProgress(step), wait=chance.random() < 0.5)
        while saver._pending:
            saver.poll()
        os.write(told, step.to_bytes(8, "big"))


def kill_saves(run: Path, kills: int) -> list[tuple[int, int, bool]]:
    """Of each kill at a random moment: the step that was last acknowledged, the one that is loaded, and whether
    something was not committed."""
    config, chance, found = read_config(run), random.Random(0), []
    with a_model(config) as (model, optimizer):
        newest = checkpoint.load_saved(run, "last").step
        for number in range(kills):
            read_end, write_end = os.pipe()
            child = os.fork()
            if not child:
                try:
                    save_until_killed(
                        Saver(run, config, model, optimizer), newest + 1, write_end, random.Random(number)
                    )
                finally:
                    os._exit(1)
            os.close(write_end)
            time.sleep(chance.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the process ended by itself"
            with os.fdopen(read_end, "rb") as told:
                acknowledged = int.from_bytes(told.read()[-8:] or newest.to_bytes(8, "big"), "big")
            left = any(not path.name.startswith("step-") for path in (run / "checkpoints").iterdir())
            newest = checkpoint.load_saved(run, "last").step
            with run_lock(run, model.ranks):
                pass
            found.append((acknowledged, newest, left))
    return found


@pytest.mark.parametrize("kills", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_saves_that_are_killed_at_any_moment_leave_the_newest_that_was_acknowledged(run: Path, kills: int) -> None:
    """In the background or not."""
    config = replace_train(read_config(run), save_in_background=True)
    checksums.write_checksummed(run / "config.toml", dump_toml(config))
    (found,) = two_ranks.run(kill_saves, run, kills, world_size=1)
    assert len(found) == kills
    for acknowledged, loaded, _ in found:
        # What was committed just before the kill was perhaps not acknowledged.
        assert loaded - acknowledged in (0, 1)
    assert sum(left for *_, left in found) > kills // 4, "most are killed while they save"
    assert all(path.name.startswith("step-") for path in steps(run))
