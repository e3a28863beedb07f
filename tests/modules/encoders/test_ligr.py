"""LiGR's blocks against each sequence alone and padded, in plain torch and FP64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_hstu import dropped, entered, require_close_in_bf16, silu
from test_sasrec import (
    DIM,
    NOTHING,
    WITH_NOISE,
    assert_as_alone,
    assert_stays_in_its_sequence,
    assert_zero_gradients,
    filled,
    packing,
    rows,
)
from torch import Tensor, nn
from torch.nn import functional as F

from logitmix.modules.config import LiGRConfig
from logitmix.modules.encoders import sasrec
from logitmix.modules.encoders.ligr import LiGR
from logitmix.modules.noise import Noise

CONFIG = LiGRConfig(blocks=2, heads=2, max_length=6, dropout=0.3, history_dropout=0.4, expansion=3)


def make(dim: int = DIM, **changes: Any) -> LiGR:
    return filled(LiGR(dim, replace(CONFIG, **changes)))


def plain(encoder: LiGR, item_ND: Tensor, heads: int, noise: Noise | None, first_row: int) -> Tensor:
    """The queries [N, D] of one sequence, whose positions have the global numbers first_row, first_row + 1, …"""
    (N, D), L = item_ND.shape, len(encoder.position_LD)
    row_L = torch.arange(first_row, first_row + L)
    hidden_LL = torch.ones(L, L, dtype=torch.bool).triu(1)

    def drop(x: Tensor, site: str) -> Tensor:
        return dropped(x, noise, encoder.rate, site, row_L)

    def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
        return F.layer_norm(x, (D,), layer.weight, layer.bias, 1e-5)

    def gate(x: Tensor, layer: nn.Linear) -> Tensor:
        return 1 / (1 + (-x @ layer.weight.T - layer.bias).exp())

    x = entered(encoder, torch.cat([item_ND, rows(L - N, D, seed=9)]), row_L, noise)
    for i, block in enumerate(encoder.blocks):
        normed = norm(x, block.attention_norm)
        q, k, v = (
            (normed @ weight.T + bias).unflatten(1, (heads, -1)).transpose(0, 1)
            for weight, bias in (
                (block.query.weight, block.query.bias),
                *zip(block.key_value.weight.split(D), block.key_value.bias.split(D), strict=True),
            )
        )
        scores = (q @ k.transpose(1, 2) / math.sqrt(D // heads)).masked_fill(hidden_LL, -torch.inf)
        attended = (scores.softmax(2) @ v).transpose(0, 1).flatten(1) @ block.output.weight.T + block.output.bias
        x = x + gate(x, block.attention_gate) * drop(attended, f"block{i}.attention")
        normed = norm(x, block.feed_norm)
        w_1, w_2 = block.up.weight.chunk(2)
        hidden = drop(silu(normed @ w_1.T) * (normed @ w_2.T), f"block{i}.up")
        x = x + gate(x, block.feed_gate) * drop(hidden @ block.down.weight.T, f"block{i}.down")
    return norm(x, encoder.norm)[:N]


@WITH_NOISE
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_equals_each_sequence_padded_in_plain_torch(heads: int, noise: Noise | None) -> None:
    encoder, packed = make(heads=heads), packing([3, 1, 0, 6, 2], first_row=100)
    assert_as_alone(encoder, packed, noise, lambda item_LD, at: plain(encoder, item_LD, heads, noise, 100 + at.start))


@NOTHING
@WITH_NOISE
def test_a_rank_without_positions_gives_zero_gradients(lengths: list[int], noise: Noise | None) -> None:
    assert_zero_gradients(make(), packing(lengths), noise)


@pytest.mark.parametrize("many", [0, sasrec._MANY])
@pytest.mark.parametrize("lengths", [[50, 1, 7, 3, 20, 2], [9], []])
@pytest.mark.parametrize("heads", [1, 2])
@torch.no_grad()
def test_last_positions_alone_are_those_of_all(
    heads: int, lengths: list[int], many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, item_TD, packed = make(heads=heads, max_length=50), rows(sum(lengths)), packing(lengths)
    with torch.enable_grad():
        expected_TD = encoder(item_TD, packed, None)
    monkeypatch.setattr(sasrec, "_MANY", many)
    torch.testing.assert_close(encoder(item_TD, packed, None), expected_TD, rtol=0, atol=1e-12)
    calls = []
    encoder.blocks[-1].up.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    torch.testing.assert_close(encoder.last(item_TD, packed), expected_TD[packed.last_B], rtol=0, atol=1e-12)
    assert calls == [len(lengths)]


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    assert_stays_in_its_sequence(make())


def test_bf16_stays_close_to_full_precision() -> None:
    require_close_in_bf16(make(dim=64, dropout=0.2, history_dropout=0.0, max_length=20).float())
