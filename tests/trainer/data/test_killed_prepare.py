import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_prepare import job, state

PROGRAM = Path(__file__).with_name("killed_prepare.py")


def write_source(path: Path, rows: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    users, items, tags = (random.integers(0, count, rows) for count in (rows // 20, rows // 40, 9))
    lines = [f"u{u},i{i},{at},t{t},{at / 3:.4f}" for at, (u, i, t) in enumerate(zip(users, items, tags, strict=True))]
    path.write_text("\n".join(["user,item,timestamp,tag,price", *lines, "malformed"]) + "\n")
    return path


def kill_at(moments: Iterable[float], before: Path | str, source: Path, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    words = [sys.executable, str(PROGRAM), str(before), str(source), str(folder), *map(str, moments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=1_000, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def finished(source: Path, out: Path) -> dict[str, str]:
    job(str(source), out)
    return state(out)


def kinds(found: list[dict[str, Any]], old: dict[str, str] | None, new: dict[str, str]) -> list[str]:
    """What was there after each kill. Where a dataset is there, it is the old one or the new one; the next job gives
    the bytes of one that was never killed, and nothing else is left."""
    for one in found:
        assert one["intact"] and one["there"] in (None, old, new)
        assert one["after"] == {f"out/{name}": content for name, content in new.items()}
    return ["new" if one["there"] == new else "old" if one["there"] else "none" for one in found if one["killed"]]


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_prepare_leaves_the_old_or_the_new_dataset(tmp_path: Path, step: int) -> None:
    old_source, source = write_source(tmp_path / "old.csv", 200, 0), write_source(tmp_path / "new.csv", 400, 1)
    old, new = finished(old_source, tmp_path / "old"), finished(source, tmp_path / "new")
    found = kill_at(range(0, 60, step), old_source, source, tmp_path / "killed")
    after = kinds(found, old, new)
    assert after[0] == "old" and after[-1] == "new" and not found[-1]["killed"]
    assert step > 1 or "none" in after, "between the two renames"


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [True, False])
def test_a_prepare_killed_at_any_time(tmp_path: Path, replaces: bool) -> None:
    old_source, source = write_source(tmp_path / "old.csv", 200, 0), write_source(tmp_path / "new.csv", 50_000, 1)
    old = finished(old_source, tmp_path / "old") if replaces else None
    started = time.perf_counter()
    new = finished(source, tmp_path / "new")
    seconds = time.perf_counter() - started
    moments = np.random.default_rng(0).uniform(0, 1.3 * seconds, 50).tolist()
    found = kill_at(moments, old_source if replaces else "", source, tmp_path / "killed")
    assert len(kinds(found, old, new)) > 20
