"""What the tests of readers share."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.progress import Progress

from logitmix.modules.schema import Feature, Owner
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.raw import ActionBlock
from logitmix.trainer.data.rejects import Rejects

Action = tuple[str, str, int]
PROGRESS = Progress(disable=True)


def listed(rejects: Rejects) -> list[list[str]]:
    """File, line, reason and text of every reject."""
    rejects.close()
    header, *lines = rejects.path.read_text(encoding="utf-8").split("\n")[:-1]
    assert header == "file\tline\treason\ttext"
    return [line.split("\t") for line in lines]


def actions(blocks: Iterator[ActionBlock]) -> list[Action]:
    read: list[Action] = []
    for block in blocks:
        read += zip(block.users.to_pylist(), block.items.to_pylist(), block.timestamps.tolist(), strict=True)
    return read


def file_of(tmp_path: Path, content: bytes, name: str = "in.txt") -> InputFile:
    (tmp_path / name).write_bytes(content)
    return InputFile(tmp_path / name)


def decoded(dataset: Dataset, owner: Owner) -> dict[str, list[Any]]:
    """The features of an owner by name: sparse ones as text, "" for what is unknown."""
    features = {"item": dataset.item_features, "user": dataset.user_features, "event": dataset.event_features}[owner]
    return {name: _decoded(dataset, dataset_feature(dataset, name), column) for name, column in features.items()}


def dataset_feature(dataset: Dataset, name: str) -> Feature:
    return next(feature for feature in dataset.schema.features if feature.name == name)


def _decoded(dataset: Dataset, feature: Feature, column: Column) -> list[Any]:
    if not feature.sparse:
        return column.values.tolist()
    vocabulary = dataset.vocabulary(feature.table)
    values = [vocabulary[row] for row in column.values]
    if column.offsets is None:
        return values
    return [values[start:stop] for start, stop in pairwise(column.offsets)]


def titles(dataset: Dataset) -> list[str | None] | None:
    column = dataset.title_column()
    return None if column is None else column.to_pylist()
