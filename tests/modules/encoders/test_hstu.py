"""HSTU's compiled attention against the plain form, in FP64."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.encoders import hstu_attention
from logitmix.modules.encoders.hstu_attention import TIME_BUCKETS, attend, attend_plain, time_buckets


def packing(lengths: list[int], first_row: int = 0, seed: int = 3) -> Packing:
    """With times that rise within a sequence, by gaps of all sizes; the query after the last action is asked later."""
    generator = torch.Generator().manual_seed(seed)
    times = [2 ** (torch.rand(n + 1, generator=generator) * 30).long() for n in lengths]
    times = [of.cumsum(0) - 1000 for of in times]
    nothing = [torch.zeros(0, dtype=torch.int64)]
    time_T, asked_T = torch.cat(nothing + [of[:-1] for of in times]), torch.cat(nothing + [of[1:] for of in times])
    return Packing(torch.tensor(lengths, dtype=torch.int64), first_row, time_T, asked_T)


def bucket(gap: int) -> int:
    """Of gaps that FP32 holds: two for each power of 2."""
    if gap < 1:
        return 0
    power = gap.bit_length() - 1
    return 1 + 2 * power + (gap >= 1.5 * 2**power)


@pytest.fixture(params=[0, 1, 2])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    library = hstu_attention._library()
    if library is None or library.hstu_level() < request.param:
        pytest.skip("not compiled, or not this machine's")
    monkeypatch.setattr(hstu_attention, "_LEVEL", request.param)
    return int(request.param)


def inputs(lengths: list[int], heads: int, width: int, L: int, times: bool, seed: int = 0) -> list[Tensor]:
    """Of `attend`, in FP32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), 3, heads, width), (L,), *([(TIME_BUCKETS,)] if times else [])]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def results(tensors: list[Tensor], packed: Packing, compiled: bool) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = (attend if compiled else attend_plain)(leaves[0], leaves[1], leaves[2] if leaves[2:] else None, packed)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def assert_same(tensors: list[Tensor], packed: Packing) -> None:
    """The compiled form against the plain one in FP64."""
    exact = results([tensor.double() for tensor in tensors], packed, False)
    # A sum's terms bound its rounding, and its result's norm does not if terms cancel. The terms are products of a
    # value, a gradient of the output, which is about 1, and a weight, a silu divided by L.
    values = tensors[0][:, 0]
    rounding = 2**-24 * float(values.norm()) * math.sqrt(values.numel()) / len(tensors[1])
    for got, should in zip(results(tensors, packed, True), exact, strict=True):
        assert got.dtype == torch.float32 and got.shape == should.shape
        assert float((got - should).norm()) <= 2e-6 * float(should.norm()) + rounding


LENGTHS = [[0, 1, 33, 200], [5], [1, 1, 0], [64, 32, 31, 16, 17, 15]]


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (2, 3), (1, 16), (3, 20), (2, 32), (1, 64), (1, 100)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_compiled_equals_plain(lengths: list[int], heads: int, width: int, times: bool, level: int) -> None:
    tensors = inputs(lengths, heads, width, 200, times)
    tensors[0] /= math.sqrt(width)
    assert_same(tensors, packing(lengths))


@given(
    lengths=st.lists(st.integers(0, 70), max_size=6),
    heads=st.integers(1, 3),
    width=st.integers(1, 40),
    spare=st.integers(0, 9),
    times=st.booleans(),
    seed=st.integers(0, 99),
    chosen=st.sampled_from([0, 1, 2]),
)
@example([], 1, 1, 1, True, 0, 2)
@example([1], 1, 11, 0, False, 1, 1)
def test_compiled_equals_plain_for_any_shape(
    lengths: list[int], heads: int, width: int, spare: int, times: bool, seed: int, chosen: int
) -> None:
    tensors = inputs(lengths, heads, width, max([1, *lengths]) + spare, times, seed)
    tensors[0] /= math.sqrt(width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hstu_attention, "_LEVEL", chosen)
        assert_same(tensors, packing(lengths, seed=seed))


def test_results_do_not_depend_on_the_number_of_threads(threads: None) -> None:
    lengths = [40, 3, 0, 90, 7, 61]
    tensors, packed = inputs(lengths, 2, 16, 90, True), packing(lengths)
    torch.set_num_threads(1)
    alone = results(tensors, packed, True)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        found = results(tensors, packed, True)
        assert all(map(torch.equal, found[:2], alone)) and all(map(torch.equal, found, results(tensors, packed, True)))
        for got, should in zip(found[2:], alone[2:], strict=True):
            torch.testing.assert_close(got, should, rtol=1e-5, atol=1e-5)


def test_extreme_scores_are_finite(level: int) -> None:
    """e^x is bounded: silu of -500 is nothing, of 500 is 500."""
    packed_T3Gd = torch.tensor([[1.0, 500.0, 1.0], [2.0, -500.0, 1.0]])[:, :, None, None].repeat(20, 1, 1, 1)
    out, *gradients = results([packed_T3Gd, torch.zeros(40)], packing([40]), True)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    torch.testing.assert_close(out[0::2].flatten(), torch.arange(20) * 3 * 12.5 + 12.5)
    assert float(out[1::2].abs().max()) < 1e-30


def test_buckets_of_time() -> None:
    gaps = [-(2**63), -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 86400, 2**24, 3 * 2**23, 2**62, 2**63 - 1]
    found = time_buckets(torch.tensor(gaps)).tolist()
    # FP32 rounds the last to 2^63.
    assert found == [*map(bucket, gaps[:-1]), bucket(2**63)]
    assert found[3:13] == [1, 3, 4, 5, 5, 6, 6, 7, 7, 8] and max(found) < TIME_BUCKETS


@pytest.mark.parametrize("latest", [2**40, 2**62, 2**63 - 1])
def test_any_times_are_in_some_bucket(latest: int, level: int) -> None:
    """Also those whose differences int64 does not hold."""
    lengths = [40, 3]
    generator = torch.Generator().manual_seed(0)
    time_T, asked_T = (torch.randint(-latest, latest, (43,), generator=generator) for _ in range(2))
    assert_same(inputs(lengths, 2, 8, 40, True), Packing(torch.tensor(lengths), 0, time_T, asked_T))
