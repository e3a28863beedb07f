"""A run that goes on from another: states of the optimizers, new actions first, and nothing evaluated that was trained
on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import two_ranks
from small_data import a_model, batches_of, gather_table, losses_of, small_config
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from logitmix.modules.schema import ITEM, USER, Schema
from logitmix.trainer.commands.train import _words_of_continued
from logitmix.trainer.config import Config
from logitmix.trainer.data import writer
from logitmix.trainer.data.batches import leave_one_out, ranking_users, split_by_time
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.limited import limited
from logitmix.trainer.data.writer import DatasetContents
from logitmix.trainer.evaluation.seen import Seen
from logitmix.trainer.loop import train, training_batches
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.parallel.sharded_rows import ShardedRows
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.warm_start import warm_start

USERS = 30
SPLIT = {"data.split": "time", "data.held_out": 0.1, "train.epochs": 1, "train.precision": "fp32"}


def write_log(path: Path, until: int, users: int = USERS, shuffled: bool = False) -> Path:
    """The actions before a time of a log in which users act every few days, a third of them not to the end, on items
    that come one by one. Users and items may have other places."""
    random = np.random.default_rng(0)
    actions = []
    for user in range(users):
        first = int(random.integers(0, 60))
        for time in range(first, 120 if user % 3 else 70, int(random.integers(3, 9))):
            actions.append((user, int(random.integers(0, 3 + time // 3)), time * 60 + user))
    kept = [action for action in actions if action[2] < until]
    users_of = sorted({user for user, _, _ in kept}, reverse=shuffled)
    items_of = sorted({item for _, item, _ in kept}, reverse=shuffled)
    rows = [[action for action in kept if action[0] == user] for user in users_of]
    contents = DatasetContents(
        np.concatenate([[0], np.cumsum([len(of) for of in rows])]),
        np.array([items_of.index(item) for of in rows for _, item, _ in of]),
        np.array([time for of in rows for *_, time in of]),
        pa.array([f"item {item}" for item in items_of]),
        user_ids=pa.array([f"user {user}" for user in users_of]),
    )
    writer.write_dataset(path, contents, "log")
    return path


def going_on(run: Path, data: Path, settings: dict[str, Any] = {}) -> Config:  # noqa: B006 (not changed)
    return small_config(data, SPLIT | {"warm_start": str(run), "continues": True} | settings)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run; beside it, its dataset old, and new, which goes further."""
    folder = tmp_path_factory.mktemp("first")
    old = write_log(folder / "old", 90 * 60)
    write_log(folder / "new", 110 * 60, USERS + 4, shuffled=True)
    train(small_config(old, SPLIT), folder / "first")
    return folder / "first"


def actions_of(path: Path, ends: np.ndarray) -> set[tuple[str, str, int]]:
    """By raw ids, the actions before these places."""
    dataset = load_dataset(path)
    names, ids = dataset.raw_user_ids(np.arange(dataset.num_users)), dataset.raw_ids()
    return {
        (names[user], ids[int(dataset.items_flat[at])], int(dataset.timestamps_flat[at]))
        for user, end in enumerate(ends)
        for at in range(int(dataset.offsets[user]), int(end))
    }


@pytest.mark.parametrize("split", ["time", "leave-one-out"])
def test_what_was_trained_on_is_found_by_raw_ids(first: Path, split: str) -> None:
    """User by user and target by target, as a search through all actions finds it."""
    old, new = load_dataset(first.parent / "old"), load_dataset(first.parent / "new")
    trained = actions_of(old.path, split_by_time(old, 0.1).train_end)
    seen, names = Seen(first, new), new.raw_user_ids(np.arange(new.num_users))
    for share in (0.1, 0.3) if split == "time" else (0.0,):
        held = split_by_time(new, share) if share else leave_one_out(new)
        before = [sum(name == of for of, *_ in trained) for name in names]
        now = held.train_end - new.offsets[:-1]
        assert seen.users_with_new(held).tolist() == [a > b for a, b in zip(now, before, strict=True)]
        counts = []
        for of in held.targets:
            users = ranking_users(new, of, 1, held)
            targets = zip(users.user, users.target, users.timestamps[users.place], strict=True)
            expected = [(names[user], new.raw_ids()[int(item)], int(time)) in trained for user, item, time in targets]
            assert seen.targets(users).tolist() == expected
            counts.append(sum(expected))
        assert (sum(counts) > 0) == (share != 0.1)


