"""Bags that the owners of their rows pool, on two ranks and on one, against pooling rows that were exchanged."""

import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from small_data import a_model, gather_table, small_config, table_rules
from torch import Tensor
from torch.nn import functional as F

from logitmix.modules.batch import Bags
from logitmix.modules.embeddings import torchrec_name
from logitmix.modules.schema import ITEM, Feature, Schema, Table
from logitmix.trainer.config import model_schema
from logitmix.trainer.parallel.parallelize import embedding_tables
from logitmix.trainer.parallel.plan import Devices, plan_tables

ROWS, RANKS = 30, 2
SCHEMA = Schema(
    (Feature(ITEM, "item", "id", ITEM), Feature("tags", "user", "ids", "tags")), (Table(ITEM, 9), Table("tags", ROWS))
)
BAGS = [
    # By step and rank. Empty bags, a rank without bags, none at all, an id several times in a bag and in several bags.
    [[[3, 29, 3], [], [7]], [[7, 7, 1], [15, 0, 29, 2]]],
    [[[4, 15], [15]], []],
    [[[]], [[], []]],
    [[], []],
    [[[28, 1, 1, 14]], [[14, 15], [], [3]]],
]
EXACT = {"comm.forward": "fp32", "comm.backward": "fp32", "model.features": ["all"], "tables.init_std": 0.5}
# An eps that Adam's first steps feel: without, they are signs of gradients, and rounding flips those of 0.
CASES: dict[str, dict[str, Any]] = {
    f"{sharding} {optimizer} {parts}": EXACT
    | {
        "tables.sharding": sharding,
        "tables.optimizer": optimizer,
        "tables.lr": 0.1,
        "comm.parts": parts,
    }
    | ({} if optimizer == "sgd" else {"tables.eps": 0.1})
    for sharding, optimizer, parts in product(
        ("row_wise", "table_wise", "column_wise"), ("sgd", "adam", "rowwise_adagrad"), (1, 2)
    )
    if (sharding, optimizer) != ("column_wise", "rowwise_adagrad")
}
BY_HOST = {
    f"{sharding} {optimizer}": EXACT
    | {"tables.tags.sharding": sharding, "tables.optimizer": optimizer, "tables.lr": 0.1}
    | ({} if optimizer == "sgd" else {"tables.eps": 0.1})
    for sharding, optimizer in (
        ("table_row_wise", "adam"),
        ("table_row_wise", "rowwise_adagrad"),
        ("grid", "adam"),
        ("grid", "sgd"),
    )
}


@dataclass(frozen=True)
class Seen:
    losses: list[float]
    after: Tensor
    sent: float
    """Bytes of tags, both ways."""


def run_case(settings: dict[str, Any], pooled: bool) -> Seen:
    config = small_config(Path("none"), settings | {"tables.tags.pooled": pooled})
    with a_model(config, SCHEMA) as (model, _):
        ranks = model.ranks
        mine = [step if ranks.world_size == 1 else [*step, [], []][ranks.rank :][:1] for step in BAGS]
        bags = [bags_of([bag for of_rank in step for bag in of_rank]) for step in mine]
        exchanges = [model.row_exchange(asked(of_step, pooled)) for of_step in bags]
        losses = []
        exchanges[0].send_rows()
        for step, (exchange, of_step) in enumerate(zip(exchanges, bags, strict=True)):
            model.wire.begin_step(step)
            row_RD = exchange.wait()["tags"]
            if not pooled:
                place = torch.searchsorted(of_step.values.unique(), of_step.values)
                row_RD = F.embedding_bag(place, row_RD, of_step.offsets, mode="mean", include_last_offset=True)
            loss = (row_RD**2 * torch.arange(1, 9)).sum() + row_RD.sum()
            losses.append(loss.item())
            (loss * ranks.world_size).backward()
            model.table_optimizers.begin_step(1.0)
            exchange.send_gradients()
            exchange.apply_gradients(exchanges[step + 1] if step + 1 < len(exchanges) else None)
        sent = dict(zip(model.wire.tables, model.wire.pop_counts()[..., 0].sum(1).tolist(), strict=True))
        return Seen(losses, gather_table(model, "tags"), sent[torchrec_name("tags")])


def bags_of(bags: list[list[int]]) -> Bags:
    ends = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    return Bags(torch.tensor([i for bag in bags for i in bag], dtype=torch.int64), ends)


