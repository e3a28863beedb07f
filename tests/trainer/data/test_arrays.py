"""The arrays of a large dataset in files: equal to what is read, made once, and never those of another dataset."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_data import forget_digests, write_dataset

from logitmix.modules.schema import Owner
from logitmix.trainer.data import arrays, dataset
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The datasets whose Parquet files are read, which all count as large."""
    paths: list[Path] = []
    read: Callable[..., Any] = dataset.read_arrays
    monkeypatch.setattr(arrays, "LARGE", 0)
    monkeypatch.setattr(dataset, "read_arrays", lambda path, *more: paths.append(path) or read(path, *more))
    return paths


def content(of: Dataset) -> dict[str, Any]:
    found = {"items": of.items_flat, "offsets": of.offsets, "timestamps": of.timestamps_flat}
    for owner in get_args(Owner):
        for name, column in of.features_of(owner).items():
            assert isinstance(column, Column)
            found |= column.arrays(f"{owner}.{name}")
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in found.items()}


def test_what_is_mapped_is_what_was_read(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dataset(tmp_path / "data", weighted=True)
    first, again = load_dataset(path), load_dataset(path)
    assert reads == [path]
    monkeypatch.setattr(arrays, "LARGE", 2**60)
    # Where there are arrays, the Parquet files are not compared with their digests.
    assert content(load_dataset(path)) == content(first) and reads == [path]
    shutil.rmtree(path / ".arrays")
    plain = load_dataset(path)
    assert content(first) == content(again) == content(plain) and reads == [path, path]
    assert {*again.item_features, *again.user_features, *again.event_features} == {
        feature.name for feature in again.schema.features if feature.name != "item"
    }
    assert isinstance(again.items_flat.base, np.memmap) and again.items_flat.flags.writeable
    assert again.identity() == plain.identity()


def test_several_processes_make_them_once(
    tmp_path: Path, reads: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_dataset(tmp_path / "data")
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(load_dataset, [path] * 4)]
    assert reads == [path] and all(content(of) == content(found[0]) for of in found)
    assert capsys.readouterr().err.count(f"{path}: its arrays are in {path}/.arrays now (0.0 GiB)") == 1


def test_a_dataset_that_changes_is_read_again(tmp_path: Path, reads: list[Path]) -> None:
    path = forget_digests(write_dataset(tmp_path / "data"))
    load_dataset(path)
    other = write_dataset(tmp_path / "other", seed=1)
    shutil.copy(other / "dataset.json", path)
    for file in other.rglob("*.parquet"):
        shutil.copy(file, path / file.relative_to(other))
    changed = load_dataset(path)
    assert reads == [path, path] and content(changed) == content(load_dataset(other))


def test_a_file_that_changes_is_compared_with_its_digest(tmp_path: Path, reads: list[Path]) -> None:
    path = write_dataset(tmp_path / "data")
    load_dataset(path)
    file = path / "sequences" / "part-00000.parquet"
    pq.write_table(pq.read_table(file), file, compression="none")
    with pytest.raises(ValueError, match=f"{path}: sequences/part-00000.parquet is damaged"):
        load_dataset(path)


def test_prepare_replaces_a_dataset_with_arrays(tmp_path: Path, reads: list[Path]) -> None:
    path, source = tmp_path / "data", tmp_path / "clicks.csv"
    for items in (3, 4):
        source.write_text("user,item,timestamp\n" + "".join(f"u,{item},{item}\n" for item in range(items)))
        prepare(PrepareOptions("table", str(source), str(path), min_user_actions=1, overwrite=True))
        load_dataset(path)
    assert reads == [path, path]


@pytest.mark.parametrize("name", ["0.npy", "arrays.json"])
def test_a_damaged_file_is_named(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write_dataset(tmp_path / "data")
    load_dataset(path)
    file = path / ".arrays" / name
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"{name} is damaged .*; remove {path}/.arrays, which is made again"):
        load_dataset(path)
    # Torchrun's other processes of a host leave the content to its first.
    monkeypatch.setenv("LOCAL_RANK", "1")
    if name == "0.npy":
        load_dataset(path)
        file.write_bytes(damaged[:-1])
    with pytest.raises(ValueError, match=rf"{name} is damaged .*; remove {path}/.arrays, which is made again"):
        load_dataset(path)
    shutil.rmtree(path / ".arrays")
    load_dataset(path)
    assert reads == [path, path]


def test_without_room_for_them_each_process_has_its_own(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = write_dataset(tmp_path / "data")
    monkeypatch.setattr(np, "save", full)
    assert content(load_dataset(path)) == content(load_dataset(path)) and reads == [path, path]
    line = f"{path}: its arrays cannot be kept there ([Errno 28] No space left on device: "
    line += f"'{path / '.arrays'}'), so each process holds"
    assert capsys.readouterr().err.count(line) == 2
    assert {entry.name for entry in path.iterdir()} == {"dataset.json", "items.parquet", "sequences"}
