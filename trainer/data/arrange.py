"""The actions in the order of the dataset: chosen by --where, divided by users into parts that fit into memory, sorted,
without exact duplicates and filtered.

A part has the actions of consecutive users, so that all but the counts of items concerns one part at a time. Where all
actions fit into memory there is one part.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from logitmix.trainer.data.arrow import are_digits, codes_of, lists_of, order_of_texts
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.features import values_of_items
from logitmix.trainer.data.raw import Actions
from logitmix.trainer.data.row_numbers import name_each_row
from logitmix.trainer.data.spool import File, Pieces, current
from logitmix.trainer.data.where import column_of, holds
from logitmix.trainer.data.writer import DatasetContents, write_sequences

T = TypeVar("T")

STEPS = ("where", "duplicates", "shown", "min_item_actions", "min_user_actions")
SHOWN = "shown"
"""The feature of actions that PrepareOptions.shown makes."""
IS_SHOWN = "\0shown"
"""The column of a part that says which rows are no actions."""
SORTING = 100
"""Bytes for an action while a part is sorted, without further columns."""
PARTS = 1000
"""At most: each has a file, and a piece of each piece."""


@dataclass(frozen=True, eq=False)
class Ordered:
    """The actions that are kept, ordered by user, then time; items by index."""

    offsets: np.ndarray
    """int64 [users + 1]."""
    items: Pieces
    """int32."""
    timestamps: Pieces
    user_ids: pa.StringArray
    item_ids: pa.StringArray
    removed: dict[str, dict[str, int]]
    """By filter: users, items and actions that it left out."""
    notes: list[str]
    """What a user may want to know of it."""
    times: dict[str, int]
    """The first and the last time; how many actions have that of another one of their user, and of how many users the
    last action does."""
    parts: list[dict[str, Pieces]]
    """Further columns, in the order of the file."""
    rows: Pieces
    """The places of the actions in their part, a piece for each, if there are further columns."""
    shown: tuple[Pieces, Pieces] | None = None
    """For each action, how many items were shown since the one before it; and these, as codes. None without SHOWN."""
    waiting: pa.Table | None = None
    """Raw ids, `user` and `item`, of what was shown and no action follows yet, `by_user`, oldest first. None without
    SHOWN."""

    def column(self, name: str) -> pa.Array:
        """A further column of the actions."""
        if name == SHOWN and self.shown is not None:
            counts, items = self.shown
            return lists_of(counts[:], items.whole())
        found = [
            part[name].whole().take(pa.array(rows)) for part, rows in zip(self.parts, self.rows.numbers(), strict=True)
        ]
        return found[0] if len(found) == 1 else pa.concat_arrays(found)

    def counts(self, name: str) -> np.ndarray | None:
        """How many actions have each value of `column`; None: one."""
        return None

    def names_each_row(self, name: str) -> bool:
        return name_each_row(name, self.column(name), self.timestamps)

    def of_users(self, name: str) -> pa.Array:
        """The value of each user's first action, even if it has none."""
        return self.column(name).take(pa.array(self.offsets[:-1]))

    def of_items(self, name: str, which: Literal["first", "last"]) -> pa.Array:
        """The value of each item's first or last action that has one, by any user."""
        return values_of_items(self.column(name), self.items[:], self.timestamps[:], len(self.item_ids), which)

    def write(self, directory: Path, contents: DatasetContents) -> dict[str, Any]:
        """As `write_sequences`."""
        return write_sequences(directory, contents)


@dataclass(frozen=True)
class _Part:
    """Some actions in the order of the file."""

    users: Pieces
    """Codes."""
    items: Pieces
    timestamps: Pieces
    nanoseconds: Pieces | None
    columns: dict[str, Pieces]

    @property
    def own(self) -> list[Pieces]:
        own = [self.users, self.items, self.timestamps]
        return own if self.nanoseconds is None else [*own, self.nanoseconds]

    @property
    def all(self) -> list[Pieces]:
        return [*self.own, *self.columns.values()]

    def like(self) -> "_Part":
        """A part of these columns, without rows."""
        own, others = File(current()), File(current())
        nanoseconds = None if self.nanoseconds is None else Pieces(own)
        columns = {name: Pieces(others, of.texts) for name, of in self.columns.items()}
        return _Part(Pieces(own), Pieces(own), Pieces(own), nanoseconds, columns)


