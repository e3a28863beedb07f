"""Holds the Triton form of MoL's scores to the similarity. Axes as in mol_scores.py."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from test_mol_scores import SHAPES, candidates, mol_of, plain, sides_of
from torch import Tensor
from torch.nn import functional as F

from logitmix.modules.losses.blockwise import Side
from logitmix.modules.similarity import mol_scores_triton
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.mol import MoL

BOUNDS = {torch.float32: 3e-5, torch.float16: 0.003, torch.bfloat16: 0.02, torch.int8: 0.02}
"""How far a score, of size up to 20, may be from FP64 with the same roundings, by the components' type. FP32 scores may
be twice as far as plain torch's in FP32."""
HALFWAY = 1e-5
"""How far a logit or a hidden unit, summed in FP32, may be from FP64."""
COARSE = 8
"""As many times as far, for 16 bits, on a GPU, whose sigmoids are accurate to 2^-11 there."""
WIDE = (3, 16, 32, 8)
"""Padded to 128 components: too many for FP32."""


def fused(mol: MoL, query: Side, item: Side, item_P: Tensor, bounds: list[int], device: str) -> Tensor:
    query, item, gate = (tuple(part.to(device) for part in side) for side in (query, item, mol.pair_parameters()))
    (_, U, C), I, H = query[0].shape, item[0].shape[1], len(gate[1])
    assert mol_scores_triton.covers(U, I, C, H, item)
    score_P = mol_scores_triton.mol_scores(query, item, gate, item_P.to(device), bounds)
    assert score_P.dtype == torch.float32 and not score_P.requires_grad
    return score_P.cpu()


@torch.no_grad()
def rounded(
    mol: MoL, query: Side, stored: Side, item_P: Tensor, bounds: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """phi in FP64, with what enters a product in a type; and how far phi may be from it, because what is about halfway
    between two numbers of the type may be rounded to either (to first order)."""

    def to(numbers: Tensor) -> Tensor:
        return numbers.to(dtype).double()

    def either(numbers: Tensor, error: Tensor | float = HALFWAY) -> Tensor:
        """How far apart numbers with such errors may be once rounded; 0 where that is about the errors themselves."""
        apart = to(numbers + error) - to(numbers - error)
        return apart * (apart > 4 * HALFWAY)

    up_HM, up_H, down_MH, down_M = (of.detach() for of in mol.pair_parameters())
    row_P = torch.arange(len(query[0])).repeat_interleave(torch.tensor(bounds).diff())
    logits_PUI = to(query[0])[row_P] @ stored[0].double()[item_P].transpose(1, 2)
    logit_PM = logits_PUI.flatten(1)
    weights_PM = query[1].double()[row_P] * stored[1].double()[item_P]
    with torch.enable_grad():
        rounded_PM = to(logit_PM).requires_grad_()
        exact_PH = F.silu(rounded_PM @ to(up_HM).T + up_H)
        hidden_PH = to(exact_PH)
        gates_PM = F.softmax(F.silu(hidden_PH @ to(down_MH).T + down_M + weights_PM), dim=1)
        phi_P = (gates_PM * logit_PM).sum(1)
        of_logits, of_hidden = torch.autograd.grad(phi_P.sum(), [rounded_PM, hidden_PH])
    either_PM = either(logit_PM)
    # SiLU's slope is at most 1.1.
    error_PH = HALFWAY + 1.1 * either_PM @ to(up_HM).T.abs()
    either_PH = either(exact_PH.detach(), error_PH)
    return phi_P.detach(), (of_logits.abs() * either_PM).sum(1) + (of_hidden.abs() * either_PH).sum(1)


def check(
    shape: tuple[int, int, int, int], dtype: torch.dtype, item_P: Tensor, bounds: list[int], X: int, device: str
) -> None:
    mol = mol_of(*shape)
    query, item = sides_of(mol, len(bounds) - 1, X)
    stored = tuple(part.to(dtype) for part in item)
    products = dtype
    if dtype == torch.int8:
        scale, products = item[0].abs().max() / 127, torch.bfloat16
        query, stored = (query[0] * scale, query[1]), ((item[0] / scale).round().to(dtype), item[1].bfloat16())
    found = fused(mol, query, stored, item_P, bounds, device)
    exists = item_P >= 0
    expected, slack_P = rounded(mol, query, stored, item_P.clamp(min=0), bounds, products)
    assert (found[~exists] == -torch.inf).all()
    bound = BOUNDS[dtype] * (COARSE if device != "cpu" and dtype != torch.float32 else 1)
    if dtype == torch.float32 and len(item_P):
        with torch.no_grad():
            in_fp32 = Similarity.candidates(mol, query, item, item_P.clamp(min=0), bounds)
        bound = max(bound, 2 * float((in_fp32 - expected).abs().max()))
    off_P = (found.double() - expected).abs()[exists]
    assert (off_P <= bound + slack_P[exists]).all(), f"{shape}, {dtype}: off by up to {off_P.max()}, not {bound}"
    if dtype == torch.float32:
        similarity = plain(mol, query, item, item_P.clamp(min=0), bounds).double()
        torch.testing.assert_close(expected, similarity, rtol=0, atol=1e-5)


def check_shapes(device: str, few: bool) -> None:
    """Sizes that are and are not powers of two, in every type; tiles that are not full; pairs without an item."""
    item_P, bounds = candidates([23, 0, 70, 1], 90)
    item_P[::7] = -1
    for shape in [(3, 5, 20, 33), *SHAPES][: 1 if few else None]:
        for dtype in BOUNDS:
            if (shape, dtype) != (WIDE, torch.float32):
                check(shape, dtype, item_P, bounds, 90, device)


def check_cases(device: str, examples: int) -> None:
    size = st.sampled_from([1, 2, 3, 4, 8])

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(
        shape=st.tuples(size, size, st.sampled_from([1, 5, 16, 40]), st.sampled_from([1, 16, 33])),
        dtype=st.sampled_from(list(BOUNDS)),
        lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4),
        X=st.integers(1, 40),
    )
    def is_the_similarity(shape: tuple[int, int, int, int], dtype: torch.dtype, lengths: list[int], X: int) -> None:
        check(shape, dtype, *candidates(lengths, X), X, device)

    is_the_similarity()


def check_pairs_alone(device: str) -> None:
    """A score depends on its pair, not on its place, to the last bit; all queries may have all items. In the
    interpreter, whose products are numpy's, to the last bit only where numpy rounds a row alike in any place."""
    mol = mol_of(8, 8, 32, 128)
    query, item = sides_of(mol, 2, 150)
    whole = fused(mol, query, item, torch.arange(150).repeat(2), range(0, 301, 150), device)  # type: ignore[arg-type]
    some = torch.tensor([149, 17, 17, 3, 80])
    found, expected = (
        fused(mol, query, item, some, [0, 2, 5], device),
        whole[some + torch.tensor([0, 0, 150, 150, 150])],
    )
    exact = device != "cpu" or numpy_rounds_rows_alike()
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else BOUNDS[torch.float32])


def numpy_rounds_rows_alike() -> bool:
    """OpenBLAS does with AVX-512, and not with AVX2 alone."""
    left, right = np.random.default_rng(0).standard_normal((2, 64, 64), dtype=np.float32)
    return np.array_equal(np.roll(np.roll(left, 1, 0) @ right, -1, 0), left @ right)


def check_all(device: str, few: bool = False) -> None:
    check_shapes(device, few)
    check_pairs_alone(device)
    if not few:
        check_cases(device, 100 if device == "cpu" else 10)  # a GPU compiles each
