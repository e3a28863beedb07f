"""Runs with checkpoints, and what damages them."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_data import a_model, small_config

from logitmix.common.checked import Checked, entry_of
from logitmix.trainer.config import Config
from logitmix.trainer.run import checkpoint, manifest
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.metrics import RunProgress

PART = "part-00000-of-00001.safetensors"
SETTINGS = {"train.epochs": 3, "train.precision": "fp32", "evaluate.users": 4, "evaluate.baselines": False}
SETTINGS |= {"evaluate.exclude_history": "no"}
SETTINGS |= {"model.similarity.kind": "dot", "model.hindexer.weight": 0.0}


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-12"


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> None:
    """Changes the manifest of a checkpoint, and makes all digests anew."""
    content = json.loads((path / manifest.MANIFEST).read_text())
    del content["sha256"]
    if isinstance(content.get("files"), dict):
        content["files"] = {name: entry_of(path / name) for name in content["files"] if (path / name).exists()}
    change(content)
    (path / manifest.MANIFEST).write_text(manifest.FORMAT.text(content))


def in_parts(path: Path, count: int) -> list[Path]:
    """Divides a checkpoint's tensors among the parts of several ranks."""
    tensors, parts = load_file(path / PART), [path / manifest.part_name(number, count) for number in range(count)]
    (path / PART).unlink()
    for number, part in enumerate(parts):
        save_file(dict(list(tensors.items())[number::count]), part)
    rewrite(path, lambda content: content.update(files={part.name: entry_of(part) for part in parts}))
    return parts


def resume(run: Path, settings: dict[str, Any] | None = None) -> RunProgress:
    """As train does, without the training."""
    config = small_config(Path(read_config(run).data.path), SETTINGS | (settings or {}))
    with a_model(config) as of:
        return checkpoint.restore(run, config, *of)


@contextmanager
def told(said: str) -> Iterator[None]:
    """A user's mistake, in one line that says this."""
    with pytest.raises(ValueError) as caught:
        yield
    assert said in str(caught.value) and "\n" not in str(caught.value)


def set_(name: str, value: Any) -> Callable[[Path], None]:
    """Sets a field of the manifest, or of an object in it."""

    def edit(step: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            *parents, key = name.split("/")
            for parent in parents:
                content = content[parent]
            content[key] = value

        rewrite(step, change)

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda step: rewrite(step, lambda content: content.pop(name))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Changes the tensors of the file."""

    def edit(step: Path) -> None:
        found = load_file(step / PART)
        change(found)
        save_file({name: of.contiguous() for name, of in found.items()}, step / PART)
        rewrite(step)

    return edit


def replace_train(config: Config, **settings: Any) -> Config:
    return replace(config, train=replace(config.train, **settings))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda step: flip(step / PART),
    "a missing file": lambda step: (step / PART).unlink(),
    "a damaged manifest": lambda step: flip(step / manifest.MANIFEST),
    "no manifest": lambda step: (step / manifest.MANIFEST).unlink(),
    "an edited manifest": set_("files", {}),
}


def damaged(content: bytes, chance: random.Random, flips: int, cuts: int) -> Iterator[bytes]:
    for _ in range(flips):
        at, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        yield content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
    for length in {0, 1, *range(0, len(content), max(1, len(content) // cuts)), len(content) - 1}:
        yield content[:length]
    yield bytes(len(content))
    yield content + b"\0"
    yield content + b"\n"


def signed(content: dict[str, Any]) -> str:
    return Checked("", 1).text(content)
