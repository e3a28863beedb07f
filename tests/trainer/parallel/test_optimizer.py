from pathlib import Path

import pytest
import torch
from small_data import ITEMS, a_model, gather_table, move_rows, move_tables, small_config

from logitmix.modules.schema import ITEM, Feature, Schema, Table
from logitmix.trainer.parallel import optimizer

FP32 = {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_adam_moves_touched_rows(data: Path, sharding: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of the sharded table's Adam on given gradients, beside Kingma and Ba's formulas on the same rows."""
    monkeypatch.setattr(optimizer, "_ROWS", 4)
    settings = {"tables.sharding": sharding, "tables.lr": 0.01, "tables.eps": 0.1, "comm.parts": parts}
    config = small_config(data, FP32 | settings)
    torch.manual_seed(0)
    with a_model(config, Schema.of_ids(ITEMS - 1)) as (model, _):
        reference = gather_table(model).clone()
        first, second = torch.zeros_like(reference), torch.zeros_like(reference)
        tables = config.tables
        for step in range(1, 11):
            ids = torch.randperm(ITEMS)[: int(torch.randint(1, 20, ()))].sort().values
            gradient = torch.randn(len(ids), 8)
            model.table_optimizers.begin_step(1.0)
            move_rows(model, ids, gradient)
            first[ids] = tables.beta1 * first[ids] + (1 - tables.beta1) * gradient
            second[ids] = tables.beta2 * second[ids] + (1 - tables.beta2) * gradient.square()
            mean, square = first[ids] / (1 - tables.beta1**step), second[ids] / (1 - tables.beta2**step)
            reference[ids] -= tables.lr * mean / (square.sqrt() + tables.eps)
        torch.testing.assert_close(gather_table(model), reference, rtol=1e-6, atol=1e-8)


def test_rowwise_adagrad_keeps_one_number_a_row(data: Path) -> None:
    config = small_config(data, FP32 | {"tables.optimizer": "rowwise_adagrad", "tables.lr": 0.1})
    torch.manual_seed(0)
    with a_model(config, Schema.of_ids(ITEMS - 1)) as (model, _):
        expected, sums = gather_table(model).clone(), torch.zeros(ITEMS)
        for _ in range(5):
            ids = torch.randperm(ITEMS)[:10].sort().values
            gradient = torch.randn(len(ids), 8)
            model.table_optimizers.begin_step(1.0)
            move_rows(model, ids, gradient)
            sums[ids] += gradient.square().mean(1)
            expected[ids] -= 0.1 * gradient / (sums[ids].sqrt()[:, None] + 1e-8)
        torch.testing.assert_close(gather_table(model), expected, rtol=1e-5, atol=1e-7)
        (momentum,) = model.table_optimizers.state_dict()[ITEM].values()
        assert sum(shard.tensor.numel() for shard in momentum.local_shards()) == ITEMS


TABLES = {
    "a": {"optimizer": "adam", "lr": 0.1, "beta1": 0.5, "beta2": 0.75, "eps": 0.5},
    "b": {"optimizer": "adam", "lr": 0.2},
    "c": {"optimizer": "rowwise_adagrad", "lr": 0.3, "eps": 0.25},
    "d": {"optimizer": "rowwise_adagrad", "lr": 0.4},
    "e": {"optimizer": "sgd", "lr": 0.5},
    "f": {"optimizer": "sgd", "lr": 0.6},
}


ITEM_ID = Feature(ITEM, "item", "id", ITEM)


def moved(data: Path, names: list[str], prefixes: list[str]) -> dict[str, torch.Tensor]:
    """Tables of these names after three steps, with settings of the table in each of the sections."""
    settings = {
        f"{prefix}.{key}": value
        for name, prefix in zip(names, prefixes, strict=True)
        for key, value in TABLES[name].items()
    }
    random = torch.Generator().manual_seed(0)
    others = [Feature(name, "user", "id", name) for name in names]
    schema = Schema((ITEM_ID, *others), (Table(ITEM, 2), *(Table(name, 20) for name in names)))
    with a_model(small_config(data, FP32 | {"model.features": ["all"]} | settings), schema) as (model, _):
        no_items = {ITEM: torch.empty(0, dtype=torch.int64)}
        for step in range(3):
            ids = torch.randperm(20, generator=random)[:9].sort().values
            gradient = torch.randn(9, 8, generator=random)
            model.table_optimizers.begin_step((step + 1) / 3)
            ids_of, gradients = dict.fromkeys(names, ids), dict.fromkeys(names, gradient)
            move_tables(model, no_items | ids_of, {ITEM: torch.empty(0, 8)} | gradients)
        return {name: gather_table(model, name) for name in names}


def test_a_table_among_others_moves_as_it_does_alone(data: Path) -> None:
    """Each with settings of its own."""
    together = moved(data, list(TABLES), [f"tables.{name}" for name in TABLES])
    for name in TABLES:
        assert torch.equal(together[name], moved(data, [name], ["tables"])[name]), name
