"""Columns of ids and of their weights, in every format: read as one, and listed by file and row where they are
malformed."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import prepared
from small_data import forget_digests

from logitmix.modules.schema import Owner
from logitmix.trainer.data.dataset import Dataset, load_dataset

SCHEMA = """
[features.interests]
kind = "weighted_ids"
columns = { weights = "strengths" }
"""
ROWS: list[tuple[str, Any, Any]] = [
    ("1", ["jazz", "rock"], [0.5, 2]),
    ("2", ["rock"], [3]),
    ("3", None, None),
    ("4", ["jazz", "jazz", "folk"], [0, 1.25, 1e6]),
]
BAD: list[tuple[str, Any, Any]] = [
    ("5", ["jazz", "rock"], [1]),
    ("6", ["jazz"], [-1]),
    ("7", ["jazz"], None),
    ("8", None, [1]),
    ("9", ["jazz"], ["much"]),
]
Row = dict[str, Any]


def csv(path: Path, rows: list[Row]) -> None:
    def cell(value: Any) -> str:
        return "|".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)

    lines = [",".join(rows[0]), *(",".join(map(cell, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def json_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps({key: of for key, of in row.items() if of is not None}) + "\n" for row in rows))


def parquet(path: Path, rows: list[Row]) -> None:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if any(numbers == ["much"] for numbers in columns["strengths"]):
        columns["strengths"] = [of and [str(number) for number in of] for of in columns["strengths"]]
    pq.write_table(pa.table(columns), path)


WRITERS = {"csv": csv, "jsonl": json_lines, "parquet": parquet}


def of_rows(
    folder: Path,
    write: Callable[[Path, list[Row]], None],
    owner: Owner,
    rows: list[tuple[str, Any, Any]],
    schema: str = SCHEMA,
) -> Dataset:
    """Each row is of an item, a user, or of an action of user 1 with the item of that name."""
    (folder / "schema.toml").write_text(schema)
    made = [{"id": name, "interests": ids, "strengths": weights} for name, ids, weights in rows]
    source, files = folder / "rows", dict[str, Path]()
    if owner == "event":
        made = [{"user": "1", "item": row.pop("id"), "timestamp": t} | row for t, row in enumerate(made)]
    else:
        source, files = folder / "actions.jsonl", {f"{owner}s": source}
        names = [name for name, _, _ in rows]
        json_lines(source, [{"user": of, "item": item, "timestamp": t} for of in names for t, item in enumerate(names)])
    write(folder / "rows", made)
    return prepared(source, schema=folder / "schema.toml", max_rejects=0.9, **files)[0]


def found(dataset: Dataset, owner: Owner) -> list[dict[str, Any] | list[Any]]:
    of = dataset.features_of(owner)["interests"]
    assert of.offsets is not None
    texts = [dataset.vocabulary("interests")[row] for row in of.values]
    pairs = list(zip(texts, of.parallel["weights"].tolist(), strict=True))
    return [pairs[start:stop] for start, stop in pairwise(of.offsets)]


@pytest.mark.parametrize("owner", ["item", "user", "event"])
@pytest.mark.parametrize("form", WRITERS)
def test_ids_and_weights_are_one_feature(tmp_path: Path, form: str, owner: Owner) -> None:
    dataset = of_rows(tmp_path, WRITERS[form], owner, ROWS)
    (feature,) = dataset.schema.of(owner)
    assert (feature.kind, feature.table, feature.columns) == ("weighted_ids", "interests", {"weights": "strengths"})
    assert found(dataset, owner) == [list(zip(ids or [], weights or [], strict=True)) for _, ids, weights in ROWS]
    assert dataset.vocabulary("interests") == ["", "folk", "jazz", "rock"]


@pytest.mark.parametrize("form", WRITERS)
def test_malformed_rows_are_listed_with_file_and_row(tmp_path: Path, form: str) -> None:
    dataset = of_rows(tmp_path, WRITERS[form], "user", [*ROWS, *BAD])
    first = 2 if form == "csv" else 1
    lines = [line.split("\t") for line in (tmp_path / "out/rejects.tsv").read_text().splitlines()[1:]]
    assert sorted((file, int(number) - first, reason) for file, number, reason, _ in lines) == [
        ("rows", 4, "strengths has 1 values for 2 of interests"),
        ("rows", 5, "strengths has '-1'; it must be a finite number of 0 or more"),
        ("rows", 6, "strengths has 0 values for 1 of interests"),
        ("rows", 7, "strengths has 1 values for 0 of interests"),
        ("rows", 8, "strengths has 'much'; it must be a finite number of 0 or more"),
    ]
    # Users 5 to 9 have actions, but nothing is known of them.
    assert found(dataset, "user")[4:] == [[]] * 5


def test_single_values_are_bags_of_one(tmp_path: Path) -> None:
    rows = [("1", 5, 0.5), ("2", 6, 2), ("3", 5, 1), ("4", None, None)]
    assert found(of_rows(tmp_path, json_lines, "item", rows), "item") == [[("5", 0.5)], [("6", 2.0)], [("5", 1.0)], []]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (SCHEMA.partition("columns")[0], 'needs columns = { weights = "COLUMN" }'),
        (SCHEMA.replace("weighted_", ""), "features.interests is of kind ids, which has no further columns"),
        (SCHEMA.replace("strengths", "s"), "rows: no column 's' with the weights of interests; there are: "),
    ],
)
def test_a_schema_that_does_not_fit_is_told(tmp_path: Path, schema: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        of_rows(tmp_path, csv, "item", ROWS, schema)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[{"row": 9, "weights": 1.0}]], "column interests has 9; it must be from 0 to 3"),
        ([[{"row": 1, "weights": -1.0}]], "column interests.weights has -1.0; it must be a finite"),
        ([[{"row": 1, "weight": 1.0}]], "column interests has lists of type struct<row: int64, weight: double>"),
        ([[1]], "column interests has lists of type int64, not structs of row, weights"),
    ],
)
def test_a_dataset_that_others_wrote_is_checked(tmp_path: Path, values: list[Any], said: str) -> None:
    of_rows(tmp_path, csv, "user", ROWS)
    forget_digests(tmp_path / "out")
    (part,) = (tmp_path / "out/sequences").iterdir()
    table = pq.read_table(part)
    place = table.column_names.index("interests")
    pq.write_table(table.set_column(place, "interests", pa.array([*values, [], [], []])), part)
    with pytest.raises(ValueError) as error:
        load_dataset(tmp_path / "out")
    assert said in str(error.value)
