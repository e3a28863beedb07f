"""Which actions are predicted: against lists cut by hand, in which an action that may be a target has an even item."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import batches_of, in_memory, write_dataset

from logitmix.modules.batch import Batch
from logitmix.trainer.config import DataConfig
from logitmix.trainer.data.batches import HeldOut, leave_one_out, ranking_users, split_by_time
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.targets import said_of_targets, target_places, target_weights
from logitmix.trainer.evaluation.baselines import target_counts

OPTIONS: dict[str, Any] = {"negatives": 3, "share": "sequence", "seed": 0, "in_batch": 2}
LISTS = st.lists(st.lists(st.integers(0, 40), max_size=9), min_size=1, max_size=7)


def of_lists(lists: list[list[int]]) -> tuple[Dataset, np.ndarray]:
    """A dataset with these items, whose times are few, and the places of its targets."""
    offsets, flat = np.cumsum([0, *map(len, lists)]), np.array([item for each in lists for item in each], np.int64)
    times = np.concatenate([np.arange(len(each)) // 2 for each in lists])
    return replace(in_memory(offsets, flat, 41), timestamps_flat=times), np.flatnonzero(flat % 2 == 0)


def ranked(dataset: Dataset, held_out: HeldOut, split: Any) -> list[tuple[list[int], int]]:
    users = ranking_users(dataset, split, 100, held_out)
    histories = np.split(users.history, np.cumsum(users.lengths)[:-1])
    return [(history.tolist(), target) for history, target in zip(histories, users.target.tolist(), strict=False)]


def trained(lists: list[list[int]], ends: list[int], longest: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Inputs, targets, and the positions that have one, of each user who has some before these ends."""
    found = []
    for items, stop in zip(lists, ends, strict=True):
        places = [at for at in range(1, stop) if items[at] % 2 == 0]
        if places:
            end = places[-1]
            start = max(0, end - longest)
            kept = [at for at in places if at > start]
            found.append((items[start:end], [items[at] for at in kept], [at - 1 - start for at in kept]))
    return found


