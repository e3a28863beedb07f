"""Items in shards, as the files of an export hold them."""

import torch
from small_models import small_model

from logitmix.modules.features import Embedded
from logitmix.serving.items import Items
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
    components = [shard["similarity.0"].float() for shard in shards]
    weights = [shard["similarity.1"].float() for shard in shards]
    exact = torch.cat([of * scale for of, scale in zip(components, scales, strict=True)]), torch.cat(weights)
    query = tower.similarity.query(torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), torch.arange(3))
    expected_BX = tower.similarity.all_pairs(query, exact)

    items = Items.of_tensors(shards, True, tower, {})
    found_BX = torch.cat([score_BN for _, score_BN in items.all_scores(query, 64)], 1)
    torch.testing.assert_close(found_BX, expected_BX, rtol=0, atol=1e-4)
    sides = [side for _, side in items.all("similarity", 64)]
    torch.testing.assert_close(torch.cat([of for of, *_ in sides]), exact[0])
    found_BK = items.scores(query, torch.arange(48).expand(3, -1))
    torch.testing.assert_close(found_BK, expected_BX, rtol=0, atol=0.05)