def test_what_the_earlier_run_was_trained_on_is_not_evaluated(first: Path, tmp_path: Path) -> None:
    new = load_dataset(first.parent / "new")
    held = split_by_time(new, 0.3)
    users = ranking_users(new, "validation", 1, held)
    count = int(Seen(first, new).targets(users).sum())
    said = rf"first was trained on {count} of the {len(users)} validation targets \(such as item 'item \d+' of user "
    with pytest.raises(ValueError, match=said):
        train(going_on(first, new.path, {"data.held_out": 0.3}), tmp_path / "second")
    assert not (tmp_path / "second" / "metrics.jsonl").exists()


def test_new_actions_come_first(first: Path) -> None:
    new = load_dataset(first.parent / "new")
    held = split_by_time(new, 0.1)
    first_U = Seen(first, new).users_with_new(held)
    options: dict[str, Any] = {"batch_size": 4, "max_length": 6, "negatives": 2, "share": "sequence", "seed": 0}
    batches = batches_of(new, Schema.of_ids(new.num_items), held_out=held, first_U=first_U, **options)
    wanted = set(np.flatnonzero(first_U & held.trained(new)).tolist())
    assert 0 < batches.steps_of_first < batches.steps_per_epoch
    orders = []
    for epoch in range(2):
        users = np.concatenate(
            [batches.users_of(epoch * batches.steps_per_epoch + step) for step in range(batches.steps_per_epoch)]
        ).tolist()
        assert set(users[: len(wanted)]) == wanted and sorted(users) == np.flatnonzero(held.trained(new)).tolist()
        orders.append(users)
    assert orders[0] != orders[1]


def states_of(configs: list[Config], run: Path) -> list[dict[str, Any]]:
    """After a start from the run, on each rank: its pieces of the item table's states, and the tower's."""
    results = []
    for config in configs:
        with a_model(config) as (model, optimizer):
            warm_start(run, config, limited(config.data, load_dataset(config.data.path)), model, optimizer)
            pieces = {
                key: [(*shard.metadata.shard_offsets, shard.tensor.clone()) for shard in of.local_shards()]
                for key, of in model.table_optimizers.state_dict()[ITEM].items()
            }
            dense = {
                name: {key: of.clone() for key, of in optimizer.state[weight].items()}
                for name, weight in model.tower.named_parameters()
            }
            steps = model.table_optimizers.steps
            rows = gather_table(model)
            results.append({"pieces": pieces, "dense": dense, "steps": steps, "rows": rows})
    return results


