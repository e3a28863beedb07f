"""`logitmix prepare table` as a Spark job, for more actions than one machine reads:

    python -m logitmix.trainer.data.spark SOURCE --out DIR [options of prepare table]

Spark reads each file of the actions in a task of its own, by the readers of `prepare`, then filters, numbers and sorts,
and writes sequences/ by parts of users. All else is `prepare`: the driver holds what that holds beside the actions,
every distinct id, the distinct values of one column with their counts, and what was shown and waits. The dataset is the
same, except that means and deviations of numbers are sums in another order.

Source and output are on storage that the driver and all executors see at one path, and each has logitmix.
"""

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tyro
from rich.console import Console
from rich.progress import Progress

try:
    from pyspark import StorageLevel
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession, Window
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema
except ModuleNotFoundError as _error:
    raise SystemExit(f"logitmix: a Spark job needs {_error.name}: pip install 'logitmix[spark]'") from None

from logitmix.modules.schema import Schema
from logitmix.trainer.data.arrange import (
    SHOWN,
    Ordered,
    SortedActions,
    by_user,
    nobody,
    none_left,
    of_others,
    of_shown,
    removed,
    span,
)
from logitmix.trainer.data.arrow import as_numpy, is_text, lengths, lists_of, order_of_texts
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.features import filled, valid_name
from logitmix.trainer.data.ids import WHOLE, as_whole
from logitmix.trainer.data.jsonl import is_json
from logitmix.trainer.data.lists import Lists
from logitmix.trainer.data.prepare import Engine, prepare
from logitmix.trainer.data.raw import ActionBlock, Actions, RawDataset
from logitmix.trainer.data.rejects import Rejects
from logitmix.trainer.data.repeats import count_repeats, shares
from logitmix.trainer.data.row_numbers import name_each_row
from logitmix.trainer.data.sources.table import Table, read, read_actions
from logitmix.trainer.data.spool import Pieces, current
from logitmix.trainer.data.summary import summarize
from logitmix.trainer.data.times import UNITS, Clock, are_digits, note_units, unit_of_counts, window
from logitmix.trainer.data.where import column_of, holds
from logitmix.trainer.data.writer import LAST, USERS_PER_FILE, DatasetContents, find_last, write_part

