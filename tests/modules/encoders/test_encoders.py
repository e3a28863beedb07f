"""Encoders against one sequence after the other, each attention weight written out, in FP64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hstu import bucket, packing
from torch import Tensor, nn

from logitmix.common.plugins import module_of
from logitmix.modules.batch import Packing
from logitmix.modules.config import ENCODERS
from logitmix.modules.encoders import sasrec
from logitmix.modules.encoders.fuxi import attend_places
from logitmix.modules.encoders.hstu_attention import attend
from logitmix.modules.encoders.stack import Stack
from logitmix.modules.initialize import initialized
from logitmix.modules.noise import Noise

DIM = 8
NOISE = Noise(12345)
WITH_NOISE = pytest.mark.parametrize("noise", [None, NOISE], ids=["evaluation", "dropout"])
SHARED = {"blocks": 2, "heads": 2, "max_length": 6, "dropout": 0.3, "history_dropout": 0.4}
OWN: dict[str, dict[str, Any]] = {
    "sasrec": {}, "ligr": {"expansion": 3}, "hstu": {"times": True}, "fuxi": {"times": True, "expansion": 2},
}  # fmt: skip
EACH = pytest.mark.parametrize("kind", OWN)
Drop = Callable[[Tensor, str], Tensor]


def new(kind: str, dim: int = DIM, **changes: Any) -> Stack:
    config = ENCODERS[kind](**(SHARED | OWN[kind] | changes))
    encoder = module_of(config)(dim, config)
    assert isinstance(encoder, Stack)
    return encoder


def make(kind: str, dim: int = DIM, **changes: Any) -> Stack:
    """All parameters random, so that none can be left out unnoticed."""
    generator, encoder = torch.Generator().manual_seed(7), new(kind, dim, **changes).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return encoder


def rows(count: int, dim: int = DIM, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dropped(x: Tensor, noise: Noise | None, rate: float, site: str, row_L: Tensor) -> Tensor:
    return x if noise is None else x * noise.dropout(torch.ones_like(x), rate, site, row_L)


def norm(x: Tensor, epsilon: float, layer: nn.LayerNorm | None = None) -> Tensor:
    centered = x - x.mean(1, keepdim=True)
    normed = centered / ((centered**2).mean(1, keepdim=True) + epsilon).sqrt()
    return normed if layer is None else normed * layer.weight + layer.bias


def rms(x: Tensor) -> Tensor:
    return x / ((x**2).mean(1, keepdim=True) + 1e-6).sqrt()


def linear(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def softmax_attention(block: Any, q_LD: Tensor, x_LD: Tensor) -> Tensor:
    key, value = block.key_value.weight.chunk(2), block.key_value.bias.chunk(2)
    parts = [linear(block.query, q_LD), x_LD @ key[0].T + value[0], x_LD @ key[1].T + value[1]]
    heads = []
    for q, k, v in zip(*(of.chunk(block.heads, 1) for of in parts), strict=True):
        weight_LL = (q @ k.T / math.sqrt(q.shape[1])).exp().tril()
        heads.append(weight_LL / weight_LL.sum(1, keepdim=True) @ v)
    return linear(block.output, torch.cat(heads, 1))


def sasrec_block(block: Any, x: Tensor, drop: Drop, biases: list[Tensor]) -> Tensor:
    normed = norm(x, 1e-8, block.attention_norm)
    x = norm(normed + drop(softmax_attention(block, normed, x), "attention"), 1e-8, block.feed_norm)
    return x + drop(linear(block.down, drop(linear(block.up, x).clamp(min=0), "up")), "down")


def ligr_block(block: Any, x: Tensor, drop: Drop, biases: list[Tensor]) -> Tensor:
    normed = norm(x, 1e-5, block.attention_norm)
    attended = drop(softmax_attention(block, normed, normed), "attention")
    x = x + 1 / (1 + (-linear(block.attention_gate, x)).exp()) * attended
    left, right = linear(block.up, norm(x, 1e-5, block.feed_norm)).chunk(2, 1)
    fed = drop(linear(block.down, drop(silu(left) * right, "up")), "down")
    return x + 1 / (1 + (-linear(block.feed_gate, x)).exp()) * fed


def pointwise(block: Any, v: Tensor, q: Tensor, k: Tensor, bias_LL: Tensor | float) -> Tensor:
    """silu in place of softmax."""
    heads = zip(*(of.chunk(block.heads, 1) for of in (v, q, k)), strict=True)
    weighted = [(silu(q_h @ k_h.T + bias_LL) / len(block.position_L)).tril() @ v_h for v_h, q_h, k_h in heads]
    return torch.cat(weighted, 1)


def hstu_block(block: Any, x: Tensor, drop: Drop, biases: list[Tensor]) -> Tensor:
    normed = norm(x, 1e-6)
    packed = silu(linear(block.value_query_key, normed)).chunk(3, 1)
    attended = norm(pointwise(block, *packed, sum(biases)), 1e-6)
    return x + linear(block.output, drop(attended * silu(linear(block.gate, normed)), "gated"))


def fuxi_block(block: Any, x: Tensor, drop: Drop, biases: list[Tensor]) -> Tensor:
    packed = silu(linear(block.value_query_key, rms(x))).chunk(3, 1)
    channels = [pointwise(block, *packed, 0.0), *(bias_LL.tril() @ packed[0] for bias_LL in biases)]
    x = x + linear(block.merge, drop(rms(torch.cat(channels, 1)) * silu(linear(block.gate, rms(x))), "gated"))
    left, right = linear(block.up, drop(rms(x), "feed")).chunk(2, 1)
    return x + linear(block.down, silu(left) * right)


BLOCKS = {"sasrec": (sasrec_block, 1e-8), "ligr": (ligr_block, 1e-5), "hstu": (hstu_block, 1e-6)}
BLOCKS |= {"fuxi": (fuxi_block, 1e-6)}


def biases_of(block: Any, time: list[int], asked: list[int]) -> list[Tensor]:
    """Those of positions and, if the block sees times, of times, [L, L]."""
    if not hasattr(block, "position_L"):
        return []
    place_L = torch.arange(len(time))
    found = [block.position_L[(place_L[:, None] - place_L).clamp(min=0)]]
    if block.time_K is not None:
        found.append(block.time_K[torch.tensor([[bucket(of - at) for at in time] for of in asked])])
    return found


def plain(kind: str, encoder: Stack, item_LD: Tensor, packed: Packing, at: slice, noise: Noise | None) -> Tensor:
    """The queries [L, D] of the sequence that is at these positions of a packing."""
    (L, D), row_L = item_LD.shape, packed.row_T[at]
    assert packed.time_T is not None and packed.asked_T is not None
    times = packed.time_T[at].tolist(), packed.asked_T[at].tolist()
    seen_L1 = dropped(torch.ones(L, 1, dtype=torch.float64), noise, encoder.history_rate, "history", row_L).sign()
    x = dropped(item_LD * seen_L1 * math.sqrt(D) + encoder.position_LD[:L], noise, encoder.rate, "input", row_L)
    of_block, epsilon = BLOCKS[kind]
    for i, block in enumerate(encoder.blocks):

        def drop(x: Tensor, site: str, i: int = i) -> Tensor:
            return dropped(x, noise, encoder.rate, f"block{i}.{site}", row_L)

        x = of_block(block, x, drop, biases_of(block, *times))
    return norm(x, epsilon, encoder.norm)


@WITH_NOISE
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(
    ("kind", "times"), [*((kind, {}) for kind in OWN), *((kind, {"times": False}) for kind in ("hstu", "fuxi"))]
)
def test_equals_each_sequence_alone_written_out(
    kind: str, times: dict[str, bool], heads: int, noise: Noise | None
) -> None:
    """And so do the gradients of the items and of all parameters."""
    encoder, packed = make(kind, heads=heads, **times), packing([3, 1, 0, 6, 2], first_row=100)
    assert len(packed.groups) > 1
    item_TD = rows(packed.bounds[-1]).requires_grad_()
    query_TD = encoder(item_TD, packed, noise)
    places = [slice(*of) for of in itertools.pairwise(packed.bounds) if of[0] < of[1]]
    expected_TD = torch.cat([plain(kind, encoder, item_TD[at], packed, at, noise) for at in places])
    torch.testing.assert_close(query_TD, expected_TD, rtol=0, atol=1e-12)
    weight_TD, wanted = rows(len(item_TD), seed=1), [item_TD, *encoder.parameters()]
    actual, expected = (torch.autograd.grad((of * weight_TD).sum(), wanted) for of in (query_TD, expected_TD))
    for got, should in zip(actual, expected, strict=True):
        assert bool(should.any())
        torch.testing.assert_close(got, should, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "compiled"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@WITH_NOISE
@EACH
def test_a_rank_without_positions_gives_zero_gradients(
    kind: str, lengths: list[int], noise: Noise | None, dtype: torch.dtype
) -> None:
    encoder, item_TD = make(kind).to(dtype), torch.zeros(0, DIM, dtype=dtype, requires_grad=True)
    query_TD = encoder(item_TD, packing(lengths), noise)
    assert query_TD.shape == (0, DIM)
    query_TD.sum().backward()
    for name, of in [("items", item_TD), *encoder.named_parameters()]:
        assert of.grad is not None and not of.grad.any(), name


@pytest.mark.parametrize("many", [0, sasrec._MANY])
@pytest.mark.parametrize("lengths", [[50, 1, 7, 3, 20, 2], [9], []])
@pytest.mark.parametrize("heads", [1, 2])
@EACH
@torch.no_grad()
def test_last_positions_alone_are_those_of_all(
    kind: str, heads: int, lengths: list[int], many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And attention to the inputs, which is quicker without gradients, is that to keys and values."""
    encoder, item_TD, packed = make(kind, heads=heads, max_length=50), rows(sum(lengths)), packing(lengths)
    with torch.enable_grad():
        expected_TD = encoder(item_TD, packed, None)
    monkeypatch.setattr(sasrec, "_MANY", many)
    torch.testing.assert_close(encoder(item_TD, packed, None), expected_TD, rtol=0, atol=1e-12)
    torch.testing.assert_close(encoder.last(item_TD, packed), expected_TD[packed.last_B], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["sasrec", "ligr"])
