"""What the recipe `auto` makes of a dataset, and what stands above it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from logitmix.modules.config import HSTUConfig, MoLConfig, PooledConfig, SASRecConfig
from logitmix.trainer import api, cli
from logitmix.trainer.commands.sizing import AUTO, load_sized, settled, sized
from logitmix.trainer.config import Config, changed, dump_toml, flatten, load_recipe, recipe_names, with_settings

BRAND = {"name": "brand", "owner": "item", "kind": "id", "table": "brand"}
TITLES = {"name": "title", "owner": "item", "kind": "text", "width": 2, "encoder": "ngrams", "version": "1"}
AGE = {"name": "age", "owner": "user", "kind": "number"}


def described(users: int, items: int, actions: int, *features: dict[str, Any]) -> dict[str, Any]:
    """The entries of a dataset.json that count."""
    item = {"name": "item", "owner": "item", "kind": "id", "table": "item"}
    return {"users": users, "items": items, "actions": actions, "schema": {"features": [item, *features]}}


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """A folder with a dataset.json of 1,000 users, 500 items and 20,000 actions."""
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "dataset.json").write_text(json.dumps(described(1000, 500, 20_000, BRAND, TITLES, AGE)))
    return tmp_path / "clicks"


@pytest.mark.parametrize("users", [1, 2, 5, 17, 1000, 40_000, 10**8])
@pytest.mark.parametrize("length", [1, 3, 9, 40, 1000])
@pytest.mark.parametrize("items", [1, 10, 2000, 10**8])
def test_every_size_gives_settings_that_can_be(users: int, length: int, items: int) -> None:
    config = with_settings(
        load_recipe(AUTO), {name: value for name, (value, _) in sized(described(users, items, users * length)).items()}
    )
    assert config.train.batch_size <= max(users, 1)
    assert config.model.loss.negatives == (0 if items <= 4096 else 2048) and config.model.loss.share == "batch"
    # The steps of all epochs are bounded, but for three epochs.
    steps = -(-users // config.train.batch_size)
    assert config.train.epochs * steps <= 30_000 or config.train.epochs == 3
    assert config.evaluate.every_epochs * steps >= 300


def test_an_empty_dataset_has_sizes_too() -> None:
    """Reading it says what is wrong with it."""
    assert sized(described(0, 0, 0))["train.batch_size"][0] == 1


def test_item_features_are_taken_and_no_others() -> None:
    assert sized(described(10, 10, 100, BRAND, AGE))["model.features"][0] == ["brand"]
    assert "model.features" not in sized(described(10, 10, 100, AGE))
    dated = {"name": "released", "owner": "item", "kind": "date", "unit": "s"}
    assert sized(described(10, 10, 100, BRAND, dated, TITLES))["model.features"] == (
        ["brand"],
        "those of items: requests need not name them, without released, title: dates and vectors of texts did not pay",
    )
    assert sized(described(10, 10, 100, dated, TITLES))["model.features"] == (
        [],
        "without released, title: dates and vectors of texts did not pay; --model.features released title ranks items "
        "added later by them",
    )


def test_weights_are_averaged_where_the_items_are_not_too_many() -> None:
    assert sized(described(10, 1_000_000, 100))["train.ema"][0] == 0.99
    assert "train.ema" not in sized(described(10, 1_000_001, 100))


def test_hstu_encodes_long_histories_where_the_actions_are_many(
    clicks: Path, to_train: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for users, actions in ((943, 100_000), (2_666, 399_999), (2_667, 400_000)):
        assert "model.encoder.kind" not in sized(described(users, 3_000, actions))
    (clicks / "dataset.json").write_text(json.dumps(described(2_666, 3_000, 400_000)))
    path = str(clicks)
    cli.main(["train", "auto", "--data.path", path])
    said = " ".join(capsys.readouterr().err.split())
    assert "encoder.kind hstu (ahead of SASRec where " in said and "encoder.blocks 8 (" in said
    for kind in ("sasrec", "pooled"):
        cli.main(["train", "auto", "--data.path", path, "--model.encoder.kind", kind])
        assert "encoder.kind" not in capsys.readouterr().err
    api.train("auto", "run", {"data.path": path, "model.encoder.kind": "sasrec"})
    blocks = {"blocks": 2, "heads": 1, "dropout": 0.2, "max_length": 200}
    sasrec = SASRecConfig(**blocks)
    cli.main(["train", "auto", "--data.path", path, "--model.encoder.kind", "hstu", "--model.encoder.blocks", "4"])
    api.train("auto", "run", {"data.path": path, "model.encoder.kind": "hstu"})
    deep = HSTUConfig(**blocks | {"blocks": 8, "heads": 2})
    assert [of.model.encoder for of in to_train] == [
        deep, sasrec, PooledConfig(max_length=200), sasrec, replace(deep, blocks=4), deep
    ]  # fmt: skip


def test_hstu_is_no_deeper_than_the_minutes_pay(
    clicks: Path, to_train: list[Config], capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    (clicks / "dataset.json").write_text(json.dumps(described(2_666, 3_000, 400_000)))
    path = str(clicks)
    for minutes in ("0", "2.9", "3"):
        cli.main(["train", "auto", "--data.path", path, f"--train.minutes={minutes}"])
        said = " ".join(capsys.readouterr().err.split())
        assert ("encoder.blocks 2 (8 are ahead only after about three minutes on a core)" in said) == (minutes == "2.9")
    api.train("auto", "run", {"data.path": path, "train.minutes": 2})
    cli.main(["train", "auto-mol", "--data.path", path, "--train.minutes", "2", "--model.encoder.blocks", "4"])
    for minutes in ("5.9", "6"):  # the dot product has half of them
        cli.main(["train", "auto-mol", "--data.path", path, "--train.minutes", minutes])
    encoders = [of.model.encoder for of in to_train]
    assert all(isinstance(of, HSTUConfig) for of in encoders)
    assert [(of.blocks, of.heads) for of in encoders] == [(8, 2), (2, 1), (8, 2), (2, 1), (4, 1), (2, 1), (8, 2)]  # type: ignore[union-attr]
    assert "--train.minutes" in refusal("train", "auto", "--data.path", path, "--train.minutes", "few")


def test_what_is_said_stands_above_what_is_sized(
    clicks: Path, to_train: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config, said = settled(*load_sized("auto", str(clicks)))
    assert config.train.epochs != load_recipe("auto").train.epochs and config.model.features == ("brand",)
    assert said.startswith("sized: ") and f"train.epochs {config.train.epochs:g} (" in said
    path = str(clicks)
    cli.main(["train", "auto", "--data.path", path])
    assert said in capsys.readouterr().err
    cli.main(["train", "auto", "--data.path", "nowhere", f"--data.path={path}", "--train.batch-size", "7"])
    cli.main(["train", "auto", "--data.path", path, "--model.similarity.kind", "mol", "--model.features", "age"])
    api.train("auto", "run", {"data.path": path})
    assert said in capsys.readouterr().err
    api.train("auto", "run", {"data.path": path, "train.batch_size": 7})
    sizes = with_settings(config, {"data.path": path})
    assert to_train[0] == to_train[3] == sizes
    # 1,000 users are 143 steps.
    of_seven = {"train.batch_size": 7, "evaluate.every_epochs": 3, "train.epochs": 209}
    assert to_train[1] == to_train[4] == with_settings(sizes, of_seven)
    assert to_train[2].model.features == ("age",) and isinstance(to_train[2].model.similarity, MoLConfig)
    assert to_train[2].train == sizes.train
    cli.main(["train", "auto", "--data.path", path, "--data.items", "2"])
    api.train("auto", "run", {"data.path": path, "data.items": 2})
    assert capsys.readouterr().err.count("loss.negatives 0 (all 2 items)") == 2


def test_only_what_is_kept_is_said(clicks: Path) -> None:
    """And items' ids are not dropped where nothing else says what an item is."""
    config, found = load_sized("auto", str(clicks))
    said = " ".join(settled(config, found)[1].split())
    assert "features ['brand'] (" in said and "item_id_dropout 0.1 (" in said
    everything, said = settled(with_settings(config, {"model.features": ["all"], "train.epochs": 2}), found)
    assert "features ['brand']" not in said and "train.epochs" not in said and "item_id_dropout 0.1 (" in said
    assert everything.model.features == ("all",) and everything.model.item_id_dropout == 0.1
    for features in ([], ["age", "user"]):
        without, said = settled(with_settings(config, {"model.features": features}), found)
        assert without.model.item_id_dropout == 0 and "dropout" not in said
    (clicks / "dataset.json").write_text(json.dumps(described(1000, 500, 20_000, TITLES)))
    config, found = load_sized("auto", str(clicks))
    for features, dropout in (([], 0.0), (["title"], 0.1)):
        assert settled(with_settings(config, {"model.features": features}), found)[0].model.item_id_dropout == dropout
    kept, _ = settled(with_settings(config, {"model.features": [], "model.item_id_dropout": 0.3}), found)
    assert kept.model.item_id_dropout == 0.3
    assert settled(load_recipe("auto"), {}) == (load_recipe("auto"), "")


