"""Quotes of CSV that are not meant as such: a stray one swallows all rows up to the next quote."""

import csv
import re
from collections.abc import Sequence

MANY = 8
"""Lines that look like rows are no coincidence, even where nothing in them is like an id, a number or a time."""
_NUMBER = re.compile(r"-?[0-9][0-9.:/TZ+ -]*")
"""Or a time."""


def swallows_rows(lines: Sequence[str], delimiter: str, width: int, broken: bool) -> bool:
    """Whether the lines from the second on, which CSV takes for the rest of a row with a quoted field, are rows of
    their own: at least half of them have `width` fields, and where the first line has numbers or times they have some,
    too; without these, ids like its ids. If it has nothing of all that, it takes MANY of them, unless the row is
    `broken`, which is not CSV anyway."""
    first = _fields(lines[0], delimiter)
    if len(first) < width:
        first = lines[0].rstrip("\r\n").split(delimiter)
    shapes = {place: _shape(text) for place, text in enumerate(first[:width])}
    shapes = {place: shape for place, shape in shapes.items() if shape}
    if "9" in shapes.values():
        shapes = {place: shape for place, shape in shapes.items() if shape == "9"}
    rest = [line for line in lines[1:] if line.strip()]
    alike = 0
    for line in rest:
        row = _fields(line, delimiter)
        alike += len(row) == width and all(_shape(row[place]) == shape for place, shape in shapes.items())
    return alike >= (1 if broken or shapes else MANY) and 2 * alike >= len(rest)


def _shape(text: str) -> str:
    """9 for numbers and times, a9 for i8 or user12; empty for other texts."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return "9"
    shape = re.sub(r"[^\W\d_]+", "a", re.sub(r"[0-9]+", "9", text))
    return shape if "9" in shape and '"' not in shape and not re.search(r"\s", shape) else ""


def _fields(line: str, delimiter: str) -> list[str]:
    """Of a line by itself; a quote that it leaves open is a part of the text."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return line.split(delimiter)
