"""Tables in DuckDB, gathered block by block from files: the actions, and data about items and users.

A `Job` is what a source fills: `read_actions` makes the table `rows`, and `items` and `users` are what is known of
these. Rows without ids or a time are rejected with file, line and reason; all others are kept, in the order of the
files: `rows` has file, line, place (in a list of that line), user, item, time, fraction (billionths of the time's unit)
and the other columns under the names in `Actions.columns`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from logitmix.trainer.data.arrow import as_numpy, codes_of, is_list, is_text, is_time
from logitmix.trainer.data.engine import Duck, quoted, scratch
from logitmix.trainer.data.times import Clock, outliers_of, unit_of
from logitmix.trainer.data.writer import Counted
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.files import InputFile, is_zip, magic
from logitmix.trainer.prepare.jsonl import is_json, read_json
from logitmix.trainer.prepare.lists import Lists
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import Block, Keys, read_parquet
from logitmix.trainer.prepare.text import CSV, Layout, read_text
from logitmix.trainer.prepare.write import PartWriter, write_sequences

TIME = "a number between -2^62 and 2^62"
OWN = 'file integer, line bigint, place integer, "user" varchar, item varchar, time bigint, fraction integer'
ROWS = OWN + ", day_first bigint"
"""Columns of the table `rows`, before those of the source."""
ORDER = "file, line, place"
"""Of the rows as they are in the files."""


def read_blocks(
    file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, layout: Layout = CSV
) -> Iterator[Block]:
    """All columns of a file of any kind, and those of the subfolders KEY=VALUE that it is in. The file's own column of
    such a name counts before them. ValueError if the file is JSON but not of one object a line, or not readable
    Parquet."""
    file = replace(file, encoding=layout.encoding)
    partition, wanted, own = file.partition, list[str](), set[str]()

    def keys_within(label: str, header: list[str]) -> list[str]:
        own.update(header)
        wanted[:] = keys(label, [*header, *(name for name in partition if name not in own)])
        return [name for name in wanted if name in own]

    parquet = magic(file.path) == b"PAR1"
    if layout.columns and (parquet or is_json(file)):
        raise ValueError(f"{file.label}: names its columns itself; --columns is for CSV without a header")
    if parquet:
        blocks = read_parquet(file, keys_within, rejects, progress)
    elif is_zip(file.path) and not file.member:
        raise ValueError(f"{file.path}: is a zip; unpack it and give the table in it (or write that of Excel as CSV)")
    elif is_json(file):
        blocks = read_json(file, keys_within, rejects, progress)
    else:
        blocks = read_text(file, keys_within, rejects, progress, layout)
    for block in blocks:
        added = {
            name: pa.repeat(pa.scalar(value, pa.string()), len(block.numbers))
            for name, value in partition.items()
            if name not in own
        }
        yield replace(block, keys=wanted, columns=block.columns | added)


class Gatherer:
    """A table of a database that grows block by block, and gets the columns that blocks have."""

    def __init__(self, duck: Duck, name: str, own: str) -> None:
        self.duck, self.name = duck, name
        duck.db.execute(f"create or replace table {name} ({own})")
        self.columns: dict[str, str] = {}
        """Names in the database, by those of the source."""
        self.unread: dict[str, pa.DataType] = {}
        """Columns that have another type than those that can be features."""
        self._types: dict[str, dict[pa.DataType, str]] = {}
        """The types of each column so far, but that of missing values, each with the first file that has it."""
        self.files_of: dict[str, set[str]] = {}
        self.rows_of: dict[str, int] = {}

    def append(self, own: pa.Table, columns: Mapping[str, pa.Array], label: str) -> None:
        """Adds rows of a file; a column that is missing here, or was missing before, has nulls there. ValueError if the
        types of a column cannot be one."""
        self.rows_of[label] = self.rows_of.get(label, 0) + len(own)
        for name, values in columns.items():
            self.files_of.setdefault(name, set()).add(label)
            values = _plain(values)
            if pa.types.is_null(values.type):
                continue
            if not (sql_type := _sql_type(values.type)):
                # Rows that differ in it are different all the same.
                self.unread[name] = values.type
                texts = [None if value is None else repr(value) for value in values.to_pylist()]
                values, sql_type = pa.array(texts, pa.string()), "varchar"
            self._admit(name, values.type, sql_type, label)
            own = own.append_column(self.columns[name], values)
        if len(own):
            self.duck.db.register("arrow_rows", own)
            self.duck.db.execute(f"insert into {self.name} by name select * from arrow_rows")
            self.duck.db.unregister("arrow_rows")

    def _admit(self, name: str, kind: pa.DataType, sql_type: str, label: str) -> None:
        """Makes room for values of this type in the column."""
        types = self._types.setdefault(name, {})
        if kind in types:
            return
        table, column = f"alter table {self.name}", self.columns.get(name)
        if column is None:
            self.columns[name] = column = self._free(name)
            self.duck.db.execute(f"{table} add column {column} {sql_type}")
        elif types:
            lists = all(is_list(of) and not pa.types.is_nested(of.value_type) for of in (kind, *types))
            if not lists and any(pa.types.is_nested(of) for of in (kind, *types)):
                named = " and ".join(f"{of} in {file or 'some rows'}" for of, file in {**types, kind: label}.items())
                raise ValueError(f"column {name} is of type {named}; write it in one type")
            numbers = lists and not any(is_text(of.value_type) for of in (kind, *types))
            common = "double[]" if numbers else "varchar[]" if lists else "varchar"
            # CSV and Parquet, or integers and floats: numbers are recognized from the text again.
            self.duck.db.execute(f"{table} alter column {column} type {common}")
        types[kind] = label

    def _free(self, name: str) -> str:
        """A name in the database: no other one differs from it in case alone."""
        plain = made = "c_" + re.sub(r"\W", "_", name, flags=re.ASCII).lower()
        for number in range(2, 2 + len(self.columns)):
            if made not in self.columns.values():
                break
            made = f"{plain}_{number}"
        return made

    def finish(self) -> list[str]:
        """Adds the columns without any value. Returns lines about files without rows, and about columns that some of
        the others lack."""
        for name in self.files_of:
            if name not in self.columns:
                self.columns[name] = self._free(name)
                self.duck.db.execute(f"alter table {self.name} add column {self.columns[name]} varchar")
        files = [file for file, rows in self.rows_of.items() if rows]
        empty = [file for file, rows in self.rows_of.items() if not rows]
        lines = []
        if empty and files:
            have = "has" if len(empty) == 1 else "have"
            lines = [f"{len(empty):,} of {len(self.rows_of):,} files {have} no rows, such as {empty[0]}"]
        lacking = {name: [file for file in files if file not in of] for name, of in self.files_of.items()}
        said = ", ".join(
            f"{name} (in {len(files) - len(of):,} of {len(files):,} files, and not in {of[0]})"
            for name, of in lacking.items()
            if 0 < len(of) < len(files)
        )
        return [*lines, f"missing values where files lack a column: {said}"] if said else lines


def _plain(values: pa.Array) -> pa.Array:
    """Without dictionaries; times and decimals as text."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _plain(values.cast(kind.value_type))
    if is_time(kind) or pa.types.is_decimal(kind) or (pa.types.is_large_string(kind)):
        return values.cast(pa.string())
    if pa.types.is_uint64(kind):
        try:
            return values.cast(pa.int64())
        except pa.ArrowInvalid:
            return values.cast(pa.string())
    return values.cast(pa.int64()) if pa.types.is_integer(kind) else values


