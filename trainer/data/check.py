"""Finds all that a dataset directory of another program lacks. The checks are those of `load_dataset`, which raises
the first problem.

Each problem is one line, which begins with the name of the file. A column is read up to its first problem. Other than
`load_dataset`, this reads the raw ids and the values of vocabularies, too: two that are equal are a problem.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logitmix.common.mappings import brief, counted
from logitmix.modules.schema import ITEM, Feature, Owner, Schema
from logitmix.trainer.data.arrow import is_list
from logitmix.trainer.data.columns import (
    ColumnReader,
    later_users,
    lists,
    parallel,
    places,
    places_in_lists,
    require_columns,
    require_order,
    require_plausible,
    require_texts,
    times_of,
    within,
)
from logitmix.trainer.data.dataset import (
    check_vocabulary,
    encoder_of,
    files_of,
    raw_user_ids_of,
    read_arrays,
    stored_values,
)
from logitmix.trainer.data.description import (
    APPENDED,
    BrokenDataset,
    name_of,
    parsed_description,
    problems_of_description,
    reading,
    require_plugins_of,
    schema_of,
)

COUNTS = ("users", "items", "actions")
OPTIONAL = ("raw_user_id", "title")
"""Columns that may be left out."""
MOST = 2**48
"""Items, if dataset.json does not say how many there are."""

Check = Callable[[pa.RecordBatch, int], object]
"""Raises ValueError for what is wrong in some rows of a file, of which the first has this index."""


def check_dataset(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Returns all problems of a dataset directory, and the content of its dataset.json.

    Raises:
        ValueError: If there is no dataset.json, if the directory is a run, or if the dataset needs a plugin that this
            process lacks.
    """
    try:
        content, description = parsed_description(path)
    except BrokenDataset as error:
        return [error.problem], {}
    checker = _Checker(path, description)
    checker.problems += problems_of_description(path, content, description)
    try:
        require_plugins_of(path, description)
    except BrokenDataset as error:
        checker.problems.append(error.problem)
    checker.check_files()
    if not checker.problems:
        # What only all files together show.
        checker.holds("", read_arrays, path, checker.schema, description)
    return checker.problems, description


class _Checker:
    """Collects the problems of a dataset directory."""

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self.path, self.problems = path, list[str]()
        self.counts = {name: description[name] for name in COUNTS if type(description.get(name)) is int}
        """Those that dataset.json has."""
        self.schema = Schema.of_ids(MOST)
        """The schema of dataset.json, or the item ids alone if it cannot be read."""
        if len(self.counts) == len(COUNTS):
            self.holds("dataset.json", self._take_schema, description)

    def _take_schema(self, description: Mapping[str, Any]) -> None:
        self.schema = schema_of(description, description["items"])

    def holds(self, file: str, check: Callable[..., object], *arguments: Any) -> bool:
        """Calls a check, and returns whether it found nothing. Its error becomes a problem of this file, unless it
        names a file itself."""
        try:
            with reading(self.path, file):
                check(*arguments)
        except BrokenDataset as error:
            self.problems.append(error.problem)
            return False
        return True

    def check_files(self) -> None:
        """Checks all files but dataset.json."""
        users = items = later = 0
        actions = _Actions(self.schema)
        if not (parts := sorted((self.path / "sequences").glob("*.parquet"))):
            self.problems.append("sequences has no file whose name ends in .parquet")
        for part in parts:
            users += self._check(part, self._of("user") | actions.checks("user_index"), users)
        folders = sorted((self.path / APPENDED).glob("*"))
        parts_users = users
        for folder in folders:
            users += self._check(folder / "users.parquet", self._of("user"), users)
            index = {"user_index": partial(_check_later_users, users)}
            later += self._check(folder / "sequences.parquet", index | actions.checks("row"), 0)
        for file in files_of(self.path, "items.parquet"):
            items += self._check(file, self._of("item"), items)
        found = {"users": users, "items": items}
        if actions.rows == parts_users + later:
            found["actions"] = actions.count
        self.problems += [
            f"there are {count} {name}, but dataset.json says {self.counts[name]}"
            for name, count in found.items()
            if count != self.counts.get(name, count)
        ]
        self._check_texts()

    def _check(self, file: Path, checks: Mapping[str, Check], first: int) -> int:
        """Applies the checks to the columns of a file, whose first row has this index; returns how many rows it has."""
        name, rows = name_of(self.path, file), 0

        def check() -> None:
            nonlocal rows
            with pq.ParquetFile(file) as table:
                require_plausible(table, file, self.schema.features)
                rows, there = table.metadata.num_rows, table.schema_arrow.names
                wanted = [column for column in checks if column in there or column not in OPTIONAL]
                left = [column for column in wanted if self.holds(name, require_columns, there, [column])]
                row = first
                for batch in table.iter_batches(2**16, columns=left):
                    left = [column for column in left if self.holds(name, checks[column], batch, row)]
                    row += batch.num_rows

        if file.exists():
            self.holds(name, check)
        else:
            self.problems.append(f"{name} is missing")
        return rows

    def _of(self, owner: Owner) -> dict[str, Check]:
        """Returns the checks of the columns with a value for each item, or for each user."""
        index, *texts = ("item_index", "raw_id", "title") if owner == "item" else ("user_index", "raw_user_id")
        return {
            index: partial(_check_order, index),
            **{name: partial(_check_type_of_texts, name) for name in texts},
            **{of.name: partial(_check_feature, of, self.schema, index) for of in self.schema.of(owner)},
        }

    def _check_texts(self) -> None:
        """Checks that vocabularies are as long as the schema says, that their values and the raw ids differ, and the
        projections of texts."""
        sound = {name: not any(of.startswith(name) for of in self.problems) for name in ("items", "sequences")}
        for table in self.schema.tables:
            is_item = table.name == ITEM
            if sound["items"] if is_item else self.holds("", check_vocabulary, self.path, table.name, table.rows):
                values = stored_values(self.path, self.schema, table.name)
                name = "items.parquet: raw_id" if is_item else f"vocabularies/{table.name}.parquet: value"
                self.holds("", self._check_values, name, values, not is_item)
        if sound["sequences"]:
            self.holds("", self._check_values, "sequences: raw_user_id", raw_user_ids_of(self.path))
        for feature in self.schema.features:
            if feature.form.of_texts:
                self.holds("", encoder_of, self.path, feature)

    def _check_values(self, name: str, values: Iterable[pa.Array], unknown_first: bool = False) -> None:
        """Checks that the texts of a column differ, and that the first one stands for unknown values, if it must."""
        column = pa.chunked_array([*values], pa.large_string())
        if unknown_first and column[0].as_py():
            self.problems.append(
                f"{name} has {brief(column[0].as_py())} in row 0, which stands for unknown values; it must be null"
            )
        counts = column.value_counts()
        several = counts.filter(pc.and_(pc.greater(counts.field(1), 1), pc.not_equal(counts.field(0), "")))
        if len(several):
            first, times = several[0].as_py().values()
            more = f", and {counted(len(several) - 1, 'other text')} too" if len(several) > 1 else ""
            self.problems.append(f"{name} has {brief(first)} {times} times{more}; each must be there once")


