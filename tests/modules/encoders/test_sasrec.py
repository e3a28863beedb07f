"""SASRec against one sequence after the other, each attention weight written out, in FP64."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from logitmix.modules.batch import Packing
from logitmix.modules.config import SASRecConfig
from logitmix.modules.encoders import sasrec
from logitmix.modules.encoders.sasrec import SASRec, attend_jagged, attend_padded
from logitmix.modules.encoders.stack import Stack
from logitmix.modules.noise import Noise
from logitmix.trainer.config import load_recipe, recipe_names

M = TypeVar("M", bound=nn.Module)
DIM = 8
NOISE = Noise(12345)
WITH_NOISE = pytest.mark.parametrize("noise", [None, NOISE], ids=["evaluation", "dropout"])
NOTHING = pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
"""Lengths of sequences without positions."""
CONFIG = SASRecConfig(blocks=2, heads=2, max_length=6, dropout=0.3, history_dropout=0.4)


def filled(encoder: M) -> M:
    """All parameters random, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(7)
    encoder = encoder.double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return encoder


def make(dim: int = DIM, **changes: Any) -> SASRec:
    return filled(SASRec(dim, replace(CONFIG, **changes)))


def rows(count: int, dim: int = DIM, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packing(lengths: list[int], first_row: int = 0) -> Packing:
    return Packing(torch.tensor(lengths, dtype=torch.int64), first_row)


def assert_as_alone(
    encoder: nn.Module, packed: Packing, noise: Noise | None, alone: Callable[[Tensor, slice], Tensor]
) -> None:
    """The queries of each sequence, whose items are at a slice of the positions, are those of `alone`, and so are the
    gradients of the items and of all parameters."""
    item_TD = rows(packed.bounds[-1]).requires_grad_()
    query_TD = encoder(item_TD, packed, noise)
    places = itertools.starmap(slice, itertools.pairwise(packed.bounds))
    expected_TD = torch.cat([alone(item_TD[at], at) for at in places if at.stop > at.start])
    torch.testing.assert_close(query_TD, expected_TD, rtol=0, atol=1e-12)
    weight_TD, wanted = rows(len(item_TD), seed=1), [item_TD, *encoder.parameters()]
    actual, expected = (torch.autograd.grad((of * weight_TD).sum(), wanted) for of in (query_TD, expected_TD))
    for got, should in zip(actual, expected, strict=True):
        assert bool(should.any())
        torch.testing.assert_close(got, should, rtol=1e-10, atol=1e-10)


def assert_zero_gradients(encoder: nn.Module, nothing: Packing, noise: Noise | None) -> None:
    """Of a packing without positions."""
    item_TD = torch.zeros(0, DIM, dtype=next(encoder.parameters()).dtype, requires_grad=True)
    query_TD = encoder(item_TD, nothing, noise)
    assert query_TD.shape == (0, DIM)
    query_TD.sum().backward()
    for name, of in [("items", item_TD), *encoder.named_parameters()]:
        assert of.grad is not None and not of.grad.any(), name


def assert_stays_in_its_sequence(encoder: Stack) -> None:
    """What is not finite."""
    item_TD, packed = rows(6), packing([1, 2, 3])
    item_TD[0] = torch.inf
    for found_TD in (encoder(item_TD, packed, None)[packed.last_B], encoder.last(item_TD, packed)):
        assert found_TD.isfinite().all(1).tolist() == [False, True, True]


@torch.no_grad()
def bf16_errors(encoder: nn.Module, item_TD: Tensor, packed: Packing) -> Tensor:
    """Of each query, relative to its norm [T]."""
    full = encoder(item_TD, packed, NOISE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = encoder(item_TD, packed, NOISE)
    assert half.dtype == torch.float32
    return (half - full).norm(dim=1) / full.norm(dim=1)


def plain(encoder: SASRec, item_LD: Tensor, heads: int, noise: Noise | None = None, first_row: int = 0) -> Tensor:
    """The queries [L, D] of one sequence, whose positions have the global numbers first_row, first_row + 1, …"""
    L, D = item_LD.shape
    row_L = torch.arange(first_row, first_row + L)

    def drop(x: Tensor, site: str) -> Tensor:
        return x if noise is None else x * noise.dropout(torch.ones_like(x), encoder.rate, site, row_L)

    def left_out(x: Tensor) -> Tensor:
        ones = torch.ones(L, 1, dtype=torch.float64)
        return x if noise is None else x * noise.dropout(ones, encoder.history_rate, "history", row_L).sign()

    def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / ((centred**2).mean(1, keepdim=True) + 1e-8).sqrt() * layer.weight + layer.bias

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ weight.T + bias

    x = drop(left_out(item_LD) * math.sqrt(D) + encoder.position_LD[:L], "input")
    for i, block in enumerate(encoder.blocks):
        normed = norm(x, block.attention_norm)
        q = linear(normed, block.query.weight, block.query.bias)
        k = linear(x, block.key_value.weight[:D], block.key_value.bias[:D])
        v = linear(x, block.key_value.weight[D:], block.key_value.bias[D:])
        width = D // heads
        attended = []
        for t in range(L):
            parts = []
            for head in (slice(h * width, (h + 1) * width) for h in range(heads)):
                scores = torch.stack([q[t, head] @ k[s, head] / math.sqrt(width) for s in range(t + 1)])
                weights = scores.exp() / scores.exp().sum()
                parts.append(sum(weights[s] * v[s, head] for s in range(t + 1)))
            attended.append(torch.cat(parts))
        out = linear(torch.stack(attended), block.output.weight, block.output.bias)
        x = norm(normed + drop(out, f"block{i}.attention"), block.feed_norm)
        hidden = drop(linear(x, block.up.weight, block.up.bias).clamp(min=0), f"block{i}.up")
        x = x + drop(linear(hidden, block.down.weight, block.down.bias), f"block{i}.down")
    return norm(x, encoder.norm)


@WITH_NOISE
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_equals_each_sequence_alone_written_out(heads: int, noise: Noise | None) -> None:
    encoder, packed = make(heads=heads), packing([3, 1, 0, 6, 2], first_row=100)
    assert_as_alone(encoder, packed, noise, lambda item_LD, at: plain(encoder, item_LD, heads, noise, 100 + at.start))


@NOTHING
@WITH_NOISE
def test_a_rank_without_positions_gives_zero_gradients(lengths: list[int], noise: Noise | None) -> None:
    assert_zero_gradients(make(), packing(lengths), noise)


def test_packing_says_where_each_position_lies() -> None:
    packed = packing([2, 0, 3, 1], first_row=10)
    assert packed.bounds == [0, 2, 2, 5, 6]
    assert packed.shape == (4, 3)
    assert packed.position_T.tolist() == [0, 1, 0, 1, 2, 0]
    assert packed.row_T.tolist() == [10, 11, 12, 13, 14, 15]
    assert packed.padded_T.tolist() == [0, 1, 6, 7, 8, 9]
    assert packed.last_B[[0, 2, 3]].tolist() == [1, 4, 5]
    nothing = packing([])
    assert nothing.bounds == [0] and nothing.shape == (0, 0) and len(nothing.row_T) == 0
    assert nothing.groups == []


def test_sequences_of_like_lengths_are_padded_together() -> None:
    packed = packing([20, 1, 0, 30, 3])
    assert packed.groups == [(3, 3), (2, 30)]
    assert packed.grouped_T.tolist() == [*range(9, 29), 3, *range(39, 69), 6, 7, 8]
    lengths = torch.randint(0, 201, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    padded = sum(sequences * longest for sequences, longest in packing(lengths).groups)
    assert len(packing(lengths).groups) <= 8 and sum(lengths) <= padded < 1.3 * sum(lengths)


@pytest.mark.parametrize("lengths", [[50, 1, 0, 7, 3, 20, 2], [0, 50, 0], [9]])
def test_attention_of_groups_is_that_of_each_sequence(lengths: list[int]) -> None:
    packed = packed_of(lengths, heads=2, width=8).requires_grad_()
    together = attend_padded(packed, packing(lengths))
    parts = [part for part in packed.split(lengths) if len(part)]
    alone = torch.cat([together.detach()[:0], *(attend_padded(part, packing([len(part)])) for part in parts)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(out.square().sum(), packed)[0] for out in (together, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[50, 1, 7, 3, 20, 2], [9], []])
@pytest.mark.parametrize("heads", [1, 2])
def test_last_positions_alone_are_those_of_all(heads: int, lengths: list[int]) -> None:
    encoder, item_TD, packed = make(heads=heads, max_length=50), rows(sum(lengths)), packing(lengths)
    expected_BD = encoder(item_TD, packed, None)[packed.last_B]
    torch.testing.assert_close(encoder.last(item_TD, packed), expected_BD, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_to_the_inputs_is_that_to_keys_and_values(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, item_TD, packed = make(heads=heads), rows(12), packing([5, 0, 1, 6])
    expected_TD = encoder(item_TD, packed, None)
    monkeypatch.setattr(sasrec, "_MANY", 0)
    with torch.no_grad():
        torch.testing.assert_close(encoder(item_TD, packed, None), expected_TD, rtol=0, atol=1e-12)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    assert_stays_in_its_sequence(make())


def test_positions_start_from_the_truncated_normal() -> None:
    encoder = SASRec(64, SASRecConfig(max_length=500))
    encoder.reset_parameters(torch.Generator().manual_seed(0))
    assert 0.0395 < float(encoder.position_LD.detach().abs().max()) <= 0.04
    # 0.8796 of 0.02, cut at two standard deviations; 32,000 values.
    assert abs(float(encoder.position_LD.detach().std()) - 0.8796 * 0.02) < 5 * 0.02 * 0.8796 / math.sqrt(2 * 32000)


@torch.no_grad()
def test_bf16_stays_close_to_full_precision() -> None:
    encoder = make(dim=64, dropout=0.2, max_length=20).float()
    encoder.reset_parameters(torch.Generator().manual_seed(0))
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=torch.Generator().manual_seed(1))
    item_TD, packed = rows(46, dim=64).float() * 0.02, packing([20, 6, 1, 19])
    # BF16 keeps 8 bits: 2^-9 for each rounding, of which a query sees a dozen.
    error = bf16_errors(encoder, item_TD, packed)
    assert 0 < float(error.max()) < 2**-6


def attended(attend: Callable[[Tensor, Packing], Tensor], packed: Tensor, packing: Packing) -> list[Tensor]:
    """Output and gradient."""
    leaf = packed.detach().requires_grad_()
    out = attend(leaf, packing)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
    return [out.detach(), gradient]


def packed_of(lengths: list[int], heads: int, width: int) -> Tensor:
    return torch.randn(sum(lengths), 3, heads, width, generator=torch.Generator().manual_seed(0))


class _Chosen(Exception):
    """Raised in place of a kernel."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our code takes tensors for a GPU's."""

    def chosen(name: str) -> Callable[..., None]:
        def called(*_: Any) -> None:
            raise _Chosen(name)

        return called

    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr("logitmix.modules.noise._is_compiled_for", lambda _: False)
    for name in ("flash", "efficient"):
        monkeypatch.setattr(torch.ops.aten, f"_{name}_attention_forward", chosen(name))


def widths() -> list[tuple[int, int]]:
    """Of models and numbers of heads: those of the recipes, the narrowest and wide ones."""
    models = [load_recipe(name).model for name in recipe_names()]
    ours = {(of.dim, of.encoder.heads) for of in models if isinstance(of.encoder, SASRecConfig)}
    return sorted(ours | {(8, 1), (64, 8), (256, 1), (512, 1)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "heads"), widths())
@WITH_NOISE
def test_a_gpu_has_a_fused_kernel_for_attention(
    dtype: torch.dtype, dim: int, heads: int, noise: Noise | None, on_gpu: None
) -> None:
    encoder, lengths = SASRec(dim, replace(CONFIG, heads=heads)), [3, 1, 6]
    with pytest.raises(_Chosen) as chosen, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        encoder(rows(sum(lengths), dim).float().requires_grad_(), packing(lengths), noise)
    flash = dtype == torch.bfloat16 and dim // heads <= 256
    assert chosen.value.args == ("flash" if flash else "efficient",)


@pytest.mark.parametrize(("dim", "heads", "lengths"), [(8, 2, [3, 1]), (52, 1, [2]), (8, 1, [3, 0, 1]), (8, 1, [])])
def test_a_gpu_takes_padded_attention_where_there_is_no_jagged_one(
    dim: int, heads: int, lengths: list[int], on_gpu: None
) -> None:
    """Widths that are no multiples of 8, empty sequences and no sequence at all. Dense attention has a plain form for
    whatever the fused ones do not take."""
    encoder, item_TD = make(dim, heads=heads), rows(sum(lengths), dim)
    assert encoder(item_TD, packing(lengths), None).shape == (sum(lengths), dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jagged_attention_is_padded_attention(dtype: torch.dtype) -> None:
    lengths = [3, 1, 200, 7, 64]
    packed = packed_of(lengths, heads=2, width=32)
    exact = attended(attend_padded, packed, packing(lengths))
    got = attended(attend_jagged, packed.to("cuda", dtype), packing(lengths).to(torch.device("cuda")))
    for jagged, padded in zip(got, exact, strict=True):
        bound = 2e-5 if dtype == torch.float32 else 2**-6
        assert (jagged.float().cpu() - padded).norm() <= bound * padded.norm()
