"""A schedule: the learning rate falls as 1 - sqrt(passed), fastest at first.

logitmix train demo-mol --import one_minus_sqrt.py --train.schedule one_minus_sqrt
"""

from math import sqrt

from logitmix.trainer.schedule import SCHEDULES


def one_minus_sqrt(passed: float) -> float:
    """The factor of the learning rates where this share of training, from 0 to 1, has passed."""
    return 1 - sqrt(passed)


SCHEDULES["one_minus_sqrt"] = one_minus_sqrt
