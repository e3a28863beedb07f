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
SETS_AT = (10, 50, 100)
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


def means_of_sets(hit_UK: "np.ndarray", count_U: "np.ndarray") -> dict[str, float]:
    """recall@k, ndcg@k and map@k, means over users with several relevant items, in torchmetrics' definitions: `hit_UK`
    says whether the best items are relevant, the best one first, and `count_U` how many items are, at least one. The
    average precision of a user is the mean over the relevant items among the best k."""
    import numpy as np

    place_K = np.arange(1, hit_UK.shape[1] + 1)
    gain_K, hits_UK = 1 / np.log2(place_K + 1.0), hit_UK.cumsum(1)
    found: dict[str, float] = {}
    for k in SETS_AT:
        first_Uk, hits_U = hit_UK[:, :k], hit_UK[:, :k].sum(1)
        ideal_U = gain_K.cumsum()[np.minimum(count_U, min(k, len(gain_K))) - 1]
        precision_U = (first_Uk * hits_UK[:, :k] / place_K[:k]).sum(1)
        found[f"recall@{k}"] = float(np.mean(hits_U / count_U))
        found[f"ndcg@{k}"] = float(np.mean(first_Uk @ gain_K[:k] / ideal_U))
        found[f"map@{k}"] = float(np.mean(precision_U / np.maximum(hits_U, 1)))
    return found


def means(rank_U: "np.ndarray") -> dict[str, float]:
    """All METRICS of users' ranks [U]."""
    import numpy as np

    return {name: float(np.mean(METRICS.find(name)(rank_U))) for name in METRICS}
