"""Holds dropout in Triton to plain torch's, bit for bit."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from logitmix.modules import noise, noise_triton
from logitmix.modules.noise import Noise, derive_key

KEY = derive_key("tests", 1)
SHAPES = [(7, 3, 5), (300, 64), (3, 1), (70, 511), (5, 513), (2, 1030), (1, 512), (4, 0)]
ROWS = torch.tensor([0, 1, 129, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**62 + 3])
DTYPES = (torch.float32, torch.bfloat16)


def with_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
    leaves = [of.detach().requires_grad_() for of in inputs]
    with mock.patch.object(noise, "_is_compiled_for", lambda device_type: False):
        out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, d_out.to(out))


def check(
    plain: Callable[..., Tensor], extras: tuple[Any, ...], inputs: tuple[Tensor, ...], rows_R: Tensor, rate: float,
    device: str,
) -> None:  # fmt: skip
    """`plain` of the inputs, and its gradients, against the kernel's with what else it does in one pass."""

    def dropped(x: Tensor, rows_R: Tensor, key: int, drop: int, onto: Tensor | None = None, **others: Any) -> Tensor:
        scale = float(torch.tensor(noise._scale(drop), dtype=others.get("dtype") or x.dtype))
        return noise_triton.dropped(x, rows_R.to(device), noise.halves(key), drop, scale, onto, **others)

    def fused(x: Tensor, *onto: Tensor) -> Tensor:
        return noise._Dropped.apply(x, rows_R, derive_key(KEY, "here"), noise.threshold(rate), *(onto or extras))

    d_out = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2))
    expected = with_gradients(plain, inputs, d_out)
    with mock.patch.object(noise, "_dropped", dropped):
        found = with_gradients(fused, tuple(of.to(device) for of in inputs), d_out)
    for should, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got.cpu(), should, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.cpu().signbit() & (got.cpu() == 0), should.signbit() & (should == 0))


def check_alone(x: Tensor, rows_R: Tensor, rate: float, device: str) -> None:
    check(lambda x: Noise(KEY).dropout(x, rate, "here", rows_R), (), (x,), rows_R, rate, device)


def check_all(device: str, few: bool = False) -> None:
    random = torch.Generator().manual_seed(0)
    for dtype, shape in product(DTYPES, SHAPES[:3] if few else SHAPES):
        for rate in (0.3,) if few else (1e-4, 0.2, 0.5, 0.999):
            check_alone(torch.randn(shape, generator=random).to(dtype), ROWS.repeat(40)[: shape[0]], rate, device)
    for dtype in DTYPES:
        x, rows_R = torch.randn(20, 9, dtype=dtype).t(), torch.arange(36)[::4]
        for view in (x, x[:, ::2], x[:, None].expand(9, 3, 20)):
            check_alone(view, rows_R, 0.5, device)
        not_finite = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -0.0], dtype=dtype).repeat(50, 1)
        check_alone(not_finite, torch.arange(50), 0.3, device)
    check_together(device, few)


def check_together(device: str, few: bool) -> None:
    """With what is before or after it in the same kernel."""
    here, rate, random = Noise(KEY), 0.3, torch.Generator().manual_seed(1)
    for x_dtype, onto_dtype, shape in product(DTYPES, DTYPES, SHAPES[:1] if few else SHAPES[:-1]):
        rows_R, (x, onto) = ROWS.repeat(40)[: shape[0]], (torch.randn(shape, generator=random) for _ in range(2))
        x, onto = x.to(x_dtype), onto.to(onto_dtype)

        def added(x: Tensor, onto: Tensor, rows_R: Tensor = rows_R) -> Tensor:
            return here.dropout(x, rate, "here", rows_R, onto)

        def after_relu(x: Tensor, rows_R: Tensor = rows_R) -> Tensor:
            return here.relu_dropout(x, rate, "here", rows_R)

        check(added, (), (x, onto), rows_R, rate, device)
        check(after_relu, (None, True), (x,), rows_R, rate, device)
