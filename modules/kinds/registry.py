"""The kinds of features, by their names in schemas. Imports no torch."""

from logitmix.common.mappings import nearest
from logitmix.common.plugins import Registry

from .base import Kind
from .date import Date
from .ids import Id, Ids, WeightedIds
from .numbers import Number, Vector
from .text import Text

KINDS = Registry[Kind](
    "kind of feature",
    {
        "id": Id(),
        "ids": Ids(),
        "number": Number(),
        "date": Date(),
        "vector": Vector(),
        "weighted_ids": WeightedIds(),
        "text": Text(),
    },
    needs=("reads", "in_request", "cell", "embed", "sparse"),
    instances=True,
)


def kind_named(name: str) -> Kind:
    """Returns the kind of a name. ValueError if there is none."""
    if name not in KINDS:
        found = f"kind is {name!r:.80}{nearest(name, list(KINDS))}"
        raise ValueError(f"{found}; it must be one of {', '.join(KINDS)}, or one of a plugin: --import FILE.py")
    return KINDS.find(name)
