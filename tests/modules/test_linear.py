"""Tests of linear layers for changing numbers of rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from logitmix.modules.linear import Linear


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 300, 1000])
def test_padding_changes_nothing(rows: int) -> None:
    """Values and gradients are those of nn.Linear in BF16, but for the order of sums."""
    torch.manual_seed(0)
    layer, x = Linear(24, 40), torch.randn(rows, 24, requires_grad=True)
    weighted = torch.randn(rows, 40)
    found = []
    for of in (layer.forward, lambda x: nn.Linear.forward(layer, x)):
        with torch.autocast("cpu", torch.bfloat16):
            out = of(x)
        assert out.dtype == torch.bfloat16
        gradients = torch.autograd.grad((out.float() * weighted).sum(), (x, *layer.parameters()))
        found.append((out.detach().float(), *gradients))
    for padded, plain in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=2**-7, atol=2**-7 * float(plain.abs().max()) if rows else 0)


def test_products_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most nine from a power of two to the next, an eighth larger than the rows at most."""
    sizes = []
    product = F.linear

    def seen(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return product(x, *rest)

    monkeypatch.setattr(F, "linear", seen)
    layer = Linear(8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for rows in range(256, 512):
            assert len(layer(torch.randn(rows, 8))) == rows
            assert rows <= sizes[-1] <= rows * 9 / 8
    assert len({*sizes}) <= 9
    layer(torch.randn(300, 8))
    assert sizes[-1] == 300
