import pytest
import torch

from logitmix.trainer.parallel.ids import AskedIds


def test_a_lookup_has_small_bags_and_as_many_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AskedIds(torch.arange(63), [[20, 3], [0, 40]])
    found = asked.lookup(["a", "b"])
    assert found.lengths().view(2, 2, 3).tolist() == [[[16, 4, 0], [0, 0, 0]], [[3, 0, 0], [16, 16, 8]]]
    assert found.length_per_key() == [20, 43] and found.stride() == 6
    assert AskedIds(torch.arange(0), [[], []]).lookup([]).stride() == 2
    # Of many ids, bags are larger rather than more.
    monkeypatch.setattr("logitmix.trainer.parallel.ids.BAGS", 8)
    assert asked.lookup(["a", "b"]).lengths().tolist() == [20, 0, 0, 0, 3, 0, 20, 20]
