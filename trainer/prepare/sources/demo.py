"""Synthetic datasets to try things on: no download, known structure, the same data from the same seed.

`demo` is high-rank. Items belong to many small topics, and within a topic lie on a ring. A user has several interests,
each a topic with the user's own place on its ring. The next item is near the current place of the active interest. That
place moves on along the ring with each action, and the active interest switches as a Markov chain. So whether a user
takes an item depends narrowly on the pair, for hundreds of places, and on the user's earlier actions.

`demo-features` has the actions of `demo`, and features of items, users and actions (demo_features.py). `demo-shop` is a
shop (demo_shop.py).

In all, an item's popularity weight falls as a power of its rank, nobody takes an item twice, and times are seconds.
The same seed gives the same actions on the same numpy.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from logitmix.trainer.data.engine import quoted
from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.scan import NO_PROBLEM, Raw
from logitmix.trainer.prepare.tables import Job, SideTable

NO_COLUMNS: Mapping[str, pa.Array] = MappingProxyType({})
FIRST_TIME = 1_600_000_000
SECONDS_OF_STARTS = 365 * 86_400
MEAN_GAP_SECONDS = 6 * 3_600


@dataclass(frozen=True)
class DemoParameters:
    """Settings of the dataset."""

    users: int = 2_000
    items: int = 3_000
    shortest: int = 20
    """Actions of the shortest history; lengths are uniform up to `longest`."""
    longest: int = 60
    popularity_exponent: float = 0.8
    """The popularity weight of the item of rank r is r^-exponent."""
    topics: int = 120
    """Each has items / topics items, evenly spaced on its ring."""
    fewest_interests: int = 3
    most_interests: int = 6
    """Interests of a user, uniform from the fewest; chosen by the popularity of the topics."""
    switch: float = 0.2
    """Probability that the active interest switches before an action."""
    focus: float = 8.0
    """How narrow an interest is around its place: the weight of an item at angle a from it is exp(focus cos a)."""
    stride: float = 0.35
    """Radians that an interest moves on along its ring after an action."""


@dataclass(frozen=True, eq=False)
class Generated:
    """Actions ordered by user, then time; ids and titles by item."""

    users: np.ndarray
    """int32 [actions]."""
    items: np.ndarray
    """int32 [actions]."""
    timestamps: np.ndarray
    """int64 [actions], Unix seconds."""
    user_ids: list[str]
    item_ids: list[str]
    titles: list[str]
    topic_of: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Of the high-rank dataset, by item: its topic."""
    place_of: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Its angle on the topic's ring, in radians."""
    interests: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """Topics by user, -1 where a user has fewer."""


def read(job: Job) -> None:
    fill(job, generate(DemoParameters(), job.options.seed), DemoParameters())


def fill(job: Job, made: Generated, parameters: DemoParameters, columns: Mapping[str, pa.Array] = NO_COLUMNS) -> None:
    """The actions with further columns, the titles of the items, and what generated them."""
    item_ids = pa.array(made.item_ids)
    keys = {
        "user": pa.array(made.user_ids).take(pa.array(made.users)),
        "item": item_ids.take(pa.array(made.items)),
        "timestamp": pa.array(made.timestamps),
    }
    job.duck.put("generated", pa.table({**keys, **columns}))
    job.duck.db.execute(f"create view raw as select rowid as line, {NO_PROBLEM}, * from generated")
    named = {name: quoted(name) for name in (*keys, *columns)}
    job.read_actions([Raw("generated", job.duck, "raw", named, list(keys))], Clock(dates=False))
    job.duck.db.execute("drop view raw; drop table generated")
    job.generator = {"name": job.options.name, "parameters": {"seed": job.options.seed, **asdict(parameters)}}
    job.items = SideTable(item_ids, {"title": pa.array(made.titles)})


def generate(parameters: DemoParameters, seed: int) -> Generated:
    """The high-rank dataset."""
    fewest = parameters.fewest_interests * parameters.items // parameters.topics
    assert parameters.longest <= fewest, "a user takes no item twice, and only of topics of interest"
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = popularity(parameters, rng)
    members = rng.permutation(parameters.items).reshape(parameters.topics, -1)
    interests, standing = draw_interests(parameters, weights[members].sum(axis=1), rng)
    walk = Walk(parameters, np.log(weights)[members], interests, standing)
    choices = np.empty((parameters.users, parameters.longest), np.int32)
    for step in range(parameters.longest):
        topics, positions = walk.step(rng)
        choices[:, step] = members[topics, positions]
    topic_of = np.empty(parameters.items, np.int64)
    topic_of[members] = np.arange(parameters.topics)[:, None]
    position_of = np.empty(parameters.items, np.int64)
    position_of[members] = np.arange(members.shape[1])
    titles = [f"topic {topic} · item {place}" for topic, place in zip(topic_of, position_of, strict=True)]
    made = _collect(parameters, choices, titles, rng)
    return replace(made, topic_of=topic_of, place_of=walk.places[position_of], interests=interests)


