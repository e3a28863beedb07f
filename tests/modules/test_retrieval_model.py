"""The tower over batches of a small dataset: what it returns, and that parts of a batch add up to the whole."""

import itertools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sampling import one_of_each
from small_data import batches_of, in_memory, random_tower
from torch import Tensor, nn

from logitmix.modules.batch import Batch, Packing
from logitmix.modules.config import (
    LOSSES,
    DeepFMConfig,
    DotConfig,
    HIndexerConfig,
    LossConfig,
    MLPConfig,
    ModelConfig,
    MoLConfig,
    NeuMFConfig,
    SASRecConfig,
    SimilarityConfig,
)
from logitmix.modules.model import SampledLosses
from logitmix.modules.schema import ITEM, Feature, Schema
from logitmix.modules.similarity.mol import MoL
from logitmix.modules.towers import Tower
from logitmix.trainer.data.batches import TrainingBatches, leave_one_out
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.negatives import ExplicitNegatives

ITEMS = 300
IDS = Schema.of_ids(ITEMS)
EPS = 2**-24
"""Largest relative error of rounding to FP32."""


Share = Literal["position", "sequence", "group", "batch"]


def config(similarity: str, share: Share = "sequence", kind: Literal["softmax", "bce"] = "softmax") -> ModelConfig:
    mol = MoLConfig(
        temperature=0.2,
        query_components=2,
        item_components=3,
        component_dim=4,
        gate_hidden=8,
        projection_hidden=12,
        projection_dropout=0.2,
        gate_dropout=0.3,
        gate_input_dropout=0.1,
    )
    similarities: dict[str, SimilarityConfig] = {
        "dot": DotConfig(temperature=0.2),
        "mlp": MLPConfig(hidden=9),
        "neumf": NeuMFConfig(gmf_dim=5, hidden=9, mlp_dim=4, final_hidden=8, dropout=0.2),
        "deepfm": DeepFMConfig(
            query_components=2,
            item_components=3,
            component_dim=4,
            projection_hidden=12,
            projection_dropout=0.2,
            hidden=9,
        ),
        "mol": mol,
        "mol, linear": replace(mol, item_projection_linear=True),
        "mol, joint": replace(mol, gating="joint"),
        "mol, information": replace(mol, mutual_information=0.5),
    }
    return ModelConfig(
        dim=16,
        encoder=SASRecConfig(blocks=2, heads=2, dropout=0.3, max_length=9),
        similarity=similarities[similarity],
        hindexer=HIndexerConfig(dim=8, temperature=0.2, weight=0.2),
        loss=LOSSES[kind](negatives=6, share=share),
    )


def tower_of(options: ModelConfig, seed: int = 0) -> Tower:
    return random_tower(options, IDS, torch.Generator().manual_seed(seed))


def table(dim: int = 16) -> Tensor:
    return torch.randn(ITEMS, dim, generator=torch.Generator().manual_seed(1)) * 0.2


