"""Files of checkpoints and runs that somebody made to do harm: none runs code, blocks or fills the memory."""

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damages import PART, newest, resume, rewrite, steps, told
from safetensors.torch import save_file

from logitmix.common import plugins
from logitmix.common.checked import entry_of
from logitmix.serving.directory.format import FORMAT as MANIFEST_FORMAT
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.commands.groups import Run
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.description import FORMAT as DATASET_FORMAT
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.run import manifest, tensor_files
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.metrics import read_rows


class _Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def hostile(kind: str, canary: Path) -> bytes:
    stream, attack = io.BytesIO(), _Runs(canary)
    if kind == "npy":
        np.save(stream, np.array([attack], object), allow_pickle=True)
        return stream.getvalue()
    if kind in ("zip", "legacy"):
        torch.save({"weight": attack}, stream, _use_new_zipfile_serialization=kind == "zip")
        return stream.getvalue()
    return pickle.dumps(attack, protocol=int(kind))


KINDS = ("4", "zip", "legacy", "npy")


@pytest.mark.parametrize("kind", KINDS)
def test_the_hostile_files_would_run_code(tmp_path: Path, kind: str) -> None:
    stream = io.BytesIO(hostile(kind, tmp_path / "canary"))
    if kind == "npy":
        np.load(stream, allow_pickle=True)
    else:
        (pickle.load if kind == "4" else partial(torch.load, weights_only=False))(stream)
    assert (tmp_path / "canary").exists()


PLACES = (PART, "checkpoint.json", ".metadata", "__0_0.distcp", "config.toml", "dataset.json", "metrics.jsonl")
HOSTILE = [(place, "4") for place in PLACES] + [(PART, kind) for kind in KINDS]
HOSTILE += [(place, "4") for place in ("header", "results.json", "plan.json", "another part")]


def place_hostile(run: Path, place: str, attack: bytes) -> None:
    for step in steps(run):
        if place == "header":
            # A whole safetensors file, whose own metadata and whose bytes of a tensor are the attack.
            values = torch.tensor(list(attack), dtype=torch.uint8)
            save_file({"tables/item@0,0": values}, step / PART, {"__reduce__": attack.decode("latin1")})
        elif place == "another part":
            (step / "part-00001-of-00001.safetensors").write_bytes(attack)
        elif (run / place).exists():
            (run / place).write_bytes(attack)
            continue
        else:
            (step / place).write_bytes(attack)
        if place == "checkpoint.json":
            continue

        def add(content: dict[str, Any], step: Path = step) -> None:
            names = [path.name for path in step.iterdir() if path.name != manifest.MANIFEST]
            content["files"] = {name: entry_of(step / name) for name in sorted(names)}

        rewrite(step, add)


@pytest.mark.parametrize(("place", "kind"), sorted({*HOSTILE}))
def test_nothing_hostile_runs_code(run: Path, tmp_path: Path, place: str, kind: str) -> None:
    """In a checkpoint with digests made anew, or in a run's other files; train, evaluate and export."""
    canary, config = tmp_path / "canary", read_config(run)
    place_hostile(run, place, hostile(kind, canary))
    commands: list[Callable[[], object]] = [
        lambda: evaluate_run(run, "test", "cpu", 1),
        lambda: export(run, tmp_path / "served"),
        lambda: train(config, run),
    ]
    for command in commands:
        try:
            command()
        except ValueError as error:
            assert str(run) in str(error) and "\n" not in str(error)
        else:
            assert place in ("metrics.jsonl", "results.json", "plan.json")
        assert not canary.exists()


COMMANDS = [
    "evaluate {run}",
    "export {run} --out {out}",
    "export {run} --delta-from {served} --out {out}",
    "plan {run}/config.toml",
    "train {run}/config.toml --run {run}",
    "train --refit {run}",
    "train auto --data.path {data} --run {out} --continue {run}",
    "train demo-mol --data.path {data} --run {out} --warm-start {run}",
]


