import json
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import two_ranks
from small_data import ITEMS, a_model, forget_digests, gather_table, random_column, small_config, write_dataset
from torch import Tensor

import logitmix.trainer.data.dataset as datasets
import logitmix.trainer.run.warm_start as starting
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.trainer.config import Config, model_schema
from logitmix.trainer.data import writer
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents
from logitmix.trainer.loop import train
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.warm_start import warm_start


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an epoch; beside it, its dataset: data."""
    folder = tmp_path_factory.mktemp("first")
    train(small_config(write_dataset(folder / "data", features=True), {"train.epochs": 1}), folder / "first")
    return folder / "first"


TINY_STEPS = {"dense.lr": 1e-20, "tables.lr": 1e-20, "train.precision": "fp32"}
"""Rates at which no FP32 weight moves."""


def grown(folder: Path) -> Path:
    """Ten items more than `write_dataset` makes; items and values at other places, and one brand of another name."""
    path = forget_digests(write_dataset(folder, users=80, items=60, seed=1, features=True))
    shuffled = np.random.default_rng(2).permutation(60)
    rename(path / "items.parquet", "raw_id", [f"item-{index}" for index in shuffled])
    rename(
        path / "vocabularies" / "brand.parquet", "value", [None, "brand-6", "new", *(f"brand-{n}" for n in range(2, 6))]
    )
    return path


def rename(file: Path, column: str, values: list[str | None]) -> None:
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, pa.array(values)), file)


def tables_before_and_after(before: Config, configs: list[Config], run: Path) -> list[dict[str, Any]]:
    """Trains the one, starts the others from it."""
    train(before, run)
    # Several pieces of everything.
    starting.BLOCK_BYTES, datasets.VALUES_AT_ONCE = 4 * 8 * 3, 7
    results = []
    for config in configs:
        with a_model(config) as (model, _):
            first = {name: gather_table(model, name) for name in model.plan}
            said = warm_start(run, config, load_dataset(config.data.path), model)
            then = {name: gather_table(model, name) for name in model.plan}
            results.append({"said": said, "first": first, "then": then, "tower": model.tower.state_dict()})
    return results


def test_rows_go_to_the_ids_they_stand_for(tmp_path: Path) -> None:
    old, new, run = write_dataset(tmp_path / "old", features=True), grown(tmp_path / "new"), tmp_path / "run"
    settings = {"model.features": ["all", "recency", "user"], "model.item_id_dropout": 0.3, "train.epochs": 1}
    before = small_config(old, settings)
    variants = [{"tables.sharding": "row_wise"}, {"tables.sharding": "column_wise"}, {"tables.group_size": 1}]
    configs = [small_config(new, settings | variant) for variant in variants]
    of_rank_0, of_rank_1 = two_ranks.run(tables_before_and_after, before, configs, run)

    saved, then, now = load_saved(run), load_dataset(old), load_dataset(new)
    for config, result, other in zip(configs, of_rank_0, of_rank_1, strict=True):
        for table in model_schema(now.schema, config).tables:
            rows = dict(zip(then.vocabulary(table.name), read(saved, table.name), strict=True))
            initial = dict(zip(now.vocabulary(table.name), result["first"][table.name], strict=True))
            expected = torch.stack([rows.get(value, row) for value, row in initial.items()])
            assert torch.equal(result["then"][table.name], expected)
            assert torch.equal(other["then"][table.name], expected)
        for name, weight in saved.tower.state_dict().items():
            assert torch.equal(result["tower"][name], weight)
            assert torch.equal(other["tower"][name], weight)
        assert result["said"] == other["said"]
        assert "the tower, and 51 of 61 rows of table item, 6 of 7 rows of table brand, 11 of 11 rows" in result["said"]


def read(saved: Any, table: str) -> list[Tensor]:
    return list(saved.read_rows(table, 0, saved.tower.schema.table(table).rows))


def test_the_run_takes_its_weights_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At its first step; one that goes on does not ask for the other any more."""
    data, first, second = write_dataset(tmp_path / "data"), tmp_path / "first", tmp_path / "second"
    step = train(small_config(data), first)["step"]
    warm = small_config(data, TINY_STEPS | {"warm_start": str(first), "train.epochs": 1})
    train(warm, second)
    assert (
        f"warm start from {first}, step {step}: the tower, and 51 of 51 rows of table item" in capsys.readouterr().err
    )
    for weights in zip(load_saved(first).tower.parameters(), load_saved(second).tower.parameters(), strict=True):
        assert torch.equal(*weights)
    first.rename(tmp_path / "moved")
    train(small_config(data, TINY_STEPS | {"warm_start": str(first), "train.epochs": 2}), second)
    assert [row["step"] for row in read_rows(second, "validation")] == [0, 4, 8]


