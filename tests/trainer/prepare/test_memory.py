"""What does not fit into --memory waits in files beside the output; the dataset is the same."""

from pathlib import Path

import duckdb
import numpy as np
import pytest
from folders import files_in
from reading import prepared

from logitmix.trainer.data.engine import Duck
from logitmix.trainer.prepare import prepare

ROWS = 200_000


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actions with prices and duplicates, in no order."""
    rng = np.random.default_rng(0)
    users, items, times = rng.integers(0, 5000, ROWS), rng.integers(0, 900, ROWS), rng.integers(0, 9000, ROWS)
    rows = [f"u{user},i{item},{time},{time % 97}.5\n" for user, item, time in zip(users, items, times, strict=True)]
    path = tmp_path_factory.mktemp("clicks") / "clicks.csv"
    path.write_text("user,item,timestamp,price\n" + "".join(rows + rows[:1000]))
    return path


def test_the_bytes_are_the_same_whatever_the_memory(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled, make = [0], Duck.make

    def counted(self: Duck, name: str, query: str) -> None:
        # Each thread needs memory of its own.
        self.db.execute("set threads = 2")
        make(self, name, query)
        spilled.append(self.row("select coalesce(sum(size), 0) from duckdb_temporary_files()")[0])

    monkeypatch.setattr(Duck, "make", counted)
    prepared(clicks, out=tmp_path / "wide", min_item_actions=3)
    assert max(spilled) == 0
    monkeypatch.setattr(prepare, "LEAST", 32 << 20)
    prepared(clicks, out=tmp_path / "narrow", min_item_actions=3, memory="1MiB")
    assert max(spilled) > 0
    assert files_in(tmp_path / "wide") == files_in(tmp_path / "narrow")
    assert {path.name for path in tmp_path.iterdir()} == {"wide", "narrow"}


def test_too_little_memory_is_one_line(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "LEAST", 1 << 10)
    with pytest.raises(ValueError, match=r"^--memory 3 MiB is too little for this source; give more, or leave it out$"):
        prepared(clicks, out=tmp_path / "out", memory="3MiB")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Duck, name: str, query: str) -> None:
        raise duckdb.IOException("IO Error: Could not write all bytes to file: No space left on device")

    monkeypatch.setattr(Duck, "make", full)
    with pytest.raises(ValueError, match=r"No space left on device\); free some of it, or give more --memory$"):
        prepared(clicks, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())