def parts_of(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    found = []
    for start, end in zip(batch.packing.bounds[:-1], batch.packing.bounds[1:], strict=True):
        assert batch.position_Q is not None
        own_Q = (batch.position_Q >= start) & (batch.position_Q < end)
        inputs, targets = batch.id_V[batch.input_T[start:end]], batch.id_V[batch.target_T[own_Q]]
        found.append((inputs.tolist(), targets.tolist(), (batch.position_Q[own_Q] - start).tolist()))
    return found


@given(lists=LISTS, longest=st.integers(1, 8), validation=st.booleans())
def test_each_users_last_targets_are_held_out(lists: list[list[int]], longest: int, validation: bool) -> None:
    dataset, places = of_lists(lists)
    held_out = leave_one_out(dataset, validation, places)
    expected: dict[str, list[tuple[list[int], int]]] = {"test": [], "validation": []}
    ends = []
    for items in lists:
        own = [at for at, item in enumerate(items) if item % 2 == 0]
        last = own[-2:]
        if last and last[0] > 0:
            for split, at in zip(("test", "validation"), reversed(last), strict=False):
                expected[split].append((items[:at], items[at]))
        ends.append((last[0] if validation else last[-1]) if last else 0)
    for split in held_out.targets:
        assert ranked(dataset, held_out, split) == expected[split]
    check_training(dataset, held_out, trained(lists, ends, longest), longest)
    popular = np.bincount(
        [item for items, end in zip(lists, ends, strict=True) for item in items[:end] if item % 2 == 0], minlength=41
    )
    assert target_counts(dataset, held_out).tolist() == popular.tolist()


@given(lists=LISTS, longest=st.integers(1, 8), validation=st.booleans())
def test_a_split_by_time_ranks_the_first_target_of_a_part(
    lists: list[list[int]], longest: int, validation: bool
) -> None:
    dataset, places = of_lists(lists)
    times = np.sort(dataset.timestamps_flat)
    if not len(times):
        return
    before, test = (int(times[int(len(times) * (1 - share))]) for share in (0.6, 0.3))
    parts = [("validation", before, test)] * validation + [("test", test, 100)]
    expected: dict[str, list[tuple[list[int], int]]] = {split: [] for split, *_ in parts}
    for items in lists:
        for split, since, until in parts:
            own = [at for at, item in enumerate(items) if item % 2 == 0 and since <= at // 2 < until]
            if own and own[0] > 0:
                expected[split].append((items[: own[0]], items[own[0]]))
    if not all(expected.values()):
        with pytest.raises(ValueError, match="but no user has a target in the"):
            split_by_time(dataset, 0.3, validation, places)
        return
    held_out = split_by_time(dataset, 0.3, validation, places)
    assert {split: ranked(dataset, held_out, split) for split in held_out.targets} == expected
    ends = [sum(at // 2 < (before if validation else test) for at in range(len(items))) for items in lists]
    check_training(dataset, held_out, trained(lists, ends, longest), longest)


def check_training(dataset: Dataset, held_out: HeldOut, expected: list[Any], longest: int) -> None:
    options = OPTIONS | {"batch_size": 100, "max_length": longest, "held_out": held_out}
    if not expected:
        with pytest.raises(ValueError, match=r"2 actions, .* the second of them a target; prepare"):
            batches_of(dataset, dataset.schema, **options)
        return
    source = batches_of(dataset, dataset.schema, **options)
    whole = source.at(0)
    assert sorted(parts_of(whole)) == sorted(expected)
    targets = [target for _, own, _ in expected for target in own]
    assert whole.total_targets == len(targets)
    assert {*whole.id_V[whole.negatives_GN[:, 3:]].ravel().tolist()} <= {*targets}
    count_X = np.bincount(targets, minlength=41)
    q_X = (3 / 41 + 2 * count_X / len(targets)) / 5
    np.testing.assert_allclose(source.log_q_X, np.log(q_X), rtol=1e-6)
    ranks = [batches_of(dataset, dataset.schema, rank=rank, world_size=2, **options).at(0) for rank in range(2)]
    assert [part for rank in ranks for part in parts_of(rank)] == parts_of(whole)
    assert {rank.total_targets for rank in ranks} == {len(targets)}
    negatives = [rank.id_V[rank.negatives_GN] for rank in ranks]
    assert torch.equal(torch.cat(negatives), whole.id_V[whole.negatives_GN])


def test_conditions_are_on_features_of_actions(tmp_path: Path) -> None:
    dataset = load_dataset(write_dataset(tmp_path / "data", features=True))
    kind, rating = (dataset.event_features[name].values for name in ("action", "rating"))
    assert target_places(dataset, ()) is None
    both = target_places(dataset, ("action = type-1", "rating > 3"))
    assert both is not None and both.tolist() == np.flatnonzero((kind == 1) & (rating > np.float32(3))).tolist()
    assert (target_places(dataset, ("action != type-1",)) == np.flatnonzero(kind != 1)).all()
    config = DataConfig(targets=("action = type-1",))
    said = said_of_targets(dataset, np.flatnonzero(kind == 1), config, ["brand"])
    assert said.startswith(f"{(kind == 1).sum():,} of {len(kind):,} actions (action = type-1)")
    assert said.endswith("; the model does not see which, without --model.features action")


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        ("kind = type-1", "--data.targets 'kind = type-1': no column 'kind'; the columns are: action, query, rating"),
        ("action", "--data.targets 'action': it must be a column, one of"),
        ("action = type-9", "--data.targets 'action = type-9': no action of .* fulfills this"),
        ("query = tags-1", "--data.targets 'query = tags-1': query has several values for an action"),
        (
            "action = type-1, action = type-2",
            "--data.targets .*action = type-1, action = type-2.: no action is left",
        ),
    ],
)
def test_other_conditions_are_refused(conditions: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        target_places(load_dataset(write_dataset(tmp_path / "data", features=True)), conditions.split(", "))


def test_weights_are_those_of_a_column_by_their_mean_in_the_batch(tmp_path: Path) -> None:
    dataset = load_dataset(write_dataset(tmp_path / "data", features=True))
    positive = np.abs(dataset.event_features["rating"].values)
    dataset = replace(dataset, event_features={**dataset.event_features, "rating": Column(positive)})
    places = target_places(dataset, ("action = type-1",))
    weights = target_weights(dataset, "rating", places)
    assert weights is not None and np.array_equal(weights, positive) and target_weights(dataset, "", places) is None
    options = OPTIONS | {"batch_size": 100, "max_length": 50, "held_out": leave_one_out(dataset, places=places)}
    options["times"] = True
    batch = batches_of(dataset, dataset.schema, weights=weights, **options).at(0)
    assert batch.weight_Q is not None and batch.weight_Q.mean() == pytest.approx(1, rel=1e-5)
    none = batches_of(dataset, dataset.schema, weights=np.zeros_like(weights), **options).at(0)
    assert none.weight_Q is not None and not none.weight_Q.any()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("rate", 1.0, "--data.weight rate: no such column .did you mean rating.*: action, query, rating, place"),
        ("place", 1.0, "--data.weight place: place has several values for an action"),
        ("action", 1.0, "--data.weight action: the values of .* targets are no finite numbers of 0 or more"),
        ("rating", -1.0, r"--data.weight rating: the values of 1 targets are no finite .*, such as '-1\.0'; correct"),
        ("rating", 0.0, "--data.weight rating: the weights of all targets are 0"),
    ],
)
def test_other_weights_are_refused(name: str, value: float, problem: str, tmp_path: Path) -> None:
    dataset = load_dataset(write_dataset(tmp_path / "data", features=True))
    values = np.zeros(len(dataset.items_flat), np.float32)
    values[7] = value
    dataset = replace(dataset, event_features={**dataset.event_features, "rating": Column(values)})
    with pytest.raises(ValueError, match=problem):
        target_weights(dataset, name, None)
    if value < 0:
        # What is no target needs no weight.
        values[3] = 1
        assert target_weights(dataset, name, np.array([3])) is not None
