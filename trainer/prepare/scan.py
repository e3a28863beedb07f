"""The rows of a file as a relation of DuckDB, whatever kind of file it is: Parquet here, delimited text in text.py,
JSON in jsonl.py.

Fields of nested values are columns under their paths, `user.id`. A list of structs is read where a requested column
lies in it: its fields are columns with one list a row, `events.aid`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from logitmix.common.mappings import first_line
from logitmix.trainer.data.engine import Duck, quoted
from logitmix.trainer.data.times import INTEGER_TYPES, TIME_TYPES
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.rejects import Rejects

Keys = Callable[[str, list[str]], list[str]]
"""From a file's name and header, the columns that every row must have. ValueError if one is missing."""

LARGE_INTEGERS = ("ubigint", "hugeint", "uhugeint")
NO_PROBLEM = "null::varchar as problem, null::varchar as written"


@dataclass(frozen=True)
class Raw:
    """The rows of a file."""

    label: str
    """The file."""
    duck: Duck
    relation: str
    """A table or view with the columns `line` (text, JSON) or row (Parquet), from 1; `problem`: why a row is malformed,
    null for others; `written`, the text of a malformed row; and those that `columns` are made of."""
    columns: dict[str, str]
    """Expressions of all columns that have a name or were requested, by their names."""
    keys: list[str]
    """Names of the requested columns."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of columns that the file itself states."""
    place: str = "0"
    """The place of a row in the list that it comes from."""
    one_time: bool = False
    """Whether all rows of a list have its time: the places then order them, and tell an item that a list has twice from
    a row that is there twice."""

    @property
    def others(self) -> dict[str, str]:
        """The columns that were not requested."""
        return {name: of for name, of in self.columns.items() if name not in self.keys}

    def types(self, *names: str) -> list[Any]:
        """Returns DuckDB's types of columns."""
        expressions = ", ".join(self.columns[name] for name in names)
        return list(self.duck.db.sql(f"select {expressions} from {self.relation}").types) if names else []

    def stored(self, name: str) -> "Raw":
        """Stores the rows in the table `name`, whose columns are c0, c1 and so on, and returns them as rows of that
        table."""
        made = "".join(f", {of} as c{place}" for place, of in enumerate(self.columns.values()))
        self.fill(f"create or replace table {name} as select line, problem, written, {self.place} as place{made}")
        return replace(
            self, relation=name, columns={each: f"c{at}" for at, each in enumerate(self.columns)}, place="place"
        )

    def fill(self, statement: str) -> None:
        """Runs a statement that lacks FROM and the name of the relation. ValueError if the file cannot be read."""
        try:
            self.duck.db.execute(f"{statement} from {self.relation}")
        except duckdb.Error as error:
            of_memory = isinstance(error, duckdb.OutOfMemoryException | duckdb.IOException)
            if of_memory and self.label not in str(error):
                raise
            raise ValueError(f"{self.label}: not readable ({first_line(error)})") from None


def append(duck: Duck, name: str, rows: pa.Table) -> None:
    """Adds rows to a table, which has all their columns."""
    duck.db.register("arrow_rows", rows)
    duck.db.execute(f"insert into {name} by name select * from arrow_rows")
    duck.db.unregister("arrow_rows")


def literal(text: str) -> str:
    """Returns a text as a literal in SQL."""
    return "'" + text.replace("'", "''") + "'"


def place_of(path: Path) -> str:
    """Returns a path as a literal in SQL, in which nothing stands for other names."""
    return literal(re.sub(r"([*?[])", r"[\1]", str(path)))


def is_named(column: str) -> bool:
    """False for pandas' row numbers: a blank name in CSV, __index_level_0__ in Parquet."""
    return bool(column.strip()) and not column.startswith("__")


def check_names(label: str, header: Sequence[str], key_names: Sequence[str], rejects: Rejects) -> None:
    """ValueError if two columns have one name; says which columns are not read for want of one."""
    for place, name in enumerate(header):
        if (name in key_names or is_named(name)) and name in header[:place]:
            raise ValueError(f"{label}: has two columns named {name!r}; rename one")
    unnamed = [name.strip() or "one without a name" for name in header if not (name in key_names or is_named(name))]
    if unnamed:
        columns = ", ".join(dict.fromkeys(unnamed))
        rejects.say_once(f"columns that are not read, for their names are those of pandas' row numbers: {columns}")


