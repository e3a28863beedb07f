import re

import pytest

from logitmix.trainer.commands.flags import take, take_imports
from logitmix.trainer.commands.words import json_value, parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1193,661", ["1193", "661"]),
        (" a , b ,,", ["a", "b"]),
        ('"a,b"', ["a,b"]),
        ('"a,b", c,"say ""hi""",""', ["a,b", "c", 'say "hi"']),
        ('5" tube,c', ['5" tube', "c"]),
        ("", []),
    ],
)
def test_ids_on_a_command_line_are_a_row_of_csv(text: str, expected: list[str]) -> None:
    assert parts("--history", text) == expected


@pytest.mark.parametrize("text", ['"a,b', '"a"b,c'])
def test_quotes_that_do_not_close_are_named(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^--history is .*, which is no row of CSV .* double quotes, as in '\"a,b\",c'"
    ):
        parts("--history", text)


@pytest.mark.parametrize(("text", "why"), [("category=3", ", which is not JSON .*"), ("[3]", "")])
def test_what_is_no_json_object_is_told_how_to_write_one(text: str, why: str) -> None:
    said = rf"^--limit is {re.escape(text)}{why}; it must be a JSON object, in quotes: {{'a': 3}}$".replace("'", '"')
    with pytest.raises(ValueError, match=said):
        json_value("--limit", text, dict, '{"a": 3}')


def test_words_without_the_plugins() -> None:
    words = ["a", "--import", "x.py", "-k", "3", "--import=y"]
    assert take_imports(words) == (["a", "-k", "3"], ["x.py", "y"], False)
    assert take_imports([*words, "--trust-plugins"]) == (["a", "-k", "3"], ["x.py", "y"], True)
    for words in ("--import", "--import --json", "--import="):
        with pytest.raises(ValueError, match=r"^--import needs a plugin: --import FILE\.py, or --import MODULE$"):
            take_imports(words.split())


def test_flags_are_taken_with_their_values() -> None:
    words = ["a", "--x", "1", "b", "--y", "--x=--z", "-k", "-1", "--x", "-2", "--x", "--k", "--x"]
    left, taken = take(words, "--x".__eq__)
    assert left == ["a", "b", "--y", "-k", "-1", "--k"]
    assert taken == [("--x", "1"), ("--x", "--z"), ("--x", "-2"), ("--x", ""), ("--x", "")]
