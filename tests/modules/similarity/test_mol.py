"""MoL against the final similarity (section 3.3) and algorithm (section 3.4), pair by pair and component by component,
in FP64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logitmix.modules.config import MoLConfig
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.base import build_similarity
from logitmix.modules.similarity.mol import MoL

DIM, U, I, C = 12, 3, 2, 4
M = U * I
NOISE = Noise(2**40 + 17)
EPS = 2**-24
"""Largest relative error of rounding to FP32."""


def make(dim: int = DIM, spread: float = 0.3, **options: object) -> MoL:
    """All parameters random, so that none can be left out unnoticed."""
    defaults: dict = {
        "query_components": U,
        "item_components": I,
        "component_dim": C,
        "gate_hidden": 5,
        "projection_hidden": 7,
    }
    mol = build_similarity(dim, MoLConfig(**(defaults | options)))
    assert isinstance(mol, MoL)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mol.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return mol


def vectors(count: int, seed: int, dim: int = DIM) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def mlp(gate: nn.Module, x: Tensor) -> Tensor:
    """Two layers with SiLU between; the second may lack a bias."""
    first, _, second = gate
    out = second.weight.double() @ silu(first.weight.double() @ x + first.bias.double())
    return out if second.bias is None else out + second.bias.double()


def components(projection: nn.Module, x: Tensor, normalize: bool) -> list[Tensor]:
    """Gated linear unit, where there is one, and linear layer, cut into vectors of width C, each of length one where
    normalized."""
    if projection.gated is not None:
        both = projection.gated.weight.double() @ x + projection.gated.bias.double()
        value, gate = both[: len(both) // 2], both[len(both) // 2 :]
        x = value * silu(gate)
    flat = projection.output.weight.double() @ x + projection.output.bias.double()
    cut = [flat[i : i + C] for i in range(0, len(flat), C)]
    return [part / part.pow(2).sum().sqrt() for part in cut] if normalize else cut


def plain(
    mol: MoL,
    u: Tensor,
    x: Tensor,
    *,
    projected_x: Tensor | None = None,
    gating_u: Tensor | None = None,
    gating_x: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """phi(x, u) and pi(x, u) of one pair; what dropout made of the inputs, and the gates' mask, may be given."""
    u, x = u.double(), x.double()
    of_query = components(mol.query_projection, u, mol.config.normalize)
    of_item = components(mol.item_projection, x if projected_x is None else projected_x.double(), mol.config.normalize)
    logits = torch.stack([(f * g).sum() / mol.config.temperature for f in of_query for g in of_item])
    gating_u = u if gating_u is None else gating_u.double()
    gating_x = x if gating_x is None else gating_x.double()
    if mol.config.gating == "joint":
        # One MLP of all three.
        first_cross, _, last = mol.cross_gate
        weight = torch.cat([mol.query_gate.weight, mol.item_gate.weight, first_cross.weight], 1).double()
        hidden = silu(weight @ torch.cat([gating_u, gating_x, logits]) + mol.query_gate.bias.double())
        combined = last.weight.double() @ hidden + last.bias.double()
    else:
        uw, xw = mlp(mol.query_gate, gating_u), mlp(mol.item_gate, gating_x)
        combined = silu(uw * xw + mlp(mol.cross_gate, logits))
    gates = (combined - combined.max()).exp()
    gates = gates / gates.sum()
    used = gates if mask is None else gates * mask.double() / (gates * mask.double()).sum().clamp(min=1e-6)
    return (used * logits).sum(), gates


def of_all(mol: MoL, query_TD: Tensor, item_ND: Tensor) -> Tensor:
    return torch.stack([torch.stack([plain(mol, u, x)[0] for x in item_ND]) for u in query_TD])


def sides(mol: MoL, query_TD: Tensor, item_ND: Tensor, noise: Noise | None = None) -> tuple:
    return (
        mol.query(query_TD, torch.arange(len(query_TD)), noise),
        mol.item(item_ND, torch.arange(len(item_ND)), noise),
    )


