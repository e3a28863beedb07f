import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logitmix.trainer.data.dataset import Dataset, DatasetContents, load_dataset, write_contents, write_description


def write(path: Path, sequences: list[list[int]], raw_ids: list[str], users_per_file: int = 100) -> Path:
    path.mkdir(parents=True)
    lengths = [len(sequence) for sequence in sequences]
    items = np.array([item for sequence in sequences for item in sequence], np.int64)
    contents = DatasetContents(
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        items=items,
        timestamps=np.arange(len(items)),
        item_columns={"raw_id": pa.array(raw_ids, pa.string())},
    )
    write_contents(path, contents, users_per_file)
    counts = {"users": len(sequences), "items": len(raw_ids), "actions": len(items)}
    write_description(path, {"format_version": 1, "name": "made", **counts})
    return path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write(tmp_path / "made", [[0, 1, 2], [2], [1, 1]], ["a", "b", "c"])


def sequences_of(loaded: Dataset) -> list[list[int]]:
    return [part.tolist() for part in np.split(loaded.items_flat, loaded.offsets[1:-1])]


def edit_description(path: Path, **changes: object) -> None:
    file = path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def replace_sequences(path: Path, columns: dict[str, object], name: str = "part-00000.parquet") -> None:
    pq.write_table(pa.table(columns), path / "sequences" / name)


def test_reads_what_was_written(made: Path) -> None:
    loaded = load_dataset(made)
    assert (loaded.name, loaded.num_users, loaded.num_items) == ("made", 3, 3)
    assert loaded.items_flat.dtype == np.int32 and loaded.offsets.dtype == np.int64
    assert sequences_of(loaded) == [[0, 1, 2], [2], [1, 1]]
    assert loaded.raw_ids() == ["a", "b", "c"]


def test_users_are_split_over_files_and_joined_again(tmp_path: Path) -> None:
    path = write(tmp_path / "made", [[0], [1, 0], [1], [0, 0], [1]], ["a", "b"], users_per_file=2)
    assert len(list((path / "sequences").iterdir())) == 3
    assert sequences_of(load_dataset(str(path))) == [[0], [1, 0], [1], [0, 0], [1]]


def test_lists_of_other_writers_are_read(made: Path) -> None:
    lists = pa.array([[0, 1], [2], [1, 1, 0]], pa.large_list(pa.int32()))
    replace_sequences(made, {"user_index": pa.array([0, 1, 2], pa.int32()), "item_indices": lists, "timestamps": lists})
    assert sequences_of(load_dataset(made)) == [[0, 1], [2], [1, 1, 0]]


def test_no_dataset_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"^no dataset at {tmp_path}/ml-1m; make it with: logitmix prepare ml-1m --out"
    ):
        load_dataset(tmp_path / "ml-1m")
    with pytest.raises(ValueError, match="logitmix prepare NAME --out"):
        load_dataset(tmp_path / "mine")


LISTS = [[0, 1, 2], [2], [1, 1]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user_index": [0, 2, 1], "item_indices": LISTS, "timestamps": LISTS}, "do not continue at 0"),
        (
            {"user_index": [0, 1, 2], "item_indices": [[0, 1, 3], [2], [1, 1]], "timestamps": LISTS},
            "0 to 3, of 3 items",
        ),
        ({"user_index": [0, 1, 2], "item_indices": [[0, -1, 1], [2], [1, 1]], "timestamps": LISTS}, "-1 to 2, of 3"),
        ({"user_index": [0, 1, 2], "item_indices": LISTS}, "no column timestamps; there are: user_index, item_indices"),
        ({"user_index": [0, 1, 2], "item_indices": [[0, None, 1], [2], [1, 1]], "timestamps": LISTS}, "empty values"),
        ({"user_index": [0, 1, 2], "item_indices": [0, 1, 2], "timestamps": LISTS}, "of type int64, not list<int64>"),
        ({"user_index": [0, 1], "item_indices": [[0, 1, 2], [2]], "timestamps": [[0], [1]]}, "2 users and 4 actions"),
        ({"user_index": [0, 1, 2, 3], "item_indices": [*LISTS, [0]], "timestamps": [*LISTS, [0]]}, "more users or"),
    ],
)
def test_wrong_sequences_are_named(made: Path, columns: dict[str, object], message: str) -> None:
    replace_sequences(made, columns)
    with pytest.raises(ValueError, match=f"^{made}: .*{message}.*; make it again with: logitmix prepare NAME"):
        load_dataset(made)


def test_users_are_contiguous_over_files(made: Path) -> None:
    replace_sequences(made, {"user_index": [4], "item_indices": [[0]], "timestamps": [[0]]}, "part-00001.parquet")
    edit_description(made, users=4, actions=7)
    with pytest.raises(ValueError, match=r"part-00001\.parquet: its users do not continue at 3"):
        load_dataset(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "it is of format version 2, and this logitmix reads 1"),
        ({"users": "3"}, "no users that is a count"),
        ({"actions": -1}, "no actions that is a count"),
        ({"name": 7}, "no name that is text"),
        ({"items": 4}, "items.parquet has 3 rows, but dataset.json says 4 items"),
    ],
)
def test_wrong_descriptions_are_named(made: Path, changes: dict[str, object], message: str) -> None:
    edit_description(made, **changes)
    with pytest.raises(ValueError, match=f"^{made}: .*{message}"):
        load_dataset(made)


def test_damaged_files_are_named(made: Path) -> None:
    for file in ("dataset.json", "sequences/part-00000.parquet", "items.parquet"):
        damaged = made.parent / "damaged"
        shutil.copytree(made, damaged)
        (damaged / file).write_bytes(b"PAR1 nothing PAR1")
        with pytest.raises(ValueError, match=f"^{damaged}: {Path(file).name} .*make it again"):
            load_dataset(damaged)
        shutil.rmtree(damaged)


def test_items_out_of_order_are_found_when_their_ids_are_read(made: Path) -> None:
    pq.write_table(pa.table({"item_index": [0, 2, 1], "raw_id": ["a", "c", "b"]}), made / "items.parquet")
    with pytest.raises(ValueError, match="no rows 0 to 2 in order"):
        load_dataset(made).raw_ids()
