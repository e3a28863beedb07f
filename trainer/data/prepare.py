"""`logitmix prepare`: raw files -> dataset directory.

One pass over the source codes users and items as integers. The conditions of --where follow, a stable sort by user and
time, the removal of exact duplicates, the item filter and the user filter (each once, not iterated to a k-core), the
features (features.py), and the writing. Sequences are not truncated here: a trainer takes the last actions it wants.
Memory peaks at about 60 bytes an action and 15 for each further column of the actions, plus every distinct raw id
(about 150 bytes each) and one block of the file; there is no Python object per action.

The dataset appears at once and complete: it is written to a hidden directory beside the output, which is then renamed.
The same source and options give the same bytes.
"""

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from logitmix.common.files import clean_up, naming, whole_directory
from logitmix.common.messages import tell
from logitmix.common.plugins import named
from logitmix.common.storage import alone, fetch_names, push
from logitmix.modules.schema import Owner
from logitmix.trainer.data.arrow import codes_of, order_of_texts
from logitmix.trainer.data.columns import ranges
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.description import is_dataset
from logitmix.trainer.data.features import (
    Features,
    FeaturesOptions,
    RawColumn,
    apply_options,
    make_features,
    name_features,
    read_schema,
    values_of_items,
)
from logitmix.trainer.data.files import digests, plain
from logitmix.trainer.data.matching import match
from logitmix.trainer.data.raw import Actions, RawDataset, SideTable
from logitmix.trainer.data.registry import source_of
from logitmix.trainer.data.rejects import Rejects, TooManyRejects
from logitmix.trainer.data.repeats import are_common, highest_hit_rates, said_of_repeats
from logitmix.trainer.data.row_numbers import name_each_row, numbers_the_rows
from logitmix.trainer.data.times import unit_of
from logitmix.trainer.data.where import holds
from logitmix.trainer.data.writer import DatasetContents, write_dataset

FILTERS = ("where", "keep_duplicates", "min_item_actions", "min_user_actions", "min_feature_count")
STEPS = ("where", "duplicates", "min_item_actions", "min_user_actions")
TITLE = "title"


def prepare(options: PrepareOptions, console: Console | None = None) -> dict[str, Any]:
    """Writes the dataset at `options.directory` and returns the content of its dataset.json.

    Progress and malformed lines go to `console` (standard error).
    Raises ValueError with one line for anything wrong with the options or the source. Then nothing is left behind,
    except the list of malformed lines at `<out>.rejects.tsv` if these stopped the job. If the process is killed, `out`
    is as it was or complete, and the next job removes what is left beside it.
    """
    out = options.directory
    with alone(out):
        fetch_names(out)
        description = _prepare(options, console or Console(stderr=True))
        push(out)
    return description


def _prepare(options: PrepareOptions, console: Console) -> dict[str, Any]:
    out = options.directory
    clean_up(out)
    _check_out(out, options.overwrite)
    if options.source and not Path(options.source).exists():
        raise ValueError(f"no file or folder at {options.source}; give the downloaded file with --source")
    for setting in ("items", "users", "schema"):
        path = Path(getattr(options, setting))
        if getattr(options, setting) and not (path.is_file() if setting == "schema" else path.exists()):
            raise ValueError(f"no file at {path}; --{setting} must name one")
    said = read_schema(options.schema)
    with (
        whole_directory(out) as staging,
        closing(Rejects(staging / "rejects.tsv", options.max_rejects, console)) as rejects,
    ):
        try:
            with _progress(console) as progress:
                raw = _read(options, rejects, progress)
                return _write(staging, options, said, raw, rejects, console)
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


def _read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = source_of(options.name)
    assert source is not None
    raw: RawDataset = named(source.read)(options, rejects, progress)
    if not len(raw.actions.users) and not rejects.count:
        raise ValueError(f"{raw.source}: holds no actions; is it the right file?")
    rejects.finish()
    actions = raw.actions
    if actions.unit is None:
        actions.unit = unit_of(actions.timestamps, actions.examples)
    return raw


