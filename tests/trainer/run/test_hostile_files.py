"""Files of checkpoints and runs that somebody made to do harm: none runs code, blocks or fills the memory."""

import io
import os
import pickle
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damages import PART, newest, resume, rewrite, steps, told
from safetensors.torch import save_file
from sampling import one_of_each

from logitmix.common.checked import entry_of
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.run import manifest, tensor_files
from logitmix.trainer.run.folder import read_config, read_schema
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


KINDS = ("0", "2", "4", "5", "zip", "legacy", "npy")


@pytest.mark.parametrize("kind", KINDS)
def test_the_hostile_files_would_run_code(tmp_path: Path, kind: str) -> None:
    content = hostile(kind, tmp_path / "canary")
    if kind == "npy":
        np.load(io.BytesIO(content), allow_pickle=True)
    elif kind in ("zip", "legacy"):
        torch.load(io.BytesIO(content), weights_only=False)
    else:
        pickle.loads(content)
    assert (tmp_path / "canary").exists()


PLACES = (PART, "checkpoint.json", ".metadata", "__0_0.distcp", "config.toml", "dataset.json", "metrics.jsonl")
HOSTILE = [
    (place, kind)
    for place in PLACES
    for kind in KINDS
    if place in (PART, "checkpoint.json", ".metadata") or kind in "4"
]
HOSTILE += [("header", kind) for kind in KINDS] + [("results.json", "2"), ("plan.json", "2"), ("another part", "2")]


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


@pytest.mark.parametrize(("place", "kind"), one_of_each(HOSTILE, itemgetter(0), itemgetter(1)))
def test_nothing_hostile_runs_code(run: Path, tmp_path: Path, place: str, kind: str) -> None:
    """In a checkpoint with digests made anew, or in a run's other files; train, evaluate and export."""
    canary, config = tmp_path / "canary", read_config(run)
    place_hostile(run, place, hostile(kind, canary))
    commands: list[Callable[[], object]] = [
        lambda: evaluate_run(run, "test", None, None, "cpu", 1),
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


def test_a_header_beyond_reason_is_not_parsed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in steps(run):
        with (path / PART).open("wb") as out:
            out.write((90_000_000).to_bytes(8, "little"))
            out.truncate(100_000_000)
        rewrite(path)
    monkeypatch.setattr(tensor_files, "safe_open", lambda *_, **__: pytest.fail("it is parsed"))
    with told(f"{newest(run) / PART} is not a safetensors file (its header would have 90,000,000 bytes"):
        resume(run)


def test_a_tensor_in_very_many_pieces_is_checked_in_no_time(tmp_path: Path) -> None:
    """Each with each other in Python would take more than an hour for as many as a header can have."""
    count, lines = 1000, 0
    file = tensor_files.TensorFile({"rows": [tensor_files.Rectangle((n, 0), torch.zeros(1, 1)) for n in range(count)]})
    (tmp_path / "part").write_bytes(b"".join(file.parts()))
    saved = tensor_files.SavedTensors([tmp_path / "part"])

    def line(*_: object) -> Any:
        nonlocal lines
        lines += 1
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        saved.check({"rows": tensor_files.Kind(torch.float32, (count, 1))})
    finally:
        sys.settrace(before)
    assert lines < 100 * count


STEP = "checkpoints/step-12"


@pytest.mark.parametrize(
    "name", ["config.toml", "dataset.json", "metrics.jsonl", f"{STEP}/{PART}", f"{STEP}/checkpoint.json"]
)
def test_a_pipe_in_place_of_a_file_is_named_and_does_not_block(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    readers = {"metrics.jsonl": read_rows, "config.toml": read_config, "dataset.json": read_schema}
    with told(f"{run / name} is a pipe, not a file"):
        readers.get(name, lambda run: resume(run, {"train.on_damage": "stop"}))(run)