class SortedActions(NamedTuple):
    """Those of consecutive users, by user, then time."""

    users: np.ndarray
    """Ranks."""
    items: np.ndarray
    """Codes."""
    timestamps: np.ndarray
    nanoseconds: np.ndarray | None
    rows: np.ndarray
    """Their places in the part."""
    shown: np.ndarray | None = None
    """Which are no actions, but were shown; None: none."""

    def at(self, which: np.ndarray | slice) -> "SortedActions":
        return SortedActions._make(None if of is None else of[which] for of in self)

    def parted(self) -> tuple["SortedActions", "SortedActions"]:
        """The actions, and what was shown."""
        return (self, self.at(slice(0))) if self.shown is None else (self.at(~self.shown), self.at(self.shown))


class _Counts:
    """Users, items and actions that there are after a filter."""

    def __init__(self, items: int) -> None:
        self.users = self.actions = 0
        self.of_items = np.zeros(items, np.int64)
        """Actions by the item's code."""

    def add(self, actions: SortedActions) -> None:
        self.users += int(np.count_nonzero(np.diff(actions.users))) + bool(len(actions.users))
        self.actions += len(actions.users)
        self.of_items += np.bincount(actions.items, minlength=len(self.of_items))

    def mapping(self) -> dict[str, int]:
        return {"users": self.users, "items": int(np.count_nonzero(self.of_items)), "actions": self.actions}


def arrange(
    actions: Actions,
    options: PrepareOptions,
    numbering: Collection[str],
    progress: Progress,
    waiting: pa.Table | None = None,
) -> Ordered:
    """Filters, numbers and sorts. `actions` may not be used after it. Those that differ only in the columns `numbering`
    are duplicates. `waiting`, as in Ordered, was shown before the actions."""
    current().settled = True
    chosen = _chosen(actions, options)
    if options.shown:
        shown = _fulfilled(actions, options, options.shown, "--shown", np.logical_or)
        actions = replace(actions, columns=actions.columns | {IS_SHOWN: Pieces.of(shown)})
    counts = np.zeros(len(actions.user_ids), np.int64)
    for number, users in enumerate(actions.users.numbers()):
        counts += np.bincount(users if chosen is None else users[chosen[number]], minlength=len(counts))
    order = np.flatnonzero(counts)
    ids = actions.user_ids.take(pa.array(order))
    digits = are_digits(ids)
    order = order[order_of_texts(ids)]
    # Ids of digits alone are ordered as numbers: if the others are left out, the order is another.
    again = bool(digits.any() and not digits.all())
    ordered, users = _in_order(actions, options, numbering, chosen, counts, order, again, progress, waiting)
    if again and are_digits(ordered.user_ids).all():
        kept = users[order_of_texts(ordered.user_ids)]
        order = np.concatenate([kept, np.setdiff1d(order, kept)])
        ordered, _ = _in_order(actions, options, numbering, chosen, counts, order, False, progress, waiting)
    return ordered