@pytest.mark.parametrize(
    ("settings", "without", "own"),
    [
        ({"model.similarity.kind": "dot"}, "similarity", ("similarity.", "hindexer.")),
        ({"model.hindexer.weight": 0.0}, "h-indexer", ("hindexer.",)),
    ],
)
def test_another_part_starts_as_in_any_run_and_the_rest_from_the_other_run(
    settings: dict[str, Any], without: str, own: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, first, second = write_dataset(tmp_path / "data"), tmp_path / "first", tmp_path / "second"
    step = train(small_config(data, settings | {"train.epochs": 1}), first)["step"]
    train(small_config(data, TINY_STEPS | {"warm_start": str(first), "train.epochs": 1}), second)
    said = f"warm start from {first}, step {step}: the tower without its {without}, and 51 of 51 rows of table item"
    assert said in capsys.readouterr().err
    train(small_config(data, TINY_STEPS | {"train.epochs": 1}), tmp_path / "cold")
    before, after, cold = (load_saved(run).tower.state_dict() for run in (first, second, tmp_path / "cold"))
    assert {name for name in after if not name.startswith(own)} == {name for name in before if not name.startswith(own)}
    for name, weight in after.items():  # a weight of 0 moves even at these rates
        expected = (cold if name.startswith(own) else before)[name]
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)


def test_a_run_that_saw_the_validation_actions_is_no_start_for_one_that_holds_them_out(tmp_path: Path) -> None:
    data, first = write_dataset(tmp_path / "data"), tmp_path / "first"
    unheld = {"data.validation": False, "train.epochs": 1}
    train(small_config(data, unheld), first)
    with pytest.raises(ValueError, match="was trained on the validation actions, which are held out now"):
        train(small_config(data, {"warm_start": str(first), "train.epochs": 1}), tmp_path / "second")
    train(small_config(data, unheld | {"warm_start": str(first)}), tmp_path / "third")


TIME = {"data.split": "time", "data.held_out": 0.1, "train.epochs": 1}


