"""`--help` after `train RECIPE` and `plan RECIPE`: what the recipe changes and the sections; with --help SECTION the
settings of a section and of those within; with --help all those of all."""

import dataclasses
import shlex
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from logitmix.common.docstrings import docs_of
from logitmix.common.mappings import nearest
from logitmix.trainer.commands.words import parse
from logitmix.trainer.config import KINDS, Config, flatten, with_settings

ALL = "all"


def show_help(section: str, arguments: Config, config: Config, command: str) -> None:
    """Prints a page. `arguments`: those of `command`, such as "train demo-mol", with its own options and its sections;
    `config`: the recipe with the settings that the words have given.

    Raises ValueError for an unknown section.
    """
    known = sections_of(config)
    if not section:
        print(_overview(arguments, config, known, command))
        return
    page: Any = arguments
    if section != ALL:
        if section not in known:
            near = nearest(section, list(known))
            raise ValueError(f"no section {section!r}{near}; --help takes {', '.join(known)} and {ALL}")
        page = known[section]
        for name in reversed(section.split(".")):
            said = {"__doc__": f"The settings of {section}."}
            page = dataclasses.make_dataclass("Page", [(name, type(page), page)], frozen=True, namespace=said)()
    # Prints the page and ends the process.
    parse(type(page), command, ["--help"], page)


def sections_of(config: object, prefix: str = "") -> dict[str, Any]:
    """The sections of settings by their names, {"model.encoder": SASRecConfig(…), …}, each before those within."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            found |= {f"{prefix}{name}": value} | sections_of(value, f"{prefix}{name}.")
    return found


def _overview(arguments: Config, config: Config, known: Mapping[str, Any], command: str) -> str:
    now = flatten(config)
    kinds = {name: now[name] for name in KINDS}
    before = flatten(with_settings(Config(), kinds)) | {name: flatten(Config())[name] for name in kinds}
    changed = [_words(name, value) for name, value in now.items() if name not in before or before[name] != value]
    kind: Any = type(arguments)
    docs = docs_of(kind)
    # People write --continue RUN, which stands with warm_start.
    own = [entry for entry in dataclasses.fields(arguments) if entry.name not in {*known, "continues"}]
    own.sort(key=lambda entry: (hasattr(config, entry.name), entry.kw_only))
    sections = {
        name: " ".join((type(value).__doc__ or "").split()).partition(". ")[0].rstrip(".")
        for name, value in known.items()
    }
    return "\n".join(
        [
            f"usage: logitmix {command} [--section.setting VALUE ...] [--option VALUE ...]\n",
            f"{kind.__doc__}\n",
            "settings that are not the defaults:",
            *(f"  {line}" for line in sorted(changed, key=lambda line: line.startswith("--start.")) or ["none"]),
            "\noptions:",
            *_listed({f"--{entry.name.replace('_', '-')}": docs.get(entry.name, "") for entry in own}),
            "\nsections of settings:",
            *_listed(sections),
            f"\nlogitmix {command} --help SECTION lists the settings of a section, --help {ALL} those of all.",
        ]
    )


def _words(name: str, value: Any) -> str:
    """A setting as the command line takes it."""
    section, dot, name = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{section}{dot}{'' if value else 'no-'}{name}"
    values = value if isinstance(value, list) else [value]
    return " ".join([f"--{section}{dot}{name}", *(shlex.quote(str(each)) for each in values)])


def _listed(said: Mapping[str, str]) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 120)
    column = max(map(len, said)) + 4
    found = []
    for name, text in said.items():
        begin = f"  {name}".ljust(column)
        found.append(textwrap.fill(f"{begin}{text}", width, subsequent_indent=" " * column, break_on_hyphens=False))
    return found
