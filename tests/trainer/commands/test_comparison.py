"""Simple and learned methods side by side: intervals, the verdict, what is done again."""

import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import two_ranks
from small_data import ITEMS, write_dataset, write_late_items

from logitmix.trainer import cli, loop
from logitmix.trainer.commands import comparison, sizing
from logitmix.trainer.commands.comparison import compare, next_step, verdict, with_intervals
from logitmix.trainer.commands.sizing import load_sized
from logitmix.trainer.config import Config, dump_toml, flatten, with_settings
from logitmix.trainer.data.batches import leave_one_out, ranking_users
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.repeats import are_common
from logitmix.trainer.evaluation.baselines import EASE, rank_targets, users_of_both
from logitmix.trainer.metrics import METRICS, means
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.results import read_ranks, read_test_users


def test_intervals_are_paired_and_of_the_right_width() -> None:
    """Of 4,000 users with a hit rate of 0.5, +- 1.96 sqrt(0.25 / 4000); the difference of two methods that differ in 40
    users is far more certain than each alone."""
    random = np.random.default_rng(1)
    rank_U = np.where(random.random(4000) < 0.5, 1, 1000)
    better_U = rank_U.copy()
    better_U[np.flatnonzero(rank_U == 1000)[:40]] = 1
    found = with_intervals({"one": rank_U[None], "other": better_U[None]}, "one")
    mean, low, high = found["one"]["test"]["hr@10"]
    assert mean == (rank_U == 1).mean()
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(0.25 / 4000), rel=0.08)
    mean, low, high = found["other"]["difference"]["hr@10"]
    assert mean == pytest.approx(0.01) and 0.006 < low < 0.008 and 0.012 < high < 0.014
    assert found["one"]["difference"]["mrr"] == [0.0, 0.0, 0.0]
    for metric in found["other"]["test"]:
        assert found["other"]["test"][metric][0] == pytest.approx(METRICS[metric](better_U).mean())


def test_intervals_over_seeds_count_users_and_seeds() -> None:
    """Two seeds of which one has 100 hits more, of 4,000 users: the interval of the mean is that of a normal variable
    with the variance of the users and, of the seeds, 2 in place of 1 for their number."""
    random = np.random.default_rng(1)
    one_U = np.where(random.random(4000) < 0.5, 1, 1000)
    seeds_SU = np.stack([one_U, one_U])
    seeds_SU[1, np.flatnonzero(one_U == 1000)[:400]] = 1
    found = with_intervals({"simple": one_U[None], "dot": seeds_SU, "same": seeds_SU[[0, 0]]}, "simple")
    mean, low, high = found["dot"]["difference"]["hr@10"]
    assert mean == pytest.approx(0.05) and found["dot"]["standard_error"] == pytest.approx(0.05)
    # Draws of two seeds are both the one, both the other, or one of each.
    assert low < mean - 0.05 * np.sqrt(2) + 0.003 and high > mean + 0.05 * np.sqrt(2) - 0.003
    assert found["dot"]["users_that_differ"] == 400
    # Seeds that change nothing leave the interval as that of one seed.
    alone = with_intervals({"simple": one_U[None], "same": one_U[None]}, "simple")
    assert found["same"]["test"] == alone["same"]["test"] and found["same"]["standard_error"] == 0
    assert found["simple"]["standard_error"] == 0


def row(
    method: str,
    validation: float,
    test: float,
    low: float = 0.0,
    high: float = 0.0,
    rising: bool | None = False,
    high50: float = 0.0,
    differ: int = 6,
) -> dict[str, Any]:
    learned = method in comparison.LEARNED
    return {
        "method": method,
        "learned": learned,
        "validation": {"hr@10": validation},
        "test": {"hr@10": [test, test - 0.01, test + 0.01], "hr@50": [0.5, 0.4, 0.6]},
        "difference": {"hr@10": [test - 0.2, low, high], "hr@50": [high50, high50, high50]},
        "users_that_differ": differ,
    } | ({"still_rising": rising, "best_run": f"{method}-1", "runs": {method: {}}} if learned else {})


BEHIND = "no learned model is ahead of EASE on validation, and on the test part HSTU, the best of them, is"


