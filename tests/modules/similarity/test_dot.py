"""The dot product against sums written out in FP64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from logitmix.modules.config import DotConfig
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.dot import Dot, l2_normalize

EPS = 2**-24
"""Largest relative error of rounding to FP32."""


def vectors(count: int, seed: int, dim: int = 6) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalizing_is_torchs_own_and_so_are_its_gradients(dtype: torch.dtype) -> None:
    # The last rows are shorter than eps, or zero, and are only scaled.
    x = torch.cat([vectors(6, 3), vectors(2, 4) * 1e-8, torch.zeros(1, 6)]).to(dtype).requires_grad_()
    weight, twin = vectors(9, 5), x.detach().double().requires_grad_()
    ours, theirs = l2_normalize(x, 3.0, dtype), 3 * F.normalize(twin, dim=-1, eps=1e-6)
    assert ours.dtype == dtype
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), theirs, rtol=rounding, atol=rounding)
    (got,) = torch.autograd.grad(ours, x, weight.to(dtype))
    (should,) = torch.autograd.grad(theirs, twin, weight.to(dtype).double())
    torch.testing.assert_close(got.double(), should, rtol=rounding, atol=rounding * 3)


@pytest.mark.parametrize("normalize", [True, False])
def test_is_the_formula_and_so_are_its_gradients(normalize: bool) -> None:
    dot, row = Dot(6, DotConfig(normalize=normalize)), torch.arange(5)
    query_TD, item_ND = vectors(5, 1).requires_grad_(), vectors(5, 2).requires_grad_()
    weight_TN = vectors(5, 3, dim=5)
    query, item = dot.query(query_TD, row, Noise(1)), dot.item(item_ND, row, Noise(1))
    score_TN, score_T = dot.all_pairs(query, item), dot.pairs(query, item)
    actual = torch.autograd.grad((score_TN * weight_TN).sum(), (query_TD, item_ND))
    u, x = query_TD.detach().double().requires_grad_(), item_ND.detach().double().requires_grad_()
    plain_TN = u @ x.T / 0.05
    if normalize:
        plain_TN = plain_TN / (u * u).sum(1).sqrt()[:, None] / (x * x).sum(1).sqrt()[None]
    assert score_TN.dtype == score_T.dtype == torch.float32
    # Values up to 20, or 100 where they are not normalized, of a handful of roundings.
    bound = (20 if normalize else 100) * 4 * EPS
    torch.testing.assert_close(score_TN.double(), plain_TN, rtol=8 * EPS, atol=bound)
    torch.testing.assert_close(score_T.double(), plain_TN.diagonal(), rtol=8 * EPS, atol=bound)
    expected = torch.autograd.grad((plain_TN * weight_TN.double()).sum(), (u, x))
    for got, should in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), should, rtol=0, atol=float(should.abs().max()) * 16 * EPS)


def test_autocast_leaves_scores_in_fp32() -> None:
    dot, row = Dot(64, DotConfig()), torch.arange(64)
    query, item = dot.query(vectors(64, 1, dim=64), row), dot.item(vectors(64, 2, dim=64), row)
    full = dot.all_pairs(query, item)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, pairs = dot.all_pairs(query, item), dot.pairs(query, item)
    assert torch.equal(under, full)
    torch.testing.assert_close(pairs, full.diagonal(), rtol=0, atol=20 * 8 * EPS)
