from pathlib import Path

import pytest
import torch
import two_ranks
from small_data import ITEMS, a_model, small_config, write_dataset

from logitmix.comm.process_group import process_group
from logitmix.modules.noise import derive_key, truncated_normal
from logitmix.modules.schema import ITEM, Schema
from logitmix.trainer.config import Config
from logitmix.trainer.parallel.sharded_rows import ShardedRows, own_range

ASKED = ([3, 49, 3, 0, 27], [], list(range(ITEMS)), [24, 25, 26])


def fetch_from(configs: list[Config]) -> list[list[torch.Tensor]]:
    """Each rank asks for other rows at a time, and in the last round none of them for any."""
    found = []
    for config in configs:
        with a_model(config, Schema.of_ids(ITEMS - 1)) as (model, _):
            rows, rounds = model.evaluated()[1][ITEM], len(ASKED)
            own = [ASKED[(number + model.ranks.rank) % rounds] for number in range(rounds)] + [[]]
            found.append([rows.fetch(torch.tensor(ids, dtype=torch.int64)) for ids in own])
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_come_from_their_owners(tmp_path: Path, world_size: int) -> None:
    data = write_dataset(tmp_path / "data")
    shardings = ("row_wise", "table_wise", "column_wise")
    configs = [small_config(data, {"tables.sharding": sharding}) for sharding in shardings]
    key = derive_key("table", "item", configs[0].train.seed)
    table = truncated_normal(key, torch.arange(ITEMS), torch.arange(8), configs[0].tables.init_std)
    on_ranks = [fetch_from(configs)] if world_size == 1 else two_ranks.run(fetch_from, configs, world_size=world_size)
    for rank, of_shardings in enumerate(on_ranks):
        for found in of_shardings:
            assert len(found.pop()) == 0
            for number, rows in enumerate(found):
                assert torch.equal(rows, table[ASKED[(number + rank) % len(ASKED)]])


def fetch_from_ranges(rows_in_all: int) -> torch.Tensor:
    table = torch.arange(rows_in_all * 2.0).view(rows_in_all, 2)
    with process_group("cpu", 60) as ranks:
        start, stop = own_range(rows_in_all, ranks.rank, ranks.world_size)
        rows = ShardedRows.of_ranges(rows_in_all, table[start:stop], ranks)
        return rows.fetch(torch.arange(rows_in_all).flip(0)) - table.flip(0)


def test_fewer_rows_than_ranks() -> None:
    for rows_in_all in (2, 7):
        assert not any(wrong.any() for wrong in two_ranks.run(fetch_from_ranges, rows_in_all, world_size=3))


@pytest.mark.parametrize("count", [0, 1, 5, 12, 100])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_ranges_cover_everything_evenly(count: int, world_size: int) -> None:
    ranges = [own_range(count, rank, world_size) for rank in range(world_size)]
    assert [place for start, stop in ranges for place in range(start, stop)] == list(range(count))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1
