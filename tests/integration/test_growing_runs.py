"""Runs with tables whose rows pass from value to value: checkpoints, other numbers of ranks, evaluation, exports."""

import shutil
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
import two_ranks
from asking import ranked_rows
from small_data import a_model, gather_table, losses_of, small_config, write_dataset

from logitmix.modules.schema import USER
from logitmix.serving.retriever import Retriever
from logitmix.trainer import loop
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.export.export import export
from logitmix.trainer.run import checkpoint
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.warm_start import warm_start

SETTINGS = {
    "comm.forward": "fp32",
    "comm.backward": "fp32",
    "train.precision": "fp32",
    "train.epochs": 3,
    "train.batch_size": 8,
    "train.ema": 0.5,
    "dense.optimizer": "sgd",
    "tables.optimizer": "rowwise_adagrad",
    "tables.lr": 1e-2,
    "model.features": ["all", USER],
    "model.user_id_dropout": 0.1,
    "tables.brand.capacity": 3,
    "tables.tags.capacity": 5,
    "tables.tags.admit_after": 2,
    "tables.user.capacity": 9,
    "tables.user.evict": "frequency",
}
GROWING = ("brand", "tags", USER)


def with_epochs(config: Config, stop_after: float) -> Config:
    return replace(config, train=replace(config.train, stop_after_epochs=stop_after))


def begin(run: Path, config: Config) -> "list[Map]":
    """Trains an epoch; returns the maps as this rank restores them."""
    loop.train(with_epochs(config, 1), run)
    return maps_of(run, config)


Map = dict[str, list[int]]


def maps_of(run: Path, config: Config) -> list[Map]:
    """As this rank restores them: by table, what its buckets have, and how far they are."""
    with a_model(config) as (model, optimizer):
        checkpoint.restore(run, config, model, optimizer)
        found = []
        for table in model.growing.values():
            of = {"id": table.map.rows.id} | table.state()
            found.append({name: slots.ravel().tolist() for name, slots in of.items()} | {"steps": [int(table.steps)]})
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a dataset and a run by one process."""
    folder = tmp_path_factory.mktemp("growing")
    loop.train(configured(folder, write=True), folder / "whole")
    return folder


@pytest.fixture(scope="module")
def begun(folder: Path) -> list[list[Map]]:
    """By rank, the maps of a run that two have begun."""
    return two_ranks.run(begin, folder / "begun", configured(folder))


def configured(folder: Path, write: bool = False) -> Config:
    return small_config(write_dataset(folder / "data", features=True) if write else folder / "data", SETTINGS)


def test_a_checkpoint_is_divided_among_the_ranks(folder: Path, begun: list[list[Map]]) -> None:
    alone = maps_of(folder / "begun", configured(folder))
    # A batch ahead of the checkpoint's step.
    assert [of["steps"] for of in alone] == [[1 + load_saved(folder / "begun", "last").step]] * len(GROWING)
    for number, whole in enumerate(alone):
        for name, values in whole.items():
            found = [part[number][name] for part in begun]
            assert values == (found[0] if name == "steps" else [value for part in found for value in part]), name
        assert sum(value > 0 for value in whole["id"]) == (3, 5, 9)[number]


def assert_goes_on(run: Path, whole: Path) -> None:
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)
    for name in GROWING:
        rows = [load_saved(of, "last").id_of_row(name) for of in (run, whole)]
        assert rows[0] is not None and rows[1] is not None and torch.equal(rows[0], rows[1])


def test_one_process_goes_on_where_two_were(folder: Path, begun: list[list[Map]], tmp_path: Path) -> None:
    run = shutil.copytree(folder / "begun", tmp_path / "run")
    loop.train(configured(folder), run)
    assert_goes_on(run, folder / "whole")


@pytest.mark.slow
def test_three_ranks_go_on_where_two_were(folder: Path, begun: list[list[Map]], tmp_path: Path) -> None:
    run = shutil.copytree(folder / "begun", tmp_path / "run")
    two_ranks.run(loop.train, configured(folder), run, world_size=3)
    assert_goes_on(run, folder / "whole")


def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    config = configured(folder)
    for epochs in (1, 2, 0):
        loop.train(with_epochs(config, epochs), tmp_path / "run")
    assert jobs.metrics(tmp_path / "run") == jobs.metrics(folder / "whole")
    assert jobs.results(tmp_path / "run") == jobs.results(folder / "whole")


@pytest.mark.parametrize("from_growing", [True, False])
def test_a_warm_start_with_a_capacity_in_one_of_the_runs(folder: Path, tmp_path: Path, from_growing: bool) -> None:
    """Values take their rows with them, as far as there is one in both."""
    growing = configured(folder)
    static = replace(growing, tables=replace(growing.tables, by_name={}))
    first, second = (folder / "whole", static) if from_growing else (tmp_path / "static", growing)
    if not from_growing:
        loop.train(with_epochs(static, 1), first)
    dataset, saved = load_dataset(folder / "data"), load_saved(first)
    with a_model(second) as (model, _):
        said = warm_start(first, second, dataset, model)
        assert "51 of 51 rows of table item" in said and "warm start: table" not in said
        for name, capacity in zip(GROWING, (3, 5, 9), strict=True):
            id_N = np.arange(1, dataset.schema.only(second.model.features).table(name).rows)
            now = torch.from_numpy(id_N) if from_growing else model.growing[name].find(torch.from_numpy(id_N))
            then, rows = saved.rows_of(name, id_N), saved.read_rows(name, 0, saved.tower.schema.table(name).rows)
            both = (then > 0) & (now.numpy() > 0)
            assert both.sum() == min(capacity, len(id_N))
            assert torch.equal(gather_table(model, name)[now[both]], rows[then[both]])
            assert f"{1 + both.sum()} of {len(gather_table(model, name))} rows of table {name}" in said


def test_an_export_knows_the_values_that_have_rows_and_no_other(folder: Path, tmp_path: Path) -> None:
    export(folder / "whole", tmp_path / "served")
    retriever, model = Retriever.load(tmp_path / "served"), load_saved(folder / "whole")
    dataset = load_dataset(folder / "data")

    def scores(user: dict[str, object]) -> list[float]:
        return [
            row["score"] for row in ranked_rows(retriever.recommend([{"history": ["item-3"], "user": user}], 10))[0]
        ]

    nobody = scores({})
    for feature, table, values in (("user", USER, dataset.vocabulary(USER)), ("favorites", "brand", [])):
        names, id_R = values or [None, *(f"brand-{row}" for row in range(1, 7))], model.id_of_row(table)
        assert id_R is not None
        known = {value for value in id_R.tolist() if value}
        assert 0 < len(known) < len(names) - 1
        for value in range(1, len(names)):
            given = [names[value]] if feature == "favorites" else names[value]
            unknown = scores({feature: ["nothing"]}) if feature == "favorites" else nobody
            assert (scores({feature: given}) != unknown) == (value in known), (feature, value)

    # Items' features have the rows of the checkpoint.
    rows = model.rows_of("brand", np.arange(7))
    assert [row > 0 for row in rows] == [value in set(id_R.tolist()) - {0} for value in range(7)]
    assert torch.equal(id_R[torch.from_numpy(rows[rows > 0])], torch.from_numpy(np.flatnonzero(rows)))
