"""Training with many tables and features: what batches name, and two processes against one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_ranks
from sampling import run_with
from small_data import a_model, a_pipeline, a_step, assert_close, batches_of, gather_table, small_config
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from logitmix.modules.batch import Bags
from logitmix.modules.model import SampledLosses
from logitmix.modules.schema import ITEM
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.lookups import columns_of, look_up
from logitmix.trainer.loop import training_batches
from logitmix.trainer.parallel.plan import TablePlan

EXACT = {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32", "model.features": ["all"]}
SGD = {"tables.optimizer": "sgd", "tables.lr": 0.1, "dense.optimizer": "sgd", "dense.lr": 0.1, "tables.eps": 1e-8}
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "adam": {},
    "rowwise_adagrad": {"tables.optimizer": "rowwise_adagrad"},
    "column_wise": SGD | {"tables.sharding": "column_wise"},
    "mixed": SGD | {"tables.item.sharding": "row_wise", "tables.brand.sharding": "table_wise", "tables.brand.lr": 0.3},
    "widths": SGD | {"tables.brand.dim": 4, "tables.type.dim": 12},
    "parts": SGD | {"comm.parts": 3},
    "ligr": SGD | {"model.encoder.kind": "ligr", "model.encoder.dropout": 0.3},
    "hstu": SGD | {"model.encoder.kind": "hstu", "model.encoder.times": True, "model.encoder.blocks": 2},
    "fuxi": SGD | {"model.encoder.kind": "fuxi", "model.encoder.times": True, "model.encoder.blocks": 2},
    "pooled": SGD | {"model.encoder.kind": "pooled", "model.encoder.hidden": 8},
    "recency": SGD | {"model.features": ["all", "recency"]},
    "position, bce": SGD | {"model.loss.share": "position", "model.loss.kind": "bce"},
    "uneven": SGD | {"train.batch_size": 1},
    "all items": SGD | {"model.loss.negatives": 0, "model.loss.share": "batch"},
    "in batch, dot": SGD | {"model.loss.in_batch": 6, "model.similarity.kind": "dot", "model.loss.share": "batch"},
    "groups": SGD | {"model.loss.in_batch": 6, "model.loss.share": "group", "model.loss.group_positions": 30},
    "resampled": SGD | {"model.loss.share": "sequence", "model.loss.resample": 4, "model.loss.in_batch": 6},
    "mutual information": SGD | {"model.similarity.mutual_information": 0.5},
    "user component": SGD | {"model.features": ["all", "user"], "model.similarity.user_component": True},
    "id dropout": SGD | {"model.item_id_dropout": 0.4},
}
BAGS = {
    f"bags {sharding} {optimizer}": SETTINGS[optimizer] | {"tables.tags.pooled": True, "tables.tags.sharding": sharding}
    for sharding in ("row_wise", "table_wise", "column_wise")
    for optimizer in ("sgd", "adam", "rowwise_adagrad")
    if (sharding, optimizer) != ("column_wise", "rowwise_adagrad")
}
"""The tags are pooled by the owners of their rows."""
WEIGHTED_BAGS = {
    name.replace("bags", "weighted bags"): {key.replace("tags", "brand"): value for key, value in settings.items()}
    for name, settings in BAGS.items()
}
"""Instead of them the brands: single ids, bags and weighted bags."""
SETTINGS |= BAGS | WEIGHTED_BAGS | {"bags in parts": BAGS["bags row_wise sgd"] | {"comm.parts": 3}}
CLIP = {"train.clip": 4.0, "tables.eps": 0.001, "tables.lr": 0.1, "dense.optimizer": "sgd", "dense.lr": 0.1}
CLIPPED: dict[str, dict[str, Any]] = {
    "clip sgd": CLIP | SGD | {"comm.parts": 3},
    "clip adam": CLIP | {"tables.optimizer": "adam", "tables.sharding": "column_wise"},
    "clip rowwise_adagrad": CLIP | {"tables.optimizer": "rowwise_adagrad", "tables.tags.sharding": "table_wise"},
    "clip bags sgd": CLIP | BAGS["bags row_wise sgd"],
    "clip bags adam": CLIP | BAGS["bags column_wise adam"],
    "clip weighted bags sgd": CLIP | WEIGHTED_BAGS["weighted bags row_wise sgd"],
    "clip weighted bags adam": CLIP | WEIGHTED_BAGS["weighted bags column_wise adam"],
    "clip nothing": CLIP | SGD | {"train.clip": 1e6},
}
SETTINGS |= CLIPPED
POOLED = BAGS | WEIGHTED_BAGS
USUAL = {
    "adam", "rowwise_adagrad", "column_wise", "mixed", "widths", "parts", "ligr", "hstu", "recency", "uneven",
    "all items", "in batch, dot", "groups", "position, bce", "resampled", "mutual information", "user component",
    "id dropout", "bags table_wise adam", "bags column_wise sgd", "weighted bags row_wise rowwise_adagrad",
    "weighted bags row_wise sgd", "bags in parts", "clip sgd", "clip adam", "clip rowwise_adagrad",
    "clip weighted bags sgd", "clip bags adam", "clip nothing",
}  # fmt: skip
SAMPLE = [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow]) for name in SETTINGS]


@dataclass
class Seen:
    """Of one rank: its own part of the losses; the rest is global."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    named: dict[str, set[int]]
    plan: Mapping[str, TablePlan]
    tower: dict[str, Tensor]
    norm: Tensor | None
    wire_bytes: float
    cuts: list[tuple[int, ...]]
    """Sizes of the items' shards."""


