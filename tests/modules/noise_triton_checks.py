"""Holds dropout in Triton to plain torch's, bit for bit."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from logitmix.modules import noise, noise_triton
from logitmix.modules.noise import Noise, derive_key

KEY = derive_key("tests", 1)
SHAPES = [(7, 3, 5), (300, 64), (3, 1), (70, 511), (5, 513), (2, 1030), (1, 512), (4, 0)]
ROWS = torch.tensor([0, 1, 129, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**62 + 3])


def plain(x: Tensor, rate: float, rows_R: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    with mock.patch.object(noise, "_is_compiled_for", lambda device_type: False):
        out = Noise(KEY).dropout(x, rate, "here", rows_R)
    return out.detach(), torch.autograd.grad(out, x, d_out)[0]


def check_together(device: str, few: bool) -> None:
    """With what is before or after it in the same kernel, bit for bit."""
    random = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16)
    for x_dtype, onto_dtype in ((of, to) for of in dtypes for to in dtypes):
        for shape in SHAPES[:1] if few else SHAPES[:-1]:
            rows_R = ROWS.repeat(40)[: shape[0]]
            x, onto, d_out = (torch.randn(shape, generator=random) for _ in range(3))
            x, onto = x.to(x_dtype), onto.to(onto_dtype)
            check_one_kernel(x, onto, rows_R, d_out, device)


def check_one_kernel(x: Tensor, onto: Tensor, rows_R: Tensor, d_out: Tensor, device: str) -> None:
    rate, here = 0.3, Noise(KEY)
    mask = rows_R, derive_key(KEY, "here"), noise.threshold(rate)
    d_sum = d_out.to(torch.promote_types(x.dtype, onto.dtype))
    equal(
        with_gradients(lambda x, onto: here.dropout(x, rate, "here", rows_R, onto), (x, onto), d_sum),
        in_triton(lambda x, onto: noise._Dropped.apply(x, *mask, onto), (x, onto), d_sum, device),
    )
    equal(
        with_gradients(lambda x: here.relu_dropout(x, rate, "here", rows_R), (x,), d_out.to(x.dtype)),
        in_triton(lambda x: noise._Dropped.apply(x, *mask, None, True), (x,), d_out.to(x.dtype), device),
    )


def with_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
    leaves = [of.detach().requires_grad_() for of in inputs]
    with mock.patch.object(noise, "_is_compiled_for", lambda device_type: device_type == "cuda"):
        out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, d_out)


def in_triton(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], d_out: Tensor, device: str
) -> tuple[Tensor, ...]:
    def dropped(x: Tensor, rows_R: Tensor, key: int, drop: int, **others: Any) -> Tensor:
        scale = float(torch.tensor(noise._scale(drop), dtype=others.get("dtype") or x.dtype))
        return noise_triton.dropped(x, rows_R.to(device), noise.halves(key), drop, scale, **others)

    def named(x: Tensor, rows_R: Tensor, key: int, drop: int, onto: Tensor | None = None, **others: Any) -> Tensor:
        return dropped(x, rows_R, key, drop, onto=onto, **others)

    with mock.patch.object(noise, "_dropped", named):
        return with_gradients(function, tuple(of.to(device) for of in inputs), d_out.to(device))


def equal(plain: tuple[Tensor, ...], of_triton: tuple[Tensor, ...]) -> None:
    for should, got in zip(plain, of_triton, strict=True):
        assert got.dtype == should.dtype and torch.equal(got.cpu(), should)


def fused(x: Tensor, rate: float, rows_R: Tensor, d_out: Tensor, device: str) -> tuple[Tensor, Tensor]:
    moved, rows_R, d_out = (tensor.to(device) for tensor in (x, rows_R, d_out))
    moved.requires_grad_()

    def dropped(x: Tensor, rows_R: Tensor, key: int, drop: int, *others: Any, **more: Any) -> Tensor:
        scale = float(torch.tensor(noise._scale(drop), dtype=x.dtype))
        return noise_triton.dropped(x, rows_R, noise.halves(key), drop, scale, *others, **more)

    # On a GPU it is chosen by itself.
    with mock.patch.object(noise, "_dropped", noise._dropped if device == "cuda" else dropped):
        out = Noise(KEY).dropout(moved, rate, "here", rows_R)
        return out.detach().cpu(), torch.autograd.grad(out, moved, d_out)[0].cpu()


def check_all(device: str, few: bool = False) -> None:
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES[:3] if few else SHAPES:
            rows_R = ROWS.repeat(40)[: shape[0]]
            for rate in (0.3,) if few else (1e-4, 0.2, 0.5, 0.999):
                x, d_out = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
                for got, should in zip(
                    fused(x, rate, rows_R, d_out, device), plain(x, rate, rows_R, d_out), strict=True
                ):
                    assert got.dtype == dtype and torch.equal(got, should)
                    assert got.numel() < 100 or rate < 0.1 or bool((got == 0).any())
        check_layouts(dtype, device)
        check_not_finite(dtype, device)
    check_together(device, few)


def check_layouts(dtype: torch.dtype, device: str) -> None:
    x, rows_R = torch.randn(20, 9, dtype=dtype).t(), torch.arange(36)[::4]
    for view in (x, x[:, ::2], x[:, None].expand(9, 3, 20)):
        d_out = torch.randn(view.shape).to(dtype)
        for got, should in zip(fused(view, 0.5, rows_R, d_out, device), plain(view, 0.5, rows_R, d_out), strict=True):
            assert torch.equal(got, should)


def check_not_finite(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -0.0], dtype=dtype).repeat(50, 1)
    got, should = (
        form(x, 0.3, torch.arange(50), torch.ones_like(x), *where)[0]
        for form, where in ((fused, [device]), (plain, []))
    )
    torch.testing.assert_close(got, should, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & (got == 0), should.signbit() & (should == 0))