def _in_order(
    actions: Actions,
    options: PrepareOptions,
    numbering: Collection[str],
    chosen: list[np.ndarray] | None,
    counts: np.ndarray,
    order: np.ndarray,
    again: bool,
    progress: Progress,
    waiting: pa.Table | None,
) -> tuple[Ordered, np.ndarray]:
    """With the users in this order, which are codes, and the codes of those that are kept. `chosen`: which actions, by
    piece; `counts`: how many of each user; `again`: the actions are needed once more."""
    read, user_ids, item_ids = actions.counts(), actions.user_ids, actions.item_ids
    ranks = np.full(len(user_ids), -1, np.int32)
    ranks[order] = np.arange(len(order))
    whole = _Part(actions.users, actions.items, actions.timestamps, actions.nanoseconds, actions.columns)
    parts = _divide(whole, chosen, _bounds(counts[order], whole), ranks, again, progress)
    after = [_Counts(len(item_ids)) for _ in STEPS]
    others = [0]

    def sorted_parts() -> Iterator[SortedActions]:
        for part in steps(progress, "sorting", parts, len(parts)):
            found = _sort(part, ranks)
            after[0].add(found)
            if not options.keep_duplicates:
                columns = (of for name, of in part.columns.items() if name not in numbering)
                repeated, more = _duplicates(found, columns)
                others[0] += more
                if len(repeated):
                    there = np.ones(len(found.users), bool)
                    there[repeated] = False
                    found = found.at(there)
            after[1].add(found)
            after[2].add(found.parted()[0])
            if not again:
                for of in part.own:
                    of.drop()
                if part is not whole:
                    part.users.file.close()
            yield found

    kept, lengths, spans = [], [], []
    items, timestamps, rows, shown_counts = (Pieces() for _ in range(4))
    impressions = _Impressions.of(waiting, user_ids, item_ids, ranks)
    fewest = max(options.min_user_actions, 1)
    # Counts of items are those of all parts.
    sorted_before = options.min_item_actions > 1
    for found in _kept(sorted_parts()) if sorted_before else sorted_parts():
        found, shown = found.parted()
        if sorted_before:
            found = found.at(after[2].of_items[found.items] >= options.min_item_actions)
        after[3].add(found)
        first = found.users[0] if len(found.users) else 0
        of_users = np.bincount(found.users - first)
        if not (of_users[of_users > 0] >= fewest).all():
            found = found.at(of_users[found.users - first] >= fewest)
        after[4].add(found)
        if options.shown:
            shown_counts.append(impressions.before(found, shown))
        active = np.flatnonzero(of_users >= fewest)
        kept.append(active + first)
        lengths.append(of_users[active])
        spans += [span(found)] if len(found.users) else []
        items.extend(found.items)
        timestamps.extend(found.timestamps)
        rows.append(found.rows if whole.columns else found.rows[:0])
    if not after[4].users:
        raise nobody(fewest, after[2].mapping(), after[0].actions - after[1].actions)
    left = impressions.left(user_ids.take(pa.array(order))) if options.shown else None
    users = order[np.concatenate(kept)]
    item_order = np.flatnonzero(after[4].of_items)
    item_order = item_order[order_of_texts(item_ids.take(pa.array(item_order)))]
    item_ranks = np.empty(len(item_ids), np.int32)
    item_ranks[item_order] = np.arange(len(item_order))
    ordered = Ordered(
        np.concatenate(([0], np.cumsum(np.concatenate(lengths)))),
        items.changed(lambda codes: item_ranks[codes]),
        timestamps,
        user_ids.take(pa.array(users)),
        item_ids.take(pa.array(item_order)),
        removed([read, *(of.mapping() for of in after)]),
        [*of_others(others[0]), *of_shown(left)],
        {
            "first": min(span["first"] for span in spans),
            "last": max(span["last"] for span in spans),
            "tied_actions": sum(span["tied_actions"] for span in spans),
            "users_that_end_tied": sum(span["users_that_end_tied"] for span in spans),
        },
        [part.columns for part in parts],
        rows,
        (shown_counts, impressions.taken) if options.shown else None,
        left,
    )
    return ordered, users


