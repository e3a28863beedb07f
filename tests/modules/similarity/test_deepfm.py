"""DeepFM against itself written out literally, one pair after the other, in FP64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logitmix.modules.config import DeepFMConfig
from logitmix.modules.features import Embedded
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.components import Projection
from logitmix.modules.similarity.deepfm import DeepFM

DIM, U, I, C, H = 12, 3, 2, 4, 7
EPS = 2**-24
"""Largest relative error of rounding to FP32."""


def make(projection_hidden: int = 6, **options: float) -> DeepFM:
    """All parameters random, so that none can be left out unnoticed."""
    sizes = {"query_components": U, "item_components": I, "component_dim": C, "hidden": H}
    deepfm = DeepFM(DIM, DeepFMConfig(projection_hidden=projection_hidden, **(sizes | options)))  # type: ignore[arg-type]
    randomize(deepfm)
    return deepfm


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def vectors(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    out = layer.weight.double() @ x
    return out if layer.bias is None else out + layer.bias.double()


def groups(projection: Projection, x: Tensor) -> list[Tensor]:
    if projection.gated is not None:
        both = linear(projection.gated, x)
        value, gate = both[: len(both) // 2], both[len(both) // 2 :]
        x = value * gate / (1 + torch.exp(-gate))
    flat = linear(projection.output, x)
    return [flat[i : i + C] for i in range(0, len(flat), C)]


def plain(deepfm: DeepFM, u: Tensor, x: Tensor, mask_H: Tensor | None = None) -> Tensor:
    """Sum of the products of all pairs of groups, and an MLP of these products."""
    of_query, of_item = groups(deepfm.query_projection, u.double()), groups(deepfm.item_projection, x.double())
    products = torch.stack([(f * g).sum() for f in of_query for g in of_item])
    hidden = linear(deepfm.hidden, products).clamp(min=0) * (1 if mask_H is None else mask_H.double())
    return products.sum() + linear(deepfm.output, hidden).squeeze()


def sides(deepfm: DeepFM, query_TD: Tensor, item_ND: Tensor, noise: Noise | None = None) -> tuple:
    return (
        deepfm.query(query_TD, torch.arange(len(query_TD)), noise),
        deepfm.item(item_ND, torch.arange(len(item_ND)), noise),
    )


@pytest.mark.parametrize("projection_hidden", [6, 0])
def test_is_the_formula_and_so_are_its_gradients(projection_hidden: int) -> None:
    deepfm = make(projection_hidden)
    query_TD, item_ND = vectors(5, 1).requires_grad_(), vectors(6, 2).requires_grad_()
    wanted = [query_TD, item_ND, *deepfm.parameters()]
    expected_TN = torch.stack([torch.stack([plain(deepfm, u, x) for x in item_ND]) for u in query_TD])
    score_TN = deepfm.all_pairs(*sides(deepfm, query_TD, item_ND))
    assert score_TN.dtype == torch.float32
    # A hundred roundings on the way, of values up to the largest.
    bound = float(expected_TN.detach().abs().max()) * 100 * EPS
    torch.testing.assert_close(score_TN.double(), expected_TN, rtol=0, atol=bound)
    assert float(expected_TN.detach().std()) > 100 * bound
    weight_TN = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    actual = torch.autograd.grad((score_TN * weight_TN).sum(), wanted)
    expected = torch.autograd.grad((expected_TN * weight_TN.double()).sum(), wanted)
    for got, should in zip(actual, expected, strict=True):
        assert float(should.abs().max()) > 0
        torch.testing.assert_close(got, should, rtol=0, atol=float(should.abs().max()) * 100 * EPS)
    pairs_T = deepfm.pairs(*sides(deepfm, query_TD, item_ND[:5]))
    torch.testing.assert_close(pairs_T.double(), expected_TN[:, :5].diagonal(), rtol=0, atol=bound)


def test_dropout_falls_on_the_hidden_layer() -> None:
    deepfm, query_TD, item_ND = make(), vectors(4, 1), vectors(4, 2)
    mask_TNH = Noise(5).dropout(torch.ones(16, H), 0.4, "gates", torch.arange(16)).view(4, 4, H)
    assert 0.2 < float((mask_TNH == 0).float().mean()) < 0.6
    rows = [
        torch.stack([plain(deepfm, u, x, mask_TNH[t, n]) for n, x in enumerate(item_ND)])
        for t, u in enumerate(query_TD)
    ]
    query, item = sides(deepfm, query_TD, item_ND)
    dropped_TN = deepfm.all_pairs(query, item, lambda hidden: hidden * mask_TNH)
    torch.testing.assert_close(dropped_TN.double(), torch.stack(rows), rtol=0, atol=2000 * EPS)
    at = torch.arange(4)
    dropped_T = deepfm.pairs(query, item, lambda hidden: hidden * mask_TNH[at, at])
    torch.testing.assert_close(dropped_T, dropped_TN.diagonal(), rtol=0, atol=2000 * EPS)


def test_the_items_projection_has_dropout_on_its_input() -> None:
    deepfm, item_ND, noise = make(projection_dropout=0.4), vectors(9, 2), Noise(7)
    dropped = noise.dropout(item_ND, 0.4, "deepfm.item", torch.arange(9))
    assert 0.2 < float((dropped == 0).float().mean()) < 0.6
    query, item = sides(deepfm, item_ND, item_ND, noise)
    assert torch.equal(item[0], deepfm.item(dropped, torch.arange(9))[0])
    assert torch.equal(query[0], deepfm.query(item_ND, torch.arange(9))[0])


def test_a_pair_depends_on_the_output_layer_and_nothing_else_of_the_module() -> None:
    deepfm = make()
    query, item = ([side.detach() for side in both] for both in sides(deepfm, vectors(3, 1), vectors(3, 2)))
    score = deepfm.all_pairs(tuple(query), tuple(item)).sum()
    gradients = torch.autograd.grad(score, list(deepfm.parameters()), allow_unused=True)
    used = {id(p) for p, gradient in zip(deepfm.parameters(), gradients, strict=True) if gradient is not None}
    assert used == {id(parameter) for parameter in deepfm.pair_parameters()} and len(used) == 3


def test_features_are_groups_compressed_together_with_those_of_the_vector() -> None:
    deepfm = make()
    deepfm.use_features(2, 1)
    randomize(deepfm)
    query = Embedded(vectors(5, 1), [vectors(5, 3), vectors(5, 4)])
    item = Embedded(vectors(5, 2), [vectors(5, 5)])
    for side, of, projection, features in (
        (deepfm.query_side, query, deepfm.query_projection, deepfm.query_features),
        (deepfm.item_side, item, deepfm.item_projection, deepfm.item_features),
    ):
        assert features is not None
        maps = [map_(group) for map_, group in zip(features.maps, of.groups, strict=True)]
        every = torch.cat([projection(of.vector_RD), torch.stack(maps, 1)], 1)
        torch.testing.assert_close(side(of, torch.arange(5))[0], features.compression(every))


@pytest.mark.parametrize("projection_hidden", [64, 0])
def test_it_begins_as_a_similarity(projection_hidden: int) -> None:
    """Groups of one vector are equal on both sides, and features change nothing."""
    deepfm = DeepFM(
        DIM,
        DeepFMConfig(
            query_components=U, item_components=I, component_dim=C, projection_hidden=projection_hidden, hidden=H
        ),
    )
    deepfm.use_features(1, 1)
    deepfm.reset_parameters(torch.Generator().manual_seed(1))
    both = Embedded(vectors(9, 1), [vectors(9, 2)])
    query, item = deepfm.query_side(both, torch.arange(9))[0], deepfm.item_side(both, torch.arange(9))[0]
    torch.testing.assert_close(query[:, :I], item)
    score_TN = F.linear(query[:, :I].sum(1), item.sum(1))
    assert bool((score_TN.diagonal() > 0).all())


def test_autocast_leaves_scores_in_fp32() -> None:
    deepfm, query_TD, item_ND = make(), vectors(20, 1), vectors(30, 2)
    full = deepfm.all_pairs(*sides(deepfm, query_TD, item_ND))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = deepfm.all_pairs(*sides(deepfm, query_TD, item_ND))
        halves = deepfm.pairs(*sides(deepfm, query_TD, item_ND[:20]))
    assert half.dtype == halves.dtype == torch.float32
    assert 0 < float((half - full).detach().abs().max()) < 0.02 * float(full.detach().abs().max())
