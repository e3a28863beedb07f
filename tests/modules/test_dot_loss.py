"""dot_sampled_softmax against the block form in plain torch, at sizes where it works in several parts."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from logitmix.modules.config import DotConfig
from logitmix.modules.losses import dot_loss
from logitmix.modules.losses.blockwise import Examples, blockwise_loss, softmax
from logitmix.modules.similarity.dot import Dot

WIDTH = 16


def examples_of(lengths: list[int], negatives: int, items: int) -> Examples:
    generator = torch.Generator().manual_seed(3)
    positions = sum(lengths)
    return Examples(
        torch.arange(positions),
        torch.randint(0, items, (positions,), generator=generator),
        [0, *accumulate(lengths)],
        torch.randint(0, items, (len(lengths), negatives), generator=generator),
    )


def sides(positions: int, items: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(count, WIDTH, generator=generator).requires_grad_() for count in (positions, items)]


CASES = {
    "sequences": ([5, 0, 1, 40, 17, 300, 2], 24, 100),
    "positions": ([1] * 300, 24, 100),
    "batch, most items": ([70], 90, 120),
    "batch, few of the items": ([70], 20, 120),
}


@pytest.mark.parametrize("log_q", [False, True])
@pytest.mark.parametrize("limit", [1, 100, 1000, 2**30])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_block_form(case: str, limit: int, log_q: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, negatives, items = CASES[case]
    examples, (query, item) = examples_of(lengths, negatives, items), sides(sum(lengths), items)
    if log_q:
        generator = torch.Generator().manual_seed(5)
        weight_T = (3 * torch.rand(len(query), generator=generator) - 0.5).clamp(min=0)
        examples = replace(examples, log_q_V=-5 * torch.rand(items, generator=generator), weight_T=weight_T)
    monkeypatch.setattr(dot_loss, "_PAIRS", {"cpu": limit})
    monkeypatch.setattr(dot_loss, "_SINGLE", {"cpu": limit})
    monkeypatch.setattr(dot_loss, "_ALL_PAIRS", {"cpu": limit})
    monkeypatch.setattr(dot_loss, "_LEAST", 1)
    loss = dot_loss.dot_sampled_softmax(query, item, examples)
    plain = blockwise_loss(
        softmax, Dot(WIDTH, DotConfig(normalize=False, temperature=1.0)), (query,), (item,), examples, None, 0.0
    )
    # Hundreds of losses, and gradients of as many terms, in another order.
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    actual, expected = (torch.autograd.grad(2 * of, [query, item]) for of in (loss, plain))
    for got, should in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, should, rtol=0, atol=2e-6 * float(should.abs().max()))