class _Impressions:
    """What was shown to users, in order of their ranks: first what waited, then part by part."""

    def __init__(self, users: np.ndarray, items: np.ndarray, item_ids: pa.StringArray, nobodys: pa.Table) -> None:
        """Ranks of users and codes of items of what waits; `nobodys`: what waits for users without rows."""
        order = np.argsort(users, kind="stable")
        self.users, self.items, self.item_ids, self.nobodys = users[order], items[order], item_ids, nobodys
        self.taken = Pieces(texts=item_ids)
        self.left_users, self.left_items = Pieces(), Pieces()
        self.at = 0

    @classmethod
    def of(
        cls, waiting: pa.Table | None, user_ids: pa.StringArray, item_ids: pa.StringArray, ranks: np.ndarray
    ) -> "_Impressions":
        if not waiting:
            none = pa.table({name: pa.array([], pa.string()) for name in ("user", "item")})
            return cls(np.zeros(0, np.int32), np.zeros(0, np.int32), item_ids, none)
        user = pc.index_in(waiting["user"], value_set=user_ids).combine_chunks()
        rank = np.where(user.is_valid(), ranks[user.fill_null(0).to_numpy()], -1)
        there = pa.array(rank >= 0)
        shown = waiting["item"].filter(there).combine_chunks()
        known = pc.index_in(shown, value_set=item_ids)
        item_ids = pa.concat_arrays([item_ids, shown.filter(known.is_null()).unique()])
        items = pc.index_in(shown, value_set=item_ids).to_numpy()
        return cls(rank[rank >= 0], items, item_ids, waiting.filter(pc.invert(there)))

    def before(self, actions: SortedActions, shown: SortedActions) -> np.ndarray:
        """For each action of the next part, how many items were shown to its user after the action before it and up to
        its time; they are added to those `taken`. Of actions at one time, they belong to the first. What no action
        follows is left."""
        last = max((int(of.users[-1]) for of in (actions, shown) if len(of.users)), default=-1)
        stop = int(np.searchsorted(self.users, last, "right"))
        earlier, self.at = slice(self.at, stop), stop
        users_S = np.concatenate([self.users[earlier], shown.users])
        items_S = np.concatenate([self.items[earlier], shown.items])
        times = np.concatenate([shown.timestamps, actions.timestamps])
        first = np.full(stop - earlier.start, times.min() if len(times) else 0)
        order = _order(np.concatenate([users_S, actions.users]), np.concatenate([first, times]), None)
        is_shown = order < len(users_S)
        next_S = np.cumsum(~is_shown)[is_shown]
        row_S = order[is_shown]
        there = next_S < len(actions.users)
        there[there] = actions.users[next_S[there]] == users_S[row_S[there]]
        self.taken.append(items_S[row_S[there]])
        self.left_users.append(users_S[row_S[~there]])
        self.left_items.append(items_S[row_S[~there]])
        return np.bincount(next_S[there], minlength=len(actions.users))

    def left(self, user_ids: pa.StringArray) -> pa.Table:
        """What no action follows, as Ordered has it; `user_ids` by rank."""
        users = np.concatenate([self.users[self.at :], self.left_users[:]])
        items = np.concatenate([self.items[self.at :], self.left_items[:]])
        found = {"user": user_ids.take(pa.array(users)), "item": self.item_ids.take(pa.array(items))}
        return by_user(pa.concat_tables([self.nobodys, pa.table(found)]))


def by_user(waiting: pa.Table) -> pa.Table:
    """In order of users; the rows of each stay in theirs."""
    users = waiting["user"].combine_chunks().dictionary_encode()
    rank = pc.rank(users.dictionary).to_numpy()
    return waiting.take(pa.array(np.argsort(rank[users.indices.to_numpy()], kind="stable"))).combine_chunks()


def of_shown(waiting: pa.Table | None) -> list[str]:
    """A line, if there are any."""
    if not waiting:
        return []
    one = len(waiting) == 1
    rows = f"{len(waiting):,} row{' waits' if one else 's wait'}"
    return [f"--shown: {rows} for an action of {'its' if one else 'their'} user that is kept; --append may bring it"]