@pytest.mark.parametrize(
    ("learned", "said"),
    [
        (
            row("hstu", 0.3, 0.312, 0.09, 0.13, None, -0.1),
            "HSTU is best on validation, and EASE of the simple methods; on the test part HSTU beats it: HR@10",
        ),
        (row("hstu", 0.3, 0.312, 0.09, 0.13, differ=5), "HSTU is best on validation, but not clearly better than EASE"),
        (
            row("hstu", 0.3, 0.21, -0.01, 0.03),
            "HSTU is best on validation, but not clearly better than EASE on the test part",
        ),
        (row("hstu", 0.3, 0.1, -0.13, -0.07), "HSTU is best on validation, but on the test part EASE is better"),
        (row("hstu", 0.1, 0.3, 0.05, 0.15), f"{BEHIND.replace(', and', ', but')} better: HR@10"),
        (row("hstu", 0.1, 0.19, -0.03, 0.01, True), f"{BEHIND} not clearly better: HR@10"),
        (row("hstu", 0.1, 0.1, -0.13, -0.07), f"{BEHIND} behind: HR@10"),
    ],
)
def test_the_verdict_chooses_on_validation_and_reports_the_test(learned: dict[str, Any], said: str) -> None:
    """`dot` would be the best on the test part, but not on validation."""
    rows = [row("ease", 0.2, 0.2), row("popularity", 0.05, 0.9), learned, row("dot", 0.01, 0.95, 0.7, 0.8)]
    sentence = verdict(rows, "ease")
    assert sentence.startswith(said)
    difference, low, high = learned["difference"]["hr@10"]
    assert f"({difference:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})" in sentence
    assert ("in HR@50 it is behind, 0.500 against 0.500" in sentence) == (learned["difference"]["hr@50"][2] < 0)


@pytest.mark.parametrize(
    ("learned", "cold", "unused", "said"),
    [
        (
            row("hstu", 0.3, 0.312, 0.09, 0.13, None),
            0.0,
            False,
            "--minutes 8 and another --out, because there was time",
        ),
        (row("hstu", 0.3, 0.312, 0.09, 0.13, True), 0.0, False, "--minutes 8 and another --out, because HSTU's valid"),
        (row("hstu", 0.3, 0.312, 0.09, 0.13), 0.5, True, "`logitmix train --refit out/hstu-1`, which"),
        (row("hstu", 0.3, 0.312, 0.09, 0.13, differ=5), 0.5, True, "--features all and another --out"),
        (row("hstu", 0.1, 0.312, 0.09, 0.13), 0.5, True, "--features all and another --out"),
        (row("hstu", 0.3, 0.1, -0.2, -0.1), 0.5, False, "features of the items (prepare --items), because"),
        (row("hstu", 0.3, 0.21, -0.01, 0.1), 0.0, False, "more actions: with these, EASE"),
    ],
)
def test_the_next_step_follows_from_what_was_found(
    learned: dict[str, Any], cold: float, unused: bool, said: str
) -> None:
    rows = [row("ease", 0.2, 0.2), learned]
    assert next_step(rows, "ease", Path("out"), 2.0, cold, unused).startswith(said)
    assert next_step(rows[:1], "ease", Path("out"), 2.0, cold, unused) == ""


def test_methods_that_are_all_as_good_are_not_told_apart() -> None:
    """As where the corpus has no more than 10 items."""
    rows = [row("popularity", 1, 1), row("dot", 1, 1)]
    assert verdict(rows, "popularity").startswith("all methods have the same HR@10, 1.000: it does not tell them apart")
    assert verdict([*rows, row("ease", 1, 0.9)], "popularity").startswith("no learned model is ahead of popularity")


