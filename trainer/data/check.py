"""Finds all that a dataset directory of another program lacks. The checks are those of `load_dataset`, which raises
the first problem.

Each problem is one line, which begins with the name of the file. A column is read up to its first problem. Other than
`load_dataset`, this reads the raw ids and the values of vocabularies, too: two that are equal are a problem.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logitmix.common.mappings import brief, counted
from logitmix.modules.schema import ITEM, Owner, Schema
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
        with checker.finding(""):
            read_arrays(path, checker.schema, description)
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
            with self.finding("dataset.json"):
                self.schema = schema_of(description, description["items"])
        self.users = self.rows = self.actions = 0
        """Users so far, rows whose items are right, and the actions in them."""

    @contextmanager
    def finding(self, file: str) -> Iterator[None]:
        """Makes the error of what is within a problem of this file, unless it names a file itself."""
        try:
            with reading(self.path, file):
                yield
        except BrokenDataset as error:
            self.problems.append(error.problem)

    def holds(self, file: str, check: Callable[..., object], *arguments: Any) -> bool:
        """Calls a check with these arguments. If it raises ValueError, notes that as a problem of the file. Returns
        whether it raised nothing."""
        before = len(self.problems)
        with self.finding(file):
            check(*arguments)
        return len(self.problems) == before

    def check_files(self) -> None:
        """Checks all files but dataset.json."""
        items = later = 0
        of_users, of_actions = self._columns("user"), self._columns("event")
        if not (parts := sorted((self.path / "sequences").glob("*.parquet"))):
            self.problems.append("sequences has no file whose name ends in .parquet")
        for part in parts:
            self.users += self._check(part, (*of_users, *of_actions), "user_index", self.users)
        of_parts = self.users
        for folder in sorted((self.path / APPENDED).glob("*")):
            self.users += self._check(folder / "users.parquet", of_users, "user_index", self.users)
            later += self._check(folder / "sequences.parquet", ("user_index", *of_actions), "row", 0)
        for file in files_of(self.path, "items.parquet"):
            items += self._check(file, self._columns("item"), "item_index", items)
        found = {"users": self.users, "items": items}
        if self.rows == of_parts + later:
            found["actions"] = self.actions
        self.problems += [
            f"there are {count} {name}, but dataset.json says {self.counts[name]}"
            for name, count in found.items()
            if count != self.counts.get(name, count)
        ]
        self._check_texts()

    def _columns(self, owner: Owner) -> list[str]:
        """Returns the names of the columns with a value for each item, for each user, or for each action."""
        own = {
            "item": ("item_index", "raw_id", "title"),
            "user": ("user_index", "raw_user_id"),
            "event": ("item_indices", "timestamps"),
        }
        return [*own[owner], *(feature.name for feature in self.schema.of(owner))]

    def _check(self, file: Path, columns: Sequence[str], index: str, first: int) -> int:
        """Checks the columns of a file, whose first row has this index; returns how many rows it has."""
        name, rows = name_of(self.path, file), 0
        if not file.exists():
            self.problems.append(f"{name} is missing")
            return 0
        with self.finding(name), pq.ParquetFile(file) as table:
            require_plausible(table, file, self.schema.features)
            rows, there, row = table.metadata.num_rows, table.schema_arrow.names, first
            wanted = [column for column in columns if column in there or column not in OPTIONAL]
            left = [column for column in wanted if self.holds(name, require_columns, there, [column])]
            for batch in table.iter_batches(2**16, columns=left):
                left = [column for column in left if self.holds(name, self._check_column, column, index, batch, row)]
                row += batch.num_rows
        return rows

    def _check_column(self, name: str, index: str, batch: pa.RecordBatch, row: int) -> None:
        """Checks a column of some rows, of which the first has the number `row`. Raises ValueError for what is wrong.
        `index` is what messages call that number: "row" for actions that were appended."""
        column, at = batch.column(name), places(index, row)
        if name in ("item_index", "user_index"):
            if index == "row":
                later_users(column, self.users)
            else:
                require_order(column, row, row + batch.num_rows)
        elif name in ("raw_id", "title", "raw_user_id"):
            require_texts(name, column.type)
            if name == "raw_id" and column.null_count:
                raise ValueError(f"empty values in column {name}")
        elif name == "item_indices":
            lengths, items = lists(name, column)
            within(name, items, 0, self.schema.num_items, places_in_lists(lengths, at))
            self.rows, self.actions = self.rows + batch.num_rows, self.actions + len(items)
        else:
            feature = next((of for of in self.schema.features if of.name == name), None)
            if not feature or feature.owner == "event":
                lengths, column = lists(name, column)
                at = places_in_lists(lengths, at)
                items = batch.column("item_indices") if "item_indices" in batch.schema.names else None
                # Unless that column is missing or wrong itself.
                if items is not None and is_list(items.type) and not items.null_count:
                    parallel(name, batch.column(name), lists("item_indices", items)[0])
            if feature:
                ColumnReader(feature, self.schema, len(column)).append(column, at)
            else:
                times_of(column, lengths, at)

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
