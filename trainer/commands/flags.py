"""Flags that are taken out of the words of a command line before they are parsed. Without tyro, which takes a while to
load, because every command begins so."""

from collections.abc import Callable, Sequence

from logitmix.common.plugins import TRUST


def take(words: Sequence[str], is_wanted: Callable[[str], bool]) -> tuple[list[str], list[tuple[str, str]]]:
    """The words without the flags that are wanted and their values, and these, in order: `--flag VALUE` or
    `--flag=VALUE`. The value is empty where another flag or nothing follows."""
    left: list[str] = []
    taken: list[tuple[str, str]] = []
    coming = [*words, "--"]
    while len(coming) > 1:
        flag, equals, value = (word := coming.pop(0)).partition("=")
        if not is_wanted(flag):
            left.append(word)
            continue
        if not equals and not coming[0].startswith("--"):
            value = coming.pop(0)
        taken.append((flag, value))
    return left, taken


def take_imports(words: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """The words of a command line without `--import PLUGIN` and `--trust-plugins`; these plugins; and whether it trusts
    plugins. ValueError for an `--import` without a value."""
    left, taken = take(words, "--import".__eq__)
    if not all(plugin for _, plugin in taken):
        raise ValueError("--import needs a plugin: --import FILE.py, or --import MODULE")
    return [word for word in left if word != TRUST], [plugin for _, plugin in taken], TRUST in left


def last_value(words: Sequence[str], flag: str) -> str:
    """A flag's value in the words, before they are parsed: the last one counts, and "_" is "-", as for the parser.
    Empty if there is none."""
    _, taken = take(words, lambda word: word.replace("_", "-") == flag.replace("_", "-"))
    return taken[-1][1] if taken else ""