def asked(bags: Bags, pooled: bool) -> dict[str, Tensor | Bags]:
    return {ITEM: torch.empty(0, dtype=torch.int64), "tags": bags if pooled else bags.values.unique()}


def run_cases(cases: dict[str, dict[str, Any]] = CASES, per_host: int = 0) -> list[Seen]:
    if per_host:
        # Ranks of several hosts, which are one.
        os.environ.update(LOCAL_WORLD_SIZE=str(per_host), GLOO_SOCKET_IFNAME="lo")
    return [run_case(settings, pooled=True) for settings in cases.values()]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, tuple[Seen, Seen]]:
    return dict(zip(CASES, zip(*two_ranks.run(run_cases), strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_pooled_by_owners_or_by_the_tower(on_two_ranks: dict[str, tuple[Seen, Seen]], name: str) -> None:
    expected, alone = (run_case(CASES[name], pooled) for pooled in (False, True))
    first, second = on_two_ranks[name]
    torch.testing.assert_close(alone.losses, expected.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        [a + b for a, b in zip(first.losses, second.losses, strict=True)], expected.losses, rtol=1e-5, atol=1e-6
    )
    for seen in (first, second, alone):
        torch.testing.assert_close(seen.after, expected.after, rtol=1e-5, atol=1e-6)


def test_a_row_for_each_bag_is_sent(on_two_ranks: dict[str, tuple[Seen, Seen]]) -> None:
    """Row-wise, every bag has a part of its sum on each rank, and one of the two is on the other."""
    bags = sum(len(of_rank) for step in BAGS for of_rank in step)
    sent = sum(seen.sent for seen in on_two_ranks["row_wise sgd 1"])
    assert sent == 2 * bags * 8 * 4


def test_tables_may_be_divided_by_hosts() -> None:
    """Two hosts of two ranks, of which the last two have no bags."""
    for name, ranks in zip(BY_HOST, zip(*two_ranks.run(run_cases, BY_HOST, 2, world_size=4), strict=True), strict=True):
        expected = run_case(CASES[f"row_wise {name.split()[1]} 1"], pooled=False)
        together = [sum(of_step) for of_step in zip(*(seen.losses for seen in ranks), strict=True)]
        torch.testing.assert_close(together, expected.losses, rtol=1e-5, atol=1e-6)
        for seen in ranks:
            torch.testing.assert_close(seen.after, expected.after, rtol=1e-5, atol=1e-6)


def limits() -> list[float]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    config = small_config(Path("none"), BY_HOST["grid sgd"] | {"tables.tags.pooled": True, "comm.timeout_seconds": 77})
    with a_model(config, SCHEMA) as (model, _):
        (sharding,) = model.pooled[0].module._embedding_shardings
        groups = sharding._intra_pg, sharding._cross_pg
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_the_groups_of_hosts_have_the_time_limit_of_the_others() -> None:
    """torch makes them with its own."""
    assert two_ranks.run(limits) == [[77.0, 77.0]] * 2


def test_tables_that_hosts_cannot_share_are_refused() -> None:
    for settings, said in (
        ({"tables.tags.sharding": "grid"}, "the sharding of table tags is grid, which only pooled tables can have"),
        (
            {"tables.tags.sharding": "grid", "tables.tags.pooled": True, "tables.tags.dim": 12},
            "table tags has 12 columns, which 2 hosts",
        ),
        (
            {"tables.tags.sharding": "table_row_wise", "tables.tags.pooled": True},
            "table tags has 30 rows, too few for the 28",
        ),
    ):
        config = small_config(Path("none"), {"model.features": ["all"], **settings})
        devices = Devices(2 * (per_host := 28 if "rows" in said else 2), per_host, "cpu")
        with pytest.raises(ValueError, match=said):
            plan_tables(
                embedding_tables(model_schema(SCHEMA, config), table_rules(config), torch.device("cpu")),
                table_rules(config),
                devices,
            )


def test_items_are_not_pooled() -> None:
    config = small_config(Path("none"), {"tables.item.pooled": True})
    with pytest.raises(ValueError, match=r"^tables\.item\.pooled is true, but items are needed one by one"):
        embedding_tables(SCHEMA, table_rules(config), torch.device("cpu"))
