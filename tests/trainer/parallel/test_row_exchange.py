"""Many tables on two ranks and on one: the same losses, rows and updates, wherever the rows lie."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from small_data import a_model, gather_table, small_config
from torch import Tensor

from logitmix.modules.schema import ITEM, Feature, Schema, Table

RANKS = 2
SHARDINGS = ("row_wise", "table_wise", "column_wise", "auto")
FP32 = {"comm.forward": "fp32", "comm.backward": "fp32"}


@dataclass(frozen=True)
class Case:
    """Tables, settings, and what each rank asks for at each step: ids[step][rank][table]."""

    tables: Sequence[Table]
    settings: dict[str, Any]
    ids: list[list[dict[str, list[int]]]]
    ahead: bool
    """Rows of the next step are sent as soon as they are updated."""
    unused: tuple[str, ...]
    """Tables whose rows are asked for, and are no part of the loss."""


@dataclass(frozen=True)
class Seen:
    losses: list[float]
    """Of the ranks together, by step, where one process ran; otherwise of this rank."""
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def run_case(case: Case) -> Seen:
    config = small_config(Path("none"), {"model.features": ["all"]} | case.settings)
    with a_model(config, schema_of(case.tables)) as (model, _):
        ranks = model.ranks
        before = {table.name: gather_table(model, table.name) for table in case.tables}
        upcoming = [
            model.row_exchange(named(case, step, ranks.rank, ranks.world_size)) for step in range(len(case.ids))
        ]
        losses = []
        upcoming[0].send_rows()
        for step, exchange in enumerate(upcoming):
            model.wire.begin_step(step)
            rows = exchange.wait()
            ids = named(case, step, ranks.rank, ranks.world_size)
            asked = case.ids[step] if ranks.world_size == 1 else [case.ids[step][ranks.rank]]
            used = {name: of_table for name, of_table in ids.items() if name not in case.unused}
            loss = sum(loss_of(rows, used, of_rank) for of_rank in asked)
            losses.append(loss.item())
            (loss * ranks.world_size).backward()
            model.table_optimizers.begin_step(1.0)
            exchange.send_gradients()
            following = upcoming[step + 1] if step + 1 < len(upcoming) else None
            exchange.apply_gradients(following if case.ahead else None)
            if following and not case.ahead:
                following.send_rows()
        after = {table.name: gather_table(model, table.name) for table in case.tables}
        return Seen(losses, before, after)


def run_cases(cases: list[Case]) -> list[Seen]:
    return [run_case(case) for case in cases]


def named(case: Case, step: int, rank: int, world_size: int) -> dict[str, Tensor]:
    """The sorted unique ids that a rank asks for; one process alone asks for those of all."""
    asked = case.ids[step] if world_size == 1 else [case.ids[step][rank]]
    return {
        table.name: torch.tensor(sorted({i for of_rank in asked for i in of_rank[table.name]}), dtype=torch.int64)
        for table in case.tables
    }


def loss_of(rows: dict[str, Tensor], ids: dict[str, Tensor], asked: dict[str, list[int]]) -> Tensor:
    """A function of the rows that a rank asked for, with another gradient for each row and column."""
    total = torch.zeros(())
    for name in ids:
        place = torch.searchsorted(ids[name], torch.tensor(asked[name], dtype=torch.int64))
        asked_ND = rows[name][place]
        slope_ND = torch.tensor(asked[name]).view(-1, 1) % 7 + torch.arange(1, asked_ND.shape[1] + 1)
        total = total + (slope_ND * (asked_ND + asked_ND**2)).sum() / 10
    return total


def schema_of(tables: list[Table]) -> Schema:
    """With a feature of users for each table but the items'."""
    users = [Feature(table.name, "user", "id", table.name) for table in tables if table.name != ITEM]
    return Schema((Feature(ITEM, "item", "id", ITEM), *users), tuple(tables))


