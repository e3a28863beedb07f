"""Items in shards, as the files of an export hold them."""

from pathlib import Path

import pytest
import torch
from small_models import export_small, small_model
from torch.nn import functional as F

from logitmix.modules.features import Embedded
from logitmix.serving.directory.reader import read
from logitmix.serving.items import CachedShard, Items
from logitmix.serving.model import Scales, stored_items


@torch.no_grad()
def test_each_shard_of_int8_components_has_a_scale_of_its_own() -> None:
    """A file of an export says its scale itself: that of another file must not count for it."""
    model = small_model("mol", 48)
    tower, vector_XD = model.tower, model.item_XD
    parts, scales = vector_XD.split([16, 32]), [0.05, 0.15]
    shards = [
        stored_items(tower, Embedded(part, []), "int8", True, Scales(1.0, scale))
        for part, scale in zip(parts, scales, strict=True)
    ]
    exact = torch.cat([shard["similarity.0"].float() * scale for shard, scale in zip(shards, scales, strict=True)])
    query = tower.similarity.query(torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), torch.arange(3))
    items = Items([CachedShard(shard, tower) for shard in shards], torch.device("cpu"))
    sides = [side for _, side in items.all("similarity", 64)]
    torch.testing.assert_close(torch.cat([of for of, *_ in sides]), exact)
    # Products of INT8 numbers, where the processor has them, round the query too: alike in a shard by itself.
    alone = [
        Items([CachedShard(shard, tower)], torch.device("cpu")).scores(query, torch.arange(len(part)).expand(3, -1))
        for shard, part in zip(shards, parts, strict=True)
    ]
    found_BK = items.scores(query, torch.arange(48).expand(3, -1))
    torch.testing.assert_close(found_BK, torch.cat(alone, 1), rtol=0, atol=1e-4)
    every_BX = torch.cat([score_BN for _, score_BN in items.all_scores(query, 64)], 1)
    torch.testing.assert_close(every_BX, found_BK, rtol=0, atol=1e-4)


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