@pytest.fixture
def naming(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A run that names a file within it and a module as plugins, which make a file when they are imported."""
    for name in ("_loaded", "_trusting"):
        monkeypatch.setattr(plugins, name, type(getattr(plugins, name))(getattr(plugins, name)))
    data, served = Path(read_config(run).data.path), tmp_path / "served"
    export(run, served)
    files = [run / "within.py", tmp_path / "beside_it.py"]
    for file in files:
        file.write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    config = run / "config.toml"
    config.write_text(f'plugins = ["{files[0]}", "beside_it"]\n{config.read_text()}')
    (run / "digests.json").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    return {"run": run, "out": tmp_path / "out", "data": data, "served": served}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_what_a_run_names(
    naming: dict[str, Path], command: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    said = refusal(*command.format(**naming).split())
    flags = f"add --import {naming['run']}/within.py --import beside_it to run it, or --trust-plugins to run all"
    line = said.splitlines()[-1]
    assert line.startswith("logitmix: ") and f"{naming['run']}/config.toml names a plugin" in line and flags in line
    assert not (tmp_path / "canary").exists()


def test_a_report_of_a_run_imports_nothing(
    naming: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows settings that only the plugin knows, without checking them."""
    run, page = naming["run"], tmp_path / "page.html"
    config = run / "config.toml"
    config.write_text(config.read_text().replace('kind = "dot"\n', 'kind = "of <theirs>\\u001b"\nwidth = 3\n'))
    cli.main(["report", str(run), "--out", str(page)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"{run}/config.toml names the plugin {run}/within.py, which is not imported (--import): the settings are not "
        "checked"
    )
    shown = page.read_text()
    assert "of &lt;theirs&gt;" in shown and "model.similarity.width" in shown and "\x1b" not in shown
    assert not (tmp_path / "canary").exists()
    config.write_text(config.read_text().replace('metric = "', 'metric = 3 #"'))
    with told(f"{run}/config.toml: evaluate.metric is 3; it must be of type str"):
        Run.read(run)


def test_no_export_or_dataset_imports_what_it_names(naming: dict[str, Path], tmp_path: Path) -> None:
    """A file within it, and a module that is there."""
    for folder, file, reader, format in (
        (naming["served"], "manifest.json", Retriever.load, MANIFEST_FORMAT),
        (naming["data"], "dataset.json", load_dataset, DATASET_FORMAT),
    ):
        folder = Path(shutil.copytree(folder, tmp_path / file / folder.name))
        shutil.copy(naming["run"] / "within.py", folder)
        for name in ("within.py", "beside_it"):
            content = json.loads((folder / file).read_text()) | {"plugins": {name: "1.0"}}
            (folder / file).write_text(format.text(content))
            with contextlib.chdir(folder), told(f"{folder} needs the plugin {name} (1.0): "):
                reader(folder)
    assert not (tmp_path / "canary").exists() and "beside_it" not in sys.modules


def test_a_header_beyond_reason_is_not_parsed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in steps(run):
        with (path / PART).open("wb") as out:
            out.write((90_000_000).to_bytes(8, "little"))
            out.truncate(100_000_000)
        rewrite(path)
    monkeypatch.setattr(tensor_files, "safe_open", lambda *_, **__: pytest.fail("it is parsed"))
    with told(f"{newest(run) / PART} is not a safetensors file (its header would have 90,000,000 bytes"):
        resume(run)


STEP = "checkpoints/step-12"


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", f"{STEP}/{PART}", f"{STEP}/checkpoint.json"])
def test_a_pipe_in_place_of_a_file_is_named_and_does_not_block(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    readers = {"metrics.jsonl": read_rows, "config.toml": read_config}
    with told(f"{run / name} is a pipe, not a file"):
        readers.get(name, lambda run: resume(run, {"train.on_damage": "stop"}))(run)