def _sql_type(kind: pa.DataType) -> str:
    """ "" for those that can be no feature."""
    if is_list(kind):
        if pa.types.is_struct(kind.value_type):
            return f"struct({', '.join(f'{quoted(of.name)} {_sql_type(of.type)}' for of in kind.value_type)})[]"
        element = "" if is_list(kind.value_type) else _sql_type(kind.value_type)
        return element and f"{element}[]"
    if pa.types.is_integer(kind):
        return "bigint"
    names = {pa.string(): "varchar", pa.bool_(): "boolean", pa.float32(): "float", pa.float64(): "double"}
    return names.get(kind, "")


@dataclass
class Actions:
    """Columns, ids and times of the actions that were read into the table `rows`."""

    columns: dict[str, str] = field(default_factory=dict)
    """Names in the database of the columns beside user, item and time."""
    kinds: dict[str, str | None] = field(default_factory=dict)
    """Kind of a column, if the source states it; None for columns that are not used unless --schema states a kind."""
    unread: dict[str, str] = field(default_factory=dict)
    """Why other columns cannot be features."""
    ids: dict[str, pa.Table] = field(default_factory=dict)
    """All ids, "user" and "item": `id` as it is in rows, `n` rows that have it, and `whole` as it is finally."""
    time: str = "r.time"
    """The expression of the final time of a row r."""
    unit: str = ""
    """Unit of the times, one of UNITS; "" for numbers that are no times since 1970."""