@pytest.mark.parametrize("gating", ["decomposed", "joint"])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_final_similarity_written_out(normalize: bool, gating: str) -> None:
    mol = make(normalize=normalize, temperature=0.05 if normalize else 1.0, gating=gating)
    query_TD, item_ND = vectors(5, 1), vectors(6, 2)
    query, item = sides(mol, query_TD, item_ND)
    expected = of_all(mol, query_TD, item_ND).detach()
    scores = mol.all_pairs(query, item)
    # A hundred or so roundings on the way, of values up to the largest.
    bound = float(expected.abs().max()) * 100 * EPS
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=bound)
    of_pairs = query, tuple(side[:5] for side in item)
    pairs, gates_TM = mol.pairs(*of_pairs), mol.gates(*of_pairs)
    torch.testing.assert_close(pairs.double(), expected[:, :5].diagonal(), rtol=0, atol=bound)
    of_formula = torch.stack([plain(mol, u, x)[1] for u, x in zip(query_TD, item_ND[:5], strict=True)])
    torch.testing.assert_close(gates_TM.double(), of_formula, rtol=0, atol=500 * EPS)
    assert scores.dtype == pairs.dtype == torch.float32
    assert float(expected.std()) > 10 * bound


@pytest.mark.parametrize(
    ("options", "gated"),
    [
        ({}, (True, True)),
        ({"gating": "joint"}, (True, True)),
        ({"projection_hidden": 0}, (False, False)),
        ({"item_projection_linear": True}, (True, False)),
        ({"projection_hidden": 0, "item_projection_linear": True}, (False, False)),
    ],
)
def test_gradients_are_those_of_the_final_similarity_in_fp64(options: dict, gated: tuple[bool, bool]) -> None:
    mol = make(**options)
    assert (mol.query_projection.gated is not None, mol.item_projection.gated is not None) == gated
    query_TD, item_ND = vectors(3, 1).requires_grad_(), vectors(4, 2).requires_grad_()
    weight_TN = vectors(3, 5, dim=4)
    wanted = [query_TD, item_ND, *mol.parameters()]
    score_TN = mol.all_pairs(*sides(mol, query_TD, item_ND))
    actual = torch.autograd.grad((score_TN * weight_TN).sum(), wanted)
    expected = torch.autograd.grad((of_all(mol, query_TD, item_ND) * weight_TN.double()).sum(), wanted)
    for got, should in zip(actual, expected, strict=True):
        assert float(should.abs().max()) > 0
        torch.testing.assert_close(got, should, rtol=0, atol=float(should.abs().max()) * 200 * EPS)


def test_what_gate_dropout_leaves_is_renormalized() -> None:
    mol = make()
    query_TD, item_ND = vectors(4, 1), vectors(4, 2)
    query, item = sides(mol, query_TD, item_ND)
    mask_TNM = NOISE.dropout(torch.ones(16, M), 0.4, "gates", torch.arange(16)).view(4, 4, M)
    expected = torch.stack(
        [
            torch.stack([plain(mol, u, x, mask=mask_TNM[t, n])[0] for n, x in enumerate(item_ND)])
            for t, u in enumerate(query_TD)
        ]
    ).detach()
    assert 0.2 < float((mask_TNM == 0).float().mean()) < 0.6
    dropped = mol.all_pairs(query, item, lambda gates: gates * mask_TNM)
    torch.testing.assert_close(dropped.double(), expected, rtol=0, atol=20 * 32 * EPS)
    diagonal = torch.arange(4)
    pairs = mol.pairs(query, item, lambda gates: gates * mask_TNM[diagonal, diagonal])
    torch.testing.assert_close(pairs.double(), expected.diagonal(), rtol=0, atol=20 * 32 * EPS)
    # A weighted mean of logits lies among them; without renormalizing it would leave their range.
    one = torch.zeros(M)
    one[3] = 5.0
    only = mol.pairs(query, item, lambda gates: gates * one)
    logits_TM = torch.bmm(query[0], item[0].transpose(1, 2)).flatten(1)
    torch.testing.assert_close(only, logits_TM[:, 3], rtol=0, atol=20 * 8 * EPS)


