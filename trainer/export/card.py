"""The model card of an export: README.md, for people and for model hubs. It has no date, no path and no timing, so that
the same checkpoint gives the same bytes."""

import hashlib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from logitmix.common.messages import shown
from logitmix.modules.config import plugins_of
from logitmix.modules.schema import ITEM
from logitmix.serving.directory import writer
from logitmix.serving.directory.format import CARD, About, Entries, is_extra
from logitmix.serving.model import weight_shapes
from logitmix.trainer.config import COMPARED_WITH
from logitmix.trainer.run.results import read_results

HOLDINGS = "## This directory\n"
"""Heading of the last section, the one that changes when items are added."""
_SPEED = ("step", "examples_per_second", "seconds")
"""Numbers of results.json that are no metrics."""


@dataclass(frozen=True)
class Facts:
    """What a card says of the training."""

    settings: str
    """All settings as TOML, without the folders of one machine."""
    dataset: str
    """The text of the dataset's dataset.json."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Metrics of this checkpoint."""
    test: Mapping[str, float] = field(default_factory=dict)


def read_facts(run: Path, settings: str, step: int, dataset: str, validation: Mapping[str, float]) -> Facts:
    """Adds the test metrics of the run's results.json, which are those of one checkpoint. ValueError if it is
    damaged."""
    path, test = run / "results.json", {}
    if path.exists():
        try:
            results = read_results(run)
            if results["step"] == step:
                test = {name: value for name, value in results.items() if name not in _SPEED}
        except ValueError as error:
            raise ValueError(f"{error}; remove {path} to export without test metrics") from None
    return Facts(settings, dataset, validation, test)


def write_card(staging: Path, about: About, entries: Entries, facts: Facts, raw_ids: Sequence[str]) -> Entries:
    """Writes the card of an export with these other files; `raw_ids`: a few, for the example."""
    plain = raw_ids and all(re.fullmatch(r"[\w.-]+", raw_id) for raw_id in raw_ids)
    ids = list(raw_ids) if plain else ["ITEM", "ANOTHER ITEM"]
    dims = about.schema.dims(about.model.dim)
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True)
    templates.filters |= {"code": _code}
    text = templates.get_template("card.md.jinja").render(
        about=about,
        config=tomllib.loads(facts.settings),
        facts=facts,
        dataset=json.loads(facts.dataset),
        digest=hashlib.sha256(facts.dataset.encode()).hexdigest(),
        features=[of for of in about.schema.features if of.name != ITEM],
        ids=json.dumps(ids),
        history=shlex.quote(",".join(ids)),
        plugins=[f"{_code(name)} ({version})" for name, version in plugins_of(about.model, about.schema).items()],
        metrics=_metrics(facts),
        tower=sum(map(math.prod, weight_shapes(about.model, about.schema).values())),
        tables=sum(table.rows * dims[table.name] for table in about.schema.tables),
        toml=facts.settings.strip(),
    )
    return _write(staging, about, entries, text)


def renew_card(staging: Path, about: About, entries: Entries, text: str) -> Entries:
    """Writes the card `text` of an export that has other items and files now, its last section renewed."""
    return _write(staging, about, entries, text.partition(HOLDINGS)[0])


def _write(staging: Path, about: About, entries: Entries, before: str) -> Entries:
    text = f"{before.rstrip()}\n\n{HOLDINGS}\n{_holdings(about, entries)}"
    (staging / CARD).write_text(text, encoding="utf-8")
    return writer.extra_entry(staging, CARD)


def _metrics(facts: Facts) -> list[list[str]]:
    """Returns the rows of a table, its head first; empty if nothing was measured."""
    every = {**facts.validation, **facts.test}
    own = [name for name in every if name.partition("/")[0] not in (*COMPARED_WITH, "groups")]
    baselines = [name for name in COMPARED_WITH if any(key.startswith(f"{name}/") for key in facts.test)]
    columns = {"validation": (facts.validation, ""), "test": (facts.test, "")}
    columns |= {f"test, {COMPARED_WITH[name]}": (facts.test, f"{name}/") for name in baselines}
    shown = {head: of for head, of in columns.items() if of[0]}
    rows = [[name, *(_number(of.get(prefix + name)) for of, prefix in shown.values())] for name in own]
    return [["metric", *shown], ["---"] * (1 + len(shown)), *rows] if own else []


def _holdings(about: About, entries: Entries) -> str:
    data = [entry for name, entry in entries.items() if not is_extra(name)]
    size = sum(entry["bytes"] for entry in data)
    extras = [name for name in sorted(entries) if is_extra(name) and name != CARD]
    cache = f"the item tower's outputs in {about.precision.upper()}" if about.item_cache else "the item tower's inputs"
    shown = f"{about.num_items:,} items, stored as {cache}: {len(data)} files of {size:,} bytes.\n"
    if extras:
        # Without their sizes: a compiler's output is not always the same.
        shown += f"\nFor other servers: {', '.join(map(_code, extras))}.\n"
    return shown


def _number(value: float | None) -> str:
    if value is None:
        return ""
    # A checkpoint's counts are read as floats.
    is_count = isinstance(value, int) or (value > 1 and value.is_integer())
    return f"{value:,.0f}" if is_count else f"{value:.4f}"


def _code(text: object) -> str:
    """A name as Markdown shows it, whatever it holds."""
    return "`" + re.sub(r"[`|\n\t]", " ", shown(text)) + "`"
