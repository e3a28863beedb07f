"""Amazon ratings and reviews (2014), and the metadata of products (2014 or 2018) that --items names.

Ratings are lines `user,item,rating,timestamp` without a header. Reviews are one JSON object a line, with reviewerID,
asin, unixReviewTime and overall, the rating. The 2018 ratings put the item first; they are recognized and refused. The
2023 files have a header: read them as `table`.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.progress import Progress

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.delimited import LONGEST_LINE, Layout, line_blocks, read_delimited
from logitmix.trainer.data.download import find_source
from logitmix.trainer.data.files import InputFile, single_file
from logitmix.trainer.data.raw import ActionBlock, RawDataset, SideTable, accept, gather, is_encodable
from logitmix.trainer.data.rejects import Rejects

RATINGS = Layout(",", fields=4, timestamp=3, numbers={"rating": 2})
PAGE = "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html"

_ITEM = re.compile(r"B0[0-9A-Z]{8}|[0-9]{9}[0-9X]")
_USER = re.compile(r"A[0-9A-Z]{9,}")
_PRICE = re.compile(r"\$?[0-9][0-9,]*(\.[0-9]+)?")


def read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = find_source(options, progress, reason="has no published digest", page=PAGE)
    file = single_file(source)
    return RawDataset(
        gather(read_actions(file, rejects, progress)),
        source,
        [file],
        items=_read_metadata(single_file(Path(options.items)), rejects, progress) if options.items else SideTable(),
        kinds={"rating": "number", "category": "ids", "price": "number"},
    )


def read_actions(file: InputFile, rejects: Rejects, progress: Progress) -> Iterator[ActionBlock]:
    """Reads ratings or reviews, whichever the file's start looks like. ValueError for the item-first ratings of
    2018."""
    with file.open(progress) as stream:
        start = stream.readline(LONGEST_LINE)
    if start.lstrip().startswith(b"{"):
        return _read_reviews(file, rejects, progress)
    fields = start.decode("utf-8", "replace").split(",")
    if len(fields) == 4 and _ITEM.fullmatch(fields[0]) and _USER.fullmatch(fields[1]):
        raise ValueError(
            f"{file.label}: its lines are item,user,rating,timestamp (the 2018 files); "
            "give it a header and prepare it as a table"
        )
    return read_delimited(file, RATINGS, rejects, progress)


def _read_reviews(file: InputFile, rejects: Rejects, progress: Progress) -> Iterator[ActionBlock]:
    for records in _records(file, json.loads, _review, rejects, progress):
        numbers, values, lines = zip(*records, strict=True) if records else ((), (), ())
        users, items, stamps = (pa.array([value[at] for value in values], pa.string()) for at in range(3))
        ratings = {"rating": pa.array([value[3] for value in values], pa.float32())}
        yield accept(file.label, np.array(numbers, np.int64), users, items, stamps, lines.__getitem__, rejects, ratings)


def _read_metadata(file: InputFile, rejects: Rejects, progress: Progress) -> SideTable:
    """Titles, categories and prices: JSON of 2018, or the Python literals of 2014."""
    items = [item for records in _records(file, _json_or_literal, _item, rejects, progress) for _, item, _ in records]
    types = {"title": pa.string(), "category": pa.list_(pa.string()), "price": pa.float32()}
    columns = {name: pa.array([item[1 + at] for item in items], kind) for at, (name, kind) in enumerate(types.items())}
    return SideTable(pa.array([item[0] for item in items], pa.string()), columns)


def _records(
    file: InputFile,
    parse: Callable[[str], Any],
    take: Callable[[Mapping[str, Any]], tuple[Any, ...]],
    rejects: Rejects,
    progress: Progress,
) -> Iterator[list[tuple[int, tuple[Any, ...], bytes]]]:
    """Numbers, records as `take` returns them, and texts of lines with one record each, a block at a time."""
    for first, lines in line_blocks(file, progress):
        records = []
        for number, line in enumerate(lines.to_pylist(), start=first):
            if line.isspace():
                continue
            rejects.lines += 1
            try:
                record = parse(line.decode())
                if not isinstance(record, dict):
                    raise _Unfit("not a JSON object")
                records.append((number, take(record), line))
            except RecursionError:
                rejects.add(file.label, number, "JSON nested too deeply", line)
            except _Unfit as error:
                rejects.add(file.label, number, str(error), line)
            except (ValueError, SyntaxError, TypeError, MemoryError):
                rejects.add(file.label, number, "not JSON in UTF-8", line)
        yield records


class _Unfit(ValueError):
    """An incomplete record, with the reason."""


def _review(record: Mapping[str, Any]) -> tuple[str, str, str, float | None]:
    for key, kind in (("reviewerID", str), ("asin", str), ("unixReviewTime", int)):
        if type(record.get(key)) is not kind:
            raise _Unfit(f"no {key} that is {'text' if kind is str else 'a whole number'}")
    if not (is_encodable(record["reviewerID"]) and is_encodable(record["asin"])):
        raise _Unfit("not UTF-8")
    return record["reviewerID"], record["asin"], str(record["unixReviewTime"]), _number(record.get("overall"))


def _item(record: Mapping[str, Any]) -> tuple[str, str | None, list[str], float | None]:
    item, title = record.get("asin"), record.get("title")
    if not (isinstance(item, str) and item and is_encodable(item)):
        raise _Unfit("no asin that is text")
    listed = record.get("category") or record.get("categories")
    # 2014 has a list of paths from the root of the catalog, 2018 one path.
    paths = [path if isinstance(path, list) else [path] for path in listed] if isinstance(listed, list) else []
    categories = dict.fromkeys(name for path in paths for name in path if isinstance(name, str) and is_encodable(name))
    return (
        item,
        title if isinstance(title, str) and is_encodable(title) else None,
        list(categories),
        _number(record.get("price")),
    )


def _number(value: object) -> float | None:
    """A number, or a price such as $1,299.99."""
    if isinstance(value, str) and _PRICE.fullmatch(value):
        return float(value.lstrip("$").replace(",", ""))
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _json_or_literal(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        with warnings.catch_warnings():
            # Literals of 2014 have escapes that Python no longer likes.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return ast.literal_eval(line)
