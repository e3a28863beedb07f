"""A run that is trained first and gives another its first weights: the section [start]."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from small_data import made_run, small_config, write_dataset

from logitmix.trainer import cli
from logitmix.trainer.config import (
    Config,
    dump_toml,
    flatten,
    load_recipe,
    load_toml,
    recipe_names,
    with_settings,
)
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import checkpoint_paths, read_config
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.stages import better_start, final_run, own_minutes
from logitmix.trainer.step.pipeline import Pipeline

BOTH = {"train.precision": "fp32", "evaluate.baselines": False, "train.epochs": 2, "train.schedule": "cosine"}
DOT = {"model.similarity.kind": "dot", "model.hindexer.weight": 0.0, "dense.lr": 0.003}
START = {f"start.{name}": value for name, value in DOT.items()}
KNOWN = {"model.features": ["all", "user"], "model.similarity.user_component": True}


def weights(run: Path) -> list[torch.Tensor]:
    saved = load_saved(run)
    return [*saved.tower.parameters(), saved.read_rows("item", 0, saved.num_items)]


def same(run: Path, other: Path) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(run), weights(other), strict=True))


def metrics(run: Path) -> dict[str, Any]:
    found = json.loads((run / "results.json").read_text())
    return {name: value for name, value in found.items() if "second" not in name}


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside a dataset the two runs dot and mol, trained one after the other and with refits."""
    folder, refit = tmp_path_factory.mktemp("hand"), {"train.refit": True}
    data = write_dataset(folder / "data", ring=True)
    train(small_config(data, BOTH | DOT | refit), folder / "dot")
    train(small_config(data, BOTH | {"warm_start": str(folder / "dot")} | refit), folder / "mol")
    return folder


