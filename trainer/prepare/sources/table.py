"""Tables of actions: CSV, JSON lines or Parquet, one file or a folder of parts; and tables of items and of users.

Times are read as times.py says: numbers in any unit, or dates, which become whole seconds since 1970. Fractions order
the actions of one time. Columns of the actions other than user, item and time become features of the event, except
`title`, which is text about the item. Columns of the files of --items and --users become features of items and users.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from logitmix.common.files import from_json
from logitmix.common.mappings import counted
from logitmix.modules.schema import Owner
from logitmix.trainer.data.description import schema_of
from logitmix.trainer.data.engine import scratch
from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.append import parts_of
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.download import find_source
from logitmix.trainer.prepare.features import read_schema
from logitmix.trainer.prepare.files import ATOMIC, ENDINGS, InputFile, find_parts
from logitmix.trainer.prepare.ids import as_whole, doubtful, labeled
from logitmix.trainer.prepare.joined import NOTHING_JOINED, Joins, join, joins_of
from logitmix.trainer.prepare.lists import Lists
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.row_numbers import is_pandas_index
from logitmix.trainer.prepare.scan import Raw
from logitmix.trainer.prepare.tables import TIME, Gathered, Job, SideTable, read_file, side_table
from logitmix.trainer.prepare.text import CSV, Layout

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


def read(job: Job) -> None:
    options, rejects = job.options, job.rejects
    job.source = find_source(options, job.progress, reason="is a format, not one data set")
    job.files = _parts(job.source, "--source", rejects)
    names, layout, (joins, _) = _names(options), _layout(options), _joins(options)
    gathered = job.gather_files(gather)
    job.settle(gathered, names.timestamp)
    lists = gathered.lists or Lists(names.item, "", rejects)
    ids = job.actions.ids
    for what, name in (("user", names.user), ("item", names.item)):
        whole = as_whole(name, ids[what]["id"].combine_chunks(), rejects)
        ids[what] = ids[what].set_column(2, "whole", whole)
    lists.say()
    for what, name in (("user", names.user), ("item", names.item)):
        for line in doubtful(name, ids[what]):
            rejects.say(line)
    for line in labeled(names.item, ids["item"]["whole"].combine_chunks().unique()):
        rejects.say(line)
    layout = replace(layout, columns=())
    job.items, job.users = (
        read_side(path, flag, column, rejects, job.progress, layout, joins, ids[what]["whole"].combine_chunks())
        for path, flag, column, what in (
            (options.items, "--items", names.item, "item"),
            (options.users, "--users", names.user, "user"),
        )
    )
    job.actions.kinds.update(dict.fromkeys(lists.numbers_of_rows(job.duck, job.actions.columns)))


def gather(job: Job, files: Sequence[InputFile]) -> Gathered:
    """Reads some of the files of the actions into the table `rows`."""
    options, names = job.options, _names(job.options)
    joins, first = _joins(options)
    lists = Lists(names.item, options.list_separator.replace("\\t", "\t"), job.rejects)
    clock = Clock(options.time_format) if names.timestamp else None
    must = f"as --time-format {options.time_format!r} says" if options.time_format else TIMES
    raws = read_actions(files, names, job, _layout(options), lists, joins)
    return replace(job.gather(raws, clock, must, first), lists=lists)


def _names(options: PrepareOptions) -> ColumnNames:
    return ColumnNames(options.user_column, options.item_column, options.timestamp_column)


def _layout(options: PrepareOptions) -> Layout:
    columns = [name.strip() for name in options.columns.split(",")] if options.columns else []
    return Layout(options.delimiter.replace("\\t", "\t"), columns, options.quote or None, encoding=options.encoding)


def _joins(options: PrepareOptions) -> tuple[Joins, int]:
    """Returns the columns that are read as one feature, and the time of the first row if rows have no times."""
    if not options.append:
        return joins_of(read_schema(options.schema)), 0
    # `prepare` has read it, and compared all files with their digests.
    before = from_json((Path(options.append) / "dataset.json").read_text(encoding="utf-8"))
    times = parts_of(before)[-1].get("times") or {}
    first = times.get("last", -1) + 1 if not times.get("unit") else 0
    return joins_of(schema_of(before, before["items"]).features), first


def read_actions(
    files: Iterable[InputFile], names: ColumnNames, job: Job, layout: Layout, lists: Lists, joins: Joins
) -> Iterator[Raw]:
    """The actions of the parts of a table, in the given order; rows with lists of items are several. `joins` are the
    columns that are read as one. ValueError if a column is missing or has an unfit type."""
    for file in files:
        raw = read_file(file, names.keys, job.rejects, job.progress, job.duck, layout)
        yield join(lists.explode(raw), "event", joins)


def read_side(
    path: str,
    flag: str,
    id_column: str,
    rejects: Rejects,
    progress: Progress,
    layout: Layout = CSV,
    joins: Joins = NOTHING_JOINED,
    known: pa.Array | None = None,
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

    first_column = ""

    def raws() -> Iterator[Raw]:
        nonlocal first_column
        for file in _parts(Path(path), flag, rejects):
            raw = read_file(file, id_of, rejects, progress, scratch(), layout)
            (name,) = raw.keys
            first_column = "" if _found(id_column, [name]) else name
            if known is not None and first_column and _is_like_ids(name, known):
                raise ValueError(
                    f"{file.label}: its first line looks like data, for {name!r} is like the ids of the actions; put "
                    "the names of the columns in a line before it"
                )
            yield join(raw, OWNERS[flag], joins)

    table = side_table(raws(), rejects)
    return replace(table, ids=as_whole(f"{id_column} of {flag}", table.ids, rejects), first_column=first_column)


def _is_like_ids(name: str, ids: pa.Array) -> bool:
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
