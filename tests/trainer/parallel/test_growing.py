"""Tables whose rows pass from value to value: in training, on one rank and on two."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from small_data import a_pipeline, a_step, assert_close, gather_table, small_config
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from logitmix.modules.noise import derive_key, truncated_normal
from logitmix.modules.schema import Schema
from logitmix.trainer.commands.plan import plan_job
from logitmix.trainer.config import Config, model_schema
from logitmix.trainer.parallel.growing import GrowingTable
from logitmix.trainer.parallel.plan import Devices
from logitmix.trainer.parallel.sharded_rows import ShardedRows

EXACT = {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}
BASE = EXACT | {"model.features": ["all", "user"], "train.batch_size": 8, "train.epochs": 3}
VALUES = {"brand": 6, "tags": 10, "country": 3, "type": 2, "user": 60}
STEPS = 8


def of_all(setting: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tables.{name}.{setting}": value for name, value in values.items()}


ENOUGH = of_all("capacity", VALUES)
FEW = of_all("capacity", {"brand": 3, "tags": 5, "user": 7})
VARIANTS: dict[str, dict[str, Any]] = {
    "adam": {"comm.parts": 2},
    "adagrad": {"tables.optimizer": "rowwise_adagrad", "tables.sharding": "row_wise"},
    "columns": {"tables.sharding": "column_wise", "tables.tags.pooled": True},
    "averaged": {"train.ema": 0.9, "tables.optimizer": "rowwise_adagrad", "tables.precision": "fp16"},
    "fp8": {"comm.forward": "fp8", "comm.backward": "fp8"},
}


def losses_of(configs: list[Config]) -> list[list[float]]:
    """This rank's losses of each configuration's first steps."""
    found = []
    for config in configs:
        with a_pipeline(config, 3) as pipeline:
            losses = []
            for _ in range(3):
                a_step(pipeline)
                losses.append(float(pipeline.losses["loss"].detach()))
            found.append(losses)
    return found


def test_with_a_row_for_each_value_losses_are_those_of_static_tables(featured: Path) -> None:
    configs = [
        small_config(featured, BASE | variant | capacity) for variant in VARIANTS.values() for capacity in ({}, ENOUGH)
    ]
    for found in (losses_of(configs), *two_ranks.run(losses_of, configs)):
        for name, static, growing in zip(VARIANTS, found[::2], found[1::2], strict=True):
            assert growing == static, name


@dataclass
class Seen:
    losses: list[Tensor]
    """This rank's part."""
    rows: list[dict[str, list[int]]]
    """After each step, the row of every value, by table."""
    after: dict[str, Tensor]
    evicted: int


def find(table: GrowingTable) -> list[int]:
    rows: list[int] = table.find(torch.arange(VALUES[table.name] + 1)).tolist()
    return rows


def states(pipeline: Any, name: str) -> list[Tensor]:
    """A table's optimizer state, whole [rows, …]."""
    model, found = pipeline.model, []
    for state in model.table_optimizers.state_dict()[name].values():
        if isinstance(state, ShardedTensor):
            whole = torch.zeros(state.size())
            for shard in state.local_shards():
                place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                whole[tuple(slice(start, start + size) for start, size in place)] = shard.tensor.detach()
            found.append(whole)
    return found


def train_all_few(configs: list[Config]) -> list[Seen]:
    return [train_few(config) for config in configs]


def train_few(config: Config) -> Seen:
    """Checks on the way that rows that pass to another value start anew."""
    with a_pipeline(config, STEPS) as pipeline:
        model, losses, rows, evicted = pipeline.model, [], [], 0
        alone = model.ranks.world_size == 1
        for _ in range(STEPS):
            before = {name: find(table) for name, table in model.growing.items()}
            # Fetches the batch after this one, while the rows of this one are on their way.
            pipeline.receive_rows()
            for name, table in model.growing.items():
                now = find(table)
                new = [value for value, row in enumerate(now) if row and row != before[name][value]]
                evicted += sum(row > 0 and now[value] == 0 for value, row in enumerate(before[name]))
                whole, at = gather_table(model, name), torch.tensor([now[value] for value in new], dtype=torch.int64)
                key, std = derive_key("table", name, config.train.seed), config.tables.of(name).init_std
                fresh = truncated_normal(key, torch.tensor(new, dtype=torch.int64), torch.arange(whole.shape[1]), std)
                assert torch.equal(whole[at], fresh.to(whole.dtype) if whole.dtype == fresh.dtype else fresh)
                for state in states(pipeline, name) if alone else ():
                    assert not state[at].any()
                if model.average:
                    average = ShardedRows.of_shards(model.average.tables[name], model.ranks)
                    assert torch.equal(average.fetch(at), fresh)
            pipeline.loss()
            pipeline.backward()
            pipeline.check_gradients()
            pipeline.apply_gradients()
            losses.append(pipeline.losses["loss"].detach())
            rows.append({name: find(table) for name, table in model.growing.items()})
        return Seen(losses, rows, {name: gather_table(model, name) for name in model.shards()}, evicted)


def test_rows_that_pass_to_another_value_start_anew_on_any_ranks(featured: Path) -> None:
    settings = BASE | FEW | {"tables.user.evict": "frequency", "tables.tags.admit_after": 2, "train.ema": 0.9}
    configs = [small_config(featured, settings | VARIANTS[variant]) for variant in ("adam", "adagrad")]
    for alone, first, second in zip(train_all_few(configs), *two_ranks.run(train_all_few, configs), strict=True):
        assert alone.evicted > 0
        assert alone.rows == first.rows == second.rows
        for mine, one, other in zip(alone.losses, first.losses, second.losses, strict=True):
            assert_close(one + other, mine, 1e-4)
        for name, rows in alone.after.items():
            assert_close(first.after[name], rows, 1e-3)


def test_a_plan_counts_fewer_rows_and_what_knows_whose_they_are(featured: Path) -> None:
    settings = {"tables.user.capacity": 7, "tables.user.admit_after": 2, "tables.tags.capacity": 5}
    config = small_config(featured, BASE | settings | {"tables.tags.pooled": True})
    plan = plan_job(config, Devices(2, 2, "cpu"))
    # A bucket of 7 rows and one of 5, with candidates for the users.
    assert {name: (table.rows, table.map_bytes) for name, table in plan.tables.items() if table.map_bytes} == {
        "user": (8, 2 * 3 * 8 * 7),
        "tags": (6, 3 * 8 * 5),
    }
    assert "0.3 KiB on hosts for which value has which row" in plan.text()
    static = plan_job(small_config(featured, BASE | {"tables.tags.pooled": True}), Devices(2, 2, "cpu"))
    assert (
        sum(plan.table_bytes) < sum(static.table_bytes) and plan.traffic["fp32"].total <= static.traffic["fp32"].total
    )


def test_settings_that_nothing_would_read_are_refused(featured: Path) -> None:
    for given, value, said in (
        ("admit_after", 2, r"^tables\.item\.admit_after is 2; it must be left out, because no table has"),
        ("item.evict", "frequency", r"^tables\.item\.evict is frequency; it must be left out, because no table has"),
        ("item.capacity", 5, r"^the capacity of table item is 5, but all its items are ranked"),
        ("capacity", 5, r"^the capacity of table item is 5, but all its items are ranked"),
    ):
        with pytest.raises(ValueError, match=said):
            model_schema(Schema.of_ids(9), small_config(featured, {f"tables.{given}": value}))
