"""`logitmix prepare`: raw files -> dataset directory.

A source reads the files into a table of actions and tables of items and users (tables.py). number.py chooses, filters
and numbers the actions, features.py makes features of the columns, and writer.py writes sequences/ in order. Sequences
are not truncated here: a trainer takes the last actions it wants. DuckDB works within --memory and spills into a folder
beside the output; the bytes of the dataset are the same whatever the memory.

The dataset appears at once and complete: it is written to a hidden directory beside the output, which is then renamed.
The same source and options give the same bytes.
"""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from logitmix.common.files import clean_up, held_alone, naming, only_writer, staging_path, whole_directory
from logitmix.common.mappings import counted, first_line
from logitmix.common.messages import tell
from logitmix.common.plugins import named
from logitmix.common.storage import alone, fetch, fetch_names, push
from logitmix.modules.schema import Owner
from logitmix.trainer.data.arrow import is_list
from logitmix.trainer.data.dataset import encoders_of
from logitmix.trainer.data.description import APPENDED, WAITING, is_dataset
from logitmix.trainer.data.engine import Duck
from logitmix.trainer.data.writer import DatasetContents, PartWriter, finish_dataset
from logitmix.trainer.prepare.append import append, read_for_appending, read_waiting
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.features import (
    Features,
    FeaturesOptions,
    Known,
    RawColumn,
    apply_options,
    embedded,
    is_present,
    make_features,
    name_features,
    read_schema,
    valid_name,
)
from logitmix.trainer.prepare.files import digests, plain
from logitmix.trainer.prepare.matching import match
from logitmix.trainer.prepare.number import KEPT_ORDER, SHOWN, Numbered, number
from logitmix.trainer.prepare.registry import source_of
from logitmix.trainer.prepare.rejects import Rejects, TooManyRejects
from logitmix.trainer.prepare.row_numbers import name_each_row, numbering, numbers_a_table
from logitmix.trainer.prepare.tables import Job, SideTable

FILTERS = ("where", "keep_duplicates", "shown", "min_item_actions", "min_user_actions")
TITLE = "title"
FOR_DUCK, LEAST = 0.6, 128 << 20
"""Share of --memory that DuckDB may take, and the bytes that it needs at the least. The rest is for blocks of files,
ids and what is written."""


def prepare(options: PrepareOptions, console: Console | None = None, job: type[Job] = Job) -> dict[str, Any]:
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
            description = (
                _append(before, staging, options, console) if before else _prepare(staging, options, console, job)
            )
        push(out)
    return description


def _append(before: Path, staging: Path, options: PrepareOptions, console: Console) -> dict[str, Any]:
    """Fills the directory with a dataset and the actions that follow it, which are prepared by themselves at first."""
    later = staging / "later"
    description, schema = read_for_appending(before)
    if (was := (description.get("filters") or {}).get(SHOWN, [])) != list(options.shown):
        given = " ".join(f"--shown {shlex.quote(of)}" for of in was)
        raise ValueError(f"{before} was prepared {f'with {given}' if was else 'without --shown'}; append by the same")
    later.mkdir()
    given_again = replace(options, append=str(before), min_user_actions=0)
    known = Known(schema, encoders_of(before, schema))
    made = _prepare(later, given_again, console, Job, known, read_waiting(before))
    description = append(before, description, schema, later, staging)
    shutil.rmtree(later)
    new = description[APPENDED][-1]
    there = {what: made[f"{what}s"] - new[f"{what}s"] for what in ("item", "user") if schema.of(what)}
    if said := " and ".join(counted(count, what) for what, count in there.items() if count):
        tell(console, f"in the dataset already: {said}; what it says of them stays")
    return description


def _check_files(options: PrepareOptions) -> None:
    for setting in ("source", "items", "users", "schema"):
        path = Path(getattr(options, setting))
        if getattr(options, setting) and not (path.is_file() if setting == "schema" else path.exists()):
            what = "file" if setting == "schema" else "file or folder"
            raise ValueError(f"no {what} at {path}; --{setting} must name one")


