"""What the words of a command line say: a command's fields, lists, numbers and JSON. A mistake in them is a ValueError
of one line."""

import contextlib
import csv
import io
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, TypeVar

import docstring_parser
import tyro

from logitmix.common.files import from_json

FRAME = " ╭╮╰╯─│+|"
"""What tyro frames its messages with; where the terminal is not UTF-8, also lines of hyphens."""

T = TypeVar("T")


def parse(kind: type[T], command: str, words: list[str], default: T | None = None) -> T:
    """The command that the words give: its fields by tyro's rules. An error in the words is a ValueError of one
    line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _docstrings_on_one_line():
            return tyro.cli(
                kind,
                prog=f"logitmix {command}",
                args=words,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip(FRAME) for line in said.getvalue().splitlines()[1:]]
        # Its last sentence takes more lines where the command is long, as that of a recipe's path is.
        lines = list(takewhile(lambda line: not line.startswith("For full helptext"), lines))
        problem = " ".join(line for line in lines if line.strip("-"))
        raise ValueError(_plainly(problem, command, default)) from None


@contextlib.contextmanager
def _docstrings_on_one_line() -> Iterator[None]:
    """tyro would break the lines of its help also where those of a field's docstring end."""
    from_object = docstring_parser.parse_from_object

    def joined(
        obj: Any, style: docstring_parser.DocstringStyle = docstring_parser.DocstringStyle.AUTO
    ) -> docstring_parser.Docstring:
        found = from_object(obj, style)
        for field in found.params:
            field.description = " ".join((field.description or "").split())
        return found

    docstring_parser.parse_from_object = joined
    try:
        yield
    finally:
        docstring_parser.parse_from_object = from_object


def _plainly(problem: str, command: str, default: object) -> str:
    """tyro's error message, without the parts for Python programmers."""
    see = f"see logitmix {command} --help"
    if unknown := re.match(r"Unrecognized options: ([^\s,]+)", problem):
        kind = "option" if unknown[1].startswith("-") else "word"
        near = re.search(rf"(?:Perhaps you meant|similar to {re.escape(unknown[1])}): (--[^\s,]+)", problem)
        meant = near[1] if near else ""
        section, _, name = meant.rpartition(".")
        if section and unknown[1] == f"--no-{meant[2:]}" and _is_switch(meant, default):
            meant = f"{section}.no-{name}"
        return f"unknown {kind} {unknown[1]}{f' (did you mean {meant}?)' if meant else ''}; {see}"
    if missing := re.match(r"Missing from .*?: (.*) \(required\)", problem):
        needs = re.findall(r"(?:^|\(required\) )((?:--\S+ )?\S+)", missing[1])
        return f"{command} needs {' and '.join(needs)}; {see}"
    if missing := re.match(r"Missing value for argument '(.*?)'", problem):
        return f"{missing[1]} needs a value; {see}"
    if choice := re.match(r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)", problem):
        known = [name for name in re.findall("'(.*?)'", choice[3]) if name != "None"]
        return f"{choice[2]} is {choice[1]!r}; it must be one of {', '.join(known)}"
    refused = re.match(r"Error parsing (\S+): (.*)", problem)
    if refused is None:
        return f"{problem}; {see}"
    flag, reason = refused.groups()
    value = re.search(r"(invalid literal for int\(\) with base 10|could not convert string to float): '(.*?)'", reason)
    if value is None:
        return reason
    number = "a whole number" if value[1].startswith("invalid") else "a number"
    return f"{flag} is {value[2]}; it must be {number}; {see}"


def _is_switch(flag: str, default: object) -> bool:
    value = default
    for name in flag[2:].replace("-", "_").split("."):
        value = getattr(value, name, None)
    return isinstance(value, bool)


def parts(flag: str, text: str) -> list[str]:
    """What is between the commas of a text, without the blanks around it; or, where there are double quotes, the fields
    of the text as a row of CSV: `"a,b",c` are two. Empty ones are left out."""
    if '"' not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        rows = list(csv.reader([text], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{flag} is {text}, which is no row of CSV ({error}): an id with a comma goes into double quotes, as in "
            "'\"a,b\",c', and a quote within these is doubled"
        ) from None
    return [part for row in rows for part in row if part]


def whole_numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in parts(flag, text)]
    except ValueError:
        raise ValueError(f"{flag} is {text}; it must be whole numbers, separated by commas") from None


def json_value(flag: str, text: str, kind: type[T]) -> T:
    try:
        found = from_json(text)
    except ValueError as error:
        raise ValueError(f"{flag} is not JSON: {error}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{flag} is {text}; it must be a JSON {'object' if kind is dict else 'list'}")
    return found
