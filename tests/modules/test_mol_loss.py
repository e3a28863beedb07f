"""The fused MoL loss against the final similarity (section 3.3) and the sampled softmax, written out densely in FP64.

Axes as in mol_loss.py.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from logitmix.modules.losses import mol_loss
from logitmix.modules.losses.blockwise import Examples
from logitmix.modules.losses.mol_loss import mol_sampled_softmax
from logitmix.modules.noise import Noise

EPS = 2**-24
"""Largest relative error of rounding to FP32."""
NOISE = Noise(7)
LIBRARY = mol_loss._library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the extension was not built")
LEVELS = range((LIBRARY.mol_level() if LIBRARY else -1) + 1)


@dataclass(frozen=True)
class Case:
    """All inputs of the loss. tensors: the two sides and the cross gate."""

    tensors: tuple[Tensor, ...]
    target_T: Tensor
    negatives_GN: Tensor
    bounds: tuple[int, ...]
    rate: float
    row_T: Tensor
    log_q_V: Tensor | None = None
    weight_T: Tensor | None = None

    @property
    def examples(self) -> Examples:
        return Examples(self.row_T, self.target_T, self.bounds, self.negatives_GN, self.log_q_V, self.weight_T)

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, tensors=tuple(tensor.detach().to(dtype).requires_grad_() for tensor in self.tensors))

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.tensors, allow_unused=True, materialize_grads=True)


def make(
    lengths: list[int],
    N: int,
    V: int = 50,
    shape: tuple[int, int, int, int] = (2, 3, 4, 5),
    rate: float = 0.0,
    seed: int = 0,
    scale: float = 1.0,
) -> Case:
    """shape: U, I, C, H. scale: of the gating weights of both sides."""
    U, I, C, H = shape
    T, M = sum(lengths), U * I
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    sides = normal(T, U, C) * 2 / C**0.5, normal(T, M) * scale, normal(V, I, C), normal(V, M) * scale
    gate = normal(H, M) / M**0.5, normal(H), normal(M, H) / H**0.5, normal(M)
    target_T = torch.randint(0, V, (T,), generator=generator)
    negatives_GN = torch.randint(0, V, (len(lengths), N), generator=generator)
    bounds = tuple(sum(lengths[:g]) for g in range(len(lengths) + 1))
    return Case((*sides, *gate), target_T, negatives_GN, bounds, rate, 2**32 - 3 + torch.arange(T)).to(torch.float32)


def fused(case: Case) -> Tensor:
    loss = mol_sampled_softmax(case.tensors[:2], case.tensors[2:4], case.tensors[4:], case.examples, NOISE, case.rate)
    assert loss is not None
    return loss


def dense(case: Case) -> Tensor:
    """Every position with its target and its group's negatives, in one array."""
    query_TUC, query_TM, item_VIC, item_VM, up_HM, up_H, down_MH, down_M = case.tensors
    lengths = torch.tensor(case.bounds).diff()
    candidates_TN = torch.cat([case.target_T[:, None], case.negatives_GN.repeat_interleave(lengths, 0)], 1)
    logits_TNM = torch.einsum("tuc,tnic->tnui", query_TUC, item_VIC[candidates_TN]).flatten(2)
    gates_TNM = F.linear(F.silu(F.linear(logits_TNM, up_HM, up_H)), down_MH, down_M)
    gates_TNM = F.softmax(F.silu(gates_TNM + query_TM[:, None] * item_VM[candidates_TN]), -1)
    if case.rate and len(query_TM):
        T, N, M = gates_TNM.shape
        row_TN = case.row_T[:, None] * N + torch.arange(N)
        gates_TNM = NOISE.dropout(gates_TNM.view(T * N, M), case.rate, "gates", row_TN.flatten()).view(T, N, M)
        gates_TNM = gates_TNM / gates_TNM.sum(-1, keepdim=True).clamp(min=1e-6)
    phi_TN = (gates_TNM * logits_TNM).sum(-1)
    if case.log_q_V is not None:
        phi_TN = phi_TN - case.log_q_V[candidates_TN]
    hit_TN = candidates_TN == case.target_T[:, None]
    hit_TN[:, 0] = False
    loss_T = phi_TN.masked_fill(hit_TN, -torch.inf).logsumexp(1) - phi_TN[:, 0]
    return (loss_T if case.weight_T is None else loss_T * case.weight_T).sum()


