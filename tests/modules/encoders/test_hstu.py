"""HSTU against one sequence after the other, each attention weight written out, in FP64; its compiled attention against
the plain form."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from test_sasrec import DIM, NOTHING, WITH_NOISE, assert_as_alone, assert_zero_gradients, bf16_errors, filled, rows
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.config import HSTUConfig
from logitmix.modules.encoders import hstu_attention
from logitmix.modules.encoders.hstu import HSTU
from logitmix.modules.encoders.hstu_attention import TIME_BUCKETS, attend, attend_plain, time_buckets
from logitmix.modules.encoders.stack import Stack
from logitmix.modules.noise import Noise

CONFIG = HSTUConfig(blocks=2, heads=2, max_length=6, dropout=0.3, history_dropout=0.4, times=True)


def make(dim: int = DIM, **changes: Any) -> HSTU:
    return filled(HSTU(dim, replace(CONFIG, **changes)))


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


def dropped(x: Tensor, noise: Noise | None, rate: float, site: str, row_L: Tensor) -> Tensor:
    return x if noise is None else x * noise.dropout(torch.ones_like(x), rate, site, row_L)


def entered(encoder: Stack, item_LD: Tensor, row_L: Tensor, noise: Noise | None) -> Tensor:
    """What the first block of one sequence is given."""
    L, D = item_LD.shape
    seen_L1 = dropped(torch.ones(L, 1, dtype=torch.float64), noise, encoder.history_rate, "history", row_L).sign()
    x = item_LD * seen_L1 * math.sqrt(D) + encoder.position_LD[:L]
    return dropped(x, noise, encoder.rate, "input", row_L)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def plain(
    encoder: HSTU, item_LD: Tensor, packing: Packing, at: slice, heads: int, noise: Noise | None = None
) -> Tensor:
    """The queries [L, D] of the sequence that is at these positions of a packing."""
    L, D = item_LD.shape
    assert packing.time_T is not None and packing.asked_T is not None
    row_L, time, asked = packing.row_T[at], packing.time_T[at].tolist(), packing.asked_T[at].tolist()

    def drop(x: Tensor, site: str) -> Tensor:
        return dropped(x, noise, encoder.rate, site, row_L)

    def norm(x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / ((centred**2).mean(1, keepdim=True) + 1e-6).sqrt()

    x = entered(encoder, item_LD, row_L, noise)
    for i, block in enumerate(encoder.blocks):
        normed = norm(x)
        u = silu(normed @ block.gate.weight.T)
        v, q, k = (silu(normed @ weight.T) for weight in block.value_query_key.weight.split(D))
        width = D // heads
        attended = []
        for t in range(L):
            parts = []
            for head in (slice(h * width, (h + 1) * width) for h in range(heads)):
                out = torch.zeros(width, dtype=torch.float64)
                for s in range(t + 1):
                    score = q[t, head] @ k[s, head] + block.position_L[t - s]
                    if block.time_K is not None:
                        score = score + block.time_K[bucket(asked[t] - time[s])]
                    out = out + silu(score) / len(encoder.position_LD) * v[s, head]
                parts.append(out)
            attended.append(torch.cat(parts))
        gated = drop(norm(torch.stack(attended)) * u, f"block{i}.gated")
        x = x + gated @ block.output.weight.T + block.output.bias
    return norm(x) * encoder.norm.weight + encoder.norm.bias


@WITH_NOISE
@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_equals_each_sequence_alone_written_out(heads: int, times: bool, noise: Noise | None) -> None:
    encoder, packed = make(heads=heads, times=times), packing([3, 1, 0, 6, 2], first_row=100)
    assert_as_alone(encoder, packed, noise, lambda item_LD, at: plain(encoder, item_LD, packed, at, heads, noise))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "compiled"])
@NOTHING
@WITH_NOISE
def test_a_rank_without_positions_gives_zero_gradients(
    lengths: list[int], noise: Noise | None, dtype: torch.dtype
) -> None:
    assert_zero_gradients(make().to(dtype), packing(lengths), noise)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "compiled"])
def test_a_sequence_that_is_too_long_is_refused(dtype: torch.dtype) -> None:
    position_L, packed = torch.zeros(6, dtype=dtype), torch.zeros(7, 3, 2, 4, dtype=dtype)
    with pytest.raises(IndexError):
        attend(packed, position_L, None, packing([7]))


def test_a_packing_keeps_its_times_in_copies() -> None:
    whole = packing([3, 1, 2])
    first, moved = whole.first(2), whole.to(torch.device("meta"))
    assert whole.time_T is not None and whole.asked_T is not None
    assert first.time_T is not None and first.asked_T is not None and first.bounds == [0, 3, 4]
    assert torch.equal(first.time_T, whole.time_T[:4]) and torch.equal(first.asked_T, whole.asked_T[:4])
    assert moved.time_T is not None and moved.asked_T is not None
    assert moved.time_T.device.type == moved.asked_T.device.type == "meta" and whole.time_T.device.type == "cpu"


def test_biases_and_positions_start_from_the_truncated_normal() -> None:
    encoder = HSTU(64, HSTUConfig(max_length=500, blocks=2, times=True))
    encoder.reset_parameters(torch.Generator().manual_seed(0))
    for bias in (encoder.position_LD, *(b for block in encoder.blocks for b in (block.position_L, block.time_K))):
        assert 0.035 < float(bias.detach().abs().max()) <= 0.04
        # 0.8796 of 0.02, cut at two standard deviations.
        assert abs(float(bias.detach().std()) - 0.8796 * 0.02) < 5 * 0.02 * 0.8796 / math.sqrt(2 * bias.numel())


@torch.no_grad()
def require_close_in_bf16(encoder: Stack) -> None:
    encoder.reset_parameters(torch.Generator().manual_seed(0))
    item_TD, packed = rows(46, dim=64).float() * 0.1, packing([20, 6, 1, 19])
    # BF16 keeps 8 bits: 2^-9 for each rounding, of which a query sees a dozen; attention's norm enlarges some.
    error = bf16_errors(encoder, item_TD, packed)
    assert 0 < float(error.mean()) < 2**-7 and float(error.max()) < 2**-5


def test_bf16_stays_close_to_full_precision() -> None:
    require_close_in_bf16(make(dim=64, dropout=0.2, history_dropout=0.0, max_length=20).float())


# --- the compiled form ---------------------------------------------------------------------------------------------


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
        out, d_packed, *d_biases = results(tensors, packed, True)
        assert torch.equal(out, alone[0]) and torch.equal(d_packed, alone[1])
        for got, should in zip(d_biases, alone[2:], strict=True):
            torch.testing.assert_close(got, should, rtol=1e-5, atol=1e-5)
        again = results(tensors, packed, True)
        assert all(torch.equal(*pair) for pair in zip((out, d_packed, *d_biases), again, strict=True))


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


@given(gaps=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_compiled_buckets_are_those_of_torch(gaps: list[int]) -> None:
    """A position that sees itself alone has the score of its bucket's bias."""
    gap_T, chosen = torch.tensor(gaps), torch.arange(TIME_BUCKETS) + 20.0
    packed = Packing(torch.ones(len(gaps), dtype=torch.int64), 0, torch.zeros_like(gap_T), gap_T)
    tensors = [torch.tensor([1.0, 0.0, 0.0])[:, None, None].repeat(len(gaps), 1, 1, 1), torch.zeros(1)]
    out = attend(tensors[0], tensors[1], chosen, packed)
    assert (out.flatten() - 20).round().long().tolist() == time_buckets(gap_T).tolist()
