"""Edited files of a run are refused in one line."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damages import newest, replace_train, resume, told

from logitmix.trainer.commands.report_page import write_report
from logitmix.trainer.config import Config
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


READERS: dict[str, Callable[[Path, Config], object]] = {
    "train": lambda run, config: train(config, run),
    "refit": lambda run, config: train(replace_train(config, refit=True), run),
    "report": lambda run, _: write_report([run], run.parent / "report.html"),
    "export": lambda run, _: export(run, run.parent / "out"),
    "evaluate": lambda run, _: evaluate_run(run, "test", "cpu", 1),
    "ranks": lambda run, _: read_ranks(run),
    "users": lambda run, _: read_test_users(run),
    "load": lambda run, _: checkpoint.load_saved(run),
}
ROW = "metrics.jsonl, line 2"
RANKS, USERS = "test_ranks.json is not a list of ranks from 1", "test_users.json is not a list of raw ids of users"
SCHEMA = b'{"users": 1, "items": 2, "actions": 3, "name": "", "schema": %s}'
OF_READERS: list[tuple[str, list[tuple[bytes, str]]]] = [
    ("refit report", [
        (b"[]", f"{ROW} is not a JSON object"),
        (b"[" * 100_000, f"{ROW} is damaged (nested too deep)"),
        (b'{"kind": 3, "step": 1}', f"{ROW}: kind is 3; it must be a text"),
        (b'{"kind": "train"}', f"{ROW} has no field step"),
        (b'{"kind": "train", "step": -1}', f"{ROW}: step is -1; it must be a count"),
        (b'{"kind": "train", "step": 1, "loss": "low"}', f"{ROW}: loss is 'low'; it must be a number"),
        (b'{"kind": "validation", "step": 1, "hr@10": null}', f"{ROW}: hr@10 is None; it must be a number"),
    ]),
    ("refit", [(b'{"kind": "validation", "step": 1}', f"{ROW} has no field hr@10")]),
    ("export report", [
        (b"[]", "results.json is not a JSON object"),
        (b"{}", "results.json has no numbers"),
        (b'{"step": 12, "seconds": null}', "results.json: seconds is None; it must be a number"),
        (b'{"step": 12, "validation": {"hr@10": "x"}}', "results.json: validation: hr@10 is 'x'; it must be a number"),
    ]),
    ("ranks",
     [(of, RANKS) for of in (b"{}", b"[0]", b"[1.5]", b'["1"]', b"[true]", b"[1, [2]]", b"[99999999999999999999]")]),
    ("users", [(of, USERS) for of in (b"{}", b"[0]", b"[null]", b'["u", ["v"]]')]),
    ("load", [
        (b"[]", "dataset.json is not a JSON object"),
        (b'{"users": -1}', "dataset.json: users is -1; it must be a count"),
        (b'{"users": 1, "items": 2, "actions": 3, "name": ""}', "dataset.json has no field schema"),
        (SCHEMA % b"3", "dataset.json: schema is not a JSON object"),
    ]),
    ("export train", [
        (b"[", "config.toml: not valid TOML"),
        (b"a = " + b"[" * 100_000, "config.toml: not valid TOML"),
        (b"[model]\ndim = -8", "config.toml: model.dim (-8) must be divisible by 4"),
    ]),
]  # fmt: skip
EDITS = [(readers, *edit) for readers, edits in OF_READERS for edit in edits]


@pytest.mark.parametrize("number", range(len(EDITS)))
def test_an_edited_file_of_a_run_is_told(run: Path, number: int) -> None:
    readers, content, said = EDITS[number]
    config, file = read_config(run), run / re.split("[ ,:]", said)[0]
    if said.startswith(ROW):
        first, _, *others = file.read_bytes().splitlines(keepends=True)
        content = b"".join([first, content + b"\n", *others])
    (run / "digests.json").unlink()
    file.write_bytes(content)
    for name in readers.split():
        with told(said):
            READERS[name](run, config)
    for name in ("evaluate", "train") if file.name == "dataset.json" else ():
        with told("dataset"):  # it is another one, at the least
            READERS[name](run, config)