def weights(count: int, seed: int = 0) -> Tensor:
    """Some are zero."""
    return (3 * torch.rand(count, generator=torch.Generator().manual_seed(seed)) - 0.5).clamp(min=0)


def check(case: Case, roundings: int = 100) -> None:
    assert_is_the_sum(fused(case), case, case.to(torch.float64), roundings)


def assert_is_the_sum(loss: Tensor, case: Case, twin: Case, roundings: int) -> None:
    """The case's loss and gradients in FP32, on any device, against its twin's in FP64; `roundings` counts those behind
    each number, of terms as large as the largest number."""
    expected = dense(twin)
    assert loss.dtype == torch.float32 and loss.shape == ()
    bound = roundings * EPS * max(len(case.target_T), float(expected.detach()))
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=0, atol=bound)
    for got, should in zip(case.gradients(3 * loss), twin.gradients(3 * expected), strict=True):
        assert got.dtype == torch.float32
        if should.numel():
            bound = roundings * EPS * max(float(should.abs().max()), 1.0)
            torch.testing.assert_close(got.double().cpu(), should, rtol=0, atol=bound)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each instruction set that this machine has."""
    monkeypatch.setattr(mol_loss, "_LEVEL", request.param)
    return request.param


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few items, so that negatives hit targets and each other; sizes around the widths of vectors and tiles."""
    lengths = draw(st.lists(st.integers(0, 9), max_size=4))
    shape = (
        draw(st.integers(1, 9)),
        draw(st.sampled_from([1, 2, 3, 4, 5, 8, 17])),
        draw(st.sampled_from([1, 2, 7, 16, 33])),
        draw(st.sampled_from([1, 5, 16, 31, 64])),
    )
    rate = draw(st.sampled_from([0.0, 0.2, 0.7]))
    seed, scale = draw(st.integers(0, 100)), draw(st.sampled_from([1.0, 4.0]))
    case = make(lengths, draw(st.integers(0, 20)), V := draw(st.integers(1, 12)), shape, rate, seed, scale)
    log_q_V = -3 * torch.rand(V, generator=torch.Generator().manual_seed(seed))
    weight_T = weights(len(case.target_T), seed) if draw(st.booleans()) else None
    return replace(case, log_q_V=log_q_V if draw(st.booleans()) else None, weight_T=weight_T)


@given(case=cases(), at=st.sampled_from(LEVELS or [0]), tile=st.sampled_from([1, 2, 3, 8, 1024]))
def test_equals_the_dense_sum(case: Case, at: int, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mol_loss, "_LEVEL", at)
        patch.setattr(mol_loss, "_TILE", tile)
        check(case, roundings=1000)


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("tile", [13, 1024])
@pytest.mark.parametrize(("lengths", "N"), [([300], 9), ([1] * 200, 8), ([3, 40, 0, 170], 30), ([5, 4], 700)])
def test_many_chunks_of_few_or_many_positions(
    level: int, lengths: list[int], N: int, tile: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mol_loss, "_TILE", tile)
    check(make(lengths, N, V=90, shape=(4, 4, 8, 16), rate=rate), roundings=1000)


def test_gates_whose_peak_is_dropped(level: int) -> None:
    """What dropout leaves can be less than the 1e-6 that its sum counts as."""
    case = make([40], 12, shape=(2, 3, 4, 5), rate=0.5, scale=8.0)
    starved = replace(case, tensors=(case.tensors[0], case.tensors[1] * 4, *case.tensors[2:])).to(torch.float32)
    check(starved, roundings=3000)


