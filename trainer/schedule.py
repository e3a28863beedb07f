"""How the learning rates change over a run. Imports no torch.

A schedule is a function of (step, total): the factor of the configured learning rates in step `step`, from 1, of
`total`. A new one is a function here, its name in ScheduleName and a line in SCHEDULES.
"""

from collections.abc import Callable, Mapping
from math import cos, pi
from typing import Literal

Schedule = Callable[[int, int], float]
ScheduleName = Literal["constant", "cosine", "linear"]


def constant(step: int, total: int) -> float:
    return 1.0


def cosine(step: int, total: int) -> float:
    """Half a period of a cosine, from 1 at the first step to almost 0 at the last."""
    return (1 + cos(pi * (step - 1) / total)) / 2


def linear(step: int, total: int) -> float:
    """A straight line from 1 at the first step to almost 0 at the last."""
    return 1 - (step - 1) / total


SCHEDULES: Mapping[ScheduleName, Schedule] = {"constant": constant, "cosine": cosine, "linear": linear}


def learning_rate_factor(name: ScheduleName, warmup_steps: int, step: int, total: int) -> float:
    """A linear rise over the first steps, then the named schedule over the others."""
    if step <= warmup_steps:
        return step / warmup_steps
    return SCHEDULES[name](step - warmup_steps, total - warmup_steps)