def test_what_is_not_finite_stays_in_its_sequence(kind: str) -> None:
    encoder, item_TD, packed = make(kind), rows(6), packing([1, 2, 3])
    item_TD[0] = torch.inf
    for found_TD in (encoder(item_TD, packed, None)[packed.last_B], encoder.last(item_TD, packed)):
        assert found_TD.isfinite().all(1).tolist() == [False, True, True]


@EACH
@torch.no_grad()
def test_bf16_stays_close_to_full_precision(kind: str) -> None:
    encoder = new(kind, dim=64, dropout=0.2, history_dropout=0.0, max_length=20)
    encoder.reset_parameters(torch.Generator().manual_seed(0))
    item_TD, packed = rows(46, dim=64).float() * 0.1, packing([20, 6, 1, 19])
    full = encoder(item_TD, packed, NOISE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = encoder(item_TD, packed, NOISE)
    assert half.dtype == torch.float32
    # BF16 keeps 8 bits: 2^-9 for each rounding, of which a query sees a dozen; attention's norm enlarges some.
    error = (half - full).norm(dim=1) / full.norm(dim=1)
    assert 0 < float(error.mean()) < 2**-7 and float(error.max()) < 2**-5


@EACH
def test_initial_weights_are_of_the_generator_alone_and_biases_from_the_truncated_normal(kind: str) -> None:
    one, other = (initialized(lambda: new(kind, 64, max_length=500), torch.Generator().manual_seed(4)) for _ in "ab")
    for (name, of), again in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(of, again), name
        if name.endswith(("position_LD", "position_L", "time_K")):
            assert 0.035 < float(of.detach().abs().max()) <= 0.04
            # 0.8796 of 0.02, cut at two standard deviations.
            assert abs(float(of.detach().std()) - 0.8796 * 0.02) < 5 * 0.02 * 0.8796 / math.sqrt(2 * of.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "compiled"])
