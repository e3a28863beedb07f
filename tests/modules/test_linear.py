"""Tests of linear layers for changing numbers of rows."""

import pytest
import torch
from torch import nn

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
