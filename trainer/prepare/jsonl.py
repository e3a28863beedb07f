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
from logitmix.trainer.prepare.scan import Keys, Raw, append, literal, paths, unnested
from logitmix.trainer.prepare.text import LINES, SHOWN, line_blocks, lines_of, table_of_lines

MOST_KEYS = 50
"""Of a nested object: more are not keys but data, such as the details of products."""
MOST_COLUMNS = 1000
MOST_LEVELS = 32

_START = re.compile(rb"\s*(\{|\[\s*[\[\]{])")
_ARRAY = re.compile(rb"\s*\[")
_OBJECT_OF_LINES = re.compile(rb"\s*\{\s*\n")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')

_PROBLEM = """
case when problem is not null or not json_valid(written) then 'not JSON in UTF-8'
    when json_type(written) <> 'OBJECT' then 'not a JSON object'
    when len(list_distinct(json_keys(written))) < len(json_keys(written)) then 'has a key twice' end
"""
_TYPES = {"UBIGINT": "HUGEINT", "DOUBLE": "VARCHAR", "JSON": "VARCHAR", "NULL": "VARCHAR"}
"""What DuckDB's types of values are read as: numbers of an id that are not whole as text, so that none loses digits."""


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
    duck.put("lines", LINES.empty_table())
    for first, block in line_blocks(file, progress):
        append(duck, "lines", table_of_lines(first, *lines_of(block)))
    duck.make("lines", f"select line, {_PROBLEM} as problem, written from lines")
    shape = _shape(duck)
    if _levels(shape) > MOST_LEVELS:
        _reject_deep_lines(duck)
        shape = _shape(duck)
    if not shape:
        raise ValueError(
            f"{file.label}: none of its lines is a JSON object; if its objects take several lines, write one a line: "
            f"jq -c . {file.label} > lines.jsonl"
        )
    names = json.loads(shape)
    if len(names) > MOST_COLUMNS:
        raise ValueError(f"{file.label}: its objects have {len(names):,} keys, more than {MOST_COLUMNS:,}")
    if fractions := [*_fractions(names)]:
        long = "bool_or(regexp_full_match(json_extract_string(written, {}), '-?[0-9]{{19,}}'))"
        asked = ", ".join(long.format(literal(pointer)) for *_, pointer in fractions)
        # Few lines have so many digits in a row, and each question parses a line anew.
        are_long = duck.row(
            f"select {asked} from lines where problem is null and regexp_matches(written, '[0-9]{{19}}')"
        )
        for (within, name, _), is_long in zip(fractions, are_long, strict=True):
            if is_long:
                within[name] = "VARCHAR"
    everything = literal(json.dumps(_spec(names, "", None, [])))
    [whole] = duck.db.sql(f"select json_transform('null', {everything})").types
    key_names = keys(file.label, [path for name, kind in whole.children for path in paths(name, kind)])
    left_out = list[str]()
    form = literal(json.dumps(_spec(names, "", key_names, left_out)))
    duck.make(
        "raw_json",
        f"""select line, problem, case when problem is not null then left(written, {SHOWN}) end as written,
        json_transform(case when problem is null then written end, {form}) as record from lines""",
    )
    duck.drop("lines")
    [record] = duck.db.sql("select record from raw_json").types
    columns = dict[str, str]()
    for name, kind in record.children:
        for path, expression in unnested(name, f"record[{literal(name)}]", kind, key_names):
            if path in columns:
                raise ValueError(f"{file.label}: has two columns named {path!r}; rename one")
            columns[path] = expression
    if left_out:
        rejects.say(
            f"{file.label}: not read, as they are lists of objects, or objects of more than {MOST_KEYS} keys: "
            f"{', '.join(left_out)}"
        )
    return Raw(file.label, duck, "raw_json", columns, key_names)


def _shape(duck: Duck) -> str:
    """Returns the common structure of all objects in JSON, "" if there are none."""
    return duck.row("select json_group_structure(written::json) from lines where problem is null")[0] or ""


def _reject_deep_lines(duck: Duck) -> None:
    """Marks lines as malformed whose values are nested more deeply than MOST_LEVELS."""
    brackets = "length(written) - length(replace(replace(written, '[', ''), '{', ''))"
    query = f"select line, written from lines where problem is null and {brackets} > {MOST_LEVELS}"
    deep = [line for line, text in duck.db.execute(query).fetchall() if _levels(text) > MOST_LEVELS]
    duck.put("deep", pa.table({"line": pa.array(deep, pa.int64())}))
    duck.db.execute("update lines set problem = 'JSON nested too deeply' where line in (select line from deep)")


def _levels(text: str) -> int:
    """Returns how deeply JSON is nested."""
    return max(accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(of, 0) for of in _STRING.sub("", text)), default=0)


def _fractions(shape: dict[str, Any], pointer: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields the objects with numbers that are not all whole, their keys, and JSON pointers. As floats, long whole
    numbers among them would lose digits."""
    for name, of in shape.items():
        path = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
        if type(of) is dict:
            yield from _fractions(of, path)
        elif of == "DOUBLE":
            yield shape, name, path


def _spec(shape: Any, path: str, keys: list[str] | None, left_out: list[str], in_list: bool = False) -> Any:
    """Returns the types that values of a shape are read as; None if it is not read: an object with too many keys, and a
    list of objects in which none of the `keys` lies, if these are known. Adds the path of that to `left_out`."""
    if type(shape) is dict:
        if path and len(shape) > MOST_KEYS:
            left_out.append(path[:-1])
            return None
        fields = {name: _spec(of, f"{path}{name}.", keys, left_out, in_list) for name, of in shape.items()}
        return {name: of for name, of in fields.items() if of} or None
    if type(shape) is list:
        if keys is not None and "{" in json.dumps(shape) and not any(key.startswith(path) for key in keys):
            left_out.append(path[:-1])
            return None
        element = _spec(shape[0], path, keys, left_out, True)
        return element and [element]
    if shape == "DOUBLE" and (in_list or path[:-1] not in (keys or [])[:2]):
        return shape
    return _TYPES.get(shape, shape)
