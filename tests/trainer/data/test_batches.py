"""Batches against each user's sequence cut by hand."""

import itertools
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from small_data import batches_of, in_memory

from logitmix.modules.batch import Batch
from logitmix.modules.schema import Feature
from logitmix.trainer.data import columns
from logitmix.trainer.data.batches import TrainingBatches, ranking_users, split_by_time
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset

Share = Literal["position", "sequence", "group", "batch"]
SHARES: tuple[Share, ...] = get_args(Share)
LENGTHS = [4, 9, 0, 3, 25, 5, 1, 12, 2, 4, 7, 30, 6, 4, 8]
"""Actions of each user; those with fewer than four give no training position."""
TRAINABLE = [user for user, length in enumerate(LENGTHS) if length >= 4]


def of_lengths(lengths: list[int]) -> Dataset:
    """Every action has an item of its own, so that an item says whose it is and when."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return in_memory(offsets, np.arange(offsets[-1]), int(offsets[-1]))


def sequence(dataset: Dataset, user: int) -> list[int]:
    return dataset.items_flat[dataset.offsets[user] : dataset.offsets[user + 1]].tolist()


def batches(dataset: Dataset | None = None, **options: Any) -> TrainingBatches:
    dataset = dataset or of_lengths(LENGTHS)
    usual = {"batch_size": 4, "max_length": 6, "negatives": 5, "share": "sequence", "seed": 1, "group_positions": 10}
    return batches_of(dataset, dataset.schema, **usual | options)


def items_of(batch: Batch) -> dict[str, list]:
    """A batch in terms of items: per sequence the inputs, the targets and the numbers of its positions."""
    bounds = batch.packing.bounds
    whole = {
        "inputs": batch.id_V[batch.input_T],
        "targets": batch.id_V[batch.target_T],
        "rows": batch.packing.row_T,
        "positions": batch.packing.position_T,
    }
    parts = {
        name: [flat[start:end].tolist() for start, end in itertools.pairwise(bounds)] for name, flat in whole.items()
    }
    return parts | {"negatives": batch.id_V[batch.negatives_GN].tolist()}


def negatives_of_positions(batch: Batch) -> list[list[int]]:
    lengths = torch.tensor(batch.bounds).diff()
    return batch.id_V[batch.negatives_GN].repeat_interleave(lengths, 0).tolist()


def owner(dataset: Dataset, item: int) -> int:
    return int(np.searchsorted(dataset.offsets, item, side="right")) - 1


def test_a_sequence_is_the_last_actions_before_those_held_out() -> None:
    dataset, seen = of_lengths(LENGTHS), 0
    source = batches(dataset)
    for step in range(source.steps_per_epoch):
        parts = items_of(source.at(step))
        for inputs, targets, positions in zip(parts["inputs"], parts["targets"], parts["positions"], strict=True):
            training = sequence(dataset, owner(dataset, inputs[0]))[:-2]
            # L + 1 actions make L positions: 6 here, or all there are.
            window = training[-7:]
            assert inputs == window[:-1] and targets == window[1:]
            assert positions == list(range(len(inputs)))
            seen += 1
    assert seen == len(TRAINABLE)


@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=8), longest=st.integers(1, 7), stride=st.integers(1, 7)
)
def test_windows_cover_a_history_from_its_end(lengths: list[int], longest: int, stride: int) -> None:
    assume(stride <= longest and max(lengths) > 3)
    dataset = of_lengths(lengths)
    source = batches(dataset, max_length=longest, stride=stride, batch_size=3, in_batch=2)
    expected = []
    for user, length in enumerate(lengths):
        training = sequence(dataset, user)[:-2] if length > 3 else []
        while len(training) > 1:
            expected.append(training[-longest - 1 :])
            # Once a window has the first action, there is none before it.
            training = training[:-stride] if len(training) > longest + 1 else []
    assert source.steps_per_epoch == -(-len(expected) // 3)
    parts = [items_of(source.at(step)) for step in range(source.steps_per_epoch)]
    inputs, targets = ([of for part in parts for of in part[name]] for name in ("inputs", "targets"))
    assert sorted(inputs) == sorted(window[:-1] for window in expected)
    assert sorted(targets) == sorted(window[1:] for window in expected)
    owners = [owner(dataset, window[0]) for step in range(source.steps_per_epoch) for window in parts[step]["inputs"]]
    users = [user for step in range(source.steps_per_epoch) for user in source.users_of(step)]
    assert users == owners and not source.said_of_left_out
    count_X = np.bincount(np.concatenate([window[1:] for window in expected]), minlength=dataset.num_items)
    q_X = (5 / len(count_X) + 2 * count_X / count_X.sum()) / 7
    assert source.log_q_X is not None
    np.testing.assert_allclose(source.log_q_X, np.log(q_X), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, 11, 100])
def test_every_user_comes_once_an_epoch_in_an_order_of_its_own(batch_size: int) -> None:
    dataset = of_lengths(LENGTHS)
    source = batches(dataset, batch_size=batch_size)
    assert source.steps_per_epoch == -(-len(TRAINABLE) // batch_size)
    orders = []
    for epoch in range(3):
        steps = range(epoch * source.steps_per_epoch, (epoch + 1) * source.steps_per_epoch)
        users = [[owner(dataset, inputs[0]) for inputs in items_of(source.at(step))["inputs"]] for step in steps]
        assert [len(part) for part in users[:-1]] == [batch_size] * (len(users) - 1)
        orders.append([user for part in users for user in part])
        assert sorted(orders[-1]) == TRAINABLE
    assert orders[0] != orders[1] != orders[2] != orders[0]


def same(a: Batch, b: Batch) -> bool:
    return items_of(a) == items_of(b) and a.noise == b.noise and a.total_targets == b.total_targets


def test_a_batch_follows_from_seed_and_step_alone() -> None:
    source, again = batches(), batches()
    steps = [7, 0, 3, 7, 11]
    in_any_order = [source.at(step) for step in steps]
    for step, batch in zip(steps, in_any_order, strict=True):
        assert same(batch, again.at(step))
    np.random.seed(5)
    torch.manual_seed(5)
    assert same(batches().at(3), in_any_order[2])
    # Another seed changes the order, the negatives and the masks; another step, the negatives and the masks.
    other = batches(seed=2).at(0)
    first = source.at(0)
    for key in ("inputs", "negatives"):
        assert items_of(other)[key] != items_of(first)[key]
    assert other.noise != first.noise
    negatives = [tuple(map(tuple, items_of(source.at(step))["negatives"])) for step in range(20)]
    assert len(set(negatives)) == 20 and len({source.at(step).noise for step in range(20)}) == 20


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 40])
def test_the_ranks_parts_make_up_the_same_global_batch(share: Share, world_size: int) -> None:
    for step in (0, 1, 2, 5):
        whole = batches(share=share).at(step)
        parts = [batches(share=share, rank=rank, world_size=world_size).at(step) for rank in range(world_size)]
        expected = items_of(whole)
        assert whole.packing.row_T.tolist() == list(range(whole.total_targets))
        together = [items_of(part) for part in parts]
        for key in ("inputs", "targets", "rows", "positions"):
            assert [entry for part in together for entry in part[key]] == expected[key]
        assert [entry for part in parts for entry in negatives_of_positions(part)] == negatives_of_positions(whole)
        assert {part.noise for part in parts} == {whole.noise}
        assert {part.total_targets for part in parts} == {len(whole.input_T)} == {whole.total_targets}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_negatives_of_the_batch_are_targets_of_all_its_ranks(share: Share, world_size: int) -> None:
    drawn = set()
    for step in (0, 1, 2, 5):
        whole = batches(share=share, in_batch=50).at(step)
        ranks = range(world_size)
        parts = [batches(share=share, in_batch=50, rank=rank, world_size=world_size).at(step) for rank in ranks]
        expected = items_of(whole)
        assert [entry for part in parts for entry in negatives_of_positions(part)] == negatives_of_positions(whole)
        # The uniform ones are those that there are without.
        uniform = items_of(batches(share=share).at(step))
        assert [entry[:5] for entry in expected["negatives"]] == uniform["negatives"]
        assert expected["targets"] == uniform["targets"]
        targets = {target for sequence in expected["targets"] for target in sequence}
        for entry in expected["negatives"]:
            assert len(entry) == 55 and set(entry[5:]) <= targets
        drawn.add(str([entry[5:] for entry in expected["negatives"]]))
    assert len(drawn) == 4


def test_ranks_get_about_as_many_positions_each() -> None:
    random = np.random.default_rng(0)
    dataset = of_lengths(random.integers(4, 60, 200).tolist())
    for step in range(2):
        parts = [batches(dataset, batch_size=100, max_length=50, rank=rank, world_size=4).at(step) for rank in range(4)]
        positions = [len(part.input_T) for part in parts]
        # A cut falls at the nearest boundary between sequences: half of the longest, 50, on either side.
        assert max(abs(count - sum(positions) / 4) for count in positions) <= 50


@pytest.mark.parametrize(("share", "length", "users", "groups"), [("sequence", 4, 25, 25), ("position", 12, 10, 90)])
def test_every_group_has_its_own_negatives_drawn_evenly_from_all_items(
    share: Share, length: int, users: int, groups: int
) -> None:
    dataset = of_lengths([length] * users)
    source = batches(dataset, batch_size=users, max_length=9, negatives=40, share=share)
    steps = 1000 // groups
    drawn = np.array([items_of(source.at(step))["negatives"] for step in range(steps)])
    assert drawn.shape == (steps, groups, 40)
    assert len(np.unique(drawn.reshape(-1, 40), axis=0)) == steps * groups
    items = length * users
    count, times = np.bincount(drawn.ravel(), minlength=items), drawn.size / items
    # So many degrees of freedom, and the standard deviation of their chi-squared distribution.
    free, deviation = items - 1, np.sqrt(2 * (items - 1))
    assert free - 5 * deviation < float(((count - times) ** 2 / times).sum()) < free + 5 * deviation


def test_without_a_number_every_item_is_a_negative_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = of_lengths(LENGTHS)
    for rank in range(2):
        batch = batches(dataset, share="batch", negatives=0, rank=rank, world_size=2).at(1)
        assert items_of(batch)["negatives"] == [list(range(dataset.num_items))]
    monkeypatch.setattr("logitmix.trainer.data.batches.MOST_NEGATIVES", dataset.num_items - 1)
    with pytest.raises(
        ValueError, match=r"has 120 items, and model\.loss\.negatives is 0, .*; there may be 119: set it"
    ):
        batches(dataset, share="batch", negatives=0)


@pytest.mark.parametrize("share", SHARES)
def test_features_that_rank_items_do_not_learn_that_held_out_items_are_never_taken(share: Share) -> None:
    ids = of_lengths(LENGTHS)
    schema = replace(ids.schema, features=(*ids.schema.features, Feature("size", "item", "number")))
    sizes = Column(np.zeros(ids.num_items, np.float32))
    dataset = replace(ids, schema=schema, item_features={"size": sizes})
    seen = {item for user in range(len(LENGTHS)) for item in sequence(ids, user)[:-2]}

    def drawn(dataset: Dataset, dropout: float, **options: Any) -> set[int]:
        source = batches(dataset, share=share, item_id_dropout=dropout, **{"negatives": 50, **options})
        if source.log_q_X is not None:
            assert np.exp(source.log_q_X[sorted(seen)]).sum() == pytest.approx(1, rel=1e-5)
        negatives = [items_of(source.at(step))["negatives"] for step in range(20)]
        return {item for of_step in negatives for of_group in of_step for item in of_group}

    assert drawn(dataset, 0.1) == drawn(dataset, 0.1, in_batch=3) == seen
    assert drawn(ids, 0.1) == drawn(dataset, 0.0) == set(range(ids.num_items))
    if share == "batch":
        assert drawn(dataset, 0.1, negatives=0) == seen


def test_where_the_groups_are() -> None:
    dataset = of_lengths([12] * 10)
    options = {"batch_size": 10, "max_length": 9}
    assert batches(dataset, share="position", **options).at(0).bounds == list(range(91))
    assert batches(dataset, share="sequence").at(0).bounds == [0, 6, 12, 18, 24]
    shared = batches(dataset, share="batch").at(0)
    assert shared.bounds == [0, 24] and shared.negatives_GN.shape == (1, 5)


@pytest.mark.parametrize(
    ("lengths", "positions"),
    [([5, 5, 5, 5], 4), ([5, 5, 5, 5], 1), ([5, 5, 5, 5], 100), ([5, 5, 13, 5, 5], 3), ([9, 4, 7, 5, 6, 13], 5)],
)
def test_a_group_is_sequences_with_about_so_many_positions(lengths: list[int], positions: int) -> None:
    """A group ends with the sequence that reaches a multiple of them."""
    batch = batches(of_lengths(lengths), batch_size=9, share="group", group_positions=positions).at(0)
    bounds, done = [0], 0
    for length in batch.packing.lengths_B.tolist():
        before, done = done, done + length
        if done // positions > before // positions:
            bounds.append(done)
    bounds = sorted({*bounds, done})
    assert list(batch.bounds) == bounds and len(batch.negatives_GN) == len(bounds) - 1
    assert len({tuple(row) for row in items_of(batch)["negatives"]}) == len(bounds) - 1


def test_no_user_with_enough_actions_is_an_error_that_says_what_to_do() -> None:
    problem = r"^nowhere: no user has 2 actions, .*beside those held out .*; prepare it again from more data$"
    with pytest.raises(ValueError, match=problem):
        batches(of_lengths([3, 0, 2]))
    assert len(batches(of_lengths([3, 4])).at(0).input_T) == 1


@pytest.mark.parametrize(("split", "held_out"), [("validation", 2), ("test", 1)])
@pytest.mark.parametrize("max_length", [1, 6, 100])
def test_ranking_users_are_all_who_have_a_target_and_a_history(
    split: Literal["validation", "test"], held_out: int, max_length: int
) -> None:
    dataset = of_lengths(LENGTHS)
    users = ranking_users(dataset, split, max_length)
    expected = []
    for user, length in enumerate(LENGTHS):
        if length >= 3:
            items = sequence(dataset, user)
            expected.append((items[:-held_out][-max_length:], items[-held_out]))
    histories = np.split(users.history, np.cumsum(users.lengths)[:-1])
    assert [(h.tolist(), t) for h, t in zip(histories, users.target.tolist(), strict=True)] == expected
    assert len(users) == len(expected)
    assert {users.history.dtype, users.lengths.dtype, users.target.dtype} == {np.dtype(np.int64)}


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), seed=st.integers(0, 100), share=st.floats(0.05, 0.45)
)
def test_a_split_by_time_is_that_of_all_actions_in_order(lengths: list[int], seed: int, share: float) -> None:
    """Against all actions in one list; times are few, so that some are equal."""
    dataset = of_lengths(lengths)
    assume(len(dataset.items_flat))
    random = np.random.default_rng(seed)
    times = np.concatenate([np.sort(random.integers(0, 40, length)) for length in lengths])
    dataset = replace(dataset, timestamps_flat=times)
    in_order = sorted(times.tolist())
    since = {"validation": in_order[int(len(times) * (1 - 2 * share))], "test": in_order[int(len(times) * (1 - share))]}
    until = {"validation": since["test"], "test": 1000}
    expected: dict[str, list[tuple[list[int], int]]] = {"validation": [], "test": []}
    for user in range(len(lengths)):
        items = sequence(dataset, user)
        for split in expected:
            at = next((i for i, item in enumerate(items) if times[item] >= since[split]), 0)
            if at and times[items[at]] < until[split]:
                expected[split].append((items[:at], items[at]))
    if not expected["validation"] or not expected["test"]:
        problem = r"^nowhere: data\.split is time and data\.held_out .* give another data\.held"
        with pytest.raises(ValueError, match=problem):
            split_by_time(dataset, share)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "USERS_AT_ONCE", 3)
        held_out = split_by_time(dataset, share)
    for split in ("validation", "test"):
        users = ranking_users(dataset, split, 100, held_out)
        histories = np.split(users.history, np.cumsum(users.lengths)[:-1])
        assert [(h.tolist(), t) for h, t in zip(histories, users.target.tolist(), strict=True)] == expected[split]
    before = [
        [item for item in sequence(dataset, user) if times[item] < since["validation"]] for user in range(len(lengths))
    ]
    trained = [items for items in before if len(items) >= 2]
    options = {"batch_size": 100, "max_length": 100, "negatives": 1, "share": "sequence", "seed": 0}
    if not trained:
        with pytest.raises(ValueError, match="no user has 2 actions, "):
            batches_of(dataset, dataset.schema, held_out=held_out, **options)
        return
    source = batches_of(dataset, dataset.schema, held_out=held_out, in_batch=1, **options)
    parts = items_of(source.at(0))
    assert sorted(parts["inputs"]) == sorted(items[:-1] for items in trained)
    assert sorted(parts["targets"]) == sorted(items[1:] for items in trained)
    # Every action has an item of its own: targets alone are popular.
    popular = np.flatnonzero(source.log_q_X > source.log_q_X.min()).tolist()
    assert popular == sorted(item for items in trained for item in items[1:]) or len(set(source.log_q_X)) == 1


def test_nobody_to_rank_is_no_error() -> None:
    users = ranking_users(of_lengths([2, 0, 1]), "test", 5)
    assert len(users) == 0 and len(users.history) == 0 and list(users.batches(3)) == []