def test_auto_mol_trains_auto_first(clicks: Path, to_train: list[Config]) -> None:
    alone, _ = load_sized("auto", str(clicks))
    config, said = settled(*load_sized("auto-mol", str(clicks)))
    first = config.first
    assert first is not None and first.train.epochs == alone.train.epochs and "start.train.epochs 3750 (" in said
    assert (first.model, first.tables, first.dense) == (alone.model, alone.tables, alone.dense)
    assert config.train.batch_size == first.train.batch_size == alone.train.batch_size
    # An epoch has 8 steps.
    assert config.model.loss.resample == 128 and (config.train.epochs, config.evaluate.every_epochs) == (38, 7)
    elsewhere = with_settings(config, {"warm_start": "runs/before"})
    assert "start." not in settled(elsewhere, load_sized("auto-mol", str(clicks))[1])[1]
    cli.main(["train", "auto-mol", "--data.path", str(clicks), "--no-start"])
    assert to_train == [replace(config, start={})]
    # 20 actions a user; from 50 on, its negatives are shared by a sequence.
    assert config.model.loss.share == "group" and "loss.share group (most" in said
    (clicks / "dataset.json").write_text(json.dumps(described(1000, 500, 51_000)))
    assert load_sized("auto-mol", str(clicks))[0].model.loss.share == "sequence"
    # Where items are many, it has an h-indexer.
    (clicks / "dataset.json").write_text(json.dumps(described(1000, 20_001, 20_000)))
    weights = {
        items: load_sized("auto-mol", str(clicks), given={"data.items": items})[0] for items in (0, 20_000, 20_001)
    }
    assert [of.model.hindexer.weight for of in weights.values()] == [0.3, 0.0, 0.3]
    assert all(of.first is not None and of.first.model.hindexer.weight == 0 for of in weights.values())
    # Some settings are of both; components are as wide as the embedding.
    (clicks / "dataset.json").write_text(json.dumps(described(2_666, 3_000, 400_000)))
    of_both = {"model.dim": "128", "evaluate.every_epochs": "3", "train.minutes": "5.9"}
    config = with_settings(
        load_sized("auto-mol", str(clicks), given=of_both)[0], {"model.dim": 128, "evaluate.every_epochs": 3}
    )
    first = config.first
    assert first is not None and first.model.dim == config.model.dim == 128 and first.evaluate.every_epochs == 3
    assert isinstance(config.model.similarity, MoLConfig) and config.model.similarity.component_dim == 128
    # The dot product has half of the minutes, unless there is none.
    blocks = [
        flatten(load_sized("auto-mol", str(clicks), given=of_both | more)[0])["model.encoder.blocks"]
        for more in ({}, {"no_start": ""}, {"warm_start": "runs/none"})
    ]
    assert blocks == [2, 8, 8]
    (clicks / "dataset.json").write_text(json.dumps(described(1000, 500, 20_000)))
    # For so many ranks, both have a larger batch and rates.
    wide, _ = load_sized("auto-mol", str(clicks), scale=4)
    assert wide.first is not None and wide.first.tables.lr == 2 * first.tables.lr and wide.tables.lr == 0.002


