"""The plugins in examples/plugins/, as a stranger uses them: from a folder outside of the repository."""

import json
import re
import shutil
from pathlib import Path

import pytest
import two_ranks

from logitmix.serving.retriever import Retriever

EXAMPLES = Path(__file__).parents[1] / "examples" / "plugins"
PREPARE = "prepare ratings-2018 --import ratings_2018.py --source ratings.csv --out data"
CHOSEN = (
    "--model.similarity.kind bilinear --model.encoder.kind gru --model.loss.kind hinge --model.loss.margin 2 "
    "--evaluate.metric ndcg@50 --comm.forward int8 --comm.backward int8 "
    "--tables.optimizer adagrad --tables.lr 0.1 --train.schedule one_minus_sqrt --train.ema 0.5"
)
SMALL = (
    "--model.dim 8 --model.encoder.max-length 9 --model.loss.negatives 8 --train.epochs 3 --train.log-every 1 "
    "--train.batch-size 16"
)
TRAINS = ("bilinear", "gru", "hinge", "ndcg_at_50", "int8", "adagrad", "one_minus_sqrt")


def test_they_go_all_the_way(tmp_path: Path) -> None:
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    lines = [f"B{(user + step) % 20},A{user},{step % 5}.0,{step}" for user in range(60) for step in range(10)]
    (tmp_path / "ratings.csv").write_text("\n".join([*lines, "B1,,1.0,30"]) + "\n")
    two_ranks.command(PREPARE.split(), tmp_path)
    given = [word for name in TRAINS for word in ("--import", f"{name}.py")]
    words = ["train", "demo-mol", *given, "--data.path", "data", "--run", "run", *CHOSEN.split(), *SMALL.split()]
    two_ranks.command(words, tmp_path, world_size=2)
    results = json.loads((tmp_path / "run/results.json").read_text())
    # The next item follows from the last one; a random order has a tenth of it.
    assert results["mrr"] > 0.3 and results["ndcg@50"] >= results["ndcg@10"] > results["ndcg@50"] / 2
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    rates, steps = [row["learning_rate/tables"] for row in rows], len(rows)
    assert rates == [pytest.approx(0.1 * (1 - (step / steps) ** 0.5)) for step in range(steps)]
    # 8 numbers of a byte and a scale of 4, in place of 32 bytes.
    assert {row["wire/share_of_fp32"] for row in rows} == {12 / 32}

    config = (tmp_path / "run/config.toml").read_text()
    assert (
        re.findall(r"/(\w+)\.py", config) == sorted(TRAINS)
        and 'kind = "hinge"\n' in config
        and "margin = 2.0" in config
    )
    # The command line names them again, or trusts what the run names, in its ranks, too.
    evaluate, trust = ["evaluate", "run", "--json"], "--trust-plugins"
    assert json.loads(two_ranks.command([*evaluate, *given], tmp_path))["ndcg@50"] == results["ndcg@50"]
    again = two_ranks.command([*evaluate, trust, "--processes", "2"], tmp_path)
    assert json.loads(again)["ndcg@50"] == pytest.approx(results["ndcg@50"])
    refused = two_ranks.command(evaluate, tmp_path, status=2)
    assert "run/config.toml names a plugin, which is code, and the command line does not: add --import /" in refused
    two_ranks.command(["export", "run", "--out", "served", trust], tmp_path)
    two_ranks.command(["report", "run", "--out", "report.html"], tmp_path)
    assert "model.similarity.kind</td><td>bilinear" in (tmp_path / "report.html").read_text()
    found = two_ranks.command(["retrieve", "served", *given, "--history", "B1,B2", "--json", "-k", "5"], tmp_path)
    assert len(json.loads(found)["items"]) == 5

    manifest = json.loads((tmp_path / "served/manifest.json").read_text())
    assert set(manifest["plugins"]) == {"bilinear.py", "gru.py", "hinge.py"}
    assert "or give them with `--import`: `gru.py` (" in (tmp_path / "served/README.md").read_text()
    needs = r"served needs the plugin gru\.py \([0-9a-f]{12}\): --import PLACE/gru\.py; in Python, import it before$"
    with pytest.raises(ValueError, match=needs):
        Retriever.load(tmp_path / "served")
    (tmp_path / "int8.py").unlink()
    given = [word for word in given if word not in ("--import", "int8.py")]
    others = [word for name in given for word in ("--import", name)]
    assert f"add --import {tmp_path}/int8.py to run it, or" in two_ranks.command(
        [*evaluate, *others], tmp_path, status=2
    )
    place = f"run/config.toml: the plugin {tmp_path}/int8.py is not there; give the place: --import PLACE/int8.py"
    assert two_ranks.command([*evaluate, *others, trust], tmp_path, status=2).splitlines()[-1] == f"logitmix: {place}"


def test_each_is_short_and_says_how_to_use_it() -> None:
    for file in EXAMPLES.glob("*.py"):
        text = file.read_text()
        assert len(text.splitlines()) <= 50 and f"--import {file.name}" in text.split('"""')[1], file
