from dataclasses import dataclass, field

import pytest

from logitmix.common.mappings import from_mapping


@dataclass(frozen=True)
class Table:
    rows: int = 1


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...] = ()
    tables: dict[str, Table] = field(default_factory=dict)


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
        ({"tables": {"item": 3}}, "here: tables.item is a section, not a value"),
        ({"tables": {"item": {"row": 3}}}, "here: unknown key tables.item.row (did you mean rows?)"),
        ({"tables": {"item": {"rows": 1.5}}}, "here: tables.item.rows is 1.5; it must be of type int"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(tree: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_mapping(Settings, tree, "here")
    assert str(error.value) == message
