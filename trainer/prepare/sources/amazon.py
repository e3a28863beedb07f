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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from logitmix.trainer.data.arrow import is_encodable
from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.download import find_source
from logitmix.trainer.prepare.files import InputFile, single_file
from logitmix.trainer.prepare.jsonl import is_json, read_json
from logitmix.trainer.prepare.scan import Raw
from logitmix.trainer.prepare.tables import Job, SideTable
from logitmix.trainer.prepare.text import LONGEST_LINE, Layout, as_number, fixed_keys, line_blocks, read_text

COLUMNS = ("user", "item", "rating", "timestamp")
COLUMNS_OF_KEYS = ("user", "item", "timestamp")
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
    job.read_actions([read_actions(file, job)], Clock(dates=False))
    if job.options.items:
        job.items = _read_metadata(single_file(Path(job.options.items)), job)


def read_actions(file: InputFile, job: Job) -> Raw:
    """Reads ratings or reviews, whichever the file's start looks like. ValueError for the item-first ratings of 2018,
    and for JSON that is not one object a line."""
    if is_json(file):
        raw = read_json(file, _keys_of_reviews, job.rejects, job.progress, job.duck)
        rating = next((name for name in (REVIEWS[3], REVIEWS_2023[3]) if name in raw.columns), "")
        columns = {name: raw.columns[key] for name, key in zip(COLUMNS_OF_KEYS, raw.keys, strict=True)}
        text = f"{raw.columns[rating]}::varchar" if rating else "null::varchar"
        return replace(raw, columns=columns | {"rating": as_number(text)}, keys=list(COLUMNS_OF_KEYS))
    with file.open(job.progress) as stream:
        text = stream.readline(LONGEST_LINE).decode("utf-8", "replace").rstrip("\r\n")
    fields = text.split(",")
    if len(fields) == 4 and _ITEM.fullmatch(fields[0]) and _USER.fullmatch(fields[1]):
        raise ValueError(
            f"{file.label}: its lines are item,user,rating,timestamp (the 2018 files); "
            "give it a header and prepare it as a table"
        )
    layout = next((of for of in RATINGS_2023 if of.header == text), RATINGS)
    raw = read_text(file, fixed_keys(*COLUMNS_OF_KEYS), job.rejects, job.progress, job.duck, layout)
    raw.columns["rating"] = as_number(raw.columns["rating"])
    return raw


def _keys_of_reviews(label: str, header: list[str]) -> list[str]:
    keys = REVIEWS_2023 if "user_id" in header or "parent_asin" in header else REVIEWS
    if missing := [key for key in keys[:3] if key not in header]:
        raise ValueError(f"{label}: no review has {missing[0]}; is it the right file?")
    return list(keys[:3])


def _read_metadata(file: InputFile, job: Job) -> SideTable:
    """Titles, categories and prices, and in 2023 the stores: JSON of 2018 and 2023, or the Python literals of 2014."""
    items, rejects = list[tuple[Any, ...]](), job.rejects
    for first, block in line_blocks(file, job.progress):
        for number, line in enumerate(block.split(b"\n"), first):
            if not line.strip():
                continue
            rejects.lines += 1
            try:
                items.append(_item(_json_or_literal(line.decode())))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
                reason = str(error) if isinstance(error, Unfit) else "not JSON in UTF-8"
                rejects.add(file.label, number, reason, line.decode("utf-8", "backslashreplace"))
    types = {"title": pa.string(), "category": pa.list_(pa.string()), "price": pa.float32(), "store": pa.string()}
    columns = {name: pa.array([item[1 + at] for item in items], kind) for at, (name, kind) in enumerate(types.items())}
    if columns["store"].null_count == len(items):
        del columns["store"]
    return SideTable(pa.array([item[0] for item in items], pa.string()), columns)


class Unfit(ValueError):
    """An incomplete record, with the reason."""


def _item(record: Any) -> tuple[str, str | None, list[str], float | None, str | None]:
    if not isinstance(record, dict):
        raise Unfit("not a JSON object")
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
