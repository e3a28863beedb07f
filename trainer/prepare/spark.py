"""`logitmix prepare table` as a Spark job, for more actions than one machine reads:

    python -m logitmix.trainer.prepare.spark SOURCE --out DIR [options of prepare table]

Spark reads each file of the actions in a task of its own, by the readers of `prepare`. It runs the statements of
number.py, which sqlglot translates from DuckDB's SQL, and writes each file of sequences/ in a task. All else is
`prepare`: the driver holds what that holds beside the actions, which is every distinct id, and the distinct values of
one column with their counts. The dataset is the same.

Source and output are on storage that the driver and all executors see at one path, and each has logitmix.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from rich.console import Console
from rich.progress import Progress

try:
    import sqlglot
    from pyspark.sql import DataFrame, SparkSession
except ModuleNotFoundError as _error:
    raise SystemExit(f"logitmix: a Spark job needs {_error.name}: pip install 'logitmix[spark]'") from None

from logitmix.trainer.data.engine import Duck, quoted
from logitmix.trainer.data.writer import Counted, PartWriter
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.prepare import prepare
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.summary import summarize
from logitmix.trainer.prepare.tables import ROWS, Gathered, Gatherer, Job

Gather = Callable[[Job, Sequence[InputFile]], Gathered]


@tyro.conf.configure(tyro.conf.UseAppendAction)
@dataclass(frozen=True)
class Arguments(PrepareOptions):
    """`prepare table` as a Spark job."""

    name: Annotated[str, tyro.conf.Suppress] = "table"
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")] = ""


def main() -> None:
    try:
        options = tyro.cli(Arguments, prog="python -m logitmix.trainer.prepare.spark", description=Arguments.__doc__)
        print(summarize(prepare_with_spark(options), options.directory))
    except ValueError as error:
        print(f"logitmix: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def prepare_with_spark(options: PrepareOptions, console: Console | None = None) -> dict[str, Any]:
    """Does what `prepare` does, in the Spark session that there is or else a new one.

    Raises ValueError as `prepare` does, and for what only that does.
    """
    for name in ("append", "list_separator", "memory"):
        if getattr(options, name):
            raise ValueError(f"the Spark job takes no --{name.replace('_', '-')}; logitmix prepare table does")
    if options.name != "table" or "://" in options.out:
        raise ValueError("the Spark job prepares tables, to a path; logitmix prepare does the rest")
    given = {name: getattr(options, name) for name in ("source", "items", "users", "schema")}
    paths: dict[str, Any] = {name: str(Path(path).absolute()) for name, path in given.items() if path}
    return prepare(replace(options, out=str(options.directory.absolute()), **paths), console, SparkJob)


class Spark(Duck):
    """Spark with the tables of a job, each in Parquet files in the folder of a DuckDB, whose own tables stay empty. The
    files of tables that are given up stay until the job ends."""

    def __init__(self, duck: Duck) -> None:
        assert duck.folder is not None
        self.db, self.place = duck.db, duck.folder
        made = SparkSession.builder.appName("logitmix").config("spark.driver.maxResultSize", "0")
        self.session = made.config("spark.sql.session.timeZone", "UTC").getOrCreate()
        self.session.sparkContext.setLogLevel("ERROR")

    def put(self, name: str, table: pa.Table) -> None:
        path = self.new_path()
        pq.write_table(table, path)
        self.view(name, [path])

    def make(self, name: str, query: str) -> None:
        path = self.new_path()
        self.query(query).write.parquet(path.as_uri())
        self.view(name, [path])

    def table(self, query: str) -> pa.Table:
        return self.query(query).toArrow().combine_chunks()

    def new_path(self) -> Path:
        """Returns a path in the job's folder for the files of one more table."""
        return self.place / uuid4().hex

    def view(self, name: str, paths: Sequence[Path]) -> None:
        """Names the table in these files."""
        self.session.read.parquet(*(path.as_uri() for path in paths)).createOrReplaceTempView(name)

    def query(self, query: str) -> DataFrame:
        """Returns the rows of a query in DuckDB's SQL."""
        # Spark's to_timestamp raises an error where DuckDB's try_strptime has null, which sqlglot does not know.
        [translated] = sqlglot.transpile(query.replace("try_strptime(", "strptime("), read="duckdb", write="spark")
        return self.session.sql(translated.replace("TO_TIMESTAMP(", "TRY_TO_TIMESTAMP("))


class _Said:
    """What a task says by the methods of Rejects, as calls that the driver makes."""

    def __init__(self) -> None:
        self.count = self.lines = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, given))


