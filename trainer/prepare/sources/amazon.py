"""Amazon ratings and reviews (2014, 2018 or 2023), and the metadata of products that --items names.

Ratings of 2014 are lines `user,item,rating,timestamp` without a header; those of 2023 have the header
user_id,parent_asin,rating,timestamp, and maybe a history, which is not read. The 2018 ratings put the item first; they
are recognized and refused. Reviews are one JSON object a line, with reviewerID, asin, unixReviewTime and overall, the
rating; in 2023 with user_id, parent_asin, timestamp and rating. Times of 2023 are milliseconds. Nothing else of a
review is read.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from logitmix.trainer.data.arrow import as_numbers, is_encodable
from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.download import find_source
from logitmix.trainer.prepare.files import InputFile, single_file
from logitmix.trainer.prepare.jsonl import Record, Unfit, is_json, records
from logitmix.trainer.prepare.scan import Block
from logitmix.trainer.prepare.tables import Job, SideTable
from logitmix.trainer.prepare.text import LONGEST_LINE, Layout, fixed_keys, read_text

COLUMNS = ("user", "item", "rating", "timestamp")
RATINGS = Layout(",", COLUMNS, fixed=True)
RATINGS_2023 = [
    Layout(",", (*COLUMNS, "_")[: header.count(",") + 1], header=header, fixed=True)
    for header in ("user_id,parent_asin,rating,timestamp", "user_id,parent_asin,rating,timestamp,history")
]
REVIEWS = ("reviewerID", "asin", "unixReviewTime", "overall")
REVIEWS_2023 = ("user_id", "parent_asin", "timestamp", "rating")
"""Keys of user, item, time and rating."""
PAGE = "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html"

_ITEM = re.compile(r"B0[0-9A-Z]{8}|[0-9]{9}[0-9X]")
_USER = re.compile(r"A[0-9A-Z]{9,}")
_PRICE = re.compile(r"\$?[0-9][0-9,]*(\.[0-9]+)?")


def read(job: Job) -> None:
    job.source = find_source(job.options, job.progress, reason="has no published digest", page=PAGE)
    file = single_file(job.source)
    job.files, job.kinds = [file], {"rating": "number", "category": "ids", "price": "number", "store": "id"}
    job.read_actions(read_actions(file, job), Clock(dates=False))
    if job.options.items:
        job.items = _read_metadata(single_file(Path(job.options.items)), job)


def read_actions(file: InputFile, job: Job) -> Iterator[Block]:
    """Reads ratings or reviews, whichever the file's start looks like. ValueError for the item-first ratings of 2018,
    and for JSON that is not one object a line."""
    if is_json(file):
        return _read_reviews(file, job)
    with file.open(job.progress) as stream:
        text = stream.readline(LONGEST_LINE).decode("utf-8", "replace").rstrip("\r\n")
    fields = text.split(",")
    if len(fields) == 4 and _ITEM.fullmatch(fields[0]) and _USER.fullmatch(fields[1]):
        raise ValueError(
            f"{file.label}: its lines are item,user,rating,timestamp (the 2018 files); "
            "give it a header and prepare it as a table"
        )
    layout = next((of for of in RATINGS_2023 if of.header == text), RATINGS)
    blocks = read_text(file, fixed_keys("user", "item", "timestamp"), job.rejects, job.progress, layout)
    return (replace(of, columns=of.columns | {"rating": as_numbers(of.columns["rating"])}) for of in blocks)


def _read_reviews(file: InputFile, job: Job) -> Iterator[Block]:
    for block in records(file, json.loads, _review, job.rejects, job.progress):
        numbers, values, lines = zip(*block, strict=True) if block else ((), (), ())
        kinds = {"user": pa.string(), "item": pa.string(), "timestamp": pa.string(), "rating": pa.float32()}
        columns = {name: pa.array([value[at] for value in values], kinds[name]) for at, name in enumerate(kinds)}
        keys = ["user", "item", "timestamp"]
        yield Block(file.label, np.array(numbers, np.int64), keys, columns, lines.__getitem__)


def _read_metadata(file: InputFile, job: Job) -> SideTable:
    """Titles, categories and prices, and in 2023 the stores: JSON of 2018 and 2023, or the Python literals of 2014."""
    items = [
        item for block in records(file, _json_or_literal, _item, job.rejects, job.progress) for _, item, _ in block
    ]
    types = {"title": pa.string(), "category": pa.list_(pa.string()), "price": pa.float32(), "store": pa.string()}
    columns = {name: pa.array([item[1 + at] for item in items], kind) for at, (name, kind) in enumerate(types.items())}
    if columns["store"].null_count == len(items):
        del columns["store"]
    return SideTable(pa.array([item[0] for item in items], pa.string()), columns)


def _review(record: Record) -> tuple[str, str, str, float | None]:
    keys = REVIEWS_2023 if "user_id" in record or "parent_asin" in record else REVIEWS
    for key, kind in zip(keys, (str, str, int), strict=False):
        if type(record.get(key)) is not kind:
            raise Unfit(f"no {key} that is {'text' if kind is str else 'a whole number'}")
    user, item, time, rating = (record.get(key) for key in keys)
    assert isinstance(user, str) and isinstance(item, str)
    if not (is_encodable(user) and is_encodable(item)):
        raise Unfit("not UTF-8")
    return user, item, str(time), _number(rating)


def _item(record: Record) -> tuple[str, str | None, list[str], float | None, str | None]:
    key = "parent_asin" if "parent_asin" in record else "asin"
    item = record.get(key)
    if not (isinstance(item, str) and item and is_encodable(item)):
        raise Unfit(f"no {key} that is text")
    listed = record.get("category") or record.get("categories")
    # 2014 has a list of paths from the root of the catalog, 2018 and 2023 one path.
    paths = [path if isinstance(path, list) else [path] for path in listed] if isinstance(listed, list) else []
    categories = dict.fromkeys(name for path in paths for name in path if isinstance(name, str) and is_encodable(name))
    return (
        item,
        _text(record.get("title")),
        list(categories),
        _number(record.get("price")),
        _text(record.get("store")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and is_encodable(value) else None


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
