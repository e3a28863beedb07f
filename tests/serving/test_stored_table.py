"""Rows in several files are found as in one table."""

import pytest
import torch

from logitmix.serving.stored_table import StoredTable

TABLE = torch.arange(20.0).view(10, 2)


@pytest.mark.parametrize("sizes", [[10], [1, 5, 4], [0, 3, 0, 7, 0]])
@pytest.mark.parametrize("index", [[9, 0, 5, 6, 5, 1, 3], []])
def test_rows_are_found_in_their_parts(sizes: list[int], index: list[int]) -> None:
    found = StoredTable(TABLE.split(sizes)).fetch(torch.tensor(index, dtype=torch.int64))
    assert torch.equal(found, TABLE[index])
