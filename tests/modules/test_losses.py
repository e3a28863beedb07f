"""Sampled losses against the same sums without blocks: one big [T, N + 1] table, ordinary autograd, FP64."""

from copy import copy, deepcopy
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitmix.modules.config import DeepFMConfig, DotConfig, HIndexerConfig, MLPConfig, MoLConfig, NeuMFConfig
from logitmix.modules.hindexer import HIndexer
from logitmix.modules.losses import blockwise
from logitmix.modules.losses.blockwise import Examples
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.base import Similarity, build_similarity

DIM = 8
NOISE = Noise(99)
EPS = 2**-24
"""Largest relative error of rounding to FP32."""

Kind = Literal["softmax", "bce"]


def make(kind: str, normalize: bool = True) -> Similarity:
    mol = MoLConfig(
        temperature=0.2,
        query_components=2,
        item_components=3,
        component_dim=4,
        gate_hidden=5,
        projection_hidden=6,
        gate_dropout=0.0,
    )
    configs = {
        "dot": DotConfig(normalize=normalize, temperature=0.2),
        "mlp": MLPConfig(hidden=7, dropout=0.0),
        "neumf": NeuMFConfig(gmf_dim=3, hidden=7, mlp_dim=4, final_hidden=6, dropout=0.0),
        "deepfm": DeepFMConfig(
            query_components=2, item_components=3, component_dim=4, projection_hidden=6, hidden=5, dropout=0.0
        ),
        "mol": mol,
        "mol, joint": replace(mol, gating="joint"),
    }
    if kind == "hindexer":
        similarity: Similarity = HIndexer(DIM, HIndexerConfig(dim=4, temperature=0.2))
    else:
        similarity = build_similarity(DIM, configs[kind])
    generator = torch.Generator().manual_seed(5)
    # Products of groups of any length would be far above the other scores.
    spread = 0.25 if kind == "deepfm" else 0.5
    with torch.no_grad():
        for parameter in similarity.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return similarity


SIMILARITIES = {kind: make(kind) for kind in ("dot", "mlp", "neumf", "deepfm", "mol", "mol, joint", "hindexer")}


def sampled_loss(
    kind: Kind,
    similarity: Similarity,
    query: tuple[Tensor, ...],
    item: tuple[Tensor, ...],
    examples: Examples,
    noise: Noise | None,
    pair_dropout: float = 0.0,
) -> Tensor:
    """The method of that kind, at another rate of dropout than the similarity's own."""
    similarity = copy(similarity)
    similarity.pair_dropout = pair_dropout
    if kind == "softmax":
        return similarity.sampled_softmax(query, item, examples, noise)
    return similarity.sampled_loss(blockwise.bce, query, item, examples, noise)


