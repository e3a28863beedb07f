from typing import Any

import numpy as np
import pytest
from small_data import in_memory

from logitmix.trainer.data import columns, writer
from logitmix.trainer.data.batches import ranking_users
from logitmix.trainer.data.repeats import repeated_targets
from logitmix.trainer.data.writer import Counted


def sequences_of(*sequences: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([[0], np.cumsum([len(items) for items in sequences])]), np.concatenate(sequences).astype(int)


def test_repeated_targets_are_shares_of_the_users_ranked() -> None:
    made = sequences_of([1, 2, 1, 2], [3, 4, 5, 3], [5, 5, 5], [6, 7], [8, 9, 10], [1, 2, 3, 2, 2])
    assert repeated_targets(*made) == {"validation": 3 / 5, "test": 4 / 5}


@pytest.mark.parametrize("sequences", [([1, 1],), ([], [2, 2], []), ([],)])
def test_without_users_to_rank_nothing_is_repeated(sequences: tuple[list[int], ...]) -> None:
    assert repeated_targets(*sequences_of(*sequences)) == {"validation": 0, "test": 0}


def test_last_actions_are_those_of_each_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "USERS_AT_ONCE", 2)
    monkeypatch.setattr(writer, "LAST", (1, 2, 9))

    def last_actions(*sequences: list[int]) -> Any:
        offsets, items = sequences_of(*sequences)
        times = np.arange(len(items))
        return Counted.of(offsets, items, times, times, 10).entries()["last_actions"]

    assert last_actions([1, 2, 1, 2], [3], [5, 6, 7]) == {
        "1": {"actions": 3, "items": 3},
        "2": {"actions": 5, "items": 5},
        "9": {"actions": 8, "items": 6},
    }
    assert last_actions([], [2, 2], [])["1"] == {"actions": 1, "items": 1}


@pytest.mark.parametrize("seed", range(5))
def test_evaluation_counts_the_same_repeats(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "USERS_AT_ONCE", 7)
    random = np.random.default_rng(seed)
    made = sequences_of(*(random.integers(0, 9, length).tolist() for length in random.integers(0, 12, 60)))
    counted = {split: ranking_users(in_memory(*made, 9), split, 3).repeats().mean() for split in ("validation", "test")}
    assert repeated_targets(*made) == counted
    assert 0 < counted["validation"] < 1
