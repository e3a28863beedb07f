"""Holds normalization in Triton to plain torch's."""

import torch
from torch import Tensor

from logitmix.modules.similarity import normalize_triton
from logitmix.modules.similarity.dot import _EPS, _Normalize

SHAPES = [(70, 3, 5), (300, 64), (3, 1), (5, 513), (1, 2048), (0, 4)]


def check_all(device: str, few: bool = False) -> None:
    random = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16)
    for x_dtype, out_dtype in ((of, to) for of in dtypes for to in dtypes):
        for shape in SHAPES[:2] if few else SHAPES:
            x, d_out = (torch.randn(shape, generator=random) for _ in range(2))
            # Some rows are shorter than the least length, and one is zero.
            x[::3] *= 1e-7
            x[:1] = 0
            check(x.to(x_dtype), d_out.to(out_dtype), out_dtype, device)
    # Other layouts.
    x = torch.randn(9, 20, generator=random).t()
    check(x, torch.randn(20, 9, generator=random), torch.float32, device)
    check(x[:, ::2], torch.randn(5, 20, generator=random).t(), torch.float32, device)


def check(x: Tensor, d_out: Tensor, dtype: torch.dtype, device: str) -> None:
    assert normalize_triton.covers(x, dtype)
    of_triton, plain = (x.detach().to(where).requires_grad_() for where in (device, "cpu"))
    got = normalize_triton.l2_normalize(of_triton, 20.0, dtype, _EPS)
    should = _Normalize.apply(plain, 20.0, dtype)
    assert got.dtype == dtype and got.shape == x.shape
    close(got, should)
    (d_got,), (d_should,) = (
        torch.autograd.grad(out, of, d_out.to(out.device)) for out, of in ((got, of_triton), (should, plain))
    )
    assert d_got.dtype == x.dtype
    close(d_got, d_should)


def close(got: Tensor, should: Tensor) -> None:
    """Within rounding: a last bit of the largest number of a row."""
    last_bit = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[got.dtype]
    largest = should.detach().float().abs().amax(-1, keepdim=True)
    assert bool(((got.detach().cpu().float() - should.detach().float()).abs() <= last_bit * largest).all())
