"""Holds gated units in Triton to plain torch's."""

import torch
from torch import Tensor

from logitmix.modules.similarity.components import _gated
from logitmix.modules.similarity.gated_triton import gated

SHAPES = [(7, 5), (30, 64), (1, 1), (3, 513), (0, 4)]


def check_all(device: str, few: bool = False) -> None:
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for rows, hidden in SHAPES[:2] if few else SHAPES:
            both = (4 * torch.randn(rows, 2 * hidden, generator=random)).to(dtype)
            check(both, torch.randn(rows, hidden, generator=random).to(dtype), device)
        # Another layout, and gates whose exponentials overflow.
        both = torch.randn(8, 3, generator=random).to(dtype).t()
        both[0] = torch.tensor([1.0, 2, 3, 4, 200, -200, 88, -88]).to(dtype)
        check(both, torch.randn(4, 3, generator=random).to(dtype).t(), device)


def check(both: Tensor, d_out: Tensor, device: str) -> None:
    of_triton, plain = (both.detach().to(where).requires_grad_() for where in (device, "cpu"))
    got, should = gated(of_triton), _gated(plain)
    close(got, should)
    (d_got,), (d_should,) = (
        torch.autograd.grad(out, of, d_out.to(out.device)) for out, of in ((got, of_triton), (should, plain))
    )
    close(d_got, d_should)


def close(got: Tensor, should: Tensor) -> None:
    """Within two roundings. Where the slope of silu is almost 0, FP32 has lost digits; numbers here are 1 to 10."""
    assert got.dtype == should.dtype and got.shape == should.shape
    relative, absolute = {torch.float32: (2e-6, 4e-6), torch.bfloat16: (2**-7, 1e-4)}[got.dtype]
    torch.testing.assert_close(got.detach().cpu(), should.detach(), rtol=relative, atol=absolute)
