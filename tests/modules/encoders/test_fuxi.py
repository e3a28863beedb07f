"""FuXi-alpha against one sequence after the other, each weight of each channel written out, in FP64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_hstu import bucket, dropped, entered, packing, require_close_in_bf16, silu
from test_sasrec import DIM, NOISE, NOTHING, WITH_NOISE, assert_as_alone, assert_zero_gradients, filled
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.config import FuXiConfig
from logitmix.modules.encoders.fuxi import FuXi, attend_places
from logitmix.modules.initialize import initialized
from logitmix.modules.noise import Noise

CONFIG = FuXiConfig(blocks=2, heads=2, max_length=6, dropout=0.3, history_dropout=0.4, times=True, expansion=2)


def make(dim: int = DIM, **changes: Any) -> FuXi:
    return filled(FuXi(dim, replace(CONFIG, **changes)))


def table(of: list[list[tuple[int, int] | None]], weight: Callable[[int, int], Tensor]) -> Tensor:
    """The weights of pairs of positions, 0 where there is no pair."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack([torch.stack([weight(*pair) if pair else zero for pair in row]) for row in of])


def plain(encoder: FuXi, item_LD: Tensor, packing: Packing, at: slice, heads: int, noise: Noise | None) -> Tensor:
    """The queries [L, D] of the sequence that is at these positions of a packing."""
    L, D = item_LD.shape
    assert packing.time_T is not None and packing.asked_T is not None
    row_L, time, asked = packing.row_T[at], packing.time_T[at].tolist(), packing.asked_T[at].tolist()

    def drop(x: Tensor, site: str) -> Tensor:
        return dropped(x, noise, encoder.rate, site, row_L)

    def rms(x: Tensor) -> Tensor:
        return x / ((x**2).mean(1, keepdim=True) + 1e-6).sqrt()

    x = entered(encoder, item_LD, row_L, noise)
    for i, block in enumerate(encoder.blocks):
        u = silu(rms(x) @ block.gate.weight.T)
        v, q, k = (silu(rms(x) @ weight.T) for weight in block.value_query_key.weight.split(D))
        earlier = [[(t, s) if s <= t else None for s in range(L)] for t in range(L)]
        heads_of = [of.split(D // heads, 1) for of in (v, q, k)]
        semantic = [
            table(earlier, lambda t, s: silu(q_h[t] @ k_h[s]) / len(encoder.position_LD)) @ v_h  # noqa: B023
            for v_h, q_h, k_h in zip(*heads_of, strict=True)
        ]
        channels = [*semantic, table(earlier, lambda t, s: block.position_L[t - s]) @ v]  # noqa: B023
        if block.time_K is not None:
            channels.append(table(earlier, lambda t, s: block.time_K[bucket(asked[t] - time[s])]) @ v)  # noqa: B023
        gated = drop(rms(torch.cat(channels, dim=1)) * u, f"block{i}.gated")
        o = x + gated @ block.merge.weight.T + block.merge.bias
        normed = drop(rms(o), f"block{i}.feed")
        w_1, w_2 = block.up.weight.chunk(2)
        x = o + (silu(normed @ w_1.T) * (normed @ w_2.T)) @ block.down.weight.T
    centred = x - x.mean(1, keepdim=True)
    return centred / ((centred**2).mean(1, keepdim=True) + 1e-6).sqrt() * encoder.norm.weight + encoder.norm.bias


@WITH_NOISE
@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_equals_each_sequence_alone_written_out(heads: int, times: bool, noise: Noise | None) -> None:
    encoder, packed = make(heads=heads, times=times), packing([3, 1, 0, 6, 2], first_row=100)
    assert len(packed.groups) > 1
    assert_as_alone(encoder, packed, noise, lambda item_LD, at: plain(encoder, item_LD, packed, at, heads, noise))


@NOTHING
def test_a_rank_without_positions_gives_zero_gradients(lengths: list[int]) -> None:
    assert_zero_gradients(make().float(), packing(lengths), NOISE)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(IndexError):
        attend_places(torch.zeros(7, 4), torch.zeros(6), None, packing([7]))


def test_initial_weights_are_of_the_generator_alone() -> None:
    one, other = (initialized(lambda: FuXi(64, CONFIG), torch.Generator().manual_seed(4)) for _ in range(2))
    for (name, of), again in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(of, again), name
        if name.endswith(("position_L", "time_K")):
            assert 0 < float(of.detach().abs().max()) <= 0.04


def test_bf16_stays_close_to_full_precision() -> None:
    require_close_in_bf16(make(dim=64, dropout=0.2, history_dropout=0.0, max_length=20).float())