def lists_of_ids(rows: int) -> st.SearchStrategy[list[int]]:
    sizes = st.sampled_from([0, 1, 5, 20])
    return sizes.flatmap(lambda size: st.lists(st.integers(0, rows - 1), min_size=size, max_size=size))


@st.composite
def any_case(draw: st.DrawFn, forward: str) -> Case:
    """Up to four tables, of which some are tiny, of unequal widths, optimizers and shardings; ranks that ask for
    nothing, or unequally much."""
    rows = st.sampled_from([1, 2, 3, 17, 40])
    tables = [Table(f"t{i}" if i else ITEM, draw(rows)) for i in range(draw(st.integers(1, 4)))]
    settings: dict[str, Any] = FP32 | {"comm.parts": draw(st.sampled_from([1, 3])), "comm.forward": forward}
    for table in tables:
        optimizer = draw(st.sampled_from(["sgd", "adam", "rowwise_adagrad"]))
        whole_rows = forward == "fp8" or optimizer == "rowwise_adagrad"
        shardings = [kind for kind in SHARDINGS if not (whole_rows and kind == "column_wise")]
        settings |= {
            f"tables.{table.name}.sharding": draw(st.sampled_from(shardings)),
            f"tables.{table.name}.dim": draw(st.sampled_from([4, 8])),
            f"tables.{table.name}.optimizer": optimizer,
            f"tables.{table.name}.lr": draw(st.sampled_from([0.1, 0.01])),
            f"tables.{table.name}.init_std": 0.5,
        }
        if optimizer != "sgd":
            # An eps that Adam's first steps feel: without, they are signs of gradients, and rounding flips those of 0.
            settings[f"tables.{table.name}.eps"] = 0.1
    asked = {table.name: lists_of_ids(table.rows) for table in tables}
    of_rank = st.sampled_from([dict.fromkeys(asked, st.just([])), asked, asked]).flatmap(st.fixed_dictionaries)
    ids = [[draw(of_rank) for _ in range(RANKS)] for _ in range(draw(st.integers(1, 3)))]
    unused = draw(st.sampled_from([(), (), tuple(asked)[1:2]]))
    return Case(tables, settings, ids, draw(st.booleans()), unused)


def examples(forward: str, count: int) -> list[Case]:
    """Equal ones each time. They are made here and run together, because ranks take seconds to start."""
    found = []

    @settings(max_examples=count, phases=[Phase.generate], deadline=None, database=None, derandomize=True)
    @given(any_case(forward))
    def make(case: Case) -> None:
        assume(case not in found)
        found.append(case)

    make()
    return found


@functools.cache
def cases(fp32: int, fp8: int) -> dict[str, Case]:
    found = {f"random {number}": case for number, case in enumerate(examples("fp32", fp32))}
    for number, case in enumerate(examples("fp8", fp8)):
        found[f"fp8 {number}"] = replace(case, settings=case.settings | {"comm.emulate": True})
    return found


def assert_alike(name: str, first: Seen, second: Seen, alone: Seen) -> None:
    both = torch.tensor([first.losses, second.losses]).sum(0)
    torch.testing.assert_close(both, torch.tensor(alone.losses), rtol=1e-5, atol=1e-5, msg=name)
    for table in alone.after:
        assert torch.equal(first.before[table], alone.before[table])
        assert torch.equal(first.after[table], second.after[table])
        change, expected = first.after[table] - first.before[table], alone.after[table] - alone.before[table]
        assert (change - expected).norm() <= 1e-5 * (expected.norm() + 1e-3), f"{name}: {table}"


@pytest.mark.parametrize(("fp32", "fp8"), [(10, 2), pytest.param(80, 20, marks=pytest.mark.slow)])
def test_two_ranks_do_what_one_process_does(fp32: int, fp8: int) -> None:
    of_names = cases(fp32, fp8)
    ranks = zip(*two_ranks.run(run_cases, list(of_names.values())), strict=True)
    for (name, case), (first, second) in zip(of_names.items(), ranks, strict=True):
        assert_alike(name, first, second, run_case(case))