@dataclass(frozen=True)
class SideTable:
    """A table of users or of items, including those without actions."""

    ids: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    """If an id occurs in several rows, the last one counts."""
    columns: dict[str, pa.Array] = field(default_factory=dict)
    kinds: dict[str, str | None] = field(default_factory=dict)
    """As of the actions."""
    first_column: str = ""
    """The column of the ids, where that was the first one for want of one of the name."""
    unread: dict[str, str] = field(default_factory=dict)
    """As of the actions."""

    def of(self, ids: pa.Array) -> dict[str, pa.Array]:
        """The columns with one value for each of `ids`, null if the table has none."""
        backwards = pc.index_in(ids, value_set=self.ids.take(pa.array(np.arange(len(self.ids))[::-1])))
        rows = pc.subtract(len(self.ids) - 1, backwards)
        return {name: column.take(rows) for name, column in self.columns.items()}

    def remarks(self, name: str) -> list[str]:
        """Lines about the table `name`: which column the ids are, if that was not asked for, and `contradictions`."""
        chosen = f"{name}: the ids are the first column, {self.first_column}" if self.first_column else ""
        return [line for line in (chosen, self.contradictions(name)) if line]

    def contradictions(self, name: str) -> str:
        """A line about the ids that occur in the table `name` with different values, "" if there are none."""
        codes = codes_of(self.ids)
        rows = np.flatnonzero(np.bincount(codes)[codes] > 1) if len(codes) else codes
        last = np.empty(len(codes), np.int64)
        # Of several assignments to one place, the last one counts.
        last[codes[rows]] = rows
        pairs = pa.array(np.concatenate([rows, last[codes[rows]]]))
        differ = {}
        for column, values in self.columns.items():
            one, other = np.split(codes_of(values.take(pairs)), 2)
            differ[column] = one != other
        wrong = rows[np.logical_or.reduce(list(differ.values()))] if differ else rows[:0]
        if not len(wrong):
            return ""
        column = next(column for column, differs in differ.items() if differs[np.searchsorted(rows, wrong[0])])
        count = len(np.unique(codes[wrong]))
        ids = "id occurs" if count == 1 else "ids occur"
        return (
            f"{count:,} {ids} in several rows of {name} with different values, such as {self.ids[wrong[0]]} with those "
            f"of {column}: the last row counts"
        )


