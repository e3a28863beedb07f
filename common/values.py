"""Values that a caller gives, as requests and arguments hold them: one rule for Python and for JSON.

An id is text or a whole number of 64 bits. Floats are none, even whole ones: a column with a missing value becomes
floats, in which large ids are no longer exact. Scalars, arrays and tensors of numpy and torch count as their Python
values. All functions raise ValueError that begins with "is" and says what the value must be.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's; all else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def whole(value: Any) -> int:
    """A whole number of 64 bits with sign."""
    found = value if type(value) is int else plain(value)
    if not isinstance(found, int) or isinstance(found, bool) or not -(2**63) <= found < 2**63:
        raise ValueError(f"is {value!r:.40}; it must be a whole number of 64 bits")
    return int(found)


def from_one(value: Any) -> int:
    """A whole number from 1 on."""
    found = whole(value)
    if found < 1:
        raise ValueError(f"is {found}; it must be at least 1")
    return found


def id_text(value: Any) -> str:
    """The text of an id."""
    found = value if type(value) is str else plain(value)
    if isinstance(found, str):
        return str.__str__(found)
    if isinstance(found, int) and not isinstance(found, bool) and -(2**63) <= found < 2**64:
        return str(int(found))
    raise ValueError(f"is {value!r:.40}; it must be text or a whole number of 64 bits")


def id_texts(values: list[Any]) -> list[str]:
    """The texts of ids."""
    if set(map(type, values)) <= {str}:
        return values
    try:
        return list(map(id_text, values))
    except ValueError as error:
        raise ValueError(f"has an id that {error}") from None


def as_list(value: Any) -> list[Any]:
    """The elements of a list, array or tensor, or of anything else that has some but is no text, no bytes and no
    mapping."""
    found = value
    if not isinstance(found, str | bytes | bytearray | memoryview | Mapping):
        found = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(found, Iterable):
            return list(found)
    raise ValueError(f"is {value!r:.100}; it must be a list")
