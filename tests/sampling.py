"""Samples of many cases: `make test` runs one of each kind, the same one each time, and `make soak` the others."""

import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def one_of_each(cases: Iterable[T], *kinds: Callable[[T], Hashable]) -> list[Any]:
    """Parameters of a test, in the cases' order; those outside the sample are `slow`. With several `kinds`, each
    kind of each is in it."""
    cases, chance, sample = list(cases), random.Random(0), set[int]()
    for kind in kinds:
        numbers: dict[Hashable, list[int]] = {}
        for number, case in enumerate(cases):
            numbers.setdefault(kind(case), []).append(number)
        sample |= {chance.choice(of_kind) for of_kind in numbers.values()}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]), marks=[] if number in sample else [pytest.mark.slow]
        )
        for number, case in enumerate(cases)
    ]
