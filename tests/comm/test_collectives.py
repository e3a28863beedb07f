from typing import Any

import pytest
import torch
import two_ranks

from logitmix.comm.collectives import agreed, all_gather_variable, all_reduce_sum, barrier, broadcast_object
from logitmix.comm.process_group import Ranks, process_group

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def part_of(rank: int, rows: list[int], dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(3 * rows[rank]) + 100 * rank
    return (values % 7 if dtype in (torch.uint8, torch.bool) else values).to(dtype).view(-1, 3)


def gathered(ranks: Ranks) -> dict[str, torch.Tensor]:
    results = {
        f"{rows} {dtype}": all_gather_variable(part_of(ranks.rank, rows, dtype), ranks)
        for dtype in DTYPES
        for rows in ([2, 3], [0, 4], [5, 0], [0, 0], [1, 1])
    }
    transposed = torch.arange(6.0).view(2, 3).t() + 10 * ranks.rank
    return results | {
        "one dimension": all_gather_variable(torch.full((ranks.rank + 1,), float(ranks.rank)), ranks),
        "strided": all_gather_variable(transposed, ranks),
    }


def work() -> dict[str, Any]:
    with process_group("cpu", 60) as ranks:
        tensor = torch.arange(6).view(2, 3).t() * (ranks.rank + 1)
        total = all_reduce_sum(tensor, ranks)
        barrier(ranks)
        return {
            "total": total,
            "argument": tensor,
            "gathered": gathered(ranks),
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[2, 3], [0, 4], [5, 0], [0, 0], [1, 1]], ids=str)
def test_gather_concatenates_by_rank(results: list[dict[str, Any]], rows: list[int], dtype: torch.dtype) -> None:
    expected = torch.cat([part_of(rank, rows, dtype) for rank in range(2)])
    for result in results:
        received = result["gathered"][f"{rows} {dtype}"]
        assert received.dtype == dtype
        assert torch.equal(received, expected)


def test_gather_takes_any_layout(results: list[dict[str, Any]]) -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    for result in results:
        assert torch.equal(result["gathered"]["one dimension"], torch.tensor([0.0, 1.0, 1.0]))
        assert torch.equal(result["gathered"]["strided"], torch.cat([transposed, transposed + 10]))


def test_broadcast_gives_rank_0s_object(results: list[dict[str, Any]]) -> None:
    assert [result["object"] for result in results] == [{"from": 0, "list": [1, "two"]}] * 2


def test_agreed_if_any_rank_says_so(results: list[dict[str, Any]]) -> None:
    assert [result["agreed"] for result in results] == [[False, True, True, True]] * 2


def test_identity_alone() -> None:
    tensor = torch.arange(4.0)
    with process_group("cpu", 60) as ranks:
        assert all_reduce_sum(tensor, ranks) is tensor
        assert all_gather_variable(tensor, ranks) is tensor
        assert broadcast_object(tensor, ranks) is tensor
        assert (agreed(True, ranks), agreed(False, ranks)) == (True, False)
        barrier(ranks)
