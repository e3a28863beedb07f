from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import two_ranks
from small_data import ITEMS, small_config, write_dataset
from torch import Tensor
from torch.nn import functional as F

from logitmix.comm.process_group import process_group
from logitmix.trainer.config import Config
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.optimizer import dense_optimizer
from logitmix.trainer.parallelize import ParallelModel, parallelize

COMPUTE = {"train.precision": "fp32"}
FP32 = {"comm.forward": "fp32", "comm.backward": "fp32", **COMPUTE}
SGD = {"tables.optimizer": "sgd", "tables.lr": 0.1, "dense.optimizer": "sgd", "dense.lr": 0.1}


@dataclass
class Seen:
    """What one rank saw; losses and rows are its own part, the rest is global."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    before: Tensor
    after: Tensor
    touched: Tensor
    wire_bytes: int
    shards: list[tuple[int, ...]]


def train_steps(config: Config, steps: int) -> Seen:
    dataset = load_dataset(config.data.path)
    with process_group("cpu", 60) as ranks:
        batches = TrainingBatches(
            dataset,
            batch_size=config.train.batch_size,
            max_length=config.model.encoder.max_length,
            negatives=config.model.loss.negatives,
            share=config.model.loss.share,
            seed=config.train.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        model = parallelize(dataset.num_items, config, ranks)
        optimizer = dense_optimizer(model.tower, config.dense)
        before, losses, touched = model.gather_table(), [], torch.zeros(dataset.num_items, dtype=torch.bool)
        for step in range(steps):
            batch = batches.at(step)
            losses.append(_step(model, config, batch, optimizer))
            touched[batch.id_V] = True
        gradients = {name: parameter.grad.clone() for name, parameter in model.tower.named_parameters()}
        after = model.gather_table()
        shards = [tuple(shard.shard_sizes) for shard in model.shard().metadata().shards_metadata]
        return Seen(losses, gradients, before, after, touched, model.meter.take().forward_bytes, shards)


def _step(model: ParallelModel, config: Config, batch, optimizer) -> Tensor:
    optimizer.zero_grad()
    rows_VD = model.lookup(batch.id_V)
    leaf_VD = rows_VD.detach().requires_grad_()
    losses = model.loss(leaf_VD, batch)
    model.backward(losses["loss"])
    model.table_optimizer.prepare(config.tables.lr)
    model.return_gradients(rows_VD, leaf_VD.grad)
    model.table_optimizer.step()
    optimizer.step()
    return losses["loss"].detach()


def train_all(configs: list[Config], steps: int) -> list[Seen]:
    return [train_steps(config, steps) for config in configs]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "small")


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """In the norm of the whole tensor: single elements may be zero but for rounding."""
    assert (actual - expected).norm() <= relative * expected.norm()


@pytest.fixture(scope="module")
def sharded(data: Path) -> dict[str, tuple[Seen, Seen, Seen]]:
    """By name: both ranks of two, and one process alone, after one SGD step."""
    configs = {
        sharding: small_config(data, SGD | FP32 | {"tables.sharding": sharding})
        for sharding in ("row_wise", "table_wise", "column_wise")
    }
    configs["dot"] = small_config(data, SGD | FP32 | {"model.similarity.kind": "dot"})
    configs["batch"] = small_config(data, SGD | FP32 | {"model.loss.share": "batch"})
    configs["uneven"] = small_config(data, SGD | FP32 | {"train.batch_size": 1})
    configs["fp8"] = small_config(data, SGD | COMPUTE)
    pairs = zip(*two_ranks.run(train_all, list(configs.values()), 1), strict=True)
    return {name: (*pair, train_steps(config, 1)) for (name, config), pair in zip(configs.items(), pairs, strict=True)}


@pytest.mark.parametrize("name", ["row_wise", "table_wise", "column_wise", "dot", "batch", "uneven"])
def test_two_ranks_do_what_one_process_does(sharded: dict, name: str) -> None:
    first, second, alone = sharded[name]
    assert torch.equal(first.before, alone.before)
    assert_close(first.losses[0] + second.losses[0], alone.losses[0], 1e-5)
    for key, expected in alone.gradients.items():
        assert torch.equal(first.gradients[key], second.gradients[key])
        assert_close(first.gradients[key], expected, 1e-5)
    assert (alone.after != alone.before).any()
    assert_close(first.after - first.before, alone.after - alone.before, 1e-5)
    assert torch.equal(first.after, second.after)


def test_tables_are_cut_as_told(sharded: dict) -> None:
    cuts = {"row_wise": [(ITEMS // 2, 8)] * 2, "table_wise": [(ITEMS, 8)], "column_wise": [(ITEMS, 4)] * 2}
    assert {name: sharded[name][0].shards for name in cuts} == cuts


def test_the_fp8_wire_stays_within_its_codec(sharded: dict) -> None:
    first, second, alone = sharded["fp8"]
    assert first.wire_bytes > 0
    # Each value keeps 3 mantissa bits forward and 2 backward: off by at most 2^-4 and 2^-3 of itself, and by about a
    # third of that in the norm of many. The tower passes the forward error on; its condition here is below 4.
    assert_close(first.losses[0] + second.losses[0], alone.losses[0], 2**-4)
    assert_close(first.after - first.before, alone.after - alone.before, 2**-3 + 4 * 2**-4)
    # And it is the codec that made the difference.
    assert (first.after - first.before - (alone.after - alone.before)).norm() > 1e-4 * alone.after.norm()


def test_emulation_rounds_a_single_process_like_the_wire(data: Path) -> None:
    plain = train_steps(small_config(data, SGD | COMPUTE), 1)
    rounded = train_steps(small_config(data, SGD | COMPUTE | {"comm.emulate": True}), 1)
    error = (rounded.after - plain.after).norm() / (plain.after - plain.before).norm()
    assert 1e-3 < error < 2**-3 + 4 * 2**-4


def test_weights_come_from_the_seed_alone(data: Path) -> None:
    once, again, other = (train_steps(small_config(data, FP32 | {"train.seed": seed}), 1) for seed in (1, 1, 2))
    assert torch.equal(once.after, again.after) and once.losses[0] == again.losses[0]
    assert not torch.equal(once.before, other.before)
    assert abs(float(once.before.std()) / (0.02 * 0.8796) - 1) < 0.1  # std of a normal cut at 2 sigma


def test_adam_moves_the_rows_that_a_batch_touches_and_no_other(data: Path) -> None:
    seen = train_steps(small_config(data, FP32 | {"train.batch_size": 2}), 1)
    assert 0 < seen.touched.sum() < ITEMS
    moved = (seen.after != seen.before).any(1)
    assert torch.equal(moved, seen.touched)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_adam_is_sparse_adam(data: Path, sharding: str) -> None:
    """Ten steps of the sharded table's Adam on given gradients, beside torch.optim.SparseAdam on a plain table."""
    config = small_config(data, FP32 | {"tables.sharding": sharding, "tables.lr": 0.01})
    torch.manual_seed(0)
    with process_group("cpu", 60) as ranks:
        model = parallelize(ITEMS, config, ranks)
        reference = torch.nn.Parameter(model.gather_table().clone())
        tables = config.tables
        adam = torch.optim.SparseAdam([reference], tables.lr, (tables.beta1, tables.beta2), tables.eps)
        for _ in range(10):
            ids = torch.randperm(ITEMS)[: int(torch.randint(1, 20, ()))].sort().values
            gradient = torch.randn(len(ids), 8)
            model.table_optimizer.prepare(tables.lr)
            model.return_gradients(model.lookup(ids), gradient)
            model.table_optimizer.step()
            adam.zero_grad()
            F.embedding(ids, reference, sparse=True).backward(gradient)
            adam.step()
        torch.testing.assert_close(model.gather_table(), reference.data, rtol=1e-6, atol=1e-8)


def test_rowwise_adagrad_keeps_one_number_a_row(data: Path) -> None:
    config = small_config(data, FP32 | {"tables.optimizer": "rowwise_adagrad"})
    torch.manual_seed(0)
    with process_group("cpu", 60) as ranks:
        model = parallelize(ITEMS, config, ranks)
        expected, sums = model.gather_table().clone(), torch.zeros(ITEMS)
        for _ in range(5):
            ids = torch.randperm(ITEMS)[:10].sort().values
            gradient = torch.randn(len(ids), 8)
            model.table_optimizer.prepare(0.1)
            model.return_gradients(model.lookup(ids), gradient)
            model.table_optimizer.step()
            sums[ids] += gradient.square().mean(1)
            expected[ids] -= 0.1 * gradient / (sums[ids].sqrt()[:, None] + 1e-8)
        torch.testing.assert_close(model.gather_table(), expected, rtol=1e-5, atol=1e-7)
        (momentum,) = model.table_optimizer.state_dict()["embeddings.item.weight"].values()
        assert sum(shard.tensor.numel() for shard in momentum.local_shards()) == ITEMS
