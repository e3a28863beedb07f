"""No damage to a dataset directory goes unnoticed: every change of a file is found, and the file is named."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_data
from rich.console import Console

from logitmix.common.checked import fields_of
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.description import FORMAT
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with features of every kind."""
    return small_data.write_dataset(tmp_path / "made", users=8, items=6, features=True)


def files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def problem(path: Path) -> str:
    """What `load_dataset` says; "" if it finds nothing wrong."""
    try:
        load_dataset(path)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).startswith((f"{path}: ", "no dataset at "))
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("flips", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(path: Path, flips: int) -> None:
    random = np.random.default_rng(0)
    content = {name: (path / name).read_bytes() for name in files(path)}
    assert len(content) == 7
    sizes = np.array([len(of) for of in content.values()])
    # Half of the flips by size, half in equal shares, so that small files have theirs.
    names = [*random.choice(list(content), flips // 2, p=sizes / sizes.sum()), *(sorted(content) * flips)[: flips // 2]]
    for name in names:
        damaged = bytearray(content[name])
        bit = int(random.integers(8 * len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(damaged)
        assert problem(path).startswith(f"{path}: {name} is "), (name, bit)
        (path / name).write_bytes(content[name])
    assert not problem(path)


@pytest.mark.parametrize(
    "change",
    [lambda content: b"", lambda content: content[:-1], lambda content: bytes(len(content)), None],
    ids=["empty", "all but the last byte", "zeros", "missing"],
)
def test_every_file_that_is_another_is_named(path: Path, change: Callable[[bytes], bytes] | None) -> None:
    for name in files(path):
        before = (path / name).read_bytes()
        if change is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(change(before))
        said = problem(path)
        missing = f"no dataset at {path}" if name == "dataset.json" else f"{path}: {name} is missing"
        assert said.startswith(missing if change is None else f"{path}: {name} is "), (name, said)
        (path / name).write_bytes(before)
    assert not problem(path)


def test_a_run_is_told_from_a_dataset(path: Path) -> None:
    """Whose dataset.json it has, too."""
    (path / "config.toml").touch()
    assert problem(path) == f"{path}: this is a run; give the dataset that it was trained on"


def test_a_part_that_is_not_listed_is_refused(path: Path) -> None:
    shutil.copy(path / "sequences" / "part-00000.parquet", path / "sequences" / "part-00001.parquet")
    with pytest.raises(ValueError, match=r"sequences/part-00001\.parquet is not in the list of files in dataset\.json"):
        load_dataset(path)


def test_one_of_the_two_digests_is_not_enough(path: Path) -> None:
    file = path / "dataset.json"
    whole = json.loads(file.read_text())
    file.write_text(FORMAT.text({name: value for name, value in fields_of(whole).items() if name != "files"}))
    assert problem(path).startswith(f"{path}: dataset.json has no list of files")
    del whole["sha256"]
    file.write_text(json.dumps(whole, indent=1) + "\n")
    assert problem(path).startswith(f"{path}: dataset.json is damaged")


def test_without_digests_the_format_alone_counts(path: Path) -> None:
    small_data.forget_digests(path)
    (path / "notes.parquet").write_text("mine")
    assert not problem(path)
    (path / "items.parquet").write_bytes(b"")
    assert "items.parquet cannot be read" in problem(path)


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    """The digests, too, of a rejects.tsv among them."""
    rows = [f"u{n % 7},i{n % 5},{n},c{n % 3}|c{n % 4},{n / 8}" for n in range(300)]
    (tmp_path / "in.csv").write_text("\n".join(["user,item,timestamp,tags,price", *rows, "only"]) + "\n")
    for out in ("a", "b"):
        prepare(PrepareOptions("table", str(tmp_path / "in.csv"), str(tmp_path / out)), Console(quiet=True))
    first, second = (
        {name: (tmp_path / out / name).read_bytes() for name in files(tmp_path / out)} for out in ("a", "b")
    )
    assert first == second
    assert set(json.loads(first["dataset.json"])["files"]) == set(first) - {"dataset.json"} >= {"rejects.tsv"}
    (tmp_path / "a" / "rejects.tsv").unlink()
    assert problem(tmp_path / "a").startswith(f"{tmp_path}/a: rejects.tsv is missing")


# What a stranger wrote: the digests are right, or there are none


COUNT = 20_000_000
"""Takes seconds to decode."""
FILE_OF = {
    "sequences": "sequences/part-00000.parquet", "items": "items.parquet", "vocabulary": "vocabularies/brand.parquet"
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("owner", ["sequences", "items", "vocabulary"])
def test_a_few_bytes_that_stand_for_very_much_are_not_decoded(
    path: Path, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_data.forget_digests(path)
    file = path / FILE_OF[owner]
    table, zeros = pq.read_table(file), pa.array(np.zeros(COUNT, np.int64))
    if owner == "vocabulary":
        table = pa.table({"value": pa.nulls(COUNT, pa.string())})
    else:
        # The first row has all of them, the others none.
        whole = pa.ListArray.from_arrays(pa.array([0, *[COUNT] * table.num_rows], pa.int32()), zeros)
        for name in ("item_indices", "timestamps", "query") if owner == "sequences" else ("tags",):
            table = table.set_column(table.schema.names.index(name), name, whole)
    pq.write_table(table, file, compression="zstd", row_group_size=COUNT, max_rows_per_page=COUNT)
    assert file.stat().st_size < 16_000
    description = json.loads((path / "dataset.json").read_text())
    description["actions"] = COUNT if owner == "sequences" else description["actions"]
    brands = next(of for of in description["schema"]["tables"] if of["name"] == "brand")
    brands["rows"] = COUNT if owner == "vocabulary" else brands["rows"]
    (path / "dataset.json").write_text(json.dumps(description))
    decode = pq.ParquetFile.iter_batches

    def iter_batches(of: pq.ParquetFile, *given: object, **named: object) -> Iterator[pa.RecordBatch]:
        column = of.metadata.row_group(0).column
        assert max(column(number).num_values for number in range(of.metadata.num_columns)) < COUNT
        return decode(of, *given, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    assert "bytes can hold" in problem(path)


def test_equal_actions_at_equal_times_are_no_attack(tmp_path: Path) -> None:
    """The least that actions can say: ten thousand users who did the same thing a hundred times at once."""
    users, count = 10_000, 100
    contents = DatasetContents(
        np.arange(0, users * count + 1, count),
        np.zeros(users * count, np.int64),
        np.zeros(users * count, np.int64),
        pa.array(["only"]),
    )
    write_dataset(tmp_path / "made", contents, "demo")
    assert load_dataset(tmp_path / "made").items_flat.shape == (users * count,)


@pytest.mark.parametrize("name", ["sequences/part-00000.parquet", "vocabularies/brand.parquet", "items.parquet"])
def test_a_pipe_among_the_files_is_named_and_not_waited_for(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)
    assert problem(path).startswith(f"{path}: {name} is a pipe, not a file")