TINY = {"model.dim": 8, "model.encoder.blocks": 1, "train.batch_size": 16, "train.epochs": 2, "train.patience": 0,
        "evaluate.every_epochs": 1, "model.loss.negatives": 256, "train.precision": "fp32"}  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that are trained, with small models of two epochs."""
    names: list[str] = []
    train_run, config_of = loop.train_run, comparison.config_of

    def counted(config: Config, run: Path, *others: Any) -> dict[str, float]:
        names.append(run.name)
        return train_run(config, run, *others)

    monkeypatch.setattr(comparison, "train_run", counted)
    monkeypatch.setattr(comparison, "config_of", lambda *of: with_settings(config_of(*of), TINY))
    return names


def test_all_methods_are_ranked_for_the_same_users_and_nothing_is_done_twice(
    tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    data, out = write_dataset(tmp_path / "data", ring=True), tmp_path / "out"
    words = ["compare", str(data), "--minutes", "5", "--out", str(out), "--threads", "1"]
    cli.main([*words, "--methods", "dot", "hstu", "--json"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert trained == ["dot", "hstu"] and "[2/2] HSTU trains for 5 minutes" in said.err
    assert found == json.loads((out / "compare.json").read_text())
    assert {of["method"] for of in found["methods"]} == {"popularity", "item_knn", "ease", "dot", "hstu"}
    values = [of["validation"]["hr@10"] for of in found["methods"]]
    assert values == sorted(values, reverse=True)
    for of in found["methods"]:
        rank_U = read_ranks(out / of["method"])
        assert len(rank_U) == found["users"] == 60
        for metric, (mean, low, high) in of["test"].items():
            assert mean == pytest.approx(means(rank_U)[metric]) and low <= mean <= high
        assert of["parameters"] > 0 and of["minutes"] > 0
    results = json.loads((out / "dot" / "results.json").read_text())
    dot = next(of for of in found["methods"] if of["method"] == "dot")
    for metric, (mean, *_) in dot["test"].items():
        assert mean == pytest.approx(results[metric])

    (out / "hstu" / "results.json").unlink()  # as if interrupted
    cli.main(words)
    said = capsys.readouterr()
    assert trained == ["dot", "hstu", "mol", "hstu"]
    assert "[1/3] dot is done" in said.err
    for word in ("popularity", "item-kNN", "EASE", "MoL", "HSTU", "validation", "HR@50", "still", " to "):
        assert word in said.out
    assert (out / "compare.txt").read_text() == said.out
    seconds = [json.loads((of / "results.json").read_text())["seconds"] for of in (out / "mol", out / "mol" / "start")]
    mol = next(of for of in json.loads((out / "compare.json").read_text())["methods"] if of["method"] == "mol")
    assert mol["minutes"] == sum(seconds) / 60
    for minutes in ("3", "6"):
        said = refusal("compare", str(data), "--minutes", minutes, "--out", str(out))
        assert f"other settings: train.minutes was 5.0, is {minutes}.0" in said


def test_each_seed_has_a_run_and_what_is_done_stays(
    tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_dataset(tmp_path / "data", ring=True), tmp_path / "out"
    words = ["compare", str(data), "--minutes", "5", "--out", str(out), "--threads", "1", "--methods", "dot", "mol"]
    words += ["--evaluate.users", "30"]
    cli.main([*words, "--seeds", "2"])
    said = capsys.readouterr()
    assert trained == ["dot", "mol", "dot-1", "mol-1"]
    assert "4 of 4 runs are to be trained: 20 minutes, evaluations on validation included" in said.err
    assert "[4/4] MoL, seed 1, trains for 5 minutes, run directory" in said.err
    found = json.loads((out / "compare.json").read_text())
    for method in ("dot", "mol"):
        (of,) = (row for row in found["methods"] if row["method"] == method)
        of_runs = [means(read_ranks(out / run))["hr@10"] for run in (method, f"{method}-1")]
        assert of["test"]["hr@10"][0] == pytest.approx(np.mean(of_runs)) and set(of["runs"]) == {method, f"{method}-1"}
        assert of["standard_error"] == pytest.approx(np.std(of_runs, ddof=1) / np.sqrt(2))
        assert f"{of['test']['hr@10'][0]:.4f} ± {of['standard_error']:.4f}" in " ".join(said.out.split())
        assert of["best_run"] in of["runs"]
    config = read_config(out / "mol-1")
    assert config.first and config.train.seed == config.first.train.seed == 1
    (out / "dot-1" / "results.json").unlink()  # as if interrupted
    cli.main([*words, "--seeds", "2"])
    again = capsys.readouterr()
    assert trained[4:] == ["dot-1"] and again.out == said.out
    assert "1 of 4 runs are to be trained: 5 minutes" in again.err
    assert " over users and 2 seeds)" in again.out.replace("\n", " ")
    cli.main(words)
    assert len(trained) == 5 and " seeds" not in capsys.readouterr().out


TIME = ["--data.split", "time", "--data.held-out", "0.1", "--evaluate.exclude-history", "no", "--evaluate.users", "0"]


@pytest.mark.long
def test_the_split_and_the_rules_of_evaluation_hold_for_all_methods(
    tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_late_items(tmp_path / "data"), tmp_path / "out"
    words = ["compare", str(data), "--minutes", "5", "--out", str(out), "--threads", "1", "--methods", "dot"]
    cli.main([*words, *TIME])
    said, found = capsys.readouterr().out, json.loads((out / "compare.json").read_text())
    assert found["users"] == 40 and found["cold_targets"] == 0.5
    assert found["settings"]["data.split"] == "time" and found["settings"]["evaluate.exclude_history"] == "no"
    line = "test part: 50% of the targets are items that training has no action of (targets/cold)"
    assert line in " ".join(said.split()) and found["beside"][-1].startswith(line)
    for name in ("popularity", "item_knn", "ease", "dot"):
        config, users = read_config(out / name), read_test_users(out / name)
        assert (config.data.split, config.data.held_out, config.evaluate.exclude_history) == ("time", 0.1, "no")
        assert users == [f"u-{user}" for user in range(40)] and len(read_ranks(out / name)) == 40

    cli.main([*words, *TIME])
    assert trained == ["dot"]
    kept = {path: path.read_bytes() for path in out.glob("*/test_ranks.json")}
    given = {"data.split": "time", "data.held_out": 0.1, "evaluate.exclude_history": "no"}
    for settings, differs in (
        ({}, "data.split was time, is leave-one-out"),
        (given | {"evaluate.metric": "mrr"}, "evaluate.metric was hr@10, is mrr"),
    ):
        for methods in (["dot"], []):  # without learned ones, the simple ones tell
            with pytest.raises(ValueError, match=re.escape(differs)):
                compare(str(data), out, 5, methods, 1, settings)
    assert trained == ["dot"] and kept == {path: path.read_bytes() for path in out.glob("*/test_ranks.json")}


def test_no_more_users_are_ranked_than_the_simple_methods_can_rank(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOST_SCORES", 40 * ITEMS)
    config = comparison.config_of("dot", load_dataset(data), 5, 1, {"evaluate.users": 39})
    assert config.evaluate.users == 39 and comparison.config_of("dot", load_dataset(data), 5, 1).evaluate.users == 40


@pytest.mark.parametrize(
    ("minutes", "changed", "message"),
    [
        (5, {"dense.lr": 0.25}, r"dot was started with other settings: dense\.lr was 0\.25"),
        (5, {"train.threads": 2}, "dot was trained with --threads 2; give the same, or another --out"),
        (6, {}, r"dot was started with other settings: train\.minutes was 5\.0, is 6"),
    ],
)
def test_what_was_trained_otherwise_is_refused_before_anything_is_fitted(
    data: Path, tmp_path: Path, trained: list[str], minutes: float, changed: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out"
    config = comparison.config_of("dot", load_dataset(data), 5, 1)
    (out / "dot").mkdir(parents=True)
    (out / "dot" / "config.toml").write_text(dump_toml(with_settings(config, changed)))
    shutil.copy(data / "dataset.json", out / "dot")
    with pytest.raises(ValueError, match=message):
        compare(str(data), out, minutes, ["dot"], 1)
    assert trained == [] and not (out / "popularity").exists()
    other = write_dataset(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"other is not the dataset that .*dot began with|other settings|--threads"):
        compare(str(other), out, 5, ["dot"], 1)


def test_features_are_those_of_all_learned_methods(featured: Path) -> None:
    dataset = load_dataset(featured)
    config = comparison.config_of("mol", dataset, 2.0, 1, {"model.features": ["brand"]})
    assert config.first and config.model.features == config.first.model.features == ("brand",)
    assert config.model.item_id_dropout == 0.1
    assert comparison.config_of("dot", dataset, 2.0, 1, {"model.features": []}).model.item_id_dropout == 0


def test_the_methods_encoders_are_the_same_where_auto_takes_hstu(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load_dataset(data)

    def kinds() -> list[str]:
        configs = [comparison.config_of(name, dataset, 5, 1) for name in comparison.LEARNED]
        all_of = [of for config in configs for of in (config, config.first) if of]
        assert {(of.train.stride, flatten(of)["model.encoder.blocks"]) for of in all_of} == {(0, 2)}
        return [of.model.encoder.kind for of in all_of]

    before = kinds()
    monkeypatch.setattr(sizing, "HSTU_ACTIONS", 1)
    monkeypatch.setattr(sizing, "HSTU_MEAN", 1)
    assert load_sized("auto", str(data))[0].model.encoder.kind == "hstu"
    assert kinds() == before == ["sasrec", "sasrec", "sasrec", "hstu"]


def test_explicit_negatives_have_a_loss_that_takes_them(featured: Path) -> None:
    dataset = load_dataset(featured)
    for name in comparison.LEARNED:
        config = comparison.config_of(name, dataset, 5, 1, {"data.negatives": ["action = type-1"]})
        for loss in [of.model.loss for of in (config, config.first) if of]:
            assert (loss.negatives, loss.share, loss.resample) == (128, "group", 0)


def test_mol_first_trains_what_dot_trains_for_half_of_the_minutes(data: Path) -> None:
    dataset = load_dataset(data)
    dot, mol, hstu = (comparison.config_of(name, dataset, 5, 1) for name in ("dot", "mol", "hstu"))
    assert mol.first == replace(dot, train=replace(dot.train, minutes=2.5))
    for of in (dot, mol, hstu):
        assert (of.train.schedule, of.train.patience, of.train.minutes) == ("wsd", 0, 5)
        # Minutes end it: a small dataset or a fast GPU would come to the 30,000 steps of `auto` before.
        assert of.train.epochs * -(-dataset.num_users // of.train.batch_size) > 30_000


def both_ranks(data: Path, out: Path) -> tuple[dict[str, Any], list[bool]]:
    """What `compare` returns, and whether what one rank does alone leaves its main thread to tell the other of it."""
    config_of, aside = comparison.config_of, []

    def noting(action: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            aside.append(threading.current_thread() is not threading.main_thread())
            return action(*arguments)

        return noted

    comparison.config_of = lambda *of: with_settings(config_of(*of), TINY)
    comparison.popularity, comparison.write_whole = noting(comparison.popularity), noting(comparison.write_whole)
    return compare(str(data), out, 5, ["dot", "hstu"], 1), aside


def test_two_ranks_return_the_same(data: Path, tmp_path: Path) -> None:
    """Two runs, one after another, in one group."""
    (first, aside), (second, _) = two_ranks.run(both_ranks, data, tmp_path / "out")
    assert first == second and aside == [True, True, True]
    assert [line.partition(": ")[0] for line in first["beside"]] == ["dot on the test part", "HSTU on the test part"]
    assert all(" at hr@" in line for line in first["beside"])
    assert len(first["methods"]) == 5 and json.loads((tmp_path / "out" / "compare.json").read_text()) == first


def test_ease_keeps_to_its_time_and_its_corpus(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its penalty is the best on validation of those that there is time for; nothing is trained here."""
    dataset = load_dataset(data)
    held_out, users = leave_one_out(dataset), ranking_users(dataset, "validation", 5)
    both_XX = users_of_both(dataset, held_out)
    tried, exclude = [0.1, 3.0, 1e4], not are_common(dataset.repeated_targets)
    monkeypatch.setattr(comparison, "PENALTIES", tuple(tried))
    values = [means(rank_targets(EASE.fit(both_XX, of), users, 50, exclude))["hr@10"] for of in tried]
    assert max(values) > values[0]
    of_both = (compare(str(data), tmp_path / f"{of}", of, [], 1)["methods"] for of in (5, 1e-9))
    ((long,), (short,)) = ([of for of in methods if of["method"] == "ease"] for methods in of_both)
    assert long["penalties_tried"] == tried and long["penalty"] == tried[int(np.argmax(values))]
    assert long["validation"]["hr@10"] == max(values)
    assert short["penalties_tried"] == tried[:1] and short["penalty"] == tried[0]
    monkeypatch.setattr(comparison, "MOST_EASE_ITEMS", 49)
    found = compare(str(data), tmp_path / "without", 5, [], 1)
    assert {of["method"] for of in found["methods"]} == {"popularity", "item_knn"}
    assert "nothing was trained" in found["verdict"]
    left_out = "EASE is left out: the corpus has more than 49 items"
    assert left_out in capsys.readouterr().err and found["left_out"] == [left_out]
    assert left_out in (tmp_path / "without" / "compare.txt").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ["MoL"]}, "methods is MoL; it must be among dot, mol, hstu"),
        ({"minutes": 0.0}, "minutes is 0.0; it must be above 0 and finite"),
        ({"threads": 0}, "threads is 0; it must be from 1 to "),
        ({"out": "data/runs"}, "is in the dataset directory"),
        ({"out": "run"}, "run is a run directory, and compare makes a folder of several; give another --out"),
        ({"settings": {"data.validation": False}}, "data.validation is false, but compare chooses on validation"),
        ({"settings": {"model.dim": 8}}, "compare has no setting model.dim; it takes model.features and those of"),
        ({"settings": {"model.features": ["nope"]}}, "model.features names nope, which the dataset does not have"),
        ({"settings": {"evaluate.users": 0}}, "of 60 users the simple methods rank 40 at most, with 50 items"),
    ],
)
def test_mistakes_are_named_before_anything_is_fitted(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "MOST_SCORES", 40 * ITEMS)
    write_dataset(tmp_path / "data")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    asked = {"out": "out", "minutes": 1.0, "methods": ["dot"], "threads": 1} | given
    with pytest.raises(ValueError, match=re.escape(message)):
        compare("data", Path(asked.pop("out")), **asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run"]
    assert not (tmp_path / "data" / "runs").exists() and len(list((tmp_path / "run").iterdir())) == 1