@pytest.mark.parametrize(
    ("before", "fitting", "other"),
    [
        ({}, {"data.held_out": 0.05}, {"data.held_out": 0.2}),
        # As a refit is; with twice the share, its training ends where the validation part begins now.
        ({"data.validation": False, "data.held_out": 0.2}, {}, {"data.held_out": 0.3}),
    ],
)
def test_with_a_split_by_time_a_run_that_saw_what_is_held_out_now_is_refused(
    before: dict[str, Any], fitting: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    data, first = write_dataset(tmp_path / "data"), tmp_path / "first"
    train(small_config(data, TIME | before), first)
    warm = TIME | {"warm_start": str(first)}
    train(small_config(data, warm | fitting), tmp_path / "second")
    said = r"first was trained on the actions before time .*; held out now are those from \d+ on"
    with pytest.raises(ValueError, match=said):
        train(small_config(data, warm | other), tmp_path / "other")


def test_times_in_another_unit_are_refused(tmp_path: Path) -> None:
    units = {"s": "s", "ms": "ms"}
    data = {name: with_unit(forget_digests(write_dataset(tmp_path / name)), unit) for name, unit in units.items()}
    train(small_config(data["s"]), tmp_path / "first")
    warm = {"warm_start": str(tmp_path / "first"), "train.epochs": 1}
    said = f"the times of {tmp_path / 'first'} are in seconds, and those of {data['ms']} in milliseconds"
    with pytest.raises(ValueError, match=said):
        train(small_config(data["ms"], warm), tmp_path / "second")


def with_unit(path: Path, unit: str | None) -> Path:
    file = path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"times": {"unit": unit}}))
    return path


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model.encoder.blocks": 3}, "do not fit: model.encoder.blocks was "),
        ({"tables.dim": 4}, "do not fit: tables.dim was 0, is 4"),
        # The shapes of all weights are the same.
        ({"model.encoder.heads": 4}, "do not fit: model.encoder.heads was 1, is 4"),
        ({"data.split": "time"}, "has data.split leave-one-out, so it may have been trained on what is held out"),
        ({"warm_start": "nowhere"}, "nowhere is not a run directory"),
        ({"data.targets": ["action = type-1"]}, "so it may have been trained on what is held out now"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(settings: dict[str, Any], said: str, first: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    with pytest.raises(ValueError, match=re.escape(said)):
        train(small_config(first.with_name("data"), {"warm_start": str(first)} | settings), second)
    assert not second.exists()


NUMBERS = (Feature("price", "item", "number"), Feature("stock", "item", "number"))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (NUMBERS[:1], NUMBERS[1:], "item feature price (number)"),
        (NUMBERS[:1], [Feature("price", "item", "vector")], "item feature price (number)"),
    ],
)
def test_features_that_fit_in_shape_alone_are_refused(
    before: Sequence[Feature], now: Sequence[Feature], said: str, tmp_path: Path
) -> None:
    """What else a setting may be is not said."""
    old, new = (with_features(tmp_path / name, of) for name, of in (("old", before), ("new", now)))
    features = {"model.features": ["all"], "train.epochs": 1}
    train(small_config(old, features), tmp_path / "first")
    warm = features | {"warm_start": str(tmp_path / "first"), "model.encoder.dropout": 0.1, "tables.lr": 0.01}
    with pytest.raises(ValueError) as raised:
        train(small_config(new, warm), tmp_path / "second")
    assert str(raised.value) == f"the weights of {tmp_path / 'first'} do not fit: {said} is not used"
    with pytest.raises(ValueError, match=r"is not used; that run has --model\.features all$"):
        train(small_config(new, warm | {"model.features": []}), tmp_path / "second")


