"""The h-indexer's dot product, section 4.1."""

import torch

from logitmix.modules.config import HIndexerConfig
from logitmix.modules.hindexer import HIndexer
from logitmix.modules.noise import Noise

EPS = 2**-24


def test_ranks_by_the_cosine_of_two_projections() -> None:
    hindexer = HIndexer(6, HIndexerConfig(dim=4, temperature=0.07))
    generator = torch.Generator().manual_seed(0)
    query_TD, item_ND = torch.randn(5, 6, generator=generator), torch.randn(5, 6, generator=generator)
    row = torch.arange(5)
    query, item = hindexer.query(query_TD, row), hindexer.item(item_ND, row)
    u_TH = query_TD.double() @ hindexer.query_projection.weight.detach().double().T
    x_NH = item_ND.double() @ hindexer.item_projection.weight.detach().double().T
    cosines = [[float(u @ x / (u @ u).sqrt() / (x @ x).sqrt()) for x in x_NH] for u in u_TH]
    expected = torch.tensor(cosines) / 0.07
    # Values up to 14, a few dozen roundings.
    torch.testing.assert_close(hindexer.all_pairs(query, item), expected, rtol=0, atol=20 * 32 * EPS)
    torch.testing.assert_close(hindexer.pairs(query, item), expected.diagonal(), rtol=0, atol=20 * 32 * EPS)
    assert query[0].shape == item[0].shape == (5, 4)


def test_has_two_matrices_and_none_of_a_pair() -> None:
    hindexer = HIndexer(6, HIndexerConfig(dim=4))
    assert {name: tuple(p.shape) for name, p in hindexer.named_parameters()} == {
        "query_projection.weight": (4, 6),
        "item_projection.weight": (4, 6),
    }
    assert hindexer.pair_parameters() == []


def test_has_no_dropout() -> None:
    hindexer, x, row = HIndexer(6, HIndexerConfig(dim=4)), torch.ones(2, 6), torch.arange(2)
    assert torch.equal(hindexer.query(x, row, Noise(1))[0], hindexer.query(x, row)[0])
    assert torch.equal(hindexer.item(x, row, Noise(1))[0], hindexer.item(x, row)[0])
