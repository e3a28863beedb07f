"""Tables of actions: CSV with a header, or Parquet, one file or a folder of parts; and tables of items and of users.

Times are read as times.py says: numbers in any unit, or dates, which become whole seconds since 1970. Fractions order
the actions of one time. Columns of the actions other than user, item and time become features of the event, except
`title`, which is text about the item. Columns of the files of --items and --users become features of items and users.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from logitmix.common.files import from_json
from logitmix.common.mappings import counted
from logitmix.modules.schema import Owner
from logitmix.trainer.data.append import parts_of
from logitmix.trainer.data.blocks import TableBlock
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.description import schema_of
from logitmix.trainer.data.download import find_source
from logitmix.trainer.data.features import read_schema
from logitmix.trainer.data.files import ATOMIC, ENDINGS, InputFile, find_parts
from logitmix.trainer.data.ids import as_whole, doubtful, exact_ids, labeled, shortened
from logitmix.trainer.data.joined import NOTHING_JOINED, Joins, join, joins_of
from logitmix.trainer.data.lists import Lists
from logitmix.trainer.data.matching import alike
from logitmix.trainer.data.raw import (
    TIME,
    ActionBlock,
    Actions,
    ColumnBuilder,
    RawDataset,
    SideTable,
    accept,
    gather,
    wrong_ids,
)
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.row_numbers import is_pandas_index
from logitmix.trainer.data.spool import Pieces, whole
from logitmix.trainer.data.tabular import CSV, CsvOptions, read_blocks
from logitmix.trainer.data.times import Clock, Times

OWNERS: dict[str, Owner] = {"--items": "item", "--users": "user"}
TIMES = f"{TIME}, nor a date in a usual form (--time-format gives another)"


@dataclass(frozen=True)
class ColumnNames:
    """The names of the actions' columns."""

    user: str = "user"
    item: str = "item"
    timestamp: str = "timestamp"
    """Empty: the order of the rows is the time."""

    def keys(self, label: str, header: list[str]) -> list[str]:
        """The named columns. ValueError if the file lacks one."""
        if not header:
            raise ValueError(f"{label}: has no columns; give a table of actions with --source")
        columns = {"--user-column": self.user, "--item-column": self.item, "--timestamp-column": self.timestamp}
        for flag, name in columns.items():
            if name and _found(name, header) is None:
                order = '; for the order of the rows write --timestamp-column ""' if "timestamp" in flag else ""
                alike = [of for of in header if of.strip().lower() == name.strip().lower()]
                there = f" (did you mean {alike[0]!r}?); there are: " if alike else "; there are: "
                there += ", ".join(of if of == of.strip() else repr(of) for of in header)
                raise ValueError(f"{label}: no column {name!r}{there}. Name the right one with {flag}{order}")
        return [found for name in columns.values() if name and (found := _found(name, header))]


def _found(name: str, header: list[str]) -> str | None:
    """The column of that name; user_id and item_id for the usual names of users and items."""
    names = [name, f"{name}_id"] if name in (ColumnNames.user, ColumnNames.item) else [name]
    return next((each for each in names if each in header), None)


@dataclass(frozen=True)
class Table:
    """How a table of actions is to be read."""

    files: list[InputFile]
    names: ColumnNames
    csv: CsvOptions
    joins: Joins
    time_format: str