@pytest.mark.parametrize("kind", ["dot", "mol"])
def test_new_features_change_nothing_at_first(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of features are stored by place, and go to those of the same name. A number of items comes before the one
    that there was, a vector of users behind, and a user's id."""
    old = (Feature("stock", "item", "number"), Feature("age", "user", "number"))
    dated = Feature("released", "item", "date", unit="s")
    now = (Feature("price", "item", "number"), *old, dated, Feature("taste", "user", "vector", width=3))
    folders = [with_features(tmp_path / name, of) for name, of in (("old", old), ("now", now))]
    settings = {"model.similarity.kind": kind, "model.hindexer.weight": 0.0, "train.epochs": 1}
    settings |= {"model.features": ["all"]}
    before = train(small_config(folders[0], settings), tmp_path / "first")
    warm = settings | TINY_STEPS | {"warm_start": str(tmp_path / "first"), "model.features": ["all", "user"]}
    capsys.readouterr()
    after = train(small_config(folders[1], warm | {"tables.user.init_std": 1e-20}), tmp_path / "second")
    said = "new features: price (number), released (date), taste (vector, 3 wide), user (id of table user)"
    assert said in " ".join(capsys.readouterr().err.split())
    saved = load_saved(tmp_path / "second").tower
    first = load_saved(tmp_path / "first").tower
    for there, here in (
        (saved.item_tower.features.maps[1], first.item_tower.features.maps[0]),
        (saved.query_tower.users.maps[0], first.query_tower.users.maps[0]),
    ):
        assert torch.equal(there.weight, here.weight) and torch.equal(there.bias, here.bias)
    maps = saved.item_tower.features.maps
    for begun in (maps[0], maps[2], saved.query_tower.time, saved.query_tower.users.maps[1]):
        assert all(float(of.detach().abs().max()) < 1e-18 for of in begun.parameters())
    if kind == "dot":
        assert after["mrr"] == pytest.approx(before["mrr"], abs=1e-6)


def test_a_user_who_is_a_component_begins_as_in_any_run(first: Path, tmp_path: Path) -> None:
    """From zero, its L2 norm would magnify gradients."""
    settings = {"model.features": ["user"], "model.similarity.user_component": True, "tables.user.dim": 4}
    settings |= TINY_STEPS | {"train.epochs": 1}
    begun = []
    for name, own in (("cold", {}), ("warm", {"warm_start": str(first)})):
        train(small_config(first.with_name("data"), settings | own), tmp_path / name)
        begun.append(load_saved(tmp_path / name).tower.query_tower.users.maps[0].weight)
    torch.testing.assert_close(*begun, rtol=0, atol=1e-12)
    assert float(begun[0].detach().abs().max()) > 0.01


def with_features(path: Path, features: Sequence[Feature]) -> Path:
    """A dataset whose items and users have these features; those of the same name have the same values."""
    random, users = np.random.default_rng(0), 40
    tables = [Table("item", ITEMS + 1), Table("brand", 7)]
    schema = Schema(
        (Feature("item", "item", "id", "item"), *features),
        tuple(table for table in tables if table.name in ("item", *(of.table for of in features))),
    )
    rows = {"item": ITEMS, "user": users}
    contents = DatasetContents(
        np.arange(0, 5 * users + 1, 5),
        random.integers(0, ITEMS, 5 * users),
        np.arange(5 * users),
        pa.array([f"item-{index}" for index in range(ITEMS)]),
        schema=schema,
        columns={
            of.name: random_column(of, schema, rows[of.owner], np.random.default_rng([*of.name.encode()]))
            for of in features
        },
        vocabularies={of.name: pa.array([None, *"abcdef"], pa.string()) for of in schema.tables[1:]},
    )
    writer.write_dataset(path, contents, "demo")
    return path


@pytest.mark.parametrize("kept", [0, 3])
def test_items_of_other_ids_are_refused(first: Path, tmp_path: Path, kept: int) -> None:
    """As where a column of whole numbers is read as floats."""
    new = forget_digests(write_dataset(tmp_path / "new"))
    ids = pq.read_table(new / "items.parquet")["raw_id"].to_pylist()
    rename(new / "items.parquet", "raw_id", [of if place < kept else f"{of}.0" for place, of in enumerate(ids)])
    said = f"{first} has none of the items of {new}; spell ids as {first.with_name('data')} does"
    with nullcontext() if kept else pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        train(small_config(new, TINY_STEPS | {"warm_start": str(first), "train.epochs": 1}), tmp_path / "second")
    assert (tmp_path / "second").exists() == (kept > 0)


def test_a_dataset_that_was_prepared_anew_is_refused(tmp_path: Path) -> None:
    data, first = write_dataset(tmp_path / "data"), tmp_path / "first"
    train(small_config(data, {"train.epochs": 1}), first)
    data.rename(tmp_path / "moved")
    write_dataset(data, seed=3)
    with pytest.raises(ValueError, match="is missing or has changed"):
        train(small_config(data, {"warm_start": str(first)}), tmp_path / "second")
    # Now with the description of the first, which the files contradict.
    shutil.copy(tmp_path / "moved" / "dataset.json", data)
    with pytest.raises(ValueError, match=r"data: .*\.parquet is damaged"):
        train(small_config(tmp_path / "moved", {"warm_start": str(first)}), tmp_path / "second")
