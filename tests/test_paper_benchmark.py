"""The cells of the paper's tables are settings that the recipes take, and what is computed from actions and scores."""

import json
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_data import in_memory

from benchmarks import paper
from benchmarks.measure import words_of
from logitmix.modules.config import DotConfig, MoLConfig
from logitmix.modules.similarity.dot import Dot
from logitmix.modules.similarity.mol import MoL
from logitmix.trainer.commands import train
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.config import dump_toml, flatten, load_recipe, with_settings
from logitmix.trainer.data.batches import ranking_users
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


def test_other_similarities_start_from_the_dot_product_with_their_encoder() -> None:
    cell = paper.Cell
    assert cell("ml-1m", "mol", 2).start == cell("ml-1m", "dot", 2)
    assert cell("ml-100k", "hstu+mol", 0).start == cell("ml-100k", "hstu+dot", 0)
    assert cell("ml-1m", "hstu+mol 8x8", 0).start == cell("ml-1m", "hstu+dot", 0)
    assert cell("ml-1m", "neumf", 1).start == cell("ml-1m", "dot", 1)
    assert all(cell(*of, 0).start is None for of in (("demo-features", "mol 8x4"), ("ml-1m", "dot"), ("ml-1m", "bce")))


@pytest.mark.parametrize("kept", [False, True])
def test_the_run_that_mol_starts_from_is_trained_again_where_only_its_result_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    trained = []
    monkeypatch.setattr(paper, "logitmix", lambda *words: trained.append(Path(words[-1]).name))
    monkeypatch.setattr(paper, "collected", lambda run, recipe: {})
    options = paper.Options(out=str(tmp_path / "runs"), results=str(tmp_path))
    (tmp_path / "ml-1m-dot-1.json").write_text(json.dumps({"kept": True}))
    if kept:
        refit = tmp_path / "runs/ml-1m-dot-1/refit"
        refit.mkdir(parents=True)
        (refit / "results.json").touch()
    paper.result(paper.Cell("ml-1m", "mol", 1), options)
    assert trained == ([] if kept else ["ml-1m-dot-1"]) + ["ml-1m-mol-1"]
    assert json.loads((tmp_path / "ml-1m-dot-1.json").read_text()) == {"kept": True}


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_an_interrupted_cell_saves_its_step_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A child that stops the benchmark and takes a while to save: at once, as at Ctrl-C, which reaches both, or when
    the benchmark passes it on."""
    child = tmp_path / "child"
    child.write_text(
        "#!/bin/sh\ntrap 'sleep 1; touch \"$0.saved\"; exit 75' TERM\n"
        f'sleep 0.5\nkill -{name} $PPID\nsleep 1\n[ {name} = INT ] && touch "$0.saved" && exit 75\nsleep 5\n'
    )
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    before = {of: signal.getsignal(of) for of in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit, match="ml-1m-dot-0 is stopped; the same"):
            paper.train(paper.Cell("ml-1m", "dot", 0), paper.Options(out=str(tmp_path)))
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        for of, handler in before.items():
            signal.signal(of, handler)
    assert (tmp_path / "child.saved").exists()


@pytest.mark.long
def test_the_command_line_is_also_called_from_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "echo")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(paper.logitmix, "--version").result().endswith(" --version\n")


def test_analyses_train_the_runs_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where a result is known; the paper's ranks stand beside those of its dataset alone."""
    trained = []

    def train(*words: str) -> None:
        refit = Path(words[-1]) / "refit"
        refit.mkdir(parents=True)
        (refit / "results.json").touch()
        trained.append(refit.parent.name)

    monkeypatch.setattr(paper, "logitmix", train)
    monkeypatch.setattr(paper, "collected", lambda run, recipe: {})
    monkeypatch.setattr(paper, "load_dataset", lambda path: SimpleNamespace(num_users=1, num_items=1))
    monkeypatch.setattr(paper, "explained", lambda dataset: dict.fromkeys(paper.DIMENSIONS, 0.25))
    shares = {d: 0.9 for d in paper.DIMENSIONS}
    monkeypatch.setattr(paper, "rank_of_scores", lambda run: {"rank": 61, "explained": shares})
    (tmp_path / "ml-100k-dot-0.json").write_text("{}")
    of = {"datasets": "ml-100k,ml-1m", "methods": "dot", "out": str(tmp_path / "runs"), "results": str(tmp_path)}
    paper.main(paper.Options("rank", show=True, **of))
    assert trained == [] and "61" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no finished run of ml-100k-dot-0, ml-1m-dot-0"):
        paper.main(paper.Options("rank", figure="popularity", show=True, **of))
    paper.main(paper.Options("rank", **of))
    shown = capsys.readouterr().out
    assert trained == ["ml-100k-dot-0", "ml-1m-dot-0"] and (shown.count(" 61 "), shown.count(" 50 ")) == (2, 1)
    paper.main(paper.Options("rank", json=True, **of))
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["dataset"], row["items"], row["methods"]["dot"]["rank"]) for row in rows] == [
        ("ml-100k", 1, 61),
        ("ml-1m", 1, 61),
    ]


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
    assert (of["seeds"], of["minutes"], of["validation"]) == (2, 60, 0.5)
    assert of["hr@10"]["mean"] == 0.5 and of["hr@10"]["error"] == 0.025
    assert of["hr@10"]["deviation"] == pytest.approx(0.02**0.5)


