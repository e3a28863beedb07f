"""JSON lines, one object each, as a relation of DuckDB.

Keys are columns, and those of nested objects are columns by their path, `user.id`. A list of objects is read where a
requested column lies in it: its keys are columns with one list a row, `events.aid`. Integers keep all their digits.
Values of a column that are of several types (numbers and text, or integers that only fit in text) are text.
"""

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pyarrow as pa
from rich.progress import Progress

from logitmix.trainer.data.engine import Duck
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import Keys, Raw, append, literal, unnested
from logitmix.trainer.prepare.text import line_blocks, lines_of

MOST_KEYS = 50
"""Of a nested object: more are not keys but data, such as the details of products."""
MOST_COLUMNS = 1000
MOST_LEVELS = 32

_START = re.compile(rb"\s*(\{|\[\s*[\[\]{])")
_ARRAY = re.compile(rb"\s*\[")
_OBJECT_OF_LINES = re.compile(rb"\s*\{\s*\n")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')

_PROBLEM = """
case when problem is not null then problem when not json_valid(written) then 'not JSON in UTF-8'
    when json_type(written) <> 'OBJECT' then 'not a JSON object'
    when len(list_distinct(json_keys(written))) < len(json_keys(written)) then 'has a key twice' end
"""
_TYPES = {"UBIGINT": "HUGEINT", "DOUBLE": "VARCHAR", "JSON": "VARCHAR", "NULL": "VARCHAR"}
"""What DuckDB's types of values are read as: numbers that are not whole as text at first, so that none loses digits."""


def is_json(file: InputFile) -> bool:
    """Whether the file starts as JSON does. ValueError for an array and for an object over several lines."""
    with file.open(Progress(disable=True)) as stream:
        start = stream.read(1 << 16)
    if not _START.match(start):
        return False
    if _ARRAY.match(start):
        raise ValueError(
            f"{file.label}: is a JSON array; write its elements one a line: jq -c '.[]' {file.label} > lines.jsonl"
        )
    if _OBJECT_OF_LINES.match(start):
        raise ValueError(
            f"{file.label}: is JSON with objects of several lines; write one a line: jq -c . {file.label} > lines.jsonl"
        )
    return True


def read_json(file: InputFile, keys: Keys, rejects: Rejects, progress: Progress, duck: Duck) -> Raw:
    """Returns the lines of a file as rows with the keys `keys`, which may be paths, and says what else is not read.
    ValueError if no line is an object, or if a key is not there."""
    duck.db.execute("create or replace table json_lines (line bigint, problem varchar, written varchar)")
    for rows in _lines(file, progress):
        append(duck, "json_lines", rows)
    duck.make("json_lines", f"select line, {_PROBLEM} as problem, written from json_lines")
    (found,) = duck.row("select json_group_structure(written::json) from json_lines where problem is null")
    if not found:
        raise ValueError(
            f"{file.label}: none of its lines is a JSON object; if its objects take several lines, write one a line: "
            f"jq -c . {file.label} > lines.jsonl"
        )
    left_out: list[str] = []
    shape = _first_keys(json.loads(found), "", left_out)
    if left_out:
        rejects.say(
            f"{file.label}: of an object only the first {MOST_KEYS} keys are read (of a line {MOST_COLUMNS:,}), so "
            f"{len(left_out):,} keys are not, such as {left_out[0]}"
        )
    key_names = keys(file.label, [path for name, of in shape.items() for path in _paths(name, of)])
    form, key_paths = json.dumps(_spec(shape)), {*key_names}
    duck.make(
        "raw_json",
        f"""select line, problem, case when problem is not null then written end as written,
        json_transform(case when problem is null then written end, {literal(form)}) as record from json_lines""",
    )
    duck.drop("json_lines")
    [record] = duck.db.sql("select record from raw_json").types
    columns, objects = dict[str, str](), list[str]()
    for name, kind in record.children:
        for path, expression in unnested(name, f"record[{literal(name)}]", kind, key_names):
            of = _at(shape, path)
            if type(of) is list and "{" in json.dumps(of) and not any(key.startswith(f"{path}.") for key in key_paths):
                objects.append(path)
            elif path in columns:
                raise ValueError(f"{file.label}: has two columns named {path!r}; rename one")
            else:
                columns[path] = expression
    if objects:
        rejects.say(f"{file.label}: not read, as they are objects in lists: {', '.join(objects)}")
    numbers = [path for path in columns if _at(shape, path) == "DOUBLE" and path not in key_names[:2]]
    if numbers:
        long = ", ".join(f"bool_or(regexp_full_match({columns[path]}, '-?[0-9]{{19,}}'))" for path in numbers)
        for path, is_long in zip(numbers, duck.row(f"select {long} from raw_json"), strict=True):
            columns[path] = columns[path] if is_long else f"({columns[path]})::double"
    return Raw(file.label, duck, "raw_json", columns, key_names)


def _lines(file: InputFile, progress: Progress) -> Iterator[pa.Table]:
    """Yields tables of a file's lines that are not blank."""
    for first, block in line_blocks(file, progress):
        numbers, problems, texts = list[int](), list[str | None](), list[str]()
        for number, line in lines_of(first, block):
            text = line.decode("utf-8", "backslashreplace")
            deep = line.count(b"[") + line.count(b"{") > MOST_LEVELS and _levels(text) > MOST_LEVELS
            numbers.append(number)
            texts.append(text)
            problems.append("JSON nested too deeply" if deep else None)
        made = {"line": pa.array(numbers, pa.int64()), "problem": pa.array(problems, pa.string())}
        yield pa.table({**made, "written": pa.array(texts, pa.string())})


def _levels(text: str) -> int:
    """Returns how deeply JSON is nested."""
    return max(accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(of, 0) for of in _STRING.sub("", text)))


def _first_keys(shape: dict[str, Any], path: str, left_out: list[str]) -> dict[str, Any]:
    """Returns the shape of an object with as many of its keys as are read. The paths of the others are added to
    `left_out`."""
    most = MOST_KEYS if path else MOST_COLUMNS
    left_out += [path + name for name in list(shape)[most:]]
    return {
        name: _first_keys(of, f"{path}{name}.", left_out) if type(of) is dict else of
        for name, of in list(shape.items())[:most]
    }


def _paths(name: str, shape: Any) -> Iterator[str]:
    """The names of columns, and of what lies in lists of objects."""
    if type(shape) is not dict:
        yield name
    for of in shape if type(shape) is list else [shape]:
        if type(of) is dict:
            for key, value in of.items():
                yield from _paths(f"{name}.{key}", value)


def _at(shape: dict[str, Any], path: str) -> Any:
    """Returns the shape of a column."""
    for name, of in shape.items():
        if path == name:
            return of
        within = of[0] if type(of) is list else of
        if type(within) is dict and path.startswith(f"{name}.") and (found := _at(within, path[len(name) + 1 :])):
            return [found] if type(of) is list else found
    return None


def _spec(shape: Any, in_list: bool = False) -> Any:
    """Returns the types that values of a shape are read as."""
    if type(shape) is dict:
        return {name: _spec(of, in_list) for name, of in shape.items()}
    if type(shape) is list:
        return [_spec(shape[0], True)]
    return shape if in_list and shape == "DOUBLE" else _TYPES.get(shape, shape)
