"""NeuMF against itself written out literally, one pair after the other, in FP64."""

import pytest
import torch
from torch import Tensor, nn

from logitmix.modules.config import NeuMFConfig
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.neumf import NeuMF

DIM, G, H, O, F = 12, 5, 7, 6, 8
EPS = 2**-24
"""Largest relative error of rounding to FP32."""


def make() -> NeuMF:
    """All parameters random, so that none can be left out unnoticed."""
    neumf = NeuMF(DIM, NeuMFConfig(gmf_dim=G, hidden=H, mlp_dim=O, final_hidden=F))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in neumf.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return neumf


def vectors(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    out = layer.weight.double() @ x
    return out if layer.bias is None else out + layer.bias.double()


def plain(neumf: NeuMF, u: Tensor, x: Tensor, mask_H: Tensor | None = None) -> Tensor:
    """MLP([GMF, MLP([u, x])])."""
    u, x = u.double(), x.double()
    gmf = linear(neumf.query_gmf, u) * linear(neumf.item_gmf, x)
    hidden = linear(neumf.hidden, torch.cat([u, x])).clamp(min=0) * (1 if mask_H is None else mask_H.double())
    mlp = linear(neumf.mlp, hidden).clamp(min=0)
    return linear(neumf.output, linear(neumf.final, torch.cat([gmf, mlp])).clamp(min=0)).squeeze()


def sides(neumf: NeuMF, query_TD: Tensor, item_ND: Tensor) -> tuple:
    return neumf.query(query_TD, torch.arange(len(query_TD))), neumf.item(item_ND, torch.arange(len(item_ND)))


def test_is_the_formula_and_so_are_its_gradients() -> None:
    neumf, query_TD, item_ND = make(), vectors(5, 1).requires_grad_(), vectors(6, 2).requires_grad_()
    wanted = [query_TD, item_ND, *neumf.parameters()]
    expected_TN = torch.stack([torch.stack([plain(neumf, u, x) for x in item_ND]) for u in query_TD])
    score_TN = neumf.all_pairs(*sides(neumf, query_TD, item_ND))
    assert score_TN.dtype == torch.float32
    # Some sixty roundings on the way, of values of a few units.
    torch.testing.assert_close(score_TN.double(), expected_TN, rtol=0, atol=100 * EPS)
    assert float(expected_TN.detach().std()) > 0.05
    weight_TN = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    actual = torch.autograd.grad((score_TN * weight_TN).sum(), wanted)
    expected = torch.autograd.grad((expected_TN * weight_TN.double()).sum(), wanted)
    for got, should in zip(actual, expected, strict=True):
        assert float(should.abs().max()) > 0
        torch.testing.assert_close(got, should, rtol=0, atol=float(should.abs().max()) * 50 * EPS)
    pairs_T = neumf.pairs(*sides(neumf, query_TD, item_ND[:5]))
    torch.testing.assert_close(pairs_T.double(), expected_TN[:, :5].diagonal(), rtol=0, atol=100 * EPS)


def test_dropout_falls_on_the_hidden_layer_of_the_first_mlp() -> None:
    neumf, query_TD, item_ND = make(), vectors(4, 1), vectors(4, 2)
    mask_TNH = Noise(5).dropout(torch.ones(16, H), 0.4, "gates", torch.arange(16)).view(4, 4, H)
    assert 0.2 < float((mask_TNH == 0).float().mean()) < 0.6
    rows = [
        torch.stack([plain(neumf, u, x, mask_TNH[t, n]) for n, x in enumerate(item_ND)]) for t, u in enumerate(query_TD)
    ]
    query, item = sides(neumf, query_TD, item_ND)
    dropped_TN = neumf.all_pairs(query, item, lambda hidden: hidden * mask_TNH)
    torch.testing.assert_close(dropped_TN.double(), torch.stack(rows), rtol=0, atol=200 * EPS)
    at = torch.arange(4)
    dropped_T = neumf.pairs(query, item, lambda hidden: hidden * mask_TNH[at, at])
    torch.testing.assert_close(dropped_T, dropped_TN.diagonal(), rtol=0, atol=200 * EPS)


def test_a_pair_depends_on_the_layers_after_the_sides_and_nothing_else_of_the_module() -> None:
    neumf = make()
    query, item = ([side.detach() for side in both] for both in sides(neumf, vectors(3, 1), vectors(3, 2)))
    score = neumf.all_pairs(tuple(query), tuple(item)).sum()
    gradients = torch.autograd.grad(score, list(neumf.parameters()), allow_unused=True)
    used = {id(p) for p, gradient in zip(neumf.parameters(), gradients, strict=True) if gradient is not None}
    assert used == {id(parameter) for parameter in neumf.pair_parameters()} and len(used) == 5


@pytest.mark.parametrize(("dim", "hidden", "table"), [(50, 256, 49.3), (256, 256, 152.3), (50, 128, 24.6)])
def test_its_size_is_that_of_the_papers_table_without_two_layers(dim: int, hidden: int, table: float) -> None:
    """The paper's "Inference FLOPs per (x, u)", of multiply-adds and K = 1024, for ML-1M, ML-20M and Beauty, leave out
    the projections to GMF and the output layer of the first MLP."""
    neumf = NeuMF(dim, NeuMFConfig(hidden=hidden, final_hidden=hidden))
    counted = sum(layer.weight.numel() for layer in (neumf.hidden, neumf.final, neumf.output))
    assert counted / 1024 == pytest.approx(table, abs=0.0501)


def test_autocast_leaves_scores_in_fp32() -> None:
    neumf, query_TD, item_ND = make(), vectors(20, 1), vectors(30, 2)
    full = neumf.all_pairs(*sides(neumf, query_TD, item_ND))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = neumf.all_pairs(*sides(neumf, query_TD, item_ND))
    assert half.dtype == torch.float32
    # The sides are rounded to 2^-9 of a few units.
    assert 0 < float((half - full).detach().abs().max()) < 0.05
