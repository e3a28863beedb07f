"""Values that nobody would write into a JSON file, and JSON with them in a place."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from logitmix.common.messages import naming_urls

MARK = "@@"
DEEP = "[" * 3000 + "]" * 3000
VALUES = [
    "null", "true", "0", "-1", "1.5", "-0.0", "1" + "0" * 400, "1" + "0" * 5000, "Infinity", "-Infinity", "NaN", '""',
    '"x"', '"\\ud800"', '"\\u001b[31m\\u0000"', "[]", "[1]", '["a"]', "[[]]", "{}", '{"a": 1}', "9223372036854775808",
    "-9223372036854775809", "1e-320", "1e308", "-1e308", "1e99", "-1e99", DEEP,
    "9223372036854775807", "1000000000", "[-1]", "[null]", "[Infinity]", '"../../x"',
    '"' + "x" * 3000 + '"',
]  # fmt: skip


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from places(tree[key], (*at, key))


def edited(tree: Any, *edits: tuple[tuple[Any, ...], str]) -> str:
    """The JSON of a tree with other values at these places."""
    text = [tree]
    copied = json.loads(json.dumps(text))
    for number, (at, _) in enumerate(edits):
        node, *keys = copied, *(0, *at)
        for key in keys[:-1]:
            node = node[key] if isinstance(node, dict | list) else {}
        if isinstance(node, dict | list):
            node[keys[-1]] = f"{MARK}{number}"
    said = json.dumps(copied[0])
    for number, (_, value) in enumerate(edits):
        said = said.replace(f'"{MARK}{number}"', value)
    return said


def lacking(tree: Any, at: tuple[Any, ...]) -> str:
    """The JSON of a tree without what is at a place."""
    node = copied = json.loads(json.dumps(tree))
    for key in at[:-1]:
        node = node[key]
    del node[at[-1]]
    return json.dumps(copied)


def refused(action: Callable[[], object], file: str, at: tuple[Any, ...]) -> bool:
    """Whether an action refuses a file, in one line that names it and what is at this place."""
    try:
        with naming_urls():
            action()
    except ValueError as error:
        said, names = str(error), [key for key in at if isinstance(key, str)]
        assert file in said and len(said) < 1500 and not re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", said)
        of_all = ("nested too deep", "a number has more than 4300 digits")
        assert not names or any(name in said for name in (*names, *of_all)), said
        return True
    return False
