"""The dot product against sums written out in FP64."""

import math

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


def plain(query: Tensor, item: Tensor, normalize: bool, temperature: float) -> float:
    u, x = query.double().tolist(), item.double().tolist()
    product = sum(a * b for a, b in zip(u, x, strict=True))
    if not normalize:
        return product / temperature
    norms = [max(math.sqrt(sum(a * a for a in side)), 1e-6) for side in (u, x)]
    return product / norms[0] / norms[1] / temperature


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_sum_written_out(normalize: bool) -> None:
    dot = Dot(6, DotConfig(normalize=normalize))
    query_TD, item_ND = vectors(7, 1), vectors(7, 2)
    item_ND[3] = 0
    query, item = dot.query(query_TD, torch.arange(7)), dot.item(item_ND, torch.arange(7))
    expected = torch.tensor([[plain(u, x, normalize, 0.05) for x in item_ND] for u in query_TD])
    # Values up to 20, or 100 where they are not normalized, of a handful of roundings.
    all_pairs = dot.all_pairs(query, item)
    bound = (20 if normalize else 100) * 4 * EPS
    torch.testing.assert_close(all_pairs, expected, rtol=8 * EPS, atol=bound)
    torch.testing.assert_close(dot.pairs(query, item), expected.diagonal(), rtol=8 * EPS, atol=bound)
    assert all_pairs.dtype == dot.pairs(query, item).dtype == torch.float32
    assert dot.all_pairs(dot.query(query_TD[:0], torch.arange(0)), item).shape == (0, 7)
    assert dot.pair_parameters() == [] and list(dot.parameters()) == []


def test_normalizing_is_full_precision_and_gives_zero_for_zero() -> None:
    x = vectors(4, 3)
    x[2] = 0
    normalized = l2_normalize(x.bfloat16())
    assert normalized.dtype == torch.float32
    assert normalized.norm(dim=1).tolist() == pytest.approx([1, 1, 0, 1], abs=4 * EPS)
    zero = torch.zeros(1, 3, requires_grad=True)
    l2_normalize(zero).sum().backward()
    assert zero.grad is not None and bool(zero.grad.isfinite().all())


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


def test_there_is_no_dropout_in_a_dot_product() -> None:
    dot, x, row = Dot(6, DotConfig()), vectors(4, 1), torch.arange(4)
    assert torch.equal(dot.query(x, row, Noise(1))[0], dot.query(x, row)[0])
    assert torch.equal(dot.item(x, row, Noise(1))[0], dot.item(x, row)[0])


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_those_of_the_formula_in_fp64(normalize: bool) -> None:
    dot, row = Dot(6, DotConfig(normalize=normalize)), torch.arange(5)
    query_TD, item_ND = vectors(5, 1).requires_grad_(), vectors(5, 2).requires_grad_()
    weight_TN = vectors(5, 3, dim=5)
    score_TN = dot.all_pairs(dot.query(query_TD, row), dot.item(item_ND, row))
    actual = torch.autograd.grad((score_TN * weight_TN).sum(), (query_TD, item_ND))
    u, x = query_TD.detach().double().requires_grad_(), item_ND.detach().double().requires_grad_()
    plain_TN = u @ x.T / 0.05
    if normalize:
        plain_TN = plain_TN / (u * u).sum(1).sqrt()[:, None] / (x * x).sum(1).sqrt()[None]
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