def _write(
    directory: Path, options: PrepareOptions, said: FeaturesOptions, raw: RawDataset, rejects: Rejects, console: Console
) -> dict[str, Any]:
    read = raw.actions.counts()
    origin = raw.source and {"name": plain(raw.source.name), "sha256": digests(raw.source, raw.files)}
    for setting in ("items", "users", "schema"):
        if path := getattr(options, setting):
            origin = {**(origin or {}), setting: {"name": plain(Path(path).name), "sha256": digests(Path(path))}}
    read_ids = {"items": raw.actions.item_ids, "users": raw.actions.user_ids}
    ordered = _arrange(raw.actions, options, _leave_out_row_numbers(raw))
    sides, side_notes = _match(raw, read_ids, ordered, options)
    items, title = raw.items.of(ordered.item_ids), options.title_column
    titles = _titles(items.pop(title, None), raw.actions.columns.pop(title, None), ordered)
    made = _features(raw, items, ordered, options, said)
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
    )
    with naming(options.directory):
        description = write_dataset(
            directory,
            contents,
            options.name,
            filters={name: getattr(options, name) for name in FILTERS}
            | {"where": list(options.where), "removed": ordered.removed},
            read=read,
            titles=0 if titles is None else len(titles) - titles.null_count,
            rejected_lines=rejects.count,
            side_tables=sides,
            times={"unit": raw.actions.unit or None} | ordered.times,
            source=origin,
            generator=raw.generator,
        )
    for note in (*ordered.notes, *side_notes, *_notes(made, description["repeated_targets"])):
        tell(console, note)
    return description


def _notes(made: Features, repeated: Mapping[str, float]) -> list[str]:
    """What a user may want to act on."""
    messages = list(made.notes)
    if made.unused:
        named: dict[str, list[str]] = {}
        for name, reason in made.unused.items():
            named.setdefault(reason, []).append(name)
        columns = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in named.items())
        messages.append(f"not used, unless --schema FILE states a kind: {columns}")
    shares = said_of_repeats(repeated)
    if are_common(repeated):
        messages.append(f"{shares} are in their user's history: evaluation will not leave it out of its ranking")
    elif limits := highest_hit_rates(repeated):
        messages.append(f"{shares} are in their user's history, which evaluation leaves out of its ranking: {limits}")
    return messages


@dataclass(frozen=True, eq=False)
class _Ordered:
    """The actions that are kept, ordered by user, then time; items by index."""

    offsets: np.ndarray
    """int64 [users + 1]."""
    items: np.ndarray
    timestamps: np.ndarray
    rows: np.ndarray
    """The places of the actions in the source, if it has more columns of them; otherwise empty."""
    user_ids: pa.StringArray
    item_ids: pa.StringArray
    removed: dict[str, dict[str, int]]
    """By filter: users, items and actions that it left out."""
    notes: list[str]
    """What a user may want to know of it."""
    times: dict[str, int]
    """The first and the last time; how many actions have that of another one of their user, and of how many users the
    last action does."""


def _leave_out_row_numbers(raw: RawDataset) -> list[str]:
    """Lets no column that numbers the rows be a feature, unless a kind is stated; returns those of the actions."""
    of_owners = []
    for owner in (raw.actions, raw.items, raw.users):
        stated = {TITLE, *owner.kinds, *raw.kinds}
        found = [name for name, of in owner.columns.items() if name not in stated and numbers_the_rows(name, of)]
        owner.kinds.update(dict.fromkeys(found))
        of_owners.append(found)
    return of_owners[0]


def _arrange(actions: Actions, options: PrepareOptions, numbering: Collection[str]) -> _Ordered:
    """Filters, numbers and sorts. Takes the arrays out of `actions`, to free each as soon as possible. Actions that
    differ only in the columns `numbering` are duplicates."""
    read = actions.counts()
    rows = _sorted(actions, _chosen(actions, options))
    users, items, timestamps = (values[rows] for values in (actions.users, actions.items, actions.timestamps))
    nanoseconds = None if actions.nanoseconds is None else actions.nanoseconds[rows]
    actions.users = actions.items = actions.timestamps = np.empty(0)
    actions.nanoseconds = None
    repeated, others = np.empty(0, np.int64), 0
    if not options.keep_duplicates:
        columns = {name: values for name, values in actions.columns.items() if name not in numbering}
        repeated, others = _duplicates(users, items, timestamps, nanoseconds, rows, columns)
    there, removed = _filter(users, items, repeated, read, options)
    user_kept = np.bincount(users[there], minlength=read["users"]) > 0
    user_order = _order_of_ids(actions.user_ids, user_kept)
    item_order = _order_of_ids(actions.item_ids, np.bincount(items[there], minlength=read["items"]) > 0)
    ranks = np.empty(read["items"], np.int32)
    ranks[item_order] = np.arange(len(item_order))
    places, offsets = _regrouped(np.flatnonzero(there), users[there], user_order, read["users"])
    return _Ordered(
        offsets,
        ranks[items[places]],
        timestamps[places],
        rows[places] if actions.columns else np.empty(0, np.int64),
        actions.user_ids.take(pa.array(user_order)),
        actions.item_ids.take(pa.array(item_order)),
        removed,
        [_of_others(others)] if others else [],
        _span(users[there], timestamps[there], None if nanoseconds is None else nanoseconds[there]),
    )