def test_states_go_to_the_ids_they_stand_for(first: Path) -> None:
    """Whatever the sharding and the number of ranks; those of new items are zero."""
    old, new, saved = load_dataset(first.parent / "old"), load_dataset(first.parent / "new"), load_saved(first)
    place = {raw_id: index for index, raw_id in enumerate(old.raw_ids())}
    expected = {}
    for key in ("exp_avg", "exp_avg_sq"):
        state = torch.empty(old.num_items + 1, 8)
        saved.tensors.read(f"table_optimizers/{ITEM}/{key}", (0, 0), state)
        rows = [state[place[raw_id]] if raw_id in place else torch.zeros(8) for raw_id in new.raw_ids()]
        expected[key] = torch.stack([*rows, state[-1]])
    assert set(new.raw_ids()) > set(old.raw_ids()) and expected["exp_avg"].count_nonzero() > 0
    configs = [going_on(first, new.path, {"tables.sharding": each}) for each in ("row_wise", "column_wise")]
    for of_ranks in zip(*two_ranks.run(states_of, configs, first), strict=True):
        for key, whole in expected.items():
            found = torch.full_like(whole, torch.nan)
            for result in of_ranks:
                for row, column, piece in result["pieces"][key]:
                    found[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
            assert torch.equal(found, whole)
        for result in of_ranks:
            assert result["steps"] == saved.step
            for name, of in result["dense"].items():
                for key, state in of.items():
                    kept = torch.empty_like(state)
                    saved.tensors.read(f"dense_optimizer/{name}/{key}", (0,) * state.ndim, kept)
                    assert torch.equal(state, kept)


def test_kept_items_take_their_rows_and_states_with_them(first: Path, tmp_path: Path) -> None:
    """Where data.items limits both runs; those that are new, or come back, start anew."""
    data = first.parent
    train(small_config(data / "old", SPLIT | {"data.items": 12}), tmp_path / "day 1")
    config, saved = going_on(tmp_path / "day 1", data / "new", {"data.items": 16}), load_saved(tmp_path / "day 1")
    old, new = limited(saved.config.data, load_dataset(data / "old")), limited(config.data, load_dataset(data / "new"))
    place = {raw_id: index for index, raw_id in enumerate([*old.raw_ids(), ""])}
    names = [*new.raw_ids(), ""]
    back = {*names} & {*load_dataset(old.path).raw_ids()} - {*place}
    assert back and {*names} & {*place} > {""} and {*place} - {*names}
    (found,) = states_of([config], tmp_path / "day 1")
    for key in ("exp_avg", "exp_avg_sq"):
        state = torch.empty(13, 8)
        saved.tensors.read(f"table_optimizers/{ITEM}/{key}", (0, 0), state)
        ((*_, piece),) = found["pieces"][key]
        assert torch.equal(piece, torch.stack([state[place[of]] if of in place else torch.zeros(8) for of in names]))
    with a_model(config, new.schema) as (model, _):
        initial = gather_table(model)
    rows = saved.read_rows(ITEM, 0, 13)
    expected = [rows[place[name]] if name in place else row for name, row in zip(names, initial, strict=True)]
    assert torch.equal(found["rows"], torch.stack(expected))


GROWING = SPLIT | {
    "data.validation": False,
    "model.features": [USER],
    "train.batch_size": 4,
    "train.epochs": 3,
    "tables.user.capacity": 20,
    "tables.user.admit_after": 2,
    "tables.user.evict": "frequency",
}


@dataclass
class Rows:
    """Of the table of users, by raw id: what has its row, with its optimizer's states, and of this rank's part of the
    map, when and how often it was named."""

    of: dict[str, Tensor]
    rows: dict[str, tuple[int, int]]
    candidates: dict[str, tuple[int, int]]

    @classmethod
    def now(cls, model: ParallelModel, names: list[str]) -> "Rows":
        table, states = model.growing[USER], model.table_optimizers.state_dict()[USER].values()
        row_N = table.find(torch.arange(len(names)))
        sharded = [model.shards()[USER], *(of for of in states if isinstance(of, ShardedTensor))]
        whole = torch.cat([ShardedRows.of_shards(of, model.ranks).fetch(row_N) for of in sharded], 1)
        slots = [
            {
                names[value]: (last, count)
                for value, last, count in zip(of.id.flat, of.last.flat, of.count.flat, strict=True)
                if value > 0
            }
            for of in (table.map.rows, table.map.candidates)
            if of
        ]
        return cls({names[value]: whole[value] for value in row_N.nonzero().flatten().tolist()}, *slots)


def going_on_with_rows(config: Config, run: Path) -> tuple[Rows, Rows]:
    """After a start from the run, and after the batches of two epochs have been placed."""
    with a_model(config) as (model, optimizer):
        dataset = load_dataset(config.data.path)
        names = [str(name) for name in dataset.vocabulary(USER)]
        warm_start(run, config, dataset, model, optimizer)
        before = Rows.now(model, names)
        batches = training_batches(config, dataset, model.ranks)
        for step in range(2 * batches.steps_per_epoch):
            model.placed(batches.at(step), step + 1)
        return before, Rows.now(model, names)


@pytest.fixture(scope="module")
def two_days(first: Path) -> list[Path]:
    """A run, and one of two ranks that goes on from it."""
    folder = first.parent
    write_log(folder / "newer", 119 * 60, USERS + 8)
    train(small_config(folder / "old", GROWING), folder / "day 1")
    second = going_on(folder / "day 1", folder / "new", GROWING | {"tables.sharding": "row_wise"})
    two_ranks.run(train, second, folder / "day 2")
    return [folder / "day 1", folder / "day 2"]


@pytest.mark.parametrize(("day", "ranks"), [(0, 1), (1, 3)])
def test_rows_that_pass_from_value_to_value_go_on(two_days: list[Path], day: int, ranks: int) -> None:
    """With their values, also those that have got other numbers, and in both cases with the states of the optimizer;
    the next value that takes a row begins anew."""
    run, data = two_days[day], two_days[0].parent / ("new", "newer")[day]
    config = going_on(run, data, GROWING)
    found = two_ranks.run(going_on_with_rows, config, run, world_size=ranks)
    saved, names = load_saved(run), load_dataset(load_saved(run).config.data.path).vocabulary(USER)
    id_R = saved.id_of_row(USER)
    assert id_R is not None
    rows = [saved.read_rows(USER, 0, 21)]
    for key in ("exp_avg", "exp_avg_sq"):
        rows.append(torch.empty(21, 8))
        saved.tensors.read(f"table_optimizers/{USER}/{key}", (0, 0), rows[-1])
    whole = torch.cat(rows, 1)
    expected = {str(names[value]): whole[row] for row, value in enumerate(id_R.tolist()) if value}
    assert len(expected) > 9
    known = [
        {str(names[value]): (last, steps) for value, last, steps in zip(*of, strict=True)} for of in saved.named(USER)
    ]
    assert all(last < 0 for of in known for last, _ in of.values()) and known[1]
    for before, after in found:
        assert before.of.keys() == expected.keys()
        assert all(torch.equal(of, expected[name]) for name, of in before.of.items())
        fresh = [name for name, of in after.of.items() if not of[8:].any()]
        assert set(fresh) >= after.of.keys() - expected.keys() and fresh
        assert all(name in fresh or torch.equal(of, expected[name]) for name, of in after.of.items())
    for kind, of_kind in zip(("rows", "candidates"), known, strict=True):
        parts = [getattr(before, kind) for before, _ in found]
        assert sum(map(len, parts)) == len(of_kind)
        assert {name: of for part in parts for name, of in part.items()} == of_kind


def test_it_trains_and_resumes_as_without_an_interruption(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit: also the number of steps that the tables' optimizers have made, those of the earlier run among
    them."""
    config = going_on(first, first.parent / "new", {"train.epochs": 2, "data.items": 20})
    train(config, tmp_path / "whole")
    said = capsys.readouterr().err
    assert "4 of 34 users and " in said and f"targets, {first} was trained on none" in said
    assert "steps have all users with new actions: --train.epochs " in said and "with their optimizers' states" in said
    stopped = replace(config, train=replace(config.train, stop_after_epochs=1.0))
    train(stopped, tmp_path / "resumed")
    train(config, tmp_path / "resumed")
    whole, resumed = (load_saved(run, "last").tensors.pieces for run in (tmp_path / "whole", tmp_path / "resumed"))
    assert whole.keys() == resumed.keys()
    for name, pieces in whole.items():
        for one, other in zip(pieces, resumed[name], strict=True):
            assert torch.equal(one.values, other.values), name
    cold = small_config(first.parent / "new", SPLIT | {"warm_start": str(first), "train.epochs": 2})
    train(cold, tmp_path / "cold")
    assert losses_of(tmp_path / "whole") != losses_of(tmp_path / "cold")


def test_another_optimizer_is_refused(first: Path, tmp_path: Path) -> None:
    config = going_on(first, first.parent / "new", {"tables.optimizer": "sgd"})
    with pytest.raises(ValueError, match=r"has tables\.item\.optimizer adam, and this run sgd"):
        train(config, tmp_path / "second")


def test_the_word_continue() -> None:
    words = ["auto", "--continue", "runs/a", "--data.path", "data/b"]
    assert _words_of_continued(words) == ["auto", "--data.path", "data/b", "--warm-start", "runs/a", "--continues"]
    with pytest.raises(ValueError, match="--continue needs the run to go on from"):
        _words_of_continued(["auto", "--continue"])
    with pytest.raises(ValueError, match="--continue names the run to start from, as --warm-start does; give only one"):
        _words_of_continued([*words, "--warm-start", "runs/c"])
    with pytest.raises(ValueError, match="continues is set, but no run to go on from; give --continue RUN"):
        Config(continues=True)
