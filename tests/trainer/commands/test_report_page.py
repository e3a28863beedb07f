"""The page is well-formed XML after its doctype; what it shows is checked by what the runs hold."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from small_data import made_run, small_config, write_dataset

from logitmix.trainer import cli
from logitmix.trainer.commands.charts import POINTS, chart, thinned
from logitmix.trainer.commands.groups import Run, differences, differing, grouped, verdict
from logitmix.trainer.commands.report_page import wilson, write_report
from logitmix.trainer.loop import train
from logitmix.trainer.metrics import means
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.results import beside_baselines

pytestmark = pytest.mark.long
SVG = "{http://www.w3.org/2000/svg}"


def parsed(out: Path) -> ElementTree.Element:
    text = out.read_text()
    assert text.startswith("<!DOCTYPE html>\n")
    named = re.sub(r' xmlns(:xlink)?="[^"]*"|url\(#', "", text)  # namespaces, and what is on the page
    for outside in ("http", "<script", "<link", "src=", "@import", "url("):
        assert outside not in named
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def texts(element: ElementTree.Element, tag: str) -> list[str]:
    return ["".join(found.itertext()) for found in element.iter(tag)]


def training_row(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 9.0 / step, "time/step": 6.0, "time/forward": 6.0, **more}


def test_a_trained_run_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = train(small_config(write_dataset(tmp_path / "data")), tmp_path / "run")
    cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    line, said = beside_baselines(results), capsys.readouterr()
    assert said.out == f"{tmp_path / 'page.html'}\n"
    page = parsed(tmp_path / "page.html")
    assert line and f"test: {line}\n" in said.err and any(text.endswith(f"{line}.") for text in texts(page, "p"))
    sections = ["Overview", "Test metrics", "Curves", "Popularity of what is recommended", "Time of a step"]
    assert texts(page, "h2") == [*sections, "Use of MoL's components"]
    low, high = wilson(results["hr@10"], 60)
    rows = texts(page, "tr")
    assert f"{tmp_path / 'run'} has hr@10 {results['hr@10']:.4f} on the test part." in texts(page, "p")
    assert {f"hr@10{results['hr@10']:.4f} [{low:.4f}, {high:.4f}]", "users60 ", "model.similarity.kindmol"} < set(rows)
    assert f"item-kNN: mrr{results['item_knn/mrr']:.4f} " in rows
    charts = texts(page, "figcaption")
    assert charts[:2] == ["training loss", "training loss"] and "gates: entropy" in charts
    assert charts[2:8] == [f"validation {name}" for name in ("hr@10", "hr@200", "mrr") for _ in range(2)]
    assert len(list(page.iter(f"{SVG}svg"))) == len(charts) == 11
    best = max(row["mrr"] for row in read_rows(tmp_path / "run", "validation"))
    assert texts(page, f"{SVG}text").count(f"{best:.4g}") == 2


def test_several_runs_are_compared(tmp_path: Path) -> None:
    """One finished, one with a strange name that has not, one that has logged nothing, one that was not evaluated and
    has no validation part."""
    wire = {"wire/item/forward/bytes_per_step": 2000.0, "wire/item/forward/fp32_bytes_per_step": 8000.0}
    rows = [training_row(step, **wire) for step in (1, 2, 4)]
    validated = {"kind": "validation", "step": 2, "hr@10": 0.5, "mrr": 0.25}
    finished = {"hr@10": 0.25, "mrr": 0.1, "users": 60, "corpus": 50, "step": 2, "examples_per_second": 7.0}
    finished |= {"popularity/hr@10": 0.3, "popularity/hr@1": 0.2, "recommended/coverage@10": 0.6, "seconds": 24.0}
    finished |= {"groups/brand=a & b/hr@10": 0.5, "groups/brand=a & b/users": 30}
    for name, (top_1, top_10) in {"recommended": (0.25, 0.75), "targets": (0.125, 0.5)}.items():
        finished |= {f"{name}/top_1_percent": top_1, f"{name}/top_10_percent": top_10}
    other = {"step": 4, "examples_per_second": 5.0, "seconds": 24.0}
    runs = [
        made_run(tmp_path / "done", [*rows, validated], {}, results=finished),
        made_run(tmp_path / "<i>&'\"", [*rows[:2], validated], {"train.seed": 3}),
        made_run(tmp_path / "started", [], {}),
        made_run(tmp_path / "plain", rows, {"evaluate.every_epochs": 0, "data.validation": False}, results=other),
    ]
    write_report(runs, tmp_path / "out.html")
    page = parsed(tmp_path / "out.html")
    overview, metrics = list(page.iter("table"))[:2]
    size, own = "a <b> & c: 60 users, 50 items, 700 actions", f"{runs[0]} + 2"
    said = "validation True, every_epochs 1.0 (3 seeds) has hr@10 0.2500 on the test part. No other run has it yet."
    assert said in texts(page, "p")
    assert texts(overview, "tr") == [
        "runseedstest hr@10validationevery_epochsstateminutesdataset",
        f"{own}0, 3, 00.2500 [0.1578, 0.3723]True1.01 of 3 finished, 4, 2, 0 steps0.2{size}",
        f"{runs[3]}0-False0.01 of 1 finished, 4 steps0.4{size}",
    ]
    assert texts(metrics, "tr") == [
        f"metric{own}{runs[3]}",
        "hr@100.2500 [0.1578, 0.3723]-",
        "mrr0.1000 -",
        "users60 -",
        "corpus50 -",
        "step2 4 ",
        "examples_per_second7 5 ",
        "popularity: hr@100.3000 -",
    ]
    best = ["".join(span.itertext()) for span in metrics.iter("span") if span.get("class") == "best"]
    assert best == ["0.2500", "0.1000"]
    low, high = wilson(0.5, 30)
    assert {
        f"{runs[3]}itemforward2.00.250-",
        f"{own}recommended25.0%50.0%25.0%60.0%",
        f"{own}test targets12.5%37.5%50.0%-",
        f"brand=a & b300.5000 [{low:.4f}, {high:.4f}]-",
        "train.seed0, 30",
        f"run directories{runs[0]}, {runs[1]}, {runs[2]}{runs[3]}",
    } < set(texts(page, "tr"))


def ranked_run(path: Path, seed: int, ranks: np.ndarray, settings: dict[str, Any], users: int = 0) -> Run:
    results = means(ranks) | {"users": len(ranks), "corpus": 500, "step": 2, "seconds": 24.0}
    ids = [f"u{user}" for user in range(users, users + len(ranks))]
    files = {"results": results, "test_ranks": ranks.tolist(), "test_users": ids}
    made_run(path, [], {"train.seed": seed, "data.path": "data"} | settings, **files)
    return Run.read(path)


def test_seeds_are_grouped_and_the_verdict_says_what_can_be_told(tmp_path: Path) -> None:
    random, runs = np.random.default_rng(0), []
    users = random.lognormal(3.5, 1.0, 2000)
    for lr, factor in ((0.1, 1.0), (0.2, 0.7), (0.3, 0.699)):
        for seed in (1, 2, 3):
            ranks = 1 + (users * factor * random.lognormal(0, 0.5, 2000)).astype(int)
            runs.append(ranked_run(tmp_path / f"{lr}-{seed}", seed, ranks, {"dense.lr": lr, "train.threads": 1}))
    groups = grouped(runs)
    assert [group.seeds for group in groups] == ["1, 2, 3"] * 3 and differing(groups) == ["dense.lr"]
    values = [run.results["hr@10"] for run in runs[:3]]
    assert groups[0].mean("hr@10") == pytest.approx(np.mean(values))
    assert groups[0].spread("hr@10") == pytest.approx(np.std(values, ddof=1))
    best = max((1, 2), key=lambda at: groups[at].mean("hr@10"))
    other = 3 - best
    found = differences(groups, "hr@10")
    assert found[best] is None and (to_dot := found[0]) and (to_other := found[other])
    assert to_dot.mean == pytest.approx(groups[0].mean("hr@10") - groups[best].mean("hr@10"))
    assert to_dot.low < to_dot.mean < to_dot.high < 0 and to_dot.is_clear and not to_other.is_clear
    said = verdict(groups, "hr@10", differences(groups, "hr@10"))
    assert said.startswith(f"It cannot be told which is best at hr@10: lr {(0.1, 0.2, 0.3)[best]} (3 seeds) (0.")
    only = grouped(runs[:6])
    (difference,) = [of for of in differences(only, "hr@10") if of]
    assert verdict(only, "hr@10", differences(only, "hr@10")) == (
        f"lr 0.2 (3 seeds) is best at hr@10: {only[1].mean('hr@10'):.4f} ± {only[1].spread('hr@10'):.4f}, ahead of lr "
        f"0.1 (3 seeds) ({only[0].mean('hr@10'):.4f} ± {only[0].spread('hr@10'):.4f}) by {-difference.mean:+.4f}, 95 % "
        f"interval {-difference.high:+.4f} to {-difference.low:+.4f}."
    )
    # One seed of each has a narrower interval: that of the users alone.
    (single,) = [of for of in differences(grouped([runs[0], runs[3]]), "hr@10") if of]
    share = np.mean([(run.results["hr@10"]) for run in (runs[0], runs[3])])
    assert 0 < single.high - single.low < 4 * 1.96 * np.sqrt(share * (1 - share) / 2000)


def test_a_difference_of_seeds_alone_is_not_clear(tmp_path: Path) -> None:
    """Two settings whose users all fare alike, but whose seeds do not."""
    runs = []
    for lr, hits in ((0.1, (100, 900)), (0.2, (150, 950))):
        for seed, count in enumerate(hits):
            ranks = np.where(np.arange(2000) < count, 1, 100)
            runs.append(ranked_run(tmp_path / f"{lr}-{seed}", seed, ranks, {"dense.lr": lr}))
    (difference,) = [of for of in differences(grouped(runs), "hr@10") if of]
    assert difference.mean == pytest.approx(-0.025) and not difference.is_clear
    for at in (0, 1):
        (alone,) = [of for of in differences(grouped(runs[at::2]), "hr@10") if of]
        assert alone.mean == pytest.approx(-0.025) and alone.is_clear


@pytest.mark.parametrize("what", ["users", "rules", "ranks"])
def test_what_is_not_ranked_alike_is_not_compared(tmp_path: Path, what: str) -> None:
    ranks = np.arange(1, 61)
    one = ranked_run(tmp_path / "one", 0, ranks, {"dense.lr": 0.1})
    settings = {"dense.lr": 0.2} | ({"evaluate.exclude_history": "no"} if what == "rules" else {})
    other = ranked_run(tmp_path / "other", 0, ranks + 1, settings, users=7 if what == "users" else 0)
    if what == "ranks":
        (tmp_path / "other/test_ranks.json").unlink()
        other = Run.read(tmp_path / "other")
    groups = grouped([one, other])
    assert differences(groups, "hr@10") == [None, None]
    said = verdict(groups, "hr@10", differences(groups, "hr@10"))
    assert said.startswith("It cannot be told which is best at hr@10: ")
    assert said.endswith(" are not ranked for the same users by the same rules.")


def test_the_time_of_a_step_leaves_out_the_first_row_and_its_steps(tmp_path: Path) -> None:
    seconds = {10: 60.0, 20: 1.0, 30: 3.0}
    rows = [training_row(step, **{"time/forward": spent}) for step, spent in seconds.items()]
    runs = [made_run(tmp_path / "run", rows, {}), made_run(tmp_path / "one", rows[:1], {"dense.lr": 0.1})]
    write_report(runs, tmp_path / "out.html")
    shown = texts(parsed(tmp_path / "out.html"), "tr")
    assert f"{runs[0]}2,000.02,000.0" in shown and f"{runs[1]}60,000.060,000.0" in shown


def test_without_a_finished_run_there_are_no_test_metrics(tmp_path: Path) -> None:
    write_report([made_run(tmp_path / "run", [training_row(1)], {})], tmp_path / "out.html")
    page = parsed(tmp_path / "out.html")
    assert "No run has finished yet." in texts(page, "p") and "Test metrics" not in texts(page, "h2")
    assert "validation mrrnothing yet" in texts(page, "figure")


def test_time_follows_from_the_seconds_of_the_steps(tmp_path: Path) -> None:
    rows = [training_row(10, **{"time/step": 6.0}), training_row(20, **{"time/step": 12.0})]
    run = Run.read(made_run(tmp_path / "run", rows, {}))
    assert [run.minutes_at(step) for step in (0, 5, 10, 15, 20, 25)] == pytest.approx([0, 0.5, 1, 2, 3, 4])


def test_the_time_of_the_run_that_was_trained_first_counts(tmp_path: Path) -> None:
    first = {"start.model.similarity.kind": "dot"}
    run = made_run(tmp_path / "run", [training_row(10)], first, results={"seconds": 60.0, "step": 12})
    none = made_run(tmp_path / "none", [training_row(10)], {}, results={"seconds": 60.0, "step": 12})
    for path in (run, none):
        made_run(path / "start", [], {}, results={"seconds": 120.0, "step": 9})
    assert [Run.read(path).minutes_at(10) for path in (run, none)] == [3.0, 1.0]
    write_report([run, none], tmp_path / "out.html")
    rows = texts(next(parsed(tmp_path / "out.html").iter("table")), "tr")
    # What was not logged is known from the results.
    assert [f"finished, 12 steps{minutes}" in row for minutes, row in zip(("3.0", "1.0"), rows[1:], strict=True)] == [
        True
    ] * 2


def test_wilson() -> None:
    """Brown, Cai and DasGupta (2001) and the closed form at the ends."""
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_a_chart_leaves_out_what_is_not_finite_and_thins_what_is_long() -> None:
    """The best point has its value, and what a page does not color is light or dark with it."""
    nan = float("nan")
    drawn = ElementTree.fromstring(chart("step", [(0, [(1, 0.5)]), (9, [(1, 2.0), (2, nan), (3, 4.125)])], max))
    assert [(text.text, "var(--c1)" in text.get("style", "")) for text in drawn.iter(f"{SVG}text")][-1] == (
        "4.125",
        True,
    )
    points = [use for use in drawn.iter(f"{SVG}use") if "var(--c" in use.get("style", "")]
    assert len(points) == 3 and "step" in texts(drawn, f"{SVG}text")
    assert not re.search("#[0-9a-f]{6}", re.sub('xlink:href="#[^"]*"', "", chart("step", [(0, [(1, 0.5)])], None)))
    assert chart("step", [(0, [(1, nan)]), (1, [])], min) == ""
    long = [(float(x), float(x % 2)) for x in range(2 * POINTS)]
    assert thinned(long).tolist() == [[2 * at + 0.5, 0.5] for at in range(POINTS)]
    assert thinned(long[:POINTS]).tolist() == [[*point] for point in long[:POINTS]]


def test_what_is_no_run_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    for words, said in (([str(tmp_path)], "is not a run directory"), ([], "report needs run directories")):
        assert said in refusal("report", *words, "--out", str(tmp_path / "out.html"))
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("dataset.json", '"users": ', '"others": ', r"dataset\.json: users, items and actions must be whole numbers"),
        ("results.json", '"users": 60', '"users": [60]', r"results\.json: users is \[60\]; it must be a number"),
    ],
)
def test_an_edited_run_is_refused_in_one_line(tmp_path: Path, name: str, old: str, new: str, said: str) -> None:
    run = made_run(
        tmp_path / "run", [training_row(10)], {}, results={"users": 60, "hr@10": 0.5, "step": 10, "seconds": 3.0}
    )
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=said):
        write_report([run], tmp_path / "page.html")