def test_a_sequence_that_is_too_long_is_refused(dtype: torch.dtype) -> None:
    position_L, packed = torch.zeros(6, dtype=dtype), torch.zeros(7, 3, 2, 4, dtype=dtype)
    with pytest.raises(IndexError):
        attend(packed, position_L, None, packing([7]))
    with pytest.raises(IndexError):
        attend_places(packed[:, 0, 0], position_L, None, packing([7]))


def test_packing_says_where_each_position_lies() -> None:
    packed = packing([2, 0, 3, 1], first_row=10)
    assert packed.bounds == [0, 2, 2, 5, 6]
    assert packed.shape == (4, 3)
    assert packed.position_T.tolist() == [0, 1, 0, 1, 2, 0]
    assert packed.row_T.tolist() == [10, 11, 12, 13, 14, 15]
    assert packed.padded_T.tolist() == [0, 1, 6, 7, 8, 9]
    assert packed.last_B[[0, 2, 3]].tolist() == [1, 4, 5]
    nothing = packing([])
    assert nothing.bounds == [0] and nothing.shape == (0, 0) and len(nothing.row_T) == 0 and nothing.groups == []


def test_a_packing_keeps_its_times_in_copies() -> None:
    whole = packing([3, 1, 2])
    first, moved = whole.first(2), whole.to(torch.device("meta"))
    assert first.bounds == [0, 3, 4]
    for name in ("time_T", "asked_T"):
        assert torch.equal(getattr(first, name), getattr(whole, name)[:4])
        assert getattr(moved, name).device.type == "meta" and getattr(whole, name).device.type == "cpu"


def test_sequences_of_like_lengths_are_padded_together() -> None:
    packed = packing([20, 1, 0, 30, 3])
    assert packed.groups == [(3, 3), (2, 30)]
    assert packed.grouped_T.tolist() == [*range(9, 29), 3, *range(39, 69), 6, 7, 8]
    lengths = torch.randint(0, 201, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    padded = sum(sequences * longest for sequences, longest in packing(lengths).groups)
    assert len(packing(lengths).groups) <= 8 and sum(lengths) <= padded < 1.3 * sum(lengths)
