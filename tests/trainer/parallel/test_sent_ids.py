import pytest
import torch
import two_ranks

from logitmix.comm.process_group import process_group
from logitmix.modules.embeddings import EmbeddingTable, embedding_collections, own_name
from logitmix.trainer.parallel.ids import AskedIds, IdExchange

ASKED = {0: [[[1, 2], [3]], [[40], [], [60, 70]]], 1: [[[10], []], [[], [500], []]]}
"""What each rank asks of each rank, which has two lists or three."""


def exchanged() -> list[AskedIds]:
    with process_group("cpu", 60) as ranks:
        asked = [[torch.tensor(ids, dtype=torch.int64) for ids in of_rank] for of_rank in ASKED[ranks.rank]]
        ids = IdExchange(asked, ranks.group, ranks.device, None)
        ids.send()
        ids.send()
        ids.wait()
        lists = len(asked[ranks.rank])
        return [ids.of(range(lists)), ids.of(range(1, 2)), ids.of(range(1, 1))]


def test_ids_come_list_by_list_and_rank_by_rank() -> None:
    """And whichever lists are taken."""
    first, second = two_ranks.run(exchanged)
    assert [each.values.tolist() for each in first] == [[1, 2, 10, 3], [3], []]
    assert [each.counts for each in first] == [[[2, 1], [1, 0]], [[1], [0]], [[], []]]
    assert [each.values.tolist() for each in second] == [[40, 500, 60, 70], [500], []]
    assert [each.counts for each in second] == [[[1, 0, 2], [0, 1, 0]], [[0], [1]], [[], []]]


def test_a_lookup_has_a_feature_for_each_list_and_a_row_for_each_rank() -> None:
    tables = [EmbeddingTable("a", 5, 4), EmbeddingTable("b", 3, 4)]
    collection = embedding_collections(tables)["dim_4"].to_empty(device="cpu")
    rows = {"a": torch.arange(20.0).view(5, 4), "b": -torch.arange(12.0).view(3, 4)}
    with torch.no_grad():
        for name, weight in collection.named_parameters():
            weight.copy_(rows[own_name(name.split(".")[-2])])
    asked = AskedIds(torch.tensor([4, 0, 4, 1, 2]), [[3, 0], [1, 1]])
    found = collection(asked.lookup(["a", "b"]))
    assert torch.equal(found["a"].values(), rows["a"][[4, 0, 4, 1]])
    assert torch.equal(found["b"].values(), rows["b"][[2]])
    assert found["a"].lengths().tolist() == [3, 1] and found["b"].lengths().tolist() == [0, 1]
    assert asked.by_rank == [3, 2]


def test_a_lookup_has_small_bags_and_as_many_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AskedIds(torch.arange(63), [[20, 3], [0, 40]])
    found = asked.lookup(["a", "b"])
    assert found.lengths().view(2, 2, 3).tolist() == [[[16, 4, 0], [0, 0, 0]], [[3, 0, 0], [16, 16, 8]]]
    assert found.length_per_key() == [20, 43] and found.stride() == 6
    assert AskedIds(torch.arange(0), [[], []]).lookup([]).stride() == 2
    # Of many ids, bags are larger rather than more.
    monkeypatch.setattr("logitmix.trainer.parallel.ids.BAGS", 8)
    assert asked.lookup(["a", "b"]).lengths().tolist() == [20, 0, 0, 0, 3, 0, 20, 20]