def read(
    options: PrepareOptions,
    rejects: Rejects,
    progress: Progress,
    gathered: Callable[[Table, Rejects], Actions] | None = None,
) -> RawDataset:
    """`gathered`: what reads the actions, if not this process."""
    source = find_source(options, progress, reason="is a format, not one data set")
    files = _parts(source, "--source", rejects)
    names = ColumnNames(options.user_column, options.item_column, options.timestamp_column)
    columns = [name.strip() for name in options.columns.split(",")] if options.columns else []
    csv = CsvOptions(options.delimiter.replace("\\t", "\t"), columns, options.quote, options.encoding)
    lists = Lists(names.item, options.list_separator.replace("\\t", "\t"), rejects)
    clock = Clock(options.time_format)
    first = 0
    if options.append:
        # `prepare` has read it, and compared all files with their digests.
        before = from_json((Path(options.append) / "dataset.json").read_text(encoding="utf-8"))
        joins = joins_of(schema_of(before, before["items"]).features)
        times = parts_of(before)[-1].get("times") or {}
        first = times.get("last", -1) + 1 if not times.get("unit") else 0
    else:
        joins = joins_of(read_schema(options.schema))
    if gathered:
        actions = gathered(Table(files, names, csv, joins, options.time_format), rejects)
    else:
        actions = gather(read_actions(files, names, rejects, progress, csv, lists, clock, joins, first), rejects)
        _settle_times(actions, clock, names.timestamp, rejects)
        actions.users, actions.user_ids = _as_whole(names.user, actions.users, actions.user_ids, rejects)
        actions.items, actions.item_ids = _as_whole(names.item, actions.items, actions.item_ids, rejects)
        lists.say()
        for name, codes, ids in (
            (names.user, actions.users, actions.user_ids),
            (names.item, actions.items, actions.item_ids),
        ):
            for line in doubtful(name, _count(codes, len(ids)), ids):
                rejects.say(line)
    for line in labeled(names.item, actions.item_ids):
        rejects.say(line)
    for what, name, ids in (("user", names.user, actions.user_ids), ("item", names.item, actions.item_ids)):
        for line in (*alike(what, ids), *shortened(name, ids)):
            rejects.say(line)
    csv = replace(csv, columns=())
    items, users = (
        read_side(path, flag, column, rejects, progress, csv, known, joins)
        for path, flag, column, known in (
            (options.items, "--items", names.item, actions.item_ids),
            (options.users, "--users", names.user, actions.user_ids),
        )
    )
    _find_titles(options.title_column, (items, actions))
    for owner in (actions, items, users):
        owner.kinds.update(dict.fromkeys(_tokens_of_one_row(owner)))
    actions.kinds.update(dict.fromkeys(lists.numbers_of_rows(actions.columns)))
    return RawDataset(actions, source, files, items=items, users=users)


def _as_whole(name: str, codes: Pieces, ids: pa.StringArray, rejects: Rejects) -> tuple[Pieces, pa.StringArray]:
    """Codes of ids, and the ids, of which 12.0 and 12 are one if all are whole numbers."""
    whole = as_whole(name, ids, rejects)
    if whole is ids:
        return codes, ids
    encoded = whole.dictionary_encode()
    recoded = encoded.indices.to_numpy()
    return Pieces.of(recoded[each] for each in codes.numbers()), encoded.dictionary


def _count(codes: Pieces, count: int) -> np.ndarray:
    """int64 [count]: how many rows have each code."""
    found = np.zeros(count, np.int64)
    for piece in codes.numbers():
        found += np.bincount(piece, minlength=count)
    return found


def _settle_times(actions: Actions, clock: Clock, name: str, rejects: Rejects) -> None:
    try:
        if change := clock.settling(actions.timestamps.numbers):
            actions.timestamps = Pieces.of(map(change, actions.timestamps.numbers()))
    except ValueError as error:
        raise ValueError(f"column {name}: {error}") from None
    actions.unit = clock.unit if name else ""
    for line in clock.said():
        rejects.say(f"column {name}: {line}")


def _find_titles(column: str, owners: Iterable[SideTable | Actions]) -> None:
    """Titles as text, which a sequence of tokens is not yet. ValueError if a column that was asked for is not there."""
    having = [owner for owner in owners if column in owner.columns]
    if not having and column != PrepareOptions.title_column:
        there = ", ".join(name for owner in owners for name in owner.columns)
        raise ValueError(f"--title-column: no column {column!r} of the items or the actions; there are: {there}")
    for owner in having:
        if owner.kinds.get(column) == "ids":
            values = owner.columns[column]
            if isinstance(values, Pieces):
                owner.columns[column] = Pieces.of(pc.binary_join(piece, " ") for piece in values)
            else:
                owner.columns[column] = pc.binary_join(values, " ")


def _tokens_of_one_row(owner: SideTable | Actions) -> list[str]:
    """Columns that are stated to be ids but hardly have a value twice, such as addresses."""
    stated = [name for name, kind in owner.kinds.items() if kind == "id" and name in owner.columns]
    return [name for name in stated if 2 * len(whole(owner.columns[name]).unique()) > len(owner.columns[name])]


