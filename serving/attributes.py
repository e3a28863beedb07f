"""A file with values of the filterable columns, which take the place of the export's for as long as it has them."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from logitmix.common.mappings import counted, nearest
from logitmix.common.messages import prefixed
from logitmix.common.values import id_text
from logitmix.serving.columns import Column
from logitmix.serving.texts import Texts

ITEM = "item"

Changes = dict[str, dict[str, float | str | None]]
"""By raw id, the values of some columns."""


def read_changes(file: Path, columns: Mapping[str, Column]) -> Changes:
    """From CSV with a header, whose ids are in the column `item` or the first one. Of several lines of an item, the
    last one counts. ValueError that names the line for what is no CSV, other columns, and values of another kind."""
    with prefixed(f"{file} cannot be read: ", (OSError, UnicodeError)):
        text = file.read_text(encoding="utf-8-sig")
    if text and not text.endswith("\n"):
        raise ValueError(f"{file}: its last line has no end; write the whole beside it, and then rename that")
    changes: Changes = {}
    for number, raw_id, row in _rows(file, text):
        with prefixed(f"{file}, line {number}: "):
            known = changes.setdefault(id_text(raw_id), {})
            for name, given in row.items():
                if name not in columns:
                    there = ", ".join(columns) or "none"
                    raise ValueError(f"no filterable column {name!r}{nearest(name, [*columns])}; there are: {there}")
                with prefixed(f"{name} "):
                    known[name] = columns[name].value(given)
    return changes


def _rows(file: Path, text: str) -> Iterator[tuple[int, Any, dict[str, Any]]]:
    """Line, raw id, and the other fields of each row."""
    rows = csv.reader(text.splitlines(keepends=True), strict=True)
    try:
        header = next(rows, [ITEM])
        at = header.index(ITEM) if ITEM in header else 0
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"it has {counted(len(row), 'field')}, and the header {len(header)}")
            fields = dict(zip(header, row, strict=True))
            yield rows.line_num, fields.pop(header[at]), fields
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file}, line {rows.line_num}: {error}") from None


def with_changes(columns: Mapping[str, Column], raw_ids: Texts, changes: Changes) -> tuple[dict[str, Column], str]:
    """The columns with other values, and what was changed, for people to read."""
    ids, found = list(changes), dict(columns)
    num_items = min((len(column.values) for column in columns.values()), default=0)
    place_of = {raw_id: at for raw_id, at in zip(ids, raw_ids.places(ids), strict=True) if 0 <= at < num_items}
    for name, column in columns.items():
        at = [(place, changes[raw_id][name]) for raw_id, place in place_of.items() if name in changes[raw_id]]
        found[name] = column.changed([place for place, _ in at], [value for _, value in at])
    said = f"values of {counted(len(place_of), 'item')}"
    if unknown := [raw_id for raw_id in ids if raw_id not in place_of]:
        said += f"; {counted(len(unknown), 'id')} that no item has, such as {unknown[0]!r:.80}"
    return found, said
