"""The fused scores of a mixture of logits against the similarity in plain torch. Axes as in mol_scores.py."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitmix.modules.config import MoLConfig
from logitmix.modules.losses.blockwise import Side
from logitmix.modules.similarity import mol_scores as module
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.mol import MoL
from logitmix.modules.similarity.mol_scores import mol_scores

LIBRARY = module._library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the extension was not built")
LEVELS = [level for level in range(module._INT8 + 1) if LIBRARY and LIBRARY.mol_scores_has(level)]
needs_int8 = pytest.mark.skipif(module._INT8 not in LEVELS, reason="the processor has no products of INT8 numbers")
SHAPES = [(8, 8, 32, 128), (1, 1, 1, 1), (2, 3, 4, 5), (4, 4, 64, 17), (16, 2, 32, 64), (3, 16, 32, 8), (5, 1, 33, 9)]
DIM = 16


def mol_of(U: int, I: int, C: int, H: int) -> MoL:
    mol = MoL(DIM, MoLConfig(query_components=U, item_components=I, component_dim=C, gate_hidden=H)).eval()
    generator = torch.Generator().manual_seed(U + I + C + H)
    mol.reset_parameters(generator)
    with torch.no_grad():
        for parameter in mol.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return mol


def sides_of(mol: MoL, B: int, X: int) -> tuple[Side, Side]:
    generator = torch.Generator().manual_seed(B + X)
    with torch.no_grad():
        query = mol.query(torch.randn(B, DIM, generator=generator), torch.arange(B))
        return query, mol.item(torch.randn(X, DIM, generator=generator), torch.arange(X))


@torch.no_grad()
def plain(mol: MoL, query: Side, item: Side, item_P: Tensor, bounds: list[int]) -> Tensor:
    return Similarity.candidates(mol.double(), *_double(query, item), item_P, bounds)


def _double(*sides: Side) -> tuple[Side, ...]:
    return tuple(tuple(part.double() for part in side) for side in sides)


def candidates(lengths: list[int], X: int, seed: int = 0) -> tuple[Tensor, list[int]]:
    item_P = torch.randint(X, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return item_P, [sum(lengths[:b]) for b in range(len(lengths) + 1)]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(module, "_LEVEL", request.param)
    yield request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_the_similarity(shape: tuple[int, int, int, int], level: int) -> None:
    mol = mol_of(*shape)
    query, item = sides_of(mol, 4, 90)
    item_P, bounds = candidates([23, 0, 24, 51], 90)
    found = mol_scores(query, item, mol.pair_parameters(), item_P, bounds)
    torch.testing.assert_close(found, plain(mol, query, item, item_P, bounds).float(), rtol=1e-5, atol=2e-5)


def test_the_thread_has_subnormal_numbers_afterwards(level: int) -> None:
    mol = mol_of(*SHAPES[0])
    query, item = sides_of(mol, 1, 9)
    assert mol_scores(query, item, mol.pair_parameters(), torch.arange(9), [0, 9]) is not None
    assert float(torch.tensor([1e-40]) * 0.5) > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_in_16_bits(shape: tuple[int, int, int, int], dtype: torch.dtype, level: int) -> None:
    mol = mol_of(*shape)
    query, item = sides_of(mol, 2, 70)
    stored = tuple(part.to(dtype) for part in item)
    item_P, bounds = candidates([31, 40], 70)
    found = mol_scores(query, stored, mol.pair_parameters(), item_P, bounds)
    # What is stored is exact; BF16's products round the other numbers too.
    rounds = dtype == torch.bfloat16 and level >= module._BF16 and module._BF16 in LEVELS
    expected = plain(mol, query, stored, item_P, bounds).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.25 if rounds else 2e-5)
    if rounds:
        assert (found - expected).abs().mean() < 0.04


@pytest.mark.parametrize("shape", SHAPES)
def test_components_in_8_bits(shape: tuple[int, int, int, int], level: int) -> None:
    mol = mol_of(*shape)
    query, stored, scale = in_8_bits(*sides_of(mol, 2, 70))
    item_P, bounds = candidates([31, 40], 70)
    found = mol_scores(query, stored, mol.pair_parameters(), item_P, bounds)
    expected = plain(mol, (query[0] / scale, query[1]), (stored[0] * scale, stored[1]), item_P, bounds).float()
    # Products of INT8 numbers round the cross gate too, which here is random: see also the test below.
    atol = {module._BF16: 0.25, module._AMX: 0.25, module._INT8: 0.5}.get(level, 2e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol)
    if level == module._INT8:
        assert (found - expected).abs().mean() < 0.06


def in_8_bits(query: Side, item: Side) -> tuple[Side, Side, float]:
    """As an INT8 cache gives them to `mol_scores`, and the components' scale."""
    scale = float(item[0].abs().max() / 127)
    return (query[0] * scale, query[1]), ((item[0] / scale).round().to(torch.int8), item[1].bfloat16()), scale


