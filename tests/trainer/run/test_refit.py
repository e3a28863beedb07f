"""A run's refit: trained anew on the validation actions too, for as many epochs as the best checkpoint had."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_data import small_config, write_dataset

from logitmix.trainer import cli
from logitmix.trainer.commands.evaluate import show_metrics
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.results import read_results
from logitmix.trainer.run.stages import final_run

FP32 = {"train.precision": "fp32", "evaluate.baselines": False}
# The first epoch is the best: later ones barely move, at this rate.
EARLY = FP32 | {"train.epochs": 3, "train.schedule": "cosine", "tables.lr": 1e-20, "dense.lr": 1e-20}


def rows(run: Path) -> torch.Tensor:
    saved = load_saved(run)
    return saved.read_rows("item", 0, saved.num_items)


def test_a_refit_is_a_run_of_the_best_epochs_that_holds_out_the_test_part_alone(tmp_path: Path) -> None:
    """Bit for bit what these settings would train by themselves."""
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    settings = FP32 | {"train.epochs": 3, "train.schedule": "cosine", "train.refit": True}
    tested = train(small_config(data, settings), run)
    assert tested == read_results(run / "refit") != read_results(run)
    by_hand = FP32 | {"train.epochs": 3, "train.schedule": "cosine", "data.validation": False}
    epochs = read_results(run)["step"] / 4
    train(small_config(data, by_hand | {"train.stop_after_epochs": epochs}), tmp_path / "by hand")
    assert read_results(tmp_path / "by hand")["hr@10"] == tested["hr@10"]
    torch.testing.assert_close(rows(run / "refit"), rows(tmp_path / "by hand"), rtol=0, atol=0)
    assert not torch.equal(rows(run), rows(run / "refit"))
    assert read_rows(run / "refit", "validation") == []


def test_it_trains_for_the_epochs_of_the_best_checkpoint(tmp_path: Path) -> None:
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    train(small_config(data, EARLY | {"train.refit": True}), run)
    assert [row["step"] for row in read_rows(run, "validation")] == [4, 8, 12]
    assert (read_results(run)["step"], read_results(run / "refit")["step"]) == (4, 4)
    assert read_config(run / "refit").train.stop_after_epochs == 1


def test_export_and_the_test_take_the_refit_and_validation_the_run(tmp_path: Path) -> None:
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    train(small_config(data, FP32 | {"train.epochs": 2, "train.refit": True}), run)
    assert final_run(run) == run / "refit"
    assert evaluate_run(run, "test", "cpu", 1)["hr@10"] == read_results(run / "refit")["hr@10"]
    assert evaluate_run(run, "validation", "cpu", 1)["step"] == read_results(run)["step"]
    export(run, tmp_path / "out")
    export(run / "refit", tmp_path / "same")
    assert (tmp_path / "out" / "tower.safetensors").read_bytes() == (
        tmp_path / "same" / "tower.safetensors"
    ).read_bytes()
    with pytest.raises(ValueError, match="was trained on the validation actions"):
        evaluate_run(run / "refit", "validation", "cpu", 1)


def test_a_refit_starts_from_the_refit_that_its_run_did_not_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, start, run = write_dataset(tmp_path / "data"), tmp_path / "start", tmp_path / "run"
    train(small_config(data, FP32 | {"train.refit": True}), start)
    train(small_config(data, FP32 | {"train.refit": True, "warm_start": str(start)}), run)
    warm = [line.split()[3] for line in capsys.readouterr().err.splitlines() if line.startswith("warm start from")]
    assert warm == [f"{start},", f"{start / 'refit'},"]


def test_a_refit_that_is_not_finished_is_not_used_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_dataset(tmp_path / "data"), tmp_path / "run"
    config = small_config(data, FP32 | {"train.epochs": 2})
    train(config, run)
    assert final_run(run) == run
    cli.main(["train", "--refit", str(run), "--json"])
    whole = read_results(run / "refit")
    assert json.loads(capsys.readouterr().out)["hr@10"] == whole["hr@10"]
    (run / "refit" / "results.json").unlink()
    for use in (lambda: export(run, tmp_path / "out"), lambda: evaluate_run(run, "test", "cpu", 1)):
        with pytest.raises(ValueError, match=r"refit is not finished: go on with `logitmix train --refit"):
            use()
    cli.main(["train", f"--refit={run}"])
    assert read_results(run / "refit")["hr@10"] == whole["hr@10"]


def test_a_refit_of_another_checkpoint_is_not_mixed_with_it(tmp_path: Path) -> None:
    data, run = write_dataset(tmp_path / "data", ring=True), tmp_path / "run"
    settings = FP32 | {"tables.lr": 0.01, "evaluate.metric": "mrr", "train.refit": True}
    train(small_config(data, settings | {"train.epochs": 1}), run)
    longer = settings | {"train.epochs": 8}
    train(small_config(data, longer | {"train.refit": False}), run)
    for use in (
        lambda: train(small_config(data, longer), run),
        lambda: export(run, tmp_path / "out"),
        lambda: evaluate_run(run, "test", "cpu", 1),
    ):
        with pytest.raises(ValueError, match=r"is a refit of 1 epochs, but .* is now best after \d; remove .*refit"):
            use()


def test_a_refit_of_another_model_or_dataset_is_not_taken(tmp_path: Path) -> None:
    """Of a run that has been trained anew, and is best after as many epochs."""
    run, datasets = tmp_path / "run", [write_dataset(tmp_path / of, ring=of == "ring") for of in ("data", "ring")]
    train(small_config(datasets[0], EARLY | {"train.refit": True}), run)
    shutil.rmtree(run / "checkpoints")
    (run / "results.json").unlink()
    train(small_config(datasets[1], EARLY), run)
    with pytest.raises(ValueError, match=r"is a refit of what .* was before, of another model or dataset; remove"):
        final_run(run)


def test_refit_needs_a_run(tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.toml").touch()
    monkeypatch.chdir(tmp_path / "here")
    for words in (["--refit"], ["--refit="], ["--refit", str(tmp_path)]):
        assert "--refit needs a run directory" in refusal("train", *words)


def test_peeking_at_the_test_part_is_said_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best epoch on the test part stands beside the one that validation chose, which is the same as without."""
    data = write_dataset(tmp_path / "data", ring=True)
    plain = train(small_config(data, FP32 | {"train.epochs": 3}), tmp_path / "plain")
    capsys.readouterr()
    peeked = train(small_config(data, FP32 | {"train.epochs": 3, "evaluate.peek_test": True}), tmp_path / "peeked")
    found = {row["step"]: row for row in read_rows(tmp_path / "peeked", "peeked")}
    assert list(found) == [4, 8, 12] and "epoch 2, step 8: peeked hr@10" in capsys.readouterr().err
    best = max(found.values(), key=lambda row: row["hr@10"])
    assert (peeked["peeked/hr@10"], peeked["peeked/mrr"]) == (best["hr@10"], best["mrr"])
    assert found[peeked["step"]]["hr@10"] == peeked["hr@10"] == plain["hr@10"] and peeked["step"] == plain["step"]
    show_metrics(peeked, "test", False)
    assert "peeked: best on test" in capsys.readouterr().out
