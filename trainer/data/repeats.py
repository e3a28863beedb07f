"""Targets that are in their user's history already: when they are common, and what that means for hit rates."""

from collections.abc import Mapping

import numpy as np

from logitmix.trainer.data.columns import user_blocks

COMMON_REPEATS, RARE_REPEATS = 0.1, 0.01
"""From the first share of repeated targets on, evaluation does not leave the history out of its ranking unless told to;
from the second one on, it says what is impossible where it does."""


def repeated_targets(offsets: np.ndarray, items: np.ndarray) -> dict[str, float]:
    """Share of the users with more than 2 actions whose held-out item (the last for test, the one before it for
    validation) is among their actions before it. User u's items are items[offsets[u] : offsets[u + 1]]."""
    return shares(*count_repeats(offsets, items))


def shares(users: int, repeated: Mapping[str, int]) -> dict[str, float]:
    return {split: count / max(1, users) for split, count in repeated.items()}


def count_repeats(offsets: np.ndarray, items: np.ndarray) -> tuple[int, dict[str, int]]:
    """How many users these are, of how many."""
    users, repeated = 0, {"validation": 0, "test": 0}
    for _, bounds in user_blocks(offsets):
        lengths = np.diff(bounds)
        users += int(np.count_nonzero(lengths > 2))
        actions = items[bounds[0] : bounds[-1]]
        of_user = np.repeat(np.arange(len(lengths)), lengths)
        for split, held_out in (("validation", 2), ("test", 1)):
            target = np.maximum(bounds[1:] - held_out, bounds[0])
            before = np.arange(bounds[0], bounds[-1]) < target[of_user]
            same = actions == actions[(target - bounds[0])[of_user]]
            repeated[split] += len(np.unique(of_user[before & same & (lengths > 2)[of_user]]))
    return users, repeated


def are_common(repeated: Mapping[str, float]) -> bool:
    """Whether the shares of repeated targets are such that a ranking without the history would mean little. That of
    test counts, too: what is decided on it is the rule, and for all methods alike."""
    return max(repeated.values()) >= COMMON_REPEATS


def said_of_repeats(repeated: Mapping[str, float]) -> str:
    """How large these shares are."""
    return " and ".join(f"{share:.0%} of the {split} targets" for split, share in repeated.items())


def highest_hit_rates(repeated: Mapping[str, float]) -> str:
    """The limits of hit rates without the history; empty where it hardly matters."""
    if max(repeated.values()) < RARE_REPEATS:
        return ""
    most = " and ".join(f"{1 - share:.2f} in {split}" for split, share in repeated.items())
    return f"no hit rate can be above {most}"