def test_cells_without_results_stay_empty_and_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ml-100k-dot-0.json").write_text(json.dumps(found(0, 0.4)))
    (tmp_path / "ml-100k-bce-0-0.5m.json").write_text(json.dumps(found(0, 0.2) | {"minutes": 0.5}))
    ml_100k = {"datasets": "ml-100k", "results": str(tmp_path), "show": True, "json": True}
    paper.main(paper.Options(methods="dot,mol", seeds=2, **ml_100k))
    dot, mol = json.loads(capsys.readouterr().out)["rows"]
    assert (dot["method"], mol["method"], mol["ours"]) == ("dot", "mol", None)
    assert dot["ours"]["seeds"] == 1 and dot["ours"]["mrr"] == {"mean": 0.4, "deviation": None}
    for minutes, said in ((0.0, "dot: 400 users ranked over 1,500 items; cores, commit abc"),
                          (0.5, "bce: 400 users ranked over 1,500 items; at most 0.5 minutes; cores")):  # fmt: skip
        paper.main(paper.Options(methods="bce,dot,mol", minutes=minutes, **ml_100k | {"json": False}))
        shown = capsys.readouterr().out
        assert said in shown and shown.count("commit") == 1
    with pytest.raises(SystemExit, match="--methods has moll"):
        paper.main(paper.Options(methods="moll", **ml_100k))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"datasets": ""},
            "--data {0} has none of ml-1m, ml-100k, ml-20m; make one with: logitmix prepare ml-1m --out {0}/ml-1m",
        ),
        (
            {"datasets": "", "table": "rank", "show": True},
            "--data {} has none of ml-1m, ml-100k, ml-20m, amazon-beauty",
        ),
        ({"table": "groups"}, "no dataset at {}/ml-100k; make it with: logitmix prepare"),
        ({"show": True}, "{}/ml-100k-bce-0.json is damaged"),
        ({"show": True, "methods": "dot"}, "{}/ml-100k-dot-0.json has no field users"),
        ({"show": True, "methods": "mol"}, "{}/ml-100k-mol-0.json: hours has no field run"),
        ({"seeds": 0}, "--seeds is 0; it must be 1 or more"),
        ({"minutes": -5.0}, "--minutes is -5.0; it must be 0 or more"),
        ({"threads": 0}, "--threads is 0; it must be from 1 to"),
    ],
)
def test_what_cannot_be_shown_is_one_line(tmp_path: Path, settings: dict[str, object], said: str) -> None:
    result = found(0, 0.4)
    contents = {"bce": '{"recipe": ', "dot": "{}", "mol": json.dumps(result | {"hours": {}})}
    for method, content in contents.items():
        (tmp_path / f"ml-100k-{method}-0.json").write_text(content)
    of = {"datasets": "ml-100k", "data": str(tmp_path), "results": str(tmp_path), "out": str(tmp_path)}
    with pytest.raises(SystemExit, match=re.escape(said.format(tmp_path))):
        paper.main(paper.Options(**of | settings))


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


def test_minutes_are_the_budget_too() -> None:
    assert [paper.tyro.cli(paper.Options, args=[flag, "2"]).minutes for flag in ("--minutes", "--budget")] == [2, 2]


def test_minutes_are_those_of_a_cell_and_of_what_it_starts_from() -> None:
    def minutes(cell: Any) -> list[float]:
        config = with_settings(load_recipe(cell.recipe), cell.settings(paper.Options()))
        return [config.train.minutes, *([cell.start.minutes] if cell.start else [])]

    names = [paper.Cell("ml-1m", method, 0, 30).name for method in ("dot", "mol")]
    assert names == ["ml-1m-dot-0-30m", "ml-1m-mol-0-30m"] and paper.Cell("ml-1m", "mol", 0).name == "ml-1m-mol-0"
    assert paper.Cell("ml-1m", "mol", 0, 30).start == paper.Cell("ml-1m", "dot", 0, 15)
    cells = [paper.Cell("ml-1m", method, 0, 30) for method in ("dot", "bce", "mol", "hstu+mol")]
    assert [minutes(cell) for cell in cells] == [[30], [30], [15, 15], [30]]


