"""MLP, NeuMF and DeepFM against themselves written out literally, one pair after the other, in FP64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from logitmix.modules.config import DeepFMConfig, MLPConfig, NeuMFConfig
from logitmix.modules.features import Embedded
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.components import Projection
from logitmix.modules.similarity.deepfm import DeepFM
from logitmix.modules.similarity.mlp import MLP
from logitmix.modules.similarity.neumf import NeuMF

DIM, H = 12, 7
U, I, C = 3, 2, 4
"""Of DeepFM."""
EPS = 2**-24
"""Largest relative error of rounding to FP32."""


def deepfm(projection_hidden: int = 6, projection_dropout: float = 0.0) -> DeepFM:
    sizes = {"query_components": U, "item_components": I, "component_dim": C, "hidden": H}
    return DeepFM(
        DIM, DeepFMConfig(projection_hidden=projection_hidden, projection_dropout=projection_dropout, **sizes)
    )


def randomized(module: Similarity) -> Similarity:
    """All parameters random, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def vectors(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    out = layer.weight.double() @ x
    return out if layer.bias is None else out + layer.bias.double()


def plain_mlp(mlp: MLP, u: Tensor, x: Tensor, mask_H: Tensor) -> Tensor:
    """MLP([u, x]): linear, ReLU, dropout, linear."""
    return linear(mlp.output, linear(mlp.hidden, torch.cat([u, x])).clamp(min=0) * mask_H).squeeze()


def plain_neumf(neumf: NeuMF, u: Tensor, x: Tensor, mask_H: Tensor) -> Tensor:
    """MLP([GMF, MLP([u, x])])."""
    gmf = linear(neumf.query_gmf, u) * linear(neumf.item_gmf, x)
    hidden = linear(neumf.hidden, torch.cat([u, x])).clamp(min=0) * mask_H
    mlp = linear(neumf.mlp, hidden).clamp(min=0)
    return linear(neumf.output, linear(neumf.final, torch.cat([gmf, mlp])).clamp(min=0)).squeeze()


def groups(projection: Projection, x: Tensor) -> list[Tensor]:
    if projection.gated is not None:
        both = linear(projection.gated, x)
        value, gate = both[: len(both) // 2], both[len(both) // 2 :]
        x = value * gate / (1 + torch.exp(-gate))
    flat = linear(projection.output, x)
    return [flat[i : i + C] for i in range(0, len(flat), C)]


def plain_deepfm(deepfm: DeepFM, u: Tensor, x: Tensor, mask_H: Tensor) -> Tensor:
    """Sum of the products of all pairs of groups, and an MLP of these products."""
    of_query, of_item = groups(deepfm.query_projection, u), groups(deepfm.item_projection, x)
    products = torch.stack([(f * g).sum() for f in of_query for g in of_item])
    hidden = linear(deepfm.hidden, products).clamp(min=0) * mask_H
    return products.sum() + linear(deepfm.output, hidden).squeeze()


KINDS: dict[str, tuple[Callable[[], Similarity], Callable[..., Tensor], int]] = {
    "mlp": (lambda: MLP(DIM, MLPConfig(hidden=H)), plain_mlp, 1),
    "neumf": (lambda: NeuMF(DIM, NeuMFConfig(gmf_dim=5, hidden=H, mlp_dim=6, final_hidden=8)), plain_neumf, 5),
    "deepfm": (deepfm, plain_deepfm, 3),
    "deepfm of linear projections": (lambda: deepfm(projection_hidden=0), plain_deepfm, 3),
}
"""How it is made and written out, and how many parameters a pair depends on."""


def written_out(kind: str, of: Similarity, query_TD: Tensor, item_ND: Tensor, mask_TNH: Tensor) -> Tensor:
    def score(u: Tensor, x: Tensor, mask_H: Tensor) -> Tensor:
        return KINDS[kind][1](of, u.double(), x.double(), mask_H.double())

    pairs = [(t, n) for t in range(len(query_TD)) for n in range(len(item_ND))]
    score_P = torch.stack([score(query_TD[t], item_ND[n], mask_TNH[t, n]) for t, n in pairs])
    return score_P.view(len(query_TD), len(item_ND))


def sides(of: Similarity, query_TD: Tensor, item_ND: Tensor) -> tuple:
    return of.query(query_TD, torch.arange(len(query_TD))), of.item(item_ND, torch.arange(len(item_ND)))


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_formula_and_so_are_its_gradients(kind: str) -> None:
    of, query_TD, item_ND = randomized(KINDS[kind][0]()), vectors(5, 1).requires_grad_(), vectors(6, 2).requires_grad_()
    wanted = [query_TD, item_ND, *of.parameters()]
    expected_TN = written_out(kind, of, query_TD, item_ND, torch.ones(5, 6, H))
    score_TN = of.all_pairs(*sides(of, query_TD, item_ND))
    assert score_TN.dtype == torch.float32
    # Up to a hundred roundings on the way, of values up to the largest.
    bound = float(expected_TN.detach().abs().max().clamp(min=1)) * 100 * EPS
    torch.testing.assert_close(score_TN.double(), expected_TN, rtol=0, atol=bound)
    assert float(expected_TN.detach().std()) > 100 * bound
    weight_TN = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    actual = torch.autograd.grad((score_TN * weight_TN).sum(), wanted)
    expected = torch.autograd.grad((expected_TN * weight_TN.double()).sum(), wanted)
    for got, should in zip(actual, expected, strict=True):
        assert float(should.abs().max()) > 0
        torch.testing.assert_close(got, should, rtol=0, atol=float(should.abs().max()) * 100 * EPS)
    pairs_T = of.pairs(*sides(of, query_TD, item_ND[:5]))
    torch.testing.assert_close(pairs_T.double(), expected_TN[:, :5].diagonal(), rtol=0, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_falls_on_the_first_hidden_layer(kind: str) -> None:
    of, query_TD, item_ND = randomized(KINDS[kind][0]()), vectors(4, 1), vectors(4, 2)
    mask_TNH = Noise(5).dropout(torch.ones(16, H), 0.4, "gates", torch.arange(16)).view(4, 4, H)
    assert 0.2 < float((mask_TNH == 0).float().mean()) < 0.6
    expected_TN = written_out(kind, of, query_TD, item_ND, mask_TNH)
    query, item = sides(of, query_TD, item_ND)
    bound = float(expected_TN.detach().abs().max().clamp(min=1)) * 200 * EPS
    dropped_TN = of.all_pairs(query, item, lambda hidden: hidden * mask_TNH)
    torch.testing.assert_close(dropped_TN.double(), expected_TN, rtol=0, atol=bound)
    at = torch.arange(4)
    dropped_T = of.pairs(query, item, lambda hidden: hidden * mask_TNH[at, at])
    torch.testing.assert_close(dropped_T, dropped_TN.diagonal(), rtol=0, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_scores_in_fp32(kind: str) -> None:
    of, query_TD, item_ND = randomized(KINDS[kind][0]()), vectors(20, 1), vectors(30, 2)
    full = of.all_pairs(*sides(of, query_TD, item_ND)).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = of.all_pairs(*sides(of, query_TD, item_ND))
        pairs = of.pairs(*sides(of, query_TD, item_ND[:20]))
    assert half.dtype == pairs.dtype == torch.float32
    # The sides are rounded to 2^-9.
    assert 0 < float((half - full).detach().abs().max()) < max(0.05, 0.02 * float(full.abs().max()))


def test_deepfms_projection_of_items_has_dropout_on_its_input() -> None:
    of, item_ND, noise, row = randomized(deepfm(projection_dropout=0.4)), vectors(9, 2), Noise(7), torch.arange(9)
    dropped = noise.dropout(item_ND, 0.4, "deepfm.item", row)
    assert 0.2 < float((dropped == 0).float().mean()) < 0.6
    assert torch.equal(of.item(item_ND, row, noise)[0], of.item(dropped, row)[0])
    assert torch.equal(of.query(item_ND, row, noise)[0], of.query(item_ND, row)[0])


def test_deepfms_features_are_groups_compressed_together_with_those_of_the_vector() -> None:
    of = deepfm()
    of.use_features(2, 1)
    randomized(of)
    query = Embedded(vectors(5, 1), [vectors(5, 3), vectors(5, 4)])
    item = Embedded(vectors(5, 2), [vectors(5, 5)])
    for side, embedded, projection, features in (
        (of.query_side, query, of.query_projection, of.query_features),
        (of.item_side, item, of.item_projection, of.item_features),
    ):
        assert features is not None
        maps = [map_(group) for map_, group in zip(features.maps, embedded.groups, strict=True)]
        every = torch.cat([projection(embedded.vector_RD), torch.stack(maps, 1)], 1)
        torch.testing.assert_close(side(embedded, torch.arange(5))[0], features.compression(every))