def test_threads_give_the_same_and_reproducibly(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mol_loss, "_PAIRS", 100)
    case = make([50, 3, 120], 30, rate=0.2)

    def of(workers: int) -> list[Tensor]:
        torch.set_num_threads(workers)
        loss = fused(case)
        return [loss.detach(), *case.gradients(loss)]

    alone, three = of(1), of(3)
    for got, again, should in zip(three, of(3), alone, strict=True):
        assert torch.equal(got, again)
        torch.testing.assert_close(got, should, rtol=0, atol=100 * EPS * float(should.abs().max()))
    assert not all(map(torch.equal, alone, three)), "one worker did it all"


@pytest.mark.parametrize("level", [level for level in LEVELS if level >= mol_loss._BF16], indirect=True)
@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize(
    ("lengths", "N", "shape", "tile"),
    [
        ([100, 60], 64, (8, 8, 32, 128), 1024),
        ([7, 0, 30], 100, (8, 8, 32, 128), 33),
        ([50, 3], 9, (8, 4, 64, 40), 4),
        ([1] * 40, 31, (3, 5, 20, 17), 1024),
    ],
)
def test_bf16_is_as_close_as_its_inputs_are(
    level: int, lengths: list[int], N: int, shape: Any, tile: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss to 2^-10, each gradient to 2^-6 of its norm, from FP32 of the same BF16 sides."""
    monkeypatch.setattr(mol_loss, "_TILE", tile)
    case = make(lengths, N, shape=shape, rate=rate).to(torch.bfloat16)
    exact = case.to(torch.float32)
    half, full = fused(case), fused(exact)
    assert half.dtype == torch.float32
    assert float((half - full).detach().abs()) < 2**-10 * float(full.detach())
    for got, should in zip(case.gradients(half), exact.gradients(full), strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got - should).norm() / should.norm()) < 2**-6


def test_the_thread_has_subnormal_numbers_afterwards(level: int, threads: None) -> None:
    torch.set_num_threads(1)
    tiny = torch.tensor([1e-40])
    fused(make([20], 6, scale=40.0))
    assert float(tiny * 0.5) > 0


@pytest.mark.parametrize("at", range(8))
def test_what_is_not_finite_is_not_hidden(level: int, at: int) -> None:
    case = make([20], 6, V=8)
    # The last item is a negative only: its score reaches the loss by the sum alone.
    negatives_GN = case.negatives_GN.clone()
    negatives_GN[0, 3] = 7
    case = replace(case, target_T=case.target_T.clamp(max=6), negatives_GN=negatives_GN)
    case = case.to(torch.bfloat16 if level >= mol_loss._BF16 else torch.float32)
    with torch.no_grad():
        case.tensors[at].view(-1)[-1] = torch.nan
    assert not bool(fused(case).isfinite())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_T": torch.tensor([0, 5, 1])}, "from 0 to 4, not from 0 to 5"),
        ({"negatives_GN": torch.tensor([[-1, 2]])}, "from 0 to 4, not from -1 to 2"),
        ({"bounds": (0, 2)}, "rise from 0 to 3"),
        ({"bounds": (0, 4, 3)}, "rise from 0 to 3"),
        ({"bounds": (0, 1, 3)}, r"\[2, N\]"),
    ],
)
def test_indices_and_bounds_are_checked(change: dict, words: str) -> None:
    with pytest.raises((IndexError, ValueError), match=words):
        fused(replace(make([3], 2, V=5), **change))


def test_memory_does_not_grow_with_pairs() -> None:
    """64 times the negatives, and the peak stays: all pairs at once would be 67 MB for one FP32 array of them.

    It does not grow with calls either.
    """
    script = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
from test_mol_loss import fused, make

def peak(lengths, N):
    case = make(lengths, N, V=200, shape=(4, 4, 4, 8), rate=0.2)
    case.gradients(fused(case))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(1)
few = peak([512], 32)
most = peak([512], 2048)
print(most - few, max(peak([2], 2048) for _ in range(50)) - most)
"""
    folder = str(Path(__file__).parent)
    result = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert all(int(growth) < 4 * 1024 for growth in result.stdout.split()), f"{result.stdout} KiB"