def side_table(blocks: Iterable[Block], rejects: Rejects) -> SideTable:
    """The rows with an id, which is the first key of the blocks."""
    duck = scratch()
    gatherer, kinds = Gatherer(duck, "side", "line bigint, id varchar"), dict[str, str | None]()
    count = 0
    for block in blocks:
        wrong = wrong_ids("id", block.columns[block.keys[0]])
        block = block.only(block.reject(wrong, rejects))
        lines = pa.array(np.arange(count, count + len(block.numbers)))
        gatherer.append(pa.table({"line": lines, "id": block.columns[block.keys[0]]}), block.others, block.label)
        kinds |= block.kinds
        count += len(block.numbers)
    for line in gatherer.finish():
        rejects.say(line)
    table = duck.table("select * from side order by line")
    duck.drop("side")
    columns = {name: table[of].combine_chunks() for name, of in gatherer.columns.items()}
    unread = {name: f"of type {str(kind).partition('<')[0]}" for name, kind in gatherer.unread.items()}
    return SideTable(table["id"].combine_chunks(), columns, kinds, unread=unread)


@dataclass
class Gathered:
    """What reading files into the table `rows` found."""

    gatherer: Gatherer
    labels: list[str]
    """The files, by their numbers in `rows`."""
    kinds: dict[str, str | None]
    """Kinds of columns that files state."""
    clock: Clock | None
    lists: Lists | None = None
    """Of a source whose rows may have lists."""