@needs_int8
@pytest.mark.parametrize("shape", [(8, 8, 32, 128), (2, 3, 4, 5), (4, 4, 64, 17), (7, 8, 36, 70), (8, 1, 32, 128)])
def test_products_in_8_bits(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same arithmetic in plain torch."""
    monkeypatch.setattr(module, "_FEW", 0)
    mol = mol_of(*shape)
    query, stored, _ = in_8_bits(*sides_of(mol, 3, 900))
    item_P, bounds = candidates([301, 0, 440], 900)
    found = mol_scores(query, stored, mol.pair_parameters(), item_P, bounds)
    of_pair = torch.arange(3).repeat_interleave(torch.tensor(bounds).diff())
    expected = plain_int8(mol, tuple(part[of_pair] for part in query), tuple(part[item_P] for part in stored)).float()
    # In a few pairs, a number that is nearly between two steps goes to the other one.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
    assert (found - expected).abs().mean() < 1e-3


@needs_int8
def test_large_gates_in_8_bits() -> None:
    """Beyond what e^s can hold."""
    mol = mol_of(8, 8, 32, 16)
    query, stored, _ = in_8_bits(*sides_of(mol, 1, 50))
    query = query[0], 200 * query[1]
    found = mol_scores(query, stored, mol.pair_parameters(), torch.arange(50), [0, 50])
    of_pair = torch.zeros(50, dtype=torch.int64)
    expected = plain_int8(mol, tuple(part[of_pair] for part in query), stored).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


@needs_int8
def test_products_in_8_bits_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them, scores are those of a processor without such products."""

    def scores(U: int, I: int, C: int, weights: torch.dtype) -> Tensor | None:
        mol = mol_of(U, I, C, 16)
        query, (components, of_item), _ = in_8_bits(*sides_of(mol, 1, 30))
        item = components, of_item.to(weights)
        return mol_scores(query, item, mol.pair_parameters(), torch.arange(30), [0, 30])

    shapes = [(9, 8, 32), (8, 9, 32), (8, 8, 33), *([(4, 4, 32)] if module._BF16 in LEVELS else [])]
    cases = [*((*shape, torch.bfloat16) for shape in shapes), (8, 8, 32, torch.half), (8, 8, 32, torch.bfloat16)]
    found = [scores(*case) for case in cases]
    monkeypatch.setattr(module, "_LEVEL", module._AMX)
    same = [torch.equal(scores(*case), of_case) for case, of_case in zip(cases, found, strict=True)]
    assert same == [True] * (len(cases) - 1) + [False]


@torch.no_grad()
def plain_int8(mol: MoL, query: Side, item: Side) -> Tensor:
    """phi of query p with item p: mol_scores_int8.h's numbers in FP64."""
    (query_PUC, query_PM), (item_PIC, item_PM) = _double(query, item)
    up_HM, up_H, down_MH, down_M = (parameter.double() for parameter in mol.pair_parameters())
    logit_PM = torch.bmm(rounded(query_PUC, 255), item_PIC.transpose(1, 2)).flatten(1)
    hidden_PH = torch.nn.functional.silu(rounded(logit_PM, 127) @ rounded(up_HM, 127).t() + up_H)
    least = -0.27846455
    # Lanes without a hidden unit hold 0.
    hidden_PH = rounded(torch.nn.functional.pad(hidden_PH, (0, -hidden_PH.shape[1] % 64)) - least, 255) + least
    z_PM = hidden_PH[:, : len(up_H)] @ rounded(down_MH, 127).t() + down_M + query_PM * item_PM
    return (torch.softmax(torch.nn.functional.silu(z_PM), 1) * logit_PM).sum(1)


def rounded(x: Tensor, steps: int) -> Tensor:
    """To whole steps of the largest magnitude of each row."""
    scale = x.abs().amax(-1, keepdim=True) / steps
    return (x / scale).round() * scale


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5), X=st.integers(1, 40), seed=st.integers(0, 1000))
def test_any_candidates(lengths: list[int], X: int, seed: int) -> None:
    mol = mol_of(4, 4, 32, 8)
    query, item = sides_of(mol, len(lengths), X)
    item_P, bounds = candidates(lengths, X, seed)
    found = mol_scores(query, item, mol.pair_parameters(), item_P, bounds)
    torch.testing.assert_close(found, plain(mol, query, item, item_P, bounds).float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("stored", ["FP32", "INT8"])
def test_a_score_depends_on_its_pair_alone(
    stored: str, is_sorted: bool, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on threads, on other candidates, queries that are scored in turns, or the place in a block."""
    mol = mol_of(8, 8, 32, 16)
    query, item = sides_of(mol, 5, 900)
    if stored == "INT8":
        query, item, _ = in_8_bits(query, item)
    item_P, bounds = candidates([700, 0, 300, 1500, 9], 900)
    lists = [item_P[first:last] for first, last in pairwise(bounds)]
    if is_sorted:
        lists = [of.sort().values for of in lists]
    each = [
        mol_scores(tuple(part[b : b + 1] for part in query), item, mol.pair_parameters(), some, [0, len(some)])
        for b, of in enumerate(lists)
        for some in of.split(100)
    ]
    monkeypatch.setattr(module, "_PAIRS", 800)
    for number in (1, 3):
        torch.set_num_threads(number)
        found = mol_scores(query, item, mol.pair_parameters(), torch.cat(lists), bounds)
        assert torch.equal(found, torch.cat(each))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_gives_nan(dtype: torch.dtype, level: int) -> None:
    mol = mol_of(4, 4, 32, 8)
    query, item = sides_of(mol, 1, 9)
    stored = tuple(part.to(dtype) for part in item)
    stored[0][4, 1, 3] = stored[1][6, 5] = torch.nan
    found = mol_scores(query, stored, mol.pair_parameters(), torch.arange(9), [0, 9])
    assert found is not None and found.isnan().nonzero().flatten().tolist() == [4, 6]


@pytest.mark.parametrize("where", ["query", "item", "up", "up_bias", "down", "down_bias"])
def test_nan_beside_8_bits_gives_nan(where: str, level: int) -> None:
    mol = mol_of(4, 4, 32, 8)
    query, stored, _ = in_8_bits(*sides_of(mol, 2, 9))
    gate = [parameter.detach().clone() for parameter in mol.pair_parameters()]
    expected = range(18)
    if where == "query":
        query[0][1, 2, 3], expected = torch.nan, range(9, 18)
    elif where == "item":
        stored[1][6, 5], expected = torch.nan, (6, 15)
    else:
        gate[["up", "up_bias", "down", "down_bias"].index(where)].flatten()[3] = torch.nan
    found = mol_scores(query, stored, gate, torch.arange(9).repeat(2), [0, 9, 18])
    assert found is not None and found.isnan().nonzero().flatten().tolist() == list(expected)


def test_indices_that_do_not_fit_are_refused() -> None:
    mol = mol_of(2, 3, 4, 5)
    query, item = sides_of(mol, 2, 10)
    for bad in (-1, 10):
        with pytest.raises(IndexError, match="items are numbered from 0 to 9"):
            mol_scores(query, item, mol.pair_parameters(), torch.tensor([1, bad]), [0, 1, 2])
    for bounds in ([0, 2], [0, 2, 1], [0, 1, 3], [1, 1, 2]):
        with pytest.raises(ValueError, match="bounds must rise from 0 to 2"):
            mol_scores(query, item, mol.pair_parameters(), torch.tensor([1, 2]), bounds)


def test_all_pairs_without_gradients_are_fused(level: int) -> None:
    mol = mol_of(8, 8, 32, 16)
    query, item = sides_of(mol, 3, 30)
    with torch.no_grad():
        fused, empty = mol.all_pairs(query, item), mol.all_pairs(query, tuple(part[:0] for part in item))
        every_P, bounds = torch.arange(30).repeat(3), [0, 30, 60, 90]
        assert torch.equal(fused.flatten(), mol_scores(query, item, mol.pair_parameters(), every_P, bounds))
    assert empty.shape == (3, 0)
    torch.testing.assert_close(fused, mol.all_pairs(query, item), rtol=1e-5, atol=2e-5)
