"""The pooled encoder against one position after the other, in FP64."""

import torch

from logitmix.modules.batch import Packing
from logitmix.modules.config import PooledConfig
from logitmix.modules.encoders.pooled import Pooled
from logitmix.modules.noise import Noise

D = 6


def pooled(dropout: float = 0.0) -> Pooled:
    encoder = Pooled(D, PooledConfig(hidden=5, dropout=dropout))
    encoder.reset_parameters(torch.Generator().manual_seed(0))
    return encoder


def test_each_query_is_made_of_the_mean_up_to_its_position() -> None:
    encoder, packing = pooled(), Packing(torch.tensor([3, 1, 4]))
    item_TD = torch.randn(8, D, generator=torch.Generator().manual_seed(1))
    query_TD = encoder(item_TD, packing, None)
    literal = pooled().double()
    for start, length in ((0, 3), (3, 1), (4, 4)):
        for t in range(length):
            mean_D = item_TD[start : start + t + 1].double().mean(0)
            hidden = literal.hidden.weight @ mean_D + literal.hidden.bias
            x = mean_D + literal.output.weight @ (hidden * torch.sigmoid(hidden)) + literal.output.bias
            expected = (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt()
            torch.testing.assert_close(query_TD[start + t].double(), expected, rtol=0, atol=1e-5)


def test_dropout_follows_the_global_rows() -> None:
    """Two parts of a batch drop what the whole drops."""
    encoder, noise = pooled(0.5), Noise(3)
    item_TD = torch.randn(7, D, generator=torch.Generator().manual_seed(1))
    whole = encoder(item_TD, Packing(torch.tensor([3, 4])), noise)
    parts = [
        encoder(item_TD[:3], Packing(torch.tensor([3])), noise),
        encoder(item_TD[3:], Packing(torch.tensor([4]), first_row=3), noise),
    ]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=1e-6)
    assert not torch.allclose(whole, encoder(item_TD, Packing(torch.tensor([3, 4])), None))
    assert encoder(item_TD[:0], Packing(torch.tensor([], dtype=torch.int64)), noise).shape == (0, D)
