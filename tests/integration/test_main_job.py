"""prepare, train on two processes, evaluate, export, retrieve: the commands, as a user gives them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import jobs
import numpy as np
import pytest
import two_ranks
from small_data import small_config

from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.config import dump_toml
from logitmix.trainer.data.batches import ranking_users
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.metrics import HIT_RATES
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import read_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV of users that walk round a ring of 40 items, prepared and trained on two processes."""
    folder = tmp_path_factory.mktemp("job")
    random = np.random.default_rng(0)
    lines = ["who,what,when"]
    for user in range(150):
        first = random.integers(40)
        lines += [f"user{user},item{(first + step) % 40},{step}" for step in range(random.integers(6, 15))]
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    columns = ["--user-column", "who", "--item-column", "what", "--timestamp-column", "when"]
    with chdir(folder):
        cli.main(["prepare", "table", "--source", "clicks.csv", "--out", "data/clicks", *columns])
    settings = {"train.epochs": 3, "model.dim": 16, "dense.lr": 5e-3, "tables.lr": 5e-3, "train.log_every": 7}
    config = small_config(Path("data/clicks"), settings)
    (folder / "ring.toml").write_text(dump_toml(config))
    two_ranks.command(["train", "ring.toml"], folder, world_size=2)
    return folder


def here(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says on standard output in this process."""
    capsys.readouterr()
    with chdir(folder):
        cli.main(words)
    return capsys.readouterr().out


def test_evaluate_repeats_the_results_on_any_number_of_processes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = json.loads((folder / "runs/ring/results.json").read_text())
    assert (results["users"], results["corpus"]) == (150, 40)
    assert results.pop("examples_per_second") > 0 and results.pop("seconds") > 0
    words = ["evaluate", "runs/ring", "--threads", "1", "--json"]
    assert json.loads(here(words, folder, capsys)) == results
    assert json.loads(two_ranks.command(words, folder, world_size=2)) == results


def test_the_exported_model_retrieves_what_the_trained_one_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = two_ranks.command(["export", "runs/ring", "--out", "exports/ring"], folder, world_size=2)
    assert said.count("exports/ring: 40 items") == 1
    dataset = load_dataset(folder / "data/clicks")
    users = ranking_users(dataset, "test", 12)
    histories = np.split(users.history, np.cumsum(users.lengths)[:-1])
    retriever = Retriever.load(folder / "exports/ring")
    found = retriever.retrieve([history.tolist() for history in histories], k=40).items.numpy()
    results = jobs.results(folder / "runs/ring")
    for k in HIT_RATES:
        hits = (found[:, :k] == users.target[:, None]).any(1)
        assert hits.mean() == pytest.approx(results[f"hr@{k}"], abs=1e-12)

    words = ["retrieve", "exports/ring", "--history", "item3,item4,item5", "-k", "3", "--json"]
    rows = json.loads(here(words, folder, capsys))["items"]
    assert rows == retriever.rows(["item3", "item4", "item5"], 3)


def test_a_run_says_where_its_tables_lie(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads((folder / "runs/ring/plan.json").read_text())
    assert plan["item"]["sharding"] == "row_wise"
    assert [shard["rank"] for shard in plan["item"]["shards"]] == [0, 1]
    assert sum(shard["rows"] for shard in plan["item"]["shards"]) == plan["item"]["rows"]

    words = ["plan", "ring.toml", "--world-size", "2", "--device", "cpu", "--json"]
    foreseen = json.loads(here(words, folder, capsys))
    assert foreseen["tables"] == plan
    saved = load_saved(folder / "runs/ring")
    assert foreseen["tower_parameters"] == sum(weight.numel() for weight in saved.tower.parameters())
    # Weight, gradient and Adam's two moments of the tower; of a row, 16 weights and two moments each.
    assert foreseen["tower_bytes"] == 16 * foreseen["tower_parameters"]
    rows = [shard["rows"] for shard in plan["item"]["shards"]]
    assert foreseen["table_bytes"] == [of * 16 * 12 for of in rows]


def test_a_run_is_watched(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "runs/ring/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [7, 14, 21, 28, 30]
    for row in trained:
        phases = sum(row[f"time/{name}"] for name in ("data", "all_to_all", "forward", "backward", "optimizer"))
        assert phases == pytest.approx(row["time/step"])
        # One FP8 row of 16: 18 bytes for 64.
        assert row["wire/share_of_fp32"] == pytest.approx(18 / 64)
        directions = [f"wire/item/{direction}" for direction in ("forward", "backward")]
        assert row["wire/bytes_per_step"] == pytest.approx(sum(row[f"{way}/bytes_per_step"] for way in directions))
        # The next step's rows are on their way before this one's row is written.
        assert len({row[f"{way}/fp32_bytes_per_step"] for way in directions}) == 1
        for way, (least, most) in zip(directions, ((2**-7, 2**-4), (2**-6, 2**-3)), strict=True):
            assert row[f"{way}/bytes_per_step"] / row[f"{way}/fp32_bytes_per_step"] == pytest.approx(18 / 64)
            assert least < row[f"{way}/relative_rms_error"] < most
        assert 0 <= row["gates/entropy"] <= 1
        assert row["learning_rate/dense"] == row["learning_rate/tables"] == 5e-3
        assert row["examples_per_second"] > 0 and row["gradient_norm"] > 0 and row["memory/peak_gib"] > 0
        assert row["loss"] == pytest.approx(row["loss/similarity"] + 0.5 * row["loss/hindexer"], rel=1e-5)
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [10, 20, 30]
    assert list((folder / "runs/ring/tensorboard").glob("events.*"))


@pytest.mark.slow
def test_torchx_starts_the_same_job(folder: Path, tmp_path: Path) -> None:
    words = ["ring.toml", "--run", str(tmp_path / "run"), "--train.epochs", "1", "--evaluate.every-epochs", "1"]
    words += ["--train.precision", "auto"]
    component = f"{ROOT / 'launch/components.py'}:train"
    bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    job = subprocess.run(
        ["torchx", "run", "-s", "local_cwd", component, "-j", "1x2", "--", *words],
        cwd=folder,
        env=os.environ | {"PATH": bin_first},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert jobs.results(tmp_path / "run")["step"] == 10
    first, second = (log.read_text() for log in sorted((tmp_path / "run/logs").glob("*/attempt_0/*/stderr.log")))
    assert "training ring.toml" in first and "step 10/10" in first and "training ring.toml" not in second
    assert "training ring.toml" in job.stderr and "step 10/10" in job.stderr
    assert read_config(tmp_path / "run").train.precision in ("bf16", "fp32")


REFUSED = {
    "no command 'trian'": "trian",
    "train needs a recipe first": "train --run x",
    "bad.toml: not valid TOML": "train bad.toml",
    "unknown option --train.batchsize (did you mean --train.batch-size?); see": "train ring.toml --train.batchsize 3",
    "model.similarity.kind was mol, is dot": "train ring.toml --model.similarity.kind dot",
    "--model.similarity.kind needs a value; see": "train ring.toml --model.similarity.kind",
    "no dataset at nowhere; make it with: logitmix prepare": "train demo-mol --data.path nowhere",
    "train.seed was 0, is 1; use another run directory": "train ring.toml --train.seed 1",
    "nowhere is not a run directory": "evaluate nowhere",
    "data exists and is not a serving directory": "export runs/ring --out data",
    "no serving directory at nowhere": "retrieve nowhere --history a",
    "no file or folder at nowhere.zip": "prepare ml-1m --source nowhere.zip --out new",
}


@pytest.mark.parametrize(("expected", "command"), REFUSED.items(), ids=REFUSED.keys())
def test_a_mistake_is_told_in_one_line(
    folder: Path, expected: str, command: str, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    (folder / "bad.toml").write_text("[train\n")
    words = command.split()
    monkeypatch.chdir(folder)
    said = [line for line in refusal(*words).strip().splitlines() if not line.startswith("training ")]
    assert expected in "\n".join(said)
    assert len(said) == 1 or words == ["trian"]
    assert not (folder / "new").exists()