def _prepare(
    directory: Path,
    options: PrepareOptions,
    console: Console,
    make: type[Job],
    known: Known | None = None,
    waiting: pa.Table | None = None,
) -> dict[str, Any]:
    """Fills the directory. With the features that are `known`, if there are such, and no others; `waiting` as in
    Numbered."""
    stated, out = read_schema(options.schema), options.directory
    with closing(Rejects(directory / "rejects.tsv", options.max_rejects, console)) as rejects:
        try:
            with database(out, options.bytes_of_memory) as duck, _progress(console) as progress:
                job = make(options, duck, rejects, progress)
                return _write(directory, job, _read(job, waiting), stated, console, known)
        except TooManyRejects as error:
            rejects.close()
            kept = out.with_name(out.name + ".rejects.tsv")
            rejects.path.replace(kept)
            raise ValueError(f"{error}; they are listed in {kept}") from None


@contextmanager
def database(out: Path, memory: int) -> Iterator[Duck]:
    """A database whose files are in a hidden folder beside the output, until it is closed."""
    folder = staging_path(out)
    folder.mkdir(parents=True)
    with held_alone(folder):
        duck = Duck(max(int(FOR_DUCK * memory), LEAST), folder)
        try:
            yield duck
        except duckdb.OutOfMemoryException:
            raise ValueError(
                f"--memory {memory >> 20} MiB is too little for this source; give more, or leave it out"
            ) from None
        except duckdb.IOException as error:
            raise ValueError(
                f"{folder.parent}: the actions do not fit into --memory, nor on this disk ({first_line(error)}); free "
                "some of it, or give more --memory"
            ) from None
        finally:
            duck.close()
            shutil.rmtree(folder, ignore_errors=True)


def _progress(console: Console) -> Progress:
    # A log file would get one line for every bar.
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip


def _check_out(out: Path, overwrite: bool) -> None:
    if out.is_dir() and not out.is_symlink():
        if not any(out.iterdir()) or (overwrite and is_dataset(out)):
            return
        if is_dataset(out):
            raise ValueError(
                f"there is a dataset at {out} already; replace it with --overwrite, or choose another --out"
            )
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists and is not only a dataset; choose another --out")


def _read(job: Job, waiting: pa.Table | None) -> Numbered:
    """The source's actions, numbered. ValueError if there are none."""
    source = source_of(job.options.name)
    assert source is not None
    named(source.read)(job)
    actions = job.actions
    if not job.duck.row("select count(*) from rows")[0] and not job.rejects.count:
        raise ValueError(f"{job.source}: holds no actions; is it the right file?")
    job.rejects.finish()
    column, owners = job.options.title_column, (job.items, actions)
    if column != TITLE and not any(column in owner.columns for owner in owners):
        there = ", ".join(name for owner in owners for name in owner.columns)
        raise ValueError(f"--title-column: no column {column!r} of the items or the actions; there are: {there}")
    # What is stated to be ids but hardly has a value twice, such as addresses, is none.
    for table in (job.items, job.users):
        for name, of in table.columns.items():
            is_id, stated = table.kinds.get(name) == "id", name in {TITLE, *table.kinds, *job.kinds}
            if 2 * len(of.unique()) > len(of) if is_id else not stated and numbers_a_table(name, of):
                table.kinds[name] = None
    for name, key in actions.columns.items():
        several = f"select 2 * count(distinct {key}) > count(*) from rows"
        if actions.kinds.get(name) == "id" and job.duck.row(several)[0]:
            actions.kinds[name] = None
    unused = numbering(job.duck, actions.columns, {TITLE, *actions.kinds, *job.kinds})
    actions.kinds.update(dict.fromkeys(unused))
    return number(job.duck, job, unused, waiting)


