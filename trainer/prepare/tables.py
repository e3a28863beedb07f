"""Tables in DuckDB, gathered block by block from files: the actions, and data about items and users.

A `Job` is what a source fills: `read_actions` makes the table `rows`, and `items` and `users` are what is known of
these. Rows without ids or a time are rejected with file, line and reason; all others are kept, in the order of the
files: `rows` has file, line, place (in a list of that line), user, item, time, fraction (billionths of the time's unit)
and the other columns under the names in `Actions.columns`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from logitmix.trainer.data.engine import Duck, scratch
from logitmix.trainer.data.times import INTEGER_TYPES, Clock, outliers_of, unit_of
from logitmix.trainer.data.writer import Counted, PartWriter, write_sequences
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.files import InputFile, is_zip, magic
from logitmix.trainer.prepare.jsonl import is_json, read_json
from logitmix.trainer.prepare.lists import Lists
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import Keys, Raw, bytes_as_text, common, literal, read_parquet
from logitmix.trainer.prepare.text import CSV, Layout, read_text

TIME = "a number between -2^62 and 2^62"
OWN = "file integer, line bigint, place integer, written varchar, problem varchar"
ROWS = (
    'file integer, line bigint, place integer, "user" varchar, item varchar, time bigint, fraction integer, '
    "day_first bigint"
)
"""Columns of the table `rows`, before those of the source."""
GATHERED = f"{ROWS}, form varchar, written varchar, problem varchar"
ORDER = "file, line, place"
"""Of the rows as they are in the files."""
SEEN = "(file::bigint << 40) + line"
LABEL = "(select label from labels where labels.file = rows.file)"


def read_file(
    file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, duck: Duck, layout: Layout = CSV
) -> Raw:
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
        raw = read_parquet(file, keys_within, rejects, duck)
    elif is_zip(file.path) and not file.member:
        raise ValueError(f"{file.path}: is a zip; unpack it and give the table in it (or write that of Excel as CSV)")
    elif is_json(file):
        raw = read_json(file, keys_within, rejects, progress, duck)
    else:
        raw = read_text(file, keys_within, rejects, progress, duck, layout)
    added = {
        name: "null::varchar" if value is None else literal(value)
        for name, value in partition.items()
        if name not in own
    }
    return replace(raw, columns=raw.columns | added, keys=wanted)


class Gatherer:
    """A table of a database that grows file by file, and gets the columns that files have."""

    def __init__(self, duck: Duck, name: str, own: str) -> None:
        self.duck, self.name = duck, name
        duck.db.execute(f"create or replace table {name} ({own})")
        self.columns: dict[str, str] = {}
        """Names in the database, by those of the source."""
        self.unread: dict[str, str] = {}
        """Why columns cannot be features that have other types than these."""
        self.labels: list[str] = []
        """The files, by their numbers in the table."""
        self.kinds: dict[str, str | None] = {}
        """Kinds of columns that files state."""
        self.types: dict[str, dict[str, str]] = {}
        """The types of each column so far, but that of missing values, each with the first file that has it."""
        self.names: dict[str, set[str]] = {}
        """The files that have each column."""
        self.rows = 0

    def append(self, raw: Raw, own: Mapping[str, str], wrong: str) -> None:
        """Adds the rows of a file, of which `own` are the table's own columns, and `wrong` the conditions of CASE for
        malformed rows; a column that is missing here, or was missing before, has nulls there. ValueError if the types
        of a column cannot be one."""
        columns = {"file": str(len(self.labels)), "line": "line", "place": raw.place, "written": "written", **own}
        columns["problem"] = f"case when problem is not null then problem{wrong} end"
        for (name, values), kind in zip(raw.others.items(), raw.types(*raw.others), strict=True):
            self.names.setdefault(name, set()).add(raw.label)
            if kind.id == "null":
                continue
            values, sql_type = common(values, kind, raw)
            if not sql_type:
                # Rows that differ in it are different all the same.
                self.unread[name], values, sql_type = f"of type {kind.id}", f"({values})::varchar", "varchar"
            self.admit(name, sql_type, raw.label)
            columns[self.columns[name]] = values
        made = ", ".join(f'{values} as "{name}"' for name, values in columns.items())
        raw.fill(f"insert into {self.name} by name select {made}")
        self.labels.append(raw.label)
        self.kinds |= raw.kinds

    def admit(self, name: str, sql_type: str, label: str) -> None:
        """Makes room for values of this type in the column."""
        types = self.types.setdefault(name, {})
        if sql_type in types:
            return
        table, column = f"alter table {self.name}", self.columns.get(name)
        if column is None:
            self.columns[name] = column = self._free(name)
            self.duck.db.execute(f"{table} add column {column} {sql_type}")
        elif types:
            lists = all(of.endswith("[]") and "(" not in of for of in (sql_type, *types))
            if not lists and any(of.endswith("[]") for of in (sql_type, *types)):
                named = " and ".join(f"{of} in {file}" for of, file in {**types, sql_type: label}.items())
                raise ValueError(f"column {name} is of type {named}; write it in one type")
            numbers = lists and "varchar[]" not in (sql_type, *types)
            common_type = "double[]" if numbers else "varchar[]" if lists else "varchar"
            # CSV and Parquet, or integers and floats: numbers are recognized from the text again.
            self.duck.db.execute(f"{table} alter column {column} type {common_type}")
        types[sql_type] = label

    def _free(self, name: str) -> str:
        """A name in the database: no other one differs from it in case alone."""
        plain = made = "c_" + re.sub(r"\W", "_", name, flags=re.ASCII).lower()
        for number in range(2, 2 + len(self.columns)):
            if made not in self.columns.values():
                break
            made = f"{plain}_{number}"
        return made

    def reject(self, rejects: Rejects, own: str) -> None:
        """Lists the malformed rows, of which the `own` columns are shown first, and removes them."""
        found = self.duck.db.execute(
            f"select file, line, problem, concat_ws(',', {', '.join([own, *self.columns.values()])}) from {self.name} "
            f"where problem is not null order by {ORDER}"
        )
        while rows := found.fetchmany(10_000):
            for file, line, problem, text in rows:
                rejects.add(self.labels[file], line, problem, text)
        lines, self.rows = self.duck.row(f"select count(*), count(*) - count(problem) from {self.name}")
        rejects.lines += lines
        self.duck.db.execute(f"delete from {self.name} where problem is not null")

    def complete(self, rejects: Rejects, labels: Sequence[str]) -> None:
        """Adds the columns without any value, and says which columns some of the files `labels` lack."""
        for name, having in self.names.items():
            if name not in self.columns:
                self.admit(name, "varchar", "")
            if lacking := [label for label in labels if label not in having]:
                files = f"{len(lacking):,} of {len(labels):,} files, such as {lacking[0]}"
                rejects.say_once(f"column {name}: its values are missing in {files}, which have no such column")


def id_of(raw: Raw, name: str, owner: str) -> tuple[str, str]:
    """Returns the expressions of the ids in a column as text: integers and whole numbers by their digits, as far as
    these are exact; and of why one is malformed, as conditions of CASE. ValueError if the column cannot be ids."""
    (kind,), value = raw.types(name), raw.columns[name]
    plain, why = f"{value}::varchar", "is not a whole number that is exact"
    text = plain
    if kind.id in ("float", "double"):
        # From 2^53 or 2^24 on, several whole numbers have the same float.
        exact = f"{value} = floor({value}) and abs({value}) < {2**53 if kind.id == 'double' else 2**24}"
        text = f"case when {exact} then {value}::bigint::varchar end"
    elif kind.id == "decimal":
        text = (
            f"case when regexp_full_match({plain}, '-?[0-9]+(\\.0*)?') then regexp_replace({plain}, '\\.0*$', '') end"
        )
    elif kind.id == "blob":
        text, why = bytes_as_text(value, raw)[0], "is not UTF-8"
    elif kind.id not in (*INTEGER_TYPES, "varchar", "enum", "uuid", "boolean"):
        raise ValueError(f"{raw.label}: column {name} is of type {kind}; ids must be integers or text")
    inexact = f" when {text} is null and {value} is not null then concat('the {owner} ', {plain}, ' {why}')"
    return text, (
        f"{inexact if text != plain else ''} when coalesce({text}, '') = '' then 'the {owner} is empty'"
        f" when contains({text}, chr(0)) then 'the {owner} has a NUL byte'"
    )


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
        """Lines about the table `name`: which column the ids are, if that was not asked for, and how many ids come
        again."""
        chosen = f"{name}: the ids are the first column, {self.first_column}" if self.first_column else ""
        return [line for line in (chosen, self.repeated(name)) if line]

    def repeated(self, name: str) -> str:
        """Returns a line about the ids that occur several times in the table `name`; "" if there are none."""
        counts = self.ids.value_counts()
        ids = counts.field(0).filter(pc.greater(counts.field(1), 1))
        occur = "id occurs" if len(ids) == 1 else "ids occur"
        return (
            f"{len(ids):,} {occur} in several rows of {name}, such as {ids[0]}: the last row counts" if len(ids) else ""
        )


def side_table(raws: Iterable[Raw], rejects: Rejects) -> SideTable:
    """Returns the rows with an id, which is the first key of the files."""
    gatherer = Gatherer(scratch(), "side", f"{OWN}, id varchar")
    for raw in raws:
        text, wrong = id_of(raw, raw.keys[0], "id")
        gatherer.append(raw, {"id": text}, wrong)
    gatherer.reject(rejects, "id, written")
    gatherer.complete(rejects, gatherer.labels)
    table = gatherer.duck.table(f"select * from side order by {ORDER}")
    gatherer.duck.drop("side")
    columns = {name: table[of].combine_chunks() for name, of in gatherer.columns.items()}
    return SideTable(table["id"].combine_chunks(), columns, gatherer.kinds, unread=gatherer.unread)


@dataclass
class Gathered:
    """What was found while files were read into the table `rows`."""

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

    def read_actions(self, raws: Iterable[Raw], clock: Clock | None, must: str = TIME) -> None:
        """Makes the table `rows`, as `gather` and `settle` do."""
        self.settle(self.gather(raws, clock, must))

    def gather_files(self, gather: Callable[["Job", Sequence[InputFile]], "Gathered"]) -> "Gathered":
        """Makes the table `rows` of `files` by a function that does so with files of a job, here of all at once."""
        return gather(self, self.files)

    def gather(self, raws: Iterable[Raw], clock: Clock | None, must: str = TIME, first: int = 0) -> "Gathered":
        """Makes the table `rows` of files with the keys user, item and, with a clock, time; `must` says what a time
        must be. Without a clock the order of the rows is the time, which begins with `first`."""
        gatherer = Gatherer(self.duck, "rows", GATHERED)
        for raw in raws:
            user, item = (id_of(raw, name, owner) for name, owner in zip(raw.keys, ("user", "item"), strict=False))
            own = {"user": user[0], "item": item[0], "fraction": "0"} | (self._times(raw, clock) if clock else {})
            if raw.one_time:
                own["fraction"] += f" + {raw.place}"
            gatherer.append(raw, own, user[1] + item[1])
        if clock:
            clock.read_written(self.duck)
            self.duck.db.execute(
                f"""update rows set problem = case when coalesce(written, '') = '' then 'the timestamp is missing' else
                concat('the timestamp ', chr(39), left(written, 40), chr(39), ' is not ', {literal(must)}) end
                where time is null and problem is null"""
            )
            self._put_labels(gatherer.labels)
            clock.note_examples(self.duck, f"{LABEL} || ':' || line", SEEN)
        gatherer.reject(self.rejects, '"user", item, coalesce(written, time::varchar)')
        for name in ("form", "written", "problem"):
            self.duck.db.execute(f"alter table rows drop column {name}")
        if not clock:
            nth = f"row_number() over (order by {ORDER})"
            self.duck.make("rows", f"select * replace ({nth} - 1 + {first} as time) from rows")
        return Gathered(gatherer, gatherer.labels, gatherer.kinds, clock)

    def settle(self, gathered: "Gathered", time_name: str = "") -> None:
        """Finds what is known of the actions once all of them are in the table `rows`."""
        gatherer = gathered.gatherer
        gatherer.complete(self.rejects, gathered.labels)
        self.actions = Actions(gatherer.columns, gathered.kinds, gatherer.unread)
        for what in ("user", "item"):
            ids = self.duck.table(f'select "{what}" as id, count(*) as n from rows group by 1 order by min({SEEN}), id')
            self.actions.ids[what] = ids.append_column("whole", ids["id"])
        if gathered.clock:
            self._settle(gathered.clock, time_name, gathered.labels)

    def _put_labels(self, labels: list[str]) -> None:
        self.duck.put("labels", pa.table({"file": np.arange(len(labels), dtype=np.int32), "label": labels}))

    def _times(self, raw: Raw, clock: Clock) -> dict[str, str]:
        """Returns the expressions of the times of a file's rows."""
        name, value = raw.keys[2], raw.columns[raw.keys[2]]
        try:
            found = clock.columns(self.duck, raw.relation, value)
        except ValueError as error:
            raise ValueError(f"{raw.label}: column {name} {error}") from None
        return found | {"written": f"coalesce(written, case when {found['time']} is null then {value}::varchar end)"}

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
            self._put_labels(labels)
            self.actions.unit = unit_of(self.duck, "time", "rows", f"{LABEL} || ':' || line || ': '")
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


Reader = Callable[[Job], None]
"""What a source is: it fills a job."""
