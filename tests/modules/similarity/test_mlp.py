"""The MLP of query and item against itself written out literally, one pair after the other, in FP64."""

import pytest
import torch
from torch import Tensor

from logitmix.modules.config import MLPConfig
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.mlp import MLP

DIM, H = 12, 7
EPS = 2**-24
"""Largest relative error of rounding to FP32."""


def make() -> MLP:
    """All parameters random, so that none can be left out unnoticed."""
    mlp = MLP(DIM, MLPConfig(hidden=H))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return mlp


def vectors(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def plain(mlp: MLP, u: Tensor, x: Tensor, mask_H: Tensor | None = None) -> Tensor:
    """MLP([u, x]): linear, ReLU, dropout, linear."""
    first, second = mlp.hidden, mlp.output
    hidden = first.weight.double() @ torch.cat([u.double(), x.double()]) + first.bias.double()
    hidden = hidden.clamp(min=0) * (1 if mask_H is None else mask_H.double())
    return (second.weight.double() @ hidden).squeeze()


def sides(mlp: MLP, query_TD: Tensor, item_ND: Tensor) -> tuple:
    return mlp.query(query_TD, torch.arange(len(query_TD))), mlp.item(item_ND, torch.arange(len(item_ND)))


def test_is_the_mlp_of_both_and_so_are_its_gradients() -> None:
    mlp, query_TD, item_ND = make(), vectors(5, 1).requires_grad_(), vectors(6, 2).requires_grad_()
    wanted = [query_TD, item_ND, *mlp.parameters()]
    expected_TN = torch.stack([torch.stack([plain(mlp, u, x) for x in item_ND]) for u in query_TD])
    score_TN = mlp.all_pairs(*sides(mlp, query_TD, item_ND))
    assert score_TN.dtype == torch.float32
    # Thirty roundings on the way, of values of a few units.
    torch.testing.assert_close(score_TN.double(), expected_TN, rtol=0, atol=100 * EPS)
    weight_TN = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    actual = torch.autograd.grad((score_TN * weight_TN).sum(), wanted)
    expected = torch.autograd.grad((expected_TN * weight_TN.double()).sum(), wanted)
    for got, should in zip(actual, expected, strict=True):
        assert float(should.abs().max()) > 0
        torch.testing.assert_close(got, should, rtol=0, atol=float(should.abs().max()) * 50 * EPS)
    pairs_T = mlp.pairs(*sides(mlp, query_TD, item_ND[:5]))
    torch.testing.assert_close(pairs_T.double(), expected_TN.diagonal(), rtol=0, atol=100 * EPS)


def test_dropout_falls_on_the_hidden_layer() -> None:
    mlp, query_TD, item_ND = make(), vectors(4, 1), vectors(4, 2)
    mask_TNH = Noise(5).dropout(torch.ones(16, H), 0.4, "gates", torch.arange(16)).view(4, 4, H)
    assert 0.2 < float((mask_TNH == 0).float().mean()) < 0.6
    rows = [
        torch.stack([plain(mlp, u, x, mask_TNH[t, n]) for n, x in enumerate(item_ND)]) for t, u in enumerate(query_TD)
    ]
    query, item = sides(mlp, query_TD, item_ND)
    dropped_TN = mlp.all_pairs(query, item, lambda hidden: hidden * mask_TNH)
    torch.testing.assert_close(dropped_TN.double(), torch.stack(rows), rtol=0, atol=200 * EPS)
    at = torch.arange(4)
    dropped_T = mlp.pairs(query, item, lambda hidden: hidden * mask_TNH[at, at])
    torch.testing.assert_close(dropped_T, dropped_TN.diagonal(), rtol=0, atol=200 * EPS)


def test_a_pair_depends_on_the_last_layer_and_nothing_else_of_the_module() -> None:
    mlp = make()
    query, item = ([side.detach() for side in both] for both in sides(mlp, vectors(3, 1), vectors(3, 2)))
    score = mlp.all_pairs(tuple(query), tuple(item)).sum()
    gradients = torch.autograd.grad(score, list(mlp.parameters()), allow_unused=True)
    used = {id(p) for p, gradient in zip(mlp.parameters(), gradients, strict=True) if gradient is not None}
    assert used == {id(parameter) for parameter in mlp.pair_parameters()} and len(used) == 1


def test_its_size_is_that_of_the_papers_table() -> None:
    """The paper's "Inference FLOPs per (x, u)": 50.5K for ML-1M, of multiply-adds and K = 1024."""
    mlp = MLP(50, MLPConfig())
    multiply_adds = mlp.hidden.weight.numel() + mlp.output.weight.numel()
    assert multiply_adds / 1024 == pytest.approx(50.5, abs=0.05)


def test_autocast_leaves_scores_in_fp32() -> None:
    mlp, query_TD, item_ND = make(), vectors(20, 1), vectors(30, 2)
    full = mlp.all_pairs(*sides(mlp, query_TD, item_ND))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = mlp.all_pairs(*sides(mlp, query_TD, item_ND))
    assert half.dtype == torch.float32
    # The sides are rounded to 2^-9 of a few units, and sums of seven of them are taken.
    assert 0 < float((half - full).detach().abs().max()) < 0.05
