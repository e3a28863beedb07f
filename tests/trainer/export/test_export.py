import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import two_ranks
from small_data import forget_digests

from logitmix.comm.process_group import process_group
from logitmix.common.code import code
from logitmix.common.files import file_digest, only_writer
from logitmix.modules.config import HIndexerConfig, ModelConfig, MoLConfig, SASRecConfig
from logitmix.modules.schema import ITEM, Schema
from logitmix.serving.directory.delta import read_delta
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.config import Config, DataConfig, TrainConfig, dump_toml
from logitmix.trainer.data import writer
from logitmix.trainer.data.batches import ranking_users
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.evaluation.ranking import rank_corpus
from logitmix.trainer.export import export as export_module
from logitmix.trainer.export.delta import fold
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import parallel_model
from logitmix.trainer.metrics import NOT_SERVED
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.run import checkpoint, manifest
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.run.saving import Saver
from logitmix.trainer.run.tensor_files import SavedTensors

X, USERS = 50, 80


def write_dataset(path: Path, num_items: int, titles: list[str | None] | None) -> Path:
    random = np.random.default_rng(0)
    lengths = random.integers(4, 12, USERS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = pa.array([f"raw {index}" for index in range(num_items)])
    items = np.concatenate([random.integers(0, num_items, length) for length in lengths])
    # Two users of three come back to their first item in the end.
    back = np.arange(USERS) % 3 > 0
    for place in (1, 2):
        items[offsets[1:][back] - place] = items[offsets[:-1][back]]
    shown = None if titles is None else pa.array(titles, pa.string())
    writer.write_dataset(path, DatasetContents(offsets, items, np.arange(offsets[-1]), ids, titles=shown), "demo")
    return path


def perturb(model: ParallelModel, seed: int) -> None:
    """Other weights, as training would leave them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.tower.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for shard in model.shards()[ITEM].local_shards():
            shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, the first the better one, and metrics of both beside it."""
    data = write_dataset(tmp_path / "data", X, [None, *(f"title {index}" for index in range(1, X))])
    config = Config(
        data=DataConfig(path=str(data)),
        model=ModelConfig(
            dim=16,
            encoder=SASRecConfig(blocks=1, max_length=6),
            similarity=MoLConfig(component_dim=4, gate_hidden=8, projection_hidden=16),
            hindexer=HIndexerConfig(dim=8, weight=0.2),
        ),
        train=TrainConfig(device="cpu"),
    )
    run = tmp_path / "the-run"
    run.mkdir()
    (run / "config.toml").write_text(dump_toml(config))
    (run / "dataset.json").write_text(load_dataset(data).description())
    with process_group("cpu", 60) as ranks:
        model = parallel_model(config, Schema.of_ids(X), ranks)
        optimizer = dense_optimizer(model.tower, config.dense)
        for step, hit_rate in ((3, 0.5), (6, 0.4)):
            perturb(model, step)
            progress = RunProgress(step=step, validation={config.evaluate.metric: hit_rate})
            Saver(run, config, model, optimizer).save(progress)
    return run


@pytest.mark.parametrize("exclude_history", [True, False])
def test_the_retriever_ranks_as_the_evaluation_does(run: Path, tmp_path: Path, exclude_history: bool) -> None:
    """User by user, also those with longer histories than the model encodes."""
    model = checkpoint.load_saved(run)
    users = ranking_users(load_dataset(tmp_path / "data"), "test", 6)
    with process_group("cpu", 60) as ranks:
        rank_U = rank_corpus(
            Embedder(model.tower, model.sharded_rows(ranks)), X, users, 64, exclude_history
        ).similarity_U
    export(run, tmp_path / "served")
    histories = [part.tolist() for part in np.split(users.seen, np.cumsum(users.seen_lengths)[:-1])]
    found = Retriever.load(tmp_path / "served").retrieve(histories, X, exclude_history).items.tolist()
    ranking = zip(found, users.target.tolist(), strict=True)
    served = [row.index(target) + 1 if target in row else None for row, target in ranking]
    assert served == [None if rank == NOT_SERVED else rank for rank in rank_U.tolist()]
    assert served.count(None) == (users.repeats().sum() if exclude_history else 0)
    assert len(set(served)) > 10 and (users.seen_lengths > 6).any()


@pytest.mark.parametrize(("rule", "excluded"), [("auto", False), ("yes", True)])
def test_the_export_serves_by_the_rule_of_the_evaluation(
    run: Path, tmp_path: Path, rule: Literal["auto", "yes"], excluded: bool
) -> None:
    """The dataset is one of repeats."""
    config = read_config(run)
    options = dataclasses.replace(config.evaluate, exclude_history=rule)
    (run / "config.toml").write_text(dump_toml(dataclasses.replace(config, evaluate=options)))
    assert export(run, tmp_path / "served")["exclude_history"] == excluded
    retriever, history = Retriever.load(tmp_path / "served"), [3, 1, 4]
    as_evaluated = retriever.retrieve([history], X).items[0].tolist()
    assert as_evaluated == retriever.retrieve([history], X, excluded).items[0].tolist()
    assert set(history).isdisjoint(as_evaluated) == excluded
    assert len(retriever.rows(["raw 3"], X)) == X - excluded


def test_a_delta_from_an_earlier_export_gives_the_export_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    """With what a killed command left beside it. Numbers go on, and nothing but the delta stays."""
    export(run, tmp_path / "best")
    whole = export(run, tmp_path / "last", which="last")
    deltas = tmp_path / "deltas"
    (deltas / ".first.whole").mkdir(parents=True)
    (deltas / ".first.0123abcd.part").mkdir()
    words = ["export", str(run), "--delta-from", str(tmp_path / "best"), "--checkpoint"]
    cli.main([*words, "last", "--out", str(deltas / "first")])
    assert "first: delta 1 of " in capsys.readouterr().out
    assert [of.name for of in deltas.iterdir()] == ["first"]
    assert fold(tmp_path / "best", deltas, tmp_path / "folded") == whole
    cli.main([*words, "best", "--out", str(deltas / "second")])
    assert read_delta(deltas / "second").number == 2
    for more, said in (
        (["best", "--out", str(deltas / "second")], "second exists already; give another --out"),
        (["best", "--out", str(deltas / "third")], "does not differ from the earlier one: there is no delta"),
        (["best", "--out", str(deltas / "third"), "--faiss"], "--faiss has no place beside --delta-from"),
        (["best", "--out", str(deltas / "third"), "--vectors"], "--vectors has no place beside --delta-from"),
    ):
        assert said in refusal(*words, *more)
    assert {of.name for of in deltas.iterdir()} == {"first", "second"}


@pytest.mark.parametrize(
    "words",
    [
        ["export", "{run}", "--out", "{out}"],
        ["export", "{run}", "--out", "{out}", "--overwrite"],
        ["export", "{run}", "--delta-from", "{base}", "--out", "{out}"],
        ["fold", "{base}", "--deltas", "{folder}", "--out", "{out}"],
        ["recommend", "{base}", "--out", "{out}.csv", "--similar-items"],
    ],
)
def test_who_comes_second_to_a_directory_or_file_is_refused(
    run: Path, tmp_path: Path, refusal: Callable[..., str], words: list[str]
) -> None:
    export(run, tmp_path / "base")
    places = {"run": run, "base": tmp_path / "base", "out": tmp_path / "out", "folder": tmp_path}
    words = [word.format(**places) for word in words]
    out = Path(words[words.index("--out") + 1])
    if "--overwrite" in words:
        export(run, out)
    before = {of.name for of in tmp_path.iterdir()}
    with only_writer(out):
        assert f"another process writes {out}; wait for it, or give another --out" in refusal(*words)
    assert {of.name for of in tmp_path.iterdir()} == before


def test_a_run_of_other_code_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "trainer/loop.py of logitmix"
    for noted, count in ((code(), 0), (code() | {name: "0123456789ab"}, 1)):
        (run / "code.json").write_text(json.dumps(noted))
        for use in (
            lambda: export(run, tmp_path / "served", True),
            lambda: evaluate_run(run, "test", "cpu", 1),
        ):
            use()
            said = f"{run} was trained by other code than this: {name} was 0123456789ab, is "
            assert " ".join(capsys.readouterr().err.split()).count(said) == count


def test_exports_the_checkpoint_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    best, last = export(run, tmp_path / "best"), export(run, tmp_path / "last", which="last")
    assert (best["run"], best["dataset"], best["num_items"], best["step"], last["step"]) == ("the-run", "demo", X, 3, 6)
    best_scores, last_scores = (
        Retriever.load(tmp_path / name).retrieve([[1, 2]], 5).scores for name in ("best", "last")
    )
    assert not torch.equal(best_scores, last_scores)
    assert Retriever.load(tmp_path / "last").source.step == 6


def test_ids_and_titles_are_the_datasets(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "served")
    retriever = Retriever.load(tmp_path / "served")
    assert list(retriever.raw_ids) == load_dataset(tmp_path / "data").raw_ids()
    assert retriever.indices_of(retriever.raw_ids) == list(range(X))
    assert list(retriever.titles or ()) == ["", *(f"title {index}" for index in range(1, X))]


def note_dataset(run: Path, data: Path) -> None:
    """As if the run had been trained on this dataset."""
    shutil.copy(data / "dataset.json", run)
    for path in (run / "checkpoints").glob("step-*/checkpoint.json"):
        content = json.loads(path.read_text()) | {"dataset": file_digest(run / "dataset.json")}
        path.write_text(manifest.FORMAT.text(content))


@pytest.mark.parametrize(
    ("items", "said"),
    [(0, "no dataset at"), (X + 1, "is not the dataset that .* began with")],
)
def test_the_dataset_must_be_that_of_the_run(run: Path, tmp_path: Path, items: int, said: str) -> None:
    shutil.rmtree(tmp_path / "data")
    if items:
        write_dataset(tmp_path / "data", items, None)
    with pytest.raises(ValueError, match=said):
        export(run, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_raw_ids_that_name_an_item_twice_are_not_written(run: Path, tmp_path: Path) -> None:
    items = pq.read_table(tmp_path / "data" / "items.parquet")
    note_dataset(run, forget_digests(tmp_path / "data"))
    names = pa.array([f"raw {index // 2}" for index in range(X)])
    pq.write_table(items.set_column(1, "raw_id", names), tmp_path / "data" / "items.parquet")
    with pytest.raises(ValueError, match="the dataset's raw_ids name an item twice; prepare it again"):
        export(run, tmp_path / "served")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "the-run"]


def fail_on_the_second_rank(run: Path, out: Path, among: str) -> str:
    def broken(tensors: SavedTensors, schema: Schema, prefix: str, table: str, start: int, stop: int) -> torch.Tensor:
        is_broken = among == ("tables" if start == X else "items")
        return torch.full((stop - start, schema.table(table).dim), torch.nan if is_broken else 0.0)

    if os.environ["RANK"] == "1":
        checkpoint._read_rows = broken
    export_module.SHARD_BYTES = 2**11
    try:
        export(run, out)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("among", "name"), [("tables", "item"), ("items", "table")])
def test_what_one_rank_cannot_write_none_does(run: Path, tmp_path: Path, among: str, name: str) -> None:
    message = f"{name} holds NaN or infinity: the training diverged; export another checkpoint"
    assert two_ranks.run(fail_on_the_second_rank, run, tmp_path / "served", among) == [message] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "the-run"]
