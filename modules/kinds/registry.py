"""The kinds of features, by their names in schemas. Imports no torch."""

from logitmix.common.mappings import nearest

from .base import Kind
from .ids import Ids
from .number import Number
from .one_id import Id
from .vector import Vector
from .weighted_ids import WeightedIds

KINDS: dict[str, Kind] = {
    "id": Id(),
    "ids": Ids(),
    "number": Number(),
    "vector": Vector(),
    "weighted_ids": WeightedIds(),
}


def kind_named(name: str) -> Kind:
    """ValueError if there is none."""
    if name not in KINDS:
        raise ValueError(f"kind is {name!r:.80}{nearest(name, list(KINDS))}; it must be one of {', '.join(KINDS)}")
    return KINDS[name]