def train_steps(config: Config, steps: int) -> Seen:
    with a_pipeline(config, steps) as pipeline:
        model = pipeline.model
        before = {name: gather_table(model, name) for name in model.shards()}
        losses, named, wire_bytes = [], {name: set[int]() for name in before}, 0.0
        for _ in range(steps):
            gradients = a_step(pipeline)
            wire_bytes += float(pipeline.wire_counts[:, 0, 0].sum())
            for name, ids in pipeline.batch.ids.items():
                named[name] |= set((ids.values if isinstance(ids, Bags) else ids).tolist())
            losses.append(pipeline.losses["loss"].detach())
        after = {name: gather_table(model, name) for name in before}
        tower = {name: parameter.detach() for name, parameter in model.tower.named_parameters()}
        cuts = [tuple(shard.shard_sizes) for shard in model.shards()[ITEM].metadata().shards_metadata]
        norm = pipeline.total_norm
        return Seen(losses, gradients, before, after, named, model.plan, tower, norm, wire_bytes, cuts)


def train_all(configs: list[Config], steps: int) -> list[Seen]:
    return [train_steps(config, steps) for config in configs]


@pytest.fixture(scope="module")
def trained(featured: Path, request: pytest.FixtureRequest) -> dict[str, tuple[Seen, Seen, Seen]]:
    """By name: both ranks of two, and one process alone, after a step."""
    names = run_with(request, "name") | {"sgd", "adam", "rowwise_adagrad"}
    of = {name: settings for name, settings in SETTINGS.items() if name in names}
    configs = [small_config(featured, EXACT | settings) for settings in of.values()]
    pairs = zip(*two_ranks.run(train_all, configs, 1), strict=True)
    return {name: (*pair, train_steps(config, 1)) for name, config, pair in zip(of, configs, pairs, strict=True)}


@pytest.mark.parametrize("name", SAMPLE)
def test_two_ranks_do_what_one_process_does(trained: dict[str, tuple[Seen, Seen, Seen]], name: str) -> None:
    first, second, alone = trained[name]
    assert_close(first.losses[0] + second.losses[0], alone.losses[0], 1e-5)
    for key, expected in alone.gradients.items():
        assert torch.equal(first.gradients[key], second.gradients[key])
        assert_close(first.gradients[key], expected, 1e-5)
    for table, before in alone.before.items():
        assert torch.equal(first.before[table], before) and torch.equal(first.after[table], second.after[table])
        moved = (alone.after[table] != before).any(1).nonzero().flatten().tolist()
        assert moved and set(moved) <= alone.named[table] == first.named[table] | second.named[table]
        # Adam divides by a root of small numbers, where a rounding weighs more.
        relative = 1e-3 if name.endswith("adam") else 1e-5
        assert_close(first.after[table] - before, alone.after[table] - before, relative)


@pytest.mark.parametrize("name", [of for of in SAMPLE if of.values[0] in POOLED])
def test_bags_that_their_owners_pool_train_like_those_that_the_tower_pools(
    trained: dict[str, tuple[Seen, Seen, Seen]], name: str
) -> None:
    by_tower = trained[name.split()[-1]][2]
    for pooled in trained[name]:
        if pooled is trained[name][2]:
            assert_close(pooled.losses[0], by_tower.losses[0], 1e-5)
        table = "brand" if "weighted" in name else "tags"
        assert pooled.plan[table].pooled and not by_tower.plan[table].pooled
        for key, expected in by_tower.gradients.items():
            assert_close(pooled.gradients[key], expected, 1e-5)
        for table, before in by_tower.before.items():
            relative = 1e-3 if name.endswith("adam") else 1e-5
            assert_close(pooled.after[table] - before, by_tower.after[table] - before, relative)


@dataclass
class Clipped:
    norm: Tensor
    """Before clipping."""
    gradients: dict[str, Tensor]
    """Of whole tables, clipped."""
    tower: dict[str, Tensor]
    """Weights after a step of SGD at a rate of 0.1."""


