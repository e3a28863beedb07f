"""`logitmix prepare`: raw files -> dataset directory.

One pass over the source codes users and items as integers. The conditions of --where follow, a stable sort by user and
time, the removal of exact duplicates, the item filter and the user filter (each once, not iterated to a k-core;
arrange.py), the features (features.py), and the writing. Sequences are not truncated here: a trainer takes the last
actions it wants. There is no Python object per action. What does not fit into --memory is in files (spool.py), and the
bytes of the dataset are the same.

The dataset appears at once and complete: it is written to a hidden directory beside the output, which is then renamed.
The same source and options give the same bytes.
"""

import shlex
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from logitmix.common.files import clean_up, naming, only_writer, whole_directory
from logitmix.common.messages import tell
from logitmix.common.plugins import named
from logitmix.common.storage import alone, fetch, fetch_names, push
from logitmix.modules.kinds.registry import kind_named
from logitmix.modules.kinds.text import NGRAMS, TextEncoder
from logitmix.modules.schema import Owner, Schema
from logitmix.trainer.data.append import append, read_for_appending, read_waiting
from logitmix.trainer.data.arrange import SHOWN, Ordered, arrange
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.dataset import encoders_of
from logitmix.trainer.data.description import WAITING, is_dataset
from logitmix.trainer.data.features import (
    Features,
    FeaturesOptions,
    RawColumn,
    apply_options,
    as_in_schema,
    embedded,
    make_features,
    name_features,
    read_schema,
    valid_name,
)
from logitmix.trainer.data.files import digests, plain
from logitmix.trainer.data.matching import match
from logitmix.trainer.data.raw import Actions, RawDataset, SideTable
from logitmix.trainer.data.registry import source_of
from logitmix.trainer.data.rejects import Rejects, TooManyRejects
from logitmix.trainer.data.repeats import are_common, highest_hit_rates, said_of_repeats
from logitmix.trainer.data.row_numbers import LEAST, name_each_row, numbers_the_rows
from logitmix.trainer.data.spool import Pieces, current, head, spooling, whole
from logitmix.trainer.data.times import said_of_outliers, unit_of
from logitmix.trainer.data.writer import DatasetContents, finish_dataset

FILTERS = ("where", "keep_duplicates", "shown", "min_item_actions", "min_user_actions")
TITLE = "title"
WHOLE = 30
"""Bytes for each action while a further column of the actions becomes a feature."""


class Engine(NamedTuple):
    """What does the work on the actions."""

    read: Callable[[PrepareOptions, Rejects, Progress], RawDataset]
    arrange: Callable[[Actions, PrepareOptions, Collection[str], Progress], Ordered]


