"""Small datasets and configurations for tests."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from logitmix.common.mappings import from_mapping
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import FORMAT_VERSION, DatasetContents, write_contents, write_description

if TYPE_CHECKING:
    from torch import Tensor

    from logitmix.trainer.parallelize import ParallelModel

ITEMS = 50


def write_dataset(path: Path, users: int = 60, items: int = ITEMS, seed: int = 0) -> Path:
    """Users with 5 to 24 random actions each."""
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 25, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    actions = random.integers(0, items, offsets[-1])
    names = pa.array([f"item-{index}" for index in range(items)])
    path.mkdir(parents=True)
    write_contents(path, DatasetContents(offsets, actions, np.arange(offsets[-1]), item_columns={"raw_id": names}))
    counts = {"users": users, "items": items, "actions": int(offsets[-1])}
    write_description(path, {"format_version": FORMAT_VERSION, "name": "demo", **counts})
    return path


def small_config(data: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """A MoL that trains in a moment: D = 8, 2 x 2 components; `settings` ({"train.epochs": 3}) go on top."""
    flat = {
        "data.path": str(data),
        "model.dim": 8,
        "model.encoder.blocks": 1,
        "model.encoder.max_length": 12,
        "model.similarity.kind": "mol",
        "model.similarity.query_components": 2,
        "model.similarity.item_components": 2,
        "model.similarity.component_dim": 4,
        "model.similarity.gate_hidden": 8,
        "model.similarity.projection_hidden": 8,
        "model.hindexer.dim": 4,
        "model.hindexer.weight": 0.5,
        "model.loss.negatives": 5,
        "train.device": "cpu",
        "train.batch_size": 16,
        "train.epochs": 2,
        "train.log_every": 1,
    }
    flat |= settings
    if flat["model.similarity.kind"] != "mol":
        flat = {key: value for key, value in flat.items() if not key.startswith("model.similarity.")} | dict(settings)
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return from_mapping(Config, tree, "test")


def move_rows(model: "ParallelModel", ids: "Tensor", gradient: "Tensor") -> None:
    """Rows of sorted ids here and their gradient back: one update of the table, once its optimizer's step has begun."""
    rows = model.row_exchange(ids)
    rows.send_rows()
    rows.wait().grad = gradient
    rows.send_gradients()
    rows.apply_gradients()