def _write(
    directory: Path,
    job: Job,
    numbered: Numbered,
    stated: FeaturesOptions,
    console: Console,
    known: Known | None,
) -> dict[str, Any]:
    options = job.options
    origin = job.source and {"name": plain(job.source.name), "sha256": digests(job.source, job.files)}
    for setting in ("items", "users", "schema"):
        if path := getattr(options, setting):
            origin = {**(origin or {}), setting: {"name": plain(Path(path).name), "sha256": digests(Path(path))}}
    if options.shown and not known and not numbered.removed[SHOWN]["actions"]:
        raise ValueError(f"--shown {' or '.join(options.shown)}: no row fulfills this; correct it, or leave it out")
    sides, side_notes = _match(job, numbered)
    items, title = job.items.of(numbered.item_ids), options.title_column
    titles = _titles(job, items.get(title), numbered)
    # Titles are shown, and their words a feature only where that is stated.
    if title not in options.embedded_columns and not {valid_name(title), f"item_{title}"} & {
        *stated.features,
        *(known.options().features if known else ()),
    }:
        items.pop(title, None)
    made, events = _features(job, items, numbered, stated, known)
    schema, columns = made.schema, made.columns
    users = {of.name: columns[of.name] for of in schema.of("user")}
    keys = {of.name: (*numbered.keys(events[of.name]), columns[of.name]) for of in schema.of("event")}
    writer = PartWriter(directory, schema, numbered.user_ids, users, keys)
    none = np.empty(0, np.int64)
    contents = DatasetContents(
        none, none, none, numbered.item_ids, None, titles, schema, columns, made.vocabularies, made.projections
    )
    with naming(options.directory):
        written = job.write(writer, numbered.kept, KEPT_ORDER)
        if numbered.waiting is not None:
            pq.write_table(numbered.waiting, directory / WAITING)
        description = finish_dataset(
            directory,
            contents,
            options.name,
            len(numbered.user_ids),
            written.entries(),
            filters={name: getattr(options, name) for name in FILTERS}
            | {"where": list(options.where), "shown": list(options.shown), "removed": numbered.removed},
            read=numbered.read,
            titles=0 if titles is None else len(titles) - titles.null_count,
            rejected_lines=job.rejects.count,
            side_tables=sides,
            times={"unit": job.actions.unit or None} | written.times(),
            source=origin,
            generator=job.generator,
        )
    notes = [*side_notes, *made.notes]
    if made.unused:
        named = dict[str, list[str]]()
        for name, reason in made.unused.items():
            named.setdefault(reason, []).append(name)
        unused = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in named.items())
        notes.append(f"not used, unless --schema FILE states a kind: {unused}")
    if numbered.waiting is not None and len(numbered.waiting):
        rows = f"{len(numbered.waiting):,} rows wait for an action of their user that is kept"
        notes.insert(0, f"--shown: {rows}; --append may bring it")
    for note in notes:
        tell(console, note)
    return description


def _match(job: Job, numbered: Numbered) -> tuple[dict[str, dict[str, int]], list[str]]:
    """How the tables of items and users fit the ids that were read and those that are kept."""
    found: dict[str, dict[str, int]] = {}
    notes: list[str] = []
    for what, table, kept in (("items", job.items, numbered.item_ids), ("users", job.users, numbered.user_ids)):
        given = bool(getattr(job.options, what))
        name = Path(getattr(job.options, what)).name if given else f"the source's table of {what}"
        if given or len(table.ids):
            found[what], few = match(what, name, table.ids, numbered.read_ids[what], kept, given)
            notes += filter(None, [few, table.repeated(name)])
    return found, notes


