"""The synthetic dataset `demo` with 20 features: its actions are the same. Most features say something about what
decides the actions, but not all of it, and some of their values are wrong; `color`, `country`, `language`, `age`,
`hour`, `device` and `rank` say nothing. The same seed gives the same features.

Axes: X items, U users, A actions, T topics.
"""

import numpy as np
import pyarrow as pa

from logitmix.trainer.data.arrow import lists_of
from logitmix.trainer.prepare.sources.demo import DemoParameters, Generated, fill, generate
from logitmix.trainer.prepare.tables import Job, SideTable

THEME = 10
"""Topics of a theme."""
ARCS = 8
"""Parts of a topic's ring."""
MAKERS, TAGS, COLORS, COUNTRIES, LANGUAGES, DEVICES, PAGES = 200, 80, 12, 30, 10, 4, 4
WRONG = 0.15
"""Share of ids that are drawn at random instead."""
NOISE = 0.3
"""Standard deviation of what is added to numbers whose own is about 1."""
SECONDS_OF_AN_HOUR = 3600

Columns = dict[str, pa.Array]
"""By the feature's name: integers are ids, lists of integers several ids, fractions numbers, lists of those vectors."""


def read(job: Job) -> None:
    parameters, seed = DemoParameters(), job.options.seed
    made = generate(parameters, seed)
    # Not the generator of the actions, so that these stay those of `demo`.
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    topic_TC = rng.normal(size=(parameters.topics, 4))
    items, users = of_items(made, topic_TC, rng), of_users(made, topic_TC, rng)
    fill(job, made, parameters, of_actions(made, rng))
    job.items.columns.update(items)
    job.users = SideTable(pa.array(made.user_ids), users)


def of_items(made: Generated, topic_TC: np.ndarray, rng: np.random.Generator) -> Columns:
    """By the item: topic, theme, arc, maker, tags, shape, price and color. topic_TC: a vector of each topic."""
    T, X = len(topic_TC), len(made.item_ids)
    arc_X = (made.place_of * ARCS / (2 * np.pi)).astype(np.int64)
    makers_TM, tags_TG = rng.integers(0, MAKERS, (T, 3)), rng.integers(0, TAGS, (T, 4))
    maker_X = makers_TM[made.topic_of, rng.integers(0, 3, X)]
    tags_XG = np.where(rng.random((X, 4)) < 0.5, rng.integers(0, TAGS, (X, 4)), tags_TG[made.topic_of])
    tagged_XG = np.arange(4) < rng.integers(2, 4, (X, 1), endpoint=True)
    turns_XC = [turn(made.place_of * times) for times in (1, 2) for turn in (np.cos, np.sin)]
    shape_XC = np.column_stack([topic_TC[made.topic_of], *turns_XC])
    return {
        "topic": _ids(made.topic_of, T, rng),
        "theme": pa.array(made.topic_of // THEME),
        "arc": _ids(arc_X, ARCS, rng),
        "maker": _ids(maker_X, MAKERS, rng),
        "tags": _lists(tags_XG, tagged_XG),
        "shape": _vectors(shape_XC, rng),
        "price": _numbers(topic_TC[made.topic_of].sum(axis=1) / 2, rng),
        "color": pa.array(rng.integers(0, COLORS, X)),
    }


def of_users(made: Generated, topic_TC: np.ndarray, rng: np.random.Generator) -> Columns:
    """By the user: interests, favorite theme, taste, country, language and age."""
    U, known_UK = len(made.user_ids), made.interests >= 0
    # About half of the interests, and a topic that is none.
    told_UK = known_UK & (rng.random(known_UK.shape) < 0.5)
    told_UK = np.column_stack([np.ones(U, bool), told_UK])
    topics_UK = np.column_stack([rng.integers(0, len(topic_TC), U), made.interests])
    taste_UC = (topic_TC[made.interests] * known_UK[:, :, None]).sum(axis=1) / known_UK.sum(axis=1, keepdims=True)
    country_U = rng.integers(0, COUNTRIES, U)
    return {
        "interests": _lists(topics_UK, told_UK),
        "favorite_theme": _ids(made.interests[:, 0] // THEME, len(topic_TC) // THEME, rng),
        "taste": _vectors(taste_UC, rng),
        "country": pa.array(country_U),
        "language": _ids(country_U * LANGUAGES // COUNTRIES, LANGUAGES, rng),
        "age": _numbers(np.zeros(U), rng),
    }


def of_actions(made: Generated, rng: np.random.Generator) -> Columns:
    """By the action: page (whether the user has come from another topic), rating, dwell, hour, device and rank."""
    A, topic_A = len(made.items), made.topic_of[made.items]
    same_A = (np.diff(topic_A, prepend=-1) == 0) & (np.diff(made.users, prepend=-1) == 0)
    angle_A = np.diff(made.place_of[made.items], prepend=0.0)
    near_A = np.where(same_A, np.cos(angle_A), -1.0)
    device_U = rng.integers(0, DEVICES, len(made.user_ids))
    return {
        "page": _ids(np.where(same_A, 0, 1), PAGES, rng),
        "rating": _numbers(near_A, rng),
        "dwell": _numbers(same_A.astype(float), rng),
        "hour": pa.array(made.timestamps // SECONDS_OF_AN_HOUR % 24),
        "device": _ids(device_U[made.users], DEVICES, rng),
        "rank": _numbers(rng.exponential(size=A), rng),
    }


def _ids(true_R: np.ndarray, count: int, rng: np.random.Generator) -> pa.Array:
    """Ids below a count, some of them wrong."""
    wrong_R = rng.random(len(true_R)) < WRONG
    return pa.array(np.where(wrong_R, rng.integers(0, count, len(true_R)), true_R))


def _numbers(true_R: np.ndarray, rng: np.random.Generator) -> pa.Array:
    return pa.array((true_R + NOISE * rng.normal(size=len(true_R))).astype(np.float32))


def _vectors(true_RC: np.ndarray, rng: np.random.Generator) -> pa.Array:
    noisy_RC = (true_RC + NOISE * rng.normal(size=true_RC.shape)).astype(np.float32)
    return pa.array(list(noisy_RC))


def _lists(ids_RK: np.ndarray, chosen_RK: np.ndarray) -> pa.Array:
    """The ids of each row that are chosen."""
    return lists_of(chosen_RK.sum(axis=1), pa.array(ids_RK[chosen_RK]))
