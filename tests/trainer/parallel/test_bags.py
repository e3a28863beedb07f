"""Bags that the owners of their rows pool, on two ranks and on one, against pooling rows that were exchanged."""

from pathlib import Path
from typing import Any

import torch
import two_ranks
from small_data import a_model, gather_table, small_config
from torch import Tensor
from torch.nn import functional as F

from logitmix.modules.batch import Bags
from logitmix.modules.schema import ITEM, Feature, Schema, Table

ROWS = 30
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
CASES: dict[str, dict[str, Any]] = {
    "row_wise": {"tables.optimizer": "rowwise_adagrad", "comm.parts": 2},
    "table_wise": {"tables.optimizer": "adam"},
    "column_wise": {"tables.optimizer": "sgd", "tables.eps": 1e-8},
}
"""Other optimizers of each sharding: test_many_tables.py."""


def run_case(name: str, pooled: bool) -> tuple[list[float], Tensor]:
    """The losses of all steps, and the table of tags after them."""
    # An eps that Adam's first steps feel: without, they are signs of gradients, and rounding flips those of 0.
    settings = EXACT | {"tables.sharding": name, "tables.lr": 0.1, "tables.eps": 0.1, "tables.tags.pooled": pooled}
    config = small_config(Path("none"), settings | CASES[name])
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
        return losses, gather_table(model, "tags")


def bags_of(bags: list[list[int]]) -> Bags:
    ends = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    return Bags(torch.tensor([i for bag in bags for i in bag], dtype=torch.int64), ends)


def asked(bags: Bags, pooled: bool) -> dict[str, Tensor | Bags]:
    return {ITEM: torch.empty(0, dtype=torch.int64), "tags": bags if pooled else bags.values.unique()}


def run_cases() -> list[tuple[list[float], Tensor]]:
    return [run_case(name, pooled=True) for name in CASES]


def test_pooled_by_owners_or_by_the_tower() -> None:
    for name, first, second in zip(CASES, *two_ranks.run(run_cases), strict=True):
        expected, alone = (run_case(name, pooled) for pooled in (False, True))
        both = [sum(of_step) for of_step in zip(first[0], second[0], strict=True)]
        for losses in (alone[0], both):
            torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-6)
        for _, table in (first, second, alone):
            torch.testing.assert_close(table, expected[1], rtol=1e-5, atol=1e-6)
