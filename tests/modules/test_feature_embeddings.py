"""Features as embeddings, one row and one id after the other, and adaptive compression against its formula."""

import pytest
import torch
from torch import Tensor

from logitmix.modules.features import AdaptiveCompression, FeatureEmbeddings
from logitmix.modules.schema import Feature
from logitmix.modules.values import Values

D = 8
FEATURES = (
    Feature("brand", "item", "id", table="brand"),
    Feature("genres", "item", "ids", table="genre"),
    Feature("keys", "item", "ids", table="brand"),  # shares a table; the name is one of a module's own methods
    Feature("price", "item", "number", mean=3.0, deviation=2.0),
    Feature("image", "item", "vector", width=3, mean=0.5, deviation=4.0),
)
DIMS = {"brand": D, "genre": 4}


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "brand": torch.randn(5, D, generator=generator, dtype=torch.float64, requires_grad=True),
        "genre": torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True),
    }


VALUES = {
    "brand": Values(torch.tensor([4, 0, 4])),
    "genres": Values(torch.tensor([1, 2, 5, 5]), torch.tensor([0, 3, 3, 4])),
    "keys": Values(torch.tensor([3, 3, 0]), torch.tensor([0, 1, 1, 3])),
    "price": Values(torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)),
    "image": Values(torch.arange(9, dtype=torch.float64).view(3, 3)),
}


def literal(embeddings: FeatureEmbeddings, of: dict[str, Tensor]) -> list[Tensor]:
    """[feature][row]: an embedding each."""
    maps = dict(zip([feature.name for feature in FEATURES], embeddings.maps, strict=True))
    brand = torch.stack([of["brand"][place] for place in (4, 0, 4)])
    genre = of["genre"] @ maps["genres"].weight.t()
    genres = torch.stack([(genre[1] + genre[2] + genre[5]) / 3, torch.zeros_like(genre[0]), genre[5]])
    keys = torch.stack([of["brand"][3], torch.zeros_like(of["brand"][0]), (of["brand"][3] + of["brand"][0]) / 2])
    price = torch.tensor([[-1.0], [0.0], [3.0]], dtype=torch.float64) @ maps["price"].weight.t() + maps["price"].bias
    image = ((VALUES["image"].values - 0.5) / 4 / 3**0.5) @ maps["image"].weight.t() + maps["image"].bias
    return [brand, genres, keys, price, image]


def test_embeddings_and_gradients_are_those_of_one_row_after_the_other() -> None:
    torch.manual_seed(0)
    embeddings = FeatureEmbeddings(FEATURES, DIMS, D).double()
    found, should = rows(), rows()
    out, expected = embeddings(found, VALUES), literal(embeddings, should)
    weights = [torch.randn(3, D, dtype=torch.float64) for _ in FEATURES]
    for ours, theirs in zip(out, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    parameters = list(embeddings.parameters())
    gradients = [
        torch.autograd.grad(
            sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)),
            [*leaves.values(), *parameters],
        )
        for parts, leaves in ((out, found), (expected, should))
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_rows_at_all_are_embedded() -> None:
    none = torch.empty(0, dtype=torch.int64)
    of = {name: table[:0] for name, table in rows().items()}
    found = FeatureEmbeddings(FEATURES, DIMS, D).double()(
        of, {name: values.take(none) for name, values in VALUES.items()}
    )
    assert [tuple(part.shape) for part in found] == [(0, D)] * 5


@pytest.mark.parametrize(("count", "kept"), [(7, 3), (4, 4), (2, 5)])
def test_compression_is_its_formula(count: int, kept: int) -> None:
    torch.manual_seed(0)
    compression = AdaptiveCompression(count, kept, 4, 6).double()
    v_RJC = torch.randn(5, count, 4, dtype=torch.float64)
    first, last = compression.weights[0], compression.weights[2]
    for row, out_KC in zip(v_RJC, compression(v_RJC), strict=True):
        hidden = first.weight @ row.flatten() + first.bias
        w = (last.weight @ (hidden * torch.sigmoid(hidden)) + last.bias).view(count, kept)
        for i in range(kept):
            torch.testing.assert_close(out_KC[i], sum(w[j, i] * row[j] for j in range(count)), rtol=1e-12, atol=1e-12)


def test_compression_begins_by_keeping_the_first() -> None:
    compression = AdaptiveCompression(7, 3, 4, 6)
    compression.reset_parameters()
    v_RJC = torch.randn(5, 7, 4)
    assert torch.equal(compression(v_RJC), v_RJC[:, :3])
