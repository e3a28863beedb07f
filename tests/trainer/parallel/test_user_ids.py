"""Users' ids as a feature: in training, evaluation and serving."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from asking import ranked_rows
from small_data import batches_of, hit_rate, in_memory, small_config

from logitmix.modules.schema import USER, Schema
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.data.batches import HeldOut, leave_one_out, ranking_users
from logitmix.trainer.data.dataset import Dataset, load_dataset, stored_values
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train

ITEMS, LENGTH = 12, 8


def write(path: Path, items_UL: list[list[int]], named: bool = True) -> Path:
    """A dataset; users are named u-00, u-01, … if they have raw ids."""
    lengths, items = [len(items) for items in items_UL], np.concatenate(items_UL)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    contents = DatasetContents(
        offsets,
        items,
        np.arange(len(items)),
        pa.array([f"item-{item}" for item in range(ITEMS)]),
        pa.array([f"u-{user:02}" for user in range(len(lengths))]) if named else None,
    )
    write_dataset(path, contents, "demo", users_per_file=3)
    return path


def rows_of(dataset: Dataset, held_out: HeldOut | None = None) -> list[int]:
    trained_U = (held_out or leave_one_out(dataset)).trained(dataset)
    values: list[int] = columns_of(dataset, dataset.schema.only([USER]), trained_U)["user"][USER].values.tolist()
    return values


@pytest.mark.parametrize("named", [True, False])
def test_a_dataset_offers_it_when_a_model_names_it(tmp_path: Path, named: bool) -> None:
    # Two of the actions are held out, and a position takes two more.
    dataset = load_dataset(write(tmp_path / "data", [[0, 1, 2, 3], [0, 1, 2], [3, 2, 1, 0, 4], [5]], named))
    assert USER not in [feature.name for feature in dataset.schema.only(["all"]).features]
    schema = dataset.schema.only([USER])
    assert [(table.name, table.rows) for table in schema.tables] == [("item", ITEMS + 1), (USER, 5)]
    assert rows_of(dataset) == [1, 0, 3, 0]
    assert columns_of(dataset, schema)["user"][USER].values.tolist() == [1, 2, 3, 4]
    names = ["", *(f"u-{user:02}" if named else str(user) for user in range(4))]
    assert dataset.vocabulary(USER) == names
    stored = [value for array in stored_values(dataset.path, dataset.schema, USER) for value in array.to_pylist()]
    assert stored == names
    assert f'"{USER}"' not in dataset.description()


def drawn(rate: float, steps: int = 40, rank: int = 0, world_size: int = 1) -> list[dict[int, int]]:
    """In each step, the row of each user."""
    dataset = in_memory(np.arange(0, 11 * LENGTH, LENGTH), np.arange(10 * LENGTH) % ITEMS, ITEMS)
    schema = Schema(dataset.schema.features, dataset.schema.tables, users=10).only([USER])
    batches = batches_of(
        dataset, schema, batch_size=10, max_length=LENGTH, negatives=3, share="sequence", seed=4, rank=rank,
        world_size=world_size, user_id_dropout=rate,
    )  # fmt: skip
    rows = []
    for step in range(steps):
        batch = batches.at(step)
        first = int(batch.packing.row_T[0]) // (LENGTH - 3) if len(batch.packing.row_T) else 0
        users = batches.users_of(step)[first : first + len(batch.packing.lengths_B)]
        row_B = batch.ids[USER][batch.features.values[USER].values]  # type: ignore[index]
        rows.append(dict(zip(users.tolist(), row_B.tolist(), strict=True)))
    return rows


def test_dropped_users_have_the_unknown_row_in_a_step_whatever_the_ranks() -> None:
    assert all(row == user + 1 for step in drawn(0.0) for user, row in step.items())
    steps = drawn(0.3)
    assert all(row in (0, user + 1) for step in steps for user, row in step.items())
    dropped = np.array([[step[user] == 0 for user in range(10)] for step in steps])
    assert 0.2 < dropped.mean() < 0.4
    # Each user is dropped in some steps and not in others.
    assert ((dropped.sum(0) > 0) & (dropped.sum(0) < 40)).all()
    parts = [drawn(0.3, rank=rank, world_size=3) for rank in range(3)]
    joined = [{user: row for part in of_step for user, row in part.items()} for of_step in zip(*parts, strict=True)]
    assert joined == steps


USERS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After item 0, each user always goes to one item of their own, and the encoder sees only item 0. The last two
    users have too few actions to be trained on."""
    folder = tmp_path_factory.mktemp("users")
    own = [1 + user % (ITEMS - 1) for user in range(USERS)]
    write(folder / "data", [*([0, item] * (LENGTH // 2) for item in own), [0, 3, 0], [0, 4, 0]])
    settings = {"model.dim": 16, "dense.lr": 1e-2, "tables.lr": 3e-2, "train.epochs": 2, "train.precision": "fp32"}
    settings |= {"evaluate.every_epochs": 2, "evaluate.exclude_history": "no", "model.features": [USER]}
    settings |= {"model.encoder.max_length": 1, "model.loss.negatives": 12, "model.user_id_dropout": 0.2}
    for name in RUNS:
        train(small_config(folder / "data", settings | RUNS[name]), folder / name)
        export(folder / name, folder / f"{name}-served")
    return folder


MOL = {"kind": "mol", "query_components": 2, "item_components": 2, "component_dim": 16, "gate_hidden": 16}
RUNS: dict[str, dict[str, Any]] = {
    "with": {},
    "component": {"model.similarity.user_component": True}
    | {f"model.similarity.{name}": value for name, value in MOL.items()},
}


@pytest.mark.parametrize("run", RUNS)
def test_requests_that_name_their_user_are_answered_as_in_evaluation(folder: Path, run: str) -> None:
    dataset, retriever = load_dataset(folder / "data"), Retriever.load(folder / f"{run}-served")
    users = ranking_users(dataset, "test", 1)
    names = dataset.vocabulary(USER)[1:]
    requests: list[Request] = [
        {"history": [f"item-{item}" for item in dataset.items_flat[first:place]], "user": {USER: names[user]}}
        for user, first, place in zip(users.user, users.first, users.place, strict=True)
    ]
    best = [rows[0]["id"] for rows in ranked_rows(retriever.recommend(requests, 1))]
    assert np.mean([of == f"item-{item}" for of, item in zip(best, users.target, strict=True)]) == pytest.approx(
        hit_rate(folder / run)
    )


@pytest.mark.parametrize("run", RUNS)
def test_users_whom_training_did_not_see_are_unknown(folder: Path, run: str) -> None:
    retriever = Retriever.load(folder / f"{run}-served")

    def scores(user: dict[str, str]) -> list[float]:
        return [
            row["score"] for row in ranked_rows(retriever.recommend([{"history": ["item-0"], "user": user}], ITEMS))[0]
        ]

    nobody = scores({})
    for name in (f"u-{USERS}", f"u-{USERS + 1}", "somebody", ""):
        assert scores({USER: name}) == nobody
    assert scores({USER: "u-03"}) != nobody
    # The retriever of histories alone knows no users either.
    found = retriever.retrieve([[0]], ITEMS, exclude_history=False)
    torch.testing.assert_close(found.scores[0], torch.tensor(nobody))
