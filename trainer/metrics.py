"""The metrics of a ranking: by name, each user's value [U] from the rank of the user's target [U], counted from 1. The
metric is the mean over the users; higher is better. A target that is left out of the ranking has rank NOT_SERVED, above
all others, and its value must be 0. Imports no torch, and numpy only to compute.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from logitmix.common.plugins import Registry

if TYPE_CHECKING:
    import numpy as np

HIT_RATES = (1, 10, 50, 100, 200, 500)
NOT_SERVED = 2**63 - 1


def _hit(rank_U: "np.ndarray", k: int) -> "np.ndarray":
    return rank_U <= k


def _gain(rank_U: "np.ndarray", k: int) -> "np.ndarray":
    """NDCG of one relevant item, whose ideal gain is 1."""
    import numpy as np

    return np.where(rank_U <= k, 1 / np.log2(rank_U + 1.0), 0.0)


def _reciprocal_rank(rank_U: "np.ndarray") -> "np.ndarray":
    import numpy as np

    return np.where(rank_U < NOT_SERVED, 1 / rank_U, 0.0)


METRICS = Registry[Callable[["np.ndarray"], "np.ndarray"]](
    "metric",
    {
        **{f"hr@{k}": partial(_hit, k=k) for k in HIT_RATES},
        "ndcg@10": partial(_gain, k=10),
        "mrr": _reciprocal_rank,
    },
)


def means(rank_U: "np.ndarray") -> dict[str, float]:
    """All METRICS of users' ranks [U]."""
    import numpy as np

    return {name: float(np.mean(METRICS.find(name)(rank_U))) for name in METRICS}