def test_gates_that_are_all_dropped_score_zero() -> None:
    mol = make()
    query, item = sides(mol, vectors(4, 1).requires_grad_(), vectors(4, 2))
    scores = mol.all_pairs(query, item, lambda gates: gates * 0)
    assert torch.equal(scores, torch.zeros(4, 4))
    (gradient,) = torch.autograd.grad(scores.sum(), query[0])
    assert bool(gradient.isfinite().all())


def test_dropout_of_the_inputs_goes_where_the_configuration_says() -> None:
    mol = make(projection_dropout=0.3, gate_input_dropout=0.4)
    query_TD, item_ND = vectors(3, 1), vectors(3, 2)
    row_T, id_N = torch.tensor([100, 101, 2**33]), torch.tensor([7, 1, 7])
    query, item = mol.query(query_TD, row_T, NOISE), mol.item(item_ND, id_N, NOISE)
    gating_u = NOISE.dropout(query_TD, 0.4, "mol.query_gate", row_T)
    gating_x = NOISE.dropout(item_ND, 0.4, "mol.item_gate", id_N)
    projected_x = NOISE.dropout(item_ND, 0.3, "mol.item", id_N)
    expected = torch.stack(
        [
            plain(mol, query_TD[t], item_ND[t], projected_x=projected_x[t], gating_u=gating_u[t], gating_x=gating_x[t])[
                0
            ]
            for t in range(3)
        ]
    ).detach()
    torch.testing.assert_close(mol.pairs(query, item).double(), expected, rtol=0, atol=20 * 100 * EPS)
    # An item has one mask, wherever it stands in the batch.
    same = mol.item(item_ND[[0, 0]], id_N[[0, 2]], NOISE)
    for side in same:
        torch.testing.assert_close(side[0], side[1], rtol=0, atol=16 * EPS)
    for side, plain_side in zip((*query, *item), (*mol.query(query_TD, row_T), *mol.item(item_ND, id_N)), strict=True):
        assert torch.equal(side, plain_side) == (side is query[0])


@pytest.mark.parametrize("hidden", [0, 64])
def test_products_of_like_components_begin_as_the_dot_product(hidden: int) -> None:
    sizes = {"query_components": 4, "item_components": 6, "component_dim": 8, "projection_hidden": hidden}
    mol = MoL(16, MoLConfig(**sizes, normalize=False, temperature=1.0))
    mol.reset_parameters(torch.Generator().manual_seed(1))
    query_TD, item_ND = vectors(50, 1, 16), vectors(50, 2, 16)
    query, item = sides(mol, query_TD, item_ND)
    shares_T4, dot_T = (query[0] * item[0][:, :4]).sum(-1), (query_TD * item_ND).sum(-1)
    # Each two components are the coordinates of a whole rotation.
    torch.testing.assert_close(shares_T4[:, :2].sum(1), dot_T / 2, rtol=0, atol=1e-4)
    torch.testing.assert_close(shares_T4.sum(1), dot_T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("user", [False, True])
def test_the_mixture_begins_nearly_as_the_cosine(user: bool) -> None:
    mol = MoL(64, MoLConfig(query_components=8 + user, item_components=9, user_component=user))
    mol.use_features(int(user), 0)
    mol.reset_parameters(torch.Generator().manual_seed(1))
    query_TD, item_ND = vectors(40, 1, 64), vectors(200, 2, 64)
    query = mol.query(query_TD, torch.arange(40), groups=[vectors(40, 3, 64)] if user else [])
    item = mol.item(item_ND, torch.arange(200))
    phi_TN = mol.all_pairs(query, item).detach()
    cosine_TN = F.normalize(query_TD) @ F.normalize(item_ND).T
    assert float(torch.corrcoef(torch.stack([phi_TN.flatten(), cosine_TN.flatten()]))[0, 1]) > 0.95
    # What the user's component has to say begins with less weight than each share of the cosine.
    gates_TUI = mol.gates(query, tuple(part[:40] for part in item)).detach().view(40, 8 + user, 9)
    assert not user or float(gates_TUI[:, -1].sum(1).max()) < 0.05 < float(gates_TUI[:, 0, 0].min())
