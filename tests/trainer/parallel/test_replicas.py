"""Tables with a copy in each group of ranks (tables.group_size): four ranks as 2 x 2 against one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from small_data import a_pipeline, a_step, assert_close, gather_table, small_config
from torch import Tensor

from logitmix.trainer.config import Config
from logitmix.trainer.run.state import pieces_of, state_of
from logitmix.trainer.run.tensor_files import Rectangle

EXACT = {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32", "model.features": ["all"]}
SGD = {"tables.optimizer": "sgd", "tables.lr": 0.1, "dense.optimizer": "sgd", "dense.lr": 0.1}
CLIP = {"train.clip": 4.0, "tables.eps": 0.001, "tables.lr": 0.1, "dense.optimizer": "sgd", "dense.lr": 0.1}
BAGS = {"tables.tags.pooled": True, "tables.brand.pooled": True}
"""Bags of ids, and weighted ones."""
SETTINGS: dict[str, dict[str, Any]] = {
    "columns": SGD | {"tables.sharding": "column_wise", "comm.parts": 3},
    "bags adam": BAGS | {"tables.sharding": "column_wise"},
    "bags rowwise_adagrad": {"tables.optimizer": "rowwise_adagrad"} | BAGS,
    "clip": CLIP | BAGS | {"comm.parts": 2},
    "average": {"train.ema": 0.9},
    "capacity": {"tables.tags.capacity": 5, "tables.brand.capacity": 3, "train.ema": 0.9},
}
FP8 = {"comm.forward": "fp8", "comm.backward": "fp8_stochastic", "train.precision": "fp32", "model.features": ["all"]}


@dataclass
class Seen:
    """Of one rank."""

    losses: list[Tensor]
    tables: dict[str, Tensor]
    """Whole ones, of the rank's group, after the first step."""
    shards: dict[str, list[Rectangle]]
    """What it holds of tables and their optimizers' states."""
    gradients: dict[str, Tensor]
    """Of the tower, in the first step."""
    norm: Tensor | None


def train_steps(config: Config, steps: int) -> Seen:
    with a_pipeline(config, steps) as pipeline:
        losses, gradients, tables = [], dict[str, Tensor](), dict[str, Tensor]()
        for _ in range(steps):
            of_step = a_step(pipeline)
            gradients = gradients or of_step
            losses.append(pipeline.losses["loss"].detach())
            model = pipeline.model
            tables = tables or {name: gather_table(model, name) for name in model.shards()}
        state = state_of(model, pipeline.optimizer)
        shards = {name: [piece.copied() for piece in pieces_of(of)] for name, of in state.items() if "table" in name}
        return Seen(losses, tables, shards, gradients, pipeline.total_norm)


def train_all(configs: dict[str, Config], steps: int) -> list[Seen]:
    return [train_steps(config, steps) for config in configs.values()]


@pytest.fixture(scope="module")
def trained(featured: Path) -> dict[str, tuple[list[Seen], Seen]]:
    """By name: the ranks of 2 x 2, and one process alone, after two steps."""
    of = {name: EXACT | settings for name, settings in SETTINGS.items()} | {"fp8": FP8}
    configs = {name: small_config(featured, settings | {"tables.group_size": 2}) for name, settings in of.items()}
    ranks = zip(*two_ranks.run(train_all, configs, 2, world_size=4), strict=True)
    alone = [train_steps(config, 2) for config in configs.values()]
    return {name: ([*of_name], one) for name, of_name, one in zip(configs, ranks, alone, strict=True)}


@pytest.mark.parametrize("name", SETTINGS)
def test_groups_do_together_what_one_process_does(trained: dict[str, tuple[list[Seen], Seen]], name: str) -> None:
    ranks, alone = trained[name]
    for step, expected in enumerate(alone.losses):
        assert_close(sum(of.losses[step] for of in ranks), expected, 1e-5)
    for key, gradient in alone.gradients.items():
        assert_close(ranks[0].gradients[key], gradient, 1e-5)
    # Adam divides by a root of small numbers, where a rounding weighs more.
    relative = 1e-3 if name in ("bags adam", "average", "capacity") else 1e-5
    for table, expected in alone.tables.items():
        assert_close(ranks[0].tables[table], expected, relative)
    if alone.norm is not None:
        for of in ranks:
            torch.testing.assert_close(of.norm, alone.norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", [*SETTINGS, "fp8"])
def test_copies_stay_bit_equal(trained: dict[str, tuple[list[Seen], Seen]], name: str) -> None:
    """Rows, and what the optimizers keep for them."""
    first, second, *others = trained[name][0]
    for of, other in zip((first, second), others, strict=True):
        assert of.shards.keys() == other.shards.keys()
        for key, pieces in of.shards.items():
            for piece, copied in zip(pieces, other.shards[key], strict=True):
                assert piece.place == copied.place and torch.equal(piece.values, copied.values), key
    for table, expected in first.tables.items():
        assert all(torch.equal(of.tables[table], expected) for of in trained[name][0])
