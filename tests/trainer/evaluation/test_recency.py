"""Recency: what timestamps say, in training, evaluation and serving."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import batches_of

from logitmix.modules.features import recency_rows
from logitmix.modules.schema import RECENCY, Feature, Schema, Table
from logitmix.trainer.data import columns
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.data.writer import DatasetContents, write_dataset


def rows_of(sequences: list[list[int]]) -> list[list[int]]:
    """Those of some users' times."""
    lengths = [len(times) for times in sequences]
    time_T = torch.tensor([time for times in sequences for time in times], dtype=torch.int64)
    first_B = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    return [part.tolist() for part in recency_rows(time_T, first_B).split(lengths)]


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1).map(sorted), min_size=1))
def test_a_row_depends_on_its_action_and_the_one_before_alone(sequences: list[list[int]]) -> None:
    expected = [[0, *(1 + (time - before).bit_length() for before, time in pairwise(times))] for times in sequences]
    assert rows_of(sequences) == expected


def write(path: Path, lengths: list[int], times: np.ndarray, items: np.ndarray, own: Column | None = None) -> Path:
    """A dataset; `own` is a column that it calls recency itself, of the values 1 and 2."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    count = int(items.max()) + 1
    contents = DatasetContents(offsets, items, times, pa.array([f"item-{item}" for item in range(count)]))
    if own:
        ids = Schema.of_ids(count)
        feature, table = Feature(RECENCY, "event", "id", RECENCY), Table(RECENCY, 3)
        contents = DatasetContents(
            offsets,
            items,
            times,
            contents.item_ids,
            schema=Schema((*ids.features, feature), (*ids.tables, table)),
            columns={RECENCY: own},
            vocabularies={RECENCY: pa.array([None, "1", "2"])},
        )
    write_dataset(path, contents, "demo", users_per_file=3)
    return path


def test_a_dataset_derives_it_when_a_model_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "USERS_AT_ONCE", 3)
    lengths, times = [3, 0, 1, 4], np.array([10, 10, 11, 3, 1, 3, 6, 2**40])
    dataset = load_dataset(write(tmp_path / "data", lengths, times, np.array([0, 1, 2, 0, 1, 2, 0, 1])))
    assert RECENCY not in columns_of(dataset, dataset.schema)["event"] and "recency" not in vars(dataset)
    column = columns_of(dataset, dataset.schema.only([RECENCY]))["event"][RECENCY]
    assert column.values.tolist() == [0, 1, 2, 0, 0, 3, 3, 41] and column.values.dtype == np.int8
    assert dataset.vocabulary(RECENCY) == ["", *map(str, range(65))]
    assert RECENCY not in dataset.description()


def test_a_datasets_own_recency_counts(tmp_path: Path) -> None:
    own = Column(np.array([2, 1, 0, 1]))
    dataset = load_dataset(write(tmp_path / "data", [4], np.arange(4), np.arange(4), own))
    for schema in (dataset.schema.only([RECENCY]), dataset.schema.only(["all"])):
        assert columns_of(dataset, schema)["event"][RECENCY].values.tolist() == [2, 1, 0, 1]
    assert dataset.vocabulary(RECENCY) == ["", "1", "2"]


def test_the_first_of_the_last_actions_knows_the_one_before(tmp_path: Path) -> None:
    times = np.cumsum(2 ** np.arange(8))
    dataset = load_dataset(write(tmp_path / "data", [8], times, np.arange(8)))
    batches = batches_of(
        dataset, dataset.schema.only([RECENCY]), batch_size=4, max_length=3, negatives=1, share="batch", seed=0
    )
    batch = batches.at(0)
    # Positions 0 to 4 have a target that is trained on.
    assert batch.ids[RECENCY][batch.features.values[RECENCY].values].tolist() == [2 + place for place in (2, 3, 4)]