def test_it_is_as_trained_by_hand_and_so_is_the_refit(by_hand: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tested = train(small_config(by_hand / "data", BOTH | START | {"train.refit": True}), run)
    for ours, theirs in (("", "mol"), ("refit", "mol/refit"), ("start", "dot"), ("refit/start", "dot/refit")):
        assert same(run / ours, by_hand / theirs) and metrics(run / ours) == metrics(by_hand / theirs)
    assert tested["hr@10"] == metrics(run / "refit")["hr@10"]
    assert read_config(run / "start").model.similarity.kind == "dot"
    assert {path.name for path in run.iterdir() if path.is_dir()} == {"checkpoints", "refit", "start", "tensorboard"}


def test_two_ranks_train_the_same(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", ring=True)
    plain = {"comm.forward": "fp32", "comm.backward": "fp32", "tables.optimizer": "sgd", "dense.optimizer": "sgd"}
    config = small_config(data, BOTH | START | plain | {"model.encoder.dropout": 0.0, "train.refit": True})
    of_two, other = two_ranks.run(train, config, tmp_path / "two")
    train(config, tmp_path / "one")
    assert of_two["hr@10"] == other["hr@10"]
    for run in ("", "refit"):
        for pair in zip(weights(tmp_path / "one" / run), weights(tmp_path / "two" / run), strict=True):
            torch.testing.assert_close(*pair, rtol=0, atol=1e-6)


def killed_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Steps have no end from this one on."""
    apply = Pipeline.apply_gradients

    def killed(pipeline: Pipeline, prefetch: bool = True, settle: bool = False) -> None:
        if pipeline.step == step:
            raise KeyboardInterrupt
        apply(pipeline, prefetch, settle)

    patch.setattr(Pipeline, "apply_gradients", killed)


def test_an_interrupted_start_goes_on_and_is_not_needed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    config = small_config(data, BOTH | START)
    train(config, tmp_path / "undisturbed")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(6, patch)
        train(config, run)
    assert [path.name for path in checkpoint_paths(run / "start")] == ["step-4"] and not checkpoint_paths(run)
    assert read_config(run).start == config.start
    capsys.readouterr()
    train(config, run)
    said = capsys.readouterr().err
    assert f"continuing {run}/start after step 4" in said and f"warm start from {run}/start, step" in said
    assert same(run, tmp_path / "undisturbed")
    (run / "start").rename(tmp_path / "gone")
    train(config, run)
    assert "warm start" not in capsys.readouterr().err and not (run / "start").exists()


def test_other_settings_are_refused_before_the_files_of_the_run_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    settings = BOTH | START | {"train.precision": "auto"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(6, patch)
        train(small_config(data, settings), run)
    noted = [(run / name).read_bytes() for name in ("config.toml", "dataset.json")]
    other = write_dataset(tmp_path / "other", seed=1)
    for config, said in (
        (
            small_config(data, settings | {"start.dense.lr": 0.25}),
            r"start was started with other settings: dense\.lr was",
        ),
        (small_config(other, settings), r"other is not the dataset that .*start began with"),
    ):
        with pytest.raises(ValueError, match=said):
            train(config, run)
        assert noted == [(run / name).read_bytes() for name in ("config.toml", "dataset.json")]
    train(small_config(data, settings), run)
    assert [row["step"] for row in read_rows(run / "start", "validation")] == [4, 8]


def test_a_refit_whose_first_run_is_not_finished_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    train(small_config(data, BOTH | START), run)
    assert final_run(run) == run
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(6, patch)
        train(small_config(data, BOTH | START | {"train.refit": True}), run)
    assert (run / "refit" / "start" / "config.toml").exists() and not checkpoint_paths(run / "refit")
    with pytest.raises(ValueError, match="refit is not finished: go on with"):
        final_run(run)


def test_without_the_first_run_nobody_knows_what_is_left_of_the_minutes(tmp_path: Path) -> None:
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    config = small_config(data, BOTH | START | {"train.schedule": "constant", "train.minutes": 5.0})
    train(config, run)
    (run / "start").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"run/start is gone, whose results say how much of train\.minutes is left"):
        train(config, run)


def test_each_has_half_of_the_minutes(tmp_path: Path) -> None:
    minutes = {"train.minutes": 10.0}
    config = with_settings(Config(), minutes | START)
    run = tmp_path / "run"
    assert config.first and config.first.train.minutes == 5
    share = with_settings(config, {"start.train.minutes": 4.0})
    assert share.first and share.first.train.minutes == 4
    assert own_minutes(run, with_settings(Config(), START)) == math.inf
    first_alone = with_settings(Config(), START | {"start.train.minutes": 4.0})
    assert first_alone.first and (first_alone.first.train.minutes, own_minutes(run, first_alone)) == (4, math.inf)


def test_time_that_the_first_run_has_left_is_for_the_run_itself(tmp_path: Path) -> None:
    config = with_settings(Config(), {"train.minutes": 10.0} | START)
    (tmp_path / "start").mkdir()
    for seconds, left in ((90.0, 8.5), (700.0, 0.0)):
        (tmp_path / "start" / "results.json").write_text(json.dumps({"seconds": seconds}))
        assert own_minutes(tmp_path, config) == left


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"start.model.dim": 16}, "model.dim was 16, is 8"),
        (
            {"start.model.features": ["recency"]},
            "event feature recency (id of table recency) is not used; that run has",
        ),
    ],
)
def test_weights_that_would_not_fit_are_refused_before_anything_is_trained(
    setting: dict[str, Any], said: str, tmp_path: Path
) -> None:
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    with pytest.raises(ValueError, match=f"the run that is trained first would not fit: {re.escape(said)}"):
        train(small_config(data, BOTH | START | setting), run)
    assert not run.exists()


def test_a_first_run_keeps_its_precision(tmp_path: Path) -> None:
    """Also where the run itself has chosen another one since."""
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    settings = BOTH | START | {"train.epochs": 1}
    train(small_config(data, settings | {"train.refit": True}), run)
    shutil.rmtree(run / "checkpoints")
    train(small_config(data, settings | {"train.precision": "bf16"}), run)
    assert read_config(run).train.precision == "bf16" and read_config(run / "start").train.precision == "fp32"


# A run that can only lose: a similarity that begins at random and learns nothing.
LOSES = {"model.similarity.kind": "mlp", "tables.lr": 1e-20, "dense.lr": 1e-20, "evaluate.metric": "mrr"}
WINS = {"start.tables.lr": 0.03, "start.dense.lr": 0.003, "start.model.similarity.kind": "dot"}


def validation(run: Path) -> dict[int, float]:
    """MRR on validation, by step."""
    return {row["step"]: row["mrr"] for row in read_rows(run, "validation")}


def test_a_start_that_is_better_than_the_run_is_what_the_run_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    config = small_config(data, BOTH | WINS | LOSES)
    results = train(config, run)
    own, of_start = validation(run), validation(run / "start")
    best = max(of_start, key=of_start.__getitem__)
    assert list(own) == [0, 4, 8] and max(own.values()) < of_start[best]
    assert (
        f"the start is better: validation mrr is {of_start[best]:.4f} in {run}/start, and at best "
        f"{max(own.values()):.4f} here (step 0); its checkpoint, of step {best}, is tested, exported and refitted\n"
    ) in capsys.readouterr().err
    assert (results["step"], results["start/step"]) == (0, best)
    assert [row["step"] for row in read_rows(run, "test")] == [0]
    for name in ("test_ranks.json", "test_users.json"):
        assert (run / name).read_bytes() == (run / "start" / name).read_bytes()
    assert final_run(run) == run / "start"
    for split, of_split in (("test", results), ("validation", {"mrr": of_start[best]})):
        found = evaluate_run(run, split, "cpu", 1)
        assert (found["step"], found["mrr"]) == (best, of_split["mrr"])

    def exported(name: str, **options: Any) -> str:
        export(run, tmp_path / name, **options)
        kind: str = json.loads((tmp_path / name / "manifest.json").read_text())["model"]["similarity"]["kind"]
        return kind

    assert exported("best") == "dot" and exported("last", which="last") == "mlp"
    refitted = train(small_config(data, BOTH | WINS | LOSES | {"train.refit": True}), run)
    refit = read_config(run / "refit")
    assert refit.first is None and refit.model.similarity.kind == "dot" and not refit.data.validation
    assert final_run(run) == run / "refit" and refitted["step"] == best and "start/step" not in refitted
    shutil.rmtree(run / "refit")
    (run / "start").rename(tmp_path / "gone")
    for use in (lambda: exported("other"), lambda: train(config, run)):
        with pytest.raises(ValueError, match=r"run/start is gone, whose checkpoint is better on validation than those"):
            use()


def test_what_a_run_begins_as_is_its_best_checkpoint_where_training_makes_it_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    harmful = {"tables.lr": 3.0, "dense.lr": 3.0, "evaluate.metric": "mrr", "train.refit": True}
    gentle = {"start.tables.lr": 0.03, "start.dense.lr": 0.003}
    config = small_config(data, BOTH | gentle | harmful)
    train(config, run)
    own, of_start = validation(run), validation(run / "start")
    assert own[0] == max(of_start.values()) > max(own[4], own[8])
    said = capsys.readouterr().err
    assert "no step of training is better in validation mrr than the start: the model as it began (step 0) is" in said
    assert "refit of one step, as no later one was better than the start, on the validation actions too" in said
    assert metrics(run)["step"] == load_saved(run).step == 0 and metrics(run / "refit")["step"] == 1
    assert metrics(run)["mrr"] == metrics(run / "start")["mrr"] and final_run(run) == run / "refit"


def test_a_run_that_is_killed_after_its_first_evaluation_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, first, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "first", tmp_path / "run"
    train(small_config(data, BOTH | DOT), first)
    config = small_config(data, BOTH | {"warm_start": str(first)})
    train(config, tmp_path / "undisturbed")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(1, patch)
        train(config, run)
    assert [path.name for path in checkpoint_paths(run)] == ["step-0"]
    capsys.readouterr()
    train(config, run)
    assert "warm start" not in capsys.readouterr().err and same(run, tmp_path / "undisturbed")
    assert read_rows(run, "validation") == read_rows(tmp_path / "undisturbed", "validation")


@pytest.mark.parametrize(
    ("of_start", "settings", "better"),
    [
        ([0.1, 0.3], {}, True),
        ([0.3], {"start.evaluate.users": 9}, False),
        ([0.3], {"start.evaluate.exclude_history": "no"}, False),
        ([], {}, False),
        # Its own metric chooses its checkpoint: that of step 1, whose hr@10 is lower.
        ([0.1, 0.3], {"start.evaluate.metric": "mrr"}, False),
    ],
)
def test_a_start_is_compared_by_the_same_rules(
    tmp_path: Path, of_start: list[float], settings: dict[str, Any], better: bool
) -> None:
    config = small_config(tmp_path, BOTH | START | settings)
    made_run(tmp_path / "run", [{"kind": "validation", "step": 4, "hr@10": 0.2, "mrr": 0.1}], BOTH | START | settings)
    rows = [
        {"kind": "validation", "step": step, "hr@10": value, "mrr": 0.9 / step}
        for step, value in enumerate(of_start, start=1)
    ]
    assert config.first
    made_run(tmp_path / "run" / "start", rows, {})
    (tmp_path / "run" / "start" / "config.toml").write_text(dump_toml(config.first))
    assert bool(better_start(tmp_path / "run", config)) == better


def test_it_does_not_know_a_user_who_is_a_component_of_the_run_itself() -> None:
    """It would learn queries with the user added, which the run itself has without."""
    for start in (START, {"start.train.epochs": 1}):
        first = with_settings(load_recipe("demo-mol"), start | KNOWN).first
        assert first and first.model.features == ("all",)
        assert not getattr(first.model.similarity, "user_component", False)
    first = with_settings(load_recipe("demo-mol"), START | KNOWN | {"model.similarity.user_component": False}).first
    assert first and first.model.features == ("all", "user")


def test_what_it_does_not_say_is_as_in_the_run_itself() -> None:
    config = with_settings(
        load_recipe("demo-mol"), START | {"train.seed": 3, "train.epochs": 5, "train.stop_after_epochs": 2.0}
    )
    first = config.first
    assert first
    changed = {name for name, value in flatten(first).items() if flatten(config).get(name, value) != value}
    assert changed == {*DOT, "train.stop_after_epochs", "evaluate.baselines"}
    assert (first.train.seed, first.train.epochs, first.train.stop_after_epochs) == (3, 5, 0)
    assert load_toml(dump_toml(config), "here") == config
    assert with_settings(config, {"warm_start": "runs/other"}).first is None


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"start.model.dimm": 8}, "start: unknown key model.dimm (did you mean dim?)"),
        ({"start.data.path": "other"}, "start is data; it must be settings of model, tables, dense, train, evaluate"),
        ({"start.train.threads": 2}, "start.train.threads is 2; it must be that of the run itself (1)"),
        (
            {"train.minutes": 3.0, "start.train.minutes": 3.0},
            "start.train.minutes is 3.0; it must be above 0 and below train.minutes (3)",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        with_settings(Config(), settings)
    assert str(raised.value).endswith(said)


def test_the_command_line_changes_them(tmp_path: Path, refusal: Callable[..., str], to_train: list[Config]) -> None:
    data, recipe = tmp_path / "data", tmp_path / "recipe.toml"
    recipe.write_text(dump_toml(small_config(data, BOTH | START)))
    train_it = ["train", str(recipe), "--run", str(tmp_path / "run")]

    def taken(*words: str) -> tuple[Config, Config | None]:
        """The settings of the run and of the one that is trained first."""
        cli.main([*train_it, *words])
        config = to_train.pop()
        return config, config.first

    words = ["--train.seed", "4", "--train.epochs", "1", "--start.train.epochs", "3"]
    main, first = taken(*words, "--start.model.encoder.dropout=0.25", "--start.tables.item.lr=0.5")
    assert first
    assert (main.train.seed, main.train.epochs, main.model.encoder.dropout) == (4, 1, 0.2)
    assert (first.train.seed, first.train.epochs, first.model.encoder.dropout) == (4, 3, 0.25)
    assert first.model.similarity.kind == "dot" and first.dense.lr == 0.003
    assert (first.tables.of("item").lr, main.tables.of("item").lr) == (0.5, main.tables.lr)

    cold, first = taken("--no-start")
    assert first is None and cold.start == {}

    recipe.write_text(dump_toml(small_config(data, BOTH)))
    _, first = taken("--start.model.similarity.kind", "dot")
    assert first and first.model.similarity.kind == "dot"
    for given, said in (
        (["--start.train.epoch", "3"], "--start: unknown option --train.epoch (did you mean --train.epochs?)"),
        (["--start.train.epochs", "3", "--no-start"], "--no-start leaves out the run that --start has settings of"),
        (["--start.train.epochs", "3", "--warm-start", "runs/a"], "in place of --warm-start: give only one"),
    ):
        assert said in refusal(*train_it, *given) and not to_train


def test_the_recipes_start_as_the_dot_products_recipes_train() -> None:
    starting = {name: load_recipe(name).first for name in recipe_names()}
    pairs = {"auto-mol": "auto", "ml-1m-mol": "ml-1m-dot", "ml-1m-hstu-mol": "ml-1m-hstu"}
    # Those of auto-mol are sized.
    others = {
        "auto-mol": {"train.epochs", "model.loss.negatives"},
        "ml-1m-mol": {"train.epochs", "evaluate.every_epochs"},
    }
    assert {name for name, first in starting.items() if first} == pairs.keys()
    for name, dot in pairs.items():
        first, alone = flatten(starting[name]), flatten(load_recipe(dot))
        differ = {setting for setting in first if first[setting] != alone.get(setting)} - {"evaluate.baselines"}
        assert differ == others.get(name, set())
