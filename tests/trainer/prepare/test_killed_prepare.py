"""`prepare` killed at many moments."""

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from folders import files_in
from killed import ended, killing_itself
from rich.console import Console

from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare


def write_source(path: Path, rows: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    users, items, tags = (random.integers(0, count, rows) for count in (rows // 20, rows // 40, 9))
    lines = [f"u{u},i{i},{at},t{t},{at / 3:.4f}" for at, (u, i, t) in enumerate(zip(users, items, tags, strict=True))]
    path.write_text("\n".join(["user,item,timestamp,tag,price", *lines, "malformed"]) + "\n")
    return path


def job(source: Path, out: Path) -> None:
    prepare(PrepareOptions("table", str(source), str(out), overwrite=True), Console(quiet=True))


def finished(source: Path, out: Path) -> dict[str, bytes]:
    job(source, out)
    return files_in(out)


def kinds(moments: Iterable[int], before: Path, source: Path, folder: Path) -> Iterator[str]:
    """What was there after each kill: the old dataset, the new one or none; nothing where the job had ended. Moments
    are numbers of operations on files. The next job gives the bytes of one that was never killed, and nothing else is
    left."""
    new, old = finished(source, folder / "new"), finished(before, folder / "old")
    for moment in moments:
        made = folder / str(moment)
        out = made / "out"
        made.mkdir()
        job(before, out)
        status = ended(killing_itself, job, moment, made, source, out)
        there = files_in(out)
        assert there in ({}, old, new) and status in (0, -signal.SIGKILL)
        if there:
            load_dataset(out)
        job(source, out)
        assert files_in(made) == {f"out/{name}": content for name, content in new.items()}
        if status:
            yield "new" if there == new else "old" if there else "none"


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_prepare_leaves_the_old_or_the_new_dataset(tmp_path: Path, step: int) -> None:
    old, source = write_source(tmp_path / "old.csv", 200, 0), write_source(tmp_path / "new.csv", 400, 1)
    moments = range(0, 60, step)
    after = [*kinds(moments, old, source, tmp_path)]
    assert after[0] == "old" and after[-1] == "new" and len(after) < len(moments)
    assert step > 1 or "none" in after, "between the two renames"
