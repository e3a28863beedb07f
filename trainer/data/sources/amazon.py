"""Amazon ratings and reviews (2014).

Ratings are lines `user,item,rating,timestamp` without a header. Reviews are one JSON object a line, with reviewerID,
asin and unixReviewTime. The 2018 ratings put the item first; they are recognized and refused. The 2023 files have a
header: read them as `table`.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from rich.progress import Progress

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.delimited import LONGEST_LINE, Layout, line_blocks, read_delimited
from logitmix.trainer.data.download import find_source
from logitmix.trainer.data.files import InputFile, single_file
from logitmix.trainer.data.raw import ActionBlock, RawDataset, RowBuffer, gather
from logitmix.trainer.data.rejects import Rejects

RATINGS = Layout(",", fields=4, timestamp=3)
PAGE = "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html"

_ITEM = re.compile(r"B0[0-9A-Z]{8}|[0-9]{9}[0-9X]")
_USER = re.compile(r"A[0-9A-Z]{9,}")


def read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = find_source(options, progress, reason="has no published digest", page=PAGE)
    file = single_file(source)
    return RawDataset(gather(read_actions(file, rejects, progress)), source, [file])


def read_actions(file: InputFile, rejects: Rejects, progress: Progress) -> Iterator[ActionBlock]:
    """Ratings or reviews, whichever the file starts like. ValueError for the item-first ratings of 2018."""
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
    rows = RowBuffer(file.label, rejects, timed=True)
    for first, lines in line_blocks(file, progress):
        for number, line in enumerate(lines.to_pylist(), start=first):
            if line.isspace():
                continue
            rejects.lines += 1
            try:
                rows.add(number, *_review(json.loads(line.decode())), line)
            except RecursionError:
                rejects.add(file.label, number, "JSON nested too deeply", line)
            except ValueError as error:
                reason = str(error) if type(error) is ValueError else "not JSON in UTF-8"
                rejects.add(file.label, number, reason, line)
        yield rows.take()


def _review(record: Any) -> tuple[str, str, str]:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    values = []
    for key, kind in (("reviewerID", str), ("asin", str), ("unixReviewTime", int)):
        if type(record.get(key)) is not kind:
            raise ValueError(f"no {key} that is {'text' if kind is str else 'a whole number'}")
        values.append(str(record[key]))
    return values[0], values[1], values[2]
