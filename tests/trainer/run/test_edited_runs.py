"""Edited files of a run are refused in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damages import newest, replace_train, resume, told

from logitmix.trainer.commands.report_page import write_report
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.run import checkpoint
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.results import read_ranks, read_test_users


@pytest.mark.parametrize("name", ["step-63.bak", "step-", "step-x", "step-07", "step-\u0663", "step", "step--1"])
def test_other_names_beside_the_checkpoints_are_left_alone(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(newest(run), run / "checkpoints" / name)
    (run / "checkpoints" / "step-99").touch()
    assert checkpoint.load_saved(run, "last").step == resume(run).step == 12
    assert (run / "checkpoints" / name).exists() and (run / "checkpoints" / "step-99").is_file()
    assert capsys.readouterr().err == ""


ROW = "metrics.jsonl, line 2"
LINES = [
    (b"[]", f"{ROW} is not a JSON object"),
    (b"3", f"{ROW} is not a JSON object"),
    (b"null", f"{ROW} is not a JSON object"),
    (b"{", f"{ROW} is damaged ("),
    (b"\xff\xfe", f"{ROW} is damaged ("),
    (b"[" * 100_000, f"{ROW} is damaged (nested too deep)"),
    (b"{}", f"{ROW}: kind is None; it must be a text"),
    (b'{"kind": 3, "step": 1}', f"{ROW}: kind is 3; it must be a text"),
    (b'{"kind": "train"}', f"{ROW} has no field step"),
    (b'{"kind": "train", "step": -1}', f"{ROW}: step is -1; it must be a count"),
    (b'{"kind": "train", "step": "1"}', f"{ROW}: step is '1'; it must be a number"),
    (b'{"kind": "train", "step": 1.5}', f"{ROW}: step is 1.5; it must be a count"),
    (b'{"kind": "train", "step": 1, "loss": "low"}', f"{ROW}: loss is 'low'; it must be a number"),
    (b'{"kind": "validation", "step": 1}', f"{ROW} has no field hr@10"),
    (b'{"kind": "validation", "step": 1, "hr@10": null}', f"{ROW}: hr@10 is None; it must be a number"),
]


@pytest.mark.parametrize("line", range(len(LINES)))
def test_a_line_that_is_no_row_of_metrics_is_told(run: Path, tmp_path: Path, line: int) -> None:
    content, said = LINES[line]
    (run / "digests.json").unlink()
    path = run / "metrics.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([rows[0], content + b"\n", *rows[2:]]))
    commands: list[Callable[[], object]] = [lambda: train(replace_train(read_config(run), refit=True), run)]
    if b"validation" not in content:
        commands.append(lambda: write_report([run], tmp_path / "report.html"))
    for command in commands:
        with told(said):
            command()


RESULTS = [
    (b"{", "results.json is damaged"),
    (b"\xff", "results.json is damaged"),
    (b"[]", "results.json is not a JSON object"),
    (b"{}", "results.json has no numbers"),
    (b'{"mrr": 1}', "results.json has no field"),
    (b'{"step": "x"}', "results.json: step is 'x'; it must be a number"),
    (b'{"step": 12, "seconds": null}', "results.json: seconds is None; it must be a number"),
    (b'{"step": 12, "validation": {"hr@10": "x"}}', "results.json: validation: hr@10 is 'x'; it must be a number"),
]


@pytest.mark.parametrize("edit", range(len(RESULTS)))
def test_edited_results_are_told(run: Path, tmp_path: Path, edit: int) -> None:
    content, said = RESULTS[edit]
    (run / "digests.json").unlink()
    (run / "results.json").write_bytes(content)
    for command in (lambda: export(run, tmp_path / "out"), lambda: write_report([run], tmp_path / "report.html")):
        with told(said):
            command()


@pytest.mark.parametrize(
    "content", [b"{}", b"[0]", b"[1.5]", b'["1"]', b"[true]", b"[1, [2]]", b"[99999999999999999999]"]
)
def test_edited_ranks_are_told(run: Path, content: bytes) -> None:
    (run / "digests.json").unlink()
    (run / "test_ranks.json").write_bytes(content)
    with told("test_ranks.json is not a list of ranks from 1"):
        read_ranks(run)


@pytest.mark.parametrize("content", [b"{}", b"[0]", b"[null]", b'["u", ["v"]]'])
def test_edited_lists_of_users_are_told(run: Path, content: bytes) -> None:
    (run / "digests.json").unlink()
    (run / "test_users.json").write_bytes(content)
    with told("test_users.json is not a list of raw ids of users"):
        read_test_users(run)


DESCRIPTIONS = [
    (b"{", "dataset.json is damaged"),
    (b"\xff", "dataset.json is damaged"),
    (b"[]", "dataset.json is not a JSON object"),
    (b"{}", "dataset.json: users is None; it must be a count"),
    (b'{"users": -1}', "dataset.json: users is -1; it must be a count"),
    (b'{"users": 1, "items": 2, "actions": 3}', "dataset.json: name is None; it must be a text"),
    (b'{"users": 1, "items": 2, "actions": 3, "name": ""}', "dataset.json has no field schema"),
    (b'{"users": 1, "items": 2, "actions": 3, "name": "", "schema": 3}', "dataset.json: schema is not a JSON object"),
    (b'{"users": 1, "items": 2, "actions": 3, "name": "", "schema": {}}', "dataset.json: schema.features is missing"),
]  # fmt: skip


@pytest.mark.parametrize("edit", range(len(DESCRIPTIONS)))
def test_an_edited_description_of_the_dataset_is_told(run: Path, edit: int) -> None:
    content, said = DESCRIPTIONS[edit]
    (run / "digests.json").unlink()
    (run / "dataset.json").write_bytes(content)
    with told(said):
        checkpoint.load_saved(run)
    config = read_config(run)
    for command in (lambda: evaluate_run(run, "test", None, None, "cpu", 1), lambda: train(config, run)):
        with told("dataset"):
            command()


CONFIGS = [
    (b"\xff", "config.toml is damaged"),
    (b"[", "config.toml: not valid TOML"),
    (b"a = " + b"[" * 100_000, "config.toml: not valid TOML"),
    (b"what = 3", "config.toml: unknown key what"),
    (b"[model]\ndim = 'wide'", "config.toml: model.dim is 'wide'; it must be of type int"),
    (b"[model]\ndim = -8", "config.toml: model.dim (-8) must be divisible by 4"),
    (b"model = 3", "config.toml: model is a section, not a value"),
]


@pytest.mark.parametrize("edit", range(len(CONFIGS)))
def test_an_edited_configuration_is_told(run: Path, tmp_path: Path, edit: int) -> None:
    content, said = CONFIGS[edit]
    (run / "digests.json").unlink()
    config = read_config(run)
    (run / "config.toml").write_bytes(content)
    for command in (lambda: export(run, tmp_path / "out"), lambda: train(config, run)):
        with told(said):
            command()
