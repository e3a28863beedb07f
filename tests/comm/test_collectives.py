from typing import Any

import pytest
import torch
import two_ranks

from logitmix.comm.collectives import agreed, all_reduce_sum, barrier, broadcast_object
from logitmix.comm.process_group import process_group


def work() -> dict[str, Any]:
    with process_group("cpu", 60) as ranks:
        tensor = torch.arange(6).view(2, 3).t() * (ranks.rank + 1)
        total = all_reduce_sum(tensor, ranks)
        barrier(ranks)
        return {
            "total": total,
            "argument": tensor,
            "object": broadcast_object({"from": ranks.rank, "list": [1, "two"]}, ranks),
            "agreed": [agreed(flag, ranks) for flag in (False, True, ranks.rank == 0, ranks.rank == 1)],
        }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return two_ranks.run(work)


def test_all_reduce_sums_and_leaves_its_argument(results: list[dict[str, Any]]) -> None:
    summand = torch.arange(6).view(2, 3).t()
    for rank, result in enumerate(results):
        assert torch.equal(result["total"], 3 * summand)
        assert torch.equal(result["argument"], (rank + 1) * summand)


def test_broadcast_gives_rank_0s_object(results: list[dict[str, Any]]) -> None:
    assert [result["object"] for result in results] == [{"from": 0, "list": [1, "two"]}] * 2


def test_agreed_if_any_rank_says_so(results: list[dict[str, Any]]) -> None:
    assert [result["agreed"] for result in results] == [[False, True, True, True]] * 2


def test_identity_alone() -> None:
    tensor = torch.arange(4.0)
    with process_group("cpu", 60) as ranks:
        assert all_reduce_sum(tensor, ranks) is tensor
        assert broadcast_object(tensor, ranks) is tensor
        assert (agreed(True, ranks), agreed(False, ranks)) == (True, False)
        barrier(ranks)
