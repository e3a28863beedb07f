"""Items in shards, as the files of an export hold them."""

from pathlib import Path

import pytest
import torch
from small_models import export_small, small_model
from torch.nn import functional as F

from logitmix.serving.directory.reader import read
from logitmix.serving.items import CachedShard, Items


def test_the_largest_component_is_the_largest_int8_number(tmp_path: Path) -> None:
    """An export's scale is the largest component of its items over the largest INT8 number, 127."""
    model = small_model("mol", 48)
    (exact,), (stored,) = (
        read(export_small(model, tmp_path / precision, precision=precision)).shards for precision in ("fp32", "int8")
    )
    largest = float(exact["similarity.0"].abs().max())
    assert float(stored["similarity.0.scale"]) == pytest.approx(largest / 127, rel=1e-6)
    assert int(stored["similarity.0"].abs().max()) == 127
    error = stored["similarity.0"].float() * stored["similarity.0.scale"] - exact["similarity.0"]
    assert float(error.abs().max()) <= 0.501 * largest / 127


def test_items_are_found_in_their_shards() -> None:
    table = F.pad(torch.arange(20.0).view(10, 2), (0, 14))
    shards = [
        {"table": rows, "similarity.0": rows.bfloat16(), "similarity.1": -rows} for rows in table.split([1, 5, 4])
    ]
    tower = small_model("dot", 1).tower
    items = Items([CachedShard(shard, tower) for shard in shards], torch.device("cpu"))
    index = torch.tensor([9, 0, 5, 6, 5, 1])
    assert torch.equal(items.rows(index), table[index])
    for chunk in (1, 2, 100):
        chunks = list(items.all("similarity", chunk))
        assert torch.cat([index for index, _ in chunks]).tolist() == list(range(10))
        assert torch.equal(torch.cat([side[1] for _, side in chunks]), -table)
        assert max(len(index) for index, _ in chunks) == min(chunk, 5)
    query = (F.pad(torch.tensor([[1.0, 0.0], [0.0, -2.0], [1.0, 1.0]]), (0, 14)), torch.zeros(3, 2))
    index_BK = torch.tensor([[0, 2, 9], [4, -1, -1], [-1, -1, -1]])
    expected = torch.tensor([[0.0, 4.0, 18.0], [-18.0, *[-torch.inf] * 2], [-torch.inf] * 3])
    assert torch.equal(items.scores(query, index_BK), expected)