class Walk:
    """The places of every user's interests, action by action. T topics of P items; U users of at most K interests."""

    def __init__(
        self, parameters: DemoParameters, log_weights: np.ndarray, interests: np.ndarray, standing: np.ndarray
    ) -> None:
        self.parameters = parameters
        self.log_weights = log_weights
        """[T, P]"""
        self.interests = interests
        """Topics [U, K]; -1 where a user has fewer interests."""
        self.standing = standing
        """Angles [U, K]."""
        self.places = np.arange(log_weights.shape[1]) * (2 * np.pi / log_weights.shape[1])
        self.taken = np.zeros((*interests.shape, log_weights.shape[1]), bool)
        self.active = np.zeros(len(interests), np.int64)

    def step(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The topic and the position on its ring that each user takes next."""
        rows = np.arange(len(self.interests))
        self._switch(rng)
        topics = self.interests[rows, self.active]
        distance = self.places - self.standing[rows, self.active][:, None]
        logits = self.log_weights[topics] + self.parameters.focus * np.cos(distance)
        logits[self.taken[rows, self.active]] = -np.inf
        positions = sample(logits, rng)
        self.taken[rows, self.active, positions] = True
        self.standing[rows, self.active] = self.places[positions] + self.parameters.stride
        return topics, positions

    def _switch(self, rng: np.random.Generator) -> None:
        rows = np.arange(len(self.interests))
        open_to = (self.interests >= 0) & ~self.taken.all(axis=2)
        moves = (rng.random(len(rows)) < self.parameters.switch) | ~open_to[rows, self.active]
        others = open_to.copy()
        others[rows, self.active] = False
        scores = np.where(others, rng.random(others.shape), -1.0)
        self.active = np.where(moves & others.any(axis=1), scores.argmax(axis=1), self.active)


def popularity(parameters: DemoParameters, rng: np.random.Generator) -> np.ndarray:
    ranks = 1 + rng.permutation(parameters.items)
    return ranks ** -float(parameters.popularity_exponent)


def draw_interests(
    parameters: DemoParameters, topic_weights: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    shape = (parameters.users, parameters.topics)
    # Taking the largest of log weight + Gumbel noise draws without replacement in proportion to the weights.
    scores = np.log(topic_weights) + rng.gumbel(size=shape)
    interests = np.argsort(-scores, axis=1)[:, : parameters.most_interests]
    counts = rng.integers(parameters.fewest_interests, parameters.most_interests, size=len(interests), endpoint=True)
    interests = np.where(np.arange(parameters.most_interests) < counts[:, None], interests, -1)
    return interests, rng.uniform(0, 2 * np.pi, size=interests.shape)


def sample(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One column of each row, in proportion to exp(logits); uses `logits` up."""
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    masses: np.ndarray = np.cumsum(logits, axis=1, dtype=np.float64)
    draws = rng.random(len(logits)) * masses[:, -1]
    return (masses <= draws[:, None]).sum(axis=1)


def _collect(parameters: DemoParameters, choices: np.ndarray, titles: list[str], rng: np.random.Generator) -> Generated:
    users, longest = choices.shape
    lengths = rng.integers(parameters.shortest, longest, size=(users,), endpoint=True)
    gaps = 1 + rng.exponential(MEAN_GAP_SECONDS, size=choices.shape).astype(np.int64)
    times = FIRST_TIME + rng.integers(0, SECONDS_OF_STARTS, size=(users, 1)) + np.cumsum(gaps, axis=1)
    kept = np.arange(longest) < lengths[:, None]
    return Generated(
        users=np.repeat(np.arange(users, dtype=np.int32), lengths),
        items=choices[kept],
        timestamps=times[kept],
        user_ids=[f"user-{user:04d}" for user in range(users)],
        item_ids=[f"item-{item:04d}" for item in range(parameters.items)],
        titles=titles,
    )
