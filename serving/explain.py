"""Why an item is in an answer: the products of components that make up its score, and the items of the history that are
most like it.

Axes: N items of an answer, T items of the history, U and I components of query and item.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from logitmix.modules.similarity.base import Side
from logitmix.modules.towers import Tower
from logitmix.serving.items import Items

SHOWN = 3
"""Most products, and most items, that are told of an item."""


class Product(TypedDict):
    """A component of the query times one of the item."""

    query: int
    """Number of the query's component, from 0."""
    item: int
    """Number of the item's component, from 0."""
    score: float
    """Its part of the score."""


class Named(TypedDict):
    """An item."""

    id: str
    """Raw id."""
    title: str | None
    """`null` where the dataset has no titles."""


class Similar(Named):
    """An item of the history."""

    cosine: float
    """Of its vector and the item's."""


class Why(TypedDict):
    """Of one item of an answer."""

    components: list[Product]
    """The largest products; empty where the similarity is no sum of products of components."""
    similar: list[Similar]
    """The items of the history that are most like it."""


def explain(
    tower: Tower, items: Items, query: Side, found: Sequence[int], history: Sequence[int], name: Callable[[int], Named]
) -> list[Why]:
    """For each item that was found for one query, whose side has one row. `history` has the known items that were
    encoded, and `name` makes an entry of an item's index."""
    if not found:
        return []
    side = items.sides(found)
    every = tuple(part.to(items.device).expand(len(found), *part.shape[1:]) for part in query)
    parts_NUI = tower.similarity.parts(every, side)
    seen = list(dict.fromkeys(history))
    vectors = (F.normalize(items.rows(torch.tensor(of, dtype=torch.int64)), dim=1) for of in (found, seen))
    cosine_NT = torch.mm(next(vectors), next(vectors).T) if seen else torch.empty(len(found), 0)
    return [
        Why(
            components=[] if parts_NUI is None else _largest(parts_NUI[place].float()),
            similar=[
                Similar(**name(seen[at]), cosine=float(cosine_NT[place, at]))
                for at in cosine_NT[place].topk(min(SHOWN, len(seen))).indices.tolist()
            ],
        )
        for place in range(len(found))
    ]


def _largest(part_UI: torch.Tensor) -> list[Product]:
    scores, places = part_UI.flatten().topk(min(SHOWN, part_UI.numel()))
    I = part_UI.shape[1]
    return [
        {"query": place // I, "item": place % I, "score": score}
        for place, score in zip(places.tolist(), scores.tolist(), strict=True)
    ]
