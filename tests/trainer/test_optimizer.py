from pathlib import Path

import pytest
import torch
from small_data import ITEMS, small_config, write_dataset
from torch.nn import functional as F

from logitmix.comm.process_group import process_group
from logitmix.trainer.parallelize import parallelize

FP32 = {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "small")


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
