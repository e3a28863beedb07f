"""Many tables on two ranks and on one: the same losses, rows and updates, wherever the rows lie."""

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from small_data import a_model, gather_table, small_config
from torch import Tensor

from logitmix.comm.fp8 import SCALE_BYTES
from logitmix.modules.embeddings import own_name
from logitmix.modules.schema import ITEM, Feature, Schema, Table
from logitmix.trainer.parallel.plan import TablePlan

RANKS = 2
SHARDINGS = ("row_wise", "table_wise", "column_wise", "auto")
FP32 = {"comm.forward": "fp32", "comm.backward": "fp32"}
SAMPLE = [*(f"random {number}" for number in range(6)), "fp8 0", "fp8 1"]
"""`make soak` runs a hundred."""
SGD = {"tables.optimizer": "sgd", "tables.lr": 0.5}


@dataclass(frozen=True)
class Case:
    """Tables, settings, and what each rank asks for at each step: ids[step][rank][table]."""

    tables: Sequence[Table]
    settings: dict[str, Any]
    ids: list[list[dict[str, list[int]]]]
    ahead: bool = False
    """Rows of the next step are sent as soon as they are updated."""
    unused: tuple[str, ...] = ()
    """Tables whose rows are asked for, and are no part of the loss."""


@dataclass(frozen=True)
class Seen:
    losses: list[float]
    """Of the ranks together, by step, where one process ran; otherwise of this rank."""
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    plan: dict[str, TablePlan]
    wire: dict[str, Tensor] = field(default_factory=dict)
    """Bytes forward and backward, by table."""


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
        names = map(own_name, model.wire.tables)
        counts = dict(zip(names, model.wire.pop_counts()[..., 0], strict=True))
        return Seen(losses, before, after, dict(model.plan), counts)


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
            f"tables.{table.name}.dim": draw(st.sampled_from([4, 8, 16])),
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
    return Case(tables, settings, ids, ahead=draw(st.booleans()))


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


TABLES = [Table("item", 41), Table("brand", 9), Table("genres", 17), Table("zip", 6), Table("never", 5)]
DIMS = {"tables.zip.dim": 16, "tables.never.dim": 16}


def mixed(settings: dict[str, Any]) -> Case:
    """Four tables of two widths that ranks ask for at random, and one that none ever does."""
    choose, ids = random.Random(0), list[list[dict[str, list[int]]]]()
    for _ in range(3):
        ids.append([])
        for _ in range(RANKS):
            drawn = {of.name: choose.choices(range(of.rows), k=choose.choice([0, 1, 5, 30])) for of in TABLES[:4]}
            ids[-1].append(drawn | {"never": []})
    return Case(TABLES, DIMS | {"tables.init_std": 0.5} | settings, ids, False)


@functools.cache
def random_cases(fp32: int, fp8: int) -> dict[str, Case]:
    cases = {f"random {number}": case for number, case in enumerate(examples("fp32", fp32))}
    emulated = (with_settings(case, {"comm.emulate": True}) for case in examples("fp8", fp8))
    return cases | {f"fp8 {number}": case for number, case in enumerate(emulated)}


@functools.cache
def cases() -> dict[str, Case]:
    cases = dict(random_cases(6, 2))
    for sharding in SHARDINGS:
        cases[sharding] = mixed(SGD | FP32 | {"tables.sharding": sharding})
    cases["nothing"] = Case(TABLES, SGD | FP32, [[{table.name: [] for table in TABLES}] * RANKS] * 2)
    cases["unused"] = dataclasses.replace(mixed(SGD | FP32), unused=("brand", "zip"))
    cases["bytes"] = mixed(SGD | {"tables.sharding": "row_wise"})
    return cases


def with_settings(case: Case, settings: dict[str, Any]) -> Case:
    return dataclasses.replace(case, settings=case.settings | settings)


def run_all(of_names: dict[str, Case]) -> dict[str, tuple[Seen, Seen, Seen]]:
    """By name: both ranks of two, and one process alone."""
    pairs = zip(*two_ranks.run(run_cases, list(of_names.values())), strict=True)
    return {name: (*pair, run_case(case)) for (name, case), pair in zip(of_names.items(), pairs, strict=True)}


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[Seen, Seen, Seen]]:
    return run_all(cases())


def assert_alike(first: Seen, second: Seen, alone: Seen) -> None:
    both = torch.tensor([first.losses, second.losses]).sum(0)
    torch.testing.assert_close(both, torch.tensor(alone.losses), rtol=1e-5, atol=1e-5)
    for name in alone.after:
        assert torch.equal(first.before[name], alone.before[name])
        assert torch.equal(first.after[name], second.after[name])
        change, expected = first.after[name] - first.before[name], alone.after[name] - alone.before[name]
        assert (change - expected).norm() <= 1e-5 * (expected.norm() + 1e-3), name


@pytest.mark.parametrize("name", [*SAMPLE, *SHARDINGS])
def test_two_ranks_do_what_one_process_does(seen: dict, name: str) -> None:
    assert_alike(*seen[name])


@pytest.mark.slow
def test_they_do_in_all_random_cases() -> None:
    for seen in run_all(random_cases(80, 20)).values():
        assert_alike(*seen)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_rows_move_by_their_gradient(seen: dict, sharding: str) -> None:
    """One step of SGD on plain tensors, beside the first of the exchange's steps taken alone."""
    case = mixed(SGD | FP32 | {"tables.sharding": sharding})
    tables = {name: table.clone().requires_grad_() for name, table in seen[sharding][2].before.items()}
    expected = []
    for step in range(3):
        all_ids = {name: torch.arange(len(table)) for name, table in tables.items()}
        loss = sum(loss_of(tables, all_ids, of_rank) for of_rank in case.ids[step])
        expected.append(loss.item())
        gradients = torch.autograd.grad(loss, list(tables.values()), allow_unused=True)
        for table, gradient in zip(tables.values(), gradients, strict=True):
            table.data -= 0.5 * gradient
    torch.testing.assert_close(torch.tensor(seen[sharding][2].losses), torch.tensor(expected))
    for name, table in tables.items():
        torch.testing.assert_close(seen[sharding][0].after[name], table.detach())


def test_tables_that_nobody_asks_for_or_uses_stay(seen: dict) -> None:
    expected = {"nothing": [table.name for table in TABLES], "unused": ["brand", "zip", "never"]}
    for name in ("nothing", "unused", *SHARDINGS):
        for each in seen[name]:
            still = [table for table in each.before if torch.equal(each.before[table], each.after[table])]
            assert still == expected.get(name, ["never"]), name


def test_the_wire_counts_each_table_by_itself(seen: dict) -> None:
    """Row-wise, half of a table's rows are the other rank's: D bytes and a scale for each that a rank asks of it."""
    first, second, _ = seen["bytes"]
    for table in TABLES:
        half, dim = -(-table.rows // RANKS), 16 if table.name in ("zip", "never") else 8
        foreign = [
            len({i for i in of_rank[table.name] if i // half != rank})
            for step in mixed({}).ids
            for rank, of_rank in enumerate(step)
        ]
        sent = (first.wire[table.name] + second.wire[table.name]).tolist()
        assert sent == [sum(foreign) * (dim + SCALE_BYTES)] * 2, table.name