def read_parquet(file: InputFile, keys: Keys, rejects: Rejects, duck: Duck) -> Raw:
    """ValueError if the file is not readable Parquet."""
    source = f"read_parquet({place_of(file.path)}, file_row_number = true, hive_partitioning = false)"
    try:
        names = pq.read_schema(file.path).names
        # DuckDB renames columns that differ in case alone.
        found = duck.db.sql(f"select * exclude (file_row_number) from {source}")
    except (pa.ArrowException, duckdb.Error, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.path}: not readable Parquet ({first_line(error)})") from None
    types = dict(zip(names, zip(map(quoted, found.columns), found.types, strict=True), strict=True))
    key_names = keys(file.label, [path for name, (_, kind) in types.items() for path in paths(name, kind)])
    check_names(file.label, names, key_names, rejects)
    columns = {
        path: expression
        for name, (column, kind) in types.items()
        for path, expression in unnested(name, column, kind, key_names)
        if path in key_names or is_named(path)
    }
    duck.db.execute(f"create or replace view raw as select file_row_number + 1 as line, {NO_PROBLEM}, * from {source}")
    return Raw(file.label, duck, "raw", columns, key_names)


def unnested(name: str, expression: str, kind: Any, wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A column under its name; instead of structs, their fields by path, and instead of lists of structs with a wanted
    path, one column of lists for each field."""
    if kind.id == "struct":
        for field_name, of in kind.children:
            yield from unnested(f"{name}.{field_name}", f"({expression})[{literal(field_name)}]", of, wanted)
    elif _is_list_of_structs(kind) and any(path.startswith(f"{name}.") for path in wanted):
        for path, part in unnested(name, "part", kind.children[0][1], wanted):
            yield path, f"[{part} for part in {expression}]"
    else:
        yield name, expression


def paths(name: str, kind: Any) -> Iterator[str]:
    """The names that `unnested` may give."""
    if kind.id == "struct":
        for field_name, of in kind.children:
            yield from paths(f"{name}.{field_name}", of)
        return
    yield name
    if _is_list_of_structs(kind):
        yield from paths(name, kind.children[0][1])


def _is_list_of_structs(kind: Any) -> bool:
    return kind.id == "list" and kind.children[0][1].id == "struct"


def common(expression: str, kind: Any, raw: Raw) -> tuple[str, str]:
    """Returns the expression of a column as one of the types that features are made of, and DuckDB's name of that type.
    The name is "" for values of other types, which then are texts."""
    if kind.id in LARGE_INTEGERS:
        fits = f"select count({expression}) = count(try_cast({expression} as bigint)) from {raw.relation}"
        return expression, "bigint" if raw.duck.row(fits)[0] else "varchar"
    if kind.id in INTEGER_TYPES:
        return expression, "bigint"
    if kind.id in ("varchar", "boolean", "float", "double"):
        return expression, kind.id
    if kind.id in ("decimal", "uuid", "enum", *TIME_TYPES):
        return expression, "varchar"
    if kind.id == "blob":
        text, are_texts = bytes_as_text(expression, raw)
        return (text, "varchar") if are_texts else (expression, "")
    if _is_list_of_structs(kind):
        return expression, str(kind)
    if kind.id == "list":
        made, element = common("part", kind.children[0][1], raw) if kind.children[0][1].id in _OF_LISTS else ("", "")
        return (f"[{made} for part in {expression}]", f"{element}[]") if element else (expression, "")
    return expression, ""


_OF_LISTS = (*INTEGER_TYPES, "varchar", "boolean", "float", "double", "decimal", "uuid", "enum", "null", *TIME_TYPES)


def bytes_as_text(expression: str, raw: Raw) -> tuple[str, bool]:
    """Returns the expression of bytes as text, as programs without a type for text store it, and whether all of them
    are text. UUIDs, 16 bytes that are not all UTF-8, are text as they are written."""
    text, size = f"try(decode({expression}))", f"octet_length({expression})"
    are_texts, are_uuids = raw.duck.row(
        f"select count({text}) = count({expression}), min({size}) = 16 and max({size}) = 16 from {raw.relation}"
    )
    if are_texts or not are_uuids:
        return text, are_texts
    form = "^(.{8})(.{4})(.{4})(.{4})"
    return f"lower(regexp_replace(hex({expression}), '{form}', '\\1-\\2-\\3-\\4-'))", True
