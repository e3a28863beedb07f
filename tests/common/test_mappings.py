from dataclasses import dataclass, field
from typing import Literal

import pytest

from logitmix.common.mappings import OTHER_SECTIONS, from_mapping, names_of_kind, to_mapping


@dataclass(frozen=True)
class Table:
    rows: int = 1


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...] = ()
    tables: dict[str, Table] = field(default_factory=dict)


@dataclass(frozen=True)
class Open:
    rows: int = 1
    inner: Table = field(default_factory=Table)
    named: dict[str, dict[str, object]] = field(default_factory=dict, metadata=OTHER_SECTIONS)


def test_one_field_may_take_all_other_sections_and_nothing_else() -> None:
    tree = {"rows": 2, "inner": {"rows": 3}, "item": {"x": 1}, "named": {"y": 2}}
    read = from_mapping(Open, tree, "here")
    assert read == Open(2, Table(3), {"item": {"x": 1}, "named": {"y": 2}})
    assert to_mapping(read) == tree and from_mapping(Open, {}, "here") == Open()
    for key in ("item", "named"):
        with pytest.raises(ValueError, match=f"^here: unknown key {key}"):
            from_mapping(Open, {key: 3}, "here")


def test_lists_and_named_sections_become_tuples_and_dictionaries() -> None:
    tree = {"names": ["a", "b"], "tables": {"item": {"rows": 3}, "user": {}}}
    assert from_mapping(Settings, tree, "here") == Settings(("a", "b"), {"item": Table(3), "user": Table()})
    assert from_mapping(Settings, {"names": ("a",)}, "here").names == ("a",)
    assert from_mapping(Settings, {}, "here") == Settings()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"names": "ab"}, "here: names is 'ab'; it must be a list"),
        ({"names": ["a", 1]}, "here: names[1] is 1; it must be of type str"),
        ({"tables": ["item"]}, "here: tables is a section, not a value"),
        ({"tables": {"item": {"row": 3}}}, "here: unknown key tables.item.row (did you mean rows?)"),
        ({"tables": {"item": {"rows": 1.5}}}, "here: tables.item.rows is 1.5; it must be of type int"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(tree: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_mapping(Settings, tree, "here")
    assert str(error.value) == message


@dataclass(frozen=True)
class Circle:
    kind: Literal["circle"] = "circle"
    name: str = "shape"
    radius: int = 1


@dataclass(frozen=True)
class Square:
    kind: Literal["square"] = "square"
    name: str = "shape"
    side: int = 1


@dataclass(frozen=True)
class Drawing:
    shape: Circle | Square = field(default_factory=Circle)


def test_a_section_is_of_the_class_that_its_kind_names() -> None:
    for tree, shape in (({}, Circle()), ({"radius": 2}, Circle(radius=2)), ({"kind": "square"}, Square())):
        assert from_mapping(Drawing, {"shape": tree}, "here") == Drawing(shape)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"kind": "squere"}, "here: shape.kind is 'squere' (did you mean square?); it must be one of circle, square"),
        ({"side": 3}, "here: shape.side is a setting of kind square, but shape.kind is circle"),
        ({"kind": "square", "sides": 3}, "here: unknown key shape.sides (did you mean side?)"),
        (3, "here: shape is a section, not a value"),
    ],
)
def test_what_is_of_no_kind_or_of_another_is_refused(tree: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_mapping(Drawing, {"shape": tree}, "here")
    assert str(error.value) == message


def test_a_kind_has_its_settings_and_an_unknown_one_may_have_all() -> None:
    assert names_of_kind({"circle": Circle, "square": Square}, "square") == {"kind", "name", "side"}
    assert names_of_kind({"circle": Circle, "square": Square}, "squere") == {"kind", "name", "side", "radius"}
