"""`logitmix plan`, for jobs that cannot be started here. That it foresees a job's own plan: test_main_job.py."""

import json

import pytest
from small_data import small_config, write_dataset

from logitmix.trainer import cli
from logitmix.trainer.config import dump_toml

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
        ("--gpu-gib 0", "--gpu-gib is 0.0; it must be above 0"),
        ("--world-size 0", "--world-size is 0; it must be at least 1"),
        ("--world-size 6 --per-host 4", "--per-host is 4; it must be a divisor of the 6 ranks"),
        ("--device cpu --tables.precision fp16", "the precision of table item is fp16, which FBGEMM trains on CUDA"),
        ("--tables.brand.lr 1", "tables.brand: no table brand"),
        ("--data.path nothing", "no dataset at nothing"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", recipe, *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith(f"logitmix: {message}")


def test_it_needs_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: logitmix plan RECIPE")
    with pytest.raises(SystemExit):
        cli.main(["plan", "--world-size", "8"])
    assert "plan needs a recipe first" in capsys.readouterr().err
