"""Holds the Triton form of the MoL loss to the dense sum."""

from dataclasses import replace

import hypothesis.strategies as st
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from test_mol_loss import EPS, NOISE, Case, assert_is_the_sum, dense, make, weights
from torch import Tensor

from logitmix.modules import noise_triton
from logitmix.modules.losses import mol_triton
from logitmix.modules.noise import derive_key, halves, threshold


def fused(case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    dropout = (NOISE, case.rate) if case.rate else None
    return mol_triton.mol_sampled_softmax(dtype, case.examples, dropout, *case.tensors)


def on(device: str, case: Case) -> Case:
    tensors = tuple(tensor.detach().to(device).requires_grad_() for tensor in case.tensors)
    indices = {name: getattr(case, name).to(device) for name in ("target_T", "negatives_GN", "row_T")}
    numbers = {name: of.to(device) for name in ("log_q_V", "weight_T") if (of := getattr(case, name)) is not None}
    return replace(case, tensors=tensors, **numbers, **indices)


def check(case: Case, device: str, roundings: int = 1000) -> None:
    moved = on(device, case)
    assert_is_the_sum(fused(moved), moved, case.to(torch.float64), roundings)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few items, so that negatives hit targets and each other; sizes that are and are not powers of two."""
    lengths = draw(st.lists(st.integers(0, 9), max_size=4))
    size = st.sampled_from([1, 2, 3, 4, 8])
    shape = draw(size), draw(size), draw(st.sampled_from([1, 5, 16])), draw(st.sampled_from([1, 16, 33]))
    rate = draw(st.sampled_from([0.0, 0.2, 0.7]))
    seed, scale = draw(st.integers(0, 100)), draw(st.sampled_from([1.0, 4.0]))
    return make(lengths, draw(st.integers(0, 19)), draw(st.integers(1, 12)), shape, rate, seed, scale)


def check_cases(device: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(case=cases())
    def equals_the_dense_sum(case: Case) -> None:
        check(case, device)

    equals_the_dense_sum()


GROUPS = [
    ([3, 1, 0, 2, 0], 11, (2, 8, 4, 33)),
    ([18], 9, (2, 2, 16, 16)),
    ([4, 9, 5], 16, (4, 3, 5, 7)),
    ([6, 2], 12, (8, 8, 32, 128)),
    ([1] * 7, 11, (4, 3, 5, 7)),
]
"""One group for the batch, one for each sequence, short and empty ones; tiles that are cut short in both ways."""


def check_groups(device: str, few: bool) -> None:
    for lengths, N, shape in GROUPS[:1] if few else GROUPS:
        for rate in (0.2,) if few else (0.0, 0.2):
            case = make(lengths, N, 60, shape, rate)
            # A correction as large as those of rare items.
            correction = -8 * torch.rand(60, generator=torch.Generator().manual_seed(N)) if rate else None
            weight_T = weights(len(case.target_T)) if rate else None
            check(replace(case, log_q_V=correction, weight_T=weight_T), device)


def check_starved_gates(device: str) -> None:
    """What dropout leaves can be less than the 1e-6 that its sum counts as."""
    case = make([12], 12, shape=(2, 3, 4, 5), rate=0.5, scale=8.0)
    starved = (case.tensors[0], case.tensors[1] * 4, *case.tensors[2:])
    check(replace(case, tensors=starved).to(torch.float32), device, 3000)


def check_hits(device: str, few: bool) -> None:
    for rate in (0.3,) if few else (0.0, 0.3):
        case = on(device, make([5], 20, V=1, rate=rate))
        loss = fused(case)
        assert float(loss.detach()) == 0.0
        assert not any(gradient.any() for gradient in case.gradients(loss))


@triton.jit
def _mask_kernel(rows, key_low, key_high, dropped, mask, R: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    r, m = tl.arange(0, R), tl.arange(0, M)
    kept = noise_triton.keep_mask(noise_triton.hashed_rows(tl.load(rows + r), key_low, key_high), m, dropped)
    tl.store(mask + r[:, None] * M + m[None, :], kept.to(tl.int8))


def check_masks(device: str) -> None:
    """Bit for bit those of noise.py, whose rows count up to 2^63."""
    rows_R = torch.tensor([0, 1, 129, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**62 + 3, *range(1000, 1007)])
    for rate in (0.0, 1e-4, 0.2, 0.5, 0.999):
        for seed in range(4):
            noise = replace(NOISE, key=derive_key(seed, "mask"))
            key = derive_key(noise.key, "gates")
            kept = torch.zeros(16, 64, dtype=torch.int8, device=device)
            _mask_kernel[(1,)](rows_R.to(device), *halves(key), threshold(rate), kept, 16, 64)
            expected = noise.dropout(torch.ones(16, 64), rate, "gates", rows_R) > 0
            assert torch.equal(kept.cpu() > 0, expected)


def check_programs(device: str, few: bool) -> None:
    """However many programs divide the work: the loss to the last bit, and sums of few parts."""
    case = on(device, make([3, 0, 4] if few else [9, 0, 14], 10, rate=0.2))
    before, results = mol_triton._Problem.programs, []
    try:
        for programs in (1, 100) if few else (1, 3, 100):
            mol_triton._Problem.programs = lambda _, tiles, most=programs: min(tiles, most)  # type: ignore[method-assign]
            loss = fused(case)
            results.append([loss.detach(), *case.gradients(loss)])
    finally:
        mol_triton._Problem.programs = before  # type: ignore[method-assign]
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        for got, should in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, should, rtol=0, atol=100 * EPS * float(should.abs().max()))


def check_bf16(device: str, few: bool) -> None:
    """Loss to 2^-10, each gradient to 2^-6 of its norm, from FP32 of the same BF16 sides."""
    for shape, N in (((3, 5, 20, 48), 13), ((8, 8, 32, 128), 24))[: 1 if few else 2]:
        for rate in (0.2, 0.0)[: 1 if few else 2]:
            case = on(device, make([5, 4] if few else [20, 13], N, shape=shape, rate=rate).to(torch.bfloat16))
            exact = case.to(torch.float32)
            half, full = fused(case, torch.bfloat16), dense(on("cpu", exact).to(torch.float64))
            assert half.dtype == torch.float32
            assert abs(float(half.detach()) - float(full.detach())) < 2**-10 * float(full.detach())
            twin = on("cpu", exact).to(torch.float64)
            should_be = twin.gradients(dense(twin))
            for got, should in zip(case.gradients(half), should_be, strict=True):
                assert got.dtype == torch.bfloat16
                assert float((got.cpu().double() - should).norm() / should.norm()) < 2**-6


def check_not_finite(device: str, few: bool) -> None:
    for at in (0, 7) if few else range(8):
        case = on(device, make([5], 6, V=8))
        with torch.no_grad():
            case.tensors[at].view(-1)[-1] = torch.nan
            case.target_T[-1] = 7
        assert not bool(fused(case).isfinite())


def check_all(device: str, few: bool = False) -> None:
    check_masks(device)
    check_groups(device, few)
    check_starved_gates(device)
    check_hits(device, few)
    check_programs(device, few)
    check_bf16(device, few)
    check_not_finite(device, few)
    if not few:
        check_cases(device, 100 if device == "cpu" else 10)  # a GPU compiles each