def _read_source(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = source_of(options.name)
    assert source is not None
    return named(source.read)(options, rejects, progress)


class Known(NamedTuple):
    """The features of a dataset, to which actions are appended."""

    schema: Schema
    encoders: Mapping[str, TextEncoder]


THIS_PROCESS = Engine(_read_source, arrange)


def prepare(options: PrepareOptions, console: Console | None = None, engine: Engine = THIS_PROCESS) -> dict[str, Any]:
    """Writes the dataset at `options.directory` and returns the content of its dataset.json.

    Progress and malformed lines go to `console` (standard error).
    Raises ValueError with one line for anything wrong with the options or the source. Then nothing is left behind,
    except the list of malformed lines at `<out>.rejects.tsv` if these stopped the job. If the process is killed, `out`
    is as it was or complete, and the next job removes what is left beside it. While it runs, no other one can write
    `out`.
    """
    out = options.directory
    console = console or Console(stderr=True)
    _check_files(options)
    with only_writer(out), alone(out):
        fetch_names(out)
        clean_up(out)
        before = fetch(options.append) if options.append else None
        if before is None or before.resolve() != out.resolve():
            _check_out(out, options.overwrite)
        with whole_directory(out) as staging:
            if before is None:
                description = _prepare(staging, options, console, engine)
            else:
                description = _append(before, staging, options, console)
        push(out)
    return description


def _append(before: Path, staging: Path, options: PrepareOptions, console: Console) -> dict[str, Any]:
    """Fills the directory with a dataset and the actions that follow it, which are prepared by themselves at first."""
    later = staging / "later"
    known, schema = read_for_appending(before)
    if (was := (known.get("filters") or {}).get(SHOWN, [])) != list(options.shown):
        given = " ".join(f"--shown {shlex.quote(of)}" for of in was)
        raise ValueError(f"{before} was prepared {f'with {given}' if was else 'without --shown'}; append by the same")
    later.mkdir()
    features = Known(schema, encoders_of(before, schema))
    engine = THIS_PROCESS._replace(arrange=partial(arrange, waiting=read_waiting(before)))
    _prepare(later, replace(options, append=str(before), min_user_actions=0), console, engine, features)
    description, notes = append(before, known, schema, later, staging)
    shutil.rmtree(later)
    for note in notes:
        tell(console, note)
    return description


def _check_files(options: PrepareOptions) -> None:
    if options.source and not Path(options.source).exists():
        raise ValueError(f"no file or folder at {options.source}; give the downloaded file with --source")
    for setting in ("items", "users", "schema"):
        path = Path(getattr(options, setting))
        if getattr(options, setting) and not (path.is_file() if setting == "schema" else path.exists()):
            raise ValueError(f"no file at {path}; --{setting} must name one")


def _prepare(
    directory: Path, options: PrepareOptions, console: Console, engine: Engine, known: Known | None = None
) -> dict[str, Any]:
    """Fills the directory. With the features that are `known`, if there are such, and no others."""
    said, out = read_schema(options.schema), options.directory
    with closing(Rejects(directory / "rejects.tsv", options.max_rejects, console)) as rejects:
        try:
            with spooling(out, options.bytes_of_memory), _progress(console) as progress:
                raw = _read(options, rejects, progress, engine)
                return _write(directory, options, said, raw, rejects, console, progress, engine, known)
        except TooManyRejects as error:
            rejects.close()
            kept = out.with_name(out.name + ".rejects.tsv")
            rejects.path.replace(kept)
            raise ValueError(f"{error}; they are listed in {kept}") from None


def _progress(console: Console) -> Progress:
    # A log file would get one line for every bar.
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip


def _check_out(out: Path, overwrite: bool) -> None:
    if out.is_symlink():
        raise ValueError(f"{out} is a symbolic link; write to where it leads, or choose another --out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.is_dir() and is_dataset(out):
        if not overwrite:
            raise ValueError(
                f"there is a dataset at {out} already; replace it with --overwrite, or choose another --out"
            )
    elif out.exists():
        raise ValueError(f"{out} exists and is not only a dataset; choose another --out")


def _read(options: PrepareOptions, rejects: Rejects, progress: Progress, engine: Engine) -> RawDataset:
    raw = engine.read(options, rejects, progress)
    if not len(raw.actions.users) and not rejects.count:
        raise ValueError(f"{raw.source}: holds no actions; is it the right file?")
    rejects.finish()
    actions = raw.actions
    if actions.unit is None:
        actions.unit = unit_of(actions.timestamps.numbers(), actions.examples)
    if actions.unit and (said := said_of_outliers(actions.timestamps.numbers(), actions.unit, time())):
        column = options.timestamp_column
        rejects.say(
            f"column {column}: {said}; if they stand for no time, leave them out, by --where "
            f'"{column} >= 1980-01-01" --where "{column} < {date.today()}"'
        )
    return raw


def _write(
    directory: Path,
    options: PrepareOptions,
    said: FeaturesOptions,
    raw: RawDataset,
    rejects: Rejects,
    console: Console,
    progress: Progress,
    engine: Engine,
    known: Known | None,
) -> dict[str, Any]:
    read = raw.actions.counts()
    origin = raw.source and {"name": plain(raw.source.name), "sha256": digests(raw.source, raw.files)}
    for setting in ("items", "users", "schema"):
        if path := getattr(options, setting):
            origin = {**(origin or {}), setting: {"name": plain(Path(path).name), "sha256": digests(Path(path))}}
    read_ids = {"items": raw.actions.item_ids, "users": raw.actions.user_ids}
    ordered = engine.arrange(raw.actions, options, _leave_out_row_numbers(raw), progress)
    if options.shown and not known and not ordered.removed[SHOWN]["actions"]:
        raise ValueError(f"--shown {' or '.join(options.shown)}: no row fulfills this; correct it, or leave it out")
    spool = current()
    if raw.actions.columns and spool.in_files and WHOLE * len(ordered.items) > spool.budget:
        tell(
            console,
            "columns of the actions beside user, item and time are read whole, one after the other: each takes about "
            f"{WHOLE * len(ordered.items) / 2**30:.1f} GiB, more than --memory leaves",
        )
    sides, side_notes = _match(raw, read_ids, ordered, options)
    items, title = raw.items.of(ordered.item_ids), options.title_column
    titles = _titles(title, items.get(title), raw.actions.columns, ordered)
    # Titles are shown, and their words a feature only where that is stated.
    if title not in options.embedded_columns and not {valid_name(title), f"item_{title}"} & {
        *said.features,
        *(of.name for of in (known.schema.features if known else ())),
    }:
        items.pop(title, None)
    made = _features(raw, items, ordered, options, said, known)
    contents = DatasetContents(
        ordered.offsets,
        ordered.items,
        ordered.timestamps,
        ordered.item_ids,
        ordered.user_ids,
        titles,
        made.schema,
        made.columns,
        made.vocabularies,
        made.projections,
    )
    with naming(options.directory):
        counted = ordered.write(directory, contents)
        if ordered.waiting is not None:
            pq.write_table(ordered.waiting, directory / WAITING)
        description = finish_dataset(
            directory,
            contents,
            options.name,
            counted,
            filters={name: getattr(options, name) for name in FILTERS}
            | {"where": list(options.where), "shown": list(options.shown), "removed": ordered.removed},
            read=read,
            titles=0 if titles is None else len(titles) - titles.null_count,
            rejected_lines=rejects.count,
            side_tables=sides,
            times={"unit": raw.actions.unit or None} | ordered.times,
            source=origin,
            generator=raw.generator,
        )
    # Of actions that are appended, the histories are elsewhere.
    repeats = [] if known else _of_repeats(description["repeated_targets"])
    for note in (*ordered.notes, *side_notes, *_notes(made), *repeats):
        tell(console, note)
    return description


def _notes(made: Features) -> list[str]:
    """What a user may want to act on."""
    messages = list(made.notes)
    if made.unused:
        named: dict[str, list[str]] = {}
        for name, reason in made.unused.items():
            named.setdefault(reason, []).append(name)
        columns = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in named.items())
        messages.append(f"not used, unless --schema FILE states a kind: {columns}")
    return messages


def _of_repeats(repeated: Mapping[str, float]) -> list[str]:
    shares = said_of_repeats(repeated)
    if are_common(repeated):
        return [f"{shares} are in their user's history: evaluation will not leave it out of its ranking"]
    if limits := highest_hit_rates(repeated):
        return [f"{shares} are in their user's history, which evaluation leaves out of its ranking: {limits}"]
    return []


def _leave_out_row_numbers(raw: RawDataset) -> list[str]:
    """Lets no column that numbers the rows be a feature, unless a kind is stated; returns those of the actions."""
    of_owners = []
    for owner in (raw.actions, raw.items, raw.users):
        stated = {TITLE, *owner.kinds, *raw.kinds}
        found = [
            name
            for name, of in owner.columns.items()
            # Most columns are told from their start.
            if name not in stated and numbers_the_rows(name, head(of, LEAST)) and numbers_the_rows(name, whole(of))
        ]
        owner.kinds.update(dict.fromkeys(found))
        of_owners.append(found)
    return of_owners[0]


def _match(
    raw: RawDataset, read: Mapping[str, pa.StringArray], ordered: Ordered, options: PrepareOptions
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """How the tables of items and users fit the ids that were read and those that are kept."""
    found: dict[str, dict[str, int]] = {}
    notes: list[str] = []
    for what, table, kept in (("items", raw.items, ordered.item_ids), ("users", raw.users, ordered.user_ids)):
        given = bool(getattr(options, what))
        name = Path(getattr(options, what)).name if given else f"the source's table of {what}"
        if given or len(table.ids):
            found[what], few = match(what, name, table.ids, read[what], kept, given)
            notes += filter(None, [few, table.contradictions(name)])
    return found, notes


def _features(
    raw: RawDataset,
    items: dict[str, pa.Array],
    ordered: Ordered,
    options: PrepareOptions,
    said: FeaturesOptions,
    known: Known | None,
) -> Features:
    """Features of the columns of items, which are in the order of the dataset, and of the source's users and
    actions."""
    given: dict[Owner, Mapping[str, Any]] = {"item": items, "user": raw.users.of(ordered.user_ids)}
    of_actions = {name: partial(ordered.column, name) for name in raw.actions.columns}
    if options.shown:
        if SHOWN in raw.actions.columns:
            raise ValueError(
                f"--shown makes a column {SHOWN}, and the actions have one; rename it, or leave --shown out"
            )
        of_actions[SHOWN] = partial(ordered.column, SHOWN)
        raw.actions.kinds[SHOWN] = "ids"
    given["event"] = of_actions

    def of_owner(column: RawColumn, owner: Owner) -> pa.Array:
        # Any later action of a user may be the held-out target, so only the first one counts, even if it has no value.
        return ordered.of_users(column.source) if owner == "user" else ordered.of_items(column.source, "first")

    def names_each_row(column: RawColumn) -> bool:
        if column.owner == "event":
            return ordered.names_each_row(column.name)
        return name_each_row(column.name, column.values)

    tables: Mapping[Owner, SideTable | Actions] = {"item": raw.items, "user": raw.users, "event": raw.actions}
    found = []
    for owner, of in given.items():
        kinds = {**raw.kinds, **tables[owner].kinds}
        for name, values in of.items():
            counts = ordered.counts(name) if owner == "event" else None
            column = RawColumn(name, owner, values, kinds.get(name), counts=counts, source=name)
            infer = kinds[name] is not None if name in kinds else not names_each_row(column)
            found.append(replace(column, infer=infer))
    unit, notes = raw.actions.unit or "", list[str]()
    names = name_features(found, known.schema.features if known else ())
    title = options.title_column if options.title_column in raw.items.columns else ""
    said = embedded(said, names, options.embedded_columns, title)
    chosen = apply_options(names, said, options.schema, of_owner, unit)
    if options.embed_with != NGRAMS and not any(of.kind and kind_named(of.kind).of_texts for of in chosen):
        raise ValueError(f"--embed-with: {options.schema} has no kind text; name columns with --embed")
    if known:
        chosen, notes = as_in_schema(chosen, known.schema, known.encoders, of_owner)
    try:
        made = make_features(chosen, ordered.item_ids, _keep, unit, options.embed_with)
        return replace(made, notes=[*notes, *made.notes])
    except ValueError as error:
        # A kind that is stated, or that of the dataset before, may not fit its column.
        of_values = str(error).startswith("feature ")
        where = options.schema if not known else Path(options.source).name if of_values else ""
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def _keep(values: np.ndarray) -> Any:
    """In the spool."""
    made = Pieces()
    made.extend(values)
    return made


def _titles(
    name: str, of_items: pa.Array | None, of_actions: dict[str, Pieces], ordered: Ordered
) -> pa.StringArray | None:
    """Titles from the table of items, else from the item's last action that has one."""
    known = [titles_of("items", of_items)] if of_items is not None else []
    if name in of_actions:
        # As text only once there is one for each item: the texts of all actions may take far more than these do.
        last = ordered.of_items(name, "last")
        del of_actions[name]
        known.append(titles_of("actions", last))
    return pc.coalesce(*(pc.if_else(pc.equal(texts, ""), None, texts) for texts in known)) if known else None


def titles_of(owner: str, values: pa.Array) -> pa.StringArray:
    """The column title of some owner as text; ValueError if it cannot be that."""
    try:
        return values.cast(pa.string())
    except pa.ArrowException:
        raise ValueError(f"column title of the {owner} is of type {values.type}, not text; rename it") from None