Found = tuple[dict[str, Any], str, Gathered | None]
"""The attributes of _Said, what is wrong with a file, and what was found in it."""


def _read(options: PrepareOptions, gather: Gather, number: int, file: InputFile, path: Path) -> Found:
    """Reads the file of this number into Parquet."""
    said, duck = _Said(), Duck()
    duck.db.execute("set threads = 1")
    try:
        read = gather(Job(options, duck, cast(Rejects, said), Progress(disable=True)), [file])
        if read.lists and read.lists.rows:
            raise ValueError(f"{file.label}: has lists of items, which only logitmix prepare table reads")
    except ValueError as error:
        return vars(said), str(error), None
    duck.db.execute(f"update rows set file = {number}")
    duck.db.table("rows").write_parquet(str(path))
    del read.gatherer.duck
    return vars(said), "", replace(read, lists=None)


class SparkJob(Job):
    """A job of `prepare` whose tables are in Spark."""

    def __init__(self, options: PrepareOptions, duck: Duck, rejects: Rejects, progress: Progress) -> None:
        self.spark = Spark(duck)
        self.context = self.spark.session.sparkContext
        super().__init__(options, self.spark, rejects, progress)

    def gather_files(self, gather: Gather) -> Gathered:
        """Makes the view `rows` of files that are read in a task each."""
        spark, gatherer, read = self.spark, Gatherer(self.spark, "rows", ROWS), partial(_read, self.options, gather)
        own = {column: quoted(column) for column, *_ in spark.db.sql("describe rows").fetchall()}
        tasks = [(number, file, spark.new_path()) for number, file in enumerate(self.files)]
        results = self.context.parallelize(tasks, len(tasks)).map(lambda task: read(*task)).collect()
        whole = Gathered(gatherer, [file.label for file in self.files], {}, None)
        starts, alike = [0], dict[Any, list[Path]]()
        for (_, _, path), (said, error, part) in zip(tasks, results, strict=True):
            self.rejects.lines += said["lines"]
            self.rejects.count += said["count"]
            for name, given in said["calls"]:
                getattr(self.rejects, name)(*given)
            if part is None:
                raise ValueError(error)
            for name, labels in part.gatherer.names.items():
                gatherer.names.setdefault(name, set()).update(labels)
            for column, types in part.gatherer.types.items():
                for kind, label in types.items():
                    gatherer.admit(column, kind, label)
            gatherer.unread |= part.gatherer.unread
            whole.kinds.update(part.kinds)
            if part.clock:
                whole.clock = replace(part.clock, examples=part.clock.examples | (whole.clock or part.clock).examples)
            starts.append(starts[-1] + part.gatherer.rows)
            kinds = str([*map(list, part.gatherer.types.values())])
            alike.setdefault((kinds, *part.gatherer.columns.items()), []).append(path)
        gatherer.complete(self.rejects, whole.labels)
        spark.put("files", pa.table({"number": np.arange(len(tasks)), "start": starts[:-1]}))
        described, queries = spark.db.sql("describe rows").fetchall(), list[str]()
        for number, ((_, *names), paths) in enumerate(alike.items()):
            spark.view(f"read_{number}", paths)
            values = own | {gatherer.columns[name]: column for name, column in names}
            values |= {} if whole.clock else {"time": "start + time"}
            listed = (f"cast({values.get(of, 'null')} as {kind}) as {quoted(of)}" for of, kind, *_ in described)
            queries.append(f"select {', '.join(listed)} from read_{number} join files on file = number")
        spark.query(" union all ".join(queries)).createOrReplaceTempView("rows")
        return whole

    def write(self, writer: PartWriter, actions: str, order: str) -> Counted:
        """Writes each file of sequences/ in a task."""
        parted = self.spark.new_path()
        query = f"select *, user_index // {writer.users_per_file} as part from ({actions}) as actions"
        self.spark.query(query).write.partitionBy("part").parquet(parted.as_uri())
        sent, keys = self.context.broadcast(writer), [(name, "ascending") for name in order.split(", ")]

        def write(part: int) -> Counted:
            return sent.value(part, pq.read_table(parted / f"part={part}").sort_by(keys))

        (writer.directory / "sequences").mkdir(parents=True)
        counted = Counted()
        for found in self.context.parallelize(range(writer.parts), writer.parts).map(write).collect():
            counted.add(found)
        return counted


if __name__ == "__main__":
    # As a module, which executors import.
    from logitmix.trainer.prepare.spark import main as _main

    _main()
