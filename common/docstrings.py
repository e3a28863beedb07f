"""What the docstrings of a class say of its fields."""

from collections.abc import Mapping
from functools import cache

import docstring_parser


@cache
def docs_of(kind: type) -> Mapping[str, str]:
    """The docstring of each field, on one line."""
    docs = {}
    for cls in reversed(kind.__mro__[:-1]):
        if cls is not dict:  # beneath a TypedDict
            for field in docstring_parser.parse_from_object(cls).params:
                docs[field.arg_name] = " ".join((field.description or "").split())
    return docs