def _span(users: np.ndarray, timestamps: np.ndarray, nanoseconds: np.ndarray | None) -> dict[str, int]:
    """Of actions sorted by user and time."""
    tied = _tied(users, timestamps, nanoseconds)
    last = np.append(users[1:] != users[:-1], True)
    with_another = np.append(tied, False) | np.concatenate(([False], tied))
    return {
        "first": int(timestamps.min()),
        "last": int(timestamps.max()),
        "tied_actions": int(with_another.sum()),
        "users_that_end_tied": int(with_another[last].sum()),
    }


def _tied(users: np.ndarray, timestamps: np.ndarray, nanoseconds: np.ndarray | None) -> np.ndarray:
    """bool [actions - 1]: which actions, sorted by user and time, the next one ties with."""
    tied = (users[1:] == users[:-1]) & (timestamps[1:] == timestamps[:-1])
    return tied if nanoseconds is None else tied & (nanoseconds[1:] == nanoseconds[:-1])


def _sorted(actions: Actions, chosen: np.ndarray) -> np.ndarray:
    """The rows of the chosen actions by user, in the order of their codes, then time; otherwise in file order."""
    nanoseconds = () if actions.nanoseconds is None else (actions.nanoseconds,)
    keys = (*nanoseconds, actions.timestamps, actions.users)
    if chosen.all():
        return np.lexsort(keys)
    rows = np.flatnonzero(chosen)
    return rows[np.lexsort([key[rows] for key in keys])]


def _regrouped(
    places: np.ndarray, users: np.ndarray, user_order: np.ndarray, codes: int
) -> tuple[np.ndarray, np.ndarray]:
    """`places` of actions, which are by user in the order of codes, with the users in another order; and the offsets of
    these."""
    counts = np.bincount(users, minlength=codes)
    starts, lengths = (np.cumsum(counts) - counts)[user_order], counts[user_order]
    return places[ranges(starts, lengths)], np.concatenate(([0], np.cumsum(lengths)))


def _filter(
    users: np.ndarray, items: np.ndarray, repeated: np.ndarray, read: Mapping[str, int], options: PrepareOptions
) -> tuple[np.ndarray, dict[str, dict[str, int]]]:
    """Which of the chosen actions [chosen] are kept, and what each filter removed of those that were read."""
    there = np.ones(len(users), bool)
    counts = [dict(read), _counts(users, items, there)]

    def leave_out(condition: np.ndarray) -> None:
        before = np.count_nonzero(there)
        there[condition] = False
        counts.append(counts[-1] if np.count_nonzero(there) == before else _counts(users, items, there))

    leave_out(repeated)
    often = np.bincount(items[there], minlength=read["items"]) >= options.min_item_actions
    leave_out(~often[items])
    fewest = max(options.min_user_actions, 1)
    active = np.bincount(users[there], minlength=read["users"]) >= fewest
    if not active.any():
        duplicates = f", without {len(repeated):,} exact duplicates" if len(repeated) else ""
        raise ValueError(
            f"no user has {fewest} or more actions (there were {counts[2]['users']:,} users with "
            f"{counts[2]['actions']:,} actions{duplicates}); lower --min-user-actions or --min-item-actions"
        )
    leave_out(~active[users])
    removed = {
        name: {of: was[of] - now[of] for of in read} for name, (was, now) in zip(STEPS, pairwise(counts), strict=True)
    }
    return there, removed


def _duplicates(
    users: np.ndarray,
    items: np.ndarray,
    timestamps: np.ndarray,
    nanoseconds: np.ndarray | None,
    rows: np.ndarray,
    columns: Mapping[str, pa.Array],
) -> tuple[np.ndarray, int]:
    """Of actions sorted by user and time, the places of those that an earlier row is equal to in everything; and how
    many are equal to one in user, item and time alone."""
    tied = _tied(users, timestamps, nanoseconds)
    if not tied.any():
        return np.empty(0, np.int64), 0
    moment = np.concatenate(([0], np.cumsum(~tied)))
    places = np.flatnonzero(np.append(tied, False) | np.concatenate(([False], tied)))
    # Sorts are stable, so that of equal actions the first one in the file stays.
    places, again = _alike(places, (items[places], moment[places]))
    if not columns or not len(places):
        return places[again], 0
    keys = [codes_of(column.take(pa.array(rows[places]))) for column in columns.values()]
    equal, repeated = _alike(places, (*keys, items[places], moment[places]))
    return equal[repeated], int(again.sum() - repeated.sum())