def sides(similarity: Similarity, positions: int, items: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Both sides as leaves."""
    generator = torch.Generator().manual_seed(seed)
    query_TD, item_VD = (torch.randn(count, DIM, generator=generator) for count in (positions, items))
    query = similarity.query(query_TD, torch.arange(positions))
    item = similarity.item(item_VD, torch.arange(items))
    query, item = ([side.detach().requires_grad_() for side in both] for both in (query, item))
    return query, item


def plain_loss(
    kind: Kind | Literal["target"],
    similarity: Similarity,
    query: list[Tensor],
    item: list[Tensor],
    examples: Examples,
    gate_dropout: float,
) -> Tensor:
    """Every position with its target and each of its negatives as one long list of pairs; of the kind target, the
    scores of the targets alone."""
    total = torch.zeros((), dtype=torch.float64)
    for (start, end), negatives_N in zip(pairwise(examples.bounds), examples.negatives_GN, strict=True):
        for t in range(start, end):
            target = int(examples.target_T[t])
            candidates = torch.cat([examples.target_T[t : t + 1], negatives_N])
            count = len(candidates)
            numbers = examples.row_T[t] * count + torch.arange(count)

            def drop(gates: Tensor, numbers: Tensor = numbers) -> Tensor:
                return gates * NOISE.dropout(torch.ones_like(gates), gate_dropout, "gates", numbers)

            pairs = [side[t].expand(count, *side.shape[1:]) for side in query], [side[candidates] for side in item]
            scores = similarity.pairs(*(tuple(side) for side in pairs), drop if gate_dropout else None).double()
            if examples.log_q_V is not None:
                scores = scores - examples.log_q_V[candidates]
            counted = [n for n, negative in enumerate(negatives_N.tolist(), start=1) if negative != target]
            if kind == "target":
                loss = scores[0]
            elif kind == "softmax":
                loss = torch.log(scores[[0, *counted]].exp().sum()) - scores[0]
            else:
                loss = -torch.log(torch.sigmoid(scores[0]))
                if counted:
                    loss = loss - torch.log(1 - torch.sigmoid(scores[counted])).mean()
            total = total + loss * (1 if examples.weight_T is None else float(examples.weight_T[t]))
    return total


def examples_of(lengths: list[int], negatives: list[list[int]], targets: list[int], first_row: int = 0) -> Examples:
    """Groups of the given lengths, one after the other, each with its negatives."""
    rows = torch.arange(first_row, first_row + sum(lengths))
    negatives_GN = (
        torch.tensor(negatives, dtype=torch.int64).view(len(lengths), -1) if lengths else torch.zeros(0, 1).long()
    )
    return Examples(rows, torch.tensor(targets, dtype=torch.int64), [0, *accumulate(lengths)], negatives_GN)


def gradients(loss: Tensor, similarity: Similarity, query: list[Tensor], item: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*query, *item, *similarity.pair_parameters()]))


def check_against_plain(
    kind: Kind, similarity: Similarity, items: int, examples: Examples, gate_dropout: float, seed: int = 0
) -> None:
    query, item = sides(similarity, len(examples.target_T), items, seed)
    noise = NOISE if gate_dropout else None
    loss = sampled_loss(kind, similarity, tuple(query), tuple(item), examples, noise, gate_dropout)
    assert loss.dtype == torch.float32 and loss.shape == ()
    with torch.no_grad():
        value = sampled_loss(kind, similarity, tuple(query), tuple(item), examples, noise, gate_dropout)
    assert not value.requires_grad and torch.equal(value, loss.detach())
    # The FP32 sides are the input; beyond them the reference is FP64.
    twin = deepcopy(similarity).double()
    twin_query, twin_item = ([side.detach().double().requires_grad_() for side in both] for both in (query, item))
    expected = plain_loss(kind, twin, twin_query, twin_item, examples, gate_dropout)
    # Scores of up to 5 with some dozen roundings of theirs, for each position.
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=8 * EPS, atol=5 * 20 * EPS * len(query[0]))
    if not expected.requires_grad:
        assert not any(gradient.any() for gradient in gradients(loss, similarity, query, item))
        return
    actual = gradients(3 * loss, similarity, query, item)
    inputs = [*twin_query, *twin_item, *twin.pair_parameters()]
    plain = torch.autograd.grad(3 * expected, inputs, allow_unused=True, materialize_grads=True)
    # The gradient of a target's score is its share of the softmax less 1, which cancel where the target is likely.
    targets = plain_loss("target", twin, twin_query, twin_item, examples, gate_dropout)
    terms = torch.autograd.grad(3 * targets, inputs, allow_unused=True, materialize_grads=True)
    for got, should, term in zip(actual, plain, terms, strict=True):
        assert got.dtype == torch.float32
        # A hundred roundings, of terms that are a few times as large as the largest gradient.
        bound = max(float(should.abs().max()), float(term.abs().max()), 1.0) * 500 * EPS if should.numel() else 0
        torch.testing.assert_close(got.double(), should, rtol=0, atol=bound)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, Examples]:
    """Few items, so that negatives hit targets and each other; blocks may be empty."""
    items = draw(st.integers(1, 6))
    index = st.integers(0, items - 1)
    lengths = draw(st.lists(st.integers(0, 3), max_size=3))
    count = draw(st.integers(1, 4))
    negatives = [draw(st.lists(index, min_size=count, max_size=count)) for _ in lengths]
    targets = draw(st.lists(index, min_size=sum(lengths), max_size=sum(lengths)))
    examples = examples_of(lengths, negatives, targets, draw(st.sampled_from([0, 1000, 2**33])))
    log_q = draw(st.none() | st.lists(st.floats(-3, 0, width=32), min_size=items, max_size=items))
    positions = sum(lengths)
    weight = draw(st.none() | st.lists(st.floats(0, 3, width=32), min_size=positions, max_size=positions))
    log_q_V, weight_T = (None if of is None else torch.tensor(of) for of in (log_q, weight))
    return items, replace(examples, log_q_V=log_q_V, weight_T=weight_T)


@pytest.mark.parametrize("kind", ["softmax", "bce"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@given(shape=shapes(), gate_dropout=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 10))
def test_equals_the_sum_without_blocks(
    kind: Kind, similarity: str, shape: tuple[int, Examples], gate_dropout: float, seed: int
) -> None:
    items, examples = shape
    check_against_plain(
        kind,
        SIMILARITIES[similarity],
        items,
        examples,
        gate_dropout if similarity not in ("dot", "hindexer") else 0,
        seed,
    )


@pytest.mark.parametrize("kind", ["softmax", "bce"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_positions_with_negatives_of_their_own(similarity: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of four: the last is smaller."""
    monkeypatch.setattr(blockwise, "_SINGLE", 4)
    generator = torch.Generator().manual_seed(1)
    negatives = torch.randint(0, 12, (10, 5), generator=generator).tolist()
    targets = torch.randint(0, 12, (10,), generator=generator).tolist()
    examples = examples_of([1] * 10, negatives, targets, first_row=7)
    check_against_plain(kind, SIMILARITIES[similarity], 12, examples, 0 if similarity in ("dot", "hindexer") else 0.3)


def test_large_scores_overflow_nothing() -> None:
    similarity = make("dot", normalize=False)
    query = [torch.full((1, DIM), 1e3, requires_grad=True)]
    item = [torch.stack([torch.full((DIM,), -1e3), torch.full((DIM,), 1e3)]).requires_grad_()]
    for kind, parts in (("softmax", 1), ("bce", 2)):
        loss = sampled_loss(kind, similarity, tuple(query), tuple(item), examples_of([1], [[1]], [0]), None)
        # The target scores -8e6, the negative 8e6.
        assert float(loss.detach()) == pytest.approx(16e6, rel=8 * EPS), parts
        assert all(bool(gradient.isfinite().all()) for gradient in gradients(loss, similarity, query, item))


@pytest.mark.parametrize("kind", ["softmax", "bce"])
@pytest.mark.parametrize("similarity", ["dot", "mol"])
def test_bf16_gives_loss_and_gradients_within_its_precision(similarity: str, kind: Kind) -> None:
    chosen = SIMILARITIES[similarity]
    generator = torch.Generator().manual_seed(1)
    query_TD, item_VD = (torch.randn(count, DIM, generator=generator) for count in (64, 80))
    negatives = torch.randint(0, 80, (2, 16), generator=generator).tolist()
    targets = torch.randint(0, 80, (64,), generator=generator).tolist()
    examples = examples_of([40, 24], negatives, targets)

    def run() -> tuple[Tensor, list[Tensor]]:
        inputs = [query_TD.clone().requires_grad_(), item_VD.clone().requires_grad_()]
        query = chosen.query(inputs[0], torch.arange(64), NOISE)
        item = chosen.item(inputs[1], torch.arange(80), NOISE)
        loss = sampled_loss(kind, chosen, query, item, examples, NOISE, 0.2 if similarity == "mol" else 0.0)
        return loss.detach(), list(torch.autograd.grad(loss, [*inputs, *chosen.parameters()]))

    full, full_gradients = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, half_gradients = run()
    assert half.dtype == torch.float32
    # 2^-9 for a rounding; the loss averages over positions what scores of up to 5 are off by.
    off = abs(float(half - full)) / float(full)
    assert off == 0 if similarity == "dot" else 0 < off < 2**-8
    # The way back has as many roundings, and terms that cancel: 4 per cent at worst.
    for got, should in zip(half_gradients, full_gradients, strict=True):
        assert got.dtype == torch.float32
        assert float((got - should).norm() / should.norm()) < 2**-4