def _features(
    job: Job, items: dict[str, pa.Array], numbered: Numbered, stated: FeaturesOptions, known: Known | None
) -> tuple[Features, dict[str, str]]:
    """Features of the columns of items, which are in the order of the dataset, and of the source's users and actions;
    and for each of the actions, the name of its column."""
    options, actions, unit = job.options, job.actions, job.actions.unit
    found, notes = list[RawColumn](), list[str]()
    sides: list[tuple[Owner, SideTable, dict[str, pa.Array]]] = [
        ("item", job.items, items),
        ("user", job.users, job.users.of(numbered.user_ids)),
    ]
    for owner, table, columns in sides:
        kinds = {**job.kinds, **table.kinds}
        for name, values in columns.items():
            kind = kinds[name] if name in kinds else None if name_each_row(name, values) else "auto"
            found.append(RawColumn(name, owner, values, kind, source=name))
    kinds = {**job.kinds, **actions.kinds, **({SHOWN: "ids"} if options.shown else {})}
    for name in numbered.columns:
        if name != options.title_column and name not in actions.unread:
            kind = kinds[name] if name in kinds else None if _names_each_action(numbered, name) else "auto"
            found.append(RawColumn(name, "event", partial(numbered.values, name), kind, source=name))

    def of_owner(column: RawColumn, owner: Owner) -> pa.Array:
        values = numbered.all_values(column.source)
        # Any later action of a user may be the held-out target, so only the first one counts, even if it has no value.
        keys = (
            numbered.of_users(column.source)
            if owner == "user"
            else numbered.of_items(column.source, is_present(values))
        )
        return values.take(pa.array(keys, mask=keys < 0))

    names = name_features(found, known.schema.features if known else ())
    title = [options.title_column] if options.title_column in job.items.columns else []
    stated = embedded(stated, names, options.embedded_columns, title)
    if known:
        given, stated, there = stated.features, known.options(), [of.name for of in names]
        for name, of in stated.features.items():
            if name in given:  # which texts are missing values is not a part of the dataset
                stated.features[name] = replace(of, missing=given[name].missing)
        others = [name for name in there if name not in stated.features]
        missing = [name for name in stated.features if name not in there]
        names = [of for of in names if of.name in stated.features]
        stated = FeaturesOptions({name: of for name, of in stated.features.items() if name in there})
        notes += [f"not used, as the dataset has no such features: {', '.join(others)}"] if others else []
        notes += [f"missing values, as there are no such columns: {', '.join(missing)}"] if missing else []
    chosen = apply_options(names, stated, options.schema, of_owner, unit)
    try:
        made = make_features(chosen, numbered.item_ids, unit, options.embed_with, known)
    except ValueError as error:
        # A kind that is stated, or that of the dataset before, may not fit its column.
        of_values = str(error).startswith("feature ")
        where = options.schema if not known else Path(options.source).name if of_values else ""
        raise ValueError(f"{where}: {error}" if where else str(error)) from None
    unread = job.items.unread | job.users.unread | actions.unread
    made = replace(made, notes=[*notes, *made.notes], unused={} if known else made.unused | unread)
    return made, {of.name: of.source for of in chosen if of.owner == "event"}


def _names_each_action(numbered: Numbered, name: str) -> bool:
    values, counts = numbered.values(name)
    there = np.asarray(values.is_valid())
    count = int(counts[there].sum())
    return name_each_row(name, values, count)


def _titles(job: Job, of_items: pa.Array | None, numbered: Numbered) -> pa.Array | None:
    """Titles from the table of items, else from the item's last action that has one."""
    name = job.options.title_column
    known = []
    if of_items is not None:
        known.append(titles_of("items", of_items, job.items.kinds.get(name)))
    if name in numbered.columns:
        values = numbered.all_values(name)
        keys = numbered.of_items(name, is_present(values), last=True)
        known.append(titles_of("actions", values.take(pa.array(keys, mask=keys < 0)), job.actions.kinds.get(name)))
    return pc.coalesce(*(pc.if_else(pc.equal(texts, ""), None, texts) for texts in known)) if known else None


def titles_of(owner: str, values: pa.Array, kind: str | None = None) -> pa.Array:
    """The column title of some owner as text, which a sequence of tokens is not yet; ValueError if it cannot be that.
    `kind`: that which the file states."""
    try:
        return pc.binary_join(values, " ") if kind == "ids" and is_list(values.type) else values.cast(pa.string())
    except pa.ArrowException:
        raise ValueError(f"column title of the {owner} is of type {values.type}, not text; rename it") from None
