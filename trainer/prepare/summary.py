"""The summary of a dataset that `logitmix prepare` prints."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from logitmix.common.mappings import counted, from_mapping
from logitmix.common.storage import place_of
from logitmix.modules.schema import ITEM, Feature, Schema
from logitmix.trainer.config import load_recipe, recipe_names
from logitmix.trainer.data.description import APPENDED, UNIT_NAMES, UNITS

OWNERS = {"item": "items", "user": "users", "event": "actions"}


def summarize(description: Mapping[str, Any], directory: Path) -> str:
    """Lines of text, from the content of dataset.json: what was read, removed and written, and what to do next."""
    if appended := description.get(APPENDED):
        return _of_appended(description, appended[-1], directory)
    schema = from_mapping(Schema, description["schema"], "schema")
    features = [feature for feature in schema.features if feature.name != ITEM]
    lines = _of_reading(description, directory)
    lines.append(f"written   {_counts(description)} to {directory}")
    lines.append(f"users     {description['actions'] / description['users']:.2f} actions each")
    lines.append(f"times     {_span(description['times'])}")
    lines += [f"{what:10}{line}" for what, line in _sides(description).items()]
    titles = f"of {description['titles']:,} of {counted(description['items'], 'item')}"
    lines.append(f"titles    {titles if description['titles'] else 'none: answers will show ids'}")
    lines += _features(features, schema, bool(description["titles"]))
    lines.append(f"next      {_next(directory)}")
    if any(feature.owner != "item" for feature in features):
        lines.append("          (with --model.features all it learns from the features of users and actions, too)")
    return "\n".join(lines)


def _of_reading(of: Mapping[str, Any], folder: Path) -> list[str]:
    """Lines about what was read and is not in the dataset, which the folder may list."""
    lines = [f"read      {_counts(of['read'])}"]
    if rejected := of["rejected_lines"]:
        lines.append(f"rejected  {counted(rejected, 'malformed line')}, listed in {folder}/rejects.tsv")
    return lines + [f"removed   {line}" for line in _removals(of["filters"])]


def _of_appended(description: Mapping[str, Any], last: Mapping[str, Any], directory: Path) -> str:
    """Lines about what was appended last."""
    lines = _of_reading(last, directory / APPENDED / f"{len(description[APPENDED]):05d}")
    new = f"{counted(last['users'], 'new user')} and {counted(last['items'], 'new item')}"
    lines.append(f"appended  {counted(last['actions'], 'action')} with {new}")
    lines.append(f"times     {_span(last['times'])}")
    lines.append(f"now       {_counts(description)} in {directory}")
    return "\n".join(lines)


def _removals(filters: Mapping[str, Any]) -> list[str]:
    """A line for each filter that removed something."""
    reasons = {name: f"by --{name.replace('_', '-')} {value}" for name, value in filters.items()}
    for name in ("where", "shown"):
        reasons[name] = "by " + " ".join(f"--{name} {shlex.quote(condition)}" for condition in filters.get(name, ()))
    reasons["duplicates"] = "equal to an earlier one in everything (--keep-duplicates keeps them)"
    removed = filters["removed"].items()
    return [
        f"{counted(counts['actions'], 'action') if name == 'duplicates' else _counts(counts)} {reasons[name]}"
        for name, counts in removed
        if counts["actions"]
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(counted(counts[f"{what}s"], what) for what in ("user", "item", "action"))


def _sides(description: Mapping[str, Any]) -> dict[str, str]:
    """How the tables of items and users fit the dataset."""
    lines = {}
    for what, counts in description["side_tables"].items():
        given = (description["source"] or {}).get(what)
        name, ids = given["name"] if given else f"the source's table of {what}", counts["ids"]
        if given or counts["matched"] < description[what]:
            lines[what] = f"{counts['matched']:,} of {description[what]:,} are in {name}, which has {ids:,}"
    return lines


def _span(times: Mapping[str, Any]) -> str:
    if unit := times["unit"]:
        dates = (str(np.datetime64(times[edge] // UNITS[unit], "s")) for edge in ("first", "last"))
        first, last = (date[:-3].replace("T", " ") for date in dates)
        return f"{first} to {last}, in {UNIT_NAMES[unit]}"
    return f"{times['first']} to {times['last']}: an order, but no dates"


def _features(features: list[Feature], schema: Schema, have_titles: bool) -> list[str]:
    if not features:
        return ["features  none but the item ids" + have_titles * " (--embed makes vectors of texts, such as titles)"]
    width, wide = (max(len(getattr(feature, of)) for feature in features) for of in ("name", "kind"))
    rows = [
        f"{f.name:{width}}  {f.kind:{max(wide, 6)}}  of {OWNERS[f.owner]:7}{_values(f, schema)}".rstrip()
        for f in features
    ]
    return [f"features  {rows[0]}", *(f"{'':10}{row}" for row in rows[1:])]


def _values(feature: Feature, schema: Schema) -> str:
    if feature.sparse:
        return f"  {counted(schema.table(feature.table).rows - 1, 'value')}"
    return f"  {counted(feature.width, 'number')} each" if feature.form.wide else ""


def _next(directory: Path) -> str:
    """The command that trains on the dataset, with its own recipe or else one that sizes itself."""
    for recipe in recipe_names():
        if load_recipe(recipe).data.path == place_of(directory):
            return f"logitmix train {recipe}"
    words = ["logitmix", "train", "auto", "--data.path", place_of(directory), "--run", f"runs/{directory.name}"]
    return shlex.join(words)