@dataclass
class Job:
    """What a source reads into, and what it says of that."""

    options: PrepareOptions
    duck: Duck
    rejects: Rejects
    progress: Progress
    source: Path | None = None
    """What was read; None if it was generated."""
    files: list[InputFile] = field(default_factory=list)
    """The files in `source` that were read."""
    generator: dict[str, Any] | None = None
    """The entry of dataset.json if it was generated."""
    actions: Actions = field(default_factory=Actions)
    items: SideTable = field(default_factory=SideTable)
    """A column named title is text to show, not a feature."""
    users: SideTable = field(default_factory=SideTable)
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns of any owner."""

    def read_actions(self, blocks: Iterable[Block], clock: Clock | None, must: str = TIME) -> None:
        """Makes the table `rows`, as `gather` and `settle` do."""
        self.settle(self.gather(blocks, clock, must))

    def gather_files(self, gather: Callable[["Job", Sequence[InputFile]], "Gathered"]) -> "Gathered":
        """Makes the table `rows` of `files` by a function that does so with files of a job, here of all at once."""
        return gather(self, self.files)

    def gather(self, blocks: Iterable[Block], clock: Clock | None, must: str = TIME, first: int = 0) -> "Gathered":
        """Makes the table `rows` of blocks with the keys user, item and, with a clock, time; `must` says what a time
        must be. Without a clock the order of the rows is the time, which begins with `first`."""
        gatherer, labels = Gatherer(self.duck, "rows", ROWS), dict[str, int]()
        taken, kinds = first, dict[str, str | None]()
        for block in blocks:
            file = labels.setdefault(block.label, len(labels))
            times = None
            if clock:
                try:
                    times = clock.read(block.label, block.numbers, block.columns[block.keys[2]])
                except ValueError as error:
                    raise ValueError(f"{block.label}: column {block.keys[2]} {error}") from None
            block, times = self._accept(block, times, must)
            rows = len(block.numbers)
            if times is None:
                times = pa.table(
                    {
                        "seconds": pa.array(np.arange(taken, taken + rows)),
                        "fraction": pa.array(np.zeros(rows, np.int32)),
                    }
                )
                taken += rows
            places = np.zeros(rows, np.int32) if block.places is None else block.places.astype(np.int32)
            fractions = times["fraction"].to_numpy() + (places if block.one_time else 0)
            own = {
                "file": pa.array(np.full(rows, file, np.int32)),
                "line": pa.array(block.numbers),
                "place": pa.array(places),
                "user": block.columns[block.keys[0]],
                "item": block.columns[block.keys[1]],
                "time": times["seconds"],
                "fraction": pa.array(fractions, pa.int32()),
            }
            if "day_first" in times.column_names and times["day_first"].null_count < rows:
                own["day_first"] = times["day_first"]
            gatherer.append(pa.table(own), block.others, block.label)
            kinds |= block.kinds
        return Gathered(gatherer, list(labels), kinds, clock)

    def settle(self, gathered: "Gathered", time_name: str = "") -> None:
        """Finds what is known of the actions once all of them are in the table `rows`."""
        gatherer = gathered.gatherer
        for line in gatherer.finish():
            self.rejects.say(line)
        unread = {name: f"of type {str(kind).partition('<')[0]}" for name, kind in gatherer.unread.items()}
        self.actions = Actions(gatherer.columns, gathered.kinds, unread)
        for what in ("user", "item"):
            seen = "min((file::bigint << 40) + line)"
            ids = self.duck.table(f'select "{what}" as id, count(*) as n from rows group by 1 order by {seen}, id')
            self.actions.ids[what] = ids.append_column("whole", ids["id"])
        if gathered.clock:
            self._settle(gathered.clock, time_name, gathered.labels)

    def _settle(self, clock: Clock, name: str, labels: list[str]) -> None:
        """Finds what the times are, which depends on all of them."""
        try:
            self.actions.time = clock.settled(self.duck)
        except ValueError as error:
            raise ValueError(f"column {name}: {error}") from None
        for line in clock.remarks():
            self.rejects.say(f"column {name}: {line}")
        if "digits" in clock.examples:
            self.actions.unit = "s"
        elif clock.unit is not None:
            self.actions.unit = clock.unit
        elif self.duck.row("select count(*) from rows")[0]:
            self.duck.put("labels", pa.table({"file": np.arange(len(labels), dtype=np.int32), "label": labels}))
            place = "(select label from labels where labels.file = rows.file) || ':' || line || ': '"
            self.actions.unit = unit_of(self.duck, "time", "rows", place)
        if self.actions.unit and (outliers := outliers_of(self.duck, self.actions.time, self.actions.unit)):
            column = self.options.timestamp_column
            self.rejects.say(
                f"column {column}: {outliers}; if they stand for no time, leave them out, by --where "
                f'"{column} >= 1980-01-01" --where "{column} < {date.today()}"'
            )

    def write(self, writer: PartWriter, actions: str, order: str) -> Counted:
        """Writes sequences/ of the rows of a query in this order."""
        rows = f"select * exclude (file, line, place) from ({actions}) as actions order by {order}"
        return write_sequences(writer, self.duck.batches(rows))

    def _accept(self, block: Block, times: pa.Table | None, must: str) -> tuple[Block, pa.Table | None]:
        """The rows with both ids and a time; the others are rejected."""
        user, item = block.keys[:2]
        reasons = wrong_ids("item", block.columns[item]) | wrong_ids("user", block.columns[user])
        if times is not None and times["seconds"].null_count:
            written = block.columns[block.keys[2]]
            for row in np.flatnonzero(as_numpy(times["seconds"].is_null())).tolist():
                said = f"{str(written[row])[:40]!r} is not {must}" if written[row].is_valid else "is missing"
                reasons.setdefault(row, f"the timestamp {said}")
        kept = block.reject(dict(sorted(reasons.items())), self.rejects)
        self.rejects.check_format(block.label)
        return block.only(kept), times.filter(pa.array(kept)) if times is not None and reasons else times


def wrong_ids(owner: str, ids: pa.Array) -> dict[int, str]:
    """Why some are no ids, by row: they are missing, or have a NUL byte, which ends a text for other programs."""
    wrong = pc.fill_null(pc.equal(ids, ""), True)
    if b"\0" in bytes(ids.buffers()[2] or b""):
        wrong = pc.or_(wrong, pc.fill_null(pc.match_substring(ids, "\0"), False))
    return {
        row: f"the {owner} {'has a NUL byte' if ids[row].as_py() else 'is empty'}"
        for row in np.flatnonzero(as_numpy(wrong)).tolist()
    }


Reader = Callable[[Job], None]
"""What a source is: it fills a job."""
