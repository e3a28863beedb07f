"""How the learning rates change over a run. Imports no torch.

A schedule is a function of the share of training that has passed, from 0 at the first step to almost 1 at the last: the
factor of the configured learning rates. A new one is a function and an entry in SCHEDULES.
"""

from collections.abc import Callable
from math import cos, pi

from logitmix.common.plugins import Registry

Schedule = Callable[[float], float]


def constant(passed: float) -> float:
    return 1.0


def cosine(passed: float) -> float:
    """Half a period of a cosine, from 1 at the first step to almost 0 at the last."""
    return (1 + cos(pi * passed)) / 2


def linear(passed: float) -> float:
    """A straight line from 1 at the first step to almost 0 at the last."""
    return 1 - passed


def wsd(passed: float) -> float:
    """Warmup-stable-decay: 1, and then a straight line to almost 0 over the last DECAY of training."""
    return min(1.0, (1 - passed) / DECAY)


DECAY = 0.2
SCHEDULES = Registry[Schedule]("schedule", {"constant": constant, "cosine": cosine, "linear": linear, "wsd": wsd})


def learning_rate_factor(name: str, warmup_steps: int, step: int, total: int, of_time: float = 0.0) -> float:
    """In step `step`, from 1, of `total`: a linear rise over the first steps, then the named schedule over the others,
    or over the training time, of which the share `of_time` has passed, if that ends first."""
    if step <= warmup_steps:
        return step / warmup_steps
    of_steps = (step - 1 - warmup_steps) / (total - warmup_steps)
    return SCHEDULES.find(name)(min(1.0, max(of_steps, of_time)))
