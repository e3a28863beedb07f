"""Holds the Triton form of HSTU's attention to the plain one."""

import itertools
import math

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from test_hstu import inputs, packing
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.config import HSTUConfig
from logitmix.modules.encoders import hstu, hstu_triton, hstu_unit_triton
from logitmix.modules.encoders.hstu_attention import attend_plain
from logitmix.modules.noise import Noise, derive_key, threshold

BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 0.01}
"""How far a result may be from FP64 of the same inputs, relative to its norm: BF16 rounds weights to 2^-9."""


def results(tensors: list[Tensor], packed: Packing, fused: bool) -> list[Tensor]:
    """The output and all gradients, on the CPU in FP64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    attend = hstu_triton.attend if fused else attend_plain
    out = attend(leaves[0], leaves[1], leaves[2] if leaves[2:] else None, packed)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    gradients = torch.autograd.grad((out * weights).sum(), leaves)
    assert not fused or [of.dtype for of in gradients] == [of.dtype for of in tensors]
    return [of.detach().cpu().double() for of in (out, *gradients)]


def check(
    lengths: list[int], heads: int, width: int, L: int, times: bool, dtype: torch.dtype, device: str, seed: int = 0
) -> None:
    tensors = inputs(lengths, heads, width, L, times, seed)
    tensors[0] = (tensors[0] / math.sqrt(width)).to(dtype)
    packed = packing(lengths, seed=seed)
    assert hstu_triton.covers(width, dtype)
    found = results([tensor.to(device) for tensor in tensors], packed.to(torch.device(device)), True)
    expected = results([tensor.double() for tensor in tensors], packed, False)
    for got, should in zip(found, expected, strict=True):
        assert got.shape == should.shape
        off = float((got - should).norm())
        assert off <= BOUNDS[dtype] * float(should.norm() + 1e-3), (off, float(should.norm()), lengths, width, dtype)


FEW = [(torch.float32, True, (2, 16)), (torch.bfloat16, False, (1, 3))]
ALL = itertools.product(BOUNDS, (False, True), ((1, 3), (2, 16), (2, 32), (1, 40)))
"""Types, whether there are times, and heads with their width."""


def check_shapes(device: str, few: bool) -> None:
    for dtype, times, (heads, width) in FEW if few else ALL:
        check([5, 0, 17, 1] if few else [5, 0, 17, 33, 1], heads, width, 40, times, dtype, device)
    check([], 1, 8, 4, True, torch.float32, device)
    check([0, 0], 1, 8, 4, True, torch.float32, device)


def check_cases(device: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(
        lengths=st.lists(st.integers(0, 40), max_size=4),
        heads=st.integers(1, 3),
        width=st.integers(1, 40),
        spare=st.integers(0, 9),
        times=st.booleans(),
        dtype=st.sampled_from(list(BOUNDS)),
        seed=st.integers(0, 99),
    )
    def is_the_plain_form(
        lengths: list[int], heads: int, width: int, spare: int, times: bool, dtype: torch.dtype, seed: int
    ) -> None:
        check(lengths, heads, width, max([1, *lengths]) + spare, times, dtype, device, seed)

    is_the_plain_form()


def check_extremes(device: str) -> None:
    """Scores whose e^x is infinite; times whose differences int64 does not hold."""
    packed_T3Gd = torch.tensor([[1.0, 500.0, 1.0], [2.0, -500.0, 1.0]])[:, :, None, None].repeat(20, 1, 1, 1)
    tensors = [packed_T3Gd, torch.zeros(40)]
    both = [results([of.to(device) for of in tensors], packing([40]).to(torch.device(device)), True)]
    both.append(results(tensors, packing([40]), False))
    for got, should in zip(*both, strict=True):
        torch.testing.assert_close(got, should, rtol=1e-5, atol=1e-5)
    generator, latest = torch.Generator().manual_seed(0), 2**63 - 1
    time_T, asked_T = (torch.randint(-latest, latest, (40,), generator=generator) for _ in range(2))
    tensors, packed = inputs([40], 1, 8, 40, True), Packing(torch.tensor([40]), 0, time_T, asked_T)
    both = [results([of.to(device) for of in tensors], packed.to(torch.device(device)), True)]
    both.append(results([of.double() for of in tensors], packed, False))
    for got, should in zip(*both, strict=True):
        assert float((got - should).norm()) <= BOUNDS[torch.float32] * float(should.norm())


EPSILON, RATE = 1e-6, 0.3


def in_units(
    raw: Tensor, x: Tensor, biases: list[Tensor], packed: Packing, noise: Noise | None, fused: bool
) -> list[Tensor]:
    """A unit's output, a norm's, and all gradients: by the kernels, or in torch in the type that is given."""
    leaves = [of.detach().clone().requires_grad_() for of in (raw, x, *biases)]
    raw, x, position_L, *time_K = leaves
    T, _, G, d = raw.shape
    if fused:
        mask = (derive_key(noise.key, "site"), threshold(RATE)) if noise else None
        gated = hstu_unit_triton.unit(raw, position_L, time_K[0] if time_K else None, packed, EPSILON, mask)
        normed, past = hstu_unit_triton.normed(x, EPSILON, raw.dtype)
    else:
        parts = torch.nn.functional.silu(raw)
        attended = attend_plain(parts[:, :3], position_L, time_K[0] if time_K else None, packed).reshape(T, G * d)
        gated = torch.nn.functional.layer_norm(attended, (G * d,), eps=EPSILON) * parts[:, 3].reshape(T, G * d)
        if noise:
            gated = noise.dropout(gated, RATE, "site", packed.row_T)
        normed, past = torch.nn.functional.layer_norm(x, (G * d,), eps=EPSILON), x
    weight = torch.randn(T, G * d, generator=torch.Generator().manual_seed(1)).bfloat16().to(gated.device)
    total = (gated.double() * weight).sum() + (normed.double() * weight.flip(0)).sum() + (past.double() * weight).sum()
    gradients = torch.autograd.grad(total, leaves)
    return [of.detach().cpu().double() for of in (gated, normed, *gradients)]


def check_unit(lengths: list[int], G: int, d: int, times: bool, dtype: torch.dtype, drops: bool, device: str) -> None:
    _, *biases = inputs(lengths, G, d, 40, times)
    generator = torch.Generator().manual_seed(2)
    raw = torch.randn(sum(lengths), 4, G, d, generator=generator).to(dtype)
    x, packed = torch.randn(sum(lengths), G * d, generator=generator), packing(lengths)
    given = [of.to(device) for of in (raw, x, *biases)]
    noise = Noise(5) if drops else None
    found = in_units(*given[:2], given[2:], packed.to(torch.device(device)), noise, True)
    doubles = [of.double() for of in (raw, x, *biases)]
    expected = in_units(*doubles[:2], doubles[2:], packed, noise, False)
    # Its norm divides by the deviation of what attention gives.
    bound = 4 * BOUNDS[dtype]
    for got, should in zip(found, expected, strict=True):
        assert got.shape == should.shape
        off = float((got - should).norm())
        assert off <= bound * float(should.norm() + 1e-3), (off, float(should.norm()), lengths, G, d, dtype)


def check_block(device: str) -> None:
    """A block with its products, and the gradients of its weights."""
    found = []
    for fused, dtype in ((True, torch.float32), (False, torch.float64)):
        generator = torch.Generator().manual_seed(3)
        model = hstu.HSTU(16, HSTUConfig(max_length=40, blocks=1, heads=2, dropout=RATE, times=True))
        model.reset_parameters(generator)
        (block,) = model.blocks.to(dtype).to(device if fused else "cpu")
        packed = packing([5, 0, 17, 1]).to(torch.device(device if fused else "cpu"))
        x = torch.randn(23, 16, generator=generator).to(packed.row_T.device, dtype).requires_grad_()
        out = (hstu._fused if fused else hstu._Block.forward)(block, x, packed, Noise(7))
        gradients = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
        found.append([of.detach().cpu().double() for of in (out, *gradients)])
    for got, should in zip(*found, strict=True):
        assert float((got - should).norm()) <= 2e-5 * float(should.norm() + 1e-3)


def check_units(device: str, few: bool) -> None:
    sizes = [(2, 8)] if few else [(1, 3), (2, 16), (3, 40)]
    for (G, d), dtype, drops in itertools.product(sizes, BOUNDS, (True,) if few else (False, True)):
        check_unit([5, 0, 17, 1], G, d, drops, dtype, drops, device)
    check_unit([], 1, 8, True, torch.float32, True, device)
    check_block(device)


def check_all(device: str, few: bool = False) -> None:
    check_units(device, few)
    check_shapes(device, few)
    check_extremes(device)
    if not few:
        check_cases(device, 100 if device == "cpu" else 10)  # a GPU compiles each
