"""Samples of many cases: `make test` runs one of each kind, the same one each time, and `make soak` the others."""

import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def run_with(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """The values of a parameter with which tests of this file are run."""
    items = [item for item in request.session.items if item.path == request.path]
    return {item.callspec.params.get(parameter) for item in items if hasattr(item, "callspec")}


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
