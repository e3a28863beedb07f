"""The weighted mean of bags against its formula, and weights that requests give."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from logitmix.modules.features import FeatureEmbeddings
from logitmix.modules.kinds.ids import WeightedIds
from logitmix.modules.schema import Feature
from logitmix.modules.values import Values

FEATURE = Feature("interests", "user", "weighted_ids", table="topic")
BAGS = [([3, 1, 3], [0.5, 2.0, 1.5]), ([], []), ([2], [4.0]), ([0, 1], [0.0, 0.0]), ([4, 0], [0.0, 3.0])]
"""Ids and weights: an id twice, none, one, nothing but zeros, and one zero."""
VALUES = Values(
    torch.tensor([i for ids, _ in BAGS for i in ids]),
    torch.tensor([0, 3, 3, 4, 6, 8]),
    {"weights": torch.tensor([w for _, weights in BAGS for w in weights])},
)


def literal(row_VW: Tensor) -> Tensor:
    out = []
    for ids, weights in BAGS:
        total = sum(weights)
        out.append(sum((w / total * row_VW[i] for i, w in zip(ids, weights, strict=True) if total), 0 * row_VW[0]))
    return torch.stack(out)


def padded() -> Values:
    """As programs are given them."""
    ids = pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids, _ in BAGS], True, -1)
    return Values(ids, parallel={"weights": pad_sequence([torch.tensor(weights) for _, weights in BAGS], True, 0.0)})


@pytest.mark.parametrize("of", [VALUES, padded()], ids=["offsets", "padded"])
def test_embeddings_and_gradients_are_the_weighted_mean(of: Values) -> None:
    row_VW = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scale_RW = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    (found,), expected = (
        FeatureEmbeddings([FEATURE], {"topic": 8}, 8)({"topic": row_VW}, {"interests": of}),
        literal(row_VW),
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not found[1].any() and not found[3].any()
    ours, theirs = (torch.autograd.grad((out * scale_RW).sum(), row_VW)[0] for out in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_only_the_ratios_of_weights_count_and_equal_ones_are_those_of_ids() -> None:
    row_VW = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    kind = FEATURE.form
    for factor in (1e-30, 3e37):
        scaled = Values(VALUES.values, VALUES.offsets, {"weights": VALUES.parallel["weights"] * factor})
        torch.testing.assert_close(kind.embed(FEATURE, scaled, row_VW), kind.embed(FEATURE, VALUES, row_VW))
    equal = Values(VALUES.values, VALUES.offsets, {"weights": torch.full((8,), 7.0)})
    plain = Feature("interests", "user", "ids", table="topic")
    torch.testing.assert_close(kind.embed(FEATURE, equal, row_VW), plain.form.embed(plain, equal, row_VW))


def row_of(value: Any) -> int:
    return {"jazz": 1, "7": 2}.get(str(value), 0)


@pytest.mark.parametrize(
    ("value", "rows", "weights"),
    [
        (None, [], []),
        ({"jazz": 0.5, "new": 2}, [1, 0], [0.5, 2.0]),
        ({7: torch.tensor(1.5)}, [2], [1.5]),
        ([["jazz", 1], ("7", 0), ["jazz", 2], [None, 3]], [1, 2, 1], [1.0, 0.0, 2.0]),
    ],
)
def test_requests_have_ids_with_weights(value: Any, rows: list[int], weights: list[float]) -> None:
    assert WeightedIds().cell(FEATURE, value, row_of) == (rows, weights)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("jazz", "is 'jazz'; it must be a list"),
        (["jazz"], "has 'jazz'; it must have ids with weights: {id: weight} or [[id, weight]]"),
        ({"jazz": -0.5}, "has weight -0.5; it must be a finite number of 0 or more"),
        ({"jazz": float("nan")}, "is nan; it must be a finite number in FP32"),
    ],
)
def test_wrong_weights_are_named(value: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        WeightedIds().cell(FEATURE, value, row_of)
    assert str(error.value).startswith(said)