def _alike(places: np.ndarray, keys: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The places whose keys are those of another, with equal ones side by side; and which of them are not the first of
    their kind."""
    order = np.lexsort(keys)
    same = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    shared = np.append(same, False) | np.concatenate(([False], same))
    return places[order][shared], np.concatenate(([False], same))[shared]


def _of_others(count: int) -> str:
    one = count == 1
    return (
        f"{count:,} action{' has' if one else 's have'} the user, item and time of another, but not its other values: "
        f"{'it is' if one else 'they are'} kept"
    )


def _match(
    raw: RawDataset, read: Mapping[str, pa.StringArray], ordered: _Ordered, options: PrepareOptions
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
    ordered: _Ordered,
    options: PrepareOptions,
    said: FeaturesOptions,
) -> Features:
    """Features of the columns of items, which are in the order of the dataset, and of the source's users and
    actions."""
    known: dict[Owner, dict[str, pa.Array]] = {"item": items, "user": raw.users.of(ordered.user_ids)}
    columns = raw.actions.columns
    known["event"] = {name: columns.pop(name).take(pa.array(ordered.rows)) for name in list(columns)}

    def of_owner(values: pa.Array, owner: Owner) -> pa.Array:
        if owner == "user":
            # Any later action may be the held-out target, so only the first one counts, even if it has no value.
            return values.take(pa.array(ordered.offsets[:-1]))
        return values_of_items(values, ordered.items, ordered.timestamps, len(ordered.item_ids), "first")

    tables: Mapping[Owner, SideTable | Actions] = {"item": raw.items, "user": raw.users, "event": raw.actions}
    found = []
    for owner, of in known.items():
        kinds = {**raw.kinds, **tables[owner].kinds}
        times = ordered.timestamps if owner == "event" else None
        for name, values in of.items():
            infer = kinds[name] is not None if name in kinds else not name_each_row(name, values, times)
            found.append(RawColumn(name, owner, values, kinds.get(name), infer=infer))
    chosen = apply_options(name_features(found), said, options.schema, of_owner)
    try:
        return make_features(chosen, ordered.item_ids, options.min_feature_count)
    except ValueError as error:
        # A stated kind may not fit its column.
        raise ValueError(f"{options.schema}: {error}" if options.schema else str(error)) from None


def _titles(of_items: pa.Array | None, of_actions: pa.Array | None, ordered: _Ordered) -> pa.StringArray | None:
    """Titles from the table of items, else from the item's last action that has one."""
    known = [titles_of("items", of_items)] if of_items is not None else []
    if of_actions is not None:
        # As text only once there is one for each item: the texts of all actions may take far more than these do.
        titles = of_actions.take(pa.array(ordered.rows))
        last = values_of_items(titles, ordered.items, ordered.timestamps, len(ordered.item_ids), "last")
        known.append(titles_of("actions", last))
    return pc.coalesce(*(pc.if_else(pc.equal(texts, ""), None, texts) for texts in known)) if known else None


def titles_of(owner: str, values: pa.Array) -> pa.StringArray:
    """The column title of some owner as text; ValueError if it cannot be that."""
    try:
        return values.cast(pa.string())
    except pa.ArrowException:
        raise ValueError(f"column title of the {owner} is of type {values.type}, not text; rename it") from None


def _chosen(actions: Actions, options: PrepareOptions) -> np.ndarray:
    """Which actions [actions] fulfill the conditions."""
    columns = _columns(actions, options)
    chosen = np.ones(len(actions.users), bool)
    units = {options.timestamp_column: actions.unit or ""}
    for condition in options.where:
        chosen &= holds(condition, columns, units)
    if options.where and not chosen.any():
        raise ValueError(f"--where {' and '.join(options.where)} leaves none of the {len(chosen):,} actions")
    return chosen


def _columns(actions: Actions, options: PrepareOptions) -> dict[str, pa.Array]:
    """All columns of the actions, by their names in the source."""
    ids = (
        (options.user_column, actions.users, actions.user_ids),
        (options.item_column, actions.items, actions.item_ids),
    )
    named = {name: pa.DictionaryArray.from_arrays(pa.array(codes), texts) for name, codes, texts in ids}
    times = {options.timestamp_column: pa.array(actions.timestamps)} if options.timestamp_column else {}
    return named | times | actions.columns


def _counts(users: np.ndarray, items: np.ndarray, there: np.ndarray) -> dict[str, int]:
    distinct = {"users": users, "items": items}
    counts = {name: int(np.count_nonzero(np.bincount(codes[there]))) for name, codes in distinct.items()}
    return counts | {"actions": int(np.count_nonzero(there))}


def _order_of_ids(ids: pa.StringArray, kept: np.ndarray) -> np.ndarray:
    """Codes of the kept ids, in order."""
    codes = np.flatnonzero(kept)
    return codes[order_of_texts(ids.take(pa.array(codes)))]
