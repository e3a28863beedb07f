"""Finds what a dataset directory of another program lacks, by the functions of `load_dataset`, which raises the first
problem: here each of dataset.json, the sequences, the items, and the tables has its own.

Each problem is one line. Other than `load_dataset`, this reads the raw ids and the values of vocabularies, too: two
that are equal are a problem.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import brief
from logitmix.modules.schema import ITEM, Schema
from logitmix.trainer.data.dataset import (
    check_vocabulary,
    encoder_of,
    raw_user_ids_of,
    read_items,
    read_sequences,
    stored_values,
)
from logitmix.trainer.data.description import (
    BrokenDataset,
    broken,
    parsed_description,
    problems_of_description,
    reading,
    require_plugins_of,
    schema_of,
)

COUNTS = ("users", "items", "actions")


def check_dataset(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Returns the problems of a dataset directory, and the content of its dataset.json.

    Raises:
        ValueError: If there is no dataset.json, if the directory is a run, or if the dataset needs a plugin that this
            process lacks.
    """
    try:
        content, description = parsed_description(path)
    except BrokenDataset as error:
        return [error.problem], {}
    problems = [*problems_of_description(path, content, description)]

    def holds(check: Callable[..., object], *arguments: Any) -> bool:
        """Calls a check. Returns whether it found no problem, or else notes that."""
        try:
            check(*arguments)
        except BrokenDataset as error:
            problems.append(error.problem)
            return False
        return True

    holds(require_plugins_of, path, description)
    schema = Schema.of_ids(0)

    def read_schema() -> None:
        nonlocal schema
        with reading(path, "dataset.json"):
            schema = schema_of(description, description["items"])

    if not all(type(description.get(name)) is int for name in COUNTS) or not holds(read_schema):
        return problems, description
    if holds(read_sequences, path, schema, description):
        holds(_require_different, path, "sequences: raw_user_id", raw_user_ids_of(path))
    if holds(read_items, path, schema, description["items"]):
        holds(_require_different, path, "items.parquet: raw_id", stored_values(path, schema, ITEM))
    for table in schema.tables:
        if table.name != ITEM and holds(check_vocabulary, path, table.name, table.rows):
            name, values = f"vocabularies/{table.name}.parquet: value", stored_values(path, schema, table.name)
            holds(_require_different, path, name, values, True)
    for feature in schema.features:
        if feature.form.of_texts:
            holds(encoder_of, path, feature)
    return problems, description


def _require_different(path: Path, name: str, values: Iterable[pa.Array], unknown_first: bool = False) -> None:
    """Raises ValueError if two texts of a column are equal, or if the first one does not stand for unknown values, but
    must."""
    column = pa.chunked_array([*values], pa.large_string())
    if unknown_first and (first := column[0].as_py()):
        broken(path, f"{name} has {brief(first)} in row 0, which stands for unknown values; it must be null")
    counts = column.value_counts()
    several = counts.filter(pc.and_(pc.greater(counts.field(1), 1), pc.not_equal(counts.field(0), "")))
    if len(several):
        text, times = several[0].as_py().values()
        broken(path, f"{name} has {brief(text)} {times} times; each must be there once ({len(several):,} are not)")
