import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import two_ranks

from logitmix.comm import collectives
from logitmix.comm.collectives import (
    agreed,
    all_gather,
    all_reduce_sum,
    all_to_all,
    barrier,
    broadcast_object,
    on_all_ranks,
    on_first_rank,
    on_first_rank_at_length,
)
from logitmix.comm.process_group import Ranks, process_group


def raised(together: Callable[..., Any], failing: int, ranks: Ranks) -> str:
    """What this rank raises where a rank's action fails."""

    def action() -> None:
        if ranks.rank == failing:
            raise ValueError(f"rank {failing} cannot")

    try:
        together(action, ranks)
    except ValueError as error:
        return str(error)
    return ""


def at_length(ranks: Ranks) -> tuple[str, int]:
    """What rank 0 gives after a second and more, and how often it tells the others that it is at work."""

    def action() -> str:
        time.sleep(2.5 * collectives.SIGN_OF_LIFE)
        return f"rank {ranks.rank}, at length"

    with patch.object(collectives, "agreed", wraps=agreed) as told:
        return on_first_rank_at_length(action, ranks), told.call_count


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
            "gathered": all_gather(tensor, ranks),
            "exchanged": all_to_all([torch.arange(10 * ranks.rank + other) for other in range(2)], ranks),
            "first": on_first_rank(lambda: f"rank {ranks.rank}", ranks),
            "at_length": at_length(ranks),
            "all": on_all_ranks(lambda: ranks.rank, ranks),
            "raised": [
                raised(on_first_rank, 0, ranks),
                raised(on_first_rank, 1, ranks),
                raised(on_all_ranks, 1, ranks),
                raised(on_first_rank_at_length, 0, ranks),
            ],
        }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return two_ranks.run(work)


def test_all_ranks_get_what_they_should(results: list[dict[str, Any]]) -> None:
    summand = torch.arange(6).view(2, 3).t()
    for rank, result in enumerate(results):
        assert torch.equal(result["total"], 3 * summand) and torch.equal(result["argument"], (rank + 1) * summand)
        assert result["object"] == {"from": 0, "list": [1, "two"]}
        assert result["agreed"] == [False, True, True, True]
        assert [tensor.tolist() for tensor in result["gathered"]] == [other["argument"].tolist() for other in results]
        assert [part.tolist() for part in result["exchanged"]] == [[*range(rank)], [*range(10 + rank)]]
        assert (result["first"], result["all"]) == ("rank 0", [0, 1])
        assert result["raised"] == ["rank 0 cannot", "", "rank 1 cannot", "rank 0 cannot"]


def test_what_takes_long_does_not_look_like_a_lost_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        said, told = result["at_length"]
        assert said == "rank 0, at length" and told >= 3


def test_identity_alone() -> None:
    tensor = torch.arange(4.0)
    with process_group("cpu", 60) as ranks:
        assert all_reduce_sum(tensor, ranks) is tensor
        assert broadcast_object(tensor, ranks) is tensor
        assert all_gather(tensor, ranks)[0] is tensor
        assert all_to_all([tensor], ranks)[0] is tensor
        assert on_first_rank_at_length(lambda: tensor, ranks) is tensor
        assert (on_first_rank(lambda: tensor, ranks) is tensor, on_all_ranks(lambda: 3, ranks)) == (True, [3])
        assert (agreed(True, ranks), agreed(False, ranks)) == (True, False)
        barrier(ranks)