class _Actions:
    """Checks the columns with a value for each action, and counts these."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.rows = self.count = 0
        """Rows whose items are right, and the actions in them."""

    def checks(self, index: str) -> dict[str, Check]:
        """Returns the checks by the names of the columns; `index` is what messages call the number of a row."""
        return {
            "item_indices": partial(self._check_items, index),
            "timestamps": partial(self._check_times, index),
            **{of.name: partial(self._check_feature, of, index) for of in self.schema.of("event")},
        }

    def _check_items(self, index: str, batch: pa.RecordBatch, row: int) -> None:
        lengths, items = lists("item_indices", batch.column("item_indices"))
        within("item_indices", items, 0, self.schema.num_items, places_in_lists(lengths, places(index, row)))
        self.rows += batch.num_rows
        self.count += len(items)

    def _check_times(self, index: str, batch: pa.RecordBatch, row: int) -> None:
        lengths, times = _in_parallel("timestamps", batch)
        times_of(times, lengths, places_in_lists(lengths, places(index, row)))

    def _check_feature(self, feature: Feature, index: str, batch: pa.RecordBatch, row: int) -> None:
        lengths, values = _in_parallel(feature.name, batch)
        reader = ColumnReader(feature, self.schema, len(values))
        reader.append(values, places_in_lists(lengths, places(index, row)))


def _in_parallel(name: str, batch: pa.RecordBatch) -> tuple[np.ndarray, pa.Array]:
    """Returns the lengths and the elements of a column of lists. ValueError if they are not as long as item_indices,
    unless that column is missing or wrong itself."""
    lengths, elements = lists(name, batch.column(name))
    items = batch.column("item_indices") if "item_indices" in batch.schema.names else None
    if items is not None and is_list(items.type) and not items.null_count:
        parallel(name, batch.column(name), lists("item_indices", items)[0])
    return lengths, elements


def _check_order(name: str, batch: pa.RecordBatch, row: int) -> None:
    require_order(batch.column(name), row, row + batch.num_rows)


def _check_later_users(count: int, batch: pa.RecordBatch, row: int) -> None:
    later_users(batch.column("user_index"), count)


def _check_type_of_texts(name: str, batch: pa.RecordBatch, row: int) -> None:
    require_texts(name, batch.column(name).type)
    if name == "raw_id" and batch.column(name).null_count:
        raise ValueError(f"empty values in column {name}")


def _check_feature(feature: Feature, schema: Schema, index: str, batch: pa.RecordBatch, row: int) -> None:
    ColumnReader(feature, schema, batch.num_rows).append(batch.column(feature.name), places(index, row))
