"""The synthetic dataset `demo-shop`: half a year of a shop with news each week. What people buy follows their
interests, as in `demo`; of what they look at, some is near what they buy, and the rest has nothing to do with it. Its
actions have a feature `event`: view, cart or purchase; a purchase's own views are left out. Its items have a category,
a price, the week in which they came, and whether they are in stock. The same seed gives the same data.

Axes: U users, X items, T topics of P items.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from logitmix.trainer.prepare.sources.demo import (
    FIRST_TIME,
    DemoParameters,
    Generated,
    Walk,
    draw_interests,
    fill,
    popularity,
)
from logitmix.trainer.prepare.tables import Job

EVENTS = ("view", "cart", "purchase")
VIEW, CART, PURCHASE = range(3)
WEEK = 7 * 86_400
MINUTE = 60


@dataclass(frozen=True)
class ShopParameters(DemoParameters):
    """Of the shop. Histories have no least or largest length."""

    users: int = 20_000
    items: int = 5_000
    topics: int = 100
    weeks: int = 26
    at_first: float = 0.6
    """Share of the items that are there from the first week; the others come in equal numbers each week."""
    novelty: float = 1.5
    """Added to the log weight of an item in the week in which it comes, half of it in the next one."""
    buys: float = 0.35
    """Probability that a user buys in a week."""
    looks: float = 1.0
    """Mean number of items that are looked at before a purchase, up to `nearness` places from it on its ring."""
    nearness: int = 5
    in_cart: float = 0.3
    """Probability that such an item is put into the cart, which is then not bought."""
    glances: float = 1.5
    """Mean number of items that are looked at besides, whatever the user's interests are."""
    glance_spread: float = 1.5
    """Standard deviation of the log weights of the items for that."""
    in_stock: float = 0.85


def read(job: Job) -> None:
    parameters = ShopParameters()
    rng = np.random.Generator(np.random.PCG64(job.options.seed))
    topic_X, week_X, made, event_A = generate(parameters, rng)
    fill(job, made, parameters, {"event": pa.array(EVENTS).take(pa.array(event_A))})
    price_X = np.round(np.exp(rng.normal(3, 0.4, len(topic_X)) + 0.01 * topic_X), 2)
    job.items.columns.update(
        category=pa.array([f"category-{topic:02d}" for topic in topic_X]),
        price=pa.array(price_X),
        week=pa.array(week_X.astype(np.float64)),
        in_stock=pa.array(np.where(rng.random(len(topic_X)) < parameters.in_stock, "yes", "no")),
    )


def generate(
    parameters: ShopParameters, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, Generated, np.ndarray]:
    """Topic and week of each item, the actions, and the kind of each."""
    U, X, T = parameters.users, parameters.items, parameters.topics
    weight_X = popularity(parameters, rng)
    members_TP = rng.permutation(X).reshape(T, -1)
    week_X = np.where(rng.random(X) < parameters.at_first, 0, rng.integers(1, parameters.weeks, X))
    glance_X = np.exp(rng.normal(0, parameters.glance_spread, X))
    interests, standing = draw_interests(parameters, weight_X[members_TP].sum(axis=1), rng)
    walk = Walk(parameters, np.log(weight_X)[members_TP], interests, standing)
    log_weight_TP = walk.log_weights
    parts: list[tuple[np.ndarray, ...]] = []
    for week in range(parameters.weeks):
        age_X = week - week_X
        boost_X = parameters.novelty * np.where(week_X > 0, 1 / (1 + age_X.clip(0)), 0) * (age_X < 2)
        there_X = np.where(age_X < 0, -50.0, boost_X)
        walk.log_weights = log_weight_TP + there_X[members_TP]
        topic_U, place_U = walk.step(rng)
        user_N = np.flatnonzero((rng.random(U) < parameters.buys) & (there_X[members_TP[topic_U, place_U]] > -50))
        bought_N = members_TP[topic_U[user_N], place_U[user_N]]
        time_N = FIRST_TIME + week * WEEK + rng.integers(3600, WEEK, len(user_N))
        parts.append((user_N, bought_N, time_N, np.full(len(user_N), PURCHASE)))
        some = np.repeat(np.arange(len(user_N)), rng.poisson(parameters.looks, len(user_N)))
        away = rng.integers(1, parameters.nearness, len(some), endpoint=True) * rng.choice([-1, 1], len(some))
        near = members_TP[topic_U[user_N[some]], (place_U[user_N[some]] + away) % members_TP.shape[1]]
        kinds = np.where(rng.random(len(some)) < parameters.in_cart, CART, VIEW)
        times = time_N[some] - rng.integers(1, 50, len(some)) * MINUTE
        is_there = age_X[near] >= 0
        parts.append(tuple(of[is_there] for of in (user_N[some], near, times, kinds)))
        some = np.repeat(np.arange(len(user_N)), rng.poisson(parameters.glances, len(user_N)))
        glanced = rng.choice(X, len(some), p=_shares(glance_X * (age_X >= 0)))
        times = time_N[some] - rng.integers(1, 50, len(some)) * MINUTE
        parts.append((user_N[some], glanced, times, np.full(len(some), VIEW)))
    users, items, times, kinds = (np.concatenate(of) for of in zip(*parts, strict=True))
    order = np.lexsort((kinds, times, users))
    topic_X = np.empty(X, np.int64)
    topic_X[members_TP] = np.arange(T)[:, None]
    titles = [f"category {topic:02d}, product {item}" for item, topic in enumerate(topic_X)]
    made = Generated(
        users[order].astype(np.int32),
        items[order].astype(np.int32),
        times[order],
        [f"customer-{user:05d}" for user in range(U)],
        [f"product-{item:04d}" for item in range(X)],
        titles,
        topic_X,
    )
    return topic_X, week_X, made, kinds[order]


def _shares(weight_X: np.ndarray) -> np.ndarray:
    shares: np.ndarray = weight_X / weight_X.sum()
    return shares