def test_explicit_negatives_have_a_loss_that_takes_them(
    clicks: Path, to_train: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.path", str(clicks), "--data.negatives", "shown"]
    cli.main(["train", "auto", *words])
    assert "loss.negatives 128 (those of data.negatives replace up to half)" in " ".join(
        capsys.readouterr().err.split()
    )
    api.train("auto", "run", {"data.path": str(clicks), "data.negatives": ["shown"]})
    cli.main(["train", "auto-mol", *words])
    first = to_train[2].first
    assert first is not None
    for config in (*to_train, first):
        loss = config.model.loss
        assert (loss.negatives, loss.share, loss.resample) == (128, "group", 0)


def test_long_histories_are_trained_on_in_windows(clicks: Path, to_train: list[Config]) -> None:
    assert "train.stride" not in sized(described(2_667, 3_000, 400_000))
    (clicks / "dataset.json").write_text(json.dumps(described(2_666, 3_000, 400_000)))
    others = (["--model.encoder.max-length", "50"], ["--model.encoder.max_length=50"], ["--model.encoder.kind=sasrec"])
    for words in ([], *others, ["--train.stride", "100"]):
        cli.main(["train", "auto", "--data.path", str(clicks), *words])
    api.train("auto", "run", {"data.path": str(clicks), "model.encoder.max_length": 50})
    assert [of.train.stride for of in to_train] == [200, 0, 0, 0, 100, 0]
    # 167 steps of users' last windows, 292 of all.
    dot_products = [to_train[0].first, *to_train[1:]]
    assert [of and of.train.epochs for of in dot_products] == [102, 179, 179, 179, 179, 179]


def test_auto_takes_mol_where_it_pays(clicks: Path, to_train: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    """On data like that on which it was ahead, with time for it, and where nothing else is given."""
    words, left = ["train", "auto", "--data.path", str(clicks)], "is left to the recipe auto-mol: {} is given"
    for items, given, reason in (
        (20_000, [], "ahead on such data, after the dot product"),
        (20_000, ["--train.minutes", "19.9"], "with 20 minutes or more"),
        (20_000, ["--train.minutes", "inf"], "with 20 minutes or more"),
        (20_000, ["--train.epochs=40"], left.format("train.epochs")),
        (20_000, ["--tables.item.lr", "0.01"], left.format("tables.item.lr")),
        (20_000, ["--model.encoder.blocks", "2"], left.format("model.encoder.blocks")),
        (20_000, ["--no-start"], left.format("no_start")),
        (20_000, ["--start.train.epochs", "2"], left.format("start.train.epochs")),
        (20_000, ["--tables.item.sharding", "row_wise"], "ahead on such data, after the dot product"),
        (20_001, [], ""),
        (20_000, ["--model.encoder.kind", "sasrec"], ""),
        (20_000, ["--model.similarity.kind", "dot"], ""),
    ):
        (clicks / "dataset.json").write_text(json.dumps(described(2_666, items, 400_000)))
        cli.main([*words, *given])
        config = to_train.pop()
        said = " ".join(capsys.readouterr().err.split())
        takes = reason.startswith("ahead")
        assert f"similarity.kind {'mol' if takes else 'dot'} (" in said if reason else "similarity.kind" not in said
        assert reason in said
        assert config.model.similarity.kind == ("mol" if takes else "dot")
        assert bool(config.first) == (takes or given[:1] == ["--start.train.epochs"])
        if not given:
            recipe = "auto-mol" if takes else "auto"
            assert config == with_settings(load_sized(recipe, str(clicks))[0], {"data.path": str(clicks)})


@pytest.fixture
def begun(clicks: Path, tmp_path: Path, to_train: list[Config]) -> Callable[..., str]:
    """Makes a run of these words that has been trained."""

    def run(name: str, *words: str, within: str = ".") -> str:
        cli.main(["train", *words, "--run", str(tmp_path / name)])
        (tmp_path / name / within / "checkpoints" / "step-0000001").mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text(dump_toml(to_train.pop()))
        return str(tmp_path / name)

    return run


def test_a_run_goes_on_with_the_same_words_and_other_limits(
    clicks: Path, tmp_path: Path, begun: Callable[..., str], to_train: list[Config]
) -> None:
    """It has the settings that it began with, but for those limits."""
    long = json.dumps(described(2_666, 3_000, 400_000))
    auto, limits = ["auto", "--data.path", str(clicks)], ("train.minutes", "train.epochs")
    for number, (given, other) in enumerate((
        ([], []),
        ([], ["--train.minutes", "2"]),
        (["--train.minutes", "2"], ["--train.minutes", "60"]),
        (["--train.minutes", "2", "--model.encoder.blocks", "8"], ["--train.minutes", "60"]),
        (["--model.encoder.blocks", "2"], ["--train.minutes", "2"]),
        (["--model.encoder.kind", "hstu", "--train.minutes", "9"], ["--train.minutes", "1"]),
        (["--model.encoder.kind", "pooled"], []),
        (["--model.dim", "48", "--model.encoder.heads", "3"], []),
        (["--model.similarity.kind", "mol"], []),
        (["--model.similarity.kind", "mol", "--model.similarity.query-components", "2"], []),
    )):  # fmt: skip
        for size, content in enumerate((long, json.dumps(described(1000, 500, 20_000)))):
            (clicks / "dataset.json").write_text(content)
            run = begun(f"run-{number}-{size}", *auto, *given, within="start" if size else ".")
            cli.main(["train", *auto, *given, *other, "--run", run])
            before = flatten(load_recipe(f"{run}/config.toml"))
            assert {*changed(before, flatten(to_train.pop()))} <= {*limits}, (given, other)
    (clicks / "dataset.json").write_text(long)
    api.train("auto", tmp_path / "run-0-0", {"data.path": str(clicks), "train.minutes": 2})
    api.train("auto", tmp_path / "run-3-0", {"data.path": str(clicks), "train.minutes": 60})
    assert [(of.model.similarity.kind, bool(of.first)) for of in to_train] == [("mol", True), ("dot", False)]


def test_the_model_is_that_of_the_run_that_one_starts_from(
    clicks: Path, tmp_path: Path, begun: Callable[..., str], to_train: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    (clicks / "dataset.json").write_text(json.dumps(described(2_666, 3_000, 400_000)))
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "dataset.json").write_text(json.dumps(described(1000, 500, 20_000)))
    large, small = (["auto", "--data.path", str(path)] for path in (clicks, tmp_path / "small"))
    runs = {
        "mol": begun("mol", *large),
        "brief": begun("brief", *large, "--train.minutes", "2"),
        "few": begun("few", *small, "--model.dim", "48"),
        "demo": begun("demo", "demo-mol", "--data.path", str(clicks), "--model.similarity.query-components", "2"),
        "times": begun("times", *small, "--model.encoder.kind", "hstu", "--model.encoder.times"),
    }
    for name, dataset in (("mol", small), ("brief", large), ("few", large), ("demo", large), ("times", large)):
        before = load_recipe(f"{runs[name]}/config.toml")
        for flag in ("--continue", "--warm-start"):
            cli.main(["train", *dataset, flag, runs[name], "--run", str(tmp_path / "new"), "--train.epochs", "1"])
            config = to_train.pop()
            assert (config.model.encoder, config.model.dim) == (before.model.encoder, before.model.dim)
            assert config.model.similarity == before.model.similarity and config.train.epochs == 1
            assert config.model.hindexer == before.model.hindexer
            assert (config.train.stride > 0) == (before.train.stride > 0)
            begun("new", *dataset, flag, runs[name])
            cli.main(["train", *dataset, flag, runs[name], "--run", str(tmp_path / "new")])
            assert not changed(flatten(load_recipe(str(tmp_path / "new" / "config.toml"))), flatten(to_train.pop()))
            shutil.rmtree(tmp_path / "new")
    said = " ".join(capsys.readouterr().err.split())
    assert "encoder.kind hstu (as in the run before)" in said and "query_components 2 (as in the run before)" in said
    cli.main(["train", *large, "--continue", runs["demo"], "--model.similarity.kind", "mol"])
    cli.main(["train", *large, "--continue", runs["demo"], "--model.similarity.gate-hidden", "8"])
    similarities = [of.model.similarity for of in (to_train.pop(), to_train.pop())]
    assert [isinstance(of, MoLConfig) and (of.query_components, of.gate_hidden) for of in similarities] == [
        (2, 8), (2, 64)
    ]  # fmt: skip
    # Where items have become many, MoL has an h-indexer.
    (clicks / "dataset.json").write_text(json.dumps(described(2_666, 20_001, 400_000)))
    cli.main(["train", *large, "--continue", runs["mol"]])
    assert to_train.pop().model.hindexer.weight == 0.3
    (clicks / "dataset.json").write_text(json.dumps(described(2_666, 3_000, 400_000)))
    # MoL of another shape starts from the dot product's encoder alone, and so does another encoder.
    cli.main(["train", "auto-mol", *large[1:], "--warm-start", runs["few"], "--model.similarity.item-components", "2"])
    mol = to_train.pop().model
    assert (mol.dim, mol.encoder.kind, mol.similarity.kind) == (48, "sasrec", "mol")
    cli.main(["train", *large, "--warm-start", runs["brief"], "--model.encoder.kind", "pooled"])
    assert to_train.pop().model.encoder == PooledConfig(max_length=200)
    # What has not been trained, or is no run, is nothing to go on from.
    Path(runs["few"], "config.toml").unlink()
    cli.main(["train", *large, "--run", runs["few"]])
    assert to_train.pop().model.similarity.kind == "mol"
    shutil.rmtree(tmp_path / "brief" / "checkpoints")
    for flag in ("--run", "--warm-start"):
        cli.main(["train", *large, flag, runs["brief"]])
        assert to_train.pop().model.similarity.kind == "mol"


def test_a_broken_run_is_named(clicks: Path, begun: Callable[..., str], refusal: Callable[..., str]) -> None:
    run = begun("run", "auto", "--data.path", str(clicks))
    with pytest.raises(ValueError, match="warm_start is 5"):
        api.train("auto", "run", {"data.path": str(clicks), "warm_start": 5})
    Path(run, "config.toml").write_bytes(b"\xff\xfe")
    assert f"{run}/config.toml" in refusal("train", "auto", "--data.path", str(clicks), "--run", run)


def test_other_recipes_and_absent_datasets_have_no_sizes(clicks: Path, tmp_path: Path) -> None:
    for name in set(recipe_names()) - {"auto", "auto-mol"}:
        assert load_sized(name, str(clicks)) == (load_recipe(name), {})
    (tmp_path / "broken").mkdir()
    for content in ("{", "[]", '{"users": null}'):
        (tmp_path / "broken" / "dataset.json").write_text(content)
        assert load_sized("auto", str(tmp_path / "broken")) == (load_recipe("auto"), {})
    assert load_sized("auto", str(tmp_path / "none")) == (load_recipe("auto"), {})


def test_a_recipe_for_more_ranks_has_a_larger_batch_and_rates(
    to_train: list[Config], capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    recipe = load_recipe("ml-1m-mol")
    scaled, found = load_sized("ml-1m-mol", scale=4)
    assert (recipe.train.batch_size, scaled.train.batch_size) == (32, 128)
    assert (scaled.tables.lr, scaled.dense.lr) == (2 * recipe.tables.lr, 2 * recipe.dense.lr)
    assert with_settings(scaled, {"train.batch_size": 32, "tables.lr": 1e-3, "dense.lr": 1e-3}) == recipe
    assert "train.batch_size 128 (4 times the batch); tables.lr 0.002 (" in settled(scaled, found)[1]
    cli.main(["train", "ml-1m-mol", "--scale", "4", "--dense.lr", "0.1"])
    assert to_train == [with_settings(scaled, {"dense.lr": 0.1})]
    assert "dense.lr" not in capsys.readouterr().err
    api.train("ml-1m-mol", "run", {"dense.lr": 0.1}, scale=4)
    assert to_train[1] == to_train[0]
    for words, problem in (
        ("0", "--scale is 0; it must be from 1 to 65,536"),
        ("x", "--scale is x; it must be a whole number"),
    ):
        assert problem in refusal("train", "ml-1m-mol", "--scale", words)


def test_what_counts_steps_is_scaled_with_their_number(tmp_path: Path) -> None:
    settings = {"train.warmup_steps": 100, "train.ema": 0.99, "tables.item.lr": 0.01}
    (tmp_path / "own.toml").write_text(dump_toml(with_settings(load_recipe("ml-1m-dot"), settings)))
    scaled, _ = load_sized(str(tmp_path / "own.toml"), scale=16)
    assert (scaled.train.warmup_steps, scaled.train.ema) == (6, pytest.approx(0.99**16, rel=1e-5))
    assert scaled.tables.of("item").lr == 0.04 and scaled.train.epochs == load_recipe("ml-1m-dot").train.epochs
    # So are those of the run that is trained first; it has the others of the run itself.
    settings |= {"start.train.batch_size": 8, "start.train.ema": 0.9, "start.tables.lr": 0.002}
    (tmp_path / "own.toml").write_text(dump_toml(with_settings(load_recipe("ml-1m-dot"), settings)))
    first = load_sized(str(tmp_path / "own.toml"), scale=4)[0].first
    assert first is not None and (first.train.batch_size, first.train.ema) == (32, pytest.approx(0.9**4, rel=1e-5))
    assert (first.train.warmup_steps, first.tables.lr) == (25, 0.004)
