"""The plugins in examples/plugins/, as a stranger uses them: from a folder outside of the repository."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from logitmix.serving.retriever import Retriever

EXAMPLES = Path(__file__).parents[1] / "examples" / "plugins"
TRAIN = """
import json, sys
import torch
from logitmix.trainer.cli import main

def run(*words):
    try:
        main([*words])
    except SystemExit as stop:
        assert not stop.code

given = [word for name in "bilinear gru hinge ndcg_at_50 int8 adagrad one_minus_sqrt".split()
         for word in ("--import", f"{name}.py")]
chosen = ("--model.similarity.kind bilinear --model.encoder.kind gru --model.loss.kind hinge --model.loss.margin 2 "
          "--evaluate.metric ndcg@50 --comm.forward int8 --comm.backward int8 "
          "--tables.optimizer adagrad --tables.lr 0.1 --train.schedule one_minus_sqrt --train.ema 0.5").split()
small = ("--model.dim 8 --model.encoder.max-length 9 --model.loss.negatives 8 --train.epochs 3 --train.log-every 1 "
         "--train.batch-size 16 --processes 2").split()
run("prepare", "ratings-2018", "--import", "ratings_2018.py", "--source", "ratings.csv", "--out", "data")
run("train", "demo-mol", *given, "--data.path", "data", "--run", "run", *chosen, *small)

from logitmix.comm.codec import Segment
from logitmix.comm.config import CODECS
codec, layout = CODECS["forward"].find("int8"), (Segment("a", 5), Segment("b", 3))
rows = torch.randn(7, 8) * torch.tensor([100.0] * 5 + [0.1] * 3)
rows[3, 6] = torch.nan
encoded, decoded = torch.zeros(7, codec.row_bytes(layout), dtype=torch.uint8), torch.zeros(7, 8)
codec.encode(rows, layout, encoded, None)
codec.decode(encoded, layout, decoded)
assert decoded[3, 5:].isnan().all()
for of in (slice(0, 5), slice(5, 8)):
    error = (decoded[:, of] - rows[:, of]).abs().nan_to_num()
    assert (error <= rows[:, of].nan_to_num().abs().amax(1, keepdim=True) / 127 / 2 + 1e-6).all() and error.any()
"""
GO_ON = """
from logitmix.trainer.cli import main

main(["evaluate", "run", "--json"])
main(["export", "run", "--out", "served"])
main(["report", "run", "--out", "report.html"])
main(["retrieve", "served", "--history", "B1,B2", "--json", "-k", "5"])
"""


def ran(folder: Path, program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_they_go_all_the_way(tmp_path: Path) -> None:
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    lines = [f"B{(user + step) % 20},A{user},{step % 5}.0,{step}" for user in range(60) for step in range(10)]
    (tmp_path / "ratings.csv").write_text("\n".join([*lines, "B1,,1.0,30"]) + "\n")
    ran(tmp_path, TRAIN)
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
    names = ["adagrad", "bilinear", "gru", "hinge", "int8", "ndcg_at_50", "one_minus_sqrt", "ratings_2018"]
    assert re.findall(r"/(\w+)\.py", config) == names and 'kind = "hinge"\n' in config and "margin = 2.0" in config
    evaluated, _, found = [line for line in ran(tmp_path, GO_ON).splitlines() if line[0] in "{[" or "served" in line]
    assert json.loads(evaluated)["ndcg@50"] == results["ndcg@50"]
    assert len(json.loads(found)) == 5

    manifest = json.loads((tmp_path / "served/manifest.json").read_text())
    assert set(manifest["plugins"]) == {"bilinear.py", "gru.py", "hinge.py"}
    assert "or give them with `--import`: `gru.py` (" in (tmp_path / "served/README.md").read_text()
    needs = r"served needs the plugin gru\.py \([0-9a-f]{12}\): --import PLACE/gru\.py; in Python, import it before$"
    with pytest.raises(ValueError, match=needs):
        Retriever.load(tmp_path / "served")
    (tmp_path / "int8.py").unlink()
    again = subprocess.run(
        [sys.executable, "-m", "logitmix.trainer", "evaluate", "run"], cwd=tmp_path, capture_output=True, text=True
    )
    place = re.escape(
        f"run/config.toml: the plugin {tmp_path}/int8.py is not there; give the place: --import PLACE/int8.py"
    )
    assert again.returncode == 2 and re.fullmatch(f"logitmix: {place}\n", again.stderr)


def test_each_is_short_and_says_how_to_use_it() -> None:
    for file in EXAMPLES.glob("*.py"):
        text = file.read_text()
        assert len(text.splitlines()) <= 50 and f"--import {file.name}" in text.split('"""')[1], file