def dataset(users: int = 13) -> Dataset:
    random = np.random.default_rng(0)
    lengths = random.integers(4, 14, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return in_memory(offsets, random.integers(0, ITEMS, offsets[-1]), ITEMS)


def batches(
    options: ModelConfig, rank: int = 0, world_size: int = 1, users: int = 13, some: bool = False
) -> TrainingBatches:
    """With `some`, about a third of the actions may be targets, which have weights and up to three explicit
    negatives."""
    data = dataset(users)
    actions, explicit = len(data.items_flat), Feature("shown", "event", "ids", ITEM)
    shown = Column(np.random.default_rng(3).integers(0, ITEMS, 3 * actions), 3 * (np.arange(actions + 1) // 3))
    data = replace(
        data, schema=replace(data.schema, features=(*data.schema.features, explicit)), event_features={"shown": shown}
    )
    places = np.flatnonzero(np.random.default_rng(1).random(len(data.items_flat)) < 0.35) if some else None
    return batches_of(
        data,
        IDS,
        held_out=leave_one_out(data, places=places),
        explicit=ExplicitNegatives(data, ("shown",), places) if some else None,
        weights=np.random.default_rng(2).random(len(data.items_flat), np.float32) if some else None,
        batch_size=8,
        max_length=options.encoder.max_length,
        negatives=options.loss.negatives,
        share=options.loss.share,
        group_positions=10,
        seed=3,
        rank=rank,
        world_size=world_size,
    )


def run(
    tower: Tower, batch: Batch, sum_over_ranks: Callable[[Tensor], Tensor] = lambda own: own
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Losses, and gradients of all parameters and of the whole table."""
    item_XD = table().requires_grad_()
    tower.zero_grad()
    losses = SampledLosses(tower, sum_over_ranks)({ITEM: item_XD[batch.id_V]}, batch)
    losses["loss"].backward()
    assert item_XD.grad is not None
    gradients = [parameter.grad for parameter in tower.parameters()] + [item_XD.grad]
    assert all(gradient is not None for gradient in gradients)
    return {name: loss.detach() for name, loss in losses.items()}, [g.clone() for g in gradients]


def gradients_of(options: ModelConfig, weights: Tower) -> dict[str, Tensor]:
    tower, batch, item_XD = Tower(options, IDS), batches(options).at(0), table().requires_grad_()
    tower.load_state_dict({name: value for name, value in weights.state_dict().items() if name in tower.state_dict()})
    SampledLosses(tower)({ITEM: item_XD[batch.id_V]}, batch)["loss"].backward()
    assert item_XD.grad is not None
    return {name: parameter.grad for name, parameter in tower.named_parameters()} | {"table": item_XD.grad}


@pytest.mark.parametrize("similarity", ["dot", "mol"])
def test_a_detached_h_indexer_trains_its_projections_alone(similarity: str) -> None:
    """As it does otherwise, to the last bit; and all else as without it."""
    with_it = config(similarity)
    without = replace(with_it, hindexer=replace(with_it.hindexer, weight=0.0))
    detached = replace(with_it, hindexer=replace(with_it.hindexer, detach=True))
    alone, together, found = (gradients_of(options, tower_of(with_it)) for options in (without, with_it, detached))
    own = {name: gradient for name, gradient in together.items() if name.startswith("hindexer.")}
    assert len(own) == 2 and found.keys() == {**alone, **own}.keys() == together.keys()
    for name, gradient in (alone | own).items():
        assert torch.equal(found[name], gradient), name
    assert not torch.equal(together["table"], alone["table"])


@pytest.mark.parametrize("similarity", ["mol", "mol, information"])
def test_a_resampled_loss_projects_its_own_items_where_they_are_fewer(
    similarity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then has the value and gradients of one that projects all items of the batch."""
    options = replace(config(similarity), loss=LossConfig(negatives=30, share="sequence", resample=2))
    tower, batch = tower_of(options), batches(options).at(0)
    sizes, of_item = [], tower.similarity.item

    def projected(item_ND: Tensor, *of: Any) -> Any:
        sizes.append(len(item_ND))
        return of_item(item_ND, *of)

    monkeypatch.setattr(tower.similarity, "item", projected)
    found, gradients = run(tower, batch)
    towers = SampledLosses.towers
    monkeypatch.setattr(SampledLosses, "towers", lambda losses, *of: towers(losses, *of[:-1], False))
    should, of_all = run(tower, batch)
    assert sizes == [len(batch.target_T) + 2 * (len(batch.bounds) - 1), len(batch.id_V)] and sizes[0] < sizes[1]
    torch.testing.assert_close(found, should, rtol=16 * EPS, atol=0)
    torch.testing.assert_close(gradients, of_all, rtol=1e-4, atol=64 * EPS)


SHARED = [
    *itertools.product(["dot", "mol"], ["sequence", "group", "position"], ["softmax"]),
    *itertools.product(["mol"], ["sequence", "position"], ["bce"]),
    *itertools.product(["mlp", "neumf", "mol, linear", "mol, joint", "deepfm"], ["sequence"], ["softmax"]),
    ("mol", "batch", "softmax"),
]


@pytest.mark.parametrize(
    ("similarity", "share", "kind", "world_size", "step", "some"),
    one_of_each(
        [
            (*of, world_size, step, some)
            for of in SHARED
            for world_size, step, some in itertools.product((2, 3, 12), (0, 1), (False, True))
        ],
        itemgetter(0, 1, 2),
        itemgetter(1, 3),
        itemgetter(3, 4),
        itemgetter(1, 5),
    ),
)
def test_the_ranks_losses_and_gradients_add_up_to_those_of_one_process(
    similarity: str, share: Share, kind: Literal["softmax", "bce"], world_size: int, step: int, some: bool
) -> None:
    options = config(similarity, share, kind)
    tower = tower_of(options)
    # Few users have three targets: all are in one batch.
    step = 0 if some else step
    loss, gradients = run(tower, batches(options, some=some).at(step))
    assert set(loss) == {"loss", "similarity", "hindexer"}
    parts = [run(tower, batches(options, rank, world_size, some=some).at(step)) for rank in range(world_size)]
    for name in loss:
        # FP32 sums of some 60 positions in another order.
        torch.testing.assert_close(sum(part[0][name] for part in parts), loss[name], rtol=16 * EPS, atol=0)
    for index, should in enumerate(gradients):
        own = [part[1][index] for part in parts]
        assert float(should.norm()) > 0
        # Roundings are as large as what is added up, and the ranks' gradients partly cancel.
        assert float((sum(own) - should).norm()) < 32 * EPS * sum(float(gradient.norm()) for gradient in own)


@pytest.mark.parametrize("world_size", [2, 3, 12])
def test_the_ranks_shares_of_the_mutual_information_add_up(world_size: int) -> None:
    options = config("mol, information")
    tower = tower_of(options)
    loss, gradients = run(tower, batches(options).at(1))
    parts = [batches(options, rank, world_size).at(1) for rank in range(world_size)]
    own: list[Tensor] = []
    for part in parts:
        run(tower, part, lambda of_rank: own.append(of_rank) or of_rank)  # type: ignore[func-returns-value]
    shares = [run(tower, part, lambda _: sum(own)) for part in parts]  # type: ignore[arg-type, return-value]
    for name in ("loss", "mutual_information"):
        torch.testing.assert_close(sum(share[0][name] for share in shares), loss[name], rtol=16 * EPS, atol=4 * EPS)
    for index, should in enumerate(gradients):
        of_ranks = [share[1][index] for share in shares]
        bound = 32 * EPS * sum(float(gradient.norm()) for gradient in of_ranks)
        assert float((sum(of_ranks) - should).norm()) < bound


def test_the_mutual_information_is_that_of_weighted_targets_and_components() -> None:
    """And its gradient is that of the formula, in FP64, with the gates that the loss has after dropout."""
    options = config("mol, information")
    tower, batch, item_XD = tower_of(options), batches(options).at(0), table().requires_grad_()
    weight_T = torch.rand(len(batch.target_T), generator=torch.Generator().manual_seed(4))
    batch = replace(batch, weight_Q=weight_T / weight_T.mean())
    mol, noise = tower.similarity, batch.noise
    assert isinstance(mol, MoL) and noise is not None
    query, item = tower.at_positions({ITEM: item_XD[batch.id_V]}, batch)
    query_side = mol.query_side(query, batch.packing.row_T, noise)
    item_side = mol.item_side(item, batch.id_V, noise)
    of_targets = tuple(part[batch.target_T] for part in item_side)
    # Candidate 0 of a position is its target, and there are 6 negatives.
    mask_TM = noise.dropout(torch.ones(len(batch.target_T), 6), 0.3, "gates", batch.packing.row_T * 7)
    gates_TM = mol.gates(query_side, of_targets).double() * mask_TM
    gates_TM = gates_TM / gates_TM.sum(1, keepdim=True).clamp(min=1e-6)
    assert 0.2 < float((gates_TM == 0).double().mean()) < 0.4
    share_T1 = (weight_T / weight_T.sum()).double()[:, None]
    mean_M = (share_T1 * gates_TM).sum(0)
    expected = (share_T1 * gates_TM * (gates_TM + 1e-6).log()).sum() - (mean_M * (mean_M + 1e-6).log()).sum()
    losses = SampledLosses(tower)({ITEM: item_XD[batch.id_V]}, batch)
    assert float(expected.detach()) > 0.1
    torch.testing.assert_close(losses["mutual_information"].double(), expected, rtol=32 * EPS, atol=0)
    hindexer = 0.2 * losses["hindexer"]
    torch.testing.assert_close(
        losses["loss"], losses["similarity"] + hindexer - 0.5 * losses["mutual_information"], rtol=4 * EPS, atol=0
    )
    learned = [item_XD, *mol.parameters()]
    actual = torch.autograd.grad(losses["mutual_information"], learned, allow_unused=True)
    wanted = torch.autograd.grad(expected, learned, allow_unused=True)
    for got, should in zip(actual, wanted, strict=True):
        assert (got is None) == (should is None)
        if got is not None and should is not None:
            assert float(should.norm()) > 0
            assert float((got - should).norm()) < 200 * EPS * float(should.norm())


def still(options: ModelConfig) -> ModelConfig:
    """These options without dropout."""
    rates = [entry.name for entry in fields(options.similarity) if entry.name.endswith("dropout")]
    similarity = replace(options.similarity, **dict.fromkeys(rates, 0.0))
    return replace(options, encoder=replace(options.encoder, dropout=0.0), similarity=similarity)


@pytest.mark.parametrize("share", ["position", "sequence", "group", "batch"])
@pytest.mark.parametrize("similarity", ["dot", "mlp", "neumf", "deepfm", "mol", "dot, some", "mol, some"])
def test_the_loss_of_a_batch_is_the_mean_over_its_targets(similarity: str, share: Share) -> None:
    """Written out from its parts, one position after the other: value and gradients."""
    similarity, some, _ = similarity.partition(", some")
    options = still(config(similarity, share))
    tower, batch = tower_of(options), batches(options, some=bool(some)).at(0 if some else 1)
    losses, gradients = run(tower, batch)
    item_XD = table().requires_grad_()
    total = {"similarity": torch.zeros(()), "hindexer": torch.zeros(())}
    inputs, targets = batch.id_V[batch.input_T], batch.id_V[batch.target_T]
    bounds = batch.packing.bounds
    group_of = {t: g for g, (first, last) in enumerate(itertools.pairwise(batch.bounds)) for t in range(first, last)}
    assert len(set(group_of.values())) == len(batch.negatives_GN)
    asked = range(bounds[-1]) if batch.position_Q is None else batch.position_Q.tolist()
    assert (0 < len(asked) < bounds[-1]) == bool(some)
    for start, end in itertools.pairwise(bounds):
        for t in sorted({*range(start, end)} & {*asked}):
            q = asked.index(t)
            negatives = batch.id_V[batch.negatives_GN[group_of[q]]]
            weight = 1 / len(asked) if batch.weight_Q is None else float(batch.weight_Q[q]) / len(asked)
            history = inputs[start : t + 1]
            query_1D = tower.queries(item_XD[history], Packing(torch.tensor([len(history)]))).vector_RD
            counted = [int(targets[q]), *(int(n) for n in negatives if n != targets[q])]
            for name in total:
                module = getattr(tower, name)
                query = module.query(query_1D, torch.arange(1))
                item = module.item(item_XD[counted], torch.arange(len(counted)))
                total[name] = total[name] - torch.log_softmax(module.all_pairs(query, item)[0], 0)[0] * weight
    assert batch.total_targets == len(asked)
    combined = total["similarity"] + 0.2 * total["hindexer"]
    for name, should in {**total, "loss": combined}.items():
        torch.testing.assert_close(losses[name], should.detach(), rtol=64 * EPS, atol=0)
    expected = torch.autograd.grad(combined, [*tower.parameters(), item_XD])
    for got, should in zip(gradients, expected, strict=True):
        # Some positions cancel others.
        assert float((got - should).norm()) < 200 * EPS * max(float(should.norm()), 0.1)


def test_the_loss_of_the_similarity_drops_gates() -> None:
    without = still(config("mol"))
    dropping = replace(without, similarity=replace(without.similarity, gate_dropout=0.3))
    batch, item_XD = batches(without).at(0), table()
    losses = [SampledLosses(tower_of(options))({ITEM: item_XD[batch.id_V]}, batch) for options in (without, dropping)]
    moved = {name for name in losses[0] if not torch.equal(losses[0][name], losses[1][name])}
    assert moved == {"similarity", "loss"}


def test_queries_are_those_of_training_at_the_last_positions() -> None:
    options = config("mol")
    tower, batch, item_XD = tower_of(options), batches(options).at(0), table()
    trained_TD = tower.query_tower(item_XD[batch.id_V][batch.input_T], batch.packing).vector_RD
    query_BD = tower.queries(item_XD[batch.id_V[batch.input_T]], batch.packing).vector_RD
    lasts = [end - 1 for end in batch.packing.bounds[1:]]
    # Equal up to how the last block's attention is rounded.
    torch.testing.assert_close(query_BD, trained_TD[lasts], rtol=0, atol=1e-5)
    # And they are what inference finds for each history alone.
    for b, (start, last) in enumerate(zip(batch.packing.bounds, lasts, strict=False)):
        history = batch.id_V[batch.input_T[start : last + 1]]
        alone = tower.queries(item_XD[history], Packing(torch.tensor([len(history)]))).vector_RD
        torch.testing.assert_close(alone[0], query_BD[b], rtol=0, atol=1e-5)


def test_what_is_watched_of_the_gates_is_that_of_the_first_sequences() -> None:
    options = config("mol")
    tower, batch, item_XD = tower_of(options), batches(options).at(0), table()
    rows, positions = item_XD[batch.id_V], batch.packing.bounds[3]
    diagnostics = tower.diagnostics({ITEM: rows}, batch, sequences=3)
    query_TD = tower.query_tower(rows[batch.input_T], batch.packing).vector_RD
    query = tower.similarity.query(query_TD, batch.packing.row_T)
    item = tower.similarity.item(rows[batch.target_T], batch.packing.row_T)
    gates_TM = tower.similarity.gates(query, item).detach()[:positions]
    use_M, entropy = gates_TM.mean(0), -(gates_TM * gates_TM.log()).sum(1).mean() / math.log(6)
    expected = {"entropy": entropy, "least_used": use_M.min(), "most_used": use_M.max(), "use_of_components": use_M}
    torch.testing.assert_close(diagnostics, {f"gates/{name}": of for name, of in expected.items()}, rtol=0, atol=1e-5)
    parts = [batches(options, rank, 12).at(1) for rank in range(12)]
    empty = next(part for part in parts if len(part.input_T) == 0)
    assert tower.diagnostics({ITEM: item_XD[empty.id_V]}, empty) == {}


def test_initial_weights_follow_from_the_generator_alone() -> None:
    towers = [Tower(config("mol"), IDS) for _ in range(3)]
    for tower, seed in zip(towers, (5, 5, 6), strict=True):
        with torch.no_grad():
            for parameter in tower.parameters():
                parameter.fill_(float("nan"))
        tower.reset_parameters(torch.Generator().manual_seed(seed))
    first, same, other = (dict(tower.named_parameters()) for tower in towers)
    assert all(torch.equal(first[name], same[name]) and bool(first[name].isfinite().all()) for name in first)
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    layers = {f"{name}.weight" for name, of in towers[0].named_modules() if isinstance(of, nn.Linear)}
    # The cross gate begins with its preference alone.
    assert drawn == layers - {"similarity.cross_gate.2.weight"} | {"query_tower.encoder.position_LD"}
