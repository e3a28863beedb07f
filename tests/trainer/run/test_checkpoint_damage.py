"""Checkpoints that are damaged, edited or foreign: what is said, and what is taken instead."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damages import DAMAGES, PART, flip, newest, replace_train, resume, rewrite, set_, steps, tensors, told, without
from safetensors.torch import load_file

from logitmix.modules.schema import ITEM
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.run import checkpoint, manifest
from logitmix.trainer.run.folder import read_config


def cast(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({name: found[name].to(dtype)}))


def shape(name: str, *index: Any) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({name: found[name][index].clone()}))


def renamed(name: str, other: str) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({other: found.pop(name)}))


def with_a_gap(found: dict[str, torch.Tensor]) -> None:
    table = found.pop(TABLE)
    found |= {TABLE: table[:20], "tables/item@40,0": table[40:]}


TABLE, WEIGHT = "tables/item@0,0", "tower/query_tower.encoder.position_LD@0,0"
MOMENT, COUNT = "table_optimizers/item/exp_avg@0,0", "dense_optimizer/query_tower.encoder.position_LD/step@"
FILE = "step-12/checkpoint.json"
EDITS: list[tuple[Callable[[Path], None], str]] = [
    (without("step"), f"{FILE}: step is missing"),
    (set_("step", 10**9), f"{FILE}: step is 1000000000, but the folder is step-12"),
    (set_("format_version", 2), f"{FILE}: format_version is 2, and this logitmix reads 6"),
    (set_("files", {"../../config.toml": "0"}), f"{FILE}: files is ['../../config.toml']; it must be all parts"),
    (set_(f"files/{PART}/sha256", None), f"{FILE}: files.{PART}.sha256 is None, not a text"),
    (set_("kind", "another"), f"{FILE}: kind is 'another', not 'logitmix checkpoint'"),
    (set_("schema/tables", [{"name": ITEM, "rows": 9}]), f"{FILE}: schema is not that of the run's dataset.json"),
    (set_("dataset", "0" * 64), f"{FILE}: dataset is not the SHA-256 of "),
    (set_("settings/model.dim", 16), f"{FILE}: settings.model.dim is 16, but the run's is 8"),
    (lambda step: (step / manifest.MANIFEST).write_text("[" * 100_000), f"{FILE} is damaged (nested too deep)"),
    (tensors(lambda found: found.pop(TABLE)), "step-12: it has no tensor tables/item"),
    (tensors(lambda found: found.update({"tables/x@0": torch.ones(1)})), "it has a tensor tables/x, which the model d"),
    (cast(TABLE, torch.float16), "its tensor tables/item is torch.float16, but the model's is torch.float32"),
    (shape(TABLE, slice(0, 9)), "its tensor tables/item is [9, 8], but the model"),
    (shape(WEIGHT, 0), "position_LD has pieces with another number of dim"),
    (renamed(TABLE, "tables/item@-1,0"), f"step-12/{PART}: 'tables/item@-1,0' does not name a piece of a tensor"),
    (tensors(with_a_gap), "its tensor tables/item has pieces that overlap or leave a gap"),
]  # fmt: skip
OF_OPTIMIZERS: list[tuple[Callable[[Path], None], str]] = [
    (tensors(lambda found: found.pop(COUNT)), "it has no tensor dense_optimizer/query_tower"),
    (cast(MOMENT, torch.float16), "its tensor table_optimizers/item/exp_avg is torch.float16, but the model's"),
]  # fmt: skip


@pytest.mark.parametrize("edit", range(len(EDITS)))
def test_an_edited_checkpoint_is_told_in_one_line(run: Path, edit: int) -> None:
    change, said = EDITS[edit]
    change(newest(run))
    for step in steps(run):
        if step != newest(run):
            shutil.rmtree(step)
    with told(said):
        checkpoint.load_saved(run)
    with told(said):
        resume(run)


@pytest.mark.parametrize("edit", range(len(OF_OPTIMIZERS)))
def test_an_edited_state_of_an_optimizer_is_told_in_one_line(run: Path, edit: int) -> None:
    """To training: evaluation and export do not need it."""
    change, said = OF_OPTIMIZERS[edit]
    for step in steps(run):
        change(step)
    assert checkpoint.load_saved(run, "last").step == 12
    with told(said):
        resume(run)


@pytest.mark.parametrize("damage", DAMAGES)
def test_training_goes_on_from_the_checkpoint_before(
    run: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    DAMAGES[damage](newest(run))
    with pytest.raises(ValueError, match=r"step-12\S* .*; remove .*step-12, or set train.on_damage"):
        resume(run, {"train.on_damage": "stop"})
    (run / "checkpoints" / "damaged-step-12").mkdir()
    rewrite(run / "checkpoints" / "step-8")
    capsys.readouterr()
    assert resume(run).step == 8
    (line,) = capsys.readouterr().err.splitlines()
    file = manifest.MANIFEST if "manifest" in damage else PART
    assert line.startswith(f"{newest(run) / file}") and line.endswith(
        f": step 12 is lost (kept in {newest(run).parent}/damaged-step-12.2), and training continues from step 8"
    )
    names = [path.name for path in steps(run)]
    assert names == ["damaged-step-12", "damaged-step-12.2", "step-4", "step-8"]
    assert resume(run).step == 8
    assert capsys.readouterr().err == ""


def test_a_start_removes_the_checkpoints_that_a_killed_job_did_not(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though there is nothing to train."""
    config, rmtree = replace_train(read_config(run), keep=1), shutil.rmtree
    set_("validation/hr@10", 0.9)(run / "checkpoints" / "step-4")

    def broken(path: Path) -> None:
        rmtree(path)
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", broken)
        with pytest.raises(OSError, match="broken"):
            train(config, Path(shutil.copytree(run, run.with_name("other"))))
        train(replace_train(config, on_save_failure="continue"), run)
    assert "broken\n" in capsys.readouterr().err
    assert [path.name for path in steps(run)] == ["step-12", "step-4"]