def removed(counted: Sequence[Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """What each of the STEPS left out, by what there was before the first and after each."""
    return {
        name: {of: was[of] - now[of] for of in was} for name, (was, now) in zip(STEPS, pairwise(counted), strict=True)
    }


def nobody(fewest: int, counted: Mapping[str, int], repeated: int) -> ValueError:
    """What is wrong where no user has enough of the actions counted, without the duplicates."""
    if not counted["actions"]:
        return ValueError("all rows are those of --shown; give the actions with them")
    duplicates = f", without {repeated:,} exact duplicates" if repeated else ""
    return ValueError(
        f"no user has {fewest} or more actions (there were {counted['users']:,} users with {counted['actions']:,} "
        f"actions{duplicates}); lower --min-user-actions or --min-item-actions"
    )


def _kept(parts: Iterable[SortedActions]) -> Iterator[SortedActions]:
    """All of them, and then each again."""
    file = File(current())
    kept = [{name: Pieces.of([of], file) for name, of in part._asdict().items() if of is not None} for part in parts]
    for columns in kept:
        found = {name: of[:] for name, of in columns.items()}
        for of in columns.values():
            of.drop()
        yield SortedActions._make(map(found.get, SortedActions._fields))
    file.close()


def _bounds(counts: np.ndarray, whole: _Part) -> np.ndarray:
    """The ends of the parts, as ranks of users who have so many actions each: one part if all is in memory."""
    spool = current()
    if not spool.in_files:
        return np.array([len(counts)])
    ends = np.cumsum(counts)
    width = SORTING + sum(of.width for of in whole.columns.values())
    most = max(spool.budget // width, int(ends[-1]) // PARTS, 1)
    number = -(-int(ends[-1]) // most)
    bounds = np.searchsorted(ends, np.arange(1, number + 1) * (ends[-1] / number))
    return np.unique(np.append(bounds[:-1] + 1, len(counts)))


def _divide(
    whole: _Part,
    chosen: list[np.ndarray] | None,
    bounds: np.ndarray,
    ranks: np.ndarray,
    again: bool,
    progress: Progress,
) -> list[_Part]:
    """The chosen actions by the parts that their users' ranks are in."""
    count = len(bounds)
    if count == 1 and chosen is None:
        return [whole]
    parts = [whole.like() for _ in range(count)]
    part_of = np.searchsorted(bounds, ranks, "right").astype(np.uint16)
    columns = list(zip(whole.all, *(part.all for part in parts), strict=True))
    for number, users in enumerate(steps(progress, "dividing", whole.users.numbers(), len(whole.users.kept))):
        of_part = part_of[users]
        if chosen is not None:
            of_part[~chosen[number]] = count
        rows = np.argsort(of_part, kind="stable")
        cuts = np.concatenate(([0], np.cumsum(np.bincount(of_part, minlength=count)[:count])))
        for column, *made in columns:
            values = column.kept[number].load().take(pa.array(rows[: cuts[-1]]))
            for each, (first, stop) in zip(made, pairwise(cuts), strict=True):
                each.append(values[first:stop])
    if not again:
        for column in whole.all:
            column.drop()
            column.file.close()
    return parts


def steps(progress: Progress, description: str, of: Iterable[T], total: int) -> Iterator[T]:
    """Shows how many there have been."""
    task = progress.add_task(description, total=total)
    for each in of:
        yield each
        progress.advance(task)


def _sort(part: _Part, ranks: np.ndarray) -> SortedActions:
    nanoseconds = None if part.nanoseconds is None else part.nanoseconds[:]
    users, timestamps = ranks[part.users[:]], part.timestamps[:]
    rows = _order(users, timestamps, nanoseconds)
    nanoseconds = None if nanoseconds is None else nanoseconds[rows]
    shown = part.columns[IS_SHOWN][:][rows] if IS_SHOWN in part.columns else None
    return SortedActions(users[rows], part.items[:][rows], timestamps[rows], nanoseconds, rows, shown)


def _order(users: np.ndarray, timestamps: np.ndarray, nanoseconds: np.ndarray | None) -> np.ndarray:
    """The rows by user, then time; otherwise as they are."""
    fractions = () if nanoseconds is None else (nanoseconds,)
    if not len(users):
        return np.empty(0, np.int64)
    first, earliest = int(users.min()), int(timestamps.min())
    span = int(timestamps.max()) - earliest + 1
    if (int(users.max()) - first + 1) * span >= 2**63:
        return np.lexsort((*fractions, timestamps, users))
    key = (users - first) * np.int64(span) + (timestamps - earliest)
    # Not stable, but several times faster: equal ones are put in order behind it.
    rows = np.argsort(key)
    key = key[rows]
    same = key[1:] == key[:-1]
    if same.any():
        places = np.flatnonzero(np.append(same, False) | np.concatenate(([False], same)))
        tied = rows[places]
        rows[places] = tied[np.lexsort((tied, *(of[tied] for of in fractions), key[places]))]
    return rows


def span(actions: SortedActions) -> dict[str, int]:
    """Of at least one action."""
    users, _, timestamps, nanoseconds, *_ = actions
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


def _duplicates(actions: SortedActions, columns: Iterable[Pieces]) -> tuple[np.ndarray, int]:
    """The places of those that an earlier row is equal to in everything; and how many are equal to one in user, item
    and time alone."""
    users, items, timestamps, nanoseconds, rows, shown = actions
    tied = _tied(users, timestamps, nanoseconds)
    if not tied.any():
        return np.empty(0, np.int64), 0
    moment = np.concatenate(([0], np.cumsum(~tied))) * 2
    if shown is not None:
        moment += shown
    places = np.flatnonzero(np.append(tied, False) | np.concatenate(([False], tied)))
    # Sorts are stable, so that of equal actions the first one in the file stays.
    places, again = _alike(places, (items[places], moment[places]))
    keys = [codes_of(of.whole().take(pa.array(rows[places]))) for of in columns] if len(places) else []
    if not keys:
        return places[again], 0
    equal, repeated = _alike(places, (*keys, items[places], moment[places]))
    return equal[repeated], int(again.sum() - repeated.sum())


def _alike(places: np.ndarray, keys: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The places whose keys are those of another, with equal ones side by side; and which of them are not the first of
    their kind."""
    order = np.lexsort(keys)
    same = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    shared = np.append(same, False) | np.concatenate(([False], same))
    return places[order][shared], np.concatenate(([False], same))[shared]


def of_others(count: int) -> list[str]:
    """A line, if there are any."""
    one = count == 1
    line = (
        f"{count:,} action{' has' if one else 's have'} the user, item and time of another, but not its other values: "
        f"{'it is' if one else 'they are'} kept"
    )
    return [line] if count else []


def _chosen(actions: Actions, options: PrepareOptions) -> list[np.ndarray] | None:
    """Which actions fulfill --where, by piece; None: all."""
    if not options.where:
        return None
    chosen = _fulfilled(actions, options, options.where, "--where", np.logical_and)
    if not any(piece.any() for piece in chosen):
        columns = _columns(actions, options)
        texts = {name: columns[name].texts or () for name in (column_of(of, columns) for of in options.where)}
        some = [
            f"; {name} is {', '.join(filter(None, map(str, of[:4])))}, for example" for name, of in texts.items() if of
        ]
        raise ValueError(f"{none_left(actions, options)}{''.join(some)}")
    return chosen


def _fulfilled(
    actions: Actions, options: PrepareOptions, conditions: Sequence[str], flag: str, join: np.ufunc
) -> list[np.ndarray]:
    """Which actions fulfill the conditions, by piece; `join`: all of them, or one."""
    columns = _columns(actions, options)
    units = {options.timestamp_column: actions.unit or ""}
    found = (_holds(of, column_of(of, columns, flag), columns, units, flag) for of in conditions)
    return [join.reduce(pieces) for pieces in zip(*found, strict=True)]


def none_left(actions: Actions, options: PrepareOptions) -> ValueError:
    return ValueError(f"--where {' and '.join(options.where)} leaves none of the {len(actions.users):,} actions")


def _holds(
    condition: str, name: str, columns: Mapping[str, Pieces], units: Mapping[str, str], flag: str
) -> Iterator[np.ndarray]:
    """For each piece of the column. What a text is taken for depends on all texts, and a number's unit on all numbers
    of the column."""
    column, others = columns[name], dict.fromkeys(columns, pa.nulls(0))
    if name in units:
        yield from (holds(condition, others | {name: piece}, units, flag) for piece in column)
    elif column.texts is None:
        found = holds(condition, others | {name: column.whole()}, units, flag)
        yield from np.split(found, column.ends[1:-1])
    else:
        codes = pa.array(np.arange(len(column.texts) + 1), mask=np.arange(len(column.texts) + 1) == len(column.texts))
        distinct = pa.DictionaryArray.from_arrays(codes, column.texts)
        found = holds(condition, others | {name: distinct}, units, flag)
        yield from (found[kept.load().fill_null(len(column.texts)).to_numpy()] for kept in column.kept)


def _columns(actions: Actions, options: PrepareOptions) -> dict[str, Pieces]:
    """All columns of the actions, by their names in the source."""
    ids = {
        options.user_column: actions.users.with_texts(actions.user_ids),
        options.item_column: actions.items.with_texts(actions.item_ids),
    }
    times = {options.timestamp_column: actions.timestamps} if options.timestamp_column else {}
    return ids | times | actions.columns
