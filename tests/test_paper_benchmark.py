"""The cells of the paper's tables are settings that the recipes take."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper
from benchmarks.measure import words_of
from logitmix.trainer.commands import train
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.config import dump_toml, flatten, load_recipe, with_settings
from logitmix.trainer.run.metrics import append_row


def test_every_cell_is_settings_of_its_recipe() -> None:
    tables = paper.PAPER.values()
    cells = {paper.Cell(data, method, 0) for table in tables for data, methods in table.items() for method in methods}
    assert len(cells) > 50
    given: set[frozenset[str]] = set()
    for cell in sorted(cells, key=str):
        data = paper.DATASETS[cell.dataset]
        settings = cell.settings(paper.Options())
        config = with_settings(load_recipe(cell.recipe), settings)
        if (names := frozenset(settings)) not in given:  # to read them takes a tenth of a second
            given.add(names)
            words = words_of(settings)
            assert of_recipe(train.Arguments, "train", [cell.recipe, *words], "")[1] == config
        name = cell.method.rpartition("+")[2].partition(" ")[0].partition("-")[0]
        assert config.model.similarity.kind == {"bce": "dot"}.get(name, name)
        assert (config.model.loss.kind == "bce") == (name == "bce")
        assert (config.model.encoder.kind == "hstu") == ("hstu" in cell.method)
        assert config.warm_start == (f"runs/paper/{cell.start.name}" if cell.start else "")
        if cell.start and cell.dataset in ("beauty", "games", "books"):
            nearly_fixed = config.tables.lr < 1e-4 and config.train.epochs == 2
            assert nearly_fixed == (name == "mol") and config.model.loss.negatives in (512, 128, 32)
        if "quarter" in cell.method:
            assert config.model.loss.negatives == data.from_dot["model.loss.negatives"] // 4
        assert config.train.refit and config.evaluate.metric == data.metric


FREE = {"data.path", "train.refit", "evaluate.baselines"}


@pytest.mark.parametrize(("method", "recipe"), [("hstu+dot", "ml-1m-hstu"), ("hstu+mol", "ml-1m-hstu-mol")])
def test_recipes_of_hstu_are_the_cells(method: str, recipe: str) -> None:
    of = paper.Cell("ml-1m", method, 0)
    trained, alone = with_settings(load_recipe(recipe), of.settings(paper.Options())), flatten(load_recipe(recipe))
    assert (of.recipe, of.start, trained.start) == (recipe, None, load_recipe(recipe).start)
    assert {name for name, value in flatten(trained).items() if value != alone[name]} <= FREE


def test_sizes_of_the_other_similarities_are_those_of_the_appendix() -> None:
    """Its hidden layers and dropout rates of MLP, NeuMF and DeepFM."""
    dense, sparse = [512, 0.1, 256, 0.1, 256, 0.2], [128, 0.2, 128, 0.2, 128, 0.3]
    expected = {"ml-1m": dense, "ml-20m": dense, "beauty": sparse, "games": sparse,
                "books": [256, 0.2, 256, 0.1, 256, 0.2]}  # fmt: skip
    for dataset, sizes in expected.items():
        settings = [paper.settings_of(name, paper.DATASETS[dataset].sizes) for name in ("mlp", "neumf", "deepfm")]
        assert [of[f"model.similarity.{name}"] for of in settings for name in ("hidden", "dropout")] == sizes, dataset


def test_an_ablation_is_mol_but_for_what_it_leaves_out() -> None:
    def settings(dataset: str, method: str) -> dict[str, Any]:
        of = paper.Cell(dataset, method, 0)
        return flatten(with_settings(load_recipe(of.recipe), of.settings(paper.Options())))

    assert set(paper.PAPER["ablation"]) == {"ml-1m", "ml-20m", "beauty", "games", "books"}
    for dataset, methods in paper.PAPER["ablation"].items():
        whole, changed = settings(dataset, "mol"), {}
        for method in methods:
            less = settings(dataset, method)
            changed[method] = {name.rpartition(".")[2]: less[name] for name in less if less[name] != whole[name]}
        k = whole["model.similarity.query_components"]
        assert changed["mol"] == {} and changed["mol-no-l2-norm"] == {"normalize": False}
        dropouts = changed["mol-no-gating-dropout"]
        assert "gate_dropout" in dropouts and set(dropouts.values()) == {0.0}
        assert changed["mol-half"] == {"query_components": k // 2, "item_components": k // 2}
        loss = {name: whole[f"model.loss.{name}"] // 4 for name in ("negatives", "in_batch")}
        assert changed["mol-quarter-negatives"] == {name: count for name, count in loss.items() if count}


def test_an_interrupted_cell_saves_its_step_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that gets Ctrl-C with the benchmark, and takes a while to save."""
    child = tmp_path / "child"
    child.write_text('#!/bin/sh\nsleep 0.5\nkill -INT $PPID\nsleep 1\ntouch "$0.saved"\nexit 75\n')
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit, match="ml-1m-dot-0 is stopped; the same"):
            paper.train(paper.Cell("ml-1m", "dot", 0), paper.Options(out=str(tmp_path)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "child.saved").exists()


@pytest.mark.long
@pytest.mark.parametrize("named", [False, True])
def test_a_result_counts_the_run_that_gave_the_first_weights(tmp_path: Path, named: bool) -> None:
    """Whether it lies in the run, as a recipe's own does, or is another cell's."""
    recipe, run = ("ml-1m-hstu", "ml-1m-hstu-mol")[not named], tmp_path / "mol"
    start = tmp_path / "dot" if named else run / "start"
    for path, hours in ((run, 2), (run / "refit", 3), (start, 5), (run / "refit/start", 4)):
        path.mkdir(parents=True, exist_ok=True)
        results = {"step": 8, "seconds": 3600 * hours, "hr@10": hours / 10, "users": 40, "corpus": 15}
        (path / "results.json").write_text(json.dumps(results))
    settings = {"train.seed": 1, "train.refit": True} | ({"warm_start": str(start)} if named else {})
    (run / "config.toml").write_text(dump_toml(with_settings(load_recipe(recipe), settings)))
    (start / "config.toml").write_text(dump_toml(load_recipe("ml-1m-hstu")))
    for step in (4, 8):
        append_row(run, "validation", step, {"epoch": step / 2, "hr@10": step / 100})
    of = paper.collected(run, recipe)
    # A refit begins with what the run began with, where that is the recipe's own.
    assert of["hours"] == {"run": 2, "refit": 3 if named else 7, "start": 5} and of["settings"] == settings
    assert (of["epochs"], of["validation"], of["test"], of["refit"]) == (
        4,
        {"hr@10": 0.08},
        {"hr@10": 0.2},
        {"hr@10": 0.3},
    )


def found(seed: int, rate: float) -> dict[str, object]:
    return {
        "settings": {}, "metric": "hr@10", "users": 400, "corpus": 1500, "machine": "cores, commit abc",
        "hours": {"run": 0.5 + seed}, "validation": {"hr@10": 0.5}, "refit": dict.fromkeys(paper.MOVIELENS, rate),
    }  # fmt: skip


def test_a_summary_has_the_deviation_over_seeds_and_the_error_over_users() -> None:
    of = paper.summary([found(0, 0.4), found(1, 0.6)], ["hr@10"])
    assert of == {"hr@10": "0.5000 ± 0.1414", "error": 0.025, "validation": "0.5000", "seeds": "2", "minutes": "60"}


def test_cells_without_results_stay_empty_and_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ml-1m-dot-0.json").write_text(json.dumps(found(0, 0.4)))
    ml_1m = {"datasets": "ml-1m", "results": str(tmp_path), "show": True}
    paper.main(paper.Options(methods="dot,mol", seeds=2, **ml_1m))
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in shown.splitlines() if line.startswith("│")]
    assert rows == [["dot", "0.4000", "0.0669"], ["mol", "", "0.0675"]]
    assert "dot: 400 users ranked over 1,500 items; cores, commit abc" in shown and shown.count("commit") == 1
    with pytest.raises(SystemExit, match="--table movielens has no moll"):
        paper.main(paper.Options(methods="moll", **ml_1m))


def test_datasets_of_amazon_are_found_where_prepare_writes_them(tmp_path: Path) -> None:
    options = paper.Options("amazon", data=str(tmp_path))
    with pytest.raises(SystemExit, match="has none of amazon-beauty, amazon-games, amazon-books; make one"):
        options.chosen()
    for name in ("amazon-games", "amazon-beauty", "beauty"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dataset.json").touch()
    assert [name for name, _ in options.chosen()] == ["beauty", "games"]
    paths = [paper.Cell(name, "dot", 0).settings(options)["data.path"] for name in ("beauty", "games", "ml-1m")]
    assert paths == [str(tmp_path / name) for name in ("beauty", "amazon-games", "ml-1m")]
