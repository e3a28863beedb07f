"""The words of `train` and `plan`: a recipe and its settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from logitmix.common.files import from_json
from logitmix.common.mappings import class_of_kind
from logitmix.trainer.commands.flags import last_value, take
from logitmix.trainer.commands.recipe_help import show_help
from logitmix.trainer.commands.sizing import load_sized, settled
from logitmix.trainer.commands.words import parse
from logitmix.trainer.config import (
    KINDS,
    Config,
    flatten,
    recipe_names,
    with_settings,
    with_start,
    with_tables_by_name,
)

NO_START = "--no-start"
"""Train from random weights, also where the recipe has a run that is trained first."""

R = TypeVar("R", bound=Config)


def of_recipe(kind: type[R], command: str, words: list[str], usage: str) -> tuple[R, Config, str]:
    """The arguments whose words are a recipe and its settings, these settings, and what `settled` says of them. Where
    the words ask for help, or there are none and `usage` is printed, it ends the process."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{usage}\nrecipes: {', '.join(recipe_names())}, or the path of a TOML file")
        raise SystemExit(0)
    if words[0].startswith("-"):
        raise ValueError(f"{command} needs a recipe first: logitmix {command} RECIPE [--section.field VALUE ...]")
    others, help_asked = take(words[1:], ("-h", "--help").__contains__)
    scale = last_value(others, "--scale")
    # The parser refuses what is no number.
    _, given = take(others, lambda flag: flag.startswith("--"))
    resumes = command == "train" and not help_asked
    recipe, found = load_sized(
        words[0],
        last_value(others, "--data.path"),
        int(scale) if scale.isdecimal() else 1,
        {flag[2:].replace("-", "_"): value for flag, value in given},
        (last_value(others, "--run") or f"runs/{Path(words[0]).stem}") if resumes else "",
    )
    others, first = take_start_words(others)
    if NO_START in others:
        if first:
            raise ValueError(f"{NO_START} leaves out the run that --start has settings of: give only one")
        others = [word for word in others if word != NO_START]
        recipe = replace(recipe, start={})
    arguments, config = _given(kind, f"{command} {words[0]}", others, recipe)
    config = _with_start(config, recipe.start, first, words[0]) if first else replace(config, start=recipe.start)
    config, sizes = settled(config, found)
    if help_asked:
        show_help(help_asked[0][1], arguments, config, f"{command} {words[0]}")
        raise SystemExit(0)
    return arguments, config, sizes


def _given(kind: type[R], command: str, words: list[str], recipe: Config) -> tuple[R, Config]:
    """The arguments whose words are settings, and the recipe with these, but without its section [start]."""
    recipe = _with_kinds(recipe, words)
    words, by_name = take_table_words(words)
    # tyro would make flags of its own for the names in these dictionaries.
    default = replace(recipe, start={}, tables=replace(recipe.tables, by_name={}))
    arguments = parse(kind, command, words, kind(**vars(default)))
    config = Config(**{entry.name: getattr(arguments, entry.name) for entry in dataclasses.fields(Config)})
    return arguments, with_tables_by_name(with_tables_by_name(config, recipe.tables.by_name), by_name)


def _with_start(config: Config, start: Mapping[str, Any], words: list[str], recipe: str) -> Config:
    """The configuration with the recipe's section [start] and these words, which came after --start."""
    if config.warm_start:
        raise ValueError("--start has settings of a run that is trained first, in place of --warm-start: give only one")
    try:
        _, given = _given(Config, f"train {recipe}", words, with_settings(config.inherited(), flatten(start)))
    except ValueError as error:
        raise ValueError(f"--start: {error}") from None
    return with_start(config, given)


def _with_kinds(config: Config, words: list[str]) -> Config:
    """The recipe with the kinds that the words choose: which settings exist depends on them."""
    kinds: dict[str, Any] = {}
    for name, classes in KINDS.items():
        prefix = f"--{name.removesuffix('kind')}"
        flags = [word.removeprefix(prefix).partition("=") for word in words if word.startswith(prefix)]
        settings = [flag.removeprefix("no-").replace("-", "_") for flag, _, _ in flags]
        before = flatten(config)[name]
        kinds[name] = last_value(words, f"--{name}") or before
        kind = class_of_kind(classes, kinds[name], settings, prefix.strip("-."))
        if kinds[name] != before:
            # A setting that the words give later may have a value that the new kind refuses.
            defaults = {entry.name: entry.default for entry in dataclasses.fields(kind) if entry.name != "kind"}
            kinds |= {f"{prefix[2:]}{key}": defaults[key] for key in settings if key in defaults}
    return with_settings(config, kinds)


def take_table_words(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The words of a command line without `--tables.NAME.SETTING VALUE`, and these settings by the table's name: the
    command line's parser cannot know the names of tables.

    What they are is checked with the other settings.
    """
    left, taken = take(words, lambda flag: flag.startswith("--tables.") and flag.count(".") == 2)
    by_name: dict[str, dict[str, Any]] = {}
    for flag, value in taken:
        _, name, setting = flag.split(".")
        setting = setting.replace("-", "_")
        by_name.setdefault(name, {})[setting] = _value(value)
    return left, by_name


def _value(text: str) -> Any:
    """The number, true or false that a text is, or else the text."""
    for read in (from_json, float):
        with suppress(ValueError):
            return read(text)
    return text


def take_start_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line without `--start.SECTION.SETTING VALUE …`, and these as `--SECTION.SETTING VALUE …`,
    settings of the run that is trained first."""
    left: list[str] = []
    first: list[str] = []
    taken = left
    for word in words:
        if word.startswith("-"):
            taken = first if word.startswith("--start.") else left
        taken.append(word.replace("--start.", "--", 1) if taken is first else word)
    return left, first
