"""`logitmix plan`, for jobs that cannot be started here. That it foresees a job's own plan: test_main_job.py."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from small_data import small_config, write_dataset

from logitmix.modules.config import LossConfig
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.trainer import cli
from logitmix.trainer.config import dump_toml
from logitmix.trainer.parallel.traffic import expected_ids

GIB = 2**30


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("job_plan")
    write_dataset(folder / "data")
    (folder / "small.toml").write_text(dump_toml(small_config(folder / "data", {"model.dim": 64})))
    return str(folder / "small.toml")


def test_gpus_that_are_not_here(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", recipe, "--world-size", "4", "--gpu-gib", "16", "--tables.optimizer", "rowwise_adagrad"])
    said = capsys.readouterr().out
    assert "4 on cuda, 4 on each host" in said and "on each rank of 16 GiB: tables with their optimizers" in said
    assert "table item" in said and "rowwise_adagrad" in said

    cli.main(["plan", recipe, "--world-size", "16", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"] == {"world_size": 16, "per_host": 8, "kind": "cuda", "bytes": 80 * GIB}
    assert len(plan["table_bytes"]) == 16 and sum(plan["table_bytes"]) == plan["tables"]["item"]["bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu-gib 0.00001", "the planner cannot place the tables with tables.sharding auto: "),
        ("--items 1e12 --gpu-gib 80", "the tables take 698.5 TiB with their optimizers' state and moving averages, "),
        ("--items 0.5", "--items is 0.5; it must be at least 1"),
        ("--users 5", "--users is 5.0; it must be given with --items alone"),
        ("--items 5 --rows city", "--rows has 'city'; give NAME=ROWS, such as city=50000"),
        ("--gpu-gib 0", "--gpu-gib is 0.0; it must be above 0"),
        ("--world-size 0", "--world-size is 0; it must be at least 1"),
        ("--world-size 6 --per-host 4", "--per-host is 4; it must be a divisor of the 6 ranks"),
        ("--device cpu --tables.precision fp16", "the precision of table item is fp16, which FBGEMM trains on CUDA"),
        ("--tables.brand.lr 1", "tables.brand: no table brand"),
        ("--data.path nothing", "no dataset at nothing"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str, recipe: str, refusal: Callable[..., str]) -> None:
    (line,) = refusal("plan", recipe, *words.split()).splitlines()
    assert line.startswith(f"logitmix: {message}")


def test_it_needs_a_recipe(capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]) -> None:
    assert "plan needs a recipe first" in refusal("plan", "--world-size", "8")
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: logitmix plan RECIPE")


def test_a_dataset_need_not_be_there(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--items", "1e9", "--users", "1e6", "--rows", "city=5e4", "--model.features", "user", "--history", "50"]
    cli.main(["plan", recipe, *words, "--world-size", "64", "--data.path", "nothing"])
    said = capsys.readouterr().out
    assert "imagined: 1,000,000 users, 1,000,000,000 items" in said
    assert "table item  1,000,000,001 x 64" in said and "table city  50,000 x 64" in said
    assert "table user  1,000,001 x 64" in said and " to other hosts)" in said


def test_ids_that_are_expected_are_those_of_random_draws() -> None:
    random = np.random.default_rng(0)
    schema = Schema(
        (*Schema.of_ids(999).features, Feature("city", "item", "id", "city")), (Table("item", 1000), Table("city", 40))
    )
    found = expected_ids(schema, LossConfig(negatives=300, share="sequence"), sequences=4, length=20)
    drawn = 4 * 20 + 4 + 4 * 300
    different = [len(np.unique(random.integers(0, 999, drawn))) for _ in range(200)]
    assert abs(len(found["item"]) - np.mean(different)) < 3
    assert len(found["city"]) == 40 and torch.equal(found["city"], torch.arange(40))
    assert torch.equal(found["item"], found["item"].unique()) and int(found["item"][-1]) < 1000