def clipped_by_torch(config: Config) -> Clipped:
    """A step of the same model whose tables are dense parameters of one process."""
    with a_model(config) as (model, _):
        batch = training_batches(config, load_dataset(config.data.path), model.ranks).at(0)
        tables = {name: gather_table(model, name).requires_grad_() for name in model.shards()}
        tower = model.tower
        rows = {
            name: F.embedding_bag(
                ids.values,
                tables[name],
                ids.offsets[:-1],
                mode="mean" if ids.shares is None else "sum",
                per_sample_weights=ids.shares,
            )
            if isinstance(ids, Bags)
            else tables[name][ids]
            for name, ids in batch.ids.items()
        }
        SampledLosses(tower)(rows, batch)["loss"].backward()
        norm = clip_grad_norm_([*tables.values(), *tower.parameters()], config.train.clip)
        stepped = {name: (weight - 0.1 * weight.grad).detach() for name, weight in tower.named_parameters()}
        return Clipped(norm, {name: table.grad for name, table in tables.items()}, stepped)


def first_change(optimizer: str, gradient_RD: Tensor) -> Tensor:
    """Of rows in the first step, at the rate and eps of CLIP."""
    square_RD = gradient_RD.square()
    if optimizer == "rowwise_adagrad":
        return -0.1 * gradient_RD / (square_RD.mean(1, keepdim=True).sqrt() + 0.001)
    return -0.1 * gradient_RD / (1 if optimizer == "sgd" else square_RD.sqrt() + 0.001)


@pytest.mark.parametrize("name", [of for of in SAMPLE if of.values[0] in CLIPPED])
def test_clipping_is_that_of_a_model_with_dense_tables(
    featured: Path, trained: dict[str, tuple[Seen, Seen, Seen]], name: str
) -> None:
    """On one rank and on two, where a row has gradients of both."""
    config = small_config(featured, EXACT | SETTINGS[name])
    expected = clipped_by_torch(config)
    assert bool(expected.norm > config.train.clip) == (name != "clip nothing")
    for seen in trained[name]:
        torch.testing.assert_close(seen.norm, expected.norm, rtol=1e-5, atol=0)
        for table, gradient_RD in expected.gradients.items():
            change_RD = first_change(config.tables.optimizer, gradient_RD)
            assert_close(seen.after[table] - seen.before[table], change_RD, 1e-4)
        for key, weight in expected.tower.items():
            torch.testing.assert_close(seen.tower[key], weight, rtol=1e-5, atol=1e-7)


def test_lookups_name_each_row_once_and_every_value(featured: Path) -> None:
    dataset, random = load_dataset(featured), np.random.default_rng(1)
    rows = {
        "item": np.sort(random.choice(dataset.num_items, 9, replace=False)),
        "user": random.integers(0, dataset.num_users, 4),
        "event": random.integers(0, len(dataset.items_flat), 11),
    }
    schema, item_V = dataset.schema, rows["item"]
    found = look_up(columns_of(dataset, schema), schema, item_V, item_V, rows["user"], rows["event"])
    assert found.features.item_row_V is None and torch.equal(found.ids[ITEM], torch.from_numpy(rows["item"]))
    for id_V in found.ids.values():
        assert torch.equal(id_V, id_V.unique())
    for feature in dataset.schema.features:
        if feature.name == ITEM:
            continue
        of = found.features.values[feature.name]
        values = found.ids[feature.table][of.values] if feature.sparse else of.values
        column = dataset.features_of(feature.owner)[feature.name]
        assert of.parallel.keys() == column.parallel.keys() == set(feature.form.parallel)
        for found_values, kept in [
            (values, column.values),
            *((of.parallel[n], column.parallel[n]) for n in of.parallel),
        ]:
            pieces = found_values if of.offsets is None else found_values.tensor_split(of.offsets[1:-1])
            expected = kept if column.offsets is None else np.split(kept, column.offsets[1:-1])
            assert len(pieces) == len(rows[feature.owner])
            for row, piece in zip(rows[feature.owner], pieces, strict=True):
                np.testing.assert_array_equal(piece.numpy(), expected[row])


def test_ids_are_dropped_at_their_rate_and_anew_each_step(featured: Path) -> None:
    """Alike on all ranks: "id dropout" above."""
    dataset = load_dataset(featured)
    batches = batches_of(dataset, dataset.schema.only([]), batch_size=16, max_length=12, item_id_dropout=0.4)
    dropped, named = list[frozenset[int]](), 0
    for batch in map(batches.at, range(20)):
        row_V = batch.ids[ITEM][batch.features.item_row_V]
        replaced = row_V != batch.id_V
        assert (row_V[replaced] == dataset.num_items).all()
        dropped.append(frozenset(batch.id_V[replaced].tolist()))
        named += len(batch.id_V)
    # 3 standard deviations.
    assert abs(sum(map(len, dropped)) / named - 0.4) < 3 * (0.24 / named) ** 0.5 and len(set(dropped)) == 20
