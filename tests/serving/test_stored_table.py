"""Rows in several files are found as in one table."""

import pytest
import torch

from logitmix.modules.schema import Feature, Schema, Table
from logitmix.modules.values import Values
from logitmix.serving.stored_table import StoredTable, fetch_rows

TABLE = torch.arange(20.0).view(10, 2)


@pytest.mark.parametrize("sizes", [[10], [1, 5, 4], [0, 3, 0, 7, 0]])
@pytest.mark.parametrize("index", [[9, 0, 5, 6, 5, 1, 3], []])
def test_rows_are_found_in_their_parts(sizes: list[int], index: list[int]) -> None:
    found = StoredTable(TABLE.split(sizes)).fetch(torch.tensor(index, dtype=torch.int64))
    assert torch.equal(found, TABLE[index])


def test_each_row_that_features_name_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema(
        (
            Feature("item", "item", "id", "item"),
            Feature("brand", "item", "id", "brand"),
            Feature("liked", "user", "ids", "brand"),
            Feature("city", "user", "id", "city"),
            Feature("price", "item", "number"),
        ),
        (Table("item", 5), Table("brand", 10), Table("city", 10)),
    )
    values = {
        "brand": Values(torch.tensor([7, 2, 7])),
        "liked": Values(torch.tensor([2, 9, 9, 7]), torch.tensor([0, 1, 1, 4])),
        "price": Values(torch.tensor([0.5, 1.0, 2.0])),
    }
    fetched, fetch = [], StoredTable.fetch
    monkeypatch.setattr(
        StoredTable, "fetch", lambda table, index: fetched.append(index.tolist()) or fetch(table, index)
    )
    rows, local = fetch_rows({name: StoredTable(TABLE.split(4)) for name in ("item", "brand", "city")}, schema, values)
    assert fetched == [[2, 7, 9]] and rows.keys() == {"brand"}
    for name in ("brand", "liked"):
        assert torch.equal(rows["brand"][local[name].values], TABLE[values[name].values])
    assert local["liked"].offsets is values["liked"].offsets and local["price"] is values["price"]
