"""Holds the Triton form of the dot product's loss to the block form in plain torch."""

from dataclasses import replace
from itertools import product

import torch
from test_dot_loss import examples_of
from torch import Tensor

from logitmix.modules.config import DotConfig
from logitmix.modules.losses import dot_triton
from logitmix.modules.losses.blockwise import Examples, blockwise_loss, softmax
from logitmix.modules.similarity.dot import Dot

CASES = [
    ([5, 0, 1, 40, 17], 40, 100, 20),
    ([1] * 30, 24, 100, 64),
    ([300], 33, 70, 16),
    ([20, 60], 35, 50, 100),
    ([20, 60], 16, 50, 300),
]
"""Lengths of groups, negatives, items and width: short and empty groups, single positions, one group in two pieces;
widths that are and are not powers of two, of each plan."""


def on(device: str, examples: Examples) -> Examples:
    numbers = {name: of.to(device) for name in ("log_q_V", "weight_T") if (of := getattr(examples, name)) is not None}
    indices = {name: getattr(examples, name).to(device) for name in ("row_T", "target_T", "negatives_GN")}
    return replace(examples, **numbers, **indices)


def both_ways(loss: Tensor, sides: list[Tensor]) -> list[Tensor]:
    return [loss.detach().cpu(), *(of.cpu() for of in torch.autograd.grad(2 * loss, sides))]


def check(lengths: list[int], N: int, V: int, H: int, corrected: bool, device: str) -> None:
    """Few items, so that negatives hit targets and each other."""
    generator = torch.Generator().manual_seed(4)
    examples, plain = examples_of(lengths, N, V), Dot(H, DotConfig(normalize=False, temperature=1.0))
    if corrected:
        weight_T = (3 * torch.rand(sum(lengths), generator=generator) - 0.5).clamp(min=0)
        examples = replace(examples, log_q_V=-5 * torch.rand(V, generator=generator), weight_T=weight_T)
    sides = [torch.randn(rows, H, generator=generator) * 2 * H**-0.25 for rows in (sum(lengths), V)]
    moved = [side.to(device).requires_grad_() for side in sides]
    got = both_ways(dot_triton.dot_sampled_softmax(*moved, on(device, examples)), moved)
    query, item = (side.requires_grad_() for side in sides)
    expected = both_ways(blockwise_loss(softmax, plain, (query,), (item,), examples, None, 0.0), [query, item])
    # On a GPU a product lacks what is below 2^-21 of it.
    error = 2e-6 if device == "cpu" else 2e-5
    for actual, should in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, should, rtol=0, atol=error * float(should.abs().max()))


def check_hits(device: str) -> None:
    """Whoever's negatives are all its target has nothing to learn."""
    sides = [torch.randn(rows, 8, device=device).requires_grad_() for rows in (5, 1)]
    got = both_ways(dot_triton.dot_sampled_softmax(*sides, on(device, examples_of([2, 3], 20, 1))), sides)
    assert not any(of.any() for of in got)


def check_types(device: str) -> None:
    """Half inputs get half gradients, and what is not finite stays so."""
    examples = on(device, examples_of([20, 3], 9, 30))
    sides = [torch.randn(rows, 16, device=device).bfloat16().requires_grad_() for rows in (23, 30)]
    loss = dot_triton.dot_sampled_softmax(*sides, examples)
    widened = [side.detach().float().requires_grad_() for side in sides]
    assert loss.dtype == torch.float32
    for got, should in zip(
        both_ways(loss, sides), both_ways(dot_triton.dot_sampled_softmax(*widened, examples), widened), strict=True
    ):
        torch.testing.assert_close(got.float(), should, rtol=2**-8, atol=1e-5)
    for side in range(2):
        changed = [of.detach().clone() for of in widened]
        changed[side][int(examples.target_T[3]) if side else 3, 2] = torch.nan
        assert not bool(dot_triton.dot_sampled_softmax(*changed, examples).isfinite())


def check_all(device: str, few: bool = False) -> None:
    check_hits(device)
    check_types(device)
    for case, corrected in product(CASES[:1] if few else CASES, (True,) if few else (False, True)):
        check(*case, corrected, device)