REFUSED = ("append", "list_separator", "memory")
OWN = pa.schema(
    {"file": pa.int32(), "row": pa.int64(), "user": pa.string(), "item": pa.string(), "time": pa.int64()}
    | {"fraction": pa.int32(), "note": pa.binary()}
)
"""Columns of the actions: where they are; their ids; times, and the nanoseconds of these; and once a file, what else is
known of it. Further columns follow under names of letters and digits."""
IN_FILE, IN_TIME = ("file", "row"), ("time", "fraction", "file", "row")
Condition = Callable[[pa.RecordBatch], pa.Array]
"""Which rows fulfill it."""
TYPES = (pa.string(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())


@tyro.conf.configure(tyro.conf.UseAppendAction)
@dataclass(frozen=True)
class Arguments(PrepareOptions):
    """`prepare table` as a Spark job."""

    name: Annotated[str, tyro.conf.Suppress] = "table"
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")] = ""


def main() -> None:
    try:
        options = tyro.cli(Arguments, prog="python -m logitmix.trainer.data.spark", description=Arguments.__doc__)
        print(summarize(prepare_with_spark(options), options.directory))
    except ValueError as error:
        print(f"logitmix: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def prepare_with_spark(options: PrepareOptions, console: Console | None = None) -> dict[str, Any]:
    """As `prepare`, in the Spark session that there is or else a new one. ValueError also for what only `prepare`
    does."""
    for name in REFUSED:
        if getattr(options, name):
            raise ValueError(f"the Spark job takes no --{name.replace('_', '-')}; logitmix prepare table does")
    if options.name != "table" or "://" in options.out:
        raise ValueError("the Spark job prepares tables, to a path; logitmix prepare does the rest")
    session = SparkSession.builder.appName("logitmix").config("spark.driver.maxResultSize", "0").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    job = _Job(session, options)
    return prepare(options, console, Engine(job.read, job.arrange))


@dataclass(frozen=True)
class _Note:
    """What is known of a file once it is read."""

    rows: int
    lines: int
    rejects: list[tuple[str, int, str, str | bytes]]
    said: list[str]
    clock: dict[str, str]
    examples: dict[str, str]
    times: list[np.ndarray]
    """One of each block, or where not all are dates in digits, one that is none."""
    error: str


class _Listed(Rejects):
    """Malformed lines for the driver."""

    def __init__(self) -> None:
        super().__init__(Path(), 1.0, Console(quiet=True))
        self.rows: list[tuple[str, int, str, str | bytes]] = []
        self.notes: list[str] = []

    def add(self, file: str, line: int, reason: str, text: str | bytes) -> None:
        self.count += 1
        self.rows.append((file, line, reason, text))

    def say(self, message: str) -> None:
        self.notes.append(message)


@dataclass(frozen=True)
class _Reader:
    """Reads files by their numbers."""

    table: Table
    columns: Mapping[str, str]
    """Of the actions, by their names in the files: those in Spark."""
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._read(number)

    def _read(self, number: int) -> Iterator[pa.RecordBatch]:
        listed, clock, rows, error = _Listed(), Clock(self.table.time_format), 0, ""
        examples: dict[str, str] = {}
        times: list[np.ndarray] = []
        try:
            for block in blocks_of(self.table, number, listed, clock):
                if not len(block.users):
                    continue
                if block.numbers is not None:
                    note_units(examples, block.label, block.numbers, block.timestamps)
                times.append(block.timestamps[:1] if are_digits([block.timestamps]) else np.zeros(1, np.int64))
                yield self._batch(number, rows, block)
                rows += len(block.users)
        except ValueError as problem:
            error = str(problem)
        note = _Note(rows, listed.lines, listed.rows, listed.notes, clock.examples, examples, times, error)
        nothing: list[pa.Array] = [pa.nulls(1, of.type) for of in self.schema]
        nothing[0], nothing[len(OWN) - 1] = pa.array([number], pa.int32()), pa.array([pickle.dumps(note)], pa.binary())
        yield pa.record_batch(nothing, self.schema)

    def _batch(self, number: int, first: int, block: ActionBlock) -> pa.RecordBatch:
        rows = len(block.users)
        fractions = np.zeros(rows, np.int32) if block.nanoseconds is None else block.nanoseconds
        own = [np.full(rows, number), np.arange(first, first + rows), block.users, block.items, block.timestamps]
        columns = [*own, fractions, pa.nulls(rows)]
        for name, column in self.columns.items():
            values = block.columns.get(name, pa.nulls(rows)).cast(self.schema.field(column).type)
            # Spark takes 0 and -0 for one.
            columns.append(pc.add(values, 0.0) if pa.types.is_floating(values.type) else values)
        return pa.record_batch(
            [pa.array(of, to.type) if isinstance(of, np.ndarray) else of.cast(to.type)
             for of, to in zip(columns, self.schema, strict=True)], self.schema
        )  # fmt: skip


def blocks_of(table: Table, number: int, rejects: Rejects, clock: Clock) -> Iterator[ActionBlock]:
    """A file of the actions. ValueError also for what the job does not take."""
    file, quiet = table.files[number], Progress(disable=True)
    if is_json(file):
        raise ValueError(f"{file.label}: is JSON, which the Spark job does not read; logitmix prepare table does")
    lists = Lists(table.names.item, "", rejects)
    for block in read_actions([file], table.names, rejects, quiet, table.csv, lists, clock, table.joins):
        if lists.rows or block.kinds:
            what = "rows with lists of items" if lists.rows else "a header that states types"
            raise ValueError(f"{file.label}: has {what}, which the Spark job does not read; logitmix prepare does")
        yield block


class _Column(Pieces):
    """A column of the actions that were read, in the order of the files."""

    def __init__(self, frame: DataFrame, name: str, rows: int) -> None:
        super().__init__()
        self.frame, self.name, self.ends = frame, name, [0, rows]

    def head(self, rows: int) -> pa.Array:
        return _array(self.frame.orderBy(*IN_FILE).limit(rows), self.name)

    def whole(self) -> pa.Array:
        return _array(self.frame.orderBy(*IN_FILE), self.name)


class _Job:
    """From the files to the actions in order."""

    def __init__(self, session: SparkSession, options: PrepareOptions) -> None:
        self.session, self.options = session, options
        self.columns: dict[str, str] = {}
        self.frame: DataFrame | None = None

    def read(self, options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
        return read(options, rejects, progress, self._gathered)

    def _gathered(self, table: Table, rejects: Rejects) -> Actions:
        types = _types(table)
        self.columns = {name: f"c{number}" for number, name in enumerate(types)}
        schema = pa.schema([*OWN, *(pa.field(self.columns[name], kind) for name, kind in types.items())])
        folder = (current().place() / "read").resolve().as_uri()
        count = len(table.files)
        files = self.session.range(0, count, 1, count)
        files.mapInArrow(_Reader(table, self.columns, schema), from_arrow_schema(schema)).write.parquet(folder)
        everything = self.session.read.parquet(folder)
        noted = everything.where("note is not null").select("file", "note").toArrow().sort_by("file")
        notes: list[_Note] = [pickle.loads(note) for note in noted["note"].to_pylist()]
        if error := next((of.error for of in notes if of.error), ""):
            raise ValueError(error)
        clock, examples = Clock(table.time_format), dict[str, str]()
        for note in notes:
            rejects.lines += note.lines
            for row in note.rejects:
                rejects.add(*row)
            for line in note.said:
                rejects.say_once(line)
            clock.examples |= {what: of for what, of in note.clock.items() if what not in clock.examples}
            examples |= {unit: of for unit, of in note.examples.items() if unit not in examples}
        self.frame = self._with_times(everything.where("note is null").drop("note"), table, clock, notes, rejects)
        names = table.names
        user_ids, item_ids = (self._ids(*of, rejects) for of in (("user", names.user), ("item", names.item)))
        rows = sum(note.rows for note in notes)
        return Actions(
            _Column(self.frame, "user", rows),
            _Column(self.frame, "item", rows),
            _Column(self.frame, "time", rows),
            user_ids,
            item_ids,
            {name: _Column(self.frame, column, rows) for name, column in self.columns.items()},
            unit=(self._unit(examples) if clock.unit is None else clock.unit) if names.timestamp else "",
        )

    def _with_times(
        self, frame: DataFrame, table: Table, clock: Clock, notes: list[_Note], rejects: Rejects
    ) -> DataFrame:
        """With the times that they have finally."""
        name = table.names.timestamp
        if not name:
            starts = np.cumsum([0, *(note.rows for note in notes[:-1])])
            return frame.mapInArrow(partial(_moved, starts), frame.schema)
        try:
            change = clock.settling(lambda: (times for note in notes for times in note.times))
        except ValueError as error:
            raise ValueError(f"column {name}: {error}") from None
        for line in clock.said():
            rejects.say(f"column {name}: {line}")
        return frame.mapInArrow(partial(_changed, change), frame.schema) if change else frame

    def _ids(self, column: str, name: str, rejects: Rejects) -> pa.StringArray:
        assert self.frame is not None
        ids = _array(self.frame.select(column).distinct(), column)
        whole = as_whole(name, ids, rejects)
        if whole is ids:
            return ids
        as_numbers = F.regexp_replace(column, WHOLE.replace("$", r"\z"), "$1")
        self.frame = self.frame.withColumn(column, as_numbers)
        return whole.unique()

    def _unit(self, examples: Mapping[str, str]) -> str:
        assert self.frame is not None
        edges = {unit: window(unit) for unit in UNITS}
        within = [F.count_if(F.col("time").between(first, end - 1)) for first, end in edges.values()]
        above, *counts = self.frame.agg(F.count_if(F.col("time") > 0), *within).first()
        return unit_of_counts(dict(zip(UNITS, counts, strict=True)), above, examples)

    def arrange(
        self, actions: Actions, options: PrepareOptions, numbering: Collection[str], progress: Progress
    ) -> Ordered:
        assert self.frame is not None
        chosen = self._chosen(self.frame, actions, options)
        counted = [actions.counts(), _counts(chosen)]
        if not counted[1]["actions"]:
            raise none_left(actions, options)
        different, others = chosen, 0
        moment = ["user", "item", "time", "fraction", "acts"]
        if not options.keep_duplicates:
            same = [*moment, *(column for name, column in self.columns.items() if name not in numbering)]
            place = F.row_number().over(Window.partitionBy(*same).orderBy(*IN_FILE))
            different = chosen.withColumn("place", place).where("place = 1").drop("place")
        different = different.persist(StorageLevel.DISK_ONLY)
        counted.append(_counts(different))
        if not options.keep_duplicates:
            others = counted[2]["actions"] - different.select(*moment).distinct().count()
        acting = different.where("acts")
        counted.append(_counts(acting) if options.shown else counted[2])
        often = _often(acting, "item", options.min_item_actions)
        counted.append(_counts(often))
        fewest = max(options.min_user_actions, 1)
        kept = _often(often, "user", fewest)
        counted.append(_counts(kept))
        if not counted[5]["actions"]:
            raise nobody(fewest, counted[3], counted[1]["actions"] - counted[2]["actions"])
        names, waiting = self.columns, None
        if options.shown:
            kept, waiting = _with_shown(kept, different.where("not acts"))
            names = {**names, SHOWN: SHOWN}
        ids = {}
        for column in ("user", "item"):
            found = _array(kept.select(column).distinct(), column)
            ids[column] = found.take(pa.array(order_of_texts(found)))
            numbers = pa.table({column: ids[column], f"{column}_index": pa.array(np.arange(len(found)), pa.int32())})
            kept = kept.join(self.session.createDataFrame(numbers), column).drop(column)
        kept = kept.persist(StorageLevel.DISK_ONLY)
        of_users = kept.groupBy("user_index").count().toArrow().sort_by("user_index")["count"].to_numpy()
        offsets = np.concatenate([[0], np.cumsum(of_users)])
        return _Ordered(
            offsets,
            Pieces(),
            Pieces(),
            ids["user"],
            ids["item"],
            removed(counted),
            [*of_others(others), *of_shown(waiting)],
            times={},
            parts=[],
            rows=Pieces(),
            waiting=waiting,
            frame=kept,
            names=names,
        )

    def _chosen(self, frame: DataFrame, actions: Actions, options: PrepareOptions) -> DataFrame:
        """The rows that fulfill --where; `acts`: whether they are actions, and not --shown."""
        where = self._conditions(frame, actions, options, options.where, "--where")
        shown = self._conditions(frame, actions, options, options.shown, "--shown")
        marked = frame.withColumn("acts", F.lit(True))
        return marked.mapInArrow(partial(_fulfilling, where, shown), marked.schema) if where or shown else marked

    def _conditions(
        self, frame: DataFrame, actions: Actions, options: PrepareOptions, conditions: Sequence[str], flag: str
    ) -> list[Condition]:
        own = {options.user_column: "user", options.item_column: "item"}
        own |= {options.timestamp_column: "time"} if options.timestamp_column else {}
        columns, found = own | self.columns, list[Condition]()
        for condition in conditions:
            name = column_of(condition, columns, flag)
            if columns[name] == "time":
                in_time = partial(_in_time, condition, list(columns), name, actions.unit, flag)
                # What is wrong with it is said here, not by a task.
                in_time(pa.record_batch({"time": pa.array([], pa.int64())}))
                found.append(in_time)
                continue
            values = _array(frame.select(columns[name]).distinct(), columns[name])
            known = values.dictionary_encode() if is_text(values.type) else values
            holding = holds(condition, dict.fromkeys(columns, pa.nulls(0)) | {name: known}, flag=flag)
            found.append(partial(_among, columns[name], values.filter(pa.array(holding))))
        return found


@dataclass(frozen=True, eq=False)
class _Ordered(Ordered):
    """Actions with the numbers of users and items, in no order."""

    frame: DataFrame = field(kw_only=True)
    names: Mapping[str, str] = field(kw_only=True)
    _distinct: dict[str, tuple[pa.Array, np.ndarray]] = field(default_factory=dict, kw_only=True)

    def _values(self, name: str) -> tuple[pa.Array, np.ndarray]:
        """The distinct values of a column, and how many actions have each."""
        if name not in self._distinct:
            # One column at a time stays in memory.
            self._distinct.clear()
            column = self.names[name]
            found = self.frame.groupBy(column).count().toArrow().sort_by(column).combine_chunks()
            values = found[column].combine_chunks()
            self._distinct[name] = values, found["count"].to_numpy()
        return self._distinct[name]

    def column(self, name: str) -> pa.Array:
        values = self._values(name)[0]
        if name != SHOWN:
            return values
        items = pc.split_pattern(values, "\0")
        return lists_of(lengths(items), items.flatten())

    def counts(self, name: str) -> np.ndarray:
        return self._values(name)[1]

    def names_each_row(self, name: str) -> bool:
        values, counts = self._values(name)
        there = values.is_valid().to_numpy(zero_copy_only=False)
        if 2 * np.count_nonzero(there) <= counts[there].sum():
            return False
        found = self.frame.orderBy("user_index", *IN_TIME).select(self.names[name], "time").toArrow().combine_chunks()
        whole = found[self.names[name]].combine_chunks()
        if is_text(whole.type):
            whole = whole.dictionary_encode()
        return name_each_row(name, whole, found["time"].to_numpy())

    def of_users(self, name: str) -> pa.Array:
        found = self._of_each("user_index", self.frame, name, partial(F.min_by, ord=F.struct(*IN_TIME)))
        return found["value"].combine_chunks()

    def of_items(self, name: str, which: Literal["first", "last"]) -> pa.Array:
        values = self.column(name)
        frame = _having(self.frame, self.names[name], values.filter(filled(values).is_valid()))
        order = F.struct("time", "user_index", *IN_TIME[1:])
        found = self._of_each("item_index", frame, name, partial(F.min_by if which == "first" else F.max_by, ord=order))
        rows = pc.index_in(pa.array(np.arange(len(self.item_ids)), pa.int32()), value_set=found["item_index"])
        return found["value"].combine_chunks().take(rows)

    def _of_each(
        self, owner: str, frame: DataFrame, name: str, choose: Callable[[SparkColumn], SparkColumn]
    ) -> pa.Table:
        chosen = choose(F.col(self.names[name])).alias("value")
        return frame.groupBy(owner).agg(chosen).toArrow().sort_by(owner)

    def write(self, directory: Path, contents: DatasetContents) -> dict[str, Any]:
        assert contents.schema is not None
        (directory / "sequences").mkdir()
        events = {}
        for feature in contents.schema.of("event"):
            name = next(of for of in self.names if feature.name in (valid_name(of), f"event_{valid_name(of)}"))
            made = contents.columns[feature.name]
            parallel = {of: numbers[:] for of, numbers in made.parallel.items()}
            whole = Column(made.values[:], None if made.offsets is None else made.offsets[:], parallel)
            events[feature.name] = self.names[name], self._values(name)[0], whole
        users = {feature.name: contents.columns[feature.name] for feature in contents.schema.of("user")}
        write = _part_writer(directory.resolve(), contents.schema, self.user_ids, users, events, USERS_PER_FILE)
        parts = self.frame.withColumn("part", F.expr(f"user_index div {USERS_PER_FILE}")).groupBy("part")
        found = parts.applyInArrow(write, "what string, value long").groupBy("what")
        figures = (F.sum("value"), F.min("value"), F.max("value"), F.count_distinct("value"))
        (total, least, most, distinct) = (dict[str, int]() for _ in figures)
        for what, *values in found.agg(*figures).collect():
            total[what], least[what], most[what], distinct[what] = values
        self.times.update(first=least["first"], last=most["last"])
        self.times.update({name: total[name] for name in ("tied_actions", "users_that_end_tied")})
        return {
            "actions": total["actions"],
            "repeated_targets": shares(total["users"], {split: total[split] for split in ("validation", "test")}),
            "last_actions": {
                str(last): {"actions": total[f"last {last}"], "items": distinct[f"item in last {last}"]}
                for last in LAST
            },
        }


def _part_writer(
    directory: Path,
    schema: Schema,
    user_ids: pa.StringArray,
    users: Mapping[str, Column],
    events: Mapping[str, tuple[str, pa.Array, Column]],
    users_per_file: int,
) -> Callable[[tuple[pa.Scalar, ...], pa.Table], pa.Table]:
    """What writes a part of sequences/, and returns what is counted of it. `events`: by feature, its column, the
    distinct values there, and the feature of each."""

    def write(key: tuple[pa.Scalar, ...], table: pa.Table) -> pa.Table:
        (part,) = (of.as_py() for of in key)
        first, stop = part * users_per_file, min((part + 1) * users_per_file, len(user_ids))
        order = np.lexsort([table[name].to_numpy() for name in (*IN_TIME[::-1], "user_index")])
        table = table.take(pa.array(order)).combine_chunks()
        of_user, items, times, fractions = (
            table[name].to_numpy() for name in ("user_index", "item_index", "time", "fraction")
        )
        offsets = np.searchsorted(of_user, np.arange(first, stop + 1))
        columns = {name: of.take(np.arange(first, stop)) for name, of in users.items()}
        for name, (column, values, made) in events.items():
            columns[name] = made.take(pc.index_in(table[column].combine_chunks(), value_set=values).to_numpy())
        contents = DatasetContents(offsets, items, times, pa.nulls(0), user_ids[first:stop], None, schema, columns)
        write_part(directory, part, contents, 0, stop - first, first)
        with_targets, repeats = count_repeats(offsets, items)
        found = Counter(actions=len(items), users=with_targets, **repeats)
        found.update(span(SortedActions(of_user, items, times, fractions, order)))
        counted = list(found.items())
        for last in LAST:
            actions, there = find_last(offsets, items, last)
            seen = np.flatnonzero(there).tolist()
            counted += [(f"last {last}", actions), *((f"item in last {last}", item) for item in seen)]
        whats, values = zip(*counted, strict=True)
        return pa.table({"what": whats, "value": pa.array(values, pa.int64())})

    return write


def _types(table: Table) -> dict[str, pa.DataType]:
    """Of the columns beside user, item and time, by the first rows of all files."""
    found: dict[str, set[pa.DataType]] = {}
    for number in range(len(table.files)):
        block = next(blocks_of(table, number, _Listed(), Clock(table.time_format)), None)
        for name, values in block.columns.items() if block else ():
            kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
            kind = pa.string() if is_text(kind) else kind
            if kind not in (*TYPES, pa.null()):
                raise ValueError(
                    f"{table.files[number].label}: column {name} is of type {kind}, which the Spark job does not take; "
                    "leave it out, or run logitmix prepare table"
                )
            found.setdefault(name, set()).update([kind] if kind != pa.null() else [])
    return {name: kinds.pop() if len(kinds) == 1 else pa.string() for name, kinds in found.items()}


def _array(frame: DataFrame, column: str) -> pa.Array:
    return frame.select(column).toArrow()[column].combine_chunks()


def _counts(frame: DataFrame) -> dict[str, int]:
    found = frame.agg(F.count_distinct("user"), F.count_distinct("item"), F.count("*")).first()
    return dict(zip(("users", "items", "actions"), found, strict=True))


def _often(frame: DataFrame, column: str, fewest: int) -> DataFrame:
    if fewest < 2:
        return frame
    often = frame.groupBy(column).count().where(F.col("count") >= fewest).select(column)
    return frame.join(often, column, "left_semi")


def _having(frame: DataFrame, column: str, values: pa.Array) -> DataFrame:
    """The actions with one of the values."""
    return frame.mapInArrow(partial(_only, column, values), frame.schema)


def _only(column: str, values: pa.Array, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.filter(_among(column, values, batch))


def _fulfilling(
    where: Sequence[Condition], shown: Sequence[Condition], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for holding in where:
            batch = batch.filter(holding(batch))
        acts = ~np.logical_or.reduce([as_numpy(of(batch)) for of in shown] or [np.zeros(len(batch), bool)])
        yield batch.set_column(batch.schema.get_field_index("acts"), "acts", pa.array(acts))


def _among(column: str, values: pa.Array, batch: pa.RecordBatch) -> pa.Array:
    return pc.is_in(batch[column], value_set=values)


def _in_time(
    condition: str, columns: list[str], name: str, unit: str | None, flag: str, batch: pa.RecordBatch
) -> pa.Array:
    times = dict.fromkeys(columns, pa.nulls(0)) | {name: batch["time"]}
    return pa.array(holds(condition, times, {name: unit or ""}, flag))


def _with_shown(kept: DataFrame, shown: DataFrame) -> tuple[DataFrame, pa.Table]:
    """The actions with SHOWN, the ids of the items shown before each with NUL between them; and what waits."""
    own = ["user", "item", "acts", *IN_TIME]
    # What is shown at the time of an action comes before it.
    in_time = Window.partitionBy("user").orderBy("time", "acts", "fraction", *IN_FILE)
    ahead = in_time.rowsBetween(0, Window.unboundedFollowing)
    of_action = F.first(F.when(F.col("acts"), F.struct(*IN_FILE)), ignorenulls=True).over(ahead)
    found = kept.select(own).union(shown.select(own)).withColumn("next", of_action).where("not acts")
    in_order = F.array_sort(F.collect_list(F.struct(*IN_TIME, "item")))
    before = F.array_join(F.transform(in_order, lambda each: each["item"]), "\0").alias(SHOWN)
    lists = found.where("next is not null").groupBy(F.col("next.file"), F.col("next.row")).agg(before)
    left = found.where("next is null").select("user", "item", *IN_TIME).toArrow()
    order = np.lexsort([left[name].to_numpy() for name in IN_TIME[::-1]])
    waiting = by_user(left.select(["user", "item"]).take(pa.array(order)))
    return kept.join(lists, list(IN_FILE), "left"), waiting


def _moved(starts: np.ndarray, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield _with_times(batch, batch["time"].to_numpy() + starts[batch["file"].to_numpy()])


def _changed(change: Callable[[np.ndarray], np.ndarray], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield _with_times(batch, change(batch["time"].to_numpy()))


def _with_times(batch: pa.RecordBatch, times: np.ndarray) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index("time"), "time", pa.array(times, pa.int64()))


if __name__ == "__main__":
    # As a module, which executors import.
    from logitmix.trainer.data.spark import main as _main

    _main()
