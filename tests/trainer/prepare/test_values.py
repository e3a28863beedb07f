"""What a catalog of one month and of the next have in common, as far as `prepare` tells it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading import file_of, parquet_of, prepared

ITEMS = 40
OCTOBER = {
    "item": [str(n) for n in range(ITEMS)],
    "price": [f"{1.37 * n:.2f}" for n in range(ITEMS)],
    "year": [str(1990 + n % 7) for n in range(ITEMS)],
    "brand": [f"b{n % 4}" for n in range(ITEMS)],
    "fee": [f"{n},{n % 10}0" for n in range(ITEMS)],
}


def kinds(folder: Path, catalog: dict[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Of each feature, its kind and values."""
    rows = "".join(f"u{user},{(7 * user + at) % ITEMS},{at}\n" for user in range(30) for at in range(8))
    source = file_of(folder, ("user,item,timestamp\n" + rows).encode())
    dataset, _ = prepared(source, items=parquet_of(folder, catalog).path)
    return {
        feature.name: (feature.kind, dataset.vocabulary(feature.table) if feature.sparse else [])
        for feature in dataset.schema.of("item")
        if feature.name != "item"
    }


@pytest.mark.parametrize("marker", ["NULL", "NaN", "", r"\N", "N/A", "None", "-", None])
def test_a_missing_value_in_the_next_catalog_changes_no_kind(marker: str | None, tmp_path: Path) -> None:
    expected = kinds(tmp_path, OCTOBER)
    assert {name: kind for name, (kind, _) in expected.items()} == {
        "price": "number", "year": "id", "brand": "id", "fee": "number",
    }  # fmt: skip
    november = {name: [*values[:3], marker, *values[4:]] for name, values in OCTOBER.items() if name != "item"}
    assert kinds(tmp_path, {"item": OCTOBER["item"]} | november) == expected


def test_nor_do_numbers_instead_of_texts(tmp_path: Path) -> None:
    """pandas makes floats of whole numbers as soon as one is missing."""
    integers = OCTOBER | {"year": pa.array(map(int, OCTOBER["year"]))}
    years = pa.array([None, *map(float, OCTOBER["year"][1:])])
    assert kinds(tmp_path, integers) == kinds(tmp_path, OCTOBER | {"year": years})