def read_actions(
    files: Iterable[InputFile],
    names: ColumnNames,
    rejects: Rejects,
    progress: Progress,
    csv: CsvOptions = CSV,
    lists: Lists | None = None,
    clock: Clock | None = None,
    joins: Joins = NOTHING_JOINED,
    first: int = 0,
) -> Iterator[ActionBlock]:
    """The actions of the parts of a table, in the given order; rows with lists of items are several. `joins` are the
    columns that are read as one. `clock.settle` makes the times final. `first`: that of the order of the rows.
    ValueError if a column is missing or has an unfit type."""
    taken = first
    lists = lists or Lists(names.item, "", rejects)
    clock = clock or Clock()
    for file in files:
        blocks = read_blocks(file, names.keys, rejects, progress, csv)
        for rows in chain.from_iterable(map(lists.explode, blocks)):
            rows = exact_ids(join(rows, "event", joins, rejects), ("user", "item"), rejects)
            times = _times(clock, rows) if names.timestamp else None
            block = accept(rows, times, rejects, f"as --time-format {clock.form!r} says" if clock.form else TIMES)
            if times is None:
                block = replace(block, timestamps=np.arange(taken, taken + len(block.users)))
            taken += len(block.users)
            yield block


def read_side(
    path: str,
    flag: str,
    id_column: str,
    rejects: Rejects,
    progress: Progress,
    csv: CsvOptions = CSV,
    known: pa.StringArray | None = None,
    joins: Joins = NOTHING_JOINED,
) -> SideTable:
    """A table of items or users by id, which is the column of that name, or else the first column that is not pandas'
    index. ValueError if the first name in the header is like the `known` ids, for then it is data."""
    if not path:
        return SideTable()

    def id_of(label: str, header: list[str]) -> list[str]:
        if not header:
            raise ValueError(f"{label}: has no columns; give a table with {flag}")
        first = next((name for name in header if not is_pandas_index(name)), header[0])
        return [_found(id_column, header) or first]

    ids: list[pa.StringArray] = []
    kinds: dict[str, str | None] = {}
    columns, name = ColumnBuilder(), id_column
    for file in _parts(Path(path), flag, rejects):
        for rows in read_blocks(file, id_of, rejects, progress, csv):
            (name,) = rows.keys
            if known is not None and not _found(id_column, rows.keys) and _is_like_ids(name, known):
                raise ValueError(
                    f"{file.label}: its first line looks like data, for {name!r} is like the ids of the actions; put "
                    "the names of the columns in a line before it"
                )
            rows = exact_ids(join(rows, OWNERS[flag], joins, rejects), ("id",), rejects)
            rows = rows.only(rows.reject(wrong_ids("id", rows.columns[name]), rejects))
            ids.append(rows.columns[name])
            columns.append(rows.others, len(rows.numbers), file.label)
            kinds |= rows.kinds
    joined = pa.chunked_array(ids, pa.string()).combine_chunks()
    found = {name: pieces.whole() for name, pieces in columns.join().items()}
    for line in columns.remarks():
        rejects.say(line)
    first_column = "" if _found(id_column, [name]) else name
    return SideTable(as_whole(f"{id_column} of {flag}", joined, rejects), found, kinds, first_column)


def _is_like_ids(name: str, ids: pa.StringArray) -> bool:
    """Whether a name is one of the ids, or like most of them but for its digits."""
    if pc.index(ids, name).as_py() >= 0:
        return True
    alike = pc.equal(pc.replace_substring_regex(ids[:1000], "[0-9]+", "0"), re.sub("[0-9]+", "0", name))
    return any(map(str.isdigit, name)) and 2 * (pc.sum(alike).as_py() or 0) > len(alike)


def _parts(source: Path, flag: str, rejects: Rejects) -> list[InputFile]:
    """The file, or the tables in the folder, whose other files are named."""
    if not source.is_dir():
        return [InputFile(source)]
    endings = (*ENDINGS, ATOMIC[flag])
    parts, others, empty = find_parts(source, endings)
    unread = f"{counted(len(others), 'file')}, such as {others[0]}" if others else ""
    if not parts:
        there = f" (but {unread})" if unread else ""
        raise ValueError(
            f"{source}: no {', '.join(endings)}, or compressed ones, in this folder{there}; give a table with {flag}"
        )
    if unread:
        rejects.say(f"{source}: not read, as the names end in none of {', '.join(endings)}: {unread}")
    if empty:
        rejects.say(
            f"{source}: not read, as there is nothing in them: {counted(len(empty), 'file')}, such as {empty[0]}"
        )
    return parts


def _times(clock: Clock, rows: TableBlock) -> Times:
    name = rows.keys[2]
    try:
        times = clock.read(rows.label, rows.numbers, rows.columns[name])
    except ValueError as error:
        raise ValueError(f"{rows.label}: column {name} {error}") from None
    if rows.places is None:
        return times
    # They order the actions of the list, and tell an item that it has twice from a row that is there twice.
    places = rows.places.astype(np.int32)
    return replace(times, nanoseconds=places if times.nanoseconds is None else places + times.nanoseconds)