def test_a_result_of_other_settings_is_told(tmp_path: Path) -> None:
    options = paper.Options(results=str(tmp_path))
    dot, features = paper.Cell("ml-100k", "dot", 0), paper.Cell("demo-features", "dot 64", 0)
    for cell in (dot, features, paper.Cell("ml-1m", "mol", 1)):
        config = flatten(with_settings(load_recipe(cell.recipe), cell.settings(options)))
        recipe = flatten(load_recipe(cell.recipe))
        of = {"settings": {name: value for name, value in config.items() if recipe.get(name) != value}}
        of = json.loads(json.dumps(of))
        assert paper.differences(cell, of, options) == []
        # Where it ran changes nothing; a setting that it had then does.
        of["settings"] |= {"data.path": "elsewhere", "warm_start": "", "train.threads": 2, "train.patience": 4}
        assert paper.differences(cell, of, options) == [
            f"{cell.name} was trained with train.patience 4, and its cell has {config['train.patience']}; to train it "
            f"again, remove {tmp_path}/{cell.name}.json and runs/paper/{cell.name}"
        ]
    of["settings"].pop("train.seed")
    assert len(paper.differences(paper.Cell("ml-1m", "mol", 1), of, options)) == 2


def test_what_explains_the_variance_is_that_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """ln p of 900 items, less its mean of each user; 1,200 actions, some of them twice."""
    monkeypatch.setattr(paper, "DIMENSIONS", (16, 64, 128))
    random, users, items = np.random.default_rng(0), np.repeat(np.arange(600), 2), 900
    actions = np.minimum(random.geometric(0.01, len(users)), items) - 1
    dataset = in_memory(np.arange(0, len(users) + 1, 2), actions, items)
    count_UX = np.zeros((600, items))
    np.add.at(count_UX, (users, actions), 1)
    p_UX = (count_UX + 1 / items) / (count_UX + 1 / items).sum(1, keepdims=True)
    log_UX = np.log(p_UX) - np.log(p_UX).mean(1, keepdims=True)
    values = np.linalg.svd(log_UX, compute_uv=False) ** 2
    expected = {d: values[:d].sum() / values.sum() for d in paper.DIMENSIONS}
    assert expected[128] < 0.81 and paper.explained(dataset) == pytest.approx(expected, abs=1e-3)


def test_the_rank_of_scores_and_what_explains_their_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 80 within users, and what is the same for all items of a user."""
    random = np.random.default_rng(0)
    factors = [torch.from_numpy(random.normal(size=shape)).float() for shape in ((300, 80), (80, 200))]
    score_UX = factors[0] @ factors[1]
    score_UX -= score_UX.mean(1, keepdim=True)
    monkeypatch.setattr(paper, "final_run", lambda run: run)
    monkeypatch.setattr(paper, "scores", lambda run: score_UX + torch.arange(300.0)[:, None])
    values = torch.linalg.svdvals(score_UX).square()
    found = paper.rank_of_scores(Path())
    assert found["rank"] == 81 and found["explained"][64] == pytest.approx(float(values[:64].sum() / values.sum()))
    assert found["explained"][256] == pytest.approx(1)


def test_hit_rates_of_groups() -> None:
    groups = [np.array([0, 3]), np.array([1, 2, 4, 5])]
    assert paper.hit_rates(np.array([10, 11, 1, 400, 10, 12]), groups) == [0.5, 0.5]


def test_the_use_of_components_is_the_mean_over_all_users(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mol = MoL(8, MoLConfig(query_components=2, item_components=3, component_dim=4))
    mol.reset_parameters(torch.Generator().manual_seed(0))
    query, item = mol.query(torch.randn(5, 8), torch.arange(5)), mol.item(torch.randn(7, 8), torch.arange(7))
    target_U = torch.tensor([6, 0, 0, 2, 5])
    cuts = [slice(0, 4), slice(4, 5)]
    parts = [
        (mol, tuple(side[cut] for side in query), item, SimpleNamespace(target=target_U[cut].numpy())) for cut in cuts
    ]
    monkeypatch.setattr(paper, "sides", lambda run: iter(parts))
    entropy, use_M = paper.use_of_components(Path())
    gates_UM = mol.gates(query, tuple(side[target_U] for side in item)).detach()
    torch.testing.assert_close(use_M, gates_UM.mean(0))
    expected = -(gates_UM * gates_UM.log()).sum(1).mean() / np.log(6)
    assert entropy == pytest.approx(float(expected), rel=1e-5)


def test_a_users_own_history_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 14 items, the last score highest; the first user has seen the last three."""
    dot = Dot(2, DotConfig(normalize=False, temperature=1.0))
    users = ranking_users(in_memory(np.array([0, 4, 7]), np.array([13, 12, 11, 0, 0, 1, 2]), 14), "test", 5)
    query = dot.query(torch.tensor([[1.0, 0.0]] * 2), torch.arange(2))
    item = dot.item(torch.stack([torch.arange(14.0), torch.ones(14)], 1), torch.arange(14))
    monkeypatch.setattr(paper, "sides", lambda run: iter([(dot, query, item, users)]))
    assert paper.recommended(Path()).tolist() == [0, 1, 1, 1, *[2] * 7, 1, 1, 1]
