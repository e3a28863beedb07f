"""A metric: NDCG@50.

logitmix train demo-mol --import ndcg_at_50.py --evaluate.metric ndcg@50
"""

import numpy as np

from logitmix.trainer.metrics import METRICS


def ndcg_at_50(rank_U: np.ndarray) -> np.ndarray:
    """The value of each user from the rank of the target, from 1."""
    return np.where(rank_U <= 50, 1 / np.log2(rank_U + 1.0), 0.0)


METRICS["ndcg@50"] = ndcg_at_50
