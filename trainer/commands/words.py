"""What the words of a command line say: a command's arguments, lists, numbers and JSON. A mistake in them is a
ValueError of one line."""

import csv
import dataclasses
import functools
import re
import types
import typing
from typing import Any, NoReturn, TypeVar

import tyro

# The events by which tyro tells what is wrong: private, so pyproject.toml names the versions that have them.
from tyro import _errors
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from logitmix.common.docstrings import docs_of
from logitmix.common.files import from_json
from logitmix.common.mappings import nearest, plainly

REGISTRY = ConstructorRegistry()

T = TypeVar("T")


def parse(kind: type[T], command: str, words: list[str], default: T | None = None) -> T:
    """The command's arguments that the words give, by tyro's rules; `--help` among them prints its page and ends the
    process. An error in the words is a ValueError of one line."""

    def refuse(event: _errors.ParseErrorEvent) -> NoReturn:
        raise ValueError(_problem(event, kind, command)) from None

    with _errors.on_parse_error(refuse):
        return tyro.cli(
            kind,
            prog=f"logitmix {command}",
            args=words,
            default=tyro.MISSING_NONPROP if default is None else default,
            config=(tyro.conf.AvoidSubcommands,),
            registry=REGISTRY,
        )


@REGISTRY.struct_rule
def _fields_for_tyro(info: StructTypeInfo) -> StructConstructorSpec | None:
    """tyro's rule for dataclasses would break a docstring's lines before a digit, a quote or a dash. The options that
    commands share, which are keyword-only, come last."""
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    found = []
    for entry in sorted(dataclasses.fields(info.type), key=lambda entry: entry.kw_only is True):
        default: Any = tyro.MISSING_NONPROP
        if dataclasses.is_dataclass(info.default):
            default = getattr(info.default, entry.name)
        elif entry.default is not dataclasses.MISSING:
            default = entry.default
        elif entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        doc = functools.partial(docs_of(info.type).get, entry.name)
        found.append(StructFieldSpec(entry.name, hints[entry.name], default, doc))
    return StructConstructorSpec(info.type, tuple(found))


def flags_of(kind: type, prefix: str = "") -> list[str]:
    """The flags of a dataclass; where a section may be of several kinds, those of all kinds."""
    flags: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        name = name.replace("_", "-")
        if dataclasses.is_dataclass(members[0]):
            flags += [flag for section in members for flag in flags_of(section, f"{prefix}{name}.")]
        elif typing.get_origin(hint) is not dict:
            flags += [f"--{prefix}{name}", *([f"--{prefix}no-{name}"] if hint is bool else [])]
    return flags


def _problem(event: _errors.ParseErrorEvent, kind: type, command: str) -> str:
    see = f"see logitmix {command} --help"
    match event:
        case _errors.UnrecognizedArgs(tokens=[word, *_]) if word.startswith("-"):
            flag = word.partition("=")[0]
            return f"unknown option {flag}{nearest(flag, flags_of(kind))}; {see}"
        case _errors.UnrecognizedArgs(tokens=[word, *_]):
            return f"unknown word {word}; a flag takes one value, and several as a,b; {see}"
        case _errors.MissingArgs(missing_arguments=missing):
            names = [
                str(arg.lowered.metavar) if arg.is_positional() else f"{arg.display_name()} {arg.lowered.metavar}"
                for arg in (each.arg for each in missing)
            ]
            return f"{command} needs {' and '.join(names)}; {see}"
        case _errors.BadValue(argument=argument):
            return f"{argument.display_name()} needs a value; {see}"
        case _errors.InvalidChoice(argument=argument, value=value, choices=choices):
            known = ", ".join(choice for choice in choices if choice != "None")
            return f"{argument.display_name()} is {value!r}; it must be one of {known}"
        case _errors.InstantiationFailure(message=message, argument=argument):
            # Python's own message for int("x") and float("x").
            number = re.search(r"(invalid literal for int\(\)|could not convert string to float).*: '(.*?)'", message)
            if argument is not None and (plain := plainly(message)) != message:
                return f"{argument.display_name()}: {plain}; {see}"
            if argument is None or number is None:
                return message
            needs = "a whole number" if number[1].startswith("invalid") else "a number"
            return f"{argument.display_name()} is {number[2]}; it must be {needs}; {see}"
    raise AssertionError(f"tyro {tyro.__version__} has an error that the command line does not know: {event}")


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


def json_value(flag: str, text: str, kind: type[T], example: str) -> T:
    needs = f"it must be a JSON {'object' if kind is dict else 'list'}, in quotes: {example}"
    try:
        found = from_json(text)
    except ValueError as error:
        raise ValueError(f"{flag} is {text:.80}, which is not JSON ({error}); {needs}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{flag} is {text:.80}; {needs}")
    return found