def test_training_ends_as_if_nothing_had_been_damaged(run: Path, finished: Path) -> None:
    flip(newest(run) / PART)
    flip(run / "checkpoints" / "step-8" / PART)
    config = read_config(run)
    whole = train(config, finished)
    again = train(config, run)
    timing = ("seconds", "examples_per_second")
    assert {name: of for name, of in again.items() if name not in timing} == {
        name: of for name, of in whole.items() if name not in timing
    }
    assert load_file(newest(run) / PART).keys() == load_file(newest(finished) / PART).keys()
    for name, values in load_file(newest(finished) / PART).items():
        assert torch.equal(load_file(newest(run) / PART)[name], values)


def test_where_none_is_intact_nothing_is_moved(run: Path) -> None:
    for step in steps(run):
        flip(step / PART)
    before = steps(run)
    with told(
        f"{newest(run) / PART} is damaged (its SHA-256 is not that in checkpoint.json), and no other checkpoint in"
    ):
        resume(run)
    assert steps(run) == before


@pytest.mark.parametrize(("damage", "which"), [*((damage, "best") for damage in DAMAGES), ("a flipped bit", "last")])
def test_export_and_evaluation_say_what_they_take_instead(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, which: Any
) -> None:
    best = checkpoint.load_saved(run, which).step
    assert capsys.readouterr().err == ""
    DAMAGES[damage](run / "checkpoints" / f"step-{best}")
    source = export(run, tmp_path / "served", which=which)["step"]
    line = capsys.readouterr().err
    assert source != best and line.startswith(f"{run}/checkpoints/step-{best}/") and line.count("\n") == 1
    assert line.endswith(f": instead of step-{best}, step {source} of {run} is taken\n")
    if which == "best":
        assert evaluate_run(run, "test", "cpu", 1)["step"] == source
    assert len(steps(run)) == 3
