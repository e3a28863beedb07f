"""Intervals of metrics, by resampling the users.

Axes: U users, M numbers of a user (of runs or methods, and metrics), R resamples.
"""

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
FEWEST = 6
"""Users in whom two models must differ: of fewer, all may be in favor of one by chance (2 / 2^5 is above 0.05)."""

Floats = NDArray[np.float64]


def resampled_means(value_UM: Floats) -> Floats:
    """Means [R, M] over as many users as there are, drawn with replacement: the same ones for all M."""
    random, U = np.random.default_rng(0), len(value_UM)
    counts = (np.bincount(random.integers(0, U, U), minlength=U).astype(float) for _ in range(RESAMPLES))
    return np.stack([count_U @ value_UM for count_U in counts]) / U


def over_seeds(mean_RM: Floats, seed: int) -> Floats:
    """Means [R] over as many runs as there are, drawn with replacement: what other seeds of a group of runs could have
    given. `seed`: another one for each group. Draws lie closer to the mean of M runs than other runs would, their
    variance being (M - 1) / M of an unbiased one; so their distances from it are made as much larger."""
    random, (R, M) = np.random.default_rng([1, seed]), mean_RM.shape
    center_R = mean_RM.mean(1)
    drawn_R: Floats = np.take_along_axis(mean_RM, random.integers(0, M, (R, M)), axis=1).mean(1)
    return center_R + (drawn_R - center_R) * np.sqrt(M / max(M - 1, 1))


def middle(mean_R: Floats) -> Floats:
    """The bounds of the middle 95 % of resamples [R, …]."""
    return np.percentile(mean_R, [2.5, 97.5], axis=0)
