"""Noise against the hash written out with Python's integers, and against what independent noise looks like.

The keys are fixed, so no test is flaky; the bounds are those that right noise passes with one chance of failing in a
million or less.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from logitmix.common.compiled import compiled_library, plain_torch
from logitmix.modules.noise import Noise, derive_key, random_bits, truncated_normal

WORD = 0xFFFFFFFF
KEY = derive_key("tests", 1)


def plain_mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & WORD
    x ^= x >> 15
    x = x * 0x735A2D97 & WORD
    return x ^ x >> 15


def plain_bits(key: int, row: int, column: int) -> int:
    """random_bits' definition on unsigned words; the result as int32."""
    of_row = plain_mix(row & WORD ^ key & WORD)
    of_row = plain_mix(of_row ^ row >> 32 ^ key >> 32)
    word = plain_mix(of_row ^ plain_mix(column ^ 0x9E3779B9))
    return word - 2**32 if word >> 31 else word


def test_random_bits_are_the_hash_written_out_with_whole_numbers() -> None:
    rows = [0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 2**62 + 5]
    columns = [0, 1, 2, 1000, 2**31 - 1]
    for key in (0, 1, KEY, 2**63 - 1, 1 << 31, 1 << 62):
        expected = [[plain_bits(key, row, column) for column in columns] for row in rows]
        assert random_bits(key, torch.tensor(rows), torch.tensor(columns)).tolist() == expected


def test_keys_are_63_bits_that_follow_from_the_parts() -> None:
    # The value is part of the promise: a run continued on another machine must find the same noise.
    assert derive_key("dropout", 0, 1) == 6049787817576918742
    parts = [("a", 1), ("a", 2), ("b", 1), ("a", "1"), (1, "a"), ("a1",), ("a", 1, 0), ()]
    keys = {derive_key(*part) for part in parts}
    assert len(keys) == len(parts) and all(0 <= key < 2**63 for key in keys)


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate: float) -> None:
    x = torch.ones(1000, 301)
    dropped = Noise(KEY).dropout(x, rate, "here", torch.arange(1000))
    kept = dropped != 0
    sigma = math.sqrt(rate * (1 - rate) / x.numel())
    assert abs(float(kept.double().mean()) - (1 - rate)) < 5 * sigma + 2**-17
    assert abs(float(dropped.double().mean()) - 1) < 5 * sigma / (1 - rate)
    # The rate is rounded to a multiple of 2^-16.
    assert dropped[kept].unique().tolist() == pytest.approx([1 / (1 - rate)], rel=2**-17 / (1 - rate))


def test_dropout_scales_and_masks_what_it_is_given_and_its_gradient() -> None:
    x = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    rows = torch.arange(50)
    scaled = Noise(KEY).dropout(torch.ones(50, 9, dtype=torch.float64), 0.25, "here", rows)
    assert set(scaled.unique().tolist()) == {0.0, 1 / 0.75}
    dropped = Noise(KEY).dropout(x, 0.25, "here", rows)
    assert torch.equal(dropped, x * scaled)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, scaled)


@pytest.mark.parametrize("shape", [(0, 4), (0, 3), (0, 1), (0, 3, 4), (0, 0), (5, 0)])
def test_nothing_can_be_dropped_from_nothing(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, requires_grad=True)
    dropped = Noise(KEY).dropout(x, 0.5, "here", torch.arange(shape[0]))
    assert dropped.shape == shape
    dropped.sum().backward()
    assert x.grad is not None and x.grad.shape == shape


def both(function: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The result of a function with the compiled dropout and with plain torch's."""
    if compiled_library("logitmix.modules._noise") is None:
        pytest.skip("no C compiler here")
    compiled = function()
    with plain_torch():
        return compiled, function()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (7, 3, 5), (700, 511), (5, 513), (2, 1030), (1, 512)])
def test_compiled_equals_plain(shape: tuple[int, ...], dtype: torch.dtype, count: int, threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(shape, generator=generator).to(dtype)
    rows = torch.randint(-(2**62), 2**62, shape[:1], generator=generator)

    def dropped() -> Tensor:
        out = Noise(KEY).dropout(x, 0.3, "here", rows)
        return torch.cat([out, *torch.autograd.grad((out * weights).sum(), x)])

    torch.set_num_threads(count)
    compiled, plain = both(dropped)
    assert compiled.dtype == dtype and torch.equal(compiled, plain)
    assert (plain == 0).any() and (plain != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_keeps_what_is_not_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3e38, -0.0], dtype=dtype).repeat(50, 1)
    compiled, plain = both(lambda: Noise(KEY).dropout(x, 0.3, "here", torch.arange(50)))
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_takes_rows_in_any_layout(dtype: torch.dtype) -> None:
    x = torch.randn(9, 20, dtype=dtype).t()[::2]
    rows = torch.arange(40)[::4]
    for view in (x, x[:, ::2], x[:, None].expand(10, 3, 9)):
        compiled, plain = both(lambda view=view: Noise(KEY).dropout(view, 0.5, "here", rows))
        assert torch.equal(compiled, plain)


def test_initial_weights_follow_the_truncated_normal() -> None:
    x = truncated_normal(KEY, torch.arange(2**32, 2**32 + 1000), torch.arange(260), 0.02)
    assert x.shape == (1000, 260) and x.dtype == torch.float32
    assert float(x.abs().max()) <= 0.04 * (1 + 1e-6)
    z = x.double().flatten() / 0.02
    # Variance of a normal cut at +-2: 1 - 4 phi(2) / (2 Phi(2) - 1), that is 0.8796^2; five standard errors.
    assert abs(float(z.mean())) < 5 * 0.8796 / math.sqrt(z.numel())
    variance = 1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2))
    assert abs(float(z.var()) - variance) < 5 * 0.75 / math.sqrt(z.numel())


def test_whole_rows_are_left_out_and_the_others_stay() -> None:
    x, rows = torch.randn(4000, 3), torch.arange(7, 4007)
    left = Noise(KEY).without_rows(x, 0.25, "here", rows)
    gone = (left == 0).all(1)
    assert torch.equal(left[~gone], x[~gone]) and gone.double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(Noise(KEY).without_rows(x[100:], 0.25, "here", rows[100:]), left[100:])
    assert Noise(KEY).without_rows(x, 0.0, "here", rows) is x
