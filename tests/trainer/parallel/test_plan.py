from pathlib import Path

import pytest
from small_data import small_config, table_rules

from logitmix.modules.embeddings import EmbeddingTable, torchrec_name
from logitmix.trainer.config import TablesConfig
from logitmix.trainer.parallel.plan import (
    Devices,
    TablePlan,
    _constraints,
    bytes_by_rank,
    describe,
    plan_summary,
    plan_tables,
)
from logitmix.trainer.parallel.sharded_rows import ShardPlace

TABLES = [EmbeddingTable("item", 1000, 8), EmbeddingTable("brand", 400, 8), EmbeddingTable("city", 9, 8)]


EITHER = "row_wise table_wise"


@pytest.mark.parametrize(
    ("world_size", "settings", "expected"),
    [
        # A share of all bytes is half of 1,409 rows; of four, a quarter.
        (2, {}, ["row_wise", EITHER, EITHER]),
        (4, {}, ["row_wise", "row_wise", "table_wise"]),
        (1, {}, [EITHER, EITHER, EITHER]),
        # Nine rows for four ranks are three each, and none for the last; for five, two each but the last.
        (5, {"sharding": "row_wise"}, ["row_wise", "row_wise", "row_wise"]),
        (4, {"sharding": "row_wise"}, ["row_wise", "row_wise", "table_wise"]),
        (2, {"sharding": "column_wise"}, ["column_wise", "column_wise", "column_wise"]),
        (
            2,
            {"sharding": "table_wise", "by_name": {"city": {"sharding": "row_wise"}}},
            ["table_wise", "table_wise", "row_wise"],
        ),
        # Adam's moments make the brands larger than the items.
        (2, {"optimizer": "sgd", "by_name": {"brand": {"optimizer": "adam"}}}, [EITHER, "row_wise", EITHER]),
    ],
)
def test_the_planner_may_choose_what_balances(world_size: int, settings: dict, expected: list[str]) -> None:
    found = _constraints(TABLES, TablesConfig(**settings), Devices(world_size, world_size, "cpu"))
    assert [" ".join(found[torchrec_name(table.name)].sharding_types) for table in TABLES] == expected


def test_rows_that_a_gpu_has_no_room_for_are_not_planned_for_its_host(tmp_path: Path) -> None:
    tables = [EmbeddingTable("item", 10**7, 64)]
    config = small_config(tmp_path, {"tables.optimizer": "sgd"})
    plan_tables(tables, table_rules(config), Devices(2, 2, "cuda", 2 * 2**30))
    whole = small_config(tmp_path, {"tables.optimizer": "sgd", "tables.sharding": "table_wise"})
    with pytest.raises(ValueError, match="the planner cannot place the tables"):
        plan_tables(tables, table_rules(whole), Devices(2, 2, "cuda", int(1.6 * 2**30)))
    with pytest.raises(ValueError, match=r"take 2.4 GiB .* 2 GPUs have 1.7 GiB .* 3 ranks or more, .*-load-factor, or"):
        plan_tables(tables, table_rules(config), Devices(2, 2, "cuda", 2**30))


@pytest.mark.parametrize(
    ("optimizer", "device", "host"),
    [
        # Half of 1,000 rows are 16 sets of 32: each a row of 8, its id and the time of its last use; 4 bytes for each
        # of the 1,000.
        ("sgd", 512 * (8 * 4 + 16) + 4000, 1000 * 8 * 4),
        ("adam", 512 * (8 * 4 + 16) + 4000, 1000 * 8 * 12),
        ("rowwise_adagrad", 512 * (8 * 4 + 16) + 4000 + 4000, 1000 * 8 * 4),
    ],
)
def test_a_cached_table_is_in_the_host_s_memory(tmp_path: Path, optimizer: str, device: int, host: int) -> None:
    tables = [EmbeddingTable("item", 2000, 8)]
    settings = {"tables.optimizer": optimizer, "tables.cache_load_factor": 0.5, "tables.sharding": "row_wise"}
    config = small_config(tmp_path, settings)
    plans = plan_tables(tables, table_rules(config), Devices(2, 2, "cuda", 2**20))
    assert plans["item"].compute_kernel == "fused_uvm_caching"
    plan = describe(plans, tables, table_rules(config))
    assert bytes_by_rank(plan, 2) == [(device, host)] * 2
    assert " in host memory, 50.00% of its rows cached in " in plan_summary(plan)
    plan_tables(tables, table_rules(config), Devices(2, 2, "cuda", 2**20, 2 * host))
    with pytest.raises(ValueError, match=r"the 2 ranks of a host would hold .* of tables in its memory, and it has"):
        plan_tables(tables, table_rules(config), Devices(2, 2, "cuda", 2**20, 2 * host - 1))


def test_a_plan_is_a_line_for_each_table() -> None:
    plan = {
        "item": TablePlan(1000, 64, "row_wise", "adam", "fp32", False, 3 * 2**20, (_place(0), _place(1))),
        "zip": TablePlan(9, 16, "table_wise", "sgd", "fp32", True, 576, (_place(1),)),
    }
    assert plan_summary(plan).splitlines() == [
        "table item  1,000 x 64  row_wise on 2 ranks, adam, 3.0 MiB",
        "table zip   9 x 16  table_wise on rank 1, pooled, sgd, 0.6 KiB",
    ]


def _place(rank: int) -> ShardPlace:
    return ShardPlace(rank, 0, 9, 0, 16)
