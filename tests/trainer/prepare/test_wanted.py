"""What the query knows of the action that is to come (model.wanted)."""

from typing import Any

import numpy as np
import pytest
from reading import dataset_feature
from small_data import batches_of, write_dataset

from logitmix.modules.batch import Batch
from logitmix.modules.schema import Schema
from logitmix.trainer.config import Config, model_schema, with_settings
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.lookups import columns_of

WANTED = "wanted_action"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return load_dataset(write_dataset(tmp_path_factory.mktemp("wanted") / "data", features=True))


def schema_of(dataset: Dataset, **settings: Any) -> Schema:
    given = {f"model.{name}": value for name, value in settings.items()}
    return model_schema(dataset.schema, with_settings(Config(), given))


def rows_of(dataset: Dataset, rate: float, rank: int = 0, world_size: int = 1) -> tuple[Batch, list[int]]:
    """The first batch, and the table's row at each of its positions."""
    batch = batches_of(
        dataset, schema_of(dataset, wanted="action"), batch_size=16, max_length=12, negatives=3, share="sequence",
        seed=4, wanted="action", wanted_dropout=rate, rank=rank, world_size=world_size,
    ).at(0)  # fmt: skip
    rows: list[int] = batch.ids[WANTED][batch.features.values[WANTED].values].tolist()  # type: ignore[index]
    return batch, rows


def test_it_is_the_kind_of_the_target_and_of_each_action_before(dataset: Dataset) -> None:
    """Against the places of the histories, which their items tell."""
    batch, rows = rows_of(dataset, 0.0)
    action = dataset.event_features["action"].values
    inputs, targets = (batch.id_V[of].tolist() for of in (batch.input_T, batch.target_T))
    for start, end in zip(batch.packing.bounds[:-1], batch.packing.bounds[1:], strict=True):
        sequence = [*inputs[start:end], targets[end - 1]]
        assert sequence[1:] == targets[start:end]
        ends = [
            at
            for at in range(len(action))
            if dataset.items_flat[max(0, at - len(sequence) + 1) : at + 1].tolist() == sequence
        ]
        assert any(action[at - (end - start) + 1 : at + 1].tolist() == rows[start:end] for at in ends)
    unknown, some = rows_of(dataset, 0.4)[1], np.array(rows)
    dropped = np.array(unknown) == 0
    assert (np.array(unknown)[~dropped] == some[~dropped]).all() and 0.2 < dropped[some > 0].mean() < 0.6
    of_ranks = [rows_of(dataset, 0.4, rank, 3)[1] for rank in range(3)]
    assert [row for part in of_ranks for row in part] == unknown


def test_no_user_has_that_of_the_next_one(dataset: Dataset) -> None:
    found = columns_of(dataset, schema_of(dataset, wanted="action"))["event"][WANTED].values
    action = dataset.event_features["action"].values
    for start, end in zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True):
        assert found[start:end].tolist() == [*action[start + 1 : end].tolist(), 0]
    assert dataset.vocabulary(WANTED) == dataset.vocabulary(dataset_feature(dataset, "action").table)


def test_it_is_an_id_of_the_actions(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=r"model.wanted is rating, which is no id of the actions.*: action"):
        schema_of(dataset, wanted="rating")
