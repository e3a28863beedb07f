"""The shop's data have what its documentation says."""

from dataclasses import replace

import numpy as np
import pytest

from logitmix.trainer.prepare.sources.demo_shop import CART, FIRST_TIME, PURCHASE, VIEW, WEEK, ShopParameters, generate

SMALL = ShopParameters(users=400, items=200, topics=10, weeks=12)


@pytest.fixture(scope="module")
def made():  # type: ignore[no-untyped-def]
    return generate(SMALL, np.random.default_rng(3))


def test_nothing_is_taken_before_it_is_there_and_nothing_bought_twice(made) -> None:  # type: ignore[no-untyped-def]
    topic_X, week_X, actions, kinds = made
    assert set(week_X) == set(range(SMALL.weeks)) and len(topic_X) == SMALL.items
    # What leads to a purchase early in a week may have been in the week before.
    assert ((actions.timestamps + 3600 - FIRST_TIME) // WEEK >= week_X[actions.items]).all()
    bought = kinds == PURCHASE
    pairs = actions.users[bought] * SMALL.items + actions.items[bought]
    assert len(np.unique(pairs)) == len(pairs)
    order = np.lexsort((actions.timestamps, actions.users))
    assert (order == np.sort(order)).all()


def test_glances_do_not_follow_interests(made) -> None:  # type: ignore[no-untyped-def]
    topic_X, _, actions, kinds = made
    same = {}
    for what, parameters in (("looks", replace(SMALL, glances=0.0)), ("glances", replace(SMALL, looks=0.0))):
        topic_X, _, actions, kinds = generate(parameters, np.random.default_rng(3))
        before = np.flatnonzero((kinds[:-1] != PURCHASE) & (kinds[1:] == PURCHASE))
        assert (actions.users[before] == actions.users[before + 1]).all()
        same[what] = (topic_X[actions.items[before]] == topic_X[actions.items[before + 1]]).mean()
    assert same["looks"] > 0.95 and same["glances"] < 0.3
    carts = (kinds == CART).sum() / np.isin(kinds, (CART, VIEW)).sum()
    assert carts == 0, "of glances"


def test_the_same_seed_gives_the_same_shop(made) -> None:  # type: ignore[no-untyped-def]
    again = generate(SMALL, np.random.default_rng(3))
    assert (again[2].items == made[2].items).all() and (again[3] == made[3]).all()
