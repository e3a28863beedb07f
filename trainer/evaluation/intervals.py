"""Intervals of metrics, by resampling the users.

Axes: U users, M numbers of a user (of runs or methods, and metrics), R resamples.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
FEWEST = 6
"""Users in whom two models must differ: of fewer, all may be in favor of one by chance (2 / 2^5 is above 0.05)."""

Floats = NDArray[np.float64]


def over_seeds(mean_RM: Floats, seed: int) -> Floats:
    """Means [R] over as many runs as there are, drawn with replacement: what other seeds of a group of runs could have
    given. `seed`: another one for each group. Draws lie closer to the mean of M runs than other runs would, their
    variance being (M - 1) / M of an unbiased one; so their distances from it are made as much larger."""
    random, (R, M) = np.random.default_rng([1, seed]), mean_RM.shape
    center_R = mean_RM.mean(1)
    drawn_R: Floats = np.take_along_axis(mean_RM, random.integers(0, M, (R, M)), axis=1).mean(1)
    return center_R + (drawn_R - center_R) * np.sqrt(M / max(M - 1, 1))


def resampled(groups: Sequence[Floats]) -> list[tuple[Floats, Floats]]:
    """Returns, for each group of runs, the means over its runs [U], and the means of these over resamples [R] of the
    users. A group has its runs' numbers of the users [U, M]. All groups have the same resamples of the users; those of
    runs are the group's own."""
    value_MU, random, found, first = np.concatenate(groups, axis=1).T.copy(), np.random.default_rng(0), [], 0
    U = value_MU.shape[1]
    counts = (np.bincount(random.integers(0, U, U), minlength=U).astype(float) for _ in range(RESAMPLES))
    # No matrix product, whose rounding would depend on the other runs.
    mean_RM = np.stack([(value_MU * count_U).sum(1) for count_U in counts]) / U
    for number, value_UM in enumerate(groups):
        own = slice(first, first := first + value_UM.shape[1])
        found.append((value_UM.mean(1), over_seeds(mean_RM[:, own], number)))
    return found


def middle(mean_R: Floats) -> Floats:
    """The bounds of the middle 95 % of resamples [R, …]."""
    return np.percentile(mean_R, [2.5, 97.5], axis=0)
