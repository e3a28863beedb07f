"""Checkpoints: sharded, complete or absent, checked when read, and read without running code.

A checkpoint is a directory `checkpoints/step-N`:

    part-00000-of-00002.safetensors   what rank 0 of 2 holds: its shards of the tables and of their optimizers' states;
                                      on rank 0 also the tower and its optimizer's state (trainer/run/tensor_files.py)
    checkpoint.json                   the fields of RunProgress, settings and schema (those that the tensors depend on),
                                      dataset (the SHA-256 of the run's dataset.json), files; see common/checked.py

The tensors are tables/TABLE, table_optimizers/TABLE/STATE, tower/WEIGHT and dense_optimizer/WEIGHT/STATE; with
train.ema also average/tables/TABLE and average/tower/WEIGHT, which evaluation and exports read; of tables with a
capacity also values/TABLE, the ids that have its rows, and growing/TABLE/STATE, when they were named. A checkpoint is
written under another name and renamed when it is complete and on disk, and no directory is written twice.

No rank has more of a table in memory than its own rows: files are written in blocks, and mapped to be read.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from logitmix.common.checked import Checked, fields_of, require_entry
from logitmix.common.mappings import brief, from_mapping, require
from logitmix.modules.schema import Schema
from logitmix.trainer.config import Config
from logitmix.trainer.run.folder import checkpoint_paths, fixed_settings, recorded_dataset
from logitmix.trainer.run.metrics import RunProgress

MANIFEST = "checkpoint.json"
FORMAT = Checked("logitmix checkpoint", 6)


def part_name(number: int, count: int) -> str:
    return f"part-{number:05}-of-{count:05}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The fields of checkpoint.json, besides kind, version and digest."""

    step: int
    seconds: float
    step_seconds: float
    examples: int
    skipped: int
    validation: dict[str, float]
    settings: dict[str, Any]
    schema: dict[str, Any]
    dataset: str
    files: dict[str, Any]

    def __post_init__(self) -> None:
        count = len(self.files)
        names = [part_name(number, count) for number in range(count)]
        require(count > 0 and list(self.files) == names, "files", list(self.files), "all parts, in order")
        for name, entry in self.files.items():
            require_entry(entry, f"files.{name}")

    @property
    def progress(self) -> RunProgress:
        return RunProgress(**{entry.name: getattr(self, entry.name) for entry in fields(RunProgress)})


def described(config: Config, schema: Schema, progress: RunProgress) -> dict[str, Any]:
    """The fields of the manifest but `dataset` and `files`."""
    return asdict(progress) | {"settings": fixed_settings(config), "schema": schema.to_mapping()}


def dataset_digest(run: Path) -> str:
    """SHA-256 of a run's dataset.json, which has the digests of the dataset's files."""
    return hashlib.sha256(recorded_dataset(run).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """checkpoint.json of a checkpoint; ValueError if it is missing, damaged, or says what cannot be."""
    file = path / MANIFEST
    if not file.exists():
        raise ValueError(f"{file} is missing")
    manifest = from_mapping(Manifest, fields_of(FORMAT.read(file)), str(file))
    if path.name != f"step-{manifest.step}":
        raise ValueError(f"{file}: step is {manifest.step}, but the folder is {path.name}")
    return manifest


def manifests(run: Path) -> dict[Path, Manifest | None]:
    """The run's checkpoints, newest first: each one's manifest, if it can be read."""
    found: dict[Path, Manifest | None] = dict.fromkeys(reversed(checkpoint_paths(run)))
    for path in found:
        with suppress(ValueError, OSError):
            found[path] = read_manifest(path)
    return found


def by_merit(found: Mapping[Path, Manifest], metric: str) -> list[Path]:
    """The best by the validation metric first, the earliest of equals; then those that were not evaluated."""

    def key(path: Path) -> tuple[bool, float, int]:
        manifest = found[path]
        value = manifest.validation.get(metric)
        return (True, 0.0, -manifest.step) if value is None else (False, -value, manifest.step)

    return sorted(found, key=key)


def require_same_model(file: Path, manifest: Manifest, config: Config, schema: Schema) -> None:
    now = fixed_settings(config)
    for key in sorted(now | manifest.settings):
        if (then := manifest.settings.get(key)) != now.get(key):
            raise ValueError(f"{file}: settings.{key:.80} is {brief(then)}, but the run's is {brief(now.get(key))}")
    if manifest.schema != schema.to_mapping():
        raise ValueError(f"{file}: schema is not that of the run's dataset.json and model.features")
    if manifest.dataset != dataset_digest(run := file.parents[2]):
        raise ValueError(f"{file}: dataset is not the SHA-256 of {run / 'dataset.json'}: it is of another run")
