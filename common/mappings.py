"""Strict nested mappings (TOML, JSON) to frozen dataclasses, with errors that name the key."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")

OTHER_SECTIONS = {"other_sections": True}
"""Metadata of a dictionary field that collects all sections without a field of their own, unchanged; the class checks
their content."""


def require(holds: bool, flag: str, value: object, needs: str) -> None:
    """ValueError that names the flag to change, its value, and what it must be."""
    if not holds:
        raise ValueError(f"{flag} is {value}; it must be {needs}")


def require_from(least: int, most: int, flag: str, value: int) -> None:
    """ValueError for a number outside of its limits, both included, as `require` says it."""
    require(least <= value <= most, flag, value, f"from {least} to {most:,}")


def from_mapping(cls: type[T], tree: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """A dataclass, and those within, from nested mappings; a missing key takes its default, if it has one.

    Fields are scalars, Literal choices, dataclasses, tuple[X, ...] (from a list), dict[str, X], Any, or unions of
    dataclasses that differ in a field `kind`; the first one is the default. ValueError that names `source` and the key,
    for an unknown or missing key, a value of the wrong type, or a value that a class refuses.
    """
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)  # type: ignore[arg-type]
    others = next((entry.name for entry in fields if entry.metadata == OTHER_SECTIONS), None)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if others and isinstance(value, Mapping) and (key == others or key not in hints):
            values.setdefault(others, {})[key] = dict(value)
            continue
        if key not in hints or key == others:
            raise ValueError(f"{source}: unknown key {prefix}{key:.80}{nearest(key, list(hints))}")
        values[key] = _convert(hints[key], value, source, prefix + key)
    for entry in fields:
        if entry.name not in tree and entry.default is entry.default_factory is dataclasses.MISSING:
            raise ValueError(f"{source}: {prefix}{entry.name} is missing")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def to_mapping(config: Any) -> dict[str, Any]:
    """Nested mappings from which `from_mapping` makes the same dataclass."""
    tree: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if entry.metadata == OTHER_SECTIONS:
            tree |= value
        elif dataclasses.is_dataclass(value):
            tree[entry.name] = to_mapping(value)
        else:
            tree[entry.name] = list(value) if isinstance(value, tuple) else value
    return tree


def _convert(hint: Any, value: Any, source: str, key: str) -> Any:
    if hint is Any:
        return value
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{source}: {key} is a whole number of more than 64 bits")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        tree = value if isinstance(value, Mapping) else {}
        try:
            classes = {cls.kind: cls for cls in arguments}
            hint = class_of_kind(classes, tree.get("kind", arguments[0].kind), tree, key)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if dataclasses.is_dataclass(hint) or origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{source}: {key} is a section, not a value")
        if origin is dict:
            return {name: _convert(arguments[1], entry, source, f"{key}.{name}") for name, entry in value.items()}
        return from_mapping(hint, value, source, f"{key}.")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{source}: {key} is {brief(value)}; it must be a list")
        return tuple(_convert(arguments[0], entry, source, f"{key}[{at}]") for at, entry in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{source}: {key} is {brief(value)}; it must be one of {', '.join(arguments)}")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{source}: {key} is {brief(value)}; it must be of type {hint.__name__}")
    return value


def brief(value: object) -> str:
    """A value as Python writes it, cut to 80 letters."""
    try:
        said = repr(value)
    except ValueError:  # a list of numbers with too many digits
        said = f"a {type(value).__name__}"
    return cut(said, 80)


def cut(text: str, most: int) -> str:
    """A text, or so many letters of it and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"


def class_of_kind(classes: Mapping[str, Any], kind: object, names: Iterable[str], key: str) -> Any:
    """The dataclass of a kind. ValueError for an unknown kind, and for a setting of another kind."""
    if not isinstance(kind, str) or kind not in classes:
        near = nearest(kind, list(classes)) if isinstance(kind, str) else ""
        raise ValueError(f"{key}.kind is {brief(kind)}{near}; it must be one of {', '.join(classes)}")
    settings = {other: [entry.name for entry in dataclasses.fields(cls)] for other, cls in classes.items()}
    for name in names:
        others = [other for other in settings if name in settings[other]]
        if others and kind not in others:
            raise ValueError(f"{key}.{name} is a setting of kind {' and '.join(others)}, but {key}.kind is {kind}")
    return classes[kind]


def names_of_kind(classes: Mapping[str, Any], kind: object) -> set[str]:
    """The settings of a kind; of all kinds where there is none of that name."""
    of_kind = [cls for name, cls in classes.items() if name == kind] or classes.values()
    return {entry.name for cls in of_kind for entry in dataclasses.fields(cls)}


def plainly(message: str) -> str:
    """Returns an error's message without Python's advice on its own limit, where a number has too many digits."""
    return re.sub(r"Exceeds the limit \((\d+) digits\).*", r"a number has more than \1 digits", message)


def first_line(error: BaseException) -> str:
    """Of an error's message, which may be long or empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, known: list[str]) -> str:
    """The text " (did you mean …?)" if one of the known names is near, else ""."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def counted(number: float, what: str) -> str:
    """Such as 1 item, 2,000 items or 1.5 minutes; `what` is the singular."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {what}{'' if number == 1 else 's'}"
