"""DuckDB as `prepare` uses it: tables by name, made by SELECT statements, in a memory that is limited and spills.

`trainer/prepare/number.py` needs no more of an engine than put, make, drop, table and row: one that has the table
`rows`, and translates DuckDB's SQL, numbers the actions by the same statements, as the one in `spark.py`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

BATCH_ROWS = 1 << 18


class Duck:
    """An in-memory database of DuckDB. What does not fit into its memory is in a folder, which is removed with it."""

    def __init__(self, memory: int = 0, folder: Path | None = None) -> None:
        self.folder = folder
        self.db = duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
        self.db.execute("set enable_progress_bar = false; set TimeZone = 'UTC'")
        if folder is not None:
            place = str(folder).replace("'", "''")
            self.db.execute(f"set memory_limit = '{memory}B'; set temp_directory = '{place}'")

    def put(self, name: str, table: pa.Table) -> None:
        """Makes a table of Arrow's rows."""
        self.db.register("arrow_rows", table)
        self.make(name, "select * from arrow_rows")
        self.db.unregister("arrow_rows")

    def make(self, name: str, query: str) -> None:
        """Makes a table of a query's rows, or replaces it."""
        self.db.execute(f"create or replace table {name} as {query}")

    def drop(self, *names: str) -> None:
        for name in names:
            self.db.execute(f"drop table if exists {name}")

    def table(self, query: str) -> pa.Table:
        return self.db.sql(query).to_arrow_table().combine_chunks()

    def row(self, query: str) -> tuple[Any, ...]:
        """The only row of a query."""
        [found] = zip(*(column.to_pylist() for column in self.table(query).columns), strict=True)
        return found

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """The rows of a query, some at a time."""
        yield from self.db.sql(query).to_arrow_reader(BATCH_ROWS)

    def close(self) -> None:
        self.db.close()


@cache
def scratch() -> Duck:
    """A database for what needs no tables."""
    return Duck()


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'
